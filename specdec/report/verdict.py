"""The verdict on a draft: the best decoding configuration at each temperature, in words and as
commands.

A configuration gains if the interval of its speedup over vanilla decoding lies above 1, and loses
if it lies below. The fastest of those that gain is recommended. An interval that contains 1 shows
neither, and a speedup without an interval supports no claim.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.engines.engine_interface import Engine
from specdec.engines.known_engines import ENGINES
from specdec.formats.draft_export import layout_of
from specdec.formats.layout import LAYOUT, OVERRIDES
from specdec.measure.engine_gain import EngineGain
from specdec.measure.results import NO_DRAFT, Described, Measured, Results
from specdec.targets.prompt_rendering import CHAT_TEMPLATE

EXPORT, TARGET = "my-head", "my-target"


@dataclass(frozen=True)
class ServingChoice:
    """The recommendation at a temperature."""

    temperature: float
    served: Measured | None  # the fastest way that gains something; None: the target alone
    unclaimed: str = ""  # why nothing is claimed
    undecided: Measured | None = None  # nothing gains, but the interval of this way contains 1


@dataclass(frozen=True)
class Command:
    """The lines of a command, and a description."""

    does: str
    lines: tuple[str, ...]


def choices(results: Results) -> list[ServingChoice]:
    """The recommendation at each measured temperature."""
    return [_choice(results, one.way.temperature) for one in results.asked]


def gains(results: Results) -> bool:
    """Whether any configuration gains at any temperature."""
    return any(choice.served for choice in choices(results))


def _choice(results: Results, temperature: float) -> ServingChoice:
    ways = [one for one in results.measured if one.way.temperature == temperature]
    claiming = [one for one in ways if one.speedup.claims]
    if results.times_without_interval or not claiming:
        return ServingChoice(temperature, None, results.times_without_interval or "no interval")
    gaining = [one for one in claiming if one.speedup.low > 1]
    if gaining:
        return ServingChoice(temperature, max(gaining, key=lambda one: one.speedup.value))
    open_ = [one for one in claiming if one.speedup.high >= 1]
    undecided = max(open_, key=lambda one: one.speedup.value, default=None)
    return ServingChoice(temperature, None, undecided=undecided)


def shown_ways(results: Results) -> list[Measured]:
    """The configuration served at each temperature or, where none gains, the requested one."""
    both = zip(choices(results), results.asked, strict=True)
    return [choice.served or asked for choice, asked in both]


def exceptions(results: Results) -> str:
    """A sentence with the slices in which drafting does not pay although it is recommended; empty
    if there are none."""
    said = []
    for one in [choice.served for choice in choices(results) if choice.served]:
        slow = [
            f"{x.name} ({x.speedup.text(2)})" for x in one.slices.values() if x.verdict == NO_DRAFT
        ]
        if slow:
            said.append(f"at T = {one.way.temperature:g} with {', '.join(slow)}")
    return f"Do not draft {' or '.join(said)}." if said else ""


def named(way: Described, results: Results) -> str:
    """A short description of a decoding configuration."""
    if way.drafter != results.drafter:
        return way.title
    size = way.gamma if way.chain else way.nodes
    tokens = f"{size} token{'s' * (size != 1)}{' at most' * (way.draft_length != 'fixed')}"
    return f"chains of {tokens}" if way.chain else f"a tree of {tokens}"


def sentence(results: Results) -> str:
    """The verdict in a sentence, followed by sentences on restrictions."""
    choice = choices(results)
    served = [c.served for c in choice if c.served]
    idle = [
        f"T = {c.temperature:g}" for c in choice if not (c.served or c.unclaimed or c.undecided)
    ]
    undecided = [one for c in choice if (one := c.undecided)]
    silent = [f"T = {c.temperature:g}" for c in choice if c.unclaimed]
    parts = [f"with {_gain(ways, results)}" for ways in _by_name(served, results).values()]
    if idle:
        parts.append(f"at {' and '.join(idle)} nothing is gained")
    for one in undecided:
        parts.append(
            f"at T = {one.way.temperature:g} no gain is shown ({_article(one.way, results)}: "
            f"{_times(one)})"
        )
    if silent:
        why = next(c.unclaimed for c in choice if c.unclaimed)
        parts.append(f"nothing can be claimed at {' and '.join(silent)} ({why})")
    said = "; ".join(parts)
    if served:
        said = f"Serve it {said}"
    elif idle or undecided:
        said = f"Serve the target alone: {said}"
    if served or idle or undecided:
        where = "one prompt at a time" if results.batch == 1 else f"at batch {results.batch}"
        said += f" (measured {where})"
    said = f"{said[0].upper()}{said[1:]}."
    lossy = [one.way for one in served if not one.way.lossless]
    if lossy:
        at = " and ".join(f"T = {way.temperature:g}" for way in lossy)
        said += f" Verification by {lossy[0].verification} is lossy: "
        said += f"responses at {at} are not the target's own."
    if served and results.shift is not None:
        said += (
            f" The target was adapted along with the draft: {results.shift.same.value:.0%} of "
            "the original's greedy responses stay the same."
        )
    return said


def _by_name(measured: Sequence[Measured], results: Results) -> dict[str, list[Measured]]:
    """Figures by the description of their decoding configuration."""
    by_name: dict[str, list[Measured]] = {}
    for one in measured:
        by_name.setdefault(_article(one.way, results), []).append(one)
    return by_name


def _article(way: Described, results: Results) -> str:
    return f"the {way.title}" if way.drafter != results.drafter else named(way, results)


def _gain(measured: Sequence[Measured], results: Results) -> str:
    """A decoding configuration, and its speedup at each temperature."""
    name, times = _article(measured[0].way, results), [_times(one) for one in measured]
    first = measured[0].way.temperature
    if len(measured) == 1:
        return f"{name} at T = {first:g}: {times[0]}"
    each = (f"{t} at T = {one.way.temperature:g}" for t, one in zip(times, measured, strict=True))
    return f"{name}: {', '.join(each)}"


def _times(one: Measured) -> str:
    value, brackets, interval = one.speedup.text(2).partition(" [")
    return f"{value} times as fast{brackets}{interval}"


def sentence_in_engine(gain: EngineGain) -> str:
    """What the draft gains in an engine, in a sentence."""
    times = f"{gain.speedup.text(2).replace(' [', ' times as fast [', 1)}"
    if not gain.speedup.claims:
        return f"Nothing can be claimed in {gain.engine} (measured on {gain.prompts} prompts)."
    if gain.speedup.low > 1:
        return f"Serve it in {gain.engine}: {times}."
    if gain.speedup.high < 1:
        return f"Serve the target alone in {gain.engine}: drafting does not pay there ({times})."
    return f"No gain is shown in {gain.engine} ({times})."


def costs_in_engine(gain: EngineGain) -> str:
    """Why a draft pays in an engine or not, in sentences."""
    cost, tau = gain.step_cost, gain.tau.value
    return (
        f"There, a speculation step takes as long as {cost:.2f} plain steps: {gain.v:.2f} to "
        f"verify {gain.gamma + 1} tokens (v), and {gain.c:.2f} to draft each (c). It yields "
        f"{tau:.2f} tokens (τ), and pays where τ is larger than v + γc."
    )


def commands(results: Results) -> list[Command]:
    """The commands that decode as the verdict recommends, and those with which engines serve the
    draft. Empty if the results do not have the draft's folder."""
    if not results.draft:
        return []
    served = [choice.served for choice in choices(results) if choice.served]
    own = [
        Command(f"With {name}, by our own decoder:", (_generate(ways[0], results),))
        for name, ways in _by_name(served, results).items()
    ]
    engines = [_by_engine(engine, results) for engine in ENGINES.values()]
    return [*own, *(command for command in engines if command)]


def _generate(one: Measured, results: Results) -> str:
    """The command that decodes with the measured configuration."""
    way, options = one.way, ["--chat"]
    draft = results.draft if way.drafter == results.drafter else results.combined
    if way.paths:
        paths = json.dumps(way.paths, separators=(",", ":"))
        options.append(f"--tree static --paths {shlex.quote(paths)}")
    elif not way.chain:
        options.append(f"--tree {way.tree} --gamma {way.gamma} --nodes {way.nodes}")
        options += [f"--branches {way.branches}"] if way.branches else []
    elif way.drafter == results.drafter:
        options.append(f"--gamma {way.gamma}")
    if way.draft_length != "fixed":
        options.append(f"--draft-length {way.draft_length}")
        policy = (f"{name}={value}" for name, value in way.draft_length_settings.items())
        options += (
            [f"--draft-length-settings {shlex.join(policy)}"] if way.draft_length_settings else []
        )
    settings: dict[str, tuple[bool, object]] = {
        "--temperature": (way.temperature > 0, f"{way.temperature:g}"),
        "--top-k": (way.top_k > 0, way.top_k),
        "--top-p": (way.top_p < 1, way.top_p),
        "--verification": (way.asked != "auto", way.asked),
        "--greedy-draft": (way.greedy_draft, ""),
        "--compile": (way.compiled, ""),
    }
    options += [f"{name} {value}".strip() for name, (differs, value) in settings.items() if differs]
    return " ".join(["scripts/generate", draft, *options])


def as_engines_draft(results: Results) -> list[Measured]:
    """The figures of the draft alone in chains of one length, as engines draft."""
    chains = [one for one in results.measured if one.way.drafter == results.drafter]
    return [one for one in chains if one.way.chain and one.way.draft_length == "fixed"]


def _by_engine(engine: Engine, results: Results) -> Command | None:
    """The command with which an engine serves the draft, or None. An engine drafts chains, even if
    a tree is fastest here."""
    name, chains = engine.layouts.get(results.drafter), as_engines_draft(results)
    if name is None or name in results.rejected_layouts or not chains:
        return None
    layout = layout_of(results.drafter, name)
    draft, served = f"{EXPORT}{layout.suffix}", f"{TARGET}{layout.suffix}"
    gamma = max(chains, key=lambda one: one.speedup.value).way.gamma
    overrides = f"{EXPORT}/{OVERRIDES}" if layout.overrides else None
    template = None
    if results.rendering.chat_template is not None:  # of an export that is one file, the run's
        run = Path(shlex.split(results.draft)[0]).parent
        template = str((run if layout.suffix else Path(EXPORT)) / CHAT_TEMPLATE)
    options = engine.chat_options(results.rendering.arguments, template)
    serving = engine.shown_commands(results.drafter, draft, served, gamma, overrides, options)
    alike: dict[float, Measured] = {}
    for one in chains:
        if one.way.gamma == gamma:  # the first is the one that was asked for
            alike.setdefault(one.way.temperature, one)
    here = ", ".join(f"{_times(one)} at T = {t:g}" for t, one in alike.items())
    exporting = f"scripts/export {results.draft} --to {draft}"
    # a file of the target, which may be quantised, is the user's own
    exporting += "" if layout.suffix else f" --with-target {served}"
    exporting += "" if layout.suffix or name == LAYOUT else f" --layout {name}"
    return Command(
        f"In {engine.title}, which drafts chains (here, chains of {gamma} are {here}):",
        (exporting, *serving),
    )

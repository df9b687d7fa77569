"""The first screen of a report: the draft and its training data, the verdict, a picture of all
decoding configurations, the commands that serve the best one, and a few responses."""

from pathlib import Path

from specdec.measure.engine_gain import EngineGain
from specdec.measure.results import Measured, Results, Sample
from specdec.report import verdict
from specdec.report.markdown import TAGS, code, escaped, lines, marked, table, text

SAMPLES = 3
MARKED = {kind: marked([(kind, kind)]) for kind in TAGS}
LEGEND = (
    f"Drafted tokens were {MARKED['accepted']}, or {MARKED['rejected']} and "
    f"{MARKED['corrected']} by the target, which adds a {MARKED['bonus']} to a whole draft."
)


def title(results: Results) -> str:
    """A line with the draft and its training data."""
    done = "measured on" if results.training is None else "trained on"
    return f"{results.name}: {results.drafter} for {results.target}, {done} {results.data}"


def screen(results: Results, picture: Path | None) -> list[str]:
    """The first screen, in blocks of Markdown."""
    escaped_results, commands = escaped(results), verdict.commands(results)
    blocks = [f"# {title(escaped_results)}", f"**{verdict.sentence(escaped_results)}**"]
    if exceptions := verdict.exceptions(escaped_results):
        blocks.append(exceptions)
    if picture is not None:
        blocks.append(f"![speedup of each configuration over vanilla decoding]({picture.name})")
    if commands:
        gains = verdict.gains(results)
        blocks.append("## How to serve it" if gains else "## How to try it in an engine")
    for command in commands:
        blocks += [text(command.does), code(command.lines)]
    if results.in_engine is not None:
        blocks += _in_engine(results.in_engine)
    return blocks + _responses(results.asked[0])


def _in_engine(gain: EngineGain) -> list[str]:
    """What the draft gains in an engine on this machine, why, and by which command."""
    engine, weights = text(gain.engine), text(gain.weights)
    columns = ["τ", "tokens/s", "speedup", "same responses"]
    drafted = [gain.tau.text(2), gain.tokens_per_second.text(1), f"**{gain.speedup.text(2)}**"]
    rows = {
        f"with the draft, {gain.gamma} tokens a step": [
            *drafted,
            f"{gain.identical} of {gain.prompts}",
        ],
        "without": ["1", gain.plain_tokens_per_second.text(1), "1"],
    }
    return [
        f"## In {engine}, on the target in {weights}",
        f"**{text(verdict.sentence_in_engine(gain))}**",
        table("", columns, rows),
        f"{gain.prompts} prompts, answered in turn with and without the draft, one at a time, with "
        f"at most {gain.max_new_tokens} tokens each, at T = 0; times are the engine's own, after "
        f"the first token of a response. {verdict.costs_in_engine(gain)}",
        *([code(gain.commands)] if gain.commands else []),
    ]


def _responses(one: Measured) -> list[str]:
    """The user's last turn, the turns before it, and the response."""
    if not one.samples:
        return []
    blocks = [f"## Responses at T = {one.way.temperature:g}"]
    if any(sample.pieces for sample in one.samples[:SAMPLES]):
        blocks.append(LEGEND)
    for sample in one.samples[:SAMPLES]:
        said = [lines(sample.prompt)]
        if sample.earlier:
            turns = [*sample.earlier, ("user", sample.prompt)]
            said = [f"**{text(role)}:** {lines(words)}" for role, words in turns]
        blocks.append("\n>\n".join(f"> {turn}".replace("\n", "\n> ") for turn in said))
        blocks.append(f"{_response(sample)} *(τ {sample.tau:.2f})*")
    return blocks


def _response(sample: Sample) -> str:
    """A response with its drafted tokens marked, if they are known. A rejected draft does not break
    a line of the response."""
    if not sample.pieces:
        return lines(sample.response)
    return marked(
        (kind, words.replace("\n", "↵") if kind == "rejected" else words)
        for kind, words in sample.pieces
    )

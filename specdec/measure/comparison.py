"""Compares two drafts for one target, prompt by prompt.

Every figure comes with the difference B - A and the ratio B / A. The intervals are paired: both
drafts answered the same prompts, so the difficulty of a prompt for both does not widen them (see
`theory.intervals`). Prompts of one conversation are one observation. α is compared over the
positions of the target's own vanilla responses, τ over the speculation steps, and the speedup over
the batches that were timed in both.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from specdec.errors import require
from specdec.files import write_json
from specdec.measure.results import BatchTimes, Described, Measured, PromptCounts, Results
from specdec.theory.intervals import (
    Groups,
    Interval,
    paired_difference,
    paired_products,
    paired_quotient,
    summed_by,
)

COMPARED_FILE = "compare.json"


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of both drafts. `prompts` is the number of prompts behind it, and `counted` that of
    positions (of α), speculation steps (of τ) or timed tokens (of a speedup), of A and of B."""

    name: str
    a: float
    b: float
    difference: Interval  # B - A
    ratio: Interval  # B / A
    prompts: int
    counted: tuple[int, int]


@dataclass(frozen=True)
class ComparedWay:
    """The figures of one decoding configuration at one temperature; τ is the first."""

    title: str
    temperature: float
    figures: list[ComparedFigure]

    def figure(self, name: str) -> ComparedFigure | None:
        return next((one for one in self.figures if one.name == name), None)


@dataclass
class Comparison:
    """Two drafts on the prompts that both answered. The first entries, one for each temperature,
    are the requested decoding configuration."""

    a: str
    b: str
    target: str
    prompts: int
    ways: list[ComparedWay]
    notes: list[str] = field(default_factory=list)  # restrictions of the comparison

    @property
    def asked(self) -> list[ComparedWay]:
        """The entries of the requested decoding configuration, one for each temperature."""
        return [way for way in self.ways if way.title == self.ways[0].title]

    def write(self, folder: Path) -> None:
        write_json(folder / COMPARED_FILE, asdict(self))


def compared(a: Results, b: Results, names: tuple[str, str]) -> Comparison:
    """The comparison of two measurements with these names, on the prompts that they share. Raises
    UserError for different targets, no temperature or prompt in common, and results without figures
    by prompt."""
    for name, one in zip(names, (a, b), strict=True):
        by_prompt = all(len(x.prompts) == len(one.prompt_keys) > 0 for x in one.measured)
        require(
            by_prompt and bool(one.target_fingerprint),
            f"{name} has no figures by prompt, as an earlier version wrote it: measure the draft "
            "again with scripts/evaluate",
        )
        require(
            one.shift is None,
            f"{name}: this target was adapted along with its draft, so its responses are not those "
            "of another target: compare drafts of one target",
        )
    require(
        a.target_fingerprint == b.target_fingerprint,
        f"{names[0]} is for the target {a.target} and {names[1]} for another, {b.target}: compare "
        "drafts of one target",
    )
    first = [x.way for x in a.asked], [x.way for x in b.asked]
    require(
        any(_sampling(x) == _sampling(y) for x in first[0] for y in first[1]),
        f"{names[0]} was measured at {_at(first[0])} and {names[1]} at {_at(first[1])}: measure "
        "both at the same temperatures, with the same top_k and top_p",
    )
    shared = [key for key in dict.fromkeys(a.prompt_keys) if key in {*b.prompt_keys}]
    require(
        bool(shared),
        f"{names[0]} and {names[1]} were measured on different prompts: give the two drafts, or "
        "measure both with scripts/evaluate --prompts on one file",
    )
    sides = _Side(a, shared), _Side(b, shared)
    ways = [
        _compared_way(title, sides, one, other)
        for title, one, other in _pairs(a, b)
        if _sampling(one.way) == _sampling(other.way)
    ]
    return Comparison(*names, a.target, len(shared), ways, [*_notes(a, b, names, len(shared))])


class _Side:
    """One of the two measurements, with the indices of the shared prompts in it."""

    def __init__(self, results: Results, shared: Sequence[str]) -> None:
        self.keys, self.shared = results.prompt_keys, shared
        self.places = [self.keys.index(key) for key in shared]
        conversations = results.conversations or range(len(self.keys))
        self.groups = [conversations[place] for place in self.places]  # of the shared prompts
        self.group_of = dict(zip(self.keys, conversations, strict=True))

    def counts(self, one: Measured) -> list[PromptCounts]:
        return [one.prompts[place] for place in self.places]

    def batches(self, one: Measured) -> dict[tuple[str, ...], BatchTimes]:
        """The timed batches by their prompts."""
        batches, start = {}, 0
        for batch in one.times:
            batches[tuple(self.keys[start : start + batch.prompts])] = batch
            start += batch.prompts
        return batches


def _compared_way(
    title: str, sides: tuple[_Side, _Side], one: Measured, other: Measured
) -> ComparedWay:
    counts, groups = (sides[0].counts(one), sides[1].counts(other)), sides[0].groups

    def summed(values: Sequence[float]) -> list[float]:
        return summed_by(groups, values)

    steps = [
        (summed([c.emitted for c in of]), summed([c.speculation_steps for c in of]))
        for of in counts
    ]
    figures = [_figure("τ", [[steps[0]]], [[steps[1]]], len(counts[0]), _totals(steps))]
    deepest = min(len(c.positions) for of in counts for c in of)
    for k in range(deepest):
        alpha = [
            (summed([c.at_way(m.way)[k] for c in of]), summed([c.positions[k] for c in of]))
            for m, of in zip((one, other), counts, strict=True)
        ]
        name = f"α at depth {k}"
        figures.append(_figure(name, [[alpha[0]]], [[alpha[1]]], len(counts[0]), _totals(alpha)))
    batches = sides[0].batches(one), sides[1].batches(other)
    both = [keys for keys in batches[0] if keys in batches[1]]
    if both:
        times = [[of[keys] for keys in both] for of in batches]
        timed = {key for keys in both for key in keys}
        all_timed = timed.issuperset(sides[0].shared)
        of_batch = [sides[0].group_of[keys[0]] for keys in both]
        ours, theirs = (
            _speedup(of, of_batch, None if all_timed else kept)
            for of, kept in zip(times, steps, strict=True)
        )
        tokens = sum(x.tokens for x in times[0]), sum(x.tokens for x in times[1])
        figures.append(_figure("speedup", ours, theirs, len(timed), tokens))
    return ComparedWay(title, one.way.temperature, figures)


def _speedup(
    times: Sequence[BatchTimes],
    groups: Sequence[int],
    kept: tuple[Sequence[float], Sequence[float]] | None,
) -> Groups:
    """The ratios whose product is the speedup, as in `Measured`: the clock's alone or, with the
    counts `kept` of prompts that were not all timed, tokens and seconds per step. Batches of one
    group, a conversation, are one observation."""

    def summed(values: Sequence[float]) -> list[float]:
        return summed_by(groups, values)

    plain = summed([x.plain_seconds for x in times])
    if kept is None:
        return [[(plain, summed([x.seconds for x in times]))]]
    seconds = summed([x.speculation_seconds for x in times])
    a_step = summed([x.row_steps for x in times]), seconds
    return [[kept], [(plain, summed([x.tokens for x in times])), a_step]]


def _figure(
    name: str, a: Groups, b: Groups, prompts: int, counted: tuple[int, int]
) -> ComparedFigure:
    difference, ratio = paired_difference(b, a), paired_quotient(b, a)
    b_value, a_value = paired_products(b, a)
    return ComparedFigure(name, a_value, b_value, difference, ratio, prompts, counted)


def _totals(ratios: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[int, int]:
    first, second = (int(sum(denominators)) for _, denominators in ratios)
    return first, second


def _pairs(a: Results, b: Results) -> list[tuple[str, Measured, Measured]]:
    """The pairs to compare: the requested configurations, then others with the same title, with one
    entry for each temperature. If the requested configuration is the fastest, it counts as both."""
    pairs: list[tuple[str, Measured, Measured]] = []

    def add(title: str, ours: Sequence[Measured], theirs: Sequence[Measured]) -> None:
        for one in ours:
            for other in theirs:
                if one.way.temperature == other.way.temperature:
                    pairs.append((title, one, other))

    titles = a.asked[0].way.title, b.asked[0].way.title
    add(titles[0] if titles[0] == titles[1] else " / ".join(titles), a.asked, b.asked)
    for title in dict.fromkeys([*a.others, *b.others]):
        ours, theirs = (_titled(one, title) for one in (a, b))
        add(title, ours, theirs)
    return pairs


def _titled(results: Results, title: str) -> list[Measured]:
    entries = [*results.others.get(title, [])]
    known = {one.way.temperature for one in entries}
    if title == "fastest":
        entries += [x for x in results.asked if x.fastest and x.way.temperature not in known]
    return entries


def _sampling(way: Described) -> tuple[float, int, float]:
    """The settings on which p depends."""
    return (way.temperature, way.top_k, way.top_p) if way.temperature else (0.0, 0, 1.0)


def _at(ways: Sequence[Described]) -> str:
    def said(way: Described) -> str:
        more = f", top_k={way.top_k}" * (way.top_k > 0) + f", top_p={way.top_p:g}" * (way.top_p < 1)
        return f"T = {way.temperature:g}{more}"

    return " and ".join(map(said, ways))


def _notes(a: Results, b: Results, names: tuple[str, str], shared: int) -> list[str]:
    """Further differences between the two measurements, in a sentence each."""
    notes = []
    for name, one in zip(names, (a, b), strict=True):
        if others := len({*one.prompt_keys}) - shared:
            notes.append(f"{name} was also measured on {others} other prompts: they are ignored.")
    differing: dict[str, Callable[[Results], object]] = {
        "max_new_tokens": lambda one: one.max_new_tokens,
        "batch": lambda one: one.batch,
        "prompt rendering": lambda one: one.rendering,
        "dtype": lambda one: one.machine.dtype,
        "verification": lambda one: "/".join(x.way.verification for x in one.asked),
    }
    for name, of in differing.items():
        if of(a) != of(b):
            both = f": {of(a)} and {of(b)}" if name != "prompt rendering" else ""
            notes.append(f"{name} differs{both}.")
    machines = [(x.machine.processor, x.machine.threads, x.machine.device) for x in (a, b)]
    if machines[0] != machines[1]:
        notes.append(
            "The machines differ: compare τ and α, not speedups, which depend on the machine."
        )
    return notes

"""Figures of slices (the prompts of one category, language, turn, …), and whether drafting pays in
each.

τ comes from all prompts of a slice. The costs come from the timed prompts, since the seconds of a
step hardly depend on the prompt. With s seconds per vanilla step and r per speculation step,
drafting pays where τ is above the break-even r / s, and the speedup is τ / (r / s): Theorem 3.8 of
Leviathan et al. 2023 with measured costs. `timed_speedup` is by the clock of the slice's own timed
prompts, to compare it with.

Intervals are over conversations. With many slices some verdicts are wrong by chance, so each says
whether it also holds at the level 1 - (1 - LEVEL) / m for m slices (Bonferroni).
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specdec.measure.results import (
    DRAFT,
    NO_DRAFT,
    UNCLEAR,
    BatchTimes,
    PromptCounts,
    Slice,
)
from specdec.theory.intervals import (
    FEWEST,
    LEVEL,
    Counts,
    Interval,
    product_interval,
    ratio_interval,
    share_interval,
    summed_by,
)

ENOUGH = 6  # minimum number of conversations for a verdict
MOST = 12  # maximum number of slices of one property
OTHERS = "others"  # the rarest values beyond `MOST`
PROMPT_TOKENS, RESPONSE_TOKENS = "prompt tokens", "response tokens"
EDGES = (32, 128, 512, 2048, 8192)  # of the ranges of lengths, the same in every report


@dataclass(frozen=True)
class PromptTraits:
    """The name of a prompt's `conversation` (empty: it is the only prompt of its own), and the
    values of its properties by name, such as {"category": "coding", "turn": "2"}."""

    conversation: str = ""
    values: dict[str, str] = field(default_factory=dict)


def length_range(tokens: int) -> str:
    """The range of lengths that holds a number of tokens, in words."""
    if tokens >= EDGES[-1]:
        return f"{EDGES[-1]:,} or more"
    below = next(edge for edge in EDGES if tokens < edge)
    least = max((edge for edge in EDGES if edge <= tokens), default=0)
    return f"{least:,} to {below - 1:,}"


def conversations_of(traits: Sequence[PromptTraits], prompts: int) -> list[int]:
    """For each prompt, the index of its conversation. A prompt without traits is a
    conversation by itself."""
    numbers: dict[str | int, int] = {}
    named = [t.conversation or i for i, t in enumerate(traits[:prompts])]
    keys = [*named, *range(len(named), prompts)]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def slices(
    traits: Sequence[PromptTraits],
    lengths: Sequence[tuple[int, int]],
    counts: Sequence[PromptCounts],
    times: Sequence[BatchTimes],
    same: Sequence[bool] | None = None,
) -> dict[str, Slice]:
    """The slices, by name, of prompts with these traits, lengths (in tokens, of the prompt and of
    the vanilla response) and counts; none for a property that has one value. `times` are those of
    the first prompts, in batches. `same` tells which responses equal the vanilla ones."""
    groups = conversations_of(traits, len(counts))
    values = [
        {**(traits[i].values if i < len(traits) else {}), **_lengths(*lengths[i])}
        for i in range(len(counts))
    ]
    parts = [part for name in _properties(values) for part in _parts(name, values)]
    costs = _Costs(times, groups)
    every = (
        _slice(by, value, places, groups, counts, costs, same, len(parts))
        for by, value, places in parts
    )
    return {one.name: one for one in every}


def _lengths(prompt: int, response: int) -> dict[str, str]:
    return {PROMPT_TOKENS: length_range(prompt), RESPONSE_TOKENS: length_range(response)}


def _properties(values: Sequence[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for of_prompt in values for name in of_prompt))


def _parts(name: str, values: Sequence[dict[str, str]]) -> Iterable[tuple[str, str, list[int]]]:
    """The values of a property, each with the places of its prompts. The rarest are merged."""
    counted = Counter(of[name] for of in values if name in of)
    if len(counted) < 2:
        return
    kept = None if len(counted) <= MOST else MOST - 1
    frequent = [value for value, _ in counted.most_common(kept)]
    places: dict[str, list[int]] = {}
    for i, of in enumerate(values):
        if name in of:
            places.setdefault(of[name] if of[name] in frequent else OTHERS, []).append(i)
    for value in sorted(places, key=_in_order):
        yield name, value, places[value]


def _in_order(value: str) -> tuple[bool, int, str]:
    """By number where a value begins with one, else by name, and `OTHERS` last."""
    digits = value.split(" ")[0].replace(",", "")
    return value == OTHERS, int(digits) if digits.isdecimal() else 0, value


class _Costs:
    """The timed batches, the prompts and the conversation of each, and the seconds per vanilla step
    and per speculation step, by conversation."""

    def __init__(self, times: Sequence[BatchTimes], groups: Sequence[int]) -> None:
        self.times, self.prompts, start = times, list[range](), 0
        for batch in times:
            self.prompts.append(range(start, start + batch.prompts))
            start += batch.prompts
        self.groups = [groups[prompts.start] for prompts in self.prompts]  # of the first prompt
        self.known = len({*self.groups}) >= FEWEST

    @property
    def vanilla(self) -> Counts:
        seconds, tokens = [t.plain_seconds for t in self.times], [t.tokens for t in self.times]
        return summed_by(self.groups, seconds), summed_by(self.groups, tokens)

    @property
    def speculative(self) -> Counts:
        seconds, steps = (
            [t.speculation_seconds for t in self.times],
            [x.row_steps for x in self.times],
        )
        return summed_by(self.groups, seconds), summed_by(self.groups, steps)

    def break_even(self) -> Interval:
        """The τ at which a token costs as much with the draft as without."""
        seconds, tokens = self.vanilla
        figure = product_interval([self.speculative, (tokens, seconds)])
        return figure if self.known else figure.without_interval()

    def speedup(self, kept: Counts, level: float = LEVEL) -> Interval:
        """The speedup of prompts whose speculation steps `kept` so many tokens."""
        seconds, steps = self.speculative
        figure = product_interval([kept], [self.vanilla, (steps, seconds)], level=level)
        return figure if self.known else figure.without_interval()

    def timed(self, places: Sequence[int]) -> Interval | None:
        """The speedup by the clock of the batches with prompts of these places alone; None if they
        are of fewer than `FEWEST` conversations."""
        own = [n for n, prompts in enumerate(self.prompts) if {*prompts} <= {*places}]
        of = [self.groups[n] for n in own]
        if len({*of}) < FEWEST:
            return None
        plain = summed_by(of, [self.times[n].plain_seconds for n in own])
        return ratio_interval(plain, summed_by(of, [self.times[n].seconds for n in own]))


def _slice(
    by: str,
    value: str,
    places: Sequence[int],
    groups: Sequence[int],
    counts: Sequence[PromptCounts],
    costs: _Costs,
    same: Sequence[bool] | None,
    slices_looked_at: int,
) -> Slice:
    own, of = [counts[i] for i in places], [groups[i] for i in places]

    def summed(values: Iterable[float]) -> list[float]:
        return summed_by(of, [*values])

    kept = summed(c.emitted for c in own), summed(c.speculation_steps for c in own)
    positions = summed(c.positions[0] if c.positions else 0 for c in own)
    speedup, enough = costs.speedup(kept), len({*of}) >= ENOUGH
    strict = costs.speedup(kept, 1 - (1 - LEVEL) / slices_looked_at)
    verdict = verdict_on(speedup) if enough else ""
    forced = any(positions)
    return Slice(
        by=by,
        value=value,
        prompts=len(own),
        conversations=len({*of}),
        tau=ratio_interval(*kept).within(1, math.inf),
        break_even=costs.break_even(),
        speedup=speedup,
        verdict=verdict,
        corrected=verdict in (DRAFT, NO_DRAFT) and verdict_on(strict) == verdict,
        timed_speedup=costs.timed(places),
        identical=None if same is None else sum(same[i] for i in places),
        sampled=share_interval(summed(c.sampled[0] for c in own), positions) if forced else None,
        greedy=share_interval(summed(c.greedy[0] for c in own), positions) if forced else None,
    )


def verdict_on(speedup: Interval) -> str:
    """Whether to draft where the speedup has this interval; empty if there is none."""
    if not speedup.claims:
        return ""
    return DRAFT if speedup.low > 1 else NO_DRAFT if speedup.high < 1 else UNCLEAR

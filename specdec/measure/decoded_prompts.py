"""Prompts answered by vanilla decoding and with each decoding configuration: the first ones are
timed in turn, and the others are decoded many at a time, for counts (see evaluation.py)."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from specdec.context import HiddenStateSpec
from specdec.decoding.config import DecodeConfig
from specdec.decoding.fitting import rows_that_fit
from specdec.decoding.generation import Generation, SpeculationStep
from specdec.decoding.way import Way
from specdec.errors import is_out_of_memory
from specdec.measure.choosing import LEARNING
from specdec.measure.costs import BRIEF_TIMED
from specdec.measure.results import BatchTimes
from specdec.measure.setup import Setup
from specdec.runtime.device import release
from specdec.theory.intervals import FEWEST

# Of the time for one temperature: when timing ends, and when decoding ends. `BRIEF_TOGETHER`
# prompts are then decoded between two looks at the clock.
TIMED, COUNTED, BRIEF_TOGETHER = 0.5, 0.75, 16
LEAST_PROMPTS = 12  # prompts for which responses are shortened, where little time remains
FEWEST_PROMPTS = 6  # prompts that are decoded, however little time remains
LEAST_TOKENS = 32  # of a response's limit, however little time remains
TOGETHER = 0.4  # estimated time for each of many prompts decoded together, in that of one alone


@dataclass
class Until:
    """The end of decoding prompts by the remaining time: `seconds` of it are for one temperature,
    in which choices take a part before, and teacher forcing and costs a part after."""

    left: Callable[[], float]
    seconds: float
    fewest: int = FEWEST_PROMPTS  # prompts, however long they take

    def __post_init__(self) -> None:
        self._began = self.left()

    def room(self, part: float) -> float:
        """The seconds until the fraction `part` of the time has passed."""
        return part * self.seconds - (self._began - self.left())

    def passed(self, part: float, ahead: float = 0.0) -> bool:
        """Whether the fraction `part` of the time will have passed after `ahead` more seconds."""
        return self.room(part) < ahead

    def at_once(self, timed: int, seconds: float, processes: int) -> int:
        """The number of prompts that a process decodes together after `timed` ones have taken
        `seconds`: `BRIEF_TOGETHER`, or as many as fit, but enough for the `fewest` prompts."""
        fitting = self.room(COUNTED) / max(1e-9, TOGETHER * seconds / timed)
        needed = -(-max(0, self.fewest - timed) // processes)
        return max(needed, min(BRIEF_TOGETHER, int(max(0.0, fitting))))


def tokens_in_time(
    setup: Setup,
    cfg: DecodeConfig,
    prompt: Sequence[int],
    ways: int,
    calibrating: int,
    left: Callable[[], float],
) -> int:
    """The limit of a response with which calibrating on so many prompts, choosing, and measuring
    `LEAST_PROMPTS` prompts in so many configurations, at all temperatures, should take the fraction
    `COUNTED` of the time `left`: `cfg.max_new_tokens`, or less, but at least `LEAST_TOKENS`. The
    speed is that of vanilla decoding after a `prompt`, which is tried here."""

    def seconds(tokens: int) -> tuple[float, int]:
        before = left()
        (response,) = setup.responses([prompt], Way(), max_new_tokens=tokens)
        return before - left(), len(response.ids)

    seconds(1)  # warm-up
    (prefill, _), (both, count) = seconds(1), seconds(1 + BRIEF_TIMED)
    a_token = max(0.0, both - prefill) / max(1, count - 1)
    timed = FEWEST * cfg.batch * cfg.repeats
    alone = timed * (1 + ways)
    together = max(0, LEAST_PROMPTS - FEWEST * cfg.batch) * (1 + ways)
    together += calibrating + LEARNING * ways
    responses = len(cfg.temperatures) * (alone + TOGETHER * together)
    fitting = (COUNTED * left() / responses - prefill) / max(1e-9, a_token)
    return min(cfg.max_new_tokens, max(LEAST_TOKENS, int(max(0.0, fitting))))


@dataclass
class DecodedPrompts:
    """All prompts with vanilla responses and those of one configuration, the timed ones first.
    Seconds, and the counts beside them, have one entry for each timed batch; they cover the tokens
    after the first of each response, which prefill emits."""

    plain: list[Generation] = field(default_factory=list)
    drafted: list[Generation] = field(default_factory=list)
    plain_tokens: list[int] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # for as many tokens
    row_steps: list[int] = field(default_factory=list)  # the speculation steps of all rows
    speculation_seconds: list[float] = field(default_factory=list)  # for as many speculation steps
    spent: list[dict[str, float]] = field(default_factory=list)
    of_batches: list[int] = field(default_factory=list)  # number of prompts in each timed batch

    @property
    def timed(self) -> int:
        """The number of timed prompts, which are the first ones."""
        return sum(self.of_batches)

    @property
    def times(self) -> list[BatchTimes]:
        """The timings, batch by batch."""
        columns = self.of_batches, self.plain_tokens, self.plain_seconds, self.seconds
        more = self.row_steps, self.speculation_seconds
        return [BatchTimes(*row) for row in zip(*columns, *more, strict=True)]

    @property
    def steps(self) -> list[SpeculationStep]:
        return [r for g in self.drafted for r in g.steps]

    def add(self, plain: Sequence[Generation], drafted: Sequence[Generation]) -> None:
        """Add the responses to a batch of prompts."""
        self.plain += plain
        self.drafted += drafted

    def time(self, plain: list[list[Generation]], drafted: list[list[Generation]]) -> None:
        """Add the times of a batch that was answered several times: counts are those of the first
        time, seconds are medians."""
        tokens, steps = _tokens(plain[0]), max(1, sum(len(g.steps) for g in drafted[0]))
        self.plain_tokens.append(tokens)
        self.row_steps.append(steps)
        self.plain_seconds.append(tokens * statistics.median(_a_token(g) for g in plain))
        self.seconds.append(tokens * statistics.median(_a_token(g) for g in drafted))
        self.speculation_seconds.append(steps * statistics.median(_a_step(g) for g in drafted))
        slowest = max(drafted[0], key=lambda g: g.seconds)
        other = slowest.seconds - sum(slowest.spent.values())
        self.spent.append(slowest.spent | {"other": other})
        self.of_batches.append(len(plain[0]))


def decoded_in_turn(
    setup: Setup,
    cfg: DecodeConfig,
    ways: Sequence[Way],
    prompts: list[list[int]],
    together: int,
    tell: Callable[..., None],
    until: Until | None = None,
) -> list[DecodedPrompts]:
    """Answer all prompts with vanilla decoding and each configuration: the first
    `cfg.timed_prompts` in batches of `cfg.batch`, in turn and `cfg.repeats` times, the others
    `together` at a time, without compiled forward passes. `tell` is called with the progress after
    each batch. With `until`, fewer prompts are timed and answered if its time is up: the first
    ones, in every configuration."""
    ranks, plain, timed = setup.ranks, ways[0].plain, min(len(prompts), cfg.timed_prompts)
    all_timed = timed == len(prompts)
    took = 0.0  # seconds of the timed prompts, without warm-up

    def turns(
        batch: range, ways: Sequence[Way], repeat: int = 0, tokens: int = setup.max_new_tokens
    ) -> list[list[Generation]]:
        """The responses to the prompts with these numbers, vanilla and with each configuration."""
        some, seeds = [prompts[i] for i in batch], [cfg.seed + i * 1009 + repeat for i in batch]
        return [setup.responses(some, way, seeds=seeds, max_new_tokens=tokens) for way in ways]

    def in_time() -> list[DecodedPrompts]:
        """The timed prompts."""
        nonlocal took
        many, warming = [DecodedPrompts() for _ in ways], [plain, *(way.fresh() for way in ways)]
        for first in range(0, timed, cfg.batch):
            batch = range(first, min(first + cfg.batch, timed))
            # warm-up; if compiled, each number of rows and tokens has its own graph
            if cfg.compile or not first:
                tokens = setup.max_new_tokens
                turns(batch, warming, tokens=min(tokens, BRIEF_TIMED) if setup.brief else tokens)
            before = until.left() if until else 0.0
            repeats = [turns(batch, [plain, *ways], repeat) for repeat in range(cfg.repeats)]
            took += before - until.left() if until else 0.0
            plainly, *drafted = map(list, zip(*repeats, strict=True))
            for decodings, of_way in zip(many, drafted, strict=True):
                decodings.add(plainly[0], of_way[0])
                decodings.time(plainly, of_way)
            said(many, len(batch))
            if until is not None:
                fewest = until.fewest if all_timed else FEWEST * cfg.batch
                one = took / (cfg.repeats * batch.stop)  # seconds of a timed prompt
                few = max(0, LEAST_PROMPTS - batch.stop - cfg.batch)  # to count after another batch
                ahead = 0.0 if all_timed else one * (cfg.repeats * cfg.batch + TOGETHER * few)
                ended = until.passed(COUNTED, ahead) or (not all_timed and until.passed(TIMED))
                if batch.stop >= fewest and ended:
                    break
        return many

    def said(many: Sequence[DecodedPrompts], count: int) -> None:
        taus = [sum(g.emitted for g in m.drafted) / max(1, len(m.steps)) for m in many]
        by_way = " and ".join(f"{tau:.2f}" for tau in taus)
        at = f"decoding  T={plain.sampler.temperature:g}"
        tell(advance=count, description=f"{at}  τ {by_way}")

    many = ranks.first(in_time)
    timed = many[0].timed
    eager = [replace(way, compiled=False) for way in (plain, *ways)]
    if until is not None:
        limit = partial(until.at_once, timed, took / cfg.repeats, ranks.world)
        together = min(together, ranks.first(limit))
    batches = [
        range(first, min(first + together, len(prompts)))
        for first in range(timed, 0 if all_timed or not together else len(prompts), together or 1)
    ]

    def counted(batch: range) -> list[list[Generation]]:
        """The responses to the prompts with these numbers, in smaller batches if memory runs
        out."""
        try:
            responses = turns(batch, eager)
            tell(advance=len(batch))
            return responses
        except Exception as error:
            if not is_out_of_memory(error) or len(batch) == 1:
                raise
        release()  # out here, where the error no longer holds the memory of the failed batch
        half = len(batch) // 2
        parts = counted(batch[:half]), counted(batch[half:])
        return [first + second for first, second in zip(*parts, strict=True)]

    at_once = len(batches) if until is None else ranks.world
    while batches:
        some, batches = batches[:at_once], batches[at_once:]
        before = until.left() if until else 0.0
        for plainly, *drafts in ranks.map(some, counted):
            for decodings, drafted in zip(many, drafts, strict=True):
                decodings.add(plainly, drafted)
        if until is not None and some[-1].stop >= until.fewest:
            half = (before - until.left()) / 2
            if ranks.first(lambda half=half: until.passed(COUNTED, half)):  # type: ignore[misc]
                break
    return many


def _tokens(batch: Sequence[Generation]) -> int:
    """The number of tokens in these responses that speculation steps made, without the first of
    each, which prefill emits; at least 1, because callers divide by it."""
    return max(1, sum(len(g.ids) - 1 for g in batch))


def _a_token(batch: Sequence[Generation]) -> float:
    """Seconds per token of a batch, which lasts as long as its slowest row."""
    return max(g.seconds for g in batch) / _tokens(batch)


def _a_step(batch: Sequence[Generation]) -> float:
    """Seconds of a batch per speculation step of one of its rows."""
    return max(g.seconds for g in batch) / max(1, sum(len(g.steps) for g in batch))


def counting(
    setup: Setup, cfg: DecodeConfig, prompts: Sequence[Sequence[int]], needs: HiddenStateSpec
) -> int:
    """The number of prompts to decode together when only acceptance is counted: `cfg.counting`, or
    as many as fit into the free memory of every process, with the hidden states that the draft
    `needs`. If all are timed: `cfg.batch`."""
    if len(prompts) <= cfg.timed_prompts:
        return cfg.batch
    longest = max(prompts, key=len)
    fitting = setup.ranks.map(
        range(setup.ranks.world),
        lambda _: rows_that_fit(setup.target, longest, setup.max_new_tokens, needs),
    )
    return min(cfg.counting, *(n for n in fitting if n is not None), cfg.counting)

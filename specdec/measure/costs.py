"""The costs of decoding on this machine, in seconds: vanilla steps, verification, drafting,
speculation steps. Compared operations take turns, so that a change in the machine's speed affects
all of them. With several processes, only the first measures, by its own clock, while the others
wait; then all of them get the result (see `specdec.ranks`)."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from specdec.compat import packed_operator
from specdec.context import Context, HiddenStateSpec
from specdec.decoding.decode import capacity, prefill
from specdec.decoding.draft_length import CostTable
from specdec.decoding.rows import Rows
from specdec.decoding.way import Way
from specdec.drafters.base import Drafter, vocabulary
from specdec.measure.setup import Setup
from specdec.runtime.cache import SlotCache
from specdec.runtime.device import finish
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Shape
from specdec.targets.target import Target
from specdec.theory.intervals import Interval, median_interval

T = TypeVar("T")
TURNS = 31  # timings of each part
OF_A_TABLE = 5  # timings behind each cell of a cost table
TIMED = 24  # tokens decoded to time speculation steps
OF_STEPS = 5  # timings of each shape whose speculation steps are compared
# The same where measuring is brief: timings of each part, of each shape, and tokens to time
# speculation steps
BRIEF_TURNS, BRIEF_STEPS, BRIEF_TIMED = 8, 2, 8


@dataclass(frozen=True)
class Costs:
    """Medians in seconds of one vanilla step, one verification pass and one drafting. `c` is a
    draft step (Definition 3.7 of Leviathan et al.) and `v` a verification pass, in vanilla
    steps."""

    step_seconds: Interval
    verify_seconds: Interval
    draft_seconds: Interval
    c: Interval
    v: Interval


def costs(setup: Setup, way: Way, prompt: Sequence[int], turns: int | None = None) -> Costs:
    """The costs of the parts of a speculation step, after a prompt on `setup.batch` rows. The
    verification covers the anchor and as many tokens as the topology can draft. Parts take
    turns, so that each finds the processor's caches as in decoding. If forward passes are
    compiled, their caches have room for `setup.max_new_tokens`. Of a prompt that is too long,
    only the end is read."""
    turns = turns or (BRIEF_TURNS if setup.brief else TURNS)
    return setup.ranks.first(lambda: _costs(setup, way, prompt, turns))


@torch.inference_mode()
def _costs(setup: Setup, way: Way, prompt: Sequence[int], turns: int) -> Costs:
    drafter, shape = _drafting(way)
    target, batch, slots = setup.target, setup.batch, None
    if way.compiled:
        slots = capacity(len(prompt) + setup.max_new_tokens, drafter, shape)
    rows, cache, draft = _prepared(target, way, prompt, batch, slots)

    def verify(count: int, needs: HiddenStateSpec, tree: bool = False) -> None:
        parents = torch.arange(count, device=target.device).clamp_max(1) - 1  # the anchor's
        parents_BM = parents.expand(batch, -1) if tree else None
        _, logits = target.step(rows.anchors().expand(-1, count), needs, cache, parents_BM)
        logits.float().argmax(-1)
        cache.drop()

    width = min(1 + shape.nodes, target.positions - max(cache.lengths))
    parts: list[Callable[[], object]] = [
        lambda: verify(1, HiddenStateSpec()),
        draft,
        lambda: verify(width, drafter.needs, not isinstance(shape, Chain)),
    ]
    times = [[timed(part, target.device)[0] for part in parts] for _ in range(turns + 2)][2:]
    plain, drafted, checked = map(list, zip(*times, strict=True))
    return Costs(
        step_seconds=median_interval(plain),
        verify_seconds=median_interval(checked),
        draft_seconds=median_interval(drafted),
        c=median_interval([t / shape.depth for t in drafted], plain),
        v=median_interval(checked, plain),
    )


@torch.inference_mode()
def operations(target: Target, way: Way, prompt: Sequence[int]) -> tuple[float | None, int]:
    """ĉ, the operations of a draft step over those of a target step (Definition 3.10), and those of
    the target step. Matrix products are counted; None and 0 if that is impossible."""
    drafter, shape = _drafting(way)
    gamma = shape.depth
    rows, cache, draft = _prepared(target, Way(drafter, Chain(gamma)), prompt)
    draft()  # the draft's own prefill is not counted
    counted = {}  # torch by itself cannot count a product with a packed weight
    if (packed := packed_operator()) is not None:
        counted[packed] = lambda x, *_, out_shape, **__: 2 * x[-1] * math.prod(out_shape)
    with FlopCounterMode(display=False, custom_mapping=counted) as counter:
        draft()
        drafted = counter.get_total_flops()
        _, final_BTD = target.hidden_states(rows.anchors(), HiddenStateSpec(), cache=cache)
        of_layers = counter.get_total_flops() - drafted  # operations of this process
        target.logits(final_BTD)
        step = counter.get_total_flops() - drafted + (target.processes - 1) * of_layers
    return (drafted / gamma / step if step else None), step


def _drafting(way: Way) -> tuple[Drafter, Shape]:
    """The drafter and its topology."""
    if way.drafter is None or way.shape is None:
        raise ValueError("vanilla decoding has no costs of drafting")
    return way.drafter, way.shape


def _prepared(
    target: Target, way: Way, prompt: Sequence[int], batch: int = 1, slots: int | None = None
) -> tuple[Rows, SlotCache, Callable[[], object]]:
    """Rows that have read the prompt and end with an anchor, the target's cache of them, and a
    function that drafts there. With `slots`, caches have that fixed size and forward passes are
    compiled."""
    drafter, shape = _drafting(way)
    if drafter.limits.positions is not None:
        prompt = prompt[-max(1, drafter.limits.positions - 1 - shape.depth) :]
    half = max(1, len(prompt) // 2)
    prompts = [list(prompt[b % half :]) for b in range(batch)]  # prompts of unequal length
    cache = target.new_cache(slots)
    draft_cache = drafter.new_cache(slots)
    rows, first_BV = prefill(target, prompts, drafter.needs, cache)
    first = first_BV.argmax(-1).tolist()
    rows.extend([[token] for token in first], Context(rows.ids()), [0] * batch, None)
    choose = Choose(Sampler(0.0), "fixed", RowDraws([]), vocabulary(drafter), target.vocab_size)
    ctx = rows.context(cache)
    return rows, cache, lambda: drafter.draft(ctx, shape, choose, draft_cache)


def timed(run: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds of a call, including its work on `device`, and its result."""
    finish(device)
    start = time.perf_counter()
    result = run()
    finish(device)
    return time.perf_counter() - start, result


def cost_table(setup: Setup, way: Way, prompt: Sequence[int]) -> CostTable:
    """Seconds of a speculation step by rows (up to `setup.batch`) and drafted tokens (up to the
    depth of the topology), for the draft length `goodput`."""
    _, shape = _drafting(way)
    batches, gammas = (sorted({1, (n + 1) // 2, n}) for n in (setup.batch, shape.depth))
    seconds = []
    for rows in batches:
        of_rows = replace(setup, batch=rows)
        each = [costs(of_rows, way.drafting(Chain(g)), prompt, OF_A_TABLE) for g in gammas]
        steps = [cost.verify_seconds.value + cost.draft_seconds.value for cost in each]
        seconds.append([each[0].step_seconds.value, *steps])
    return CostTable(batches, [0, *gammas], seconds)


def steps_in_turn(
    setup: Setup, ways: Sequence[Way], prompts: Sequence[Sequence[int]]
) -> list[float]:
    """For each configuration, the seconds of a complete speculation step when `setup.batch` prompts
    are decoded together: medians of `OF_STEPS` timings, taken in turn after a warm-up; with
    `brief`, the shorter of two."""
    return setup.ranks.first(lambda: _steps_in_turn(setup, ways, prompts))


def _steps_in_turn(
    setup: Setup, ways: Sequence[Way], prompts: Sequence[Sequence[int]]
) -> list[float]:
    seconds = [list[float]() for _ in ways]
    batch = [prompts[b % len(prompts)] for b in range(setup.batch)]
    tokens = min(setup.max_new_tokens, BRIEF_TIMED if setup.brief else TIMED)
    for turn in range(BRIEF_STEPS if setup.brief else 1 + OF_STEPS):
        for way, times in zip(ways, seconds, strict=True):
            responses = setup.responses(batch, way, eos=(), max_new_tokens=tokens)
            steps = max(1, max(len(g.steps) for g in responses))
            if turn or setup.brief:
                times.append(max(g.seconds for g in responses) / steps)
    return [min(times) if setup.brief else statistics.median(times) for times in seconds]

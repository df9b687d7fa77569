"""What decoding costs on this machine, in seconds: plain steps, verification, drafting, rounds.

Whatever is compared takes turns, so that a change of the machine in between falls on all of it.

Letters: B rows of the batch, M tokens of a pass (the anchor and what was drafted).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.context import Needs
from specdec.decoding.decode import capacity, decode
from specdec.decoding.length import CostTable
from specdec.decoding.rows import Rows
from specdec.drafters.base import Drafter, last_of
from specdec.sampling.choose import Choose
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Shape
from specdec.target.base import Target
from specdec.theory.intervals import Interval, median_interval

TURNS = 31  # of each part
OF_A_TABLE = 5  # turns of each of its cells
OF_ROUNDS = 5  # turns of each shape whose rounds are compared


@dataclass(frozen=True)
class Costs:
    """Medians in seconds of one plain step, one verification pass and one drafting; `c` is a
    draft step over a plain step (drafting / (γ · step), Definition 3.7 of Leviathan et al.),
    `v` a verification over a plain step."""

    step_seconds: Interval
    verify_seconds: Interval
    draft_seconds: Interval
    c: Interval
    v: Interval


@torch.inference_mode()
def costs(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    shape: Shape,
    turns: int = TURNS,
    compiled: bool = False,
    batch: int = 1,
    max_new_tokens: int = 96,
) -> Costs:
    """The parts of a round that drafts `shape`, measured after a prompt on `batch` rows.

    The verification is of the anchor and as many tokens as the shape can draft. Parts take turns,
    so that each finds the processor's caches as decoding leaves them. Compiled passes depend on
    the room for `max_new_tokens`. Of a prompt that leaves the draft no positions, only the end
    is read.
    """
    if drafter.positions is not None:
        prompt = prompt[-max(1, drafter.positions - 1 - shape.depth) :]
    half = max(1, len(prompt) // 2)
    prompts = [prompt[b % half :] for b in range(batch)]  # of unequal lengths, as in decoding
    rows = Rows(prompts, target.device)
    slots = capacity(len(prompt) + max_new_tokens, drafter, shape) if compiled else None
    cache = target.new_cache(slots)
    draft_cache = drafter.compiled_cache(slots) if slots else drafter.new_cache()
    features, final = target.features(rows.ids(), drafter.needs, cache=cache)
    counts = [len(p) for p in prompts]
    cache.keep(counts)
    first = target.logits(last_of(final, counts)).argmax(-1).tolist()
    rows.extend([[token] for token in first], features, counts, None)
    choose = Choose(Sampler(0.0), "fixed", [], drafter.vocab_S, target.vocab_size)
    ctx = rows.context(cache)

    def verify(count: int, needs: Needs, tree: bool = False) -> None:
        parents = torch.arange(count, device=target.device).clamp_max(1) - 1  # the anchor's
        parents_BM = parents.expand(batch, -1) if tree else None
        _, logits = target.step(rows.anchors().expand(-1, count), needs, cache, parents_BM)
        logits.float().argmax(-1)
        cache.drop()

    room = target.positions - max(cache.lengths)
    width = min(1 + shape.nodes, room)
    parts: list[Callable[[], object]] = [
        lambda: verify(1, Needs()),
        lambda: drafter.draft(ctx, shape, choose, draft_cache),
        lambda: verify(width, drafter.needs, not isinstance(shape, Chain)),
    ]
    times = [[_seconds(part, target) for part in parts] for _ in range(turns + 2)][2:]
    plain, draft, checked = map(list, zip(*times, strict=True))
    return Costs(
        step_seconds=median_interval(plain),
        verify_seconds=median_interval(checked),
        draft_seconds=median_interval(draft),
        c=median_interval([t / shape.depth for t in draft], plain),
        v=median_interval(checked, plain),
    )


def _seconds(run: Callable[[], object], target: Target) -> float:
    """Seconds of a call, with the work that it left to a GPU."""
    on_gpu = target.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def cost_table(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    gamma: int,
    compiled: bool = False,
    batch: int = 1,
    max_new_tokens: int = 96,
) -> CostTable:
    """Seconds of a round by rows, up to `batch`, and drafted tokens, for length goodput."""
    batches = sorted({1, (batch + 1) // 2, batch})
    gammas = sorted({1, (gamma + 1) // 2, gamma})
    seconds = []
    for rows in batches:
        found = [
            costs(target, drafter, prompt, Chain(g), OF_A_TABLE, compiled, rows, max_new_tokens)
            for g in gammas
        ]
        rounds = [cost.verify_seconds.value + cost.draft_seconds.value for cost in found]
        seconds.append([found[0].step_seconds.value, *rounds])
    return CostTable(batches, [0, *gammas], seconds)


def rounds_in_turn(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    shapes: Sequence[Shape],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    greedy_draft: bool = False,
    compiled: bool = False,
) -> list[tuple[float, float]]:
    """For each shape the seconds of a round of decoding these prompts as one batch, and those of
    its drafting: medians of `OF_ROUNDS` turns, after one that warms up."""
    found: list[list[tuple[float, float]]] = [[] for _ in shapes]
    for turn in range(1 + OF_ROUNDS):
        for shape, times in zip(shapes, found, strict=True):
            made = decode(
                target,
                prompts,
                drafter=drafter,
                shape=shape,
                sampler=sampler,
                greedy_draft=greedy_draft,
                max_new_tokens=max_new_tokens,
                eos=(),
                compiled=compiled,
            )
            last = max(made, key=lambda g: g.seconds)
            rounds = max(1, max(len(g.rounds) for g in made))
            if turn:
                times.append((last.seconds / rounds, last.spent["draft"] / rounds))
    return [(statistics.median(w for w, _ in t), statistics.median(d for _, d in t)) for t in found]

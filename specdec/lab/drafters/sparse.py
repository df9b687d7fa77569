"""Self-speculation over a sparse KV cache (MagicDec, Chen et al. 2024): the whole target drafts,
but over only some of the context's keys and values.

The small cache keeps the last tokens, its tail, and `budget` of the positions before them. With
`method=streaming` these are the first ones (attention sinks) and the latest (StreamingLLM, Xiao et
al. 2024); with `snapkv`, the positions to which the next `window` tokens attend most. Each KV head
chooses separately, by the mean attention of its query heads, smoothed over neighbouring positions
(Li et al. 2024). With either, layers with a sliding window of their own keep the latest positions.

A draft reads every weight, so c is near 1 until the KV cache is larger than the weights: the method
is for long contexts in large batches. The small cache is gathered from the target's. Each
speculation step adds the committed tokens to the tail. Every `refresh` tokens the positions are
chosen again among all before the last `window` tokens (for snapkv, by a pass over these), and the
tail shrinks to these. (SnapKV itself chooses once per prompt. On a grid of positions the choice
depends only on the text, so α by teacher forcing is the decoder's.) Tokens keep their true
positions, by which keys were rotated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specdec.context import Context, HiddenStateSpec
from specdec.drafters.attention import first_tokens, tokens_from
from specdec.drafters.base import DrafterConfig
from specdec.drafters.target_views import (
    TargetViewDrafter,
    ViewSizes,
    count_of_runnable_layers,
    with_weights,
)
from specdec.errors import require, require_known, require_within
from specdec.runtime.cache import (
    Place,
    SlotCache,
    cache_argument,
    counts_positions,
    model_inputs,
)
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target

METHODS = ("streaming", "snapkv")
ROWS = 16  # anchors that teacher forcing reads at a time, each with a cache of its own


@dataclass
class SparseConfig(DrafterConfig):
    """Self-speculation over a sparse KV cache."""

    bounds: ClassVar = {"budget": 1, "window": 1, "refresh": 1, "pool": 1}
    name: str = "sparse"
    depth: int = 4
    # streaming: keep the first and the latest positions; snapkv: keep those with the most attention
    method: str = "snapkv"
    budget: int = 256  # cached positions before the tail
    # last tokens cached beside the budget at each selection; with snapkv, their attention selects
    # the positions
    window: int = 32
    refresh: int = 32  # tokens between two selections of the positions
    sink: int = 4  # with streaming: first tokens kept, as part of budget
    # with snapkv: neighbouring positions over which votes are averaged, an odd number
    pool: int = 5


class SparseCache(SlotCache):
    """The small cache. `seen` is the number of tokens of each row's text in it, and `chosen` the
    number of positions from which the kept ones were last chosen."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.seen: list[int] = []
        self.chosen: list[int] = []

    def _place(self, ids_BT: Tensor, parents_BT: Tensor | None) -> Place:
        """Like `SlotCache`'s, but with the tokens' true positions."""
        place = super()._place(ids_BT, parents_BT)
        slot_position_BP = place.slot_position_BP
        if slot_position_BP is None:
            slot_position_BP = torch.arange(self.shown, device=ids_BT.device)[None]
        ahead = [n - slots for n, slots in zip(self.seen, self.lengths, strict=True)]
        ahead_B1 = torch.tensor(ahead, device=ids_BT.device)[:, None]
        seen_BTP = place.seen(self.shown)
        return Place(place.position_BT + ahead_B1, seen_BTP, slot_position_BP + ahead_B1)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.seen, self.chosen = ([x[b] for b in rows if x] for x in (self.seen, self.chosen))


class Sparse(TargetViewDrafter):
    Config = SparseConfig
    long_prompts = {method: SparseConfig(method=method) for method in METHODS}
    voters: tuple[Any, ...]  # for snapkv, the view of the target whose attention votes

    def __init__(self, config: SparseConfig, sizes: ViewSizes) -> None:
        super().__init__(config, sizes)
        require_known("drafter", config, method=METHODS)
        require_within("drafter", config, sink=(0, config.budget))
        require(config.pool % 2 == 1, f"drafter.pool={config.pool}: give an odd number")

    @classmethod
    def plan(cls, config: SparseConfig, target: TargetParts) -> ViewSizes:
        return cls.Sizes.of_config(
            config, target, layers=count_of_runnable_layers(target, config.name)
        )

    def attach(self, target: TargetParts) -> None:
        super().attach(target)
        self.voters = (with_weights(self.target),) if self.config.method == "snapkv" else ()

    def view(self, target: Target) -> Any:
        return target.body

    def new_cache(self, capacity: int | None = None) -> SparseCache:
        small = SparseCache(self.sizes.layers)
        small.counts_positions = counts_positions(self.target.config)
        return small

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        """The states that decoding would compute [B, A, K, D]: each anchor is a row with its own
        small cache, gathered from one pass over its document."""
        block_BAK = tokens_from(ctx, anchors_BA, drafted_BAK, self.depth)
        rows = []
        for b, firsts in enumerate(first_tokens(ctx, anchors_BA)):
            first_A, order, parts = torch.tensor(firsts), [], []
            for first in sorted(set(firsts)):
                members = (first_A == first).nonzero()[:, 0]
                ends = (anchors_BA[b].cpu()[members] - first).tolist()
                parts.append(self._forced(ctx.ids_BT[b, first:], ends, block_BAK[b, members]))
                order.append(members)
            rows.append(torch.cat(parts)[torch.cat(order).argsort()])
        return torch.stack(rows)

    def cache_before_anchors(self, ctx: Context, cache: SparseCache | None) -> SparseCache:
        small = cache or self.new_cache()
        self.follow(ctx.cache, small, partial(self._choice, ctx.cache, ctx.rows()))
        return small

    def follow(
        self, full: SlotCache, small: SparseCache, choice: Callable[[int, int], list[Tensor]]
    ) -> None:
        """Update the small cache from the target's. `choice(b, before)` returns the positions below
        `before` that row b keeps (see `_choice`)."""
        small.drop()
        if not small.seen:
            small.seen, small.chosen, small.lengths = ([0] * len(full.lengths) for _ in range(3))
        plans = []
        for b, end in enumerate(full.lengths):
            before = max(0, end // self.config.refresh * self.config.refresh - self.config.window)
            picked = None
            if before > max(self.config.budget, small.chosen[b]):
                picked = choice(b, before)
                small.lengths[b], small.seen[b] = self.config.budget, before
            plans.append((picked, small.lengths[b], small.seen[b], end))
            small.lengths[b] += end - small.seen[b]
            small.seen[b], small.chosen[b] = end, before
        small.reserve(max(small.lengths))
        for n, (ours, theirs) in enumerate(zip(small.slot_layers, full.slot_layers, strict=True)):
            if not theirs.is_initialized:  # a layer may read another's keys and values
                continue
            ours.reserve(theirs.keys, theirs.values)
            for few, all_ in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                for b, (picked, slots, start, end) in enumerate(plans):
                    if picked is not None:
                        few[b, :, :slots] = all_[b].take_along_dim(picked[n][..., None], 1)
                    few[b, :, slots : slots + end - start] = all_[b, :, start:end]

    def _choice(
        self, full: SlotCache, texts: Sequence[Sequence[int]], b: int, before: int
    ) -> list[Tensor]:
        """Positions [H, P] below `before` that each layer keeps of row b, ascending."""
        config, budget, window = self.target.config, self.config.budget, self.config.window
        num_kv_heads = full.slot_layers[0].keys.shape[1]

        def latest(sink: int) -> Tensor:
            kept = [*range(sink), *range(before - budget + sink, before)]
            return torch.tensor(kept, device=self.target.device).expand(num_kv_heads, -1)

        last = texts[b][before : before + window]
        votes = [w for view in self.voters for w in attention(view, full, b, last, before)]
        kinds, chosen = getattr(config, "layer_types", None), []
        for n in range(len(full.slot_layers)):
            if getattr(config, "sliding_window", None) is not None and (
                not kinds or kinds[n] == "sliding_attention"
            ):
                chosen.append(latest(0))
            elif votes:
                chosen.append(voted(votes[n], num_kv_heads, before, budget, self.config.pool))
            else:
                chosen.append(latest(self.config.sink))
        return chosen

    def _forced(self, ids_T: Tensor, ends: list[int], block_AK: Tensor) -> Tensor:
        """Hidden states [A, K, D] of blocks; block i follows the first `ends[i]` tokens."""
        full, text, longest = self.target.new_cache(), ids_T.tolist(), max(1, *ends)
        self.target.hidden_states(ids_T[None, :longest], HiddenStateSpec(), cache=full)
        full.commit([longest])
        choice = cache(partial(self._choice, full, [text], 0))
        states = []
        for start in range(0, len(ends), ROWS):
            some, small = ends[start : start + ROWS], self.new_cache()
            self.follow(_rows(full, 0, some), small, lambda b, before: choice(before))
            states.append(self.continued(small, block_AK[start : start + ROWS], None))
        return torch.cat(states)


def voted(attention_HTP: Tensor, heads: int, before: int, budget: int, pool: int) -> Tensor:
    """The positions [H, P] below `before`, ascending, that get the most attention from the last T
    tokens (SnapKV, Listing 1): attention is summed over those tokens and averaged over a KV head's
    query heads and over `pool` neighbouring positions."""
    votes_HP = attention_HTP[..., :before].float().sum(1).unflatten(0, (heads, -1)).mean(1)
    smooth_HP = nn.functional.avg_pool1d(
        votes_HP, pool, stride=1, padding=pool // 2, count_include_pad=False
    )
    return smooth_HP.topk(min(budget, before), -1).indices.sort(-1).values


def attention(
    model: Any, full: SlotCache, b: int, last: Sequence[int], before: int
) -> list[Tensor]:
    """For each layer of a model, the attention weights [H, T, P] of the tokens `last`, which start
    at position `before`, over the slots of row b of the target's cache."""
    cache = _rows(full, b, [full.lengths[b]])
    ids_1T = torch.tensor([list(last)], device=model.device)
    cache.place(ids_1T)  # the tokens are read again after the text, where no other token sees them
    position_1T = torch.arange(before, before + len(last), device=model.device)[None]
    slot_1P = torch.arange(cache.shown, device=model.device)[None]
    place = Place(position_1T, slot_1P[:, None] <= position_1T[..., None], slot_1P)
    inputs = model_inputs(model.config.get_text_config(), place, model.dtype)
    out = model(
        input_ids=ids_1T,
        use_cache=True,
        output_attentions=True,
        **inputs,
        **{cache_argument(model): cache},
    )
    return [weights_1HTP[0] for weights_1HTP in out.attentions]


def _rows(full: SlotCache, b: int, lengths: list[int]) -> SlotCache:
    """A cache whose rows hold prefixes of row b, sharing its memory while there is room."""
    cache = SlotCache(len(full.slot_layers))
    cache.lengths, cache.capacity = list(lengths), full.capacity
    for ours, theirs in zip(cache.slot_layers, full.slot_layers, strict=True):
        if theirs.is_initialized:
            ours.keys, ours.values = (
                x[b : b + 1].expand(len(lengths), -1, -1, -1) for x in (theirs.keys, theirs.values)
            )
            ours.is_initialized = True
    return cache

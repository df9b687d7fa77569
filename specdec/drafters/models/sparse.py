"""Self-speculation over a sparse KV cache (MagicDec, Chen et al. 2024): the whole target drafts,
but over a few of the context's keys and values.

The small cache keeps the last tokens, and `budget` positions before them:
streaming: the first ones (attention sinks) and the latest (StreamingLLM, Xiao et al. 2024);
snapkv: those to which the last `window` tokens attend most. Each KV head chooses for itself; the
  votes of its query heads are averaged, and smoothed over neighbours (Li et al. 2024).
With either method, layers with a sliding window of their own keep the latest positions.

A draft reads every weight, so c is near 1 until the KV cache outweighs the weights: this is for
long contexts in large batches. The small cache is gathered from the target's cache. Each round
adds what was committed; every `refresh` tokens the positions are chosen again, and the tail that
is kept whole falls back to `window` tokens. (SnapKV's paper chooses once, at the end of the
prompt. Choosing on a grid of positions makes the choice depend on the text alone, so that α by
teacher forcing is what the decoder sees.) The target's cache holds no queries, so choosing takes a
pass over `window` tokens.

Tokens keep their true positions: cached keys were rotated by theirs, and a drafted token's
position is the length of the whole text before it.

Letters: B batch, T tokens of a pass, A anchors, K depth, D width, P slots, H KV heads, Q query
heads, w the window, C positions that are kept, E head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.context import Context, Needs
from specdec.drafters.base import Drafter, text_after
from specdec.drafters.models.views import ViewSizes, decoder_layers, with_weights
from specdec.errors import UserError, nearest, require
from specdec.runtime.cache import Place, SlotCache, model_inputs, size
from specdec.sampling.trees import Growth
from specdec.target.base import Target
from specdec.target.parts import Parts

METHODS = ("streaming", "snapkv")
ROWS = 16  # anchors that teacher forcing reads at a time, each with a cache of its own


@dataclass
class SparseConfig:
    """The module explains `budget`, `window` and `refresh`. `sink` is how many first tokens
    streaming keeps, out of its budget; `pool` over how many neighbouring positions votes are
    averaged (an odd number)."""

    name: str = "sparse"
    depth: int = 4
    method: str = "snapkv"
    budget: int = 256
    window: int = 32
    refresh: int = 32
    sink: int = 4
    pool: int = 5


class SparseCache:
    """The small cache, how far each row has read, and where its positions were chosen last."""

    def __init__(self, layers: int) -> None:
        self.small = SlotCache(layers)
        self.read: list[int] = []  # tokens of the text
        self.chosen: list[int] = []  # the boundary at which the choice was made

    def select(self, rows: Sequence[int]) -> None:
        if not self.read:  # nothing was drafted yet
            return
        self.small.select(rows)
        self.read = [self.read[b] for b in rows]
        self.chosen = [self.chosen[b] for b in rows]


class Sparse(Drafter):
    Config = SparseConfig
    Sizes = ViewSizes
    trainable = False
    reads_body = True
    long_prompts = {method: SparseConfig(method=method) for method in METHODS}
    _target: tuple[Target]
    _votes: tuple[Any, nn.ModuleList] | None  # a view of the target, and its layers

    def __init__(self, config: SparseConfig, sizes: ViewSizes) -> None:
        super().__init__(config, sizes)
        if config.method not in METHODS:
            raise UserError(f"drafter.method={config.method!r}{nearest(config.method, METHODS)}")
        for name, least in (("budget", 1), ("window", 1), ("refresh", 1), ("sink", 0), ("pool", 1)):
            value = getattr(config, name)
            require(value >= least, f"drafter.{name}={value}: give {least} or more")
        require(config.pool % 2 == 1, f"drafter.pool={config.pool}: give an odd number")
        require(
            config.sink <= config.budget,
            f"drafter.sink={config.sink}: give at most drafter.budget={config.budget}",
        )

    @classmethod
    def plan(cls, config: SparseConfig, target: Parts) -> ViewSizes:
        layers = decoder_layers(target, config.name)
        return ViewSizes(target_vocab=target.vocab_size, layers=layers)

    def attach(self, target: Parts) -> None:
        assert isinstance(target, Target)
        self._target = (target,)
        self._votes = None
        if self.config.method == "snapkv":
            view = with_weights(target)
            path = next(n for n, m in target.model.base_model.named_modules() if m is target.layers)
            self._votes = (view, view.get_submodule(path))

    def new_cache(self) -> SparseCache:
        return SparseCache(self.sizes.layers)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        """What decoding would compute [B, A, K, D]: each anchor is a row with a small cache of
        its own, gathered from one pass over its document."""
        if drafted_BAk is None:
            drafted_BAk = text_after(ctx.ids_BT, anchors_BA, self.depth - 1)
        anchor_BA1 = ctx.ids_BT.gather(1, anchors_BA)[..., None]
        block_BAK = torch.cat([anchor_BA1, drafted_BAk], -1)
        position = ctx.position_BT
        rows = []
        for b, anchors in enumerate(anchors_BA.tolist()):
            of_document: dict[int, list[int]] = {}
            for i, a in enumerate(anchors):
                first = a - int(position[b, a]) if position is not None else 0
                of_document.setdefault(first, []).append(i)
            found: dict[int, Tensor] = {}
            for first, members in of_document.items():
                ends = [anchors[i] - first for i in members]
                parts = self._forced(ctx.ids_BT[b, first:], ends, block_BAK[b, members])
                found |= dict(zip(members, parts, strict=True))
            rows.append(torch.stack([found[i] for i in range(len(anchors))]))
        return torch.stack(rows)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self._target[0].logits(hidden)

    def begin(self, ctx: Context, cache: SparseCache | None = None) -> Growth:
        if ctx.cache is None:
            return super().begin(ctx)
        return SparseGrowth(self, ctx, self.new_cache() if cache is None else cache)

    def follow(
        self,
        full: SlotCache,
        texts: Sequence[Sequence[int]],
        kept: SparseCache,
        choices: dict[int, list[Tensor]] | None = None,
    ) -> None:
        """Bring the small cache up to the target's. Where all rows hold one text, `choices` gives
        the positions to keep, by how many there were to choose from."""
        small, window, budget = kept.small, self.config.window, self.config.budget
        small.drop()
        if not kept.read:
            kept.read, kept.chosen = [0] * len(texts), [0] * len(texts)
            small.lengths = [0] * len(texts)
        plans = []
        for b, end in enumerate(full.lengths):
            boundary = self._boundary(end)
            before = max(0, boundary - window)
            picked = None
            if boundary > kept.chosen[b] and before > budget:
                if choices is None:
                    picked = self._choice(full, b, texts[b][before:boundary], before)
                else:
                    picked = choices[before]
                small.lengths[b], kept.read[b] = budget, before
            kept.chosen[b] = boundary
            plans.append((picked, small.lengths[b], kept.read[b], end))
            small.lengths[b] += end - kept.read[b]
            kept.read[b] = end
        if max(small.lengths) > small.capacity:
            small.capacity = max(256, 2 * max(small.lengths))
        for n, (ours, theirs) in enumerate(zip(small.slot_layers, full.slot_layers, strict=True)):
            if not theirs.is_initialized:  # a layer may read another's keys and values
                continue
            ours.keys = self._copied(ours, "keys", theirs.keys, plans, n, small.capacity)
            ours.values = self._copied(ours, "values", theirs.values, plans, n, small.capacity)
            ours.is_initialized = True

    def read(self, kept: SparseCache, ids_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
        """The target's final hidden states [B, T, D] of tokens behind the small cache."""
        target, small = self._target[0], kept.small
        place = small.place(*size(ids_BT), parents_BT)
        ahead = [n - slots for n, slots in zip(kept.read, small.lengths, strict=True)]
        ahead_B1 = torch.tensor(ahead, device=ids_BT.device)[:, None]
        slot_P = torch.arange(small.shown, device=ids_BT.device)
        mask, slots = place.mask_BTP, place.slot_position_BP
        if mask is None:
            mask = slot_P <= place.position_BT[..., None]
        slots = (slot_P[None] if slots is None else slots) + ahead_B1
        inputs = model_inputs(
            target.config, Place(place.position_BT + ahead_B1, mask, slots), target.dtype
        )
        return target.model.base_model(
            input_ids=ids_BT, past_key_values=small, use_cache=True, **inputs
        ).last_hidden_state

    def _copied(
        self, ours: Any, name: str, theirs: Tensor, plans: list[Any], layer: int, capacity: int
    ) -> Tensor:
        """Keys or values of one layer of the small cache, with what the plans add."""
        B, H, _, E = theirs.shape
        buffer = getattr(ours, name) if ours.is_initialized else theirs.new_zeros(B, H, 0, E)
        if buffer.shape[2] < capacity:
            grown = buffer.new_zeros(B, H, capacity, E)
            grown[:, :, : buffer.shape[2]] = buffer
            buffer = grown
        for b, (picked, slots, start, end) in enumerate(plans):
            if picked is not None:
                index_HC = picked[layer]
                buffer[b, :, :slots] = theirs[b].gather(1, index_HC[..., None].expand(-1, -1, E))
            buffer[b, :, slots : slots + end - start] = theirs[b, :, start:end]
        return buffer

    def _boundary(self, end: int) -> int:
        return end // self.config.refresh * self.config.refresh

    def _choice(self, full: SlotCache, b: int, last: Sequence[int], before: int) -> list[Tensor]:
        """Positions [H, C] below `before` that each layer keeps, ascending, C = the budget; `last`
        are the tokens from there to the boundary."""
        target, budget, sink = self._target[0], self.config.budget, self.config.sink
        H, device = full.slot_layers[0].keys.shape[1], target.device
        latest_HC = torch.arange(before - budget, before, device=device).expand(H, -1)
        with_sink_HC = latest_HC.clone()
        with_sink_HC[:, :sink] = torch.arange(sink, device=device)
        votes = [] if self._votes is None else attention(*self._votes, full, b, last, before)
        chosen = []
        for n in range(len(full.slot_layers)):
            if _slides(target.config, n):
                chosen.append(latest_HC)
            elif votes:
                chosen.append(voted(votes[n], H, before, budget, self.config.pool))
            else:
                chosen.append(with_sink_HC)
        return chosen

    def _forced(self, ids_T: Tensor, ends: list[int], block_AK: Tensor) -> Tensor:
        """Hidden states [A, K, D] of blocks that follow the first `ends[i]` tokens of a text."""
        target = self._target[0]
        full, text = target.new_cache(), ids_T.tolist()
        longest = max(1, *ends)
        target.features(ids_T[None, :longest], Needs(), cache=full)
        full.keep([longest])
        choices = {}
        for boundary in {self._boundary(end) for end in ends}:
            before = boundary - self.config.window
            if before > self.config.budget:
                choices[before] = self._choice(full, 0, text[before:boundary], before)
        found = []
        for start in range(0, len(ends), ROWS):
            some = ends[start : start + ROWS]
            many, kept = _rows(full, 0, some), self.new_cache()
            self.follow(many, [text] * len(some), kept, choices)
            found.append(self.read(kept, block_AK[start : start + ROWS], None))
        return torch.cat(found)


class SparseGrowth:
    """Growth over the small cache: the anchor takes the first scratch slot, and drafted tokens the
    slots after it."""

    def __init__(self, drafter: Sparse, ctx: Context, kept: SparseCache) -> None:
        self.drafter, self.kept = drafter, kept
        assert ctx.cache is not None
        texts = ctx.rows()
        drafter.follow(ctx.cache, texts, kept)
        last = torch.tensor([ids[-1:] for ids in texts], device=ctx.ids_BT.device)
        self.logits_BS = self._read(last, None)[:, -1]

    def grow(self, tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
        return self._read(tokens_BW, None if parents_BW is None else parents_BW + 1)

    def marginals(self, depth: int) -> Tensor | None:
        return None

    def _read(self, ids_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
        return self.drafter.unembed(self.drafter.read(self.kept, ids_BT, parents_BT), 0)


def voted(attention_QwP: Tensor, heads: int, before: int, budget: int, pool: int) -> Tensor:
    """The positions [H, C] below `before` with the most attention of the last w tokens, ascending
    (SnapKV, Listing 1): summed over those, averaged over a KV head's query heads, and over `pool`
    neighbouring positions."""
    votes_HP = attention_QwP[..., :before].float().sum(1).unflatten(0, (heads, -1)).mean(1)
    smooth_HP = nn.functional.avg_pool1d(
        votes_HP, pool, stride=1, padding=pool // 2, count_include_pad=False
    )
    return smooth_HP.topk(min(budget, before), -1).indices.sort(-1).values


def attention(
    model: Any, layers: nn.ModuleList, full: SlotCache, b: int, last: Sequence[int], before: int
) -> list[Tensor]:
    """For each of a model's layers the attention weights [Q, w, P] that the tokens `last`, which
    stand from `before` on, pay to the slots of row b of the target's cache."""
    cache = _rows(full, b, [full.lengths[b]])
    ids_1w = torch.tensor([list(last)], device=model.device)
    cache.place(*size(ids_1w))  # they are read again behind the text, where nobody sees them
    position_1w = torch.arange(before, before + len(last), device=model.device)[None]
    slot_1P = torch.arange(cache.shown, device=model.device)[None]
    place = Place(position_1w, slot_1P[:, None] <= position_1w[..., None], slot_1P)
    seen: dict[int, Tensor] = {}
    handles = []
    for n, layer in enumerate(layers):
        module = next(m for m in layer.modules() if m is not layer and hasattr(m, "layer_idx"))
        handles.append(
            module.register_forward_hook(lambda _m, _i, out, n=n: seen.__setitem__(n, out[1][0]))
        )
    try:
        inputs = model_inputs(model.config.get_text_config(), place, model.dtype)
        model(input_ids=ids_1w, past_key_values=cache, use_cache=True, **inputs)
    finally:
        for handle in handles:
            handle.remove()
    return [seen[n] for n in range(len(layers))]


def _rows(full: SlotCache, b: int, lengths: list[int]) -> SlotCache:
    """A cache whose rows are row b's first tokens, in the same memory where there is room."""
    cache = SlotCache(len(full.slot_layers))
    cache.lengths, cache.capacity = list(lengths), full.capacity
    for ours, theirs in zip(cache.slot_layers, full.slot_layers, strict=True):
        if not theirs.is_initialized:
            continue
        ours.keys = theirs.keys[b : b + 1].expand(len(lengths), -1, -1, -1)
        ours.values = theirs.values[b : b + 1].expand(len(lengths), -1, -1, -1)
        ours.is_initialized = True
    return cache


def _slides(config: Any, layer: int) -> bool:
    """Whether a layer sees a sliding window only."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    return window is not None and (not kinds or kinds[layer] == "sliding_attention")

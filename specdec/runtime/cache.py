"""A KV cache in slots, which keeps the accepted tokens of chains, trees and ragged batches.

The committed tokens of each row are in its first slots. A forward pass writes after them into
scratch slots. `commit` then keeps these slots (all, some, or one path of a tree), and `drop`
discards them. Nothing is copied except an accepted path whose slots are not consecutive.

Each layer has its own buffers (`SlotLayer`). A pass that knows the shape of all layers keeps them
in one tensor, the *stack*: one call makes the views of all layers (`updates`), and a path is moved
in all layers at once.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING as KINDS,
)
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
)

from specdec.compat import TokensBefore, attention_of, mark_static_address
from specdec.errors import UserError, require
from specdec.runtime.recurrent_states import RecurrentStates

# kinds of layers, as transformers names them
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
# the kinds with a state that cannot be rolled back, and those of them with keys and values too
STATES = {k for k, c in KINDS.items() if issubclass(c, LinearAttentionCacheLayerMixin)}
MIXED = {kind for kind in STATES if issubclass(KINDS[kind], CacheLayerMixin)}


# writes the keys and values [B, T, 2, H, D] of a pass into one layer, and returns all keys and all
# values that it sees [B, H, P, D]
Update = Callable[[Tensor], tuple[Tensor, Tensor]]


class Place(NamedTuple):
    """The place of a forward pass in a cache: the positions of its tokens, and the slots that each
    token attends to."""

    position_BT: Tensor
    mask_BTP: Tensor | None = None  # None: plain causal attention is right
    slot_position_BP: Tensor | None = None  # positions of the slots; None: the slots' numbers

    def seen(self, shown: int) -> Tensor:
        """A mask [B, T, P] of the first `shown` slots that each token attends to, also if the pass
        needs no mask."""
        if self.mask_BTP is not None:
            return self.mask_BTP
        slot_P = torch.arange(shown, device=self.position_BT.device)
        return slot_P <= self.position_BT[..., None]


class SlotLayer(CacheLayerMixin):
    """Keys and values [B, H, P, D] of one layer, written to slots that the cache assigns."""

    is_sliding = False
    is_compileable = False  # if True, transformers would make its own masks
    keys: Tensor
    values: Tensor
    index: Tensor | None = None  # [B, 1, P, D], by which sparse attention chooses its keys

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = ref(cache)  # weak: a cycle would hold its memory until garbage collection

    @property
    def cache(self) -> "SlotCache":
        cache = self._cache()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def reserve(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all slots of the cache, for states with these shapes; unwritten slots are 0."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.keys.shape[2] < self.cache.capacity:
            self.hold(*map(self._with_room, (self.keys, self.values)))

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Use these buffers. In a cache of fixed size on a GPU they are marked as having a static
        address; otherwise torch would make no CUDA graph of a pass that writes to them."""
        self.keys, self.values, self.is_initialized = keys, values, True
        self.cache.stack = None  # `SlotCache._hold_stack` sets it again
        on_gpu = self.cache.fixed and keys.device.type != "cpu"
        if on_gpu and not torch.compiler.is_compiling():
            for buffer in (keys, values):
                mark_static_address(buffer, guard=False)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        cache = self.cache
        if cache.part is not None:
            return self._update_part(cache.part, key_states, value_states)
        self.reserve(key_states, value_states)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            self._write(buffer, states)
        return self.keys[:, :, : cache.shown], self.values[:, :, : cache.shown]

    def _update_part(self, part: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        """`update` for a part of the rows; the other rows are unchanged."""
        rows, slots, shown = len(self.cache.lengths), self.cache.slots, self.cache.shown
        if not self.is_initialized:
            keys, values = (x[:1, :, :0].expand(rows, -1, -1, -1) for x in states)
            self.lazy_initialization(keys, values)
        self.reserve(*states)
        part = part.to(self.keys.device)
        for buffer, new in zip((self.keys, self.values), states, strict=True):
            buffer[part, :, slots] = new
        return self.keys[part, :, :shown], self.values[part, :, :shown]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the keys [B, T, D] of an indexer, which come before the layer's own keys. Returns
        those of all slots."""
        states = indexer_key_states[:, None]
        self.index = self._with_room(states[:, :, :0] if self.index is None else self.index)
        self._write(self.index, states)
        return self.index[:, 0, : self.cache.shown]

    def _with_room(self, buffer: Tensor) -> Tensor:
        """The buffer, enlarged to the cache's number of slots; unwritten slots are 0."""
        missing = self.cache.capacity - buffer.shape[2]
        return pad(buffer, (0, 0, 0, missing)) if missing > 0 else buffer

    def replace(self, rows: Sequence[int], other: "SlotLayer", slots: int) -> None:
        """Overwrite the first `slots` slots of these rows with those of the rows of `other`."""
        if self.is_initialized:
            self.reserve(self.keys, self.values)
        if self.index is not None:
            self.index = self._with_room(self.index)
        for ours, theirs in zip(self.buffers(), other.buffers(), strict=True):
            ours[torch.tensor(rows, device=ours.device), :, :slots] = theirs[:, :, :slots]

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        where, rows_B1 = self.cache.slots, self.cache.rows_B1
        if isinstance(where, slice):
            buffer[:, :, where] = states
            return
        where = where.to(buffer.device)  # the layer may be on another device than the text
        if where.dim() == 1:
            buffer.index_copy_(2, where, states)
        else:
            assert rows_B1 is not None  # indexing, as scatter_ would copy the buffer
            buffer[rows_B1.to(buffer.device), :, where] = states.transpose(1, 2)

    def buffers(self) -> list[Tensor]:
        """All buffers with slots; some layers read another layer's keys and values."""
        written = [self.keys, self.values] if self.is_initialized else []
        return written if self.index is None else [*written, self.index]

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.shown, 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """A KV cache in slots; see the module. `capacity` fixes the number of slots, for compiled
    passes."""

    counts_positions = False  # see `TokensBefore`

    def __init__(self, layers: int, capacity: int | None = None, chains_only: bool = False) -> None:
        Cache.__init__(self, layers=[SlotLayer(self) for _ in range(layers)])
        self.chains_only = chains_only  # with recurrent state
        self.fixed = capacity is not None
        self.capacity = capacity or 0
        self.lengths: list[int] = [0]  # committed slots of each row
        self.scratch = 0  # number of slots written after them, the same in every row
        self.slots: slice | Tensor = slice(0, 0)  # slots that the current pass writes
        self.rows_B1: Tensor | None = None  # row numbers, if slots differ from row to row
        self.stack: Tensor | None = (
            None  # [N, 2, B, H, P, D]: keys and values of the first N layers
        )
        self.shown = 0  # number of slots that the current pass sees
        self.offset = 0  # where the current pass starts in the longest row
        self.part: Tensor | None = None  # the rows that are read now (see `alike`); None: all
        self._sees_BPP: Tensor | None = None  # scratch slots' ancestors, 1 or 0; None: a chain
        self.before_BT: Tensor | None = None  # counts of the current pass (see `TokensBefore`)
        self.asked: Callable[[], None] | None = None  # called whenever a layer asks for its length
        self.states = RecurrentStates()

    @property
    def slot_layers(self) -> list[SlotLayer]:
        """All layers, including copies that a model with loops adds for its later iterations."""
        return self.layers  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        """The current size of keys and values in bytes."""
        in_slots = sum(x.nbytes for layer in self.slot_layers for x in layer.buffers())
        return in_slots + self.states.nbytes

    def place(self, ids_BT: Tensor, parents_BT: Tensor | None = None) -> Place:
        """Reserve scratch slots in all layers for a forward pass over these tokens, and return its
        place. `parents_BT` holds the scratch slot of each token's parent, -1 for the last committed
        slot; None continues the last scratch slot as a chain."""
        place = self._place(ids_BT, parents_BT)
        if self.counts_positions:
            step_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
            self.before_BT = (place.position_BT - step_T).as_subclass(TokensBefore)
        return place

    def _place(self, ids_BT: Tensor, parents_BT: Tensor | None) -> Place:
        (B, T), device = ids_BT.shape, ids_BT.device
        if parents_BT is not None and self.chains_only:
            chain_T = torch.arange(self.scratch - 1, self.scratch + T - 1, device=device)
            require(
                torch.equal(parents_BT, chain_T.expand(B, -1)),
                "the target keeps a state in some of its layers, or makes its own masks and "
                "positions, so it cannot read a branch: draft chains, not trees",
            )
            parents_BT = None
        if len(self.lengths) != B:
            assert not any(self.lengths), "a cache in use keeps its number of rows"
            self.lengths = [0] * B
        start, self.scratch = self.scratch, self.scratch + T
        longest, alike = max(self.lengths), len(set(self.lengths)) == 1
        self.offset, end = longest + start, longest + self.scratch
        self.reserve(end)
        self.shown = self.capacity if self.fixed else end
        if alike:  # rows of equal length write the same slots
            fresh_T = torch.arange(self.offset, end, device=device)
            self.slots = fresh_T if self.fixed else slice(self.offset, end)
            if parents_BT is None and self._sees_BPP is None:
                mask = None
                if self.fixed or (self.offset and T > 1):
                    seen_P = torch.arange(self.shown, device=device)
                    mask = (seen_P <= fresh_T[:, None]).expand(B, -1, -1)
                    mask = mask.contiguous() if self.fixed else mask  # laid out as a tree's
                return Place(fresh_T.expand(B, -1), mask)
        length_B1 = torch.tensor(self.lengths, device=device)[:, None]
        if not alike:
            self.slots = length_B1 + torch.arange(start, self.scratch, device=device)
            self.rows_B1 = torch.arange(B, device=device)[:, None]
        depth_BP, sees_BTP = self._follow(B, T, device, parents_BT)
        slot_P = torch.arange(self.shown, device=device)
        inner_BP = slot_P - length_B1
        index_BP = inner_BP.clamp(0, self.scratch - 1)
        mask_BTP = sees_BTP.gather(2, index_BP[:, None].expand(-1, T, -1))
        mask_BTP = mask_BTP & (inner_BP < self.scratch)[:, None] | (inner_BP < 0)[:, None]
        ahead_BP = depth_BP.gather(1, index_BP)
        slot_position_BP = torch.where(inner_BP < 0, slot_P, length_B1 + ahead_BP)
        return Place(length_B1 + depth_BP[:, start:], mask_BTP, slot_position_BP)

    def alike(self, ids_BT: Tensor) -> Iterator[Tensor]:
        """Yield the rows group by group, each group of equal length, as if the cache held no other
        rows. A model that makes its own masks and positions for rows of one length then reads each
        group correctly. The pass must have been placed, as a chain."""
        T, by_length = ids_BT.shape[1], dict[int, list[int]]()
        for b, n in enumerate(self.lengths):
            by_length.setdefault(n, []).append(b)
        start = self.scratch - T
        try:
            for n, rows in by_length.items():
                self.part = torch.tensor(rows, device=ids_BT.device)
                self.offset, self.shown = n + start, n + self.scratch
                self.slots = slice(self.offset, self.shown)
                yield self.part
        finally:
            self.part = None

    def reserve(self, slots: int) -> None:
        """Allocate at least this many slots: in the stack now, in other layers at their next
        write."""
        if slots > self.capacity:
            assert not self.fixed, f"a cache of {self.capacity} slots was asked for {slots}"
            self.capacity = max(256, 2 * slots)
            if self.stack is not None:
                missing = self.capacity - self.stack.shape[4]
                self._hold_stack(pad(self.stack, (0, 0, 0, missing)))

    def first_scratch(self) -> list[int]:
        """The slot of each row at which its scratch slots begin."""
        return self.lengths

    @property
    def end(self) -> int:
        """The position after the last one of the pass that was placed."""
        return max(self.lengths) + self.scratch

    def updates(self, layers: int, heads: int, head_dim: int, x: Tensor) -> list[Update]:
        """The functions with which the placed pass writes each of the first `layers` layers, which
        have `heads` key heads of width `head_dim`, in the dtype of x. A few calls make the views of
        all layers: made layer by layer, they would take as long as some of a small pass's products.
        A cache of fixed size keeps a buffer for each layer, as compiled passes require."""
        stack = self.stack
        if self.fixed:
            return [partial(_updated, layer) for layer in self.slot_layers[:layers]]
        if stack is None or len(stack) != layers:
            stack = self._stacked(x.new_zeros(layers, 2, len(self.lengths), heads, 0, head_dim))
        shown = stack[..., : self.shown, :]
        keys, values = shown[:, 0].unbind(), shown[:, 1].unbind()
        if isinstance(self.slots, slice):
            written = stack[..., self.slots, :].permute(0, 2, 4, 1, 3, 5).unbind()
            return list(map(partial, [_copied] * layers, written, keys, values))
        index = slice(None), self.rows_B1, slice(None), self.slots
        return [
            partial(_scattered, both, index, *seen)
            for both, *seen in zip(stack.unbind(), keys, values, strict=True)
        ]

    def _stacked(self, empty: Tensor) -> Tensor:
        """The content of the layers, copied to a stack shaped like `empty`, which has no slots."""
        stack = pad(empty, (0, 0, 0, self.capacity))
        for both, layer in zip(stack, self.slot_layers, strict=False):
            if layer.is_initialized:
                for buffer, old in zip(both, (layer.keys, layer.values), strict=True):
                    buffer[:, :, : old.shape[2]] = old
        self._hold_stack(stack)
        return stack

    def _hold_stack(self, stack: Tensor) -> None:
        """Make the first layers' keys and values views of this stack."""
        for both, layer in zip(stack, self.slot_layers, strict=False):
            layer.hold(*both)
        self.stack = stack

    @property
    def _unstacked(self) -> list[SlotLayer]:
        return self.slot_layers if self.stack is None else self.slot_layers[len(self.stack) :]

    def _follow(
        self, B: int, T: int, device: torch.device, parents_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Depths of all scratch tokens [B, P], and a mask [B, T, P] of those that the T new ones
        attend to."""
        num_scratch, start = self.scratch, self.scratch - T
        slot_P = torch.arange(num_scratch, device=device)
        before_PP = (slot_P <= slot_P[:, None]).expand(B, -1, -1)
        if parents_BT is None and self._sees_BPP is None:
            return slot_P.expand(B, -1), before_PP[:, start:]
        sees = torch.zeros(B, num_scratch, num_scratch, device=device)
        known = before_PP[:, :start, :start] if self._sees_BPP is None else self._sees_BPP
        sees[:, :start, :start] = known
        if parents_BT is None:
            parents_BT = (slot_P[start:] - 1).expand(B, -1)
        known_BT1 = (parents_BT >= 0).to(sees.dtype)[..., None]
        sees[:, start:].scatter_(2, parents_BT.clamp_min(0)[..., None], known_BT1)
        sees.diagonal(0, 1, 2).fill_(1)
        for _ in range(T.bit_length()):  # ancestors: each product reaches twice as far
            sees = (sees @ sees).clamp_(max=1)
        self._sees_BPP = sees
        return sees.sum(-1).long() - 1, sees[:, start:] > 0

    def known(self) -> list[int]:
        """The number of committed tokens of each row."""
        return self.lengths

    def commit(self, counts: Sequence[int], path_BK: Tensor | None = None) -> None:
        """Commit the first `counts[b]` scratch slots of each row, or those that `path_BK` lists
        first, and discard the rest."""
        if path_BK is not None:
            ordered = torch.arange(path_BK.shape[1], device=path_BK.device)
            if not torch.equal(path_BK, ordered.expand_as(path_BK)):
                length_B1 = torch.tensor(self.lengths, device=path_BK.device)[:, None]
                source, goal = length_B1 + path_BK.clamp_min(0), length_B1 + ordered
                rows_B1 = torch.arange(len(path_BK), device=path_BK.device)[:, None]
                stacks = [] if self.stack is None else [self.stack]
                each = (buffer for layer in self._unstacked for buffer in layer.buffers())
                for buffer in (*stacks, *each):
                    rows, old, new = (x.to(buffer.device) for x in (rows_B1, source, goal))
                    buffer[..., rows, :, new, :] = buffer[..., rows, :, old, :]
        self.states.settle(counts, self.scratch)
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        self.drop()

    def drop(self) -> None:
        """Discard all uncommitted slots."""
        self.scratch, self._sees_BPP = 0, None
        self.states.drop()

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        known = self.lengths if len(self.lengths) > max(rows) else [0] * (max(rows) + 1)
        self.lengths = [known[b] for b in rows]  # a cache may not have been written yet
        if (stack := self.stack) is not None:
            self._hold_stack(stack[:, :, torch.tensor(rows, device=stack.device)])
        for layer in self._unstacked:
            if layer.is_initialized:
                index = torch.tensor(rows, device=layer.keys.device)
                layer.hold(layer.keys[index], layer.values[index])
            if layer.index is not None:
                layer.index = layer.index[torch.tensor(rows, device=layer.index.device)]
        self.states.select(rows)

    def replace(self, rows: Sequence[int], other: "SlotCache") -> None:
        """Assign these rows to the texts of `other`, a cache of the same model, in order. Their
        former content is no longer visible. Neither cache may have uncommitted slots."""
        assert not self.scratch and not other.scratch
        slots = max(other.first_scratch())
        self.reserve(slots)
        for layer, theirs in zip(self.slot_layers, other.slot_layers, strict=True):
            layer.replace(rows, theirs, slots)
        for b, length in zip(rows, other.lengths, strict=True):
            self.lengths[b] = length
        self.states.replace(rows, other.states)

    # What transformers' layers with states call. A state of None is one that has read nothing.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.current(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.current(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        key = "conv", layer_idx, state_idx
        return self.states.move_conv(key, conv_states, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return self.states.move(("recurrent", layer_idx, state_idx), recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self.asked is not None:
            self.asked()
        if self.before_BT is not None and self.part is None:
            return self.before_BT  # type: ignore[return-value]
        return max(self.lengths) if self.part is None else self.offset

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.offset


def _copied(
    written: Tensor, keys: Tensor, values: Tensor, states_BT2HD: Tensor
) -> tuple[Tensor, Tensor]:
    """An `Update` for rows that all write the same slots."""
    written.copy_(states_BT2HD)
    return keys, values


def _scattered(
    both: Tensor, index: Any, keys: Tensor, values: Tensor, states_BT2HD: Tensor
) -> tuple[Tensor, Tensor]:
    """An `Update` for rows that each write different slots."""
    both[index] = states_BT2HD
    return keys, values


def _updated(layer: SlotLayer, states_BT2HD: Tensor) -> tuple[Tensor, Tensor]:
    """An `Update` of a layer with its own buffers."""
    return layer.update(*states_BT2HD.permute(2, 0, 3, 1, 4))


def model_inputs(config: Any, place: Place, dtype: torch.dtype) -> dict[str, Any]:
    """A place in the form that transformers' decoder models take: position_ids and a 4-D mask, or
    one mask for each kind of layer. For sliding-window layers, the mask hides older keys."""
    position_BT, mask_BTP, slot_position_BP = place
    kinds = layer_kinds(config)
    if keeps_states(config) and not kinds & (ATTENTION | MIXED):
        return {}  # these layers know neither positions nor masks
    if mask_BTP is None:  # the model's own masks are right, and cheaper
        return {"position_ids": position_BT, "attention_mask": None}

    def ready(mask_BTP: Tensor) -> Tensor:
        if attention_of(config) == "eager":
            closed = torch.full_like(mask_BTP, torch.finfo(dtype).min, dtype=dtype)
            return closed.masked_fill(mask_BTP, 0)[:, None]
        return mask_BTP[:, None]

    full: Any = ready(mask_BTP)
    window = getattr(config, "sliding_window", None)
    near = full
    if window is not None and (not kinds or any("sliding" in kind for kind in kinds)):
        slot_position_BP = _numbered(slot_position_BP, mask_BTP)
        near_BTP = position_BT[..., None] - slot_position_BP[:, None] < window
        near = ready(mask_BTP & near_BTP)
    attention = near
    by_kind = {"chunked_attention", "indexed_attention"} & kinds
    if kinds and (near is not full or by_kind or keeps_states(config)):
        attention = {"full_attention": full, "sliding_attention": near, "indexed_attention": full}
        if chunk := getattr(config, "attention_chunk_size", None):
            slot_position_BP = _numbered(slot_position_BP, mask_BTP)
            same_BTP = position_BT[..., None] // chunk == slot_position_BP[:, None] // chunk
            attention["chunked_attention"] = ready(mask_BTP & same_BTP)
        if keeps_states(config):  # states read no padding (see recurrent_states.py)
            attention |= {kind: near if "sliding" in kind else full for kind in MIXED}
            attention |= dict.fromkeys(STATES - MIXED)
    return {"position_ids": position_BT, "attention_mask": attention}


def _numbered(slot_position_BP: Tensor | None, mask_BTP: Tensor) -> Tensor:
    """The positions of the slots; by default the slots' numbers."""
    if slot_position_BP is None:
        return torch.arange(mask_BTP.shape[2], device=mask_BTP.device)[None]
    return slot_position_BP


def cache_argument(model: Any) -> str:
    """The keyword for the cache of a transformers model: `cache` since version 5.24, which warns of
    the older `past_key_values`. A wrapper that forwards all arguments takes the keyword of its
    parts."""
    kinds: Any = (type(module) for module in model.modules())
    taken = map(_cache_argument, kinds)
    return next((name for name in taken if name), "past_key_values")


@cache
def _cache_argument(kind: Any) -> str | None:
    taken = inspect.signature(kind.forward).parameters
    return next((name for name in ("past_key_values", "cache") if name in taken), None)


def layer_kinds(config: Any) -> set[str]:
    """The kinds of attention in a model's layers; empty if all have the same kind."""
    return set(getattr(config, "layer_types", None) or ())


def keeps_states(config: Any) -> bool:
    """Whether a model has layers with recurrent state, so that it supports chains but not trees."""
    return bool(layer_kinds(config) & STATES)


def cacheable(config: Any) -> bool:
    """Whether a `SlotCache` supports all kinds of layers of the model."""
    return not _strange(config)


def _strange(config: Any) -> list[str]:
    return sorted((layer_kinds(config) & set(KINDS)) - ATTENTION - STATES)


def masks_by_slots(config: Any) -> bool:
    """Whether a model's sliding windows hide keys by slot, not by the given mask (GPT-Neo). A wrong
    mask then shows only in texts that are longer than a window."""
    return "local" in (getattr(config, "attention_layers", None) or ())


def new_cache(config: Any, capacity: int | None = None) -> SlotCache:
    """An empty cache for a decoder model. Raises UserError if it does not support the model's
    layers."""
    if strange := _strange(config):
        raise UserError(
            f"target: {config.model_type} has {strange[0]} layers, which keep more "
            "than keys, values and states: give a target with other layers"
        )
    of_decoder = getattr(config, "decoder_layers", None) or 0  # BART counts its encoder's first
    layers = max(config.num_hidden_layers, of_decoder)
    kind = _lightning() if config.model_type == "minimax" else SlotCache
    empty = kind(layers, capacity, keeps_states(config))
    empty.counts_positions = counts_positions(config)
    return empty


def counts_positions(config: Any) -> bool:
    """Whether layers derive their tokens' positions from the cache (see `TokensBefore`)."""
    return bool(getattr(config, "attn_temperature_tuning", None))


@cache
def _lightning() -> type[SlotCache]:
    """The cache class of MiniMax-01, which accepts only its own class."""
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    class LightningCache(SlotCache, MiniMaxCache):
        linear_cache: list[Tensor] = []

        def get_linear_cache(self, layer_idx: int) -> Tensor | None:
            return self.get_recurrent_state(layer_idx)

        def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
            self.update_recurrent_state(linear_cache, layer_idx)

    return LightningCache

"""Caches for models that keep more than keys, values and recurrent states: replay and recompute.

The memory of such a model (a cache of its own class, RWKV's list of tensors) cannot be rolled back.
A `ReplayCache` holds it as it was at the start of a speculation step. A row whose tokens are all
accepted takes the new memory. For any other row, the next forward pass first reads the accepted
tokens again (replay). Only many of them get a forward pass of their own. Rows with equally many
tokens share a pass, so nothing is padded; if a model would mix rows up, each row has its own pass.

A `RecomputeCache` keeps the tokens only, for models without any usable cache: every forward pass
reads the complete sequence.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specdec.runtime.cache import Place, SlotCache

# The most accepted tokens that passes read again: so few more tokens are nearly free, and a pass
# over them alone costs as much as one over a draft.
AGAIN = 16
GROWS = DynamicLayer, DynamicSlidingWindowLayer  # they make new tensors, and write to none

Path = tuple[Any, ...]  # where a tensor is, by attributes, keys and places
# the states of a pass [B, T, …]: those of some layers, or None, and the final ones
PassStates = tuple[Tensor | None, Tensor]


class ReplayMemory(NamedTuple):
    """The form of a model's memory: the keyword that takes it, and the batch dimension of each of
    its tensors (None: the tensor is the same for all rows)."""

    argument: str
    rows: dict[Path, int | None]

    @classmethod
    def learn(cls, argument: str, kept: Callable[[int], Any]) -> "ReplayMemory":
        """The memory format of a model; `kept(B)` is its memory after reading B rows of a text."""
        rows = dict[Path, int | None]()

        def note(path: Path, tensors: Sequence[Tensor]) -> Tensor:
            two, three = (x.shape for x in tensors)
            rows[path] = next((d for d, (a, b) in enumerate(zip(two, three)) if a != b), None)
            return tensors[0]

        _changed([kept(2), kept(3)], note)
        return cls(argument, rows)

    def joined(self, each: Sequence[Any]) -> Any:
        """One memory for several rows. The model may write to it; the rows' own memories are
        unchanged."""

        def join(path: Path, tensors: Sequence[Tensor]) -> Tensor:
            dim = self._dim(path, tensors[0], 1)
            return tensors[0].clone() if dim is None else torch.cat(list(tensors), dim)

        return _changed(each, join, GROWS if len(each) == 1 else ())

    def parted(self, memory: Any, count: int) -> list[Any]:
        """One memory for each of the `count` rows."""

        def part(path: Path, tensors: Sequence[Tensor], row: int) -> Tensor:
            dim = self._dim(path, tensors[0], count)
            return tensors[0] if dim is None else tensors[0].narrow(dim, row, 1)

        if count == 1:
            return [memory]
        return [_changed([memory], partial(part, row=b)) for b in range(count)]

    def _dim(self, path: Path, x: Tensor, count: int) -> int | None:
        """The batch dimension of a tensor with `count` rows. For a tensor that appears later, as in
        layers that compress long texts, it is the first dimension."""
        dim = self.rows.get(path, 0)
        return dim if dim is not None and x.dim() > dim and x.shape[dim] == count else None


class RecomputeCache(SlotCache):
    """The tokens of each row. Every forward pass reads the complete sequence, which costs more the
    longer it is, but there is no state that a rejected token could change."""

    def __init__(self) -> None:
        super().__init__(0, chains_only=True)
        self._committed: list[Tensor] = []  # the ids of each row
        self._scratch: list[Tensor] = []  # uncommitted ones [B, T], by pass

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._committed)

    def place(self, ids_BT: Tensor, parents_BT: Tensor | None = None) -> Place:
        place = super().place(ids_BT, parents_BT)
        if not self._committed:
            self._committed = [ids[:0] for ids in ids_BT]
        self._scratch.append(ids_BT)
        return place

    def sequences(self) -> tuple[Tensor, Tensor]:
        """The rows' known sequences [B, P], padded at their ends, and the positions [B, T] of the
        last pass's tokens in them."""
        scratch_BP = torch.cat(self._scratch, 1)
        rows = [torch.cat(x) for x in zip(self._committed, scratch_BP, strict=True)]
        end_B1 = torch.tensor([[len(row)] for row in rows], device=scratch_BP.device)
        T = self._scratch[-1].shape[1]
        return pad_sequence(rows, True), end_B1 + torch.arange(-T, 0, device=end_B1.device)

    def commit(self, counts: Sequence[int], path_BK: Tensor | None = None) -> None:
        both = zip(self._committed, torch.cat(self._scratch, 1), counts, strict=True)
        self._committed = [torch.cat([known, ids[:count]]) for known, ids, count in both]
        super().commit(counts)

    def drop(self) -> None:
        super().drop()
        self._scratch = []

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        if self._committed:
            self._committed = [self._committed[b] for b in rows]

    def replace(self, rows: Sequence[int], other: SlotCache) -> None:
        assert isinstance(other, RecomputeCache)
        super().replace(rows, other)
        for row, ids in zip(rows, other._committed, strict=True):
            self._committed[row] = ids


class ReplayCache(RecomputeCache):
    """The tokens of each row, and the model's memory of the first of them."""

    def __init__(self, memory: ReplayMemory, together: bool = True) -> None:
        super().__init__()
        self._memory, self._together = memory, together
        self._kept: list[Any] = []  # memory of each row
        self._read: list[int] = []  # number of tokens in each row's memory
        self._after: dict[int, Any] = {}  # by row, what is kept after the last pass

    @property
    def nbytes(self) -> int:
        kept: list[Tensor] = []

        def note(_: Path, tensors: Sequence[Tensor]) -> Tensor:
            kept.append(tensors[0])
            return tensors[0]

        for memory in self._kept:
            _changed([memory], note)
        return super().nbytes + sum(x.nbytes for x in kept)

    def reserve(self, slots: int) -> None:
        self.capacity = max(self.capacity, slots)

    def place(self, ids_BT: Tensor, parents_BT: Tensor | None = None) -> Place:
        place = super().place(ids_BT, parents_BT)
        if len(self._read) != len(ids_BT):
            self._kept, self._read = [None] * len(ids_BT), [0] * len(ids_BT)
        return place

    def replayed(self, run: Callable[[Tensor, Any, int], tuple[PassStates, Any]]) -> PassStates:
        """The states of the tokens of the placed pass. `run` makes the model read tokens [N, T]
        after a memory of a number of tokens (None at the beginning of a text), and returns their
        states and the new memory."""
        scratch_BP, T = torch.cat(self._scratch, 1), self._scratch[-1].shape[1]
        layers, final, order = list[Tensor | None](), list[Tensor](), list[int]()
        for rows in self._groups():
            read, known = self._read[rows[0]], self.lengths[rows[0]]
            if known - read > AGAIN:
                kept = run(self._again(rows), self._joined(rows), read)[1]
                for b, x in zip(rows, self._memory.parted(kept, len(rows)), strict=True):
                    self._kept[b], self._read[b] = x, known
            ids_NT = torch.cat([self._again(rows), scratch_BP[rows]], 1)
            (some, last), kept = run(ids_NT, self._joined(rows), self._read[rows[0]])
            self._after.update(zip(rows, self._memory.parted(kept, len(rows)), strict=True))
            layers.append(some)
            final.append(last[:, -T:])
            order += rows
        order_B = torch.tensor(order, device=scratch_BP.device).argsort()
        seen = [x[:, -T:] for x in layers if x is not None]
        return torch.cat(seen)[order_B] if seen else None, torch.cat(final)[order_B]

    def _groups(self) -> Iterator[list[int]]:
        """Groups of rows that can be read together."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for b, of_row in enumerate(zip(self._read, self.lengths, strict=True)):
            alike.setdefault(of_row if self._together else (b,), []).append(b)
        yield from alike.values()

    def _again(self, rows: Sequence[int]) -> Tensor:
        """The accepted tokens of these rows that are not in their memories [N, T]."""
        return torch.stack([self._committed[b][self._read[b] :] for b in rows])

    def _joined(self, rows: Sequence[int]) -> Any:
        known = self._read[rows[0]] > 0
        return self._memory.joined([self._kept[b] for b in rows]) if known else None

    def commit(self, counts: Sequence[int], path_BK: Tensor | None = None) -> None:
        after, tokens = self._after, self.scratch
        super().commit(counts, path_BK)
        for b, count in enumerate(counts):
            if count == tokens and b in after:
                self._kept[b], self._read[b] = after[b], self.lengths[b]

    def drop(self) -> None:
        super().drop()
        self._after = {}

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        if self._read:
            self._kept, self._read = [self._kept[b] for b in rows], [self._read[b] for b in rows]

    def replace(self, rows: Sequence[int], other: SlotCache) -> None:
        assert isinstance(other, ReplayCache)
        super().replace(rows, other)
        for row, kept, read in zip(rows, other._kept, other._read, strict=True):
            self._kept[row], self._read[row] = kept, read


def _changed(
    each: Sequence[Any],
    change: Callable[[Path, Sequence[Tensor]], Tensor],
    leave: tuple[type, ...] = (),
    path: Path = (),
    seen: dict[int, Any] | None = None,
) -> Any:
    """A copy of the first of several memories of the same form. Each tensor is replaced by `change`
    of the tensors at that place in all of them. Objects of the classes `leave` are copied with the
    same tensors. A tensor that occurs twice remains one tensor."""
    first, seen = each[0], {} if seen is None else seen
    if id(first) in seen:
        return seen[id(first)]
    new: Any = first
    if isinstance(first, Tensor):
        new = change(path, each)
    elif type(first) in leave:
        new = copy.copy(first)
    elif (parts := _parts(first)) is not None:
        of_each = [parts, *map(_parts, each[1:])]
        changed = {
            key: _changed(
                [x[key] for x in of_each if x is not None], change, leave, (*path, key), seen
            )
            for key in parts
        }
        if isinstance(first, list | tuple):
            new = type(first)(changed.values())
        else:
            new = copy.copy(first)
            (new if isinstance(first, dict) else vars(new)).update(changed)
    else:
        return first
    seen[id(first)] = new
    return new


def _parts(x: Any) -> dict[Any, Any] | None:
    """The content of an object by place, key or attribute; None if it is no container."""
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
    if isinstance(x, dict):
        return dict(x)
    whole = isinstance(x, PreTrainedConfig) or callable(x) or not hasattr(x, "__dict__")
    return None if whole else dict(vars(x))

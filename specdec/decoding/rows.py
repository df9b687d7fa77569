"""The growing texts of a batch, and the target's hidden states for them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.context import Context
from specdec.runtime.cache import SlotCache


class Rows:
    """The growing texts of a batch, and the target's hidden states for all tokens but their
    anchors. `texts` remains the same list object, so other holders see the current batch."""

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.texts: list[list[int]] = [[] for _ in prompts]
        self.seen = [0] * len(prompts)  # number of positions with hidden states
        self.device = device
        ids_BT = torch.zeros(len(prompts), 0, dtype=torch.long, device=device)
        self._buffers = Context(ids_BT)  # ids and hidden states, with room for more
        self.extend([list(p) for p in prompts])

    def ids(self) -> Tensor:
        """Token ids [B, T], padded on the right."""
        return self._buffers.ids_BT[:, : max(map(len, self.texts))]

    def anchors(self) -> Tensor:
        """The last token of each row [B, 1]."""
        return torch.tensor([[ids[-1]] for ids in self.texts], device=self.device)

    def extend(
        self,
        new: list[list[int]],
        hidden_states: Context | None = None,
        counts: Sequence[int] = (),
        path_BK: Tensor | None = None,
    ) -> None:
        """Commit tokens to each row, and the hidden states of `counts[b]` places of a forward pass:
        the first ones, or the first that `path_BK` lists."""
        fresh = [torch.tensor(ids, dtype=torch.long, device=self.device) for ids in new]
        self._buffers.ids_BT = _written(self._buffers.ids_BT, list(map(len, self.texts)), fresh)
        for ids, more in zip(self.texts, new, strict=True):
            ids += more
        if hidden_states is None:
            return
        for name, x in tensors(hidden_states).items():
            if path_BK is not None:
                x = x[torch.arange(len(x), device=x.device)[:, None], path_BK]
            buffer = getattr(self._buffers, name)
            buffer = x.new_empty(len(x), 0, x.shape[2]) if buffer is None else buffer
            kept = [places[:n] for places, n in zip(x, counts, strict=True)]
            setattr(self._buffers, name, _written(buffer, self.seen, kept))
        self.seen = [s + n for s, n in zip(self.seen, counts, strict=True)]

    def known(self, b: int) -> Context:
        """The tokens [1, T] of one row that have hidden states, with these hidden states. It is a
        copy, since the row may be reassigned."""
        ids_BT = self._buffers.ids_BT[b : b + 1, : self.seen[b]]
        return replace(
            each(self._buffers, lambda x: x[b : b + 1, : self.seen[b]].clone()), ids_BT=ids_BT
        )

    def context(self, cache: SlotCache | None = None) -> Context:
        """The context for a drafter; `cache` is the target's, for drafters that are part of the
        target."""
        known = max(self.seen)
        lengths = [len(ids) for ids in self.texts]
        read = each(self._buffers, lambda x: x[:, :known])
        return replace(read, ids_BT=self.ids(), lengths=lengths, texts=self.texts, cache=cache)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        index = torch.tensor(rows, device=self.device)
        self.texts[:] = [list(self.texts[b]) for b in rows]
        self.seen = [self.seen[b] for b in rows]
        kept = each(self._buffers, lambda x: x[index])
        self._buffers = replace(kept, ids_BT=self._buffers.ids_BT[index])

    def replace(self, rows: Sequence[int], other: "Rows") -> None:
        """Assign these rows to the texts of `other`, in order."""
        theirs = dict(zip(rows, range(len(rows)), strict=True))
        for b, n in theirs.items():
            self.texts[b], self.seen[b] = list(other.texts[n]), other.seen[n]

        def written(buffer: Tensor, source: Tensor, counts: Sequence[int]) -> Tensor:
            pieces = [
                source[n, : counts[n]] if (n := theirs.get(b)) is not None else x[:0]
                for b, x in enumerate(buffer)
            ]
            return _written(buffer, [0] * len(buffer), pieces)

        lengths = [len(text) for text in other.texts]
        self._buffers.ids_BT = written(self._buffers.ids_BT, other._buffers.ids_BT, lengths)
        for name, x in tensors(other._buffers).items():
            setattr(self._buffers, name, written(getattr(self._buffers, name), x, other.seen))


def tensors(hidden_states: Context) -> dict[str, Any]:
    """The hidden states of a context, by field name."""
    names = ("layers_BTF", "final_BTD")
    return {name: x for name in names if (x := getattr(hidden_states, name)) is not None}


def each(hidden_states: Context, change: Callable[[Tensor], Tensor]) -> Context:
    """The context with `change` applied to every hidden state; ids are unchanged."""
    changed: dict[str, Any] = {name: change(x) for name, x in tensors(hidden_states).items()}
    return replace(hidden_states, **changed)


def _written(buffer: Tensor, starts: Sequence[int], pieces: Sequence[Tensor]) -> Tensor:
    """The buffer [B, T, …], enlarged if it is full, with a piece [t, …] appended to each row."""
    end = max(start + len(x) for start, x in zip(starts, pieces, strict=True))
    if end > buffer.shape[1]:
        grown = buffer.new_zeros(buffer.shape[0], max(256, 2 * end), *buffer.shape[2:])
        grown[:, : buffer.shape[1]] = buffer
        buffer = grown
    for b, (start, x) in enumerate(zip(starts, pieces, strict=True)):
        buffer[b, start : start + len(x)] = x
    return buffer

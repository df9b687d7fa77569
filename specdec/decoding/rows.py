"""The texts of a batch while they grow, and what the target said of them.

Letters: B batch, T time, K accepted tokens, F features, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.context import Context
from specdec.runtime.cache import SlotCache


class Rows:
    """The growing texts of a batch, and the target's features of all but their anchors. `texts`
    stays one list, so that whoever holds it sees the batch as it is."""

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.texts = [list(p) for p in prompts]
        self.seen = [0] * len(self.texts)  # positions whose features are here
        self.device = device
        self._ids = torch.zeros(len(self.texts), 0, dtype=torch.long, device=device)
        self._layers: Tensor | None = None
        self._final: Tensor | None = None
        self._write_ids([(b, 0, ids) for b, ids in enumerate(self.texts)])

    def ids(self) -> Tensor:
        """[B, T], padded on the right."""
        return self._ids[:, : max(map(len, self.texts))]

    def anchors(self) -> Tensor:
        """The last token of each row [B, 1]."""
        return torch.tensor([[ids[-1]] for ids in self.texts], device=self.device)

    def extend(
        self, new: list[list[int]], features: Context, counts: list[int], path_BK: Tensor | None
    ) -> None:
        """Commit tokens to each row, and the features of `counts[b]` places of a pass: the first
        ones, or those that `path_BK` names."""
        starts = [len(ids) for ids in self.texts]
        for ids, more in zip(self.texts, new, strict=True):
            ids += more
        self._write_ids([(b, s, n) for b, (s, n) in enumerate(zip(starts, new, strict=True))])
        self._layers = self._written(self._layers, features.layers_BTF, counts, path_BK)
        self._final = self._written(self._final, features.final_BTD, counts, path_BK)
        self.seen = [s + c for s, c in zip(self.seen, counts, strict=True)]

    def known(self, b: int) -> Context:
        """The tokens [1, T] of one row whose features are here, with these."""
        row, known = slice(b, b + 1), self.seen[b]
        layers, final = (None if x is None else x[row, :known] for x in (self._layers, self._final))
        return Context(self._ids[row, :known], layers, final)

    def context(self, cache: SlotCache | None = None) -> Context:
        """What a drafter may read; `cache` is the target's, for drafters that are part of it."""
        known = max(self.seen)
        return Context(
            self.ids(),
            None if self._layers is None else self._layers[:, :known],
            None if self._final is None else self._final[:, :known],
            lengths=[len(ids) for ids in self.texts],
            texts=self.texts,
            cache=cache,
        )

    def select(self, rows: list[int]) -> None:
        """Keep these rows of the batch only."""
        index = torch.tensor(rows, device=self.device)
        self.texts[:] = [list(self.texts[b]) for b in rows]
        self.seen = [self.seen[b] for b in rows]
        self._ids = self._ids[index]
        self._layers = None if self._layers is None else self._layers[index]
        self._final = None if self._final is None else self._final[index]

    def _write_ids(self, pieces: list[tuple[int, int, list[int]]]) -> None:
        end = max(start + len(new) for _, start, new in pieces)
        self._ids = _roomy(self._ids, end)
        for b, start, new in pieces:
            self._ids[b, start : start + len(new)] = torch.tensor(new, device=self.device)

    def _written(
        self, buffer: Tensor | None, new: Tensor | None, counts: list[int], path_BK: Tensor | None
    ) -> Tensor | None:
        if new is None:
            return buffer
        if path_BK is not None:
            rows = torch.arange(len(new), device=new.device)[:, None]
            new = new[rows, path_BK]
        if buffer is None:
            buffer = new.new_empty(len(new), 0, new.shape[2])
        buffer = _roomy(buffer, max(s + c for s, c in zip(self.seen, counts, strict=True)))
        for b, (start, count) in enumerate(zip(self.seen, counts, strict=True)):
            buffer[b, start : start + count] = new[b, :count]
        return buffer


def _roomy(buffer: Tensor, length: int) -> Tensor:
    """A buffer [B, T, …] with room for `length` entries a row, grown by doubling."""
    if length <= buffer.shape[1]:
        return buffer
    grown = buffer.new_zeros(buffer.shape[0], max(256, 2 * length), *buffer.shape[2:])
    grown[:, : buffer.shape[1]] = buffer
    return grown

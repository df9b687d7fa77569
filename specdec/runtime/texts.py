"""A cache that keeps the texts themselves, for models whose own cache cannot be used here."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.runtime.cache import Place, SlotCache


class TextCache(SlotCache):
    """The tokens of each row. Every pass reads the whole text anew, which costs more the longer
    the text is, but nothing is kept that a rejected token could have changed."""

    def __init__(self) -> None:
        super().__init__(0, chains_only=True)
        self._committed: list[Tensor] = []  # the ids of each row
        self._scratch: list[Tensor] = []  # those after them [B, T], by pass

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._committed)

    def place(self, ids_BT: Tensor, parents_BT: Tensor | None = None) -> Place:
        place = super().place(ids_BT, parents_BT)
        if not self._committed:
            self._committed = [ids[:0] for ids in ids_BT]
        self._scratch.append(ids_BT)
        return place

    def texts(self) -> tuple[Tensor, Tensor]:
        """The rows' texts as far as they are known [B, P], padded at their ends, and the places
        [B, T] in them of the tokens of the last pass."""
        scratch_BPs = torch.cat(self._scratch, 1)
        rows = [torch.cat(x) for x in zip(self._committed, scratch_BPs, strict=True)]
        end_B1 = torch.tensor([[len(row)] for row in rows], device=scratch_BPs.device)
        T = self._scratch[-1].shape[1]
        return pad_sequence(rows, True), end_B1 + torch.arange(-T, 0, device=end_B1.device)

    def keep(self, counts: Sequence[int], path_BK: Tensor | None = None) -> None:
        both = zip(self._committed, torch.cat(self._scratch, 1), counts, strict=True)
        self._committed = [torch.cat([known, ids[:count]]) for known, ids, count in both]
        super().keep(counts)

    def drop(self) -> None:
        super().drop()
        self._scratch = []

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        if self._committed:
            self._committed = [self._committed[b] for b in rows]

    def replace(self, rows: Sequence[int], other: SlotCache) -> None:
        assert isinstance(other, TextCache)
        super().replace(rows, other)
        for row, ids in zip(rows, other._committed, strict=True):
            self._committed[row] = ids

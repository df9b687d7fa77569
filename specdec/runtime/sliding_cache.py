"""The KV cache of a draft whose layers see a window: it holds the last `window` tokens of a text
and its first `sink`, however long the text becomes.

Token p of a text is kept in slot p while p is below `sink` + `window`, as in any `SlotCache`. After
that the slots of the window are a ring: a token takes the slot of the one `window` before it, so
nothing else is moved. A pass writes to scratch slots after these, so that queries still see what
the new tokens will replace; `commit` copies those that are kept into the ring.

Every key has the rotary position of its token in the text, those of sinks as well: the distance
between a token and the sinks grows with the text. (StreamingLLM, Xiao et al. 2024, numbers the
tokens by their slots instead, for models that were not trained with a window.) So a layer computes
the same in training, which masks what is out of the window.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.runtime.cache import Place, SlotCache


class SlidingCache(SlotCache):
    """A token sees those less than `window` positions before it, itself included, and the first
    `sink` of the text. `lengths` counts the tokens of each row's text that were read; a pass may
    read the last one again, but none before it."""

    def __init__(self, layers: int, window: int, sink: int = 0) -> None:
        super().__init__(layers)
        self.window, self.sink = window, sink

    def first_scratch(self) -> list[int]:
        return [min(n, self.sink + self.window) for n in self.lengths]

    def _place(self, ids_BT: Tensor, parents_BT: Tensor | None) -> Place:
        (B, T), device = ids_BT.shape, ids_BT.device
        if len(self.lengths) != B:
            assert not any(self.lengths), "a cache in use keeps its number of rows"
            self.lengths = [0] * B
        if max(self.lengths) + self.scratch + T <= self.window:
            return super()._place(ids_BT, parents_BT)  # nothing is hidden yet
        start, self.scratch = self.scratch, self.scratch + T
        first = self.first_scratch()
        self.shown = max(first) + self.scratch
        self.reserve(self.shown)
        first_B1, length_B1 = (
            torch.tensor(x, device=device)[:, None] for x in (first, self.lengths)
        )
        if len(set(first)) == 1:
            self.slots = slice(first[0] + start, self.shown)
        else:
            self.slots = first_B1 + torch.arange(start, self.scratch, device=device)
            self.rows_B1 = torch.arange(B, device=device)[:, None]
        depth_BP, sees_BTP = self._follow(B, T, device, parents_BT)
        inner_BP = torch.arange(self.shown, device=device) - first_B1
        index_BP = inner_BP.clamp(0, self.scratch - 1)
        mask_BTP = sees_BTP.gather(2, index_BP[:, None].expand(-1, T, -1))
        mask_BTP = mask_BTP & (inner_BP < self.scratch)[:, None] | (inner_BP < 0)[:, None]
        ahead_BP = length_B1 + depth_BP.gather(1, index_BP)
        slot_position_BP = torch.where(inner_BP < 0, self.positions(device), ahead_BP)
        position_BT = length_B1 + depth_BP[:, start:]
        mask_BTP &= self.near(position_BT, slot_position_BP)
        return Place(position_BT, mask_BTP, slot_position_BP)

    def positions(self, device: torch.device) -> Tensor:
        """The positions [B, P] in their texts of the tokens in the slots that are shown; of scratch
        slots, those of a chain."""
        slot_P = torch.arange(self.shown, device=device)
        length_B1, first_B1 = (
            torch.tensor(x, device=device)[:, None] for x in (self.lengths, self.first_scratch())
        )
        kept_BP = length_B1 - 1 - (length_B1 - 1 - slot_P) % self.window  # the ring's
        kept_BP = torch.where(slot_P < self.sink, slot_P, kept_BP)
        return torch.where(slot_P < first_B1, kept_BP, length_B1 + slot_P - first_B1)

    def near(self, position_BT: Tensor, slot_position_BP: Tensor) -> Tensor:
        """Whether tokens at these positions see slots of those positions, or sinks [B, T, P]."""
        inside_BTP = slot_position_BP[:, None] > position_BT[..., None] - self.window
        return inside_BTP | (slot_position_BP < self.sink)[:, None]

    def commit(self, counts: Sequence[int], path_BK: Tensor | None = None) -> None:
        """As in a `SlotCache`; of more tokens than the window holds, the last ones stay."""
        first, most = self.first_scratch(), max(counts, default=0)
        step_K = torch.arange(most)
        length_B1, first_B1, count_B1 = (
            torch.tensor(x)[:, None] for x in (self.lengths, first, list(counts))
        )
        from_BK = step_K.expand(len(counts), -1) if path_BK is None else path_BK[:, :most].cpu()
        position_BK, source_BK = length_B1 + step_K, first_B1 + from_BK
        ring_BK = self.sink + (position_BK - self.sink) % self.window
        goal_BK = torch.where(position_BK < self.sink, position_BK, ring_BK)
        stays_BK = (position_BK < self.sink) | (step_K >= count_B1 - self.window)
        moves_BK = (step_K < count_B1) & stays_BK & (source_BK != goal_BK)
        rows_N, _ = place = moves_BK.nonzero(as_tuple=True)
        for layer in self.slot_layers if len(rows_N) else ():
            for buffer in layer.buffers():
                rows, old, new = (
                    x.to(buffer.device) for x in (rows_N, source_BK[place], goal_BK[place])
                )
                buffer[rows, :, new] = buffer[rows, :, old]
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        self.drop()

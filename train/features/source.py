"""Where training gets the target's features: the interface of all sources, and one source.

`Online` runs the target whenever rows are requested; `Disk` (store.py) reads stored features.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.context import Context, Needs
from specdec.forcing.teacher import Batch, summarise
from specdec.sampling.sampler import Sampler
from specdec.target.base import Target
from train.data.packing import Row


class Source(Protocol):
    """Packed rows with the target's features of them."""

    @property
    def rows(self) -> Sequence[Row]: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Ids, features, final hidden states and the summary of p for the rows at these indices,
        padded to the longest of them."""


class Online:
    """Rows that the target reads whenever they are requested."""

    def __init__(self, target: Target, needs: Needs, sampler: Sampler, rows: Sequence[Row]) -> None:
        self.target, self.needs, self.sampler, self.rows = target, needs, sampler, rows

    def batch(self, indices: Sequence[int]) -> Batch:
        text, mask_BT = texts([self.rows[i] for i in indices], self.target.device)
        ctx, final_BTD = self.target.features(
            text.ids_BT, self.needs, position_BT=text.position_BT, document_BT=text.document_BT
        )
        return Batch(ctx, final_BTD, summarise(self.target, final_BTD, self.sampler), mask_BT)


def texts(rows: Sequence[Row], device: torch.device) -> tuple[Context, Tensor]:
    """Rows as tensors [B, T], padded on the right to the longest, and their mask; no features."""

    def padded(name: str, fill: int = 0) -> Tensor:
        parts = [torch.from_numpy(getattr(row, name)).long() for row in rows]
        return pad_sequence(parts, batch_first=True, padding_value=fill).to(device)

    ctx = Context(padded("ids"), document_BT=padded("document", -1), position_BT=padded("position"))
    return ctx, padded("mask").bool()

"""Where training takes the target's features from: what every source gives, and one of them.

`Online` runs the target whenever rows are asked for; `Disk` (store.py) reads what was stored.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.context import Needs
from specdec.forcing.teacher import Batch, summarise
from specdec.sampling.sampler import Sampler
from specdec.target.base import Target
from train.data.packing import Row


class Source(Protocol):
    """Packed rows with what the target says of them."""

    @property
    def rows(self) -> Sequence[Row]: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Ids, features, final hidden states and what p is normalised with, of rows by index,
        padded to the longest of them."""


class Online:
    """Rows that the target reads whenever they are asked for."""

    def __init__(self, target: Target, needs: Needs, sampler: Sampler, rows: Sequence[Row]) -> None:
        self.target, self.needs, self.sampler, self.rows = target, needs, sampler, rows

    def batch(self, indices: Sequence[int]) -> Batch:
        text = texts([self.rows[i] for i in indices], self.target.device)
        ctx, final_BTD = self.target.features(
            text.ids_BT, self.needs, position_BT=text.position_BT, document_BT=text.document_BT
        )
        summary = summarise(self.target, final_BTD, self.sampler)
        return Batch(ctx, final_BTD, summary, text.mask_BT)


class Texts(NamedTuple):
    """Rows as tensors [B, T], padded on the right to the longest."""

    ids_BT: Tensor
    position_BT: Tensor
    document_BT: Tensor  # -1 = padding
    mask_BT: Tensor


def texts(rows: Sequence[Row], device: torch.device) -> Texts:
    def padded(name: str, fill: int = 0) -> Tensor:
        parts = [torch.from_numpy(getattr(row, name)).long() for row in rows]
        return pad_sequence(parts, batch_first=True, padding_value=fill).to(device)

    mask_BT = padded("mask").bool()
    return Texts(padded("ids"), padded("position"), padded("document", -1), mask_BT)

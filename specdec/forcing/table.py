"""Acceptance at every anchor of a batch, and what follows from it for a decoder."""

from typing import NamedTuple

from torch import Tensor

from specdec.forcing.anchors import Anchors
from specdec.forcing.batch import Batch
from specdec.theory.alpha import Acceptance, visits


class Table(NamedTuple):
    """Acceptance at every anchor of a batch, and the anchors themselves."""

    anchors: Anchors
    alpha: Acceptance  # each [N, K]; 0 where not valid
    more: tuple[Tensor, ...] = ()  # extra columns [N, K] that the caller asked for


def answers(table: Table, batch: Batch) -> list[Acceptance]:
    """Cut a table into answers, each [T, K] from the anchor of a decoder's first round (prefill
    emits an answer's first token) to its last token but one. Depths beyond its end are 0."""
    row_N, position_N = table.anchors.row_N, table.anchors.position_N
    usable_N = table.anchors.valid_NK[:, 0] & batch.mask_BT[row_N, position_N]
    place_U = (row_N * batch.mask_BT.shape[1] + position_N)[usable_N].cpu()
    cuts = ((place_U.diff() != 1).nonzero()[:, 0] + 1).tolist()
    columns = [column[usable_N].float().cpu().tensor_split(cuts) for column in table.alpha]
    return [Acceptance(*parts) for parts in zip(*columns, strict=True) if len(place_U)]


def predicted_rounds(alpha_TK: Tensor) -> tuple[float, float]:
    """The tokens of one answer after its first, and the rounds that a decoder is expected to need
    for them: τ is their ratio. `alpha_TK` has a row for each token but the last; depths beyond the
    end, where a decoder's tokens are cut off, change nothing. With greedy acceptance these are the
    decoder's own counts along the same answer."""
    return float(len(alpha_TK)), float(visits(alpha_TK).sum())

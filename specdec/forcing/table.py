"""Acceptance at every anchor of a batch, and what follows from it for a decoder."""

from typing import NamedTuple

from torch import Tensor

from specdec.forcing.anchors import Anchors
from specdec.forcing.batch import Batch
from specdec.theory.alpha import Acceptance, expected_tokens, visits


class Table(NamedTuple):
    """Acceptance at every anchor of a batch, and the anchors themselves."""

    anchors: Anchors
    alpha: Acceptance  # each [N, K]; 0 where not valid
    more: tuple[Tensor, ...] = ()  # extra columns [N, K] that the caller asked for


def answers(table: Table, batch: Batch) -> list[Acceptance]:
    """Cut a table into answers, each [T, K] from the anchor of a decoder's first round (prefill
    emits an answer's first token) to the last anchor whose depths are all valid."""
    row_N, position_N = table.anchors.row_N, table.anchors.position_N
    usable_N = table.anchors.valid_NK.all(-1) & batch.mask_BT[row_N, position_N]
    place_U = (row_N * batch.mask_BT.shape[1] + position_N)[usable_N].cpu()
    cuts = ((place_U.diff() != 1).nonzero()[:, 0] + 1).tolist()
    columns = [column[usable_N].float().cpu().tensor_split(cuts) for column in table.alpha]
    return [Acceptance(*parts) for parts in zip(*columns, strict=True) if len(place_U)]


def predicted_rounds(alpha_TK: Tensor) -> tuple[float, float]:
    """Tokens and rounds that a decoder is expected to need for one answer: τ is their ratio."""
    visit_T = visits(alpha_TK)
    tokens_T = expected_tokens(alpha_TK.double())
    return float((visit_T * tokens_T).sum()), float(visit_T.sum())

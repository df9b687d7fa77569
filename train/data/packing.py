"""Documents → rows: packed by best fit, several documents per row, none of them split."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.errors import require
from train.data.template import Document


@dataclass(eq=False)
class Row:
    """Whole documents one after another, as arrays of one length, at most that given to `pack`."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    document: NDArray[np.int32]  # index into the documents that were packed
    position: NDArray[np.int32]  # from 0 in each document
    rounds: NDArray[np.int32] | None = None  # as in `Document`; all documents have them, or none
    weight: NDArray[np.float32] | None = None  # as in `Document`; None: 1 for all

    @property
    def drafted(self) -> NDArray[np.int32] | None:
        """The tokens [T, K] drafted at each anchor of a round, -1 elsewhere."""
        return None if self.rounds is None else self.rounds[:, 1:]


def pack(documents: Sequence[Document], length: int) -> list[Row]:
    """Rows of up to `length` tokens, best fit, longest documents first. Raises UserError if a
    document is longer than a row."""
    lengths = np.array([len(d.ids) for d in documents])
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    rows: list[list[int]] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        need = len(documents[i].ids)
        require(
            need <= length,
            f"document {documents[i].id!r} has {need} tokens, more than the {length} of a row: "
            "give a larger data.max_length",
        )
        at = bisect_left(room, (need, 0))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(room, (left - need, row))
    rounds = [d.rounds for d in documents if d.rounds is not None]
    return [
        Row(
            np.concatenate([documents[i].ids for i in packed]),
            np.concatenate([documents[i].mask for i in packed]),
            np.repeat(np.array(packed, np.int32), lengths[packed]),
            np.concatenate([np.arange(lengths[i], dtype=np.int32) for i in packed]),
            np.concatenate([rounds[i] for i in packed]) if rounds else None,
            _weight([documents[i] for i in packed]),
        )
        for packed in rows
    ]


def _weight(packed: Sequence[Document]) -> NDArray[np.float32] | None:
    """The weights of the tokens of a row; None if they are all 1."""
    if all(document.weight is None for document in packed):
        return None
    each = [np.ones(len(d.ids), np.float32) if d.weight is None else d.weight for d in packed]
    return np.concatenate(each)

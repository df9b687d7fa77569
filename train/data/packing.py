"""Documents → rows: packed best fit, several documents a row, none of them split."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.errors import UserError
from train.data.template import Document


@dataclass(eq=False)
class Row:
    """Whole documents one after another, as arrays of one length; never longer than asked for."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    document: NDArray[np.int32]  # index into the documents that were packed
    position: NDArray[np.int32]  # from 0 in each document


def pack(documents: Sequence[Document], length: int) -> list[Row]:
    """Rows of up to `length` tokens, best fit, longest documents first; none is split.

    Raises UserError where a document is longer than a row.
    """
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    rows: list[list[int]] = []
    for i in sorted(range(len(documents)), key=lambda i: (-len(documents[i].ids), i)):
        need = len(documents[i].ids)
        if need > length:
            raise UserError(
                f"document {documents[i].id!r} has {need} tokens, more than the {length} of a row: "
                "give a larger data.max_length"
            )
        at = bisect_left(room, (need, 0))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(room, (left - need, row))
    return [_row(documents, indices) for indices in rows]


def _row(documents: Sequence[Document], indices: Sequence[int]) -> Row:
    lengths = [len(documents[i].ids) for i in indices]
    return Row(
        np.concatenate([documents[i].ids for i in indices]),
        np.concatenate([documents[i].mask for i in indices]),
        np.repeat(np.array(indices, np.int32), lengths),
        np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
    )

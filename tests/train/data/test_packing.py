"""Documents → packed rows.

Run alone: python -m pytest tests/train/data/test_packing.py
"""

import random
from collections import Counter

import numpy as np
import pytest

from specdec.errors import UserError
from train.data.sequences import Document, pack_rows


def documents(*lengths: int) -> list[Document]:
    return [
        Document(str(i), 100 * i + 1 + np.arange(n, dtype=np.int32), np.arange(n) % 2 == 1)
        for i, n in enumerate(lengths)
    ]


def test_pack_by_hand() -> None:
    rows = pack_rows(documents(2, 6, 3, 5, 4), 10)
    # longest first into the fullest row that has room: 6; 5; 4 beside 6; 3 beside 5; 2 beside both
    assert [list(dict.fromkeys(r.document.tolist())) for r in rows] == [[1, 4], [3, 2, 0]]
    assert [len(r.ids) for r in rows] == [10, 10]
    assert rows[1].ids.tolist() == [301, 302, 303, 304, 305, 201, 202, 203, 1, 2]
    assert rows[1].position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert rows[1].document.tolist() == [3, 3, 3, 3, 3, 2, 2, 2, 0, 0]


def test_rows_have_weights_where_a_document_has() -> None:
    some = documents(2, 3, 4)
    assert all(row.weight is None for row in pack_rows(some, 5))
    some[1].weight = np.array([1, 0.5, 2], np.float32)
    rows = pack_rows(some, 5)
    assert [list(dict.fromkeys(r.document.tolist())) for r in rows] == [[2], [1, 0]]
    assert rows[0].weight is None and rows[1].weight is not None
    assert rows[1].weight.tolist() == [1, 0.5, 2, 1, 1]


def test_pack_keeps_every_token_once_and_whole() -> None:
    rng = random.Random(0)
    given = documents(*(rng.randint(1, 64) for _ in range(500)))
    rows = pack_rows(given, 64)
    assert [r.ids.tolist() for r in pack_rows(given, 64)] == [r.ids.tolist() for r in rows]
    seen: Counter[int] = Counter()
    for row in rows:
        assert len(row.ids) == len(row.mask) == len(row.document) == len(row.position) <= 64
        for i in dict.fromkeys(row.document.tolist()):
            n = len(given[i].ids)
            (where,) = (row.document == i).nonzero()
            at = int(where[0])
            assert where.tolist() == list(range(at, at + n))
            assert (
                row.document[at : at + n].tolist() == [i] * n == [d for d in row.document if d == i]
            )
            assert (row.ids[at : at + n] == given[i].ids).all()
            assert (row.mask[at : at + n] == given[i].mask).all()
            assert row.position[at : at + n].tolist() == list(range(n))
            seen[i] += 1
    assert seen == Counter(range(500))
    total = sum(len(d.ids) for d in given)
    assert (
        len(rows) <= 11 / 9 * -(-total // 64) + 1
    )  # best-fit decreasing's guarantee, on the bound


def test_pack_edges() -> None:
    assert pack_rows([], 8) == []
    assert [len(r.ids) for r in pack_rows(documents(8, 8), 8)] == [8, 8]
    with pytest.raises(UserError, match="'0' has 9 tokens, more than the 8 of a row"):
        pack_rows(documents(9), 8)

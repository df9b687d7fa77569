"""How static trees drive a drafter's growth.

Run alone: python -m pytest tests/sampling/test_trees.py
"""

import pytest
import torch
from torch import Tensor

from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Growth, Static


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        # one node after the one that grew last, or first after the anchor, continues a chain
        ([[0], [0, 0], [0, 0, 0]], [None, None]),
        ([[0], [1], [2], [0, 0], [0, 0, 0]], [None, None]),
        ([[0], [1], [1, 0], [1, 0, 0]], [None, None]),
        # two nodes at once name their parents, and so does one after the first of two
        ([[0], [1], [0, 0], [1, 0]], [[-1, -1]]),
        ([[0], [1], [0, 0], [1, 0], [0, 0, 0]], [[-1, -1], [0]]),
        ([[0], [1], [0, 0], [1, 0], [1, 0, 0]], [[-1, -1], None]),
    ],
    ids=str,
)
def test_parents_are_named_where_growth_is_no_chain(
    paths: list[list[int]], expected: list[list[int] | None]
) -> None:
    found: list[list[int] | None] = []

    def grow(tokens_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
        found.append(None if parents_BT is None else parents_BT[0].tolist())
        return torch.arange(7.0).expand(1, tokens_BT.shape[1], -1)

    choose = Choose(Sampler(0.0), "fixed", RowDraws([0]))
    proposal = Static(paths).draft(Growth(torch.arange(7.0)[None], grow), choose)
    leaves = [p for p in paths if [*p, 0] not in paths]
    inner = {len(p) for p in paths if p not in leaves}  # depths at which nodes grow
    assert found == expected and len(found) == len(inner)
    assert proposal.tokens_BG[0].tolist() == [6 - path[-1] for path in sorted(paths, key=len)]

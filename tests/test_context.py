"""Nodes and places: what the target reads of a proposal, and which places of it are kept.

Run alone: python -m pytest tests/test_context.py
"""

import torch

from specdec.context import Proposal, Scouts

# two rows of a tree: node 0 below the anchor, 1 and 2 below node 0, 3 below node 2; the second
# row has nodes 0 and 1 alone
TREE = Proposal(
    torch.tensor([[10, 11, 12, 13], [20, 21, -1, -1]]),
    None,
    torch.tensor([[-1, 0, 0, 2], [-1, 0, -1, -1]]),
)
CHAIN = Proposal(torch.tensor([[10, 11, 12], [20, -1, -1]]))
ANCHORS = torch.tensor([[7], [8]])


def test_a_chain_is_read_as_it_stands() -> None:
    ids_BM, above_BM = CHAIN.block(ANCHORS)
    assert ids_BM.tolist() == [[7, 10, 11, 12], [8, 20, 0, 0]] and above_BM is None
    assert CHAIN.above_BG.tolist() == [[0, 1, 2]] * 2
    assert CHAIN.path_BK(torch.tensor([2, 0])).tolist() == [[0, 1], [-1, -1]]
    assert CHAIN.kept_places(torch.tensor([[0, 1], [-1, -1]])) is None
    assert CHAIN.drafted_to()[0] == [[], [10], [10, 11], [10, 11, 12]]


def test_a_tree_is_read_by_places() -> None:
    ids_BM, above_BM = TREE.block(ANCHORS)
    assert ids_BM.tolist() == [[7, 10, 11, 12, 13], [8, 20, 21, 0, 0]]
    assert above_BM is not None and above_BM.tolist() == [[-1, 0, 1, 1, 3], [-1, 0, 1, 0, 0]]
    assert TREE.drafted_to()[0] == [[], [10], [10, 11], [10, 12], [10, 12, 13]]
    value_BM = torch.tensor([[50, 51, 52, 53, 54], [60, 61, 62, 63, 64]])
    assert TREE.above(value_BM).tolist() == [[50, 51, 51, 53], [60, 61, 60, 60]]


def test_children_stand_in_their_order_and_the_anchor_is_nobodys() -> None:
    children = TREE.children_BMC().tolist()
    assert children[0] == [[1, 0], [2, 3], [0, 0], [4, 0], [0, 0]]
    assert children[1] == [[1, 0], [2, 0], [0, 0], [0, 0], [0, 0]]
    assert CHAIN.children_BMC()[..., 0].tolist() == [[1, 2, 3, 0], [1, 0, 0, 0]]
    row_B, place_B = torch.tensor([0, 0, 1]), torch.tensor([4, 0, 2])
    assert TREE.tokens_at(row_B, place_B).tolist() == [13, -1, 21]


def test_a_path_leads_down_to_its_place() -> None:
    path_BK = TREE.path_BK(torch.tensor([4, 1]))
    assert path_BK.tolist() == [[0, 2, 3], [0, -1, -1]]
    places = TREE.kept_places(path_BK)
    assert places is not None
    assert places[0].tolist() == [0, 1, 3, 4] and places[1, :2].tolist() == [0, 1]
    assert TREE.path_BK(torch.tensor([0, 0])).shape == (2, 0)


def test_scouts_follow_the_nodes_and_change_none_of_them() -> None:
    """Scout 0 follows the anchor, scout 1 scout 0, scout 2 the anchor."""
    scouts = Scouts(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[-1, 0, -1]] * 2))
    for plain, above in ((CHAIN, [-1, 0, 1, 2]), (TREE, [-1, 0, 1, 1, 3])):
        both = Proposal(plain.tokens_BG, None, plain.parents_BG, scouts)
        ids_BM, above_BM = both.block(ANCHORS)
        M = len(above)
        assert ids_BM[:, :M].tolist() == plain.block(ANCHORS)[0].tolist()
        assert ids_BM[:, M:].tolist() == [[1, 2, 3], [4, 5, 6]]
        assert above_BM is not None and above_BM[0].tolist() == [*above, 0, M, 0]
        second = both.rows(slice(1, 2))
        assert second.scouts is None and second.tokens_BG.tolist() == plain.tokens_BG[1:].tolist()
        if plain.parents_BG is not None:
            assert torch.equal(second.above_BG, plain.above_BG[1:])

"""The verification methods by hand: local ones, lossy ones, and at temperature 0.

Run alone: python -m pytest tests/decoding/test_verification_methods.py
"""

import pytest
import torch

from specdec.context import Proposal
from specdec.decoding.verification_methods import (
    VERIFICATION_METHODS,
    greedy,
    lenience_at_zero,
    point_mass,
    recursive,
    rejection,
    verify,
)
from specdec.errors import UserError
from specdec.lab.decoding.paper_verification_methods import kseq
from specdec.sampling.row_draws import RowDraws
from tests.decoding.tree_laws import (
    CHAIN,
    EXACT,
    SHAPES,
    TREE_METHODS,
    Drafts,
    along,
    cases,
    committed,
    drafts,
    error,
    example,
    expected_accepted,
    judged,
    lookup,
)
from tests.laws import law

# --- by hand -----------------------------------------------------------------------------------


def test_k_seq_by_hand() -> None:
    """p = (3/4, 1/4), q = (1/4, 3/4), k = 2: β = 1/4 + 1/(4ρ) and 2β - β² = ρβ, so β = 2 - ρ and
    4ρ² - 7ρ + 1 = 0: ρ = (7 + √33) / 8."""
    rho = (7 + 33**0.5) / 8
    p, q = torch.tensor([[[0.75, 0.25]], [[0.25, 0.75]]], dtype=torch.float64)
    take, rest = kseq(torch.tensor([[0, 1]]), q, p)
    hand = torch.tensor([[1.0, 0.25 / (0.75 * rho)]], dtype=torch.float64)
    assert torch.allclose(take, hand, atol=1e-10)
    left = p - torch.minimum(p, rho * q)
    assert torch.allclose(rest, left / left.sum(), atol=1e-10)


def test_recursive_by_hand() -> None:
    """p = (.5, .3, .2), q = (.2, .2, .6), children 2 and 1. Take 2 with 1/3; then p - q = (.3, .1,
    0) and p = (3/4, 1/4, 0), q = (1/2, 1/2, 0): take 1 with 1/2; then (1, 0, 0) is left. With
    replacement q stays, and 1 is taken with min(1, .25 / .2) = 1."""
    p, q = torch.tensor([[[0.5, 0.3, 0.2]], [[0.2, 0.2, 0.6]]], dtype=torch.float64)
    take, rest = recursive(torch.tensor([[2, 1]]), q, p)
    assert torch.allclose(take, torch.tensor([[1 / 3, 1 / 2]], dtype=torch.float64))
    assert torch.allclose(rest, torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64))
    take, _ = rejection(torch.tensor([[2, 1]]), q, p)
    assert torch.allclose(take, torch.tensor([[1 / 3, 1.0]], dtype=torch.float64))


def test_point_mass_by_hand() -> None:
    """p = (.5, .3, .2), children 0 and 2: .5; then p = (0, .6, .4): .4; then (0, 1, 0)."""
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    take, rest = point_mass(torch.tensor([[0, 2]]), None, p)
    assert torch.allclose(take, torch.tensor([[0.5, 0.4]], dtype=torch.float64))
    assert torch.allclose(rest, torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64))


def test_traversal_by_hand() -> None:
    """Nodes 0 and 1 below the anchor, 2 below node 0; tokens 0, 1, 0; p = (1/2, 1/2) but (1, 0)
    after node 0; q = (1, 0) at the anchor, (3/4, 1/4) at node 0. w of node 0 is 1/2, of node 2
    min(1, 1/2 · 4/3) = 2/3: the path ends there with 2/3, where one node at a time keeps 1/2.
    Rejected, node 0 has S = max(1/2 - 3/4, 0) = 0, so its w is 0. Back at the anchor S = 1/2,
    w = 1/2 / (1/2 + 0) = 1, p = (0, 1), and q has nothing left: node 1 is not taken."""
    tokens, parents = torch.tensor([[0, 1, 0]]), torch.tensor([[-1, -1, 0]])
    q = torch.tensor([[[1, 0], [1, 0], [0.75, 0.25]]], dtype=torch.float64)
    p = torch.tensor([[[0.5, 0.5], [1, 0], [0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    stop_BM, next_BMV = law(VERIFICATION_METHODS["traversal"], Proposal(tokens, q, parents), p)
    assert torch.allclose(stop_BM, torch.tensor([[1 / 3, 0, 0, 2 / 3]], dtype=torch.float64))
    assert torch.allclose(next_BMV[0, 0], torch.tensor([0, 1], dtype=torch.float64))
    stop_BM, _ = law(VERIFICATION_METHODS["recursive"], Proposal(tokens, q, parents), p)
    assert torch.allclose(stop_BM, torch.tensor([[0.5, 0, 0, 0.5]], dtype=torch.float64))


# --- lossy verification methods ------------------------------------------------------------------


def test_lossy_methods_are_flagged_and_are_lossy() -> None:
    lossy = [
        {n for n, verification in VERIFICATION_METHODS.items() if not verification.keeps_p(zero)}
        for zero in (False, True)
    ]
    assert lossy == [{"typical", "lenience"}, {"lenience"}]
    p, q = cases(SHAPES["binary"], 3)
    assert error(VERIFICATION_METHODS["typical"], SHAPES["binary"], p, q, "without") > 0.1
    p, q = cases(CHAIN, 3)
    assert error(VERIFICATION_METHODS["lenience"], CHAIN, p, q, "without") > 0.1


def test_lenience_bounds_every_token() -> None:
    """Leviathan et al. 2023, A.5: no token becomes likelier than p / factor; and less lenience,
    fewer tokens."""
    p, q = cases([-1], 4)
    kept = []
    for factor in (0.25, 0.5, 0.9, 1.0):
        verification = VERIFICATION_METHODS["lenience"].tuned(factor=factor)
        found = drafts([-1], q, "without")
        step_law = judged(verification, [-1], p, q, found)
        first = committed([-1], p, found, step_law).reshape(-1, 4, 4).sum(-1)
        assert (first <= p[0][:, 0] / factor + EXACT).all()
        kept.append(expected_accepted(verification, [-1], p, q))
    assert (torch.stack(kept).diff(dim=0) < EXACT).all()
    for factor in (0.0, 1.5):
        with pytest.raises(UserError, match="factor"):
            VERIFICATION_METHODS["lenience"].tuned(factor=factor)


def test_lenience_at_zero_by_hand() -> None:
    """p = (.5, .3, .2) everywhere; factor .5 keeps token 1 (.3 >= .25) and not token 2, factor .7
    neither, factor .4 both. The next token is the argmax, 0, and the deepest path wins."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 5, 3) + 7  # logits are not log p
    tokens, parents = torch.tensor([[1, 0, 1, 2]]), torch.tensor([[-1, -1, 0, 2]])
    for factor, path in ((0.7, [1]), (0.5, [0, 2]), (0.4, [0, 2, 3])):
        verification = VERIFICATION_METHODS["lenience"].tuned(factor=factor)
        assert verification.at_zero is not None
        verdict = verification.at_zero(Proposal(tokens, None, parents), logits)
        assert verdict.path_BK.tolist() == [path] and verdict.next_B.tolist() == [0]
    none = lenience_at_zero(Proposal(torch.tensor([[-1, -1]])), logits[:, :3])
    assert none.accepted_B.tolist() == [0]
    g = torch.Generator().manual_seed(1)
    for _ in range(50):  # without lenience it is `greedy`, where no two logits tie
        drafted = torch.randint(-1, 3, (6, 5), generator=g)
        drafted = drafted.where((drafted >= 0).cumprod(-1).bool(), -1)
        among = torch.randn(6, 6, 3, generator=g)
        strict = lenience_at_zero(Proposal(drafted), among, 1.0)
        best = greedy(Proposal(drafted), among.argmax(-1))
        assert all(torch.equal(a, b) for a, b in zip(strict, best, strict=True))


def test_typical_by_hand() -> None:
    """The bound is min(.09, .3 e^{-H}). Flat, p = 1/4 each: e^{-H} = 1/4, the bound is .075 and
    every token passes. Peaked, (.97, .01, .01, .01): e^{-H} = .8456, so .3 e^{-H} = .2537 and .09
    binds; token 1 is refused. Skewed, (.35, .35, .25, .05): H = 1.2312, .3 e^{-H} = .0876, so
    token 3 is refused (with ε and δ swapped the bound would be .0263). With ε = .3 and δ = 2 the
    flat p has the bound min(.3, .5), and nothing passes."""
    flat, peak, skewed = [0.25] * 4, [0.97, 0.01, 0.01, 0.01], [0.35, 0.35, 0.25, 0.05]
    p = torch.tensor([[flat, peak, skewed, flat, flat]], dtype=torch.float64)
    tokens, parents = torch.tensor([[0, 3, 1, 3]]), torch.tensor([[-1, -1, 0, 1]])
    proposal = Proposal(tokens, None, parents)
    stop_BM, next_BMV = law(VERIFICATION_METHODS["typical"], proposal, p)
    assert stop_BM.tolist() == [[0, 1, 0, 0, 0]]  # both tokens of depth 1 are refused
    assert torch.equal(next_BMV, p)
    tuned = VERIFICATION_METHODS["typical"].tuned(epsilon=0.3, delta=2.0)
    assert not tuned.lossless and tuned.trees
    assert law(tuned, proposal, p).stop_BM.tolist() == [[1, 0, 0, 0, 0]]


def test_of_equally_long_paths_typical_takes_the_likelier() -> None:
    """After the anchor (.5, .3, .1, .1): token 0, then 1/4, is .125; token 1, then .97, is .291,
    though it was drafted later and its first token is the less likely. Alone at depth 1, token 0
    is the likelier one."""
    first, flat, peak = [0.5, 0.3, 0.1, 0.1], [0.25] * 4, [0.97, 0.01, 0.01, 0.01]
    p = torch.tensor([[first, flat, peak, flat, flat]], dtype=torch.float64)
    tokens, parents = torch.tensor([[0, 1, 0, 0]]), torch.tensor([[-1, -1, 0, 1]])
    stop_BM, _ = law(VERIFICATION_METHODS["typical"], Proposal(tokens, None, parents), p)
    assert stop_BM.tolist() == [[0, 0, 0, 0, 1]]
    siblings = Proposal(tokens[:, :2].flip(1), None, parents[:, :2])
    assert law(VERIFICATION_METHODS["typical"], siblings, p[:, :3]).stop_BM.tolist() == [[0, 0, 1]]


def test_a_method_of_chains_refuses_a_tree() -> None:
    for name in ("rejection", "block", "lenience"):
        tokens_BG, parents_BG, q_BGV, p_BMV = example(VERIFICATION_METHODS["recursive"])
        tree = Proposal(tokens_BG, q_BGV, parents_BG)
        with pytest.raises(ValueError, match="chains only"):
            verify(VERIFICATION_METHODS[name], tree, lookup(p_BMV), RowDraws([0]))


# --- greedy ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argmax", "path", "following"),
    [
        ([5, 0, 7, 9, 0, 0], [1, 2], 9),  # below the second child
        ([5, 0, 8, 0, 9, 1], [1, 3], 9),  # its second child
        ([4, 6, 7, 0, 0, 3], [0, 4], 3),
        ([4, 9, 7, 7, 7, 7], [0], 9),  # the correction
        ([9, 6, 7, 7, 7, 7], [], 9),  # agreement below a miss counts for nothing
        ([5, 6, 9, 7, 8, 6], [1], 9),
    ],
)
def test_greedy_keeps_the_path_of_the_argmax(
    argmax: list[int], path: list[int], following: int
) -> None:
    """Tokens 4 and 5 below the anchor, 7 and 8 below 5, 6 below 4."""
    tokens, parents = torch.tensor([[4, 5, 7, 8, 6]]), torch.tensor([[-1, -1, 1, 1, 0]])
    verdict = greedy(Proposal(tokens, None, parents), torch.tensor([argmax]))
    assert verdict.accepted_B.tolist() == [len(path)]
    assert verdict.path_BK.tolist() == [path]
    assert verdict.next_B.tolist() == [following]


def test_greedy_is_the_limit_of_every_lossless_method() -> None:
    """With one-hot p every verification method takes the greedy path with certainty, where no two
    siblings are the same token (of twins a local verification method takes the first, `greedy` the
    one that leads on)."""
    shape = SHAPES["binary"]
    p, _ = cases(shape, 3)
    p = [torch.nn.functional.one_hot(x.argmax(-1), 3).double() for x in p]
    for verification in TREE_METHODS.values():
        found = drafts(shape, [x[:1] for x in p], "fixed")
        twins_B = (found.tokens_BG[:, ::2] == found.tokens_BG[:, 1::2]).any(-1)
        found = Drafts(*(x[~twins_B] for x in found))
        stop_BM, next_BMV = judged(verification, shape, p, None, found)
        parents_BG = torch.tensor(shape).expand(found.tokens_BG.shape)
        verdict = greedy(
            Proposal(found.tokens_BG, None, parents_BG), along(p, shape, found).argmax(-1)
        )
        end_B = verdict.path_BK.amax(-1) + 1
        row_B = torch.arange(len(end_B))
        assert torch.equal(stop_BM[row_B, end_B], torch.ones(len(end_B)).double())
        assert next_BMV[row_B, end_B, verdict.next_B].eq(1).all()


def test_greedy_of_rows_of_many_shapes() -> None:
    """Padding never matches, and paths of different depths end in -1."""
    tokens = torch.tensor([[1, 2, 3], [1, 2, -1], [1, 1, 1], [-1, -1, -1]])
    parents = torch.tensor([[-1, -1, 1], [-1, 0, -1], [-1, 0, 1], [-1, -1, -1]])
    argmax = torch.tensor([[2, 0, 3, 0], [1, 2, 0, 0], [1, 1, 1, 9], [6, 0, 0, 0]])
    accepted_B, next_B, path_BG = greedy(Proposal(tokens, None, parents), argmax)
    assert accepted_B.tolist() == [2, 2, 3, 0]
    assert next_B.tolist() == [0, 0, 9, 6]
    assert path_BG.tolist() == [[1, 2, -1], [0, 1, -1], [0, 1, 2], [-1, -1, -1]]

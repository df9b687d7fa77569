"""Every verification method, on trees: the law of a speculation step, summed exactly over every
draft, gives p.

Run alone: python -m pytest tests/decoding/test_verify_trees.py
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.decoding.verification_methods import (
    VERIFICATION_METHODS,
    Law,
    VerificationMethod,
    point_mass,
    recursive,
    rejection,
)
from specdec.lab.decoding.paper_verification_methods import kseq, traversal
from tests.decoding.tree_laws import (
    CHAIN,
    EXACT,
    SHAPES,
    TREE_METHODS,
    Drafts,
    along,
    cases,
    committed,
    depths,
    drafts,
    error,
    expected_accepted,
    judged,
    vocabularies,
)
from tests.laws import joint, law

ON_TREES = pytest.mark.parametrize("verification", TREE_METHODS.values(), ids=TREE_METHODS)
ON_SHAPES = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)

# --- losslessness ------------------------------------------------------------------------------


@ON_SHAPES
@ON_TREES
def test_committed_tokens_follow_the_target(
    verification: VerificationMethod, shape: list[int]
) -> None:
    for V in vocabularies(shape):
        siblings = "without" if verification.siblings == "fixed" else verification.siblings
        assert error(verification, shape, *cases(shape, V), siblings) < EXACT


@ON_SHAPES
@ON_TREES
def test_every_fixed_tree_is_lossless_by_itself(
    verification: VerificationMethod, shape: list[int]
) -> None:
    """q None, and whatever the tokens are, siblings that repeat one another among them."""
    for V in (2, 3):
        p, q = cases(shape, V)
        picked = [0, 10, 20, 30, 40, 50, 58]
        p, q = ([table[picked] for table in x] for x in (p, q))
        found = drafts(shape, q, "fixed")
        each = [table[found.case_B] for table in p]
        alone = found._replace(
            case_B=torch.arange(len(found.case_B)), weight_B=torch.ones_like(found.weight_B)
        )
        step_law = judged(verification, shape, each, None, alone)
        assert (committed(shape, each, alone, step_law) - joint(each)).abs().max() < EXACT


@ON_SHAPES
@pytest.mark.parametrize("name", ["recursive", "traversal"])
def test_siblings_beyond_the_mass_of_q_do_no_harm(name: str, shape: list[int]) -> None:
    """A drafter that fills up its tree when q has no token left, and a q without any mass."""
    p, q = cases(shape, 3)
    q = [table.clone() for table in q]
    q[0][::5] = 0
    q[-1][1::5, 0] = 0
    assert error(VERIFICATION_METHODS[name], shape, p, q, "junk") < EXACT


@ON_SHAPES
@ON_TREES
def test_a_law_is_made_of_distributions(verification: VerificationMethod, shape: list[int]) -> None:
    p, q = cases(shape, 3)
    for drawn in ("without", "with", "junk"):  # also where the method is fed the wrong siblings
        found = drafts(shape, q, drawn)
        for x in judged(verification, shape, p, q, found):
            assert x.isfinite().all() and (x >= 0).all()
            assert (x.sum(-1) - 1).abs().max() < EXACT


# --- shapes of one batch -----------------------------------------------------------------------


def padded(shape: list[int], at: list[int], found: Drafts, G: int) -> tuple[Tensor, Tensor]:
    """The same tree with its nodes at the places `at` of G; the other places are padding."""
    B = len(found.tokens_BG)
    tokens_BG, parents_BG = torch.full((B, G), -1), torch.full((B, G), -1)
    tokens_BG[:, at] = found.tokens_BG
    parents_BG[:, at] = torch.tensor([-1 if u < 0 else at[u] for u in shape]).expand(B, -1)
    return tokens_BG, parents_BG


@pytest.mark.parametrize("verification", VERIFICATION_METHODS.values(), ids=VERIFICATION_METHODS)
def test_rows_of_many_shapes_in_one_batch(verification: VerificationMethod) -> None:
    """Trees spread over 8 places, in one batch: each row's law is that of its tree alone. Chains
    for a verification method of chains, with their padding at the end."""
    places = [(CHAIN, [1, 4, 6]), (SHAPES["binary"], [0, 2, 3, 4, 5, 7]), (CHAIN[:2], [0, 1])]
    if not verification.trees:
        places = [(CHAIN[:n], list(range(n))) for n in (3, 1, 2)]
    p, q = cases(CHAIN, 3)
    rows, alone = [], []
    for shape, at in places:
        found = drafts(shape, q, "with" if verification.siblings == "with" else "without")
        found = Drafts(*(x[:: max(1, len(x) // 100)] for x in found))
        tokens_BG, parents_BG = padded(shape, at, found, 8)
        if not verification.trees:
            parents_BG = torch.arange(-1, 7).expand(len(tokens_BG), 8)
        q_BGV = torch.rand(len(tokens_BG), 8, 3, dtype=torch.float64)
        q_BGV[:, at] = along(q + p[-1:], shape, found)[:, torch.tensor(shape) + 1]
        p_BMV = torch.full((len(tokens_BG), 9, 3), 1 / 3, dtype=torch.float64)
        keep = [0] + [i + 1 for i in at]
        p_BMV[:, keep] = along(p, shape, found)
        rows.append((tokens_BG, parents_BG, q_BGV, p_BMV))
        alone.append((keep, judged(verification, shape, p, q, found)))
    tokens_BG, parents_BG, q_BGV, p_BMV = (torch.cat(x) for x in zip(*rows))
    mixed = law(verification, Proposal(tokens_BG, q_BGV, parents_BG), p_BMV)
    start = 0
    for keep, own in alone:
        here = slice(start, start + len(own.stop_BM))
        assert torch.allclose(mixed.stop_BM[here][:, keep], own.stop_BM, atol=EXACT, rtol=0)
        gap = (mixed.next_BMV[here][:, keep] - own.next_BMV).abs() * own.stop_BM[..., None]
        assert gap.max() < EXACT
        elsewhere = mixed.stop_BM[here].index_fill(1, torch.tensor(keep), 0)
        assert elsewhere.abs().max() == 0
        start += len(own.stop_BM)


# --- how many tokens are accepted --------------------------------------------------------------


@pytest.mark.parametrize("name", ["recursive", "specinfer", "kseq", "traversal", "lenience"])
def test_on_a_chain_a_method_is_an_older_one(name: str) -> None:
    verification, same = (
        VERIFICATION_METHODS[name],
        VERIFICATION_METHODS["block" if name == "traversal" else "rejection"],
    )
    if name == "lenience":
        verification = verification.tuned(factor=1.0)
    for V in (2, 3, 4):
        p, q = cases(CHAIN, V)
        found = drafts(CHAIN, q, "without")
        one, other = (judged(r, CHAIN, p, q, found) for r in (verification, same))
        assert torch.allclose(one.stop_BM, other.stop_BM, atol=EXACT, rtol=0)
        gap = (one.next_BMV - other.next_BMV).abs() * other.stop_BM[..., None]
        assert gap.max() < EXACT


@pytest.mark.parametrize("name", ["binary", "two", "three"])
@pytest.mark.parametrize("verification", ["recursive", "specinfer", "kseq", "traversal"])
def test_more_children_never_accept_fewer_than_the_chain(verification: str, name: str) -> None:
    """Trees whose every path is as deep as the chain's. In `recursive` and `specinfer` the first
    child is judged as by `rejection`; k-SEQ accepts min(p, ρq) >= min(p, q) of each token."""
    shape, gains = SHAPES[name], []
    for V in vocabularies(shape):
        p, q = cases(shape, V)
        chain = [-1, 0][: max(depths(shape))]
        gains.append(
            expected_accepted(VERIFICATION_METHODS[verification], shape, p, q)
            - expected_accepted(VERIFICATION_METHODS["rejection"], chain, p, q)
        )
    assert torch.cat(gains).min() > -EXACT and torch.cat(gains).max() > 0.05


@ON_SHAPES
def test_traversal_never_accepts_fewer_than_recursive(shape: list[int]) -> None:
    gains = []
    for V in vocabularies(shape):
        p, q = cases(shape, V)
        one, other = (
            expected_accepted(VERIFICATION_METHODS[n], shape, p, q)
            for n in ("traversal", "recursive")
        )
        gains.append(one - other)
    assert torch.cat(gains).min() > -EXACT
    if max(depths(shape)) == 1:  # siblings alone: the verification methods are one
        assert torch.cat(gains).abs().max() < EXACT
    else:
        assert torch.cat(gains).max() > 0.01


def test_a_perfect_draft_is_kept_to_a_leaf() -> None:
    for name in ("recursive", "specinfer", "kseq", "traversal"):
        p, _ = cases(SHAPES["binary"], 3)
        got = expected_accepted(VERIFICATION_METHODS[name], SHAPES["binary"], p, p[:2])
        assert (got - 2).abs().max() < EXACT


# --- the enumeration can fail ------------------------------------------------------------------


def forgets_to_shrink_p(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    takes = [recursive(tokens[:, c : c + 1], q, p)[0] for c in range(tokens.shape[1])]
    return torch.cat(takes, 1), recursive(tokens, q, p)[1]


def forgets_the_residual(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return recursive(tokens, q, p)[0], p


def residual_of_one_child(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return kseq(tokens, q, p)[0], rejection(tokens[:, :1], q, p)[1]


def judges_in_another_order(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    take, rest = recursive(tokens.flip(-1), q, p)
    return take.flip(-1), rest


def point_mass_that_keeps_x(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return point_mass(tokens, q, p)[0], p


def traversal_with_the_next_of_recursive(proposal: Proposal, p: Tensor) -> Law:
    return Law(
        traversal(proposal, p).stop_BM, law(VERIFICATION_METHODS["recursive"], proposal, p).next_BMV
    )


def traversal_of_recursive_ends(proposal: Proposal, p: Tensor) -> Law:
    return Law(
        law(VERIFICATION_METHODS["recursive"], proposal, p).stop_BM, traversal(proposal, p).next_BMV
    )


BROKEN = [
    (VerificationMethod(node=forgets_to_shrink_p, siblings="without"), "without"),
    (VerificationMethod(node=forgets_the_residual, siblings="without"), "without"),
    (VerificationMethod(node=residual_of_one_child, siblings="with"), "with"),
    (VerificationMethod(node=judges_in_another_order, siblings="without"), "without"),
    (VerificationMethod(node=point_mass_that_keeps_x, siblings="fixed"), "without"),
    (VerificationMethod(whole=traversal_with_the_next_of_recursive, siblings="without"), "without"),
    (VerificationMethod(whole=traversal_of_recursive_ends, siblings="without"), "without"),
    (VERIFICATION_METHODS["recursive"], "with"),  # a right method on siblings drawn the wrong way
    (VERIFICATION_METHODS["traversal"], "with"),
    (VERIFICATION_METHODS["specinfer"], "without"),
    (VERIFICATION_METHODS["kseq"], "without"),
    (replace(VERIFICATION_METHODS["lenience"], siblings="with"), "with"),
]


@pytest.mark.parametrize(("verification", "siblings"), BROKEN)
def test_a_broken_method_is_caught(verification: VerificationMethod, siblings: str) -> None:
    """Nine orders of magnitude above the tolerance."""
    shape = SHAPES["binary"]
    assert error(verification, shape, *cases(shape, 3), siblings) > 1e-3

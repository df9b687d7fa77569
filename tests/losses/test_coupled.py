"""Terms that read more of a piece than p and q of one position: all depths, or hidden states.

Run alone: python -m pytest tests/losses/test_coupled.py
"""

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from specdec.decoding.verification_methods import VERIFICATION_METHODS
from specdec.errors import UserError
from specdec.losses.loss_config import LossConfig
from specdec.losses.loss_terms import (
    LOSS_TERMS,
    LossInputs,
    adaspec,
    d_pace,
    expected_length,
    expected_tree,
    kl,
    nla,
    pard2,
    smooth_l1,
    spec_auf,
)
from tests.decoding.tree_laws import expected_accepted
from tests.laws import Tables
from tests.losses.test_loss_terms import S, piece_of

N, K = 5, 4
EXACT = 1.0  # a run's end, where the weights are no longer smoothed


def draws() -> tuple[Tensor, Tensor]:
    """p over part of a vocabulary and the draft's logits [N, K, S], in float64."""
    torch.manual_seed(0)
    p_NKS = torch.randn(N, K, S + 3, dtype=torch.float64).softmax(-1)[..., :S]
    return p_NKS, torch.randn(N, K, S, dtype=torch.float64, requires_grad=True)


def beta(p: Tensor, z: Tensor) -> Tensor:
    return torch.minimum(p, z.softmax(-1)).sum(-1)


def piece(p: Tensor, z: Tensor, progress: float) -> LossInputs:
    return replace(piece_of(p, z.log_softmax(-1)), progress=progress)


def test_expected_length_by_enumeration() -> None:
    """γ minus the expected number of accepted tokens: Σ_n n P(exactly n are accepted)."""
    p, z = draws()
    b = beta(p, z).detach()
    expected = torch.zeros(N, dtype=torch.float64)
    for n in range(1, K + 1):
        rejected = 1 - b[:, n] if n < K else 1.0
        expected += n * b[:, :n].prod(-1) * rejected
    torch.testing.assert_close(expected_length(piece(p, z, EXACT)).sum(-1), K - expected)


def test_the_gradient_of_expected_length_is_that_of_the_exact_expectation() -> None:
    p, z = draws()
    exact = (1 - beta(p, z).cumprod(-1)).sum()
    (wanted,) = torch.autograd.grad(exact, z)
    (got,) = torch.autograd.grad(expected_length(piece(p, z, EXACT)).sum(), z)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def test_depths_behind_an_end_count_for_nothing() -> None:
    """Only two depths are valid: γ - L and its gradient are those of two depths alone."""
    p, z = draws()
    whole = piece(p, z, EXACT)
    whole.valid[:, 2:] = False
    (got,) = torch.autograd.grad((expected_length(whole) * whole.valid).sum(), z)
    cut = expected_length(piece(p[:, :2], z[:, :2], EXACT))
    (wanted,) = torch.autograd.grad(cut.sum(), z)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


TREE_OF_3 = [[0], [1], [0, 0], [1, 0], [0, 1], [0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    "name", ["expected_length", "d_pace", "spec_auf", "pard2", "expected_tree"]
)
@pytest.mark.parametrize("progress", [0.0, EXACT])
def test_dropped_depths_leave_the_expected_gradient_as_it_is(name: str, progress: float) -> None:
    """P-EAGLE's sampling of depths, over all of its draws: depth 1 is kept at 2 of 4 anchors and
    weighs 2, depth 2 at 1 of these and weighs 4. The mean gradient is that of all depths."""
    torch.manual_seed(0)
    p = torch.randn(4, 3, S + 3, dtype=torch.float64).softmax(-1)[..., :S]
    z = torch.randn(4, 3, S, dtype=torch.float64, requires_grad=True)
    more = {"paths": TREE_OF_3} if name == "expected_tree" else {}

    def gradient(weight: Tensor) -> Tensor:
        """Where depths are dropped, P-EAGLE does not compute the draft's states: they are 0."""
        at = replace(
            piece(p, z * (weight > 0)[..., None], progress),
            valid=weight > 0,
            weight=weight / weight.amax(-1, keepdim=True),
        )
        (found,) = torch.autograd.grad((LOSS_TERMS[name](at, **more) * weight).sum(), z)
        return found

    means = []
    for first in combinations(range(4), 2):
        for second in first:
            weight = torch.zeros(4, 3, dtype=torch.float64)
            weight[:, 0], weight[list(first), 1], weight[second, 2] = 1, 2, 4
            means.append(gradient(weight))
    assert len(means) == 12
    every = gradient(torch.ones(4, 3, dtype=torch.float64))
    torch.testing.assert_close(torch.stack(means).mean(0), every, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("progress", "weights"),
    [
        (0.0, [0.6 + 0.6 * 0.75, 0.6 * 0.75]),  # s = ½: β̃ = .6, .75
        (0.25, [0.4 + 0.4 * 0.625, 0.4 * 0.625]),  # s = ¼: .4, .625
        (0.5, [0.2 + 0.2 * 0.5, 0.2 * 0.5]),  # s = 0
    ],
)
def test_weights_by_hand(progress: float, weights: list[float]) -> None:
    """β = .2 (q's), then .5 (p's); each depth's gradient is its weight times that of -log β."""
    p = torch.tensor([[[0.9, 0.0], [0.5, 0.0]]], dtype=torch.float64)
    z = torch.tensor([[[0.2, 0.8], [0.9, 0.1]]], dtype=torch.float64).log().requires_grad_()
    (of_nla,) = torch.autograd.grad(nla(piece(p, z, progress)).sum(), z)
    (got,) = torch.autograd.grad(expected_length(piece(p, z, progress)).sum(), z)
    wanted = of_nla * torch.tensor(weights, dtype=torch.float64)[:, None]
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def test_early_a_draft_that_is_poor_at_depth_0_learns_the_others() -> None:
    """β_0 is about e^-20: unsmoothed, every depth's gradient vanishes with it."""
    p, z = draws()
    z.data[:, 0] = 0
    p[:, 0] = 0
    p[:, 0, 0], z.data[:, 0, 0] = 1.0, -20.0
    gradients = [
        torch.autograd.grad(expected_length(piece(p, z, at)).sum(), z)[0][:, 1:].abs().max()
        for at in (0.0, EXACT)
    ]
    assert gradients[0] > 0.01 and gradients[1] < 1e-7


def test_expected_length_weighs_depths_itself() -> None:
    from tests.tiny import compose

    assert compose(["loss=expected_length"]).loss.depth_decay == 1.0
    assert compose(["loss=kl"]).loss.depth_decay == LossConfig.depth_decay


# Trees


TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]
PARENTS = [-1, -1, 0, 0, 1, 2, 3]
BRANCHING = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0]]


def closed_form(p: Tensor, z: Tensor, paths: list[list[int]], width: int) -> tuple[Tensor, Tensor]:
    """L [N] and ∂L/∂z [N, K, S] from the docstring: G_r, M_r and their derivatives."""
    q = z.softmax(-1)
    M, G = torch.zeros_like(z[..., :1]), torch.zeros_like(z[..., :1])
    dM, dG = torch.zeros_like(z), torch.zeros_like(z)
    a, da = [], []
    for _ in range(width):
        M, dM, last, dlast = M + 1 - G, dM - dG, G, dG
        G, below = torch.minimum(p, M * q).sum(-1, keepdim=True), (p > M * q).double()
        mean = (q * below).sum(-1, keepdim=True)
        dG = M * q * (below - mean) + mean * dM
        a.append((G - last)[..., 0])
        da.append(dG - dlast)
    length, gradient = torch.zeros(len(z), dtype=z.dtype), torch.zeros_like(z)
    for path in paths:
        factors = [a[rank][:, k] for k, rank in enumerate(path)]
        length += torch.stack(factors).prod(0)
        for k, rank in enumerate(path):
            others = torch.ones_like(length)
            for j, factor in enumerate(factors):
                others = others * (factor if j != k else 1)
            gradient[:, k] += others[:, None] * da[rank][:, k]
    return length, gradient


@pytest.mark.parametrize("paths", [TREE, BRANCHING])
def test_the_value_and_gradient_of_expected_tree_are_the_closed_forms(
    paths: list[list[int]],
) -> None:
    p, z = draws()
    length, gradient = closed_form(p, z.detach(), paths, 3)
    loss = expected_tree(piece(p, z, EXACT), paths)
    assert loss.shape == (N, K) and loss[:, 3].eq(0).all()  # the tree is 3 deep
    torch.testing.assert_close(loss.sum(-1), 3 - length, atol=1e-12, rtol=0)
    (got,) = torch.autograd.grad(loss.sum(), z)
    torch.testing.assert_close(got, -gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("progress", [0.0, 0.2, EXACT])
def test_a_tree_of_one_branch_is_a_chain(progress: float) -> None:
    p, z = draws()
    at = piece(p, z, progress)
    at.valid[0, 2:] = False
    tree = expected_tree(at, [[0] * (k + 1) for k in range(K)])
    (got,) = torch.autograd.grad((tree * at.valid).sum(), z)
    at = replace(piece(p, z, progress), valid=at.valid)
    chain = expected_length(at)
    (wanted,) = torch.autograd.grad((chain * at.valid).sum(), z)
    torch.testing.assert_close(tree, chain, atol=1e-12, rtol=0)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def toy(V: int, dependent: float) -> tuple[Tables, Tables]:
    """p [1, V^k, V] and q of three depths, which differ between prefixes by `dependent`."""
    g = torch.Generator().manual_seed(0)
    found: tuple[Tables, Tables] = ([], [])
    for k in range(4):
        for tables in found:
            shared = torch.randn(1, 1, V, generator=g, dtype=torch.float64)
            own = torch.randn(1, V**k, V, generator=g, dtype=torch.float64)
            tables.append((1.5 * shared + dependent * own).softmax(-1))
    return found[0], found[1][:3]


def over_texts(p: Tables, q: Tables, V: int, paths: list[list[int]]) -> float:
    """The mean of L over texts drawn from p, as teacher forcing sees them."""
    mean = 0.0
    for x in range(V * V):  # the tokens at depths 0 and 1
        prefixes = [0, x // V, x]
        p_NKS, q_NKS = (
            torch.stack([t[k][0, at] for k, at in enumerate(prefixes)])[None] for t in (p[:3], q)
        )
        chance = p[0][0, 0, x // V] * p[1][0, x // V, x % V]
        one = replace(piece_of(p_NKS, q_NKS.log()), progress=EXACT)
        mean += float(chance * (3 - expected_tree(one, paths).sum()))
    return mean


def test_expected_tree_by_enumeration_of_all_drafts() -> None:
    """Exact if no depth depends on the tokens above it, for siblings drawn independently; drawn
    without replacement they are accepted more often. Where depths do depend on them, teacher
    forcing sees only the text's own branch, and what it says is measured: within 1 % here."""
    V = 3
    p, q = toy(V, 0.0)
    exact = float(expected_accepted(VERIFICATION_METHODS["specinfer"], PARENTS, p, q))
    assert over_texts(p, q, V, TREE) == pytest.approx(exact, abs=1e-12)
    assert float(expected_accepted(VERIFICATION_METHODS["recursive"], PARENTS, p, q)) > exact
    p, q = toy(V, 0.5)
    exact = float(expected_accepted(VERIFICATION_METHODS["specinfer"], PARENTS, p, q))
    assert over_texts(p, q, V, TREE) == pytest.approx(exact, rel=0.01)


def test_a_tree_deeper_than_the_draft_is_refused() -> None:
    p, z = draws()
    with pytest.raises(UserError, match="5 tokens deep, but the draft is trained on 4"):
        expected_tree(piece(p, z, EXACT), [[0] * (k + 1) for k in range(5)])


# Tokens weighted and chosen


def test_d_pace_by_plain_loops() -> None:
    """The weights of Lucas-TY/D-PACE, token by token; invalid depths count as c = 1."""
    p, z = draws()
    label = torch.tensor([[0, 1, 2, 3], [4, -1, 6, 0], [1, 1, 1, 1], [6, 5, 4, 3], [0, 0, 0, 0]])
    at = replace(piece_of(p, z.log_softmax(-1), label), progress=0.0)
    at.valid[2, 3:], at.valid[4, 1:] = False, False
    loss = d_pace(at, smooth=0.3) * at.valid
    (got,) = torch.autograd.grad(loss.sum(), z)
    q = z.detach().softmax(-1)
    for n in range(N):
        deep = int(at.valid[n].sum())
        said = [float(q[n, k, label[n, k]]) if label[n, k] >= 0 else 0.0 for k in range(K)]
        reach, product = [], 1.0
        for k in range(deep):
            product *= 0.3 + 0.7 * said[k]
            reach.append(product)
        for k in range(K):
            weight = sum(reach[k:])
            there = k < deep and label[n, k] >= 0
            onehot = torch.eye(S, dtype=q.dtype)[label[n, k].clamp_min(0)]
            wanted = weight * (q[n, k] - onehot) * there
            torch.testing.assert_close(got[n, k], wanted, atol=1e-12, rtol=0)
            value = -weight * math.log(said[k]) if there else 0.0
            assert float(loss[n, k].detach()) == pytest.approx(value, abs=1e-12)


def test_spec_auf_and_pard2_by_plain_loops() -> None:
    """Spec-AUF counts the depths up to the first wrong token, PARD-2 each depth by p of the text
    before it; a token outside the draft vocabulary is wrong, and ends both."""
    p, z = draws()
    q = z.detach().softmax(-1)
    best = q.argmax(-1)
    label = best.clone()
    label[0, 2] = (label[0, 2] + 1) % S  # the third token is wrong: depth 3 is not reached
    label[1, 0] = -1
    label[2] = (label[2] + 1) % S
    label[3, 1] = -1
    at = piece_of(p, z.log_softmax(-1), label)
    auf, pard = spec_auf(at), pard2(at, text=0.3)
    (of_auf,) = torch.autograd.grad(auf.sum(), z, retain_graph=True)
    (of_pard,) = torch.autograd.grad(pard.sum(), z)
    ended = 0
    for n in range(N):
        reached, weight = True, 1.0
        for k in range(K):
            known = int(label[n, k]) >= 0
            here = math.log(float(q[n, k, label[n, k]])) if known else 0.0
            onehot = torch.eye(S, dtype=q.dtype)[label[n, k].clamp_min(0)]
            of_ce = (q[n, k] - onehot) * known
            assert float(auf[n, k].detach()) == pytest.approx(-here * reached, abs=1e-12)
            torch.testing.assert_close(of_auf[n, k], of_ce * reached, atol=1e-12, rtol=0)
            of_kl = p[n, k].sum() * q[n, k] - p[n, k]
            wanted = weight * (of_kl + 0.3 * of_ce)
            torch.testing.assert_close(of_pard[n, k], wanted, atol=1e-12, rtol=0)
            ended += not reached
            reached = reached and bool(label[n, k] == best[n, k])
            weight *= float(p[n, k, label[n, k]]) if known else 0.0
    assert ended == 1 + 3 + 3 + 2


def test_adaspec_learns_where_the_reference_is_ahead() -> None:
    """Of 5 anchors the 2 whose KL exceeds the reference's by the most, depth by depth; of 3 valid
    ones at the last depth, those from the .6 quantile between the second and the third: 1."""
    p, z = draws()
    reference = torch.randn(N, K, S, dtype=torch.float64).log_softmax(-1)
    at = replace(piece_of(p, z.log_softmax(-1)), reference_log_q=reference)
    at.valid[:2, 3] = False
    more = (kl(at) - kl(piece_of(p, reference))).detach()
    kept = torch.zeros(N, K, dtype=torch.bool)
    for k in range(K):
        among = [n for n in range(N) if at.valid[n, k]]
        best = sorted(among, key=lambda n: float(more[n, k]))[-(2 if k < 3 else 1) :]
        kept[best, k] = True
    loss = adaspec(at) * at.valid
    torch.testing.assert_close(loss, kl(at) * kept)
    (got,) = torch.autograd.grad(loss.sum(), z)
    wanted = (p.sum(-1, keepdim=True) * z.detach().softmax(-1) - p) * kept[..., None]
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)
    assert (adaspec(at, keep=1.0) * at.valid).count_nonzero() == at.valid.sum()


def test_on_policy_is_forward_where_accepted_and_reverse_after() -> None:
    """Against the gradients of `kl` and `reverse_kl`, which have tests of their own."""
    p, z = draws()
    accepted = torch.arange(K) < torch.tensor([[0], [1], [2], [4], [3]])
    at = replace(piece_of(p, z.log_softmax(-1)), accepted=accepted)
    (got,) = torch.autograd.grad(LOSS_TERMS["on_policy"](at, decay=0.7).sum(), z)
    for n in range(N):
        for k in range(K):
            name, scale = ("kl", 1.0) if accepted[n, k] else ("reverse_kl", 0.7**k)
            (wanted,) = torch.autograd.grad(LOSS_TERMS[name](piece(p, z, 0.0))[n, k], z)
            torch.testing.assert_close(got[n, k], scale * wanted[n, k], atol=1e-12, rtol=0)


# Hidden states


def of_states(hidden: Tensor, target_hidden: Tensor) -> LossInputs:
    p = torch.full((*hidden.shape[:-1], S), 1 / S)
    return replace(piece_of(p, p.log()), hidden=hidden, target_hidden=target_hidden)


def test_smooth_l1_by_hand() -> None:
    """Differences .5 and -2: ½ · .25 = .125 and 2 - .5 = 1.5, their mean .8125; with β = 4 both
    are below it: .25/8 = .03125 and 4/8 = .5, their mean .265625."""
    given = of_states(torch.tensor([[[0.5, 1.0]]]), torch.tensor([[[0.0, 3.0]]]))
    assert smooth_l1(given).tolist() == [[0.8125]]
    assert smooth_l1(given, beta=4.0).tolist() == [[0.265625]]


def test_the_gradient_of_smooth_l1() -> None:
    """Where |d| < 1 it is d over the width, else its sign over the width; 3 places of width 4."""
    torch.manual_seed(0)
    hidden = (2 * torch.randn(1, 3, 4)).requires_grad_()
    given = of_states(hidden, torch.zeros(1, 3, 4))
    (got,) = torch.autograd.grad(smooth_l1(given).sum(), hidden)
    d = hidden.detach()
    assert (d.abs() < 1).any() and (d.abs() > 1).any()
    torch.testing.assert_close(got, torch.where(d.abs() < 1, d, d.sign()) / 4)


def test_smooth_l1_needs_states_of_the_target_s_width() -> None:
    with pytest.raises(UserError, match="2 wide and the target's 3"):
        smooth_l1(of_states(torch.zeros(1, 1, 2), torch.zeros(1, 1, 3)))


def test_terms_are_weighed_and_left_out() -> None:
    p, z = draws()
    cfg = LossConfig({"nla": 2.0, "kl": 0.0, "jsd": 1.0}, {"jsd": {"beta": 0.1}})
    one = piece(p, z, 0.0)
    assert torch.equal(cfg.loss(one), 2 * LOSS_TERMS["nla"](one) + LOSS_TERMS["jsd"](one, beta=0.1))
    assert str(cfg) == "2 nla + 1 jsd, depth k weighs 0.8^k, per token"


def test_weights_change_over_a_run() -> None:
    p, z = draws()
    cfg = LossConfig({"kl": [1, 0, 0.5], "nla": [0.0, 2.0, 1.0], "tv": [0, 0, 1]})
    for progress, of_kl, of_nla in ((0.0, 1.0, 0.0), (0.25, 0.5, 0.5), (0.75, 0.0, 1.5)):
        at = piece(p, z, progress)
        wanted = of_kl * LOSS_TERMS["kl"](at) + of_nla * LOSS_TERMS["nla"](at)
        torch.testing.assert_close(cfg.loss(at), wanted, atol=1e-12, rtol=0)
    said = "(1 to 0 over 50% of the run) kl + (0 to 2 over 100% of the run) nla, depth k"
    assert str(cfg).startswith(said)

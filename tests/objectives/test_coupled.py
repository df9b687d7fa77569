"""Terms that read more of a piece than p and q of one position: all depths, or hidden states.

Run alone: python -m pytest tests/objectives/test_coupled.py
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.errors import UserError
from specdec.objectives.losses import TERMS, expected_length, nla, smooth_l1
from specdec.objectives.objective import ObjectiveConfig
from specdec.objectives.piece import Piece
from tests.objectives.test_losses import S, piece_of

N, K = 5, 4
EXACT = 1.0  # a run's end, where the weights are no longer smoothed


def draws() -> tuple[Tensor, Tensor]:
    """p over part of a vocabulary and the draft's logits [N, K, S], in float64."""
    torch.manual_seed(0)
    p_NKS = torch.randn(N, K, S + 3, dtype=torch.float64).softmax(-1)[..., :S]
    return p_NKS, torch.randn(N, K, S, dtype=torch.float64, requires_grad=True)


def beta(p: Tensor, z: Tensor) -> Tensor:
    return torch.minimum(p, z.softmax(-1)).sum(-1)


def piece(p: Tensor, z: Tensor, progress: float) -> Piece:
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

    assert compose(["objective=expected_length"]).objective.depth_decay == 1.0
    assert compose(["objective=kl"]).objective.depth_decay == ObjectiveConfig.depth_decay


# Features


def of_states(hidden: Tensor, features: Tensor) -> Piece:
    p = torch.full((*hidden.shape[:-1], S), 1 / S)
    return replace(piece_of(p, p.log()), hidden=hidden, features=features)


def test_smooth_l1_by_hand() -> None:
    """Differences .5 and -2: ½ · .25 = .125 and 2 - .5 = 1.5, their mean .8125; with β = 4 both
    are below it: .25/8 = .03125 and 4/8 = .5, their mean .265625."""
    given = of_states(torch.tensor([[[0.5, 1.0]]]), torch.tensor([[[0.0, 3.0]]]))
    assert smooth_l1(given).tolist() == [[0.8125]]
    assert smooth_l1(given, beta=4.0).tolist() == [[0.265625]]


def test_smooth_l1_needs_states_of_the_target_s_width() -> None:
    with pytest.raises(UserError, match="2 wide and the target's 3"):
        smooth_l1(of_states(torch.zeros(1, 1, 2), torch.zeros(1, 1, 3)))


def test_terms_are_weighed_and_left_out() -> None:
    p, z = draws()
    cfg = ObjectiveConfig({"nla": 2.0, "kl": 0.0, "jsd": 1.0}, {"jsd": {"beta": 0.1}})
    one = piece(p, z, 0.0)
    assert torch.equal(cfg.loss(one), 2 * TERMS["nla"](one) + TERMS["jsd"](one, beta=0.1))
    assert str(cfg) == "2 nla + 1 jsd, depth k weighs 0.8^k, per token"

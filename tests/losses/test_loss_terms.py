"""The terms of a loss against formulas written out by hand, and their gradients.

Run alone: python -m pytest tests/losses/test_loss_terms.py

p is a distribution over the full target vocabulary cut to the draft's, so that Σ_S p <= 1;
z are the draft's logits and q = softmax(z). Values and gradients are checked in float64, where
rounding is below 1e-14 for numbers of the order of 1; tolerances of 1e-10 leave room for sums.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import UserError
from specdec.losses.loss_terms import (
    COMPARING,
    COUPLED,
    LOG_FLOOR,
    LOSS_TERMS,
    LossInputs,
    confidence,
)

S = 7
# those of one position that read p and q alone; the others have tests of their own
LOSSES = [n for n in LOSS_TERMS if n not in (*COUPLED, *COMPARING, "smooth_l1", "confidence")]


@dataclass
class Constants:
    beta: float = 0.5  # of jsd
    eta: float = 3.0  # of lk_hybrid
    k: float = 3.0  # of top_k


CFG = Constants()


def piece_of(p: Tensor, log_q: Tensor, label: Tensor | None = None) -> LossInputs:
    """A piece of these p and log q [..., S], whose other tensors nobody reads."""
    valid = torch.ones(p.shape[:-1], dtype=torch.bool)
    label = torch.zeros(p.shape[:-1], dtype=torch.long) if label is None else label
    nothing = torch.zeros(*p.shape[:-1], 1, dtype=p.dtype)
    return LossInputs(p.log(), log_q, p.argmax(-1), label, valid, *[nothing] * 3)


def term(name: str, piece: LossInputs, cfg: Constants) -> Tensor:
    of_term: dict[str, dict[str, float]] = {
        "jsd": {"beta": cfg.beta},
        "lk_hybrid": {"eta": cfg.eta},
        "top_k": {"k": cfg.k},
    }
    return LOSS_TERMS[name](piece, **of_term.get(name, {}))


def loss_of(name: str, p: Any, q: Any, cfg: Constants = CFG) -> float:
    """At one position, label 0."""
    p, q = (torch.tensor([x], dtype=torch.float64) for x in (p, q))
    value = term(name, piece_of(p, q.log()), cfg)
    assert value.shape == (1,)  # unreduced
    return value.item()


def whole(n: int) -> Tensor:
    """The draft vocabulary is the whole vocabulary: Σ p = 1."""
    return torch.randn(n, S, dtype=torch.float64).softmax(-1)


def pruned(n: int) -> Tensor:
    """A third of the full vocabulary is missing: Σ p < 1."""
    return torch.randn(n, S + 4, dtype=torch.float64).softmax(-1)[:, :S]


def truncated(n: int) -> Tensor:
    """Top-p set some of p to exactly 0, and the vocabulary is pruned."""
    return pruned(n) * (torch.rand(n, S) < 0.5)


def outside(n: int) -> Tensor:
    """All of p is outside the draft vocabulary."""
    return torch.zeros(n, S, dtype=torch.float64)


TARGETS = [whole, pruned, truncated, outside]


def soft(n: int) -> Tensor:
    return torch.randn(n, S, dtype=torch.float64)


def steep(n: int) -> Tensor:
    """q all but one-hot: log q down to about -40, above the floor."""
    return torch.randn(n, S, dtype=torch.float64).clamp(-2, 2) * 10


def case(
    of_p: Callable[[int], Tensor], of_z: Callable[[int], Tensor], n: int = 12
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return of_p(n), of_z(n), torch.randint(-1, S, (n,))


# --- values ----------------------------------------------------------------------------------


def hand(name: str, p: list[float], q: list[float], label: int, cfg: Constants) -> float:
    """The formulas, token by token; log 0 stands at LOG_FLOOR."""

    def log(x: float) -> float:
        return max(math.log(x), LOG_FLOOR) if x > 0 else LOG_FLOOR

    both = list(zip(p, q))
    kl = sum(a * (log(a) - log(b)) for a, b in both)
    beta = sum(min(a, b) for a, b in both)
    if name == "kl":
        return kl
    if name == "soft_ce":
        return -sum(a * log(b) for a, b in both)
    if name == "top_k":
        return -sum(a * log(b) for a, b in sorted(both)[::-1][: int(cfg.k)])
    if name == "reverse_kl":
        return sum(b * (log(b) - log(a)) for a, b in both)
    if name == "jsd":
        mixed = [cfg.beta * a + (1 - cfg.beta) * b for a, b in both]
        of_p = sum(a * (log(a) - log(m)) for a, m in zip(p, mixed))
        of_q = sum(b * (log(b) - log(m)) for b, m in zip(q, mixed))
        return cfg.beta * of_p + (1 - cfg.beta) * of_q
    if name == "ce":
        return -log(q[label]) if label >= 0 else 0.0
    if name == "tv":
        return 1 - beta
    if name == "nla":
        return -math.log(max(beta, len(p) * math.exp(LOG_FLOOR)))
    weight = math.exp(-cfg.eta * beta)
    return weight * kl + (1 - weight) * (1 - beta)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("of_p", TARGETS)
@pytest.mark.parametrize("of_z", [soft, steep])
@pytest.mark.parametrize("cfg", [CFG, Constants(0.1, 10.0, 9.0)], ids=["default", "other"])
def test_values(name: str, of_p: Any, of_z: Any, cfg: Constants) -> None:
    p, z, label = case(of_p, of_z)
    q = z.softmax(-1)
    got = term(name, piece_of(p, z.log_softmax(-1), label), cfg).tolist()
    wanted = [hand(name, *row, cfg) for row in zip(p.tolist(), q.tolist(), label.tolist())]
    assert got == pytest.approx(wanted, abs=1e-10)


def test_values_on_paper() -> None:
    p, q = [0.5, 0.25, 0.0], [0.25, 0.25, 0.5]  # a quarter of p is outside; β = 0.5
    log2 = math.log(2)
    assert loss_of("kl", p, q) == pytest.approx(0.5 * log2)
    assert loss_of("tv", p, q) == pytest.approx(0.5)
    assert loss_of("nla", p, q) == pytest.approx(log2)
    assert loss_of("ce", p, q) == pytest.approx(2 * log2)
    # 0.25 (-2 + 1) log 2 + 0 + 0.5 (log 0.5 + 60)
    assert loss_of("reverse_kl", p, q) == pytest.approx(-0.25 * log2 + 0.5 * (60 - log2))
    weight = math.exp(-1.5)
    assert loss_of("lk_hybrid", p, q) == pytest.approx(weight * 0.5 * log2 + (1 - weight) * 0.5)


def test_p_is_not_renormalised() -> None:
    """Half of p is outside, q is p over the rest: β is 1/2, however well q does."""
    p, q = [0.3, 0.2], [0.6, 0.4]
    assert loss_of("tv", p, q) == pytest.approx(0.5)
    assert loss_of("nla", p, q) == pytest.approx(math.log(2))
    assert loss_of("kl", p, q) == pytest.approx(-0.5 * math.log(2))  # Σ p log(1/2)


def test_disjoint() -> None:
    p, q = [1.0, 0.0], [0.0, 1.0]
    assert loss_of("tv", p, q) == 1
    assert loss_of("jsd", p, q) == pytest.approx(math.log(2))
    assert loss_of("nla", p, q) == pytest.approx(-LOG_FLOOR - math.log(len(p)))
    for name in ("kl", "reverse_kl", "ce", "lk_hybrid"):
        assert loss_of(name, p, q) == pytest.approx(-LOG_FLOOR)  # λ = exp(0) = 1 in lk_hybrid


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "tv", "nla", "lk_hybrid"])
def test_q_equal_to_p_costs_nothing(name: str) -> None:
    torch.manual_seed(1)
    for z in (soft(20), steep(20)):
        value = term(name, piece_of(z.softmax(-1), z.log_softmax(-1)), CFG)
        assert value.abs().max() < 1e-12
    assert loss_of(name, [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]) == 0


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "tv", "nla", "lk_hybrid"])
def test_over_the_whole_vocabulary_no_loss_is_below_zero(name: str) -> None:
    p, z, _ = case(whole, soft, 200)
    assert term(name, piece_of(p, z.log_softmax(-1)), CFG).min() > 0


def test_symmetry() -> None:
    torch.manual_seed(2)
    p, q = whole(20), whole(20)

    def value(name: str, p: Tensor, q: Tensor) -> Tensor:
        return term(name, piece_of(p, q.log()), CFG)

    for name in ("jsd", "tv", "nla"):  # jsd at β = ½
        assert torch.allclose(value(name, p, q), value(name, q, p), atol=1e-12)
    assert torch.allclose(value("reverse_kl", p, q), value("kl", q, p), atol=1e-12)


def test_lk_hybrid_weighs_each_token_by_its_own_overlap() -> None:
    """λ per token: a token's loss does not depend on its neighbours."""
    p, z, _ = case(pruned, soft)
    pair = piece_of(p, z.log_softmax(-1))
    rows = term("lk_hybrid", pair, CFG)
    for n in range(len(p)):
        one = piece_of(p[n : n + 1], z[n : n + 1].log_softmax(-1))
        assert term("lk_hybrid", one, CFG).item() == pytest.approx(rows[n].item(), abs=1e-14)


def test_ce_leaves_out_labels_that_the_draft_lacks() -> None:
    p, z, _ = case(pruned, soft, 3)
    z.requires_grad_()
    loss = term("ce", piece_of(p, z.log_softmax(-1), torch.tensor([2, -1, S - 1])), CFG)
    loss.sum().backward()
    assert loss[1] == 0 and (loss[[0, 2]] > 0).all()
    assert z.grad is not None and z.grad[1].eq(0).all() and z.grad[0].ne(0).any()


# --- gradients -------------------------------------------------------------------------------


def gradient(name: str, p: Tensor, z: Tensor, label: Tensor, cfg: Constants) -> Tensor:
    """∂L/∂z in closed form, from q, p and the docstrings alone."""
    q = z.softmax(-1)
    beta = torch.minimum(p, q).sum(-1, keepdim=True)

    def centred(r: Tensor) -> Tensor:
        return q * (r - (q * r).sum(-1, keepdim=True))

    of_kl = p.sum(-1, keepdim=True) * q - p
    of_tv = 0.5 * centred((q - p).sign() - 1)  # s - 1 for s: the same, without cancellation
    if name in ("kl", "soft_ce"):
        return of_kl
    if name == "top_k":
        likely = p * (p >= p.sort(-1, descending=True).values[:, int(min(cfg.k, S)) - 1, None])
        return likely.sum(-1, keepdim=True) * q - likely
    if name == "reverse_kl":
        return centred(q.log() - p.log().clamp_min(LOG_FLOOR))
    if name == "jsd":
        return (1 - cfg.beta) * centred(q.log() - (cfg.beta * p + (1 - cfg.beta) * q).log())
    if name == "ce":
        onehot = torch.eye(S, dtype=z.dtype)[label.clamp_min(0)]
        return (q - onehot) * (label >= 0)[:, None]
    if name == "tv":
        return of_tv
    if name == "nla":
        return torch.where(beta > 0, of_tv / beta.clamp_min(1e-300), 0.0)
    weight = (-cfg.eta * beta).exp()
    return weight * of_kl + (1 - weight) * of_tv


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("of_p", TARGETS)
@pytest.mark.parametrize("of_z", [soft, steep])
@pytest.mark.parametrize("cfg", [CFG, Constants(0.1, 10.0, 9.0)], ids=["default", "other"])
def test_gradients_are_the_closed_forms(name: str, of_p: Any, of_z: Any, cfg: Constants) -> None:
    p, z, label = case(of_p, of_z)
    z.requires_grad_()
    term(name, piece_of(p, z.log_softmax(-1), label), cfg).sum().backward()
    assert z.grad is not None
    torch.testing.assert_close(
        z.grad, gradient(name, p, z.detach(), label, cfg), atol=1e-10, rtol=1e-8
    )


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "lk_hybrid"])
@pytest.mark.parametrize("of_p", TARGETS)
def test_gradients_are_the_differences(name: str, of_p: Any) -> None:
    """Central differences. lk_hybrid stops a gradient on purpose, so it has its own test; the
    other losses are smooth but where q = p at a token, which no random case here comes near."""
    p, z, label = case(of_p, soft, 4)
    z.requires_grad_()
    if name == "nla" and of_p is outside:
        return  # constant: below
    assert torch.autograd.gradcheck(
        lambda z: term(name, piece_of(p, z.log_softmax(-1), label), CFG), (z,)
    )


def test_lk_hybrid_differences_with_the_weight_held() -> None:
    p, z, _ = case(pruned, soft, 4)
    z.requires_grad_()
    held = torch.exp(-CFG.eta * torch.minimum(p, z.detach().softmax(-1)).sum(-1))

    def by_hand(z: Tensor) -> Tensor:
        pair = piece_of(p, z.log_softmax(-1))
        return held * term("kl", pair, CFG) + (1 - held) * term("tv", pair, CFG)

    assert torch.autograd.gradcheck(by_hand, (z,))
    (wanted,) = torch.autograd.grad(by_hand(z).sum(), z)
    (got,) = torch.autograd.grad(term("lk_hybrid", piece_of(p, z.log_softmax(-1)), CFG).sum(), z)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_stay_finite_where_p_and_q_have_zeros(name: str) -> None:
    """Top-k of 2 on both sides in float32, overlapping or disjoint: -inf in log p and log q."""
    z = torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3], [0, 9, 0, -9]], requires_grad=True)
    kept = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]]).bool()
    log_q = z.masked_fill(~kept, -torch.inf).log_softmax(-1)
    p = torch.tensor([[0.5, 0.2, 0, 0]] * 3)  # disjoint from row 1
    loss = term(name, piece_of(p, log_q), CFG)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert z.grad is not None and z.grad.isfinite().all() and z.grad[~kept].eq(0).all()


@pytest.mark.parametrize("name", ["kl", "soft_ce", "ce", "nla", "lk_hybrid"])
def test_a_draft_that_is_far_off_still_learns(name: str) -> None:
    """All of p is on token 0 and z says e^-70 of it: as at temperature 0.1 with logits 7 apart.
    The closed forms of kl, soft_ce, ce and nla are then q - onehot(0): a gradient of size 1."""
    p = torch.eye(S, dtype=torch.float64)[:1]
    z = torch.zeros(1, S, dtype=torch.float64)
    z[0, 0] = -70
    label = torch.zeros(1, dtype=torch.long)
    z.requires_grad_()
    term(name, piece_of(p, z.log_softmax(-1), label), CFG).sum().backward()
    assert z.grad is not None and z.grad[0, 0].item() == pytest.approx(-1, abs=1e-6)


def test_confidence_is_trained_towards_beta_which_it_does_not_move() -> None:
    """-β log c - (1 - β) log(1 - c) by hand; with c = σ(x) the gradient of x is c - β."""
    p, z, _ = case(pruned, soft, 3)
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    z.requires_grad_()
    piece = piece_of(p, z.log_softmax(-1))
    piece.confidence = x.sigmoid()
    loss, beta, c = confidence(piece), piece.beta.detach(), x.detach().sigmoid()
    wanted = -beta * c.log() - (1 - beta) * (1 - c).log()
    torch.testing.assert_close(loss.detach(), wanted, atol=1e-12, rtol=0)
    by_x, by_z = torch.autograd.grad(loss.sum(), (x, z), allow_unused=True)
    torch.testing.assert_close(by_x, c - beta, atol=1e-12, rtol=0)
    assert by_z is None
    piece.confidence = None
    with pytest.raises(UserError, match="this family makes none"):
        confidence(piece)

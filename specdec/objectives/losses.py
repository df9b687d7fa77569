"""The terms of an objective: functions from a `Piece` to a loss [N, K].

A term does not reduce, mask or weigh: `objective.py` does that once for all terms. A term's
constants are keyword arguments, set by `objective.constants.TERM.NAME=`. With z the draft's logits,
q = softmax(z) and P = Σ_S p <= 1, the docstrings give the gradient ∂L/∂z, which the tests check in
float64.

Letters: N anchors, K depths, S draft vocabulary, D width, β = Σ min(p, q) of one position.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from specdec.errors import UserError
from specdec.objectives.piece import Piece

LOG_FLOOR = -60.0  # replaces log 0 where a divergence would be infinite


def kl(piece: Piece) -> Tensor:
    """Σ p (log p - log q), forward KL. ∂/∂z = P q - p."""
    return (piece.p * (_floor(piece.log_p) - _floor(piece.log_q))).sum(-1)


def soft_ce(piece: Piece) -> Tensor:
    """-Σ p log q, cross-entropy with the target's distribution. ∂/∂z = P q - p, as for `kl`."""
    return -(piece.p * _floor(piece.log_q)).sum(-1)


def reverse_kl(piece: Piece) -> Tensor:
    """Σ q (log q - log p). ∂/∂z = q (r - E_q[r]) with r = log q - log p."""
    return (piece.q * (_floor(piece.log_q) - _floor(piece.log_p))).sum(-1)


def jsd(piece: Piece, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon (Agarwal et al. 2024, GKD): b KL(p|m) + (1 - b) KL(q|m),
    m = b p + (1 - b) q, where b is `beta`, the weight of p in the mixture.
    ∂/∂z = (1 - b) q (r - E_q[r]) with r = log q - log m."""
    log_m = (beta * piece.p + (1 - beta) * piece.q).clamp_min(math.exp(LOG_FLOOR)).log()
    of_p = (piece.p * (_floor(piece.log_p) - log_m)).sum(-1)
    of_q = (piece.q * (_floor(piece.log_q) - log_m)).sum(-1)
    return beta * of_p + (1 - beta) * of_q


def ce(piece: Piece) -> Tensor:
    """-log q(label), the text's next token; 0 where the draft vocabulary lacks it (label -1).
    ∂/∂z = q - onehot(label)."""
    at_label = _floor(piece.log_q).gather(-1, piece.label.clamp_min(0)[..., None])[..., 0]
    return -at_label * (piece.label >= 0)


def tv(piece: Piece) -> Tensor:
    """1 - Σ min(p, q) = 1 - β, total variation. ∂/∂z = ½ q (s - E_q[s]), s = sign(q - p)."""
    return 1 - piece.beta


def nla(piece: Piece) -> Tensor:
    """-log β, the negative log acceptance. ∂/∂z = ∂TV/∂z / β: strong where β is small."""
    log_min = torch.minimum(piece.log_p, piece.log_q)  # from logarithms: β itself may underflow
    log_beta = log_min.logsumexp(-1)
    disjoint = log_beta.isneginf()
    if disjoint.any():
        log_beta = log_min.masked_fill(disjoint[..., None], LOG_FLOOR).logsumexp(-1)
    return -log_beta


def lk_hybrid(piece: Piece, eta: float = 3.0) -> Tensor:
    """λ KL + (1 - λ) TV with λ = exp(-η β) per token and no gradient through λ: KL dominates where
    the draft is far off and gives way to TV as β grows."""
    weight = torch.exp(-eta * piece.beta.detach())
    return weight * kl(piece) + (1 - weight) * tv(piece)


def expected_length(piece: Piece, smooth: float = 0.5, until: float = 0.5) -> Tensor:
    """1 - Π_{j<=k} β_j at depth k. Summed over the depths it is γ - L, where L = Σ_k Π_{j<=k} β_j
    is the expected number of accepted tokens of a chain (Leviathan et al. 2023, Theorem 3.8 with a
    separate acceptance at each depth).

    Gradient: β_i is a factor of every product that includes depth i, so
    ∂L/∂log β_i = w_i = Σ_{k>=i} Π_{j<=k} β_j, and ∂(γ - L)/∂z_i = w_i ∂(-log β_i)/∂z_i: `nla`,
    each depth weighted by the tokens that depend on it. A product vanishes with any of its
    factors, so a draft that is poor at depth 0 would learn nothing at deeper ones and little at 0.
    So early in a run w_i is computed from β̃ = s + (1 - s) β, as D-PACE smooths its weights
    (arXiv 2605.18810, s = ½): s falls from `smooth` at the start to 0 when the share `until` of
    the run is done (`until=0`: s stays), and from then on the gradient is exact. Depths after
    an answer's end do not count. An objective's weights over depth apply in addition;
    `objective=expected_length` sets them to 1.
    """
    left = max(0.0, 1 - piece.progress / until) if until > 0 else 1.0
    loss_NK = nla(piece)
    with torch.no_grad():
        reach_NK = (-loss_NK).exp().cumprod(-1)
        beta_NK = smooth * left + (1 - smooth * left) * (-loss_NK).exp()
        smoothed_NK = beta_NK.cumprod(-1) * piece.valid
        weight_NK = smoothed_NK.flip(-1).cumsum(-1).flip(-1)
    # the value of the first line, with the gradient of the last factor alone
    return 1 - reach_NK + weight_NK * (loss_NK - loss_NK.detach())


def smooth_l1(piece: Piece, beta: float = 1.0) -> Tensor:
    """Smooth L1 between the draft's hidden state and the target's final one, averaged over the
    width as in EAGLE-1's own code: with d their difference and b = `beta`, d²/2b where |d| < b,
    else |d| - b/2.

    Raises UserError if the draft is not as wide as the target.
    """
    hidden, features = piece.hidden, piece.features
    if hidden.shape != features.shape:
        raise UserError(
            f"objective.terms.smooth_l1 compares hidden states, but the draft's are "
            f"{hidden.shape[-1]} wide and the target's {features.shape[-1]}: leave this term out, "
            "or train a family that drafts features"
        )
    difference = nn.functional.smooth_l1_loss(
        hidden.float(), features.float(), beta=beta, reduction="none"
    )
    return difference.mean(-1)


def on_policy(piece: Piece, decay: float = 0.8) -> Tensor:
    """Draft-OPD (arXiv 2605.29343): forward KL where the target accepted the draft's token, and
    from the first rejected one on reverse KL · `decay`^k, with k counted from the round's anchor.

    Their code (verl/trainer/distillation/losses.py) estimates both from the drafted token alone;
    here they are exact. It divides by the sum of these weights, a decoder's rounds here by their
    number. Gradients as for `kl` and `reverse_kl`. On plain text, where there are no rounds, it is
    `kl`.
    """
    if piece.accepted is None:
        return kl(piece)
    depths = torch.arange(piece.log_q.shape[1], device=piece.log_q.device)
    return torch.where(piece.accepted, kl(piece), decay**depths * reverse_kl(piece))


def confidence(piece: Piece) -> Tensor:
    """Binary cross-entropy of the family's own estimate c of its acceptance against β, as DSpark
    trains it: -β log c - (1 - β) log(1 - c), with no gradient through β. With c = σ(x),
    ∂/∂x = c - β.

    Raises UserError for a family that makes no such estimate.
    """
    if piece.confidence is None:
        raise UserError(
            "objective.terms.confidence trains a family's own estimate of its acceptance, and this "
            "family makes none: leave the term out"
        )
    beta = piece.beta.detach().clamp(0, 1).to(piece.confidence.dtype)
    return nn.functional.binary_cross_entropy(piece.confidence, beta, reduction="none")


Term = Callable[..., Tensor]
TERMS: dict[str, Term] = {
    term.__name__: term
    for term in (
        *(kl, soft_ce, reverse_kl, jsd, ce, tv, nla, lk_hybrid, expected_length, smooth_l1),
        *(on_policy, confidence),
    )
}
COUPLED = ("expected_length", "on_policy")  # they weigh depths themselves: the default decay is 1


def _floor(log_x: Tensor) -> Tensor:
    """Replace log 0 by a finite number; other values stay and keep their gradient."""
    return log_x.masked_fill(log_x.isneginf(), LOG_FLOOR)

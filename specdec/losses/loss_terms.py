"""The terms of a loss: functions from a `LossInputs` to a loss [N, K].

A term does not reduce, mask or weight; `loss_config.py` does this for all terms. Its constants are
keyword arguments, set by `loss.constants.TERM.NAME=`. z are the draft's logits, q = softmax(z), P =
Σ_S p <= 1, and β = Σ min(p, q) at one position. The docstrings give ∂L/∂z, which the tests check in
float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import UserError, require
from specdec.sampling.trees import Static
from specdec.theory.alpha import DistributionPair

LOG_FLOOR = -60.0  # replaces log 0 where a divergence would be infinite


@dataclass
class LossInputs(DistributionPair):
    """The inputs of a loss term: a chunk of anchors at all depths. `pair` holds log p and log q [N,
    K, S], with argmax p and the text's own token (`label`) [N, K] as indices into the draft
    vocabulary, -1 for tokens outside it. p is normalised over the target's whole vocabulary, not
    over the draft's, so P = Σ_S p <= 1.

    In training, p and q are taken before top-k and top-p. After these cutoffs, removed tokens of q
    would have no gradient even if p gives them mass; and a q trained to equal a truncated p would
    be truncated a second time in serving. If q equals p before the cutoffs, they are equal after
    them, too. `served` is the pair after the cutoffs, without gradients; None if no cutoff is set.
    """

    # [N, K] bool; depths after a response's end, and those dropped by `Trainable.anchors`, are not
    # valid
    valid: Tensor
    logits: Tensor  # [N, K, S] the draft's, before the sampler
    hidden: Tensor  # [N, K, D] the draft's hidden states, which `unembed` reads
    target_hidden: Tensor  # [N, K, D] the target's final hidden states, from which p is computed
    progress: float = 0.0  # share of the run's steps that are done, from 0 to 1
    confidence: Tensor | None = None  # [N, K] the family's own estimate of α, if it makes one
    accepted: Tensor | None = None  # [N, K] bool, at a decoder's anchors: which drafts it accepted
    reference_log_q: Tensor | None = None  # [N, K, S] of a frozen reference draft, if there is one
    served: DistributionPair | None = None
    # [N, K] how much a depth counts relative to the others of its anchor; None: as much, if valid.
    # Where depths are dropped at random, the others stand for them.
    weight: Tensor | None = None

    @property
    def as_served(self) -> DistributionPair:
        """The pair of p and q as in decoding, on which α is measured."""
        return self.served or self


# what a loss term may read of the target, by its name in `LossInputs`
OF_TARGET = ("log_p", "target_argmax", "target_hidden", "accepted", "served")


class ReadsTarget(Exception):
    """A loss term reads what only the target can give, and the target was not run."""


class TextInputs(LossInputs):
    """The inputs of a loss on text that the target has not read: q and the text's own tokens.
    Reading p, or anything else of the target, raises `ReadsTarget`."""

    def __init__(self, log_q: Tensor, label: Tensor, **more: Any) -> None:
        unread: Any = None
        super().__init__(
            unread, log_q, target_argmax=unread, label=label, target_hidden=unread, **more
        )

    @property
    def probability(self) -> Tensor:
        """q [N, K] of the text's own token, 0 where the draft vocabulary lacks it."""
        at_label_NK = self.log_q.detach().gather(-1, self.label.clamp_min(0)[..., None])[..., 0]
        return at_label_NK.exp() * (self.label >= 0)

    def __getattribute__(self, name: str) -> Any:
        if name in OF_TARGET:
            raise ReadsTarget(name)
        return super().__getattribute__(name)


def kl(inputs: LossInputs) -> Tensor:
    """Σ p (log p - log q), forward KL. ∂/∂z = P q - p."""
    return (inputs.p * (_floor(inputs.log_p) - _floor(inputs.log_q))).sum(-1)


def soft_ce(inputs: LossInputs) -> Tensor:
    """-Σ p log q, cross-entropy with the target's distribution. ∂/∂z = P q - p, as for `kl`."""
    return -(inputs.p * _floor(inputs.log_q)).sum(-1)


def reverse_kl(inputs: LossInputs) -> Tensor:
    """Σ q (log q - log p). ∂/∂z = q (r - E_q[r]) with r = log q - log p."""
    return (inputs.q * (_floor(inputs.log_q) - _floor(inputs.log_p))).sum(-1)


def jsd(inputs: LossInputs, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon (Agarwal et al. 2024, GKD): b KL(p|m) + (1 - b) KL(q|m),
    m = b p + (1 - b) q, where b is `beta`, the weight of p in the mixture.
    ∂/∂z = (1 - b) q (r - E_q[r]) with r = log q - log m."""
    log_m = (beta * inputs.p + (1 - beta) * inputs.q).clamp_min(math.exp(LOG_FLOOR)).log()
    of_p = (inputs.p * (_floor(inputs.log_p) - log_m)).sum(-1)
    of_q = (inputs.q * (_floor(inputs.log_q) - log_m)).sum(-1)
    return beta * of_p + (1 - beta) * of_q


def top_k(inputs: LossInputs, k: float = 10.0) -> Tensor:
    """-Σ p log q over the k most likely tokens of p (Zhang et al. 2024, HASS, arXiv 2408.15766).
    p is not renormalised over these tokens. ∂/∂z = P_k q - p on these tokens and P_k q
    elsewhere; P_k is their mass in p."""
    best_NKC = inputs.log_p.topk(min(int(k), inputs.log_p.shape[-1]), -1).indices
    return -(inputs.p.gather(-1, best_NKC) * _floor(inputs.log_q.gather(-1, best_NKC))).sum(-1)


def adaspec(inputs: LossInputs, keep: float = 0.4) -> Tensor:
    """`kl` on a share `keep` of the tokens, 0 on the others. The selected tokens are those whose KL
    exceeds the KL of a trained reference draft most (Hu et al. 2025, AdaSPEC, arXiv 2510.19779).
    ∂/∂z = P q - p on the tokens kept.

    The threshold is a quantile over the valid tokens of a chunk (`loss.chunk`) at each depth; the
    authors' is over a micro-batch (yuezhouhu/adaspec, README.md). As in their code, the loss is
    divided by the number of all tokens.
    """
    reference = inputs.reference_log_q
    assert reference is not None  # checked by `LossConfig.require_complete`
    with torch.no_grad():
        more_NK = (inputs.p * (_floor(reference) - _floor(inputs.log_q))).sum(-1)
        valid_NK = more_NK.masked_fill(~inputs.valid, torch.nan)
        kept_NK = more_NK >= valid_NK.nanquantile(1 - keep, dim=0)
    return kl(inputs) * kept_NK


def ce(inputs: LossInputs) -> Tensor:
    """-log q(label), the text's next token; 0 where the draft vocabulary lacks it (label -1).
    ∂/∂z = q - onehot(label)."""
    at_label = _floor(inputs.log_q).gather(-1, inputs.label.clamp_min(0)[..., None])[..., 0]
    return -at_label * (inputs.label >= 0)


def tv(inputs: LossInputs) -> Tensor:
    """1 - Σ min(p, q) = 1 - β, total variation. ∂/∂z = ½ q (s - E_q[s]), s = sign(q - p)."""
    return 1 - inputs.beta


def nla(inputs: LossInputs) -> Tensor:
    """-log β, the negative log acceptance. ∂/∂z = ∂TV/∂z / β: strong where β is small."""
    least = LOG_FLOOR + math.log(inputs.log_q.shape[-1])  # log β where p and q are disjoint
    return -inputs.log_beta.masked_fill(inputs.log_beta.isneginf(), least)


def lk_hybrid(inputs: LossInputs, eta: float = 3.0) -> Tensor:
    """λ KL + (1 - λ) TV with λ = exp(-η β) per token and no gradient through λ: KL dominates at low
    β, TV at high β. ∂/∂z is the same mixture of their gradients."""
    weight = torch.exp(-eta * inputs.beta.detach())
    return weight * kl(inputs) + (1 - weight) * tv(inputs)


def d_pace(inputs: LossInputs, smooth: float = 0.5) -> Tensor:
    """`ce`, with each depth weighted by the number of tokens that depend on it (D-PACE, arXiv
    2605.18810): w_i = Σ_{k>=i} Π_{j<=k} c_j with c = s + (1 - s) q(label), s = `smooth`, over valid
    depths and without a gradient. ∂/∂z_i = w_i (q - onehot(label)).

    The weights are those of Lucas-TY/D-PACE (specforge/core). That code divides by the number of
    rows, not of anchors, which changes the loss by a factor only. The setting `loss=d_pace` also
    sets `loss.depth_decay` to 1.
    """
    loss_NK = ce(inputs)
    known_NK = (-loss_NK.detach()).exp() * (inputs.label >= 0)
    return _tokens_after(smooth + (1 - smooth) * known_NK, inputs) * loss_NK


def spec_auf(inputs: LossInputs) -> Tensor:
    """`ce` at the depths that a decoder at T = 0 would reach on this text: up to and including the
    first depth whose most likely token is not the text's own, 0 after it (Spec-AUF, accept until
    fail, arXiv 2607.01893). ∂/∂z = q - onehot(label) at these depths; the choice of depths has no
    gradient. The setting `loss=spec_auf` also sets `loss.depth_decay` to 1.
    """
    right_NK = inputs.log_q.argmax(-1) == inputs.label
    return ce(inputs) * _reached(right_NK.to(inputs.log_q.dtype))


def pard2(inputs: LossInputs, text: float = 0.3) -> Tensor:
    """w_k (`kl` + `text` · `ce`) at depth k, with w_k = Π_{j<k} p(label_j): the probability that
    the target itself writes the tokens before it (PARD-2, arXiv 2605.08632, confidence-adaptive
    tokens). w has no gradient; a token outside the draft vocabulary ends it with 0, since no draft
    is accepted past it. ∂/∂z_k = w_k (P q - p + text (q - onehot(label))). The setting `loss=pard2`
    also sets `loss.depth_decay` to 1.

    Weights and the 0.3 are those of AMD-AGI/PARD (pard/pard2_train.py). That code divides by the
    sum of the weights, not by the number of anchors, which changes the loss by a factor only.
    """
    at_label_NK = inputs.log_p.gather(-1, inputs.label.clamp_min(0)[..., None])[..., 0].exp()
    return _reached(at_label_NK * (inputs.label >= 0)) * (kl(inputs) + text * ce(inputs))


def expected_length(inputs: LossInputs, smooth: float = 0.5, until: float = 0.5) -> Tensor:
    """1 - Π_{j<=k} β_j at depth k. Summed over the depths it is γ - L, where L = Σ_k Π_{j<=k} β_j
    is the expected number of accepted tokens of a chain (Leviathan et al. 2023, Theorem 3.8 with a
    separate acceptance at each depth).

    Gradient: ∂L/∂log β_i = w_i = Σ_{k>=i} Π_{j<=k} β_j, so ∂(γ - L)/∂z_i = w_i ∂(-log β_i)/∂z_i.
    This is `nla` with each depth weighted by the tokens that depend on it. A product is near 0 if
    one factor is, so a draft that is poor at depth 0 would learn almost nothing. Early in a run,
    w_i is computed from β̃ = s + (1 - s) β, as in D-PACE (arXiv 2605.18810, s = ½): s falls
    linearly from `smooth` to 0 at the fraction `until` of the run (`until=0`: s is constant).
    Depths after a response's end do not count. The setting `loss=expected_length` also sets
    `loss.depth_decay` to 1.
    """
    smooth *= _left(inputs, until)
    loss_NK = nla(inputs)
    with torch.no_grad():
        beta_NK = (-loss_NK).exp()
        reach_NK = beta_NK.cumprod(-1)
        weight_NK = _tokens_after(smooth + (1 - smooth) * beta_NK, inputs)
    # the value is 1 - reach; the gradient is that of weight · loss, the weight being a constant
    return 1 - reach_NK + weight_NK * (loss_NK - loss_NK.detach())


def expected_tree(
    inputs: LossInputs, paths: Sequence[Sequence[int]], smooth: float = 0.5, until: float = 0.5
) -> Tensor:
    """1 - Σ_v Π_{j<=k} a_j at depth k, over the nodes v of depth k of a static tree of `paths`.
    Summed over the tree's D depths it is D - L, where 1 + L is E[τ]. Depths below the tree are 0.

    a_{k,r} is the probability that the sibling of rank r at depth k is accepted, if siblings are
    drawn from q independently (`decode.verification=specinfer`). After r siblings are rejected, p
    has shrunk to R_r / m_r, where m_r is the probability that all were, R_0 = p and R_{r+1} =
    max(R_r - m_r q, 0) = max(p - M_{r+1} q, 0) with M_{r+1} = M_r + m_r. So

        m_r = 1 - G_r,  G_r = Σ_x min(p, M_r q),  M_0 = 0,  M_{r+1} = M_r + 1 - G_r,

    and a_r = G_{r+1} - G_r; G_1 = β, so on a chain this is `expected_length`. Siblings drawn
    without replacement (`recursive`, the default for trees) are accepted more often: for them L is
    a lower bound, which is loose if q is concentrated.

    Limits. P(v is accepted) = Σ_x Π_j a_j(x_j | x_<j) over the token paths x, but p and q are known
    on the text's own branch alone. The product of its a_j is exact if acceptance at a depth does
    not depend on the tokens accepted above it, as `expected_length` and Sequoia (Chen et al. 2024)
    assume; on small examples where it does, its mean over texts is off by -2 to +6 %
    (tests/losses/test_coupled.py). Children that are the most likely tokens (T = 0) are accepted
    with probability p(x), which has no gradient in q.

    Gradient: with B_r = {x: p > M_r q}, dG_r/dz = M_r q (1_B - Q_B) + Q_B dM_r/dz, Q_B = Σ_B q, and
    dM_{r+1} = dM_r - dG_r. ∂L/∂z_i = Σ_r V_{i,r} ∂a_{i,r}/∂z, where V_{i,r} sums, over the nodes at
    or below one of rank r at depth i, the product of the other factors. As in `expected_length`,
    early in a run V is computed from ã_r = (1 - s) a_r + s [r = 0], and rank 0's part is V ã_0 ∂log
    β; after the share `until` of the run, V is exact.
    """
    smooth *= _left(inputs, until)
    levels, K = Static(paths).levels, inputs.log_p.shape[1]
    require(
        len(levels) <= K,
        f"loss.paths: the tree is {len(levels)} tokens deep, but the draft is trained on {K}: "
        f"give drafter.depth={len(levels)}, or a flatter tree",
    )
    width = 1 + max(rank for level in levels for _, rank in level)
    mass_NK1, before_NK = torch.ones_like(inputs.beta)[..., None], torch.zeros_like(inputs.beta)
    by_rank = []
    for _ in range(width):
        accepted_NK = torch.minimum(inputs.p, mass_NK1 * inputs.q).sum(-1)
        by_rank.append(accepted_NK - before_NK)
        mass_NK1, before_NK = mass_NK1 + 1 - accepted_NK[..., None], accepted_NK
    by_rank_NKC = torch.stack(by_rank, -1)

    def by_depth(a_NKC: Tensor) -> Tensor:
        reach_NT, sums = torch.ones_like(a_NKC[:, 0, :1]), []
        for k, level in enumerate(levels):
            parents, ranks = zip(*level, strict=True)
            reach_NT = reach_NT[:, parents] * a_NKC[:, k, ranks]
            sums.append(reach_NT.sum(-1))
        return torch.stack(sums, -1)

    with torch.enable_grad():
        smoothed_NKC = (1 - smooth) * by_rank_NKC.detach()
        smoothed_NKC[..., 0] += smooth
        share_NK = _shares(inputs)
        total = by_depth(smoothed_NKC.requires_grad_()) * share_NK[:, : len(levels)]
        (others_NKC,) = torch.autograd.grad(total.sum(), smoothed_NKC)
        others_NKC = others_NKC / share_NK.masked_fill(share_NK == 0, 1)[..., None]
    first_NK = (others_NKC * smoothed_NKC.detach())[..., 0] * nla(inputs)
    later_NK = (others_NKC * by_rank_NKC)[..., 1:].sum(-1) * (1 - smooth)
    loss_NK = first_NK - later_NK
    value_NK = nn.functional.pad(1 - by_depth(by_rank_NKC.detach()), (0, K - len(levels)))
    return value_NK + loss_NK - loss_NK.detach()


def smooth_l1(inputs: LossInputs, beta: float = 1.0) -> Tensor:
    """Smooth L1 between the draft's hidden state and the target's final one, averaged over the
    width D as in EAGLE-1's code. With d their difference and b = `beta`, it is d²/2b where |d| < b,
    else |d| - b/2. Its gradient is d/(bD) or sign(d)/D. Raises UserError if the widths differ."""
    hidden, target_hidden = inputs.hidden, inputs.target_hidden
    if hidden.shape != target_hidden.shape:
        raise UserError(
            f"loss.terms.smooth_l1 compares hidden states, but the draft's are "
            f"{hidden.shape[-1]} wide and the target's {target_hidden.shape[-1]}: leave this term "
            "out, or train a family that drafts hidden states"
        )
    difference = nn.functional.smooth_l1_loss(
        hidden.float(), target_hidden.float(), beta=beta, reduction="none"
    )
    return difference.mean(-1)


def on_policy(inputs: LossInputs, decay: float = 0.8) -> Tensor:
    """Draft-OPD (arXiv 2605.29343): forward KL where the target accepted the draft's token; from
    the first rejected token on, reverse KL · `decay`^k at depth k of the speculation step. On plain
    text, which has no steps, it equals `kl`.

    The authors' code (verl/trainer/distillation/losses.py) estimates both divergences from the
    drafted token alone and divides by the sum of these weights. Here they are exact, and divided by
    the number of speculation steps.
    """
    if inputs.accepted is None:
        return kl(inputs)
    x = inputs.log_q
    depths = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    return torch.where(inputs.accepted, kl(inputs), decay**depths * reverse_kl(inputs))


def confidence(inputs: LossInputs) -> Tensor:
    """Binary cross-entropy of the drafter's own estimate c of acceptance against β, as in DSpark:
    -β log c - (1 - β) log(1 - c), without a gradient through β, which is the β of serving
    (`LossInputs.as_served`). With c = σ(x), ∂/∂x = c - β. Raises UserError for a drafter without
    such an estimate."""
    if inputs.confidence is None:
        raise UserError(
            "loss.terms.confidence trains a family's own estimate of its acceptance, and this "
            "family makes none: leave the term out"
        )
    c, beta = inputs.confidence, inputs.as_served.beta.detach().clamp(0, 1)
    beta = beta.to(c.dtype)
    diverged = c.isnan() | beta.isnan()  # torch's function raises for these, not the training loop
    c, beta = c.masked_fill(diverged, 0.5), beta.masked_fill(diverged, 0.5)
    # a GPU's autocast forbids this loss, because probabilities in float16 lose their logarithms
    with torch.autocast(beta.device.type, enabled=False):
        loss = nn.functional.binary_cross_entropy(c, beta, reduction="none")
    return loss.masked_fill(diverged, math.nan)


LossTerm = Callable[..., Tensor]
LOSS_TERMS: dict[str, LossTerm] = {
    term.__name__: term
    for term in (
        *(kl, soft_ce, reverse_kl, jsd, top_k, adaspec, ce, tv, nla, lk_hybrid),
        *(d_pace, spec_auf, pard2, expected_length, expected_tree, on_policy),
        *(confidence, smooth_l1),
    )
}
# terms that weight the depths themselves: they are given all depths of an anchor together, and the
# default decay is 1
COUPLED = ("d_pace", "spec_auf", "pard2", "expected_length", "expected_tree", "on_policy")
COMPARING = ("adaspec",)  # terms that read a reference draft
OF_TREES = ("expected_tree",)  # terms that read the paths of a tree


def _left(inputs: LossInputs, until: float) -> float:
    """The remaining fraction of smoothing: 1 at a run's start, falling to 0 at the fraction `until`
    of the run; constant 1 if `until` is 0."""
    return max(0.0, 1 - inputs.progress / until) if until > 0 else 1.0


def _reached(chance_NK: Tensor) -> Tensor:
    """Π_{j<k} c_j [N, K] without a gradient, for probabilities c; 1 at depth 0."""
    return nn.functional.pad(chance_NK.detach()[:, :-1], (1, 0), value=1.0).cumprod(-1)


def _tokens_after(chance_NK: Tensor, inputs: LossInputs) -> Tensor:
    """Σ_{k>=i} (w_k / w_i) Π_{j<=k} c_j [N, K] over valid depths k, for probabilities c. The
    weights w of the depths are equal unless some depths are dropped at random (P-EAGLE). The loss
    at depth i is multiplied by w_i later, so its expectation is that without dropping."""
    share_NK = _shares(inputs)
    after_NK = (chance_NK.cumprod(-1) * share_NK).flip(-1).cumsum(-1).flip(-1)
    return after_NK / share_NK.masked_fill(share_NK == 0, 1)


def _shares(inputs: LossInputs) -> Tensor:
    """The relative weight of each depth of an anchor [N, K]; 0 if not valid."""
    return (
        inputs.valid.to(inputs.log_q.dtype)
        if inputs.weight is None
        else inputs.weight * inputs.valid
    )


def _floor(log_x: Tensor) -> Tensor:
    """Replace log 0 by a finite number; other values keep their value and gradient."""
    return log_x.masked_fill(log_x.isneginf(), LOG_FLOOR)


def kl_divergence(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p ‖ q) [...] in nats, of logits [..., V]."""
    log_p, log_q = (z.float().log_softmax(-1) for z in (logits_p, logits_q))
    return (log_p.exp() * (log_p - log_q)).sum(-1)

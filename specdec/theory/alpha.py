"""The measures: α in its three variants, τ, and the anchors that a decoder visits.

Only `acceptance` computes α: training, evaluation and reports all call it. docs/concepts.md defines
the terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Acceptance(NamedTuple):
    """Acceptance probability at each position, by variant; float32, of any shape."""

    sampled: Tensor  # β = Σ_x min(p(x), q(x))
    greedy_draft: Tensor  # p(argmax q): an engine that drafts greedily at T > 0
    greedy: Tensor  # 1[argmax p = argmax q]: T = 0


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """β = Σ_x min(p(x), q(x)) over the last axis (Leviathan et al. 2023, Theorem 3.5). Tokens
    outside a pruned draft vocabulary contribute min(p, 0) = 0; p is not renormalised."""
    return torch.minimum(p, q).sum(-1)


@dataclass
class DistributionPair:
    """log p and log q at some positions, over the draft vocabulary [..., S]. `target_argmax` [...]
    is argmax p and `label` [...] the text's own token, as indices into the draft vocabulary, -1 for
    tokens outside it. p, q and β are computed once, on first use."""

    log_p: Tensor
    log_q: Tensor
    target_argmax: Tensor
    label: Tensor

    @cached_property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @cached_property
    def q(self) -> Tensor:
        return self.log_q.exp()

    @cached_property
    def beta(self) -> Tensor:
        return overlap(self.p, self.q)

    @cached_property
    def log_beta(self) -> Tensor:
        """log β, computed from logarithms since β may underflow; -inf where no token has mass in
        both. p is a constant: ∂/∂log q is min(p, q) / β where q < p, half of it where q = p, else
        0."""
        with torch.enable_grad():  # `acceptance`, without gradients, may be the first to ask
            apply: Any = _LogOverlap.apply
            log_beta: Tensor = apply(self.log_p, self.log_q)
        return log_beta


class _LogOverlap(torch.autograd.Function):
    """`torch.minimum(log_p, log_q).logsumexp(-1)` with a gradient of its own. Autograd's
    gradient sweeps over the vocabulary three times as often, and these sweeps dominate the cost
    of a loss."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor) -> Tensor:
        shares = torch.minimum(log_p, log_q)
        largest = shares.amax(-1, keepdim=True)
        largest = largest.masked_fill(largest.isneginf(), 0)
        shares = shares.sub_(largest).exp_()
        total = shares.sum(-1)
        ctx.save_for_backward(log_p, log_q, shares, total)
        return total.log() + largest[..., 0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor]:
        log_p, log_q, shares, total = ctx.saved_tensors
        sign = torch.sub(log_p, log_q).sign_()  # 0 where both are -inf; the shares are 0 there too
        twice = torch.addcmul(shares, shares, sign, out=sign)
        half = grad_outputs[0] / (2 * total.clamp_min(1))  # 0 if p and q are disjoint, else >= 1
        return None, twice.mul_(half[..., None])


@torch.no_grad()
def acceptance(pair: DistributionPair) -> Acceptance:
    """The three variants of α at each position; 0 if a row of q has no mass."""
    log_best_N, best_N = pair.log_q.max(-1)
    has_mass = ~log_best_N.isneginf()
    greedy_draft = pair.log_p.gather(-1, best_N[..., None])[..., 0].exp() * has_mass
    greedy = (best_N == pair.target_argmax) & has_mass
    return Acceptance(pair.log_beta.detach().exp(), greedy_draft, greedy.float())


def expected_tokens(alpha_NK: Tensor) -> Tensor:
    """E[tokens per target pass] [N] = 1 + Σ_k Π_{j<=k} α_j, from acceptance by depth [N, K]."""
    return 1 + alpha_NK.cumprod(-1).sum(-1)


def block_expected_tokens(ratio_NK: Tensor) -> Tensor:
    """E[tokens of a speculation step] [N] under the verification method `block`, from text that the
    target wrote itself.

    `ratio_NK` is s = q(x) / p(x) at the text's own token x at each depth. For a chain X ~ q with
    r_l = p(X_l) / q(X_l), at least i tokens are accepted with probability

        rejection   Π_{l<=i} min(1, r_l)                    (Leviathan et al. 2023, Algorithm 1)
        block       p_i = min(1, p_{i-1} r_i), p_0 = 1      (Sun et al. 2024, Algorithm 2)

    where p_i is the min over 0 <= j <= i of r_{j+1} … r_i. Weighting by s_1 … s_i turns a mean over
    text X ~ p into one over X ~ q. The weighted terms are Π_{l<=i} min(1, s_l) for rejection, hence
    `expected_tokens` of min(1, s), and the min over 0 <= j <= i of s_1 … s_j for block, never less.
    """
    return 1 + ratio_NK.cumprod(-1).clamp_max(1).cummin(-1).values.sum(-1)


def visits(alpha_TK: Tensor) -> Tensor:
    """The expected number of speculation steps [T] that start at each anchor of a text. `alpha_TK`
    is the acceptance at anchor t and depth k, given that all tokens before depth k were accepted.
    The first step starts at anchor 0; a step at t that accepts n tokens is followed by one at t + n
    + 1. With greedy acceptance (0 or 1), the result is exactly the decoder's path. Otherwise depths
    are assumed independent given the text."""
    T, K = alpha_TK.shape
    reach_TK = alpha_TK.double().cumprod(-1)
    lengths = torch.cat([torch.ones(T, 1), reach_TK, torch.zeros(T, 1)], -1).diff(dim=-1).neg()
    rows, visit = lengths.tolist(), [0.0] * (T + K + 1)
    visit[0] = 1.0
    for t in range(T):
        if visit[t]:
            for n, probability in enumerate(rows[t]):
                visit[t + n + 1] += visit[t] * probability
    return torch.tensor(visit[:T], dtype=torch.float64)


def repeated_ngrams(ids: Sequence[int], n: int = 4) -> tuple[int, int]:
    """The number of n-grams of `ids` that occurred earlier in it, and the number of all its
    n-grams. Small targets repeat themselves at T = 0."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(grams) - len(set(grams)), len(grams)

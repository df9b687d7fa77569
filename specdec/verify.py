"""Verification rules: which drafted tokens are kept, and what follows them.

A rule maps drafted tokens, the q they were drawn from and the target's p to the *law* of the
round: the probability of each accepted length, and the distribution of the next token after
each. The decoder draws from that law; the tests sum over it exactly. A rule is lossless when
the committed tokens, over the randomness of the draft too, follow p.

Letters: B batch, N drafted tokens, M = N + 1 target distributions, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Law(NamedTuple):
    length_BM: Tensor  # P(accepted = n), n = 0 … N
    next_BMV: Tensor  # distribution of the token after n accepted ones


class Verdict(NamedTuple):
    accepted_B: Tensor  # how many drafted tokens are kept
    next_B: Tensor  # the token that the target adds


Rule = Callable[[Tensor, Tensor | None, Tensor], Law]


def rejection(tokens_BN: Tensor, q_BNV: Tensor | None, p_BMV: Tensor) -> Law:
    """Leviathan et al. 2023, Algorithm 1: accept x_i with min(1, p_i(x_i) / q_i(x_i)); at the
    first rejection the next token follows norm(max(0, p - q)); after N, p_{N+1}."""
    drafted_p_BN, drafted_q_BN, q_BNV = _drafted(tokens_BN, q_BNV, p_BMV)
    accept_BN = (drafted_p_BN / drafted_q_BN).clamp_max(1)
    one_B1 = accept_BN.new_ones(len(accept_BN), 1)
    reached_BM = torch.cat([one_B1, accept_BN.cumprod(-1)], -1)
    stop_BM = torch.cat([1 - accept_BN, one_B1], -1)
    residual_BNV = (p_BMV[:, :-1] - q_BNV).clamp_min(0)
    return Law(reached_BM * stop_BM, _with_bonus(residual_BNV, p_BMV))


def block(tokens_BN: Tensor, q_BNV: Tensor | None, p_BMV: Tensor) -> Law:
    """Block verification (Sun et al. 2024, Algorithm 2): the chain is judged as a whole.

    w_0 = 1, w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)); S_i = Σ_v max(w_i p_{i+1}(v) -
    q_{i+1}(v), 0); h_i = S_i / (S_i + 1 - w_i), h_N = w_N. The accepted length is the largest
    i whose own coin h_i came up (0 if none); the next token follows max(w_i p - q, 0).
    Never accepts fewer in expectation than `rejection`.
    """
    drafted_p_BN, drafted_q_BN, q_BNV = _drafted(tokens_BN, q_BNV, p_BMV)
    ratio_BN = drafted_p_BN / drafted_q_BN
    weight = ratio_BN.new_ones(len(ratio_BN))
    weights = [weight]
    for i in range(ratio_BN.shape[1]):
        weight = (weight * ratio_BN[:, i]).clamp_max(1)
        weights.append(weight)
    weight_BM = torch.stack(weights, -1)
    residual_BNV = (weight_BM[:, :-1, None] * p_BMV[:, :-1] - q_BNV).clamp_min(0)
    mass_BN = residual_BNV.sum(-1)
    rest_BN = mass_BN + (1 - weight_BM[:, :-1])  # in this order: a coin above 1 is no coin
    coin_BN = torch.where(rest_BN > 0, mass_BN / rest_BN, 0.0)
    coin_BM = torch.cat([coin_BN, weight_BM[:, -1:]], -1)
    none_later = (1 - coin_BM).flip(-1).cumprod(-1).flip(-1)
    none_after_BM = torch.cat([none_later[:, 1:], torch.ones_like(coin_BM[:, :1])], -1)
    length_BM = coin_BM * none_after_BM
    length_BM = torch.cat([none_after_BM[:, :1], length_BM[:, 1:]], -1)  # 0 needs no coin
    return Law(length_BM, _with_bonus(residual_BNV, p_BMV))


RULES: dict[str, Rule] = {"rejection": rejection, "block": block}


def greedy(tokens_BN: Tensor, argmax_BM: Tensor) -> Verdict:
    """T = 0: keep the drafted tokens up to the first that is not the target's argmax."""
    same_BN = tokens_BN == argmax_BM[:, :-1]
    accepted_B = same_BN.long().cumprod(-1).sum(-1)
    return Verdict(accepted_B, argmax_BM.gather(1, accepted_B[:, None])[:, 0])


def draw(law: Law, generator: torch.Generator | None = None) -> Verdict:
    """A verdict from a law: first the length, then the next token."""
    accepted_B = torch.multinomial(law.length_BM, 1, generator=generator)[:, 0]
    rows_BV = law.next_BMV[torch.arange(len(accepted_B), device=accepted_B.device), accepted_B]
    return Verdict(accepted_B, torch.multinomial(rows_BV, 1, generator=generator)[:, 0])


def _drafted(
    tokens_BN: Tensor, q_BNV: Tensor | None, p_BMV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """p and q of the drafted tokens [B, N], and q whole; q None is one-hot at the tokens."""
    if q_BNV is None:
        q_BNV = torch.zeros_like(p_BMV[:, :-1]).scatter_(-1, tokens_BN[..., None], 1.0)
    index = tokens_BN[..., None]
    return p_BMV[:, :-1].gather(-1, index)[..., 0], q_BNV.gather(-1, index)[..., 0], q_BNV


def _with_bonus(residual_BNV: Tensor, p_BMV: Tensor) -> Tensor:
    """Normalised residuals, then p after the last drafted token.

    Where a residual has no mass (q = p up to rounding) its length has probability 0 up to
    rounding; p stands in.
    """
    mass = residual_BNV.sum(-1, keepdim=True)
    filled = torch.where(mass > 0, residual_BNV / mass, p_BMV[:, :-1])
    return torch.cat([filled, p_BMV[:, -1:]], 1)

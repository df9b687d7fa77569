"""Verification methods of papers that production rarely needs: non-iterative rejection, k-SEQ and
traversal. `specdec.decoding.verification_methods` defines the interface and finds them by name."""

import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.decoding.verification_methods import (
    Law,
    VerificationMethod,
    normalised,
    one_hot,
    point_mass,
    probability_ratio,
    smallest_normal,
    survival,
    without_token,
)
from specdec.theory.leviathan import non_iterative_alpha


def non_iterative(tokens_BC: Tensor, q_BV: Tensor | None, p_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Non-iterative rejection, to which Leviathan et al. 2023 (Appendix A.2) compare their method:
    with M = max p / q, accept x with p(x) / (M q(x)); else the next token follows p itself. So x is
    committed with q(x) p(x) / (M q(x)) + (1 - 1 / M) p(x) = p(x). Its α is 1 / M, never above that
    of `rejection`."""
    if q_BV is None:
        q_BV = one_hot(tokens_BC[:, 0], p_BV)
    accepted_B1 = non_iterative_alpha(p_BV, q_BV)[:, None]
    return (probability_ratio(p_BV, q_BV, tokens_BC) * accepted_B1).clamp_max(1), p_BV


def kseq(tokens_BC: Tensor, q_BV: Tensor | None, p_BV: Tensor) -> tuple[Tensor, Tensor]:
    """SpecTr's k-SEQ (Sun et al. 2023, Algorithm 2), for k independent children: accept each x
    with probability min(1, p(x) / (ρ q(x))), where ρ solves 1 - (1 - β)^k = ρβ and
    β = Σ min(p / ρ, q). The residual is p minus the accepted mass,
    min(p / ρ, q) · (1 - (1 - β)^k) / β; it is not negative for any ρ at or above the solution, such
    as the bisection's upper end."""
    if q_BV is None:
        return point_mass(tokens_BC, q_BV, p_BV)
    p, q = p_BV.double(), q_BV.double()
    count_B1 = (tokens_BC >= 0).sum(-1, keepdim=True).double()
    high_B1 = count_B1.clamp_min(1)
    low_B1 = torch.ones_like(high_B1)
    for _ in range(40 if tokens_BC.shape[1] > 1 else 0):
        middle_B1 = (low_B1 + high_B1) / 2
        scaled_B1 = torch.minimum(p, middle_B1 * q).sum(-1, keepdim=True)  # ρβ
        enough = 1 - (1 - scaled_B1 / middle_B1).clamp_min(0) ** count_B1 <= scaled_B1
        low_B1 = torch.where(enough, low_B1, middle_B1)
        high_B1 = torch.where(enough, middle_B1, high_B1)
    kept_BV = torch.minimum(p / high_B1, q)
    beta_B1 = kept_BV.sum(-1, keepdim=True).clamp(smallest_normal(p), 1)
    some_B1 = 1 - (1 - beta_B1) ** count_B1
    rest_BV = normalised((p - kept_BV * (some_B1 / beta_B1)).clamp_min(0), p)
    take_BC = probability_ratio(p, high_B1 * q, tokens_BC).clamp_max(1)
    return take_BC.to(p_BV), rest_BV.to(p_BV)


def traversal(proposal: Proposal, p_BMV: Tensor) -> Law:
    """Traversal Verification (Weng et al. 2025, Algorithm 2): from the leaves to the root, over
    siblings drawn without replacement. On a chain it is `block`.

    Each node has a weight w (1 at the anchor) and its own p and q, which shrink as its children
    fail. On entering child x, w_x = min(1, w p(x) / q(x)); the children of x are tried first, then
    the path ends at x with probability w_x. Else, with S = Σ max(w p - q, 0), the parent of x gets
    w <- S / (S + 1 - w), p <- norm(max(w p - q, 0)) and q <- norm(q without x), and the next
    sibling is entered.
    """
    (B, G), row_B = proposal.tokens_BG.shape, torch.arange(len(p_BMV), device=p_BMV.device)
    children_BMC, above_BG = proposal.children_BMC(), proposal.above_BG
    width_BM = (children_BMC > 0).sum(-1)
    p_BMV, q_BMV = p_BMV.clone(), proposal.q_at(row_B[:, None], children_BMC[..., 0])
    weight_BM, stop_BM = torch.ones_like(p_BMV[..., 0]), torch.zeros_like(p_BMV[..., 0])
    alive_B = stop_BM.new_ones(B)  # P(no path has been accepted yet)
    tried_BM, at_B = torch.zeros_like(width_BM), torch.zeros_like(row_B)
    for _ in range(2 * G):  # every node is entered once and left once
        done_B = tried_BM[row_B, at_B] == width_BM[row_B, at_B]
        row_N = (~done_B).nonzero()[:, 0]
        parent_N = at_B[row_N]
        child_N = children_BMC[row_N, parent_N, tried_BM[row_N, parent_N]]
        x_N = proposal.tokens_at(row_N, child_N)
        p_N = p_BMV[row_N, parent_N, x_N]
        q_N = torch.ones_like(p_N) if q_BMV is None else q_BMV[row_N, parent_N, x_N]
        ratio_N = torch.where(q_N > 0, p_N / q_N.clamp_min(smallest_normal(q_N)), 0.0)
        weight_N = (weight_BM[row_N, parent_N] * ratio_N).clamp_max(1)
        weight_BM[row_N, child_N] = weight_N
        tried_BM[row_N, parent_N] += 1
        tried_BM[row_N, child_N] = torch.where(weight_N > 0, 0, width_BM[row_N, child_N])
        at_B[row_N] = child_N

        row_N = (done_B & (at_B > 0)).nonzero()[:, 0]
        child_N = at_B[row_N]
        parent_N, x_N1 = above_BG[row_N, child_N - 1], proposal.tokens_at(row_N, child_N)[:, None]
        stop_BM[row_N, child_N] = alive_B[row_N] * weight_BM[row_N, child_N]
        alive_B[row_N] *= 1 - weight_BM[row_N, child_N]
        p_NV, weight_N = p_BMV[row_N, parent_N], weight_BM[row_N, parent_N]
        if q_BMV is None:
            q_NV = one_hot(x_N1[:, 0], p_NV)
        else:
            q_NV = q_BMV[row_N, parent_N]
            q_BMV[row_N, parent_N] = without_token(q_NV, x_N1)
        residual_NV = (weight_N[:, None] * p_NV - q_NV).clamp_min(0)
        weight_BM[row_N, parent_N] = survival(residual_NV.sum(-1), weight_N)
        p_BMV[row_N, parent_N] = normalised(residual_NV, p_NV)
        at_B[row_N] = parent_N
    stop_BM[:, 0] = alive_B
    return Law(stop_BM, p_BMV)


NON_ITERATIVE = VerificationMethod(non_iterative, name="non_iterative")
KSEQ = VerificationMethod(kseq, siblings="with", name="kseq")
TRAVERSAL = VerificationMethod(whole=traversal, siblings="without", name="traversal")

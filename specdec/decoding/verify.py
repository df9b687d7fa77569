"""Verification rules: which drafted tokens are kept, and what follows them.

A draft is a tree of nodes below the anchor (a chain is a tree of one child a node). A rule maps
its tokens, the q they were drawn from and the target's p to the *law* of the round: where the
committed path ends, and how the next token is distributed there. `verify` draws from that law,
`law` computes it whole, and the tests sum it over every draft. A rule is lossless when the
committed tokens, over the randomness of the draft too, follow p.

Most rules are local: one function judges the children of one node, the law walks it over the
whole tree, and the decoder descends with it from the anchor, so that it needs p only where it
goes. `block` and `traversal` weigh whole paths and need p everywhere.

Letters: B batch, N drafted nodes, M = N + 1 (index 0 the anchor, i + 1 node i), C children of a
node, V vocabulary, R some rows of the batch. In every function

    tokens_BN   int64, -1 where a row has no such node (padding; it has no children)
    parents_BN  int64, -1 the anchor; a parent comes before its child, siblings stand in the
                order in which they were drawn; None = a chain
    q_BNV       what node i was drawn from before any sibling was removed, so siblings have the
                same; None = the tokens were chosen without chance, each a point mass
    p_BMV       the target's distribution after the anchor and after each node
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specdec.sampling.sampler import sample


class Law(NamedTuple):
    stop_BM: Tensor  # P(the committed path ends at this node); 0 = nothing accepted
    next_BMV: Tensor  # distribution of the token that follows there


class Verdict(NamedTuple):
    accepted_B: Tensor  # how many nodes are kept
    next_B: Tensor  # the token that the target adds
    path_BN: Tensor  # the kept nodes by depth, -1 beyond; as wide as the longest of the batch


# (tokens_BC, q_BV, p_BV) -> take_BC, P(child is taken | those before it were not), 0 where there
# is no child; and rest_BV, the distribution of the next token when none is taken.
Node = Callable[..., tuple[Tensor, Tensor]]
# (tokens_BN, parents_BN, q_BNV | None, p_BMV) -> Law
Whole = Callable[..., Law]
# (tokens_BN, parents_BN, logits_BMV) -> Verdict
AtZero = Callable[..., Verdict]


@dataclass(frozen=True)
class Rule:
    """A verification rule: a function of one node or of the whole tree, and what it promises.

    `siblings` is how the children of a node must be drawn: "none" chains only, "without"
    replacement, "with" replacement (duplicates stay), "fixed" chosen without chance. With
    q None every lossless rule takes fixed siblings. `at_zero` judges at temperature 0; None is
    `greedy`, which is lossless whatever the rule is above 0.
    """

    node: Node | None = None
    whole: Whole | None = None
    siblings: Literal["none", "without", "with", "fixed"] = "none"
    lossless: bool = True
    at_zero: AtZero | None = None

    @property
    def trees(self) -> bool:
        return self.siblings != "none"

    def keeps_p(self, greedy: bool) -> bool:
        """Whether what is committed follows the target, at temperature 0 (`greedy`) or above."""
        return self.at_zero is None if greedy else self.lossless

    def tuned(self, **parameters: float) -> "Rule":
        """This rule with other parameters: RULES["lenience"].tuned(factor=0.8)."""
        return replace(
            self,
            node=self.node and partial(self.node, **parameters),
            whole=self.whole and partial(self.whole, **parameters),
            at_zero=self.at_zero and partial(self.at_zero, **parameters),
        )


# --- local rules: the children of one node -------------------------------------------------


def rejection(
    tokens_BC: Tensor, q_BV: Tensor, p_BV: Tensor, replacement: bool = True
) -> tuple[Tensor, Tensor]:
    """Leviathan et al. 2023, Algorithm 1: accept x with min(1, p(x) / q(x)); else the next token
    follows norm(max(p - q, 0)). With several children that is the p by which the next one is
    judged: SpecInfer's multi-step speculative sampling (Miao et al. 2023, Algorithm 2)."""
    takes = []
    for x_B1 in tokens_BC.split(1, -1):
        takes.append(_ratio(p_BV, q_BV, x_B1).clamp_max(1))
        left_BV = _normal((p_BV - q_BV).clamp_min(0), p_BV)
        p_BV = torch.where(x_B1 >= 0, left_BV, p_BV)
        if not replacement and len(takes) < tokens_BC.shape[1]:
            q_BV = _without(q_BV, x_B1.clamp_min(0))
    return torch.cat(takes, -1), p_BV


def recursive(tokens_BC: Tensor, q_BV: Tensor, p_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Recursive rejection sampling without replacement (Jeon et al. 2024; Chen et al. 2024,
    Sequoia): as `rejection`, and after x is rejected also q <- norm(q without x)."""
    return rejection(tokens_BC, q_BV, p_BV, replacement=False)


def lenience(
    tokens_BC: Tensor, q_BV: Tensor | None, p_BV: Tensor, factor: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Leviathan et al. 2023, Appendix A.5: `rejection` with factor · q for q, factor in (0, 1].
    Lossy, but no token becomes likelier than p / factor."""
    _check_factor(factor)
    if q_BV is None:
        q_BV = torch.zeros_like(p_BV).scatter_(-1, tokens_BC[:, :1].clamp_min(0), 1.0)
    return rejection(tokens_BC, factor * q_BV, p_BV)


def kseq(tokens_BC: Tensor, q_BV: Tensor, p_BV: Tensor) -> tuple[Tensor, Tensor]:
    """SpecTr's k-SEQ (Sun et al. 2023, Algorithm 2), for k independent children: accept each x
    with min(1, p(x) / (ρ q(x))), where ρ solves 1 - (1 - β)^k = ρβ, β = Σ min(p / ρ, q).

    The residual is p less what was accepted, min(p / ρ, q) · (1 - (1 - β)^k) / β. It is not
    negative for any ρ at or above the solution, so the bisection (the upper end, in float64)
    decides how much is accepted and never whether the rule is lossless.
    """
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
    beta_B1 = kept_BV.sum(-1, keepdim=True).clamp(_tiny(p), 1)
    some_B1 = 1 - (1 - beta_B1) ** count_B1
    rest_BV = _normal((p - kept_BV * (some_B1 / beta_B1)).clamp_min(0), p)
    take_BC = _ratio(p, high_B1 * q, tokens_BC).clamp_max(1)
    return take_BC.to(p_BV), rest_BV.to(p_BV)


def point_mass(tokens_BC: Tensor, q_BV: Tensor | None, p_BV: Tensor) -> tuple[Tensor, Tensor]:
    """EAGLE's trees at T > 0 (Li et al. 2024): children chosen without chance; accept x with
    p(x), else p <- norm(p without x). It is `recursive` for q that are one-hot, never reads q,
    and is lossless however the tokens came about, for it is so for each draft by itself."""
    takes = []
    for x_B1 in tokens_BC.split(1, -1):
        there_B1, index_B1 = x_B1 >= 0, x_B1.clamp_min(0)
        takes.append(torch.where(there_B1, p_BV.gather(-1, index_B1), 0.0).clamp_max(1))
        p_BV = torch.where(there_B1, _normal(p_BV.scatter(-1, index_B1, 0.0), p_BV), p_BV)
    return torch.cat(takes, -1), p_BV


# --- rules of the whole tree ---------------------------------------------------------------


def block(tokens_BN: Tensor, parents_BN: Tensor, q_BNV: Tensor | None, p_BMV: Tensor) -> Law:
    """Block verification (Sun et al. 2024, Algorithm 2): the chain is judged as a whole.

    w_0 = 1, w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)); S_i = Σ_v max(w_i p_{i+1}(v) -
    q_{i+1}(v), 0); h_i = S_i / (S_i + 1 - w_i), h_N = w_N. The accepted length is the largest
    i whose own coin h_i came up (0 if none); the next token follows max(w_i p - q, 0).
    Never accepts fewer in expectation than `rejection`. Where a row has no node, q counts as 0,
    which makes h_i = w_i at its last one.
    """
    there_BN1 = (tokens_BN >= 0)[..., None]
    if q_BNV is None:
        q_BNV = torch.zeros_like(p_BMV[:, 1:])
        q_BNV = q_BNV.scatter_(-1, tokens_BN.clamp_min(0)[..., None], 1.0)
    ratio_BN = _ratio(p_BMV[:, :-1], q_BNV, tokens_BN[..., None])[..., 0]
    weight = ratio_BN.new_ones(len(ratio_BN))
    weights = [weight]
    for i in range(ratio_BN.shape[1]):
        weight = (weight * ratio_BN[:, i]).clamp_max(1)
        weights.append(weight)
    weight_BM = torch.stack(weights, -1)
    residual_BNV = weight_BM[:, :-1, None] * p_BMV[:, :-1] - q_BNV.masked_fill(~there_BN1, 0.0)
    residual_BNV = residual_BNV.clamp_min(0)
    coin_BN = _survival(residual_BNV.sum(-1), weight_BM[:, :-1])
    coin_BM = torch.cat([coin_BN, weight_BM[:, -1:]], -1)
    none_later = (1 - coin_BM).flip(-1).cumprod(-1).flip(-1)
    none_after_BM = torch.cat([none_later[:, 1:], torch.ones_like(coin_BM[:, :1])], -1)
    stop_BM = torch.cat([none_after_BM[:, :1], (coin_BM * none_after_BM)[:, 1:]], -1)
    next_BMV = torch.cat([_normal(residual_BNV, p_BMV[:, :-1]), p_BMV[:, -1:]], 1)
    return Law(stop_BM, next_BMV)


def traversal(tokens_BN: Tensor, parents_BN: Tensor, q_BNV: Tensor | None, p_BMV: Tensor) -> Law:
    """Traversal Verification (Weng et al. 2025, Algorithm 2): from the leaves to the root, over
    siblings drawn without replacement. On a chain it is `block`.

    Each node carries a weight w, the anchor's is 1, and its own p and q over what its children
    leave. On entering child x, w_x = min(1, w p(x) / q(x)); the children of x have their turn
    first, then the path ends at x with probability w_x. If it does not, x leaves its parent with
    S = Σ max(w p - q, 0), w <- S / (S + 1 - w), p <- norm(max(w p - q, 0)), q <- norm(q
    without x), and the next sibling enters.
    """
    (B, N), row_B = tokens_BN.shape, torch.arange(len(tokens_BN), device=tokens_BN.device)
    children_BMC = _children(tokens_BN, parents_BN)
    width_BM = (children_BMC >= 0).sum(-1)
    p_BMV = p_BMV.clone()
    q_BMV = None if q_BNV is None else q_BNV[row_B[:, None], children_BMC[..., 0].clamp_min(0)]
    weight_BM, stop_BM = torch.ones_like(p_BMV[..., 0]), torch.zeros_like(p_BMV[..., 0])
    alive_B = stop_BM.new_ones(B)  # P(no path has been accepted yet)
    tried_BM, at_B = torch.zeros_like(width_BM), torch.zeros_like(row_B)
    for _ in range(2 * N):  # every node is entered once and left once
        done_B = tried_BM[row_B, at_B] == width_BM[row_B, at_B]
        row_R = (~done_B).nonzero()[:, 0]
        parent_R = at_B[row_R]
        child_R = children_BMC[row_R, parent_R, tried_BM[row_R, parent_R]] + 1
        x_R = tokens_BN[row_R, child_R - 1]
        p_R = p_BMV[row_R, parent_R, x_R]
        q_R = torch.ones_like(p_R) if q_BMV is None else q_BMV[row_R, parent_R, x_R]
        ratio_R = torch.where(q_R > 0, p_R / q_R.clamp_min(_tiny(q_R)), 0.0)
        weight_R = (weight_BM[row_R, parent_R] * ratio_R).clamp_max(1)
        weight_BM[row_R, child_R] = weight_R
        tried_BM[row_R, parent_R] += 1
        tried_BM[row_R, child_R] = torch.where(weight_R > 0, 0, width_BM[row_R, child_R])
        at_B[row_R] = child_R

        row_R = (done_B & (at_B > 0)).nonzero()[:, 0]
        child_R = at_B[row_R]
        parent_R, x_R1 = parents_BN[row_R, child_R - 1] + 1, tokens_BN[row_R, child_R - 1][:, None]
        stop_BM[row_R, child_R] = alive_B[row_R] * weight_BM[row_R, child_R]
        alive_B[row_R] *= 1 - weight_BM[row_R, child_R]
        p_RV, weight_R = p_BMV[row_R, parent_R], weight_BM[row_R, parent_R]
        if q_BMV is None:
            q_RV = torch.zeros_like(p_RV).scatter_(-1, x_R1, 1.0)
        else:
            q_RV = q_BMV[row_R, parent_R]
            q_BMV[row_R, parent_R] = _without(q_RV, x_R1)
        residual_RV = (weight_R[:, None] * p_RV - q_RV).clamp_min(0)
        weight_BM[row_R, parent_R] = _survival(residual_RV.sum(-1), weight_R)
        p_BMV[row_R, parent_R] = _normal(residual_RV, p_RV)
        at_B[row_R] = parent_R
    stop_BM[:, 0] = alive_B
    return Law(stop_BM, p_BMV)


def typical(
    tokens_BN: Tensor,
    parents_BN: Tensor,
    q_BNV: Tensor | None,
    p_BMV: Tensor,
    epsilon: float = 0.3,
    delta: float = 0.09,
) -> Law:
    """Typical acceptance (Cai et al. 2024, Medusa, Section 2.3.1): x is kept if p(x) >
    min(ε, δ e^{-H(p)}), whatever q was; the longest kept path wins (of equals the one drafted
    first), and the next token follows p. Lossy."""
    threshold_BM = (delta * (-torch.special.entr(p_BMV).sum(-1)).exp()).clamp_max(epsilon)
    row_B1 = torch.arange(len(tokens_BN), device=tokens_BN.device)[:, None]
    p_BN = p_BMV[row_B1, parents_BN + 1, tokens_BN.clamp_min(0)]
    end_B = _longest((p_BN > threshold_BM.gather(1, parents_BN + 1)) & (tokens_BN >= 0), parents_BN)
    return Law(torch.zeros_like(threshold_BM).scatter_(1, end_B[:, None], 1.0), p_BMV)


def lenience_at_zero(
    tokens_BN: Tensor, parents_BN: Tensor | None, logits_BMV: Tensor, factor: float = 0.5
) -> Verdict:
    """Leviathan et al. 2023, Appendix A.5, at T = 0: keep x where p(x) >= factor · max p, p taken
    at T = 1; the longest kept path wins, and the next token is the argmax there. Lossy."""
    _check_factor(factor)
    parents_BN = _parents(tokens_BN, parents_BN)
    best_BM, argmax_BM = logits_BMV.max(-1)
    row_B1 = torch.arange(len(tokens_BN), device=tokens_BN.device)[:, None]
    logit_BN = logits_BMV[row_B1, parents_BN + 1, tokens_BN.clamp_min(0)]
    least_BN = best_BM.gather(1, parents_BN + 1) + math.log(factor)
    end_B = _longest((logit_BN >= least_BN) & (tokens_BN >= 0), parents_BN)
    return _verdict(end_B, argmax_BM.gather(1, end_B[:, None])[:, 0], parents_BN)


def _check_factor(factor: float) -> None:
    if not 0 < factor <= 1:
        raise ValueError(f"lenience: factor={factor}; give a number in (0, 1]")


RULES: dict[str, Rule] = {
    "rejection": Rule(node=rejection),
    "block": Rule(whole=block),
    "recursive": Rule(node=recursive, siblings="without"),
    "specinfer": Rule(node=rejection, siblings="with"),
    "kseq": Rule(node=kseq, siblings="with"),
    "point_mass": Rule(node=point_mass, siblings="fixed"),
    "traversal": Rule(whole=traversal, siblings="without"),
    "typical": Rule(whole=typical, siblings="fixed", lossless=False),
    "lenience": Rule(node=lenience, lossless=False, at_zero=lenience_at_zero),
}


# --- what the decoder and the tests call ---------------------------------------------------


def greedy(tokens_BN: Tensor, parents_BN: Tensor | None, argmax_BM: Tensor) -> Verdict:
    """T = 0: keep the longest path whose every token is the target's argmax."""
    parents_BN = _parents(tokens_BN, parents_BN)
    end_B = _longest(tokens_BN == argmax_BM.gather(1, parents_BN + 1), parents_BN)
    return _verdict(end_B, argmax_BM.gather(1, end_B[:, None])[:, 0], parents_BN)


def law(
    rule: Rule,
    tokens_BN: Tensor,
    parents_BN: Tensor | None,
    q_BNV: Tensor | None,
    p_BMV: Tensor,
) -> Law:
    """The exact law of a round. Raises ValueError for a tree where the rule takes chains only."""
    parents_BN = _fitting(rule, tokens_BN, parents_BN)
    if tokens_BN.shape[1] == 0:
        return Law(torch.ones_like(p_BMV[..., 0]), p_BMV)
    if rule.whole is not None:
        return rule.whole(tokens_BN, parents_BN, q_BNV, p_BMV)
    children_BMC = _children(tokens_BN, parents_BN)
    (B, M, V), C = p_BMV.shape, children_BMC.shape[-1]
    child_QC = children_BMC.reshape(B * M, C)  # Q = B M: every node of every row at once
    row_Q = torch.arange(B, device=p_BMV.device).repeat_interleave(M)
    tokens_QC, q_QV = _at(child_QC, row_Q, tokens_BN, q_BNV)
    take_QC, next_QV = _node(rule, q_BNV)(tokens_QC, q_QV, p_BMV.reshape(B * M, V))
    none_BMC = (1 - take_QC).cumprod(-1).reshape(B, M, C)
    before_BMC = torch.cat([torch.ones_like(none_BMC[..., :1]), none_BMC[..., :-1]], -1)
    go_BMC = take_QC.reshape(B, M, C) * before_BMC
    reach = torch.zeros_like(p_BMV[:, 0, :1]).repeat(1, M + 1)  # the last column: no child
    reach[:, 0] = 1
    to_BMC = torch.where(children_BMC >= 0, children_BMC + 1, M)
    for m in range(M):  # a parent comes before its children
        reach.scatter_add_(1, to_BMC[:, m], reach[:, m, None] * go_BMC[:, m])
    return Law(reach[:, :M] * none_BMC[..., -1], next_QV.reshape(B, M, V))


def verify(
    rule: Rule,
    tokens_BN: Tensor,
    parents_BN: Tensor | None,
    q_BNV: Tensor | None,
    p_of: Callable[[Tensor], Tensor],
    generator: torch.Generator | None = None,
) -> Verdict:
    """Draw a verdict from the law of the round.

    `p_of(index_B) -> p_BV` is the target's distribution after node index_B [B] (0 the anchor,
    i + 1 node i) of each row. Local rules ask only where they come by, and stop when every row
    has; the others ask for all. Raises ValueError as `law`.
    """
    (B, N), device = tokens_BN.shape, tokens_BN.device
    if rule.whole is not None:
        index_B = torch.zeros(B, dtype=torch.long, device=device)
        p_BMV = torch.stack([p_of(index_B + m) for m in range(N + 1)], 1)
        return draw(law(rule, tokens_BN, parents_BN, q_BNV, p_BMV), parents_BN, generator)
    parents_BN = _fitting(rule, tokens_BN, parents_BN)
    children_BMC, node = _children(tokens_BN, parents_BN), _node(rule, q_BNV)
    row_B = torch.arange(B, device=device)
    at_B, going_B1 = torch.zeros_like(row_B), torch.ones_like(row_B[:, None], dtype=torch.bool)
    next_BV = p_of(at_B)
    while bool(((child_BC := children_BMC[row_B, at_B]) >= 0).any()):
        # a row that has stopped is judged again at its node, which gives the same next_BV
        take_BC, next_BV = node(*_at(child_BC, row_B, tokens_BN, q_BNV), next_BV)
        coin_BC = torch.rand(take_BC.shape, dtype=next_BV.dtype, device=device, generator=generator)
        taken_BC = coin_BC < take_BC
        going_B1 = going_B1 & taken_BC.any(-1, keepdim=True)
        if not going_B1.any():
            break
        child_B1 = child_BC.gather(1, taken_BC.long().argmax(-1, keepdim=True))
        at_B = torch.where(going_B1, child_B1 + 1, at_B[:, None])[:, 0]
        next_BV = p_of(at_B)
    next_B = sample(next_BV, generator)
    return _verdict(at_B, next_B, parents_BN)


def draw(
    law: Law, parents_BN: Tensor | None = None, generator: torch.Generator | None = None
) -> Verdict:
    """A verdict from a law: first where the path ends, then the next token."""
    end_B = sample(law.stop_BM, generator)
    row_B = torch.arange(len(end_B), device=end_B.device)
    next_B = sample(law.next_BMV[row_B, end_B], generator)
    return _verdict(end_B, next_B, _parents(law.stop_BM[:, 1:], parents_BN))


# --- trees -----------------------------------------------------------------------------------


def _parents(like_BN: Tensor, parents_BN: Tensor | None) -> Tensor:
    if parents_BN is not None:
        return parents_BN
    return (torch.arange(like_BN.shape[1], device=like_BN.device) - 1).expand(like_BN.shape)


def _fitting(rule: Rule, tokens_BN: Tensor, parents_BN: Tensor | None) -> Tensor:
    chain_BN = _parents(tokens_BN, None)
    if parents_BN is None:
        return chain_BN
    if not rule.trees and bool(((parents_BN != chain_BN) & (tokens_BN >= 0)).any()):
        raise ValueError("this verification rule takes chains only, and the draft is a tree")
    return parents_BN


def _children(tokens_BN: Tensor, parents_BN: Tensor) -> Tensor:
    """The children [B, M, C] of the anchor and of each node in their order, -1 where none."""
    B, N = tokens_BN.shape
    there_BN = tokens_BN >= 0
    kin_BNN = (parents_BN[:, :, None] == parents_BN[:, None, :]) & there_BN[:, None, :]
    rank_BN = kin_BNN.tril(-1).sum(-1)
    C = int(torch.where(there_BN, rank_BN, 0).max()) + 1 if B * N else 1
    children_BMC = tokens_BN.new_full((B, N + 1, C), -1)
    row_R, node_R = there_BN.nonzero(as_tuple=True)
    children_BMC[row_R, parents_BN[row_R, node_R] + 1, rank_BN[row_R, node_R]] = node_R
    return children_BMC


def _at(
    child_BC: Tensor, row_B: Tensor, tokens_BN: Tensor, q_BNV: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Tokens of the given children, -1 where none, and the q that they were drawn from."""
    index_BC = child_BC.clamp_min(0)
    tokens_BC = torch.where(child_BC >= 0, tokens_BN[row_B[:, None], index_BC], -1)
    return tokens_BC, None if q_BNV is None else q_BNV[row_B, index_BC[:, 0]]


def _node(rule: Rule, q_BNV: Tensor | None) -> Node:
    """Without q the children are fixed, and every lossless rule is `point_mass`."""
    assert rule.node is not None
    return point_mass if q_BNV is None and rule.lossless else rule.node


def _longest(kept_BN: Tensor, parents_BN: Tensor) -> Tensor:
    """The deepest node index [B] (0 the anchor) whose path is kept throughout; ties: the first."""
    depth_BM = parents_BN.new_zeros(len(parents_BN), parents_BN.shape[1] + 1)
    for _ in range(kept_BN.shape[1]):  # each turn reaches one depth further
        parent_BN = depth_BM.gather(1, parents_BN + 1)
        reached_BN = kept_BN & ((parent_BN > 0) | (parents_BN < 0))
        further_BM = torch.cat([depth_BM[:, :1], torch.where(reached_BN, parent_BN + 1, 0)], -1)
        if torch.equal(further_BM, depth_BM):
            break
        depth_BM = further_BM
    return depth_BM.argmax(-1)


def _verdict(end_B: Tensor, next_B: Tensor, parents_BN: Tensor) -> Verdict:
    """Follow the parents from where the path ends up to the anchor."""
    node_B1, down_BN = end_B[:, None] - 1, parents_BN[:, :0]
    while bool((node_B1 >= 0).any()):
        down_BN = torch.cat([node_B1, down_BN], 1)
        node_B1 = torch.where(node_B1 < 0, -1, parents_BN.gather(1, node_B1.clamp_min(0)))
    path_BN = down_BN.gather(1, (down_BN < 0).long().argsort(dim=1, stable=True))
    return Verdict((path_BN >= 0).sum(-1), next_B, path_BN)


# --- numbers -------------------------------------------------------------------------------


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


def _normal(rows: Tensor, without_mass: Tensor) -> Tensor:
    """Rows [..., V] that sum to 1. One without mass has probability 0 up to rounding; the other
    stands in."""
    mass = rows.sum(-1, keepdim=True)
    return torch.where(mass > _tiny(mass), rows / mass, without_mass)


def _without(q_BV: Tensor, x_B1: Tensor) -> Tensor:
    """norm(q without x); all 0 once q has no token left, and then nothing more is taken."""
    left_BV = q_BV.scatter(-1, x_B1, 0.0)
    return left_BV.div_(left_BV.sum(-1, keepdim=True).clamp_min(_tiny(q_BV)))


def _ratio(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """p(x) / q(x), shaped as tokens; 0 where there is no token, and where q says that x cannot
    have been drawn (a draft without any mass leaves p as it is)."""
    index = tokens.clamp_min(0)
    p_x, q_x = p.gather(-1, index), q.gather(-1, index)
    return torch.where((tokens >= 0) & (q_x > 0), p_x / q_x.clamp_min(_tiny(q_x)), 0.0)


def _survival(mass: Tensor, weight: Tensor) -> Tensor:
    """S / (S + 1 - w), in an order that never gives more than 1; 0 where there is nothing."""
    whole = mass + (1 - weight)
    return torch.where(whole > 0, mass / whole, 0.0)

"""The verdict on a round: where the committed path ends, and the token that follows it.

Letters: B batch, N drafted nodes, M = N + 1 places (0 the anchor, i + 1 node i), C children of a
node, Q places of all rows, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.decoding.rules import Law, Rule, Verdict, verdict
from specdec.sampling.sampler import sample


def verify(
    rule: Rule,
    proposal: Proposal,
    p_of: Callable[[Tensor], Tensor],
    generator: torch.Generator | None = None,
) -> Verdict:
    """Draw a verdict from the law of the round. `p_of(place_B) -> p_BV` is the target's
    distribution after one place of each row; local rules call it only for nodes on their way, until
    every row has stopped. Raises ValueError as `law` does."""
    (B, N), device = proposal.tokens_BN.shape, proposal.tokens_BN.device
    row_B = torch.arange(B, device=device)
    at_B, going_B1 = torch.zeros_like(row_B), torch.ones_like(row_B[:, None], dtype=torch.bool)
    if rule.node is None:
        p_BMV = torch.stack([p_of(at_B + m) for m in range(N + 1)], 1)
        return draw(law(rule, proposal, p_BMV), proposal, generator)
    _require_fitting(rule, proposal)
    children_BMC, next_BV = proposal.children_BMC(), p_of(at_B)
    while bool(((child_BC := children_BMC[row_B, at_B]) > 0).any()):
        # a stopped row is judged again at its node, which gives the same next_BV
        tokens_BC = proposal.tokens_at(row_B[:, None], child_BC)
        take_BC, next_BV = rule.node(tokens_BC, proposal.q_at(row_B, child_BC[:, 0]), next_BV)
        coin_BC = torch.rand(take_BC.shape, dtype=next_BV.dtype, device=device, generator=generator)
        taken_BC = coin_BC < take_BC
        going_B1 = going_B1 & taken_BC.any(-1, keepdim=True)
        if not going_B1.any():
            break
        child_B1 = child_BC.gather(1, taken_BC.long().argmax(-1, keepdim=True))
        at_B = torch.where(going_B1, child_B1, at_B[:, None])[:, 0]
        next_BV = p_of(at_B)
    return verdict(proposal, at_B, sample(next_BV, generator))


def law(rule: Rule, proposal: Proposal, p_BMV: Tensor) -> Law:
    """The exact law of a round. Raises ValueError for a tree if the rule takes chains only."""
    _require_fitting(rule, proposal)
    if proposal.tokens_BN.shape[1] == 0:
        return Law(torch.ones_like(p_BMV[..., 0]), p_BMV)
    if rule.node is None:
        assert rule.whole is not None
        return rule.whole(proposal, p_BMV)
    children_BMC = proposal.children_BMC()
    (B, M, V), C = p_BMV.shape, children_BMC.shape[-1]
    child_QC = children_BMC.reshape(B * M, C)
    row_Q = torch.arange(B, device=p_BMV.device).repeat_interleave(M)
    tokens_QC = proposal.tokens_at(row_Q[:, None], child_QC)
    q_QV = proposal.q_at(row_Q, child_QC[:, 0])
    take_QC, next_QV = rule.node(tokens_QC, q_QV, p_BMV.reshape(B * M, V))
    none_BMC = (1 - take_QC).cumprod(-1).reshape(B, M, C)
    before_BMC = torch.cat([torch.ones_like(none_BMC[..., :1]), none_BMC[..., :-1]], -1)
    go_BMC = take_QC.reshape(B, M, C) * before_BMC
    reach = torch.zeros_like(p_BMV[:, 0, :1]).repeat(1, M + 1)  # the last column: no child
    reach[:, 0] = 1
    to_BMC = torch.where(children_BMC > 0, children_BMC, M)
    for m in range(M):  # a parent comes before its children
        reach.scatter_add_(1, to_BMC[:, m], reach[:, m, None] * go_BMC[:, m])
    return Law(reach[:, :M] * none_BMC[..., -1], next_QV.reshape(B, M, V))


def draw(law: Law, proposal: Proposal, generator: torch.Generator | None = None) -> Verdict:
    """A verdict from a law: first where the path ends, then the next token."""
    end_B = sample(law.stop_BM, generator)
    row_B = torch.arange(len(end_B), device=end_B.device)
    return verdict(proposal, end_B, sample(law.next_BMV[row_B, end_B], generator))


def _require_fitting(rule: Rule, proposal: Proposal) -> None:
    if rule.trees or proposal.parents_BN is None:
        return
    chain_BN = Proposal(proposal.tokens_BN).above_BN
    if bool(((proposal.above_BN != chain_BN) & (proposal.tokens_BN >= 0)).any()):
        raise ValueError("this verification rule judges chains only, but the draft is a tree")

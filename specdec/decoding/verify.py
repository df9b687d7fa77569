"""The verdict on a round: where the committed path ends, and the token that follows it."""

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
    distribution after one place of each row; local rules call it only for the nodes that they
    reach, until all rows have stopped. Raises ValueError for a tree if the rule is for chains."""
    (B, G), device = proposal.tokens_BG.shape, proposal.tokens_BG.device
    if not rule.trees and proposal.parents_BG is not None:
        chain_BG = Proposal(proposal.tokens_BG).above_BG
        if bool(((proposal.above_BG != chain_BG) & (proposal.tokens_BG >= 0)).any()):
            raise ValueError("this verification rule judges chains only, but the draft is a tree")
    row_B = torch.arange(B, device=device)
    at_B = torch.zeros_like(row_B)
    if rule.whole is not None:
        p_BMV = torch.stack([p_of(at_B + m) for m in range(G + 1)], 1)
        nothing_drafted = Law(torch.ones_like(p_BMV[..., 0]), p_BMV)
        return draw(rule.whole(proposal, p_BMV) if G else nothing_drafted, proposal, generator)
    assert rule.node is not None
    going_B1 = torch.ones_like(row_B[:, None], dtype=torch.bool)
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


def draw(law: Law, proposal: Proposal, generator: torch.Generator | None = None) -> Verdict:
    """A verdict from a law: first where the path ends, then the next token."""
    end_B = sample(law.stop_BM, generator)
    row_B = torch.arange(len(end_B), device=end_B.device)
    return verdict(proposal, end_B, sample(law.next_BMV[row_B, end_B], generator))

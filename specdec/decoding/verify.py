"""The verdict on a speculation step: where the committed path ends, and the token that follows
it."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.decoding.verification_methods import Law, Verdict, VerificationMethod, verdict
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import sample


def verify(
    verification: VerificationMethod,
    proposal: Proposal,
    p_of: Callable[[Tensor | None], Tensor],
    draws: RowDraws,
) -> Verdict:
    """Draw a verdict from the law of the speculation step, for all rows at once. `p_of(place_B) ->
    p_BV` is the target's distribution after one place of each row, and `p_of(None) -> p_BMV` after
    all; local verification methods call it only for the nodes that they reach, until all rows have
    stopped. A row's verdict depends on its own draft and random numbers only. Raises ValueError for
    a tree if the verification method is for chains."""
    B, device = len(proposal.tokens_BG), proposal.tokens_BG.device
    if not verification.trees and proposal.parents_BG is not None:
        chain_BG = Proposal(proposal.tokens_BG).above_BG
        if bool(((proposal.above_BG != chain_BG) & (proposal.tokens_BG >= 0)).any()):
            raise ValueError("this verification method judges chains only, but the draft is a tree")
    row_B = torch.arange(B, device=device)
    at_B = torch.zeros_like(row_B)
    if verification.whole is not None:
        p_BMV = p_of(None)
        nothing_drafted = Law(torch.ones_like(p_BMV[..., 0]), p_BMV)
        drafted = proposal.tokens_BG.shape[1] > 0
        return draw(
            verification.whole(proposal, p_BMV) if drafted else nothing_drafted, proposal, draws
        )
    assert verification.node is not None
    going_B1 = torch.ones_like(row_B[:, None], dtype=torch.bool)
    children_BMC, next_BV = proposal.children_BMC(), p_of(at_B)
    while bool(((child_BC := children_BMC[row_B, at_B]) > 0).any()):
        # a stopped row is judged again at its node, which gives the same next_BV
        tokens_BC = proposal.tokens_at(row_B[:, None], child_BC)
        take_BC, next_BV = verification.node(
            tokens_BC, proposal.q_at(row_B, child_BC[:, 0]), next_BV
        )
        used_B = going_B1[:, 0] * (child_BC > 0).sum(-1)
        taken_BC = draws.uniform(child_BC.shape[1], used_B) < take_BC
        going_B1 = going_B1 & taken_BC.any(-1, keepdim=True)
        if not going_B1.any():
            break
        child_B1 = child_BC.gather(1, taken_BC.long().argmax(-1, keepdim=True))
        at_B = torch.where(going_B1, child_B1, at_B[:, None])[:, 0]
        next_BV = p_of(at_B)
    return verdict(proposal, at_B, sample(next_BV, draws.uniform(1)[:, 0]))


def draw(law: Law, proposal: Proposal, draws: RowDraws) -> Verdict:
    """A verdict from a law: first where the path ends, then the next token."""
    uniform_B2 = draws.uniform(2)
    end_B = sample(law.stop_BM, uniform_B2[:, 0])
    row_B = torch.arange(len(end_B), device=end_B.device)
    return verdict(proposal, end_B, sample(law.next_BMV[row_B, end_B], uniform_B2[:, 1]))

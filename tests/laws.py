"""Tables of p and q for tests that add up the law of a speculation step: ordinary ones, and those
made to break a verification method. A fill gives rows [rows, V] that are not yet normalised.

A list of tables is a conditional distribution: element j, [V^j, V] or [K, V^j, V] for K cases,
is what follows each of the V^j prefixes of length j, read as numbers in base V.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.decoding.verification_methods import Law, VerificationMethod

Tables = list[Tensor]
Fill = Callable[[int, int], Tensor]


def uniform(rows: int, V: int) -> Tensor:
    return torch.rand(rows, V)


def sharp(rows: int, V: int) -> Tensor:
    return (12 * torch.randn(rows, V)).softmax(-1)  # ratios over many orders of magnitude


def holes(rows: int, V: int) -> Tensor:
    """Top-p leaves exact zeros; at least one token stays."""
    keep = torch.rand(rows, V) < 0.5
    keep.scatter_(-1, torch.randint(V, (rows, 1)), True)
    return torch.rand(rows, V) * keep


def one_hot(rows: int, V: int) -> Tensor:
    return torch.eye(V)[torch.randint(V, (rows,))]


def ties(rows: int, V: int) -> Tensor:
    return torch.randint(1, 3, (rows, V))  # few values, so p = q at many single tokens


def low_half(rows: int, V: int) -> Tensor:
    return torch.cat([torch.rand(rows, V // 2), torch.zeros(rows, V - V // 2)], -1)


def high_half(rows: int, V: int) -> Tensor:
    return torch.cat([torch.zeros(rows, V // 2), torch.rand(rows, V - V // 2)], -1)


FILLS: list[Fill] = [uniform, sharp, holes, one_hot, ties, low_half, high_half]


def extend(mass: Tensor, p: Tables) -> Tensor:
    """Continue each prefix, of mass [(K,) V^j], by p_j, p_{j+1}, … to the end."""
    for table in p:
        mass = (mass[..., None] * table).flatten(-2)
    return mass


def joint(p: Tables) -> Tensor:
    """Probability of every sequence of len(p) tokens [(K,) V^len(p)]."""
    return extend(torch.ones(p[0].shape[:-1], dtype=torch.float64), p)


def law(verification: VerificationMethod, proposal: Proposal, p_BMV: Tensor) -> Law:
    """The exact law of a speculation step, from which `verify` draws. Q: the places of all rows."""
    if proposal.tokens_BG.shape[1] == 0:
        return Law(torch.ones_like(p_BMV[..., 0]), p_BMV)
    if verification.node is None:
        assert verification.whole is not None
        return verification.whole(proposal, p_BMV)
    children_BMC = proposal.children_BMC()
    (B, M, V), C = p_BMV.shape, children_BMC.shape[-1]
    child_NC = children_BMC.reshape(B * M, C)
    row_N = torch.arange(B, device=p_BMV.device).repeat_interleave(M)
    tokens_NC = proposal.tokens_at(row_N[:, None], child_NC)
    q_NV = proposal.q_at(row_N, child_NC[:, 0])
    take_NC, next_NV = verification.node(tokens_NC, q_NV, p_BMV.reshape(B * M, V))
    none_BMC = (1 - take_NC).cumprod(-1).reshape(B, M, C)
    before_BMC = torch.cat([torch.ones_like(none_BMC[..., :1]), none_BMC[..., :-1]], -1)
    go_BMC = take_NC.reshape(B, M, C) * before_BMC
    reach = torch.zeros_like(p_BMV[:, 0, :1]).repeat(1, M + 1)  # the last column: no child
    reach[:, 0] = 1
    to_BMC = torch.where(children_BMC > 0, children_BMC, M)
    for m in range(M):  # a parent comes before its children
        reach.scatter_add_(1, to_BMC[:, m], reach[:, m, None] * go_BMC[:, m])
    return Law(reach[:, :M] * none_BMC[..., -1], next_NV.reshape(B, M, V))

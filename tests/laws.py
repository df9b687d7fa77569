"""Tables of p and q for tests that add up the law of a round: ordinary ones, and those made to
break a rule. A fill gives rows [rows, V] that are not yet normalised.

A list of tables is a conditional distribution: element j, [V^j, V] or [K, V^j, V] for K cases,
is what follows each of the V^j prefixes of length j, read as numbers in base V.
"""

from collections.abc import Callable

import torch
from torch import Tensor

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

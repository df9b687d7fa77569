"""The law of a speculation step on a tree, summed exactly over every draft of a toy vocabulary.

A tree's shape is the list of its nodes' parents. p and q are conditional tables over a toy
vocabulary, p_j [N, V^j, V] being the distribution after each of the V^j prefixes of length j in
each of N cases. `drafts` enumerates every way in which the tokens of a shape can be drawn from q
and with what probability; `committed` adds up what the law then commits, path and next token,
continued by p to a common length. All in float64: the tolerance of 1e-12 leaves room for
rounding alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.decoding.verification_methods import VERIFICATION_METHODS, Law, VerificationMethod
from tests.laws import FILLS, Fill, Tables, extend, joint, law

EXACT = 1e-12
CHAIN = [-1, 0, 1]
SHAPES = {
    "chain": CHAIN,
    "two": [-1, -1],
    "three": [-1, -1, -1],
    "binary": [-1, -1, 0, 0, 1, 1],
    "uneven": [-1, -1, 0, 0, 2],  # deep below the first child, nothing below the second
    "late": [-1, -1, -1, 2, 3],  # deep below the last child only
    "interleaved": [-1, 0, -1, 2, 0, 2],  # siblings are not neighbours
}
TREE_METHODS = {
    name: verification
    for name, verification in VERIFICATION_METHODS.items()
    if verification.lossless and verification.trees
}


class Drafts(NamedTuple):
    case_B: Tensor
    weight_B: Tensor  # probability of the draft, given its case
    tokens_BG: Tensor
    context_BM: Tensor  # the path to each node, read as a number in base V


def depths(shape: list[int]) -> list[int]:
    """Depth of the anchor, 0, and of each node."""
    found = [0]
    for parent in shape:
        found.append(found[parent + 1] + 1)
    return found


def drafts(shape: list[int], q: Tables, siblings: str) -> Drafts:
    """Every draft of a shape. `siblings`: "without" or "with" replacement; "junk" is without,
    but where q has no token left (or never had one) any token is drawn, instead of none; "fixed"
    is every assignment of tokens, each a case by itself."""
    N, V, depth = len(q[0]), q[0].shape[-1], depths(shape)
    case_B, weight_B = torch.arange(N), torch.ones(N, dtype=torch.float64)
    tokens_BG, context_BM = torch.zeros(N, 0).long(), torch.zeros(N, 1).long()
    for i, parent in enumerate(shape):
        left_BV = q[depth[parent + 1]][case_B, context_BM[:, parent + 1]].clone()
        for j in range(i):
            if shape[j] == parent and siblings in ("without", "junk"):
                x_B1 = tokens_BG[:, j, None]
                left_BV.scatter_(1, x_B1.clamp_min(0), 0.0)
        if siblings == "fixed":
            left_BV = torch.ones_like(left_BV)
        mass_B1 = left_BV.sum(1, keepdim=True)
        if siblings == "junk":
            left_BV = torch.where(mass_B1 > 0, left_BV, 1.0)
            mass_B1 = left_BV.sum(1, keepdim=True)
        there_B1 = mass_B1 > 0
        if parent >= 0:
            there_B1 = there_B1 & (tokens_BG[:, parent, None] >= 0)
        odds_BV = torch.where(there_B1, left_BV / mass_B1, 0.0)
        row, x = torch.cat([odds_BV, (~there_B1).double()], 1).nonzero(as_tuple=True)
        drawn = torch.where(x < V, x, -1)
        chance = torch.where(x < V, odds_BV[row, x.clamp_max(V - 1)], 1.0)
        case_B, weight_B = case_B[row], weight_B[row] * chance
        path = context_BM[row, parent + 1] * V + drawn.clamp_min(0)
        context_BM = torch.cat([context_BM[row], path[:, None]], 1)
        tokens_BG = torch.cat([tokens_BG[row], drawn[:, None]], 1)
    return Drafts(case_B, weight_B, tokens_BG, context_BM)


def along(tables: Tables, shape: list[int], found: Drafts) -> Tensor:
    """The conditionals after the anchor and each node [B, M, V]."""
    rows = [tables[d][found.case_B, found.context_BM[:, m]] for m, d in enumerate(depths(shape))]
    return torch.stack(rows, 1)


def judged(
    verification: VerificationMethod, shape: list[int], p: Tables, q: Tables | None, found: Drafts
) -> Law:
    """The law of each draft. q None: the tokens are point masses."""
    parents_BG = torch.tensor(shape).expand(found.tokens_BG.shape)
    q_BGV = None
    if q is not None:
        deep = q + [torch.zeros_like(p[-1])]  # nothing is drawn below the deepest nodes
        q_BGV = along(deep, shape, found)[:, parents_BG[0] + 1]
    return law(verification, Proposal(found.tokens_BG, q_BGV, parents_BG), along(p, shape, found))


def committed(shape: list[int], p: Tables, found: Drafts, step_law: Law) -> Tensor:
    """Distribution [N, V^(depth + 1)] of a speculation step's tokens, continued by p where they are
    fewer."""
    N, V = len(p[0]), p[0].shape[-1]
    total = torch.zeros_like(joint(p))
    for m, d in enumerate(depths(shape)):
        odds_BV = (found.weight_B * step_law.stop_BM[:, m])[:, None] * step_law.next_BMV[:, m]
        mass = torch.zeros(N * V**d, V, dtype=torch.float64)
        mass.index_add_(0, found.case_B * V**d + found.context_BM[:, m], odds_BV)
        total += extend(mass.reshape(N, -1), p[d + 1 :])
    return total


def error(
    verification: VerificationMethod, shape: list[int], p: Tables, q: Tables, siblings: str
) -> float:
    found = drafts(shape, q, siblings)
    got = committed(shape, p, found, judged(verification, shape, p, q, found))
    return float((got - joint(p)).abs().max())


def expected_accepted(
    verification: VerificationMethod, shape: list[int], p: Tables, q: Tables
) -> Tensor:
    """The expected number of accepted tokens in each case [N]."""
    found = drafts(
        shape, q, "without" if verification.siblings == "none" else verification.siblings
    )
    stop_BM = judged(verification, shape, p, q, found).stop_BM
    mean_B = stop_BM @ torch.tensor(depths(shape), dtype=torch.float64)
    total = torch.zeros(len(p[0]), dtype=torch.float64)
    return total.index_add_(0, found.case_B, found.weight_B * mean_B)


# --- cases -----------------------------------------------------------------------------------


def tables(V: int, depth: int, fills: list[Fill]) -> Tables:
    made = [[fill(V**j, V).double() for fill in fills] for j in range(depth)]
    return [torch.stack([rows / rows.sum(-1, keepdim=True) for rows in level]) for level in made]


def cases(shape: list[int], V: int, seed: int = 0) -> tuple[Tables, Tables]:
    """Every pair of fills, q = p, and q = p at one depth alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        D = max(depths(shape))
        pairs = [(a, b) for a in FILLS for b in FILLS]
        p = tables(V, D + 1, [a for a, _ in pairs] + FILLS + FILLS)
        q = tables(V, D, [b for _, b in pairs] + FILLS + FILLS)
        for j in range(D):
            q[j][len(pairs) : len(pairs) + len(FILLS)] = p[j][len(pairs) : len(pairs) + len(FILLS)]
            k = len(pairs) + len(FILLS) + j
            q[j][k] = p[j][k]
        return p, q


def vocabularies(shape: list[int]) -> tuple[int, ...]:
    """4^5 drafts in each of 63 cases is as many as is quick."""
    return (2, 3, 4) if len(shape) <= 3 else (2, 3)


def example(
    verification: VerificationMethod, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """Four trees of different shapes over five tokens in one batch: full, a chain (the only one
    for a verification method of chains), one with a hole, and nothing."""
    g = torch.Generator().manual_seed(3)
    p_BMV = torch.rand(4, 7, 5, generator=g, dtype=dtype) ** 2
    context_BMV = torch.rand(4, 7, 5, generator=g, dtype=dtype) ** 2
    p_BMV[0, 1, 2] = context_BMV[0, 0, 4] = 0
    p_BMV, context_BMV = (x / x.sum(-1, keepdim=True) for x in (p_BMV, context_BMV))
    tokens = [[0, 3, 1, 2, 0, 1], [2, 0, 1, 4, -1, -1], [4, -1, 1, 2, -1, 0], [-1] * 6]
    parents = [[-1, -1, 0, 0, 1, 2], [-1, 0, 1, 2, -1, -1], [-1, -1, -1, 2, -1, 2], [-1] * 6]
    tokens_BG, parents_BG = torch.tensor(tokens), torch.tensor(parents)
    if not verification.trees:
        tokens[0::2] = [[0, 3, 1, 2, 0, 1], [4] + [-1] * 5]
        tokens_BG = torch.tensor(tokens)
        parents_BG = torch.arange(-1, 5).expand(4, 6)
    q_BGV = context_BMV.gather(1, (parents_BG + 1)[..., None].expand(-1, -1, 5))
    return tokens_BG, parents_BG, q_BGV, p_BMV


def lookup(p_BMV: Tensor) -> Callable[[Tensor | None], Tensor]:
    row_B = torch.arange(len(p_BMV))
    return lambda place_B: p_BMV if place_B is None else p_BMV[row_B, place_B]

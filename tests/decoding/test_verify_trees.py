"""Every rule, on trees: the law of a round, summed exactly over every draft, gives p.

Run alone: python -m pytest tests/decoding/test_verify_trees.py

A tree's shape is the list of its nodes' parents. p and q are conditional tables over a toy
vocabulary, p_j [K, V^j, V] being the distribution after each of the V^j prefixes of length j in
each of K cases. `drafts` enumerates every way in which the tokens of a shape can be drawn from q
and with what probability; `committed` adds up what the law then commits, path and next token,
continued by p to a common length. All in float64: the tolerance of 1e-12 leaves room for
rounding alone. Only the tests of `verify` draw anything.

Letters: K cases, B drafts, N nodes, M = N + 1 (0 the anchor), V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.decoding.rules import (
    RULES,
    Law,
    Rule,
    greedy,
    kseq,
    lenience_at_zero,
    point_mass,
    recursive,
    rejection,
    traversal,
)
from specdec.decoding.verify import law, verify
from tests.laws import FILLS, Fill, Tables, extend, joint

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
TREE_RULES = {name: rule for name, rule in RULES.items() if rule.lossless and rule.trees}
LOSSLESS = {name: rule for name, rule in RULES.items() if rule.lossless}
ON_TREES = pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES)
ON_SHAPES = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


class Drafts(NamedTuple):
    case_B: Tensor
    weight_B: Tensor  # probability of the draft, given its case
    tokens_BN: Tensor
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
    K, V, depth = len(q[0]), q[0].shape[-1], depths(shape)
    case_B, weight_B = torch.arange(K), torch.ones(K, dtype=torch.float64)
    tokens_BN, context_BM = torch.zeros(K, 0).long(), torch.zeros(K, 1).long()
    for i, parent in enumerate(shape):
        left_BV = q[depth[parent + 1]][case_B, context_BM[:, parent + 1]].clone()
        for j in range(i):
            if shape[j] == parent and siblings in ("without", "junk"):
                x_B1 = tokens_BN[:, j, None]
                left_BV.scatter_(1, x_B1.clamp_min(0), 0.0)
        if siblings == "fixed":
            left_BV = torch.ones_like(left_BV)
        mass_B1 = left_BV.sum(1, keepdim=True)
        if siblings == "junk":
            left_BV = torch.where(mass_B1 > 0, left_BV, 1.0)
            mass_B1 = left_BV.sum(1, keepdim=True)
        there_B1 = mass_B1 > 0
        if parent >= 0:
            there_B1 = there_B1 & (tokens_BN[:, parent, None] >= 0)
        odds_BV = torch.where(there_B1, left_BV / mass_B1, 0.0)
        row, x = torch.cat([odds_BV, (~there_B1).double()], 1).nonzero(as_tuple=True)
        drawn = torch.where(x < V, x, -1)
        chance = torch.where(x < V, odds_BV[row, x.clamp_max(V - 1)], 1.0)
        case_B, weight_B = case_B[row], weight_B[row] * chance
        path = context_BM[row, parent + 1] * V + drawn.clamp_min(0)
        context_BM = torch.cat([context_BM[row], path[:, None]], 1)
        tokens_BN = torch.cat([tokens_BN[row], drawn[:, None]], 1)
    return Drafts(case_B, weight_B, tokens_BN, context_BM)


def along(tables: Tables, shape: list[int], found: Drafts) -> Tensor:
    """The conditionals after the anchor and each node [B, M, V]."""
    rows = [tables[d][found.case_B, found.context_BM[:, m]] for m, d in enumerate(depths(shape))]
    return torch.stack(rows, 1)


def judged(rule: Rule, shape: list[int], p: Tables, q: Tables | None, found: Drafts) -> Law:
    """The law of each draft. q None: the tokens are point masses."""
    parents_BN = torch.tensor(shape).expand(found.tokens_BN.shape)
    q_BNV = None
    if q is not None:
        deep = q + [torch.zeros_like(p[-1])]  # nothing is drawn below the deepest nodes
        q_BNV = along(deep, shape, found)[:, parents_BN[0] + 1]
    return law(rule, Proposal(found.tokens_BN, q_BNV, parents_BN), along(p, shape, found))


def committed(shape: list[int], p: Tables, found: Drafts, round_law: Law) -> Tensor:
    """Distribution [K, V^(depth + 1)] of the tokens of a round and, where short, the target's."""
    K, V = len(p[0]), p[0].shape[-1]
    total = torch.zeros_like(joint(p))
    for m, d in enumerate(depths(shape)):
        odds_BV = (found.weight_B * round_law.stop_BM[:, m])[:, None] * round_law.next_BMV[:, m]
        mass = torch.zeros(K * V**d, V, dtype=torch.float64)
        mass.index_add_(0, found.case_B * V**d + found.context_BM[:, m], odds_BV)
        total += extend(mass.reshape(K, -1), p[d + 1 :])
    return total


def error(rule: Rule, shape: list[int], p: Tables, q: Tables, siblings: str) -> float:
    found = drafts(shape, q, siblings)
    got = committed(shape, p, found, judged(rule, shape, p, q, found))
    return float((got - joint(p)).abs().max())


def expected_accepted(rule: Rule, shape: list[int], p: Tables, q: Tables) -> Tensor:
    """Of each case [K]."""
    found = drafts(shape, q, "without" if rule.siblings == "none" else rule.siblings)
    stop_BM = judged(rule, shape, p, q, found).stop_BM
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


# --- losslessness --------------------------------------------------------------------------


@ON_SHAPES
@ON_TREES
def test_committed_tokens_follow_the_target(rule: Rule, shape: list[int]) -> None:
    for V in vocabularies(shape):
        siblings = "without" if rule.siblings == "fixed" else rule.siblings
        assert error(rule, shape, *cases(shape, V), siblings) < EXACT


@ON_SHAPES
@ON_TREES
def test_every_fixed_tree_is_lossless_by_itself(rule: Rule, shape: list[int]) -> None:
    """q None, and whatever the tokens are, siblings that repeat one another among them."""
    for V in (2, 3):
        p, q = cases(shape, V)
        picked = [0, 10, 20, 30, 40, 50, 58]
        p, q = ([table[picked] for table in x] for x in (p, q))
        found = drafts(shape, q, "fixed")
        each = [table[found.case_B] for table in p]
        alone = found._replace(
            case_B=torch.arange(len(found.case_B)), weight_B=torch.ones_like(found.weight_B)
        )
        round_law = judged(rule, shape, each, None, alone)
        assert (committed(shape, each, alone, round_law) - joint(each)).abs().max() < EXACT


@ON_SHAPES
@pytest.mark.parametrize("name", ["recursive", "traversal"])
def test_siblings_beyond_the_mass_of_q_do_no_harm(name: str, shape: list[int]) -> None:
    """A drafter that fills up its tree when q has no token left, and a q without any mass."""
    p, q = cases(shape, 3)
    q = [table.clone() for table in q]
    q[0][::5] = 0
    q[-1][1::5, 0] = 0
    assert error(RULES[name], shape, p, q, "junk") < EXACT


@ON_SHAPES
@ON_TREES
def test_a_law_is_made_of_distributions(rule: Rule, shape: list[int]) -> None:
    p, q = cases(shape, 3)
    for drawn in ("without", "with", "junk"):  # also where the rule is fed the wrong siblings
        found = drafts(shape, q, drawn)
        for x in judged(rule, shape, p, q, found):
            assert x.isfinite().all() and (x >= 0).all()
            assert (x.sum(-1) - 1).abs().max() < EXACT


# --- shapes of one batch -------------------------------------------------------------------


def padded(shape: list[int], at: list[int], found: Drafts, N: int) -> tuple[Tensor, Tensor]:
    """The same tree with its nodes at the places `at` of N; the other places are padding."""
    B = len(found.tokens_BN)
    tokens_BN, parents_BN = torch.full((B, N), -1), torch.full((B, N), -1)
    tokens_BN[:, at] = found.tokens_BN
    parents_BN[:, at] = torch.tensor([-1 if u < 0 else at[u] for u in shape]).expand(B, -1)
    return tokens_BN, parents_BN


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_of_many_shapes_in_one_batch(rule: Rule) -> None:
    """Trees spread over 8 places, in one batch: each row's law is that of its tree alone. Chains
    for a rule of chains, with their padding at the end."""
    places = [(CHAIN, [1, 4, 6]), (SHAPES["binary"], [0, 2, 3, 4, 5, 7]), (CHAIN[:2], [0, 1])]
    if not rule.trees:
        places = [(CHAIN[:n], list(range(n))) for n in (3, 1, 2)]
    p, q = cases(CHAIN, 3)
    rows, alone = [], []
    for shape, at in places:
        found = drafts(shape, q, "with" if rule.siblings == "with" else "without")
        found = Drafts(*(x[:: max(1, len(x) // 100)] for x in found))
        tokens_BN, parents_BN = padded(shape, at, found, 8)
        if not rule.trees:
            parents_BN = torch.arange(-1, 7).expand(len(tokens_BN), 8)
        q_BNV = torch.rand(len(tokens_BN), 8, 3, dtype=torch.float64)
        q_BNV[:, at] = along(q + p[-1:], shape, found)[:, torch.tensor(shape) + 1]
        p_BMV = torch.full((len(tokens_BN), 9, 3), 1 / 3, dtype=torch.float64)
        keep = [0] + [i + 1 for i in at]
        p_BMV[:, keep] = along(p, shape, found)
        rows.append((tokens_BN, parents_BN, q_BNV, p_BMV))
        alone.append((keep, judged(rule, shape, p, q, found)))
    tokens_BN, parents_BN, q_BNV, p_BMV = (torch.cat(x) for x in zip(*rows))
    mixed = law(rule, Proposal(tokens_BN, q_BNV, parents_BN), p_BMV)
    start = 0
    for keep, own in alone:
        here = slice(start, start + len(own.stop_BM))
        assert torch.allclose(mixed.stop_BM[here][:, keep], own.stop_BM, atol=EXACT, rtol=0)
        gap = (mixed.next_BMV[here][:, keep] - own.next_BMV).abs() * own.stop_BM[..., None]
        assert gap.max() < EXACT
        elsewhere = mixed.stop_BM[here].index_fill(1, torch.tensor(keep), 0)
        assert elsewhere.abs().max() == 0
        start += len(own.stop_BM)


# --- how many tokens are accepted ------------------------------------------------------------


@pytest.mark.parametrize("name", ["recursive", "specinfer", "kseq", "traversal", "lenience"])
def test_on_a_chain_a_rule_is_an_older_one(name: str) -> None:
    rule, same = RULES[name], RULES["block" if name == "traversal" else "rejection"]
    if name == "lenience":
        rule = rule.tuned(factor=1.0)
    for V in (2, 3, 4):
        p, q = cases(CHAIN, V)
        found = drafts(CHAIN, q, "without")
        one, other = (judged(r, CHAIN, p, q, found) for r in (rule, same))
        assert torch.allclose(one.stop_BM, other.stop_BM, atol=EXACT, rtol=0)
        gap = (one.next_BMV - other.next_BMV).abs() * other.stop_BM[..., None]
        assert gap.max() < EXACT


@pytest.mark.parametrize("name", ["binary", "two", "three"])
@pytest.mark.parametrize("rule", ["recursive", "specinfer", "kseq", "traversal"])
def test_more_children_never_accept_fewer_than_the_chain(rule: str, name: str) -> None:
    """Trees whose every path is as deep as the chain's. In `recursive` and `specinfer` the first
    child is judged as by `rejection`; k-SEQ accepts min(p, ρq) >= min(p, q) of each token."""
    shape, gains = SHAPES[name], []
    for V in vocabularies(shape):
        p, q = cases(shape, V)
        chain = [-1, 0][: max(depths(shape))]
        gains.append(
            expected_accepted(RULES[rule], shape, p, q)
            - expected_accepted(RULES["rejection"], chain, p, q)
        )
    assert torch.cat(gains).min() > -EXACT and torch.cat(gains).max() > 0.05


@ON_SHAPES
def test_traversal_never_accepts_fewer_than_recursive(shape: list[int]) -> None:
    gains = []
    for V in vocabularies(shape):
        p, q = cases(shape, V)
        one, other = (expected_accepted(RULES[n], shape, p, q) for n in ("traversal", "recursive"))
        gains.append(one - other)
    assert torch.cat(gains).min() > -EXACT
    if max(depths(shape)) == 1:  # siblings alone: the rules are one
        assert torch.cat(gains).abs().max() < EXACT
    else:
        assert torch.cat(gains).max() > 0.01


def test_a_perfect_draft_is_kept_to_a_leaf() -> None:
    for name in ("recursive", "specinfer", "kseq", "traversal"):
        p, _ = cases(SHAPES["binary"], 3)
        got = expected_accepted(RULES[name], SHAPES["binary"], p, p[:2])
        assert (got - 2).abs().max() < EXACT


# --- by hand -------------------------------------------------------------------------------


def test_k_seq_by_hand() -> None:
    """p = (3/4, 1/4), q = (1/4, 3/4), k = 2: β = 1/4 + 1/(4ρ) and 2β - β² = ρβ, so β = 2 - ρ and
    4ρ² - 7ρ + 1 = 0: ρ = (7 + √33) / 8."""
    rho = (7 + 33**0.5) / 8
    p, q = torch.tensor([[[0.75, 0.25]], [[0.25, 0.75]]], dtype=torch.float64)
    take, rest = kseq(torch.tensor([[0, 1]]), q, p)
    hand = torch.tensor([[1.0, 0.25 / (0.75 * rho)]], dtype=torch.float64)
    assert torch.allclose(take, hand, atol=1e-10)
    left = p - torch.minimum(p, rho * q)
    assert torch.allclose(rest, left / left.sum(), atol=1e-10)


def test_recursive_by_hand() -> None:
    """p = (.5, .3, .2), q = (.2, .2, .6), children 2 and 1. Take 2 with 1/3; then p - q = (.3, .1,
    0) and p = (3/4, 1/4, 0), q = (1/2, 1/2, 0): take 1 with 1/2; then (1, 0, 0) is left. With
    replacement q stays, and 1 is taken with min(1, .25 / .2) = 1."""
    p, q = torch.tensor([[[0.5, 0.3, 0.2]], [[0.2, 0.2, 0.6]]], dtype=torch.float64)
    take, rest = recursive(torch.tensor([[2, 1]]), q, p)
    assert torch.allclose(take, torch.tensor([[1 / 3, 1 / 2]], dtype=torch.float64))
    assert torch.allclose(rest, torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64))
    take, _ = rejection(torch.tensor([[2, 1]]), q, p)
    assert torch.allclose(take, torch.tensor([[1 / 3, 1.0]], dtype=torch.float64))


def test_point_mass_by_hand() -> None:
    """p = (.5, .3, .2), children 0 and 2: .5; then p = (0, .6, .4): .4; then (0, 1, 0)."""
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    take, rest = point_mass(torch.tensor([[0, 2]]), None, p)
    assert torch.allclose(take, torch.tensor([[0.5, 0.4]], dtype=torch.float64))
    assert torch.allclose(rest, torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64))


def test_traversal_by_hand() -> None:
    """Nodes 0 and 1 below the anchor, 2 below node 0; tokens 0, 1, 0; p = (1/2, 1/2) but (1, 0)
    after node 0; q = (1, 0) at the anchor, (3/4, 1/4) at node 0. w of node 0 is 1/2, of node 2
    min(1, 1/2 · 4/3) = 2/3: the path ends there with 2/3, where one node at a time keeps 1/2.
    Rejected, node 0 has S = max(1/2 - 3/4, 0) = 0, so its w is 0. Back at the anchor S = 1/2,
    w = 1/2 / (1/2 + 0) = 1, p = (0, 1), and q has nothing left: node 1 is not taken."""
    tokens, parents = torch.tensor([[0, 1, 0]]), torch.tensor([[-1, -1, 0]])
    q = torch.tensor([[[1, 0], [1, 0], [0.75, 0.25]]], dtype=torch.float64)
    p = torch.tensor([[[0.5, 0.5], [1, 0], [0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    stop_BM, next_BMV = law(RULES["traversal"], Proposal(tokens, q, parents), p)
    assert torch.allclose(stop_BM, torch.tensor([[1 / 3, 0, 0, 2 / 3]], dtype=torch.float64))
    assert torch.allclose(next_BMV[0, 0], torch.tensor([0, 1], dtype=torch.float64))
    stop_BM, _ = law(RULES["recursive"], Proposal(tokens, q, parents), p)
    assert torch.allclose(stop_BM, torch.tensor([[0.5, 0, 0, 0.5]], dtype=torch.float64))


# --- verify draws from the law ---------------------------------------------------------------


def example(rule: Rule, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Four trees of different shapes over five tokens in one batch: full, a chain (the only one
    for a rule of chains), one with a hole, and nothing."""
    g = torch.Generator().manual_seed(3)
    p_BMV = torch.rand(4, 7, 5, generator=g, dtype=dtype) ** 2
    context_BMV = torch.rand(4, 7, 5, generator=g, dtype=dtype) ** 2
    p_BMV[0, 1, 2] = context_BMV[0, 0, 4] = 0
    p_BMV, context_BMV = (x / x.sum(-1, keepdim=True) for x in (p_BMV, context_BMV))
    tokens = [[0, 3, 1, 2, 0, 1], [2, 0, 1, 4, -1, -1], [4, -1, 1, 2, -1, 0], [-1] * 6]
    parents = [[-1, -1, 0, 0, 1, 2], [-1, 0, 1, 2, -1, -1], [-1, -1, -1, 2, -1, 2], [-1] * 6]
    tokens_BN, parents_BN = torch.tensor(tokens), torch.tensor(parents)
    if not rule.trees:
        tokens[0::2] = [[0, 3, 1, 2, 0, 1], [4] + [-1] * 5]
        tokens_BN = torch.tensor(tokens)
        parents_BN = torch.arange(-1, 5).expand(4, 6)
    q_BNV = context_BMV.gather(1, (parents_BN + 1)[..., None].expand(-1, -1, 5))
    return tokens_BN, parents_BN, q_BNV, p_BMV


def lookup(p_BMV: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda index_B: p_BMV[torch.arange(len(p_BMV)), index_B]


def chi_square_limit(freedom: int) -> float:
    """Exceeded once in 10,000 times (Wilson and Hilferty's approximation, z = 3.719)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * spread**0.5) ** 3


@pytest.mark.parametrize("sampled", [True, False], ids=["q", "q_None"])
@pytest.mark.parametrize("name", RULES)
def test_verify_follows_the_law(name: str, sampled: bool) -> None:
    """Chi-square over where the path ends and the next token, 25,000 draws of each of the four
    trees in one batch of mixed rows. The seed is fixed."""
    rule, count = RULES[name], 25_000
    tokens_BN, parents_BN, drawn_from_BNV, p_BMV = example(rule)
    q_BNV = drawn_from_BNV if sampled else None
    exact = law(rule, Proposal(tokens_BN, q_BNV, parents_BN), p_BMV)
    row_B = torch.arange(4 * count) % 4
    q_RNV = None if q_BNV is None else q_BNV[row_B]
    accepted_B, next_B, path_BN = verify(
        rule,
        Proposal(tokens_BN[row_B], q_RNV, parents_BN[row_B]),
        lambda index_B: p_BMV[row_B, index_B],
        torch.Generator().manual_seed(11),
    )
    assert torch.equal((path_BN >= 0).sum(-1), accepted_B)
    above_B = torch.full((4 * count,), -1)  # every path goes from parent to child
    for depth in range(path_BN.shape[1]):
        here_B, node_B = path_BN[:, depth] >= 0, path_BN[:, depth].clamp_min(0)
        assert torch.equal(here_B, accepted_B > depth)
        assert (parents_BN[row_B, node_B] == above_B)[here_B].all()
        above_B = torch.where(here_B, node_B, above_B)
    seen = torch.zeros(4, 7, 5, dtype=torch.float64)
    ones = torch.ones(4 * count, dtype=torch.float64)
    seen.index_put_((row_B, above_B + 1, next_B), ones, accumulate=True)
    expected = count * exact.stop_BM[..., None] * exact.next_BMV
    assert seen[expected < 1e-9].sum() == 0
    usual = expected >= 5  # the rare outcomes of a row are counted as one
    for b in range(4):
        rare = ((seen[b] * ~usual[b]).sum() - (expected[b] * ~usual[b]).sum()).abs()
        assert rare < 5 + 5 * (expected[b] * ~usual[b]).sum() ** 0.5
    distance = ((seen - expected) ** 2 / expected)[usual].sum()
    assert distance < chi_square_limit(int(usual.sum()) - 4)


def test_local_rules_ask_for_p_only_where_they_come_by() -> None:
    for name, rule in RULES.items():
        tokens_BN, parents_BN, q_BNV, p_BMV = (x[:1] for x in example(rule))
        for seed in range(20):
            asked: list[int] = []

            def p_of(index_B: Tensor, asked: list[int] = asked, p: Tensor = p_BMV) -> Tensor:
                asked.append(int(index_B))
                return p[torch.arange(1), index_B]

            generator = torch.Generator().manual_seed(seed)
            verdict = verify(rule, Proposal(tokens_BN, q_BNV, parents_BN), p_of, generator)
            path = [0] + [i + 1 for i in verdict.path_BK[0].tolist()]
            assert asked == (path if rule.node else list(range(7))), name


def test_verify_depends_on_the_generator_alone() -> None:
    for rule in RULES.values():
        tokens, parents, q, p = (x.repeat_interleave(20, 0) for x in example(rule))
        one, two = (
            verify(rule, Proposal(tokens, q, parents), lookup(p), torch.Generator().manual_seed(4))
            for _ in range(2)
        )
        assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("name", RULES)
def test_float32_over_a_real_vocabulary(name: str) -> None:
    """What the decoder runs: p = q up to rounding, one-hot, a probability just above 1, disjoint,
    a drafted x with q(x) = 0, no q mass at all. 1e-5 is 84 float32 epsilons."""
    rule, V, g = RULES[name], 4000, torch.Generator().manual_seed(1)
    shape = SHAPES["binary"] if rule.trees else [-1, 0, 1, 2, 3, 4]
    parents_BN = torch.tensor(shape).expand(7, 6)
    logits = 4 * torch.randn(7, 7, V, generator=g)
    context_BMV = (logits + 1e-6 * torch.randn(7, 7, V, generator=g)).softmax(-1)
    p_BMV = logits.softmax(-1)
    p_BMV[1] = context_BMV[1]
    p_BMV[2], context_BMV[2] = 0, 0
    p_BMV[2, :, 7], context_BMV[2, :, 7] = 1.0000001, 1.0000001
    p_BMV[3, :, : V // 2], context_BMV[3, :, V // 2 :] = 0, 0
    p_BMV[3], context_BMV[3] = (x[3] / x[3].sum(-1, keepdim=True) for x in (p_BMV, context_BMV))
    context_BMV[4, :, :100] = 0
    context_BMV[5] = 0
    tokens_BN = torch.randint(V, (7, 6), generator=g)
    tokens_BN[2], tokens_BN[3] = 7, tokens_BN[3] % (V // 2)
    tokens_BN[4] = tokens_BN[4] % 100
    q_BNV = context_BMV[:, parents_BN[0] + 1]
    for q in (q_BNV, None):
        for x in law(rule, Proposal(tokens_BN, q, parents_BN), p_BMV):
            assert x.isfinite().all() and (x >= 0).all()
            assert torch.allclose(x.sum(-1), torch.ones(()), atol=1e-5)
        verdict = verify(rule, Proposal(tokens_BN, q, parents_BN), lookup(p_BMV), g)
        assert verdict.next_B[2] == 7 and ((verdict.next_B >= 0) & (verdict.next_B < V)).all()
        last_B = verdict.path_BK.amax(-1) if verdict.path_BK.shape[1] else torch.full((7,), -1)
        if rule.lossless:
            assert last_B[3] == -1 and verdict.next_B[3] >= V // 2
        if rule.lossless and q is not None and rule is not RULES["point_mass"]:
            assert last_B[4] == -1 and last_B[5] == -1


# --- lossy rules -----------------------------------------------------------------------------


def test_lossy_rules_are_flagged_and_are_lossy() -> None:
    lossy = [{n for n, rule in RULES.items() if not rule.keeps_p(zero)} for zero in (False, True)]
    assert lossy == [{"typical", "lenience"}, {"lenience"}]
    p, q = cases(SHAPES["binary"], 3)
    assert error(RULES["typical"], SHAPES["binary"], p, q, "without") > 0.1
    p, q = cases(CHAIN, 3)
    assert error(RULES["lenience"], CHAIN, p, q, "without") > 0.1


def test_lenience_bounds_every_token() -> None:
    """Leviathan et al. 2023, A.5: no token becomes likelier than p / factor; and less lenience,
    fewer tokens."""
    p, q = cases([-1], 4)
    kept = []
    for factor in (0.25, 0.5, 0.9, 1.0):
        rule = RULES["lenience"].tuned(factor=factor)
        found = drafts([-1], q, "without")
        round_law = judged(rule, [-1], p, q, found)
        first = committed([-1], p, found, round_law).reshape(-1, 4, 4).sum(-1)
        assert (first <= p[0][:, 0] / factor + EXACT).all()
        kept.append(expected_accepted(rule, [-1], p, q))
    assert (torch.stack(kept).diff(dim=0) < EXACT).all()
    for factor in (0.0, 1.5):
        with pytest.raises(ValueError, match="factor"):
            judged(RULES["lenience"].tuned(factor=factor), [-1], p, q, found)


def test_lenience_at_zero_by_hand() -> None:
    """p = (.5, .3, .2) everywhere; factor .5 keeps token 1 (.3 >= .25) and not token 2, factor .7
    neither, factor .4 both. The next token is the argmax, 0, and the deepest path wins."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 5, 3) + 7  # logits are not log p
    tokens, parents = torch.tensor([[1, 0, 1, 2]]), torch.tensor([[-1, -1, 0, 2]])
    for factor, path in ((0.7, [1]), (0.5, [0, 2]), (0.4, [0, 2, 3])):
        rule = RULES["lenience"].tuned(factor=factor)
        assert rule.at_zero is not None
        verdict = rule.at_zero(Proposal(tokens, None, parents), logits)
        assert verdict.path_BK.tolist() == [path] and verdict.next_B.tolist() == [0]
    none = lenience_at_zero(Proposal(torch.tensor([[-1, -1]])), logits[:, :3])
    assert none.accepted_B.tolist() == [0]
    g = torch.Generator().manual_seed(1)
    for _ in range(50):  # without lenience it is `greedy`, where no two logits tie
        drafted = torch.randint(-1, 3, (6, 5), generator=g)
        drafted = drafted.where((drafted >= 0).cumprod(-1).bool(), -1)
        among = torch.randn(6, 6, 3, generator=g)
        strict = lenience_at_zero(Proposal(drafted), among, 1.0)
        best = greedy(Proposal(drafted), among.argmax(-1))
        assert all(torch.equal(a, b) for a, b in zip(strict, best, strict=True))
    for factor in (0.0, 1.5):
        with pytest.raises(ValueError, match="factor"):
            lenience_at_zero(Proposal(tokens, None, parents), logits, factor)


def test_typical_by_hand() -> None:
    """The bound is min(.09, .3 e^{-H}). Flat, p = 1/4 each: e^{-H} = 1/4, the bound is .075 and
    every token passes. Peaked, (.97, .01, .01, .01): e^{-H} = .8456, so .3 e^{-H} = .2537 and .09
    binds; token 1 is refused. Skewed, (.35, .35, .25, .05): H = 1.2312, .3 e^{-H} = .0876, so
    token 3 is refused (with ε and δ swapped the bound would be .0263). With ε = .3 and δ = 2 the
    flat p has the bound min(.3, .5), and nothing passes."""
    flat, peak, skewed = [0.25] * 4, [0.97, 0.01, 0.01, 0.01], [0.35, 0.35, 0.25, 0.05]
    p = torch.tensor([[flat, peak, skewed, flat, flat]], dtype=torch.float64)
    tokens, parents = torch.tensor([[0, 3, 1, 3]]), torch.tensor([[-1, -1, 0, 1]])
    proposal = Proposal(tokens, None, parents)
    stop_BM, next_BMV = law(RULES["typical"], proposal, p)
    assert stop_BM.tolist() == [[0, 1, 0, 0, 0]]  # both tokens of depth 1 are refused
    assert torch.equal(next_BMV, p)
    tuned = RULES["typical"].tuned(epsilon=0.3, delta=2.0)
    assert not tuned.lossless and tuned.trees
    assert law(tuned, proposal, p).stop_BM.tolist() == [[1, 0, 0, 0, 0]]


def test_of_equally_long_paths_typical_takes_the_likelier() -> None:
    """After the anchor (.5, .3, .1, .1): token 0, then 1/4, is .125; token 1, then .97, is .291,
    though it was drafted later and its first token is the less likely. Alone at depth 1, token 0
    is the likelier one."""
    first, flat, peak = [0.5, 0.3, 0.1, 0.1], [0.25] * 4, [0.97, 0.01, 0.01, 0.01]
    p = torch.tensor([[first, flat, peak, flat, flat]], dtype=torch.float64)
    tokens, parents = torch.tensor([[0, 1, 0, 0]]), torch.tensor([[-1, -1, 0, 1]])
    stop_BM, _ = law(RULES["typical"], Proposal(tokens, None, parents), p)
    assert stop_BM.tolist() == [[0, 0, 0, 0, 1]]
    siblings = Proposal(tokens[:, :2].flip(1), None, parents[:, :2])
    assert law(RULES["typical"], siblings, p[:, :3]).stop_BM.tolist() == [[0, 0, 1]]


def test_a_rule_of_chains_refuses_a_tree() -> None:
    for name in ("rejection", "block", "lenience"):
        tokens_BN, parents_BN, q_BNV, p_BMV = example(RULES["recursive"])
        with pytest.raises(ValueError, match="chains only"):
            law(RULES[name], Proposal(tokens_BN, q_BNV, parents_BN), p_BMV)
        with pytest.raises(ValueError, match="chains only"):
            verify(RULES[name], Proposal(tokens_BN, q_BNV, parents_BN), lookup(p_BMV))


# --- the enumeration can fail ----------------------------------------------------------------


def forgets_to_shrink_p(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    takes = [recursive(tokens[:, c : c + 1], q, p)[0] for c in range(tokens.shape[1])]
    return torch.cat(takes, 1), recursive(tokens, q, p)[1]


def forgets_the_residual(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return recursive(tokens, q, p)[0], p


def residual_of_one_child(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return kseq(tokens, q, p)[0], rejection(tokens[:, :1], q, p)[1]


def judges_in_another_order(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    take, rest = recursive(tokens.flip(-1), q, p)
    return take.flip(-1), rest


def point_mass_that_keeps_x(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return point_mass(tokens, q, p)[0], p


def traversal_with_the_next_of_recursive(proposal: Proposal, p: Tensor) -> Law:
    return Law(traversal(proposal, p).stop_BM, law(RULES["recursive"], proposal, p).next_BMV)


def traversal_of_recursive_ends(proposal: Proposal, p: Tensor) -> Law:
    return Law(law(RULES["recursive"], proposal, p).stop_BM, traversal(proposal, p).next_BMV)


BROKEN = [
    (Rule(node=forgets_to_shrink_p, siblings="without"), "without"),
    (Rule(node=forgets_the_residual, siblings="without"), "without"),
    (Rule(node=residual_of_one_child, siblings="with"), "with"),
    (Rule(node=judges_in_another_order, siblings="without"), "without"),
    (Rule(node=point_mass_that_keeps_x, siblings="fixed"), "without"),
    (Rule(whole=traversal_with_the_next_of_recursive, siblings="without"), "without"),
    (Rule(whole=traversal_of_recursive_ends, siblings="without"), "without"),
    (RULES["recursive"], "with"),  # a right rule on siblings drawn the wrong way
    (RULES["traversal"], "with"),
    (RULES["specinfer"], "without"),
    (RULES["kseq"], "without"),
    (replace(RULES["lenience"], siblings="with"), "with"),
]


@pytest.mark.parametrize(("rule", "siblings"), BROKEN)
def test_a_broken_rule_is_caught(rule: Rule, siblings: str) -> None:
    """Nine orders of magnitude above the tolerance."""
    shape = SHAPES["binary"]
    assert error(rule, shape, *cases(shape, 3), siblings) > 1e-3


# --- greedy ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argmax", "path", "following"),
    [
        ([5, 0, 7, 9, 0, 0], [1, 2], 9),  # below the second child
        ([5, 0, 8, 0, 9, 1], [1, 3], 9),  # its second child
        ([4, 6, 7, 0, 0, 3], [0, 4], 3),
        ([4, 9, 7, 7, 7, 7], [0], 9),  # the correction
        ([9, 6, 7, 7, 7, 7], [], 9),  # agreement below a miss counts for nothing
        ([5, 6, 9, 7, 8, 6], [1], 9),
    ],
)
def test_greedy_keeps_the_path_of_the_argmax(
    argmax: list[int], path: list[int], following: int
) -> None:
    """Tokens 4 and 5 below the anchor, 7 and 8 below 5, 6 below 4."""
    tokens, parents = torch.tensor([[4, 5, 7, 8, 6]]), torch.tensor([[-1, -1, 1, 1, 0]])
    verdict = greedy(Proposal(tokens, None, parents), torch.tensor([argmax]))
    assert verdict.accepted_B.tolist() == [len(path)]
    assert verdict.path_BK.tolist() == [path]
    assert verdict.next_B.tolist() == [following]


def test_greedy_is_the_limit_of_every_lossless_rule() -> None:
    """With one-hot p every rule takes the greedy path with certainty, where no two siblings are
    the same token (of twins a local rule takes the first, `greedy` the one that leads on)."""
    shape = SHAPES["binary"]
    p, _ = cases(shape, 3)
    p = [torch.nn.functional.one_hot(x.argmax(-1), 3).double() for x in p]
    for rule in TREE_RULES.values():
        found = drafts(shape, [x[:1] for x in p], "fixed")
        twins_B = (found.tokens_BN[:, ::2] == found.tokens_BN[:, 1::2]).any(-1)
        found = Drafts(*(x[~twins_B] for x in found))
        stop_BM, next_BMV = judged(rule, shape, p, None, found)
        parents_BN = torch.tensor(shape).expand(found.tokens_BN.shape)
        verdict = greedy(
            Proposal(found.tokens_BN, None, parents_BN), along(p, shape, found).argmax(-1)
        )
        end_B = verdict.path_BK.amax(-1) + 1
        row_B = torch.arange(len(end_B))
        assert torch.equal(stop_BM[row_B, end_B], torch.ones(len(end_B)).double())
        assert next_BMV[row_B, end_B, verdict.next_B].eq(1).all()


def test_greedy_of_rows_of_many_shapes() -> None:
    """Padding never matches, and paths of different depths end in -1."""
    tokens = torch.tensor([[1, 2, 3], [1, 2, -1], [1, 1, 1], [-1, -1, -1]])
    parents = torch.tensor([[-1, -1, 1], [-1, 0, -1], [-1, 0, 1], [-1, -1, -1]])
    argmax = torch.tensor([[2, 0, 3, 0], [1, 2, 0, 0], [1, 1, 1, 9], [6, 0, 0, 0]])
    accepted_B, next_B, path_BN = greedy(Proposal(tokens, None, parents), argmax)
    assert accepted_B.tolist() == [2, 2, 3, 0]
    assert next_B.tolist() == [0, 0, 9, 6]
    assert path_BN.tolist() == [[1, 2, -1], [0, 1, -1], [0, 1, 2], [-1, -1, -1]]

"""`verify` draws from the law of a round: the only tests of the rules that draw anything.

Run alone: python -m pytest tests/decoding/test_verify_draws.py
"""

import pytest
import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.decoding.rules import RULES
from specdec.decoding.verify import verify
from tests.decoding.tree_laws import SHAPES, example, lookup
from tests.laws import law


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
    tokens_BG, parents_BG, drawn_from_BGV, p_BMV = example(rule)
    q_BGV = drawn_from_BGV if sampled else None
    exact = law(rule, Proposal(tokens_BG, q_BGV, parents_BG), p_BMV)
    row_B = torch.arange(4 * count) % 4
    q_RGV = None if q_BGV is None else q_BGV[row_B]
    accepted_B, next_B, path_BG = verify(
        rule,
        Proposal(tokens_BG[row_B], q_RGV, parents_BG[row_B]),
        lambda index_B: p_BMV[row_B, index_B],
        torch.Generator().manual_seed(11),
    )
    assert torch.equal((path_BG >= 0).sum(-1), accepted_B)
    above_B = torch.full((4 * count,), -1)  # every path goes from parent to child
    for depth in range(path_BG.shape[1]):
        here_B, node_B = path_BG[:, depth] >= 0, path_BG[:, depth].clamp_min(0)
        assert torch.equal(here_B, accepted_B > depth)
        assert (parents_BG[row_B, node_B] == above_B)[here_B].all()
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
        tokens_BG, parents_BG, q_BGV, p_BMV = (x[:1] for x in example(rule))
        for seed in range(20):
            asked: list[int] = []

            def p_of(index_B: Tensor, asked: list[int] = asked, p: Tensor = p_BMV) -> Tensor:
                asked.append(int(index_B))
                return p[torch.arange(1), index_B]

            generator = torch.Generator().manual_seed(seed)
            verdict = verify(rule, Proposal(tokens_BG, q_BGV, parents_BG), p_of, generator)
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
    parents_BG = torch.tensor(shape).expand(7, 6)
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
    tokens_BG = torch.randint(V, (7, 6), generator=g)
    tokens_BG[2], tokens_BG[3] = 7, tokens_BG[3] % (V // 2)
    tokens_BG[4] = tokens_BG[4] % 100
    q_BGV = context_BMV[:, parents_BG[0] + 1]
    for q in (q_BGV, None):
        for x in law(rule, Proposal(tokens_BG, q, parents_BG), p_BMV):
            assert x.isfinite().all() and (x >= 0).all()
            assert torch.allclose(x.sum(-1), torch.ones(()), atol=1e-5)
        verdict = verify(rule, Proposal(tokens_BG, q, parents_BG), lookup(p_BMV), g)
        assert verdict.next_B[2] == 7 and ((verdict.next_B >= 0) & (verdict.next_B < V)).all()
        last_B = verdict.path_BK.amax(-1) if verdict.path_BK.shape[1] else torch.full((7,), -1)
        if rule.lossless:
            assert last_B[3] == -1 and verdict.next_B[3] >= V // 2
        if rule.lossless and q is not None and rule is not RULES["point_mass"]:
            assert last_B[4] == -1 and last_B[5] == -1

"""`verify` draws from the law of a speculation step: the only tests of the verification methods
that draw anything.

Run alone: python -m pytest tests/decoding/test_verify_draws.py
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.decoding.decode import decode, generate
from specdec.decoding.verification_methods import VERIFICATION_METHODS, verify
from specdec.decoding.way import Way
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Static
from tests.decoding.tree_laws import SHAPES, example, lookup
from tests.drafters.families import make_drafter, make_target, text
from tests.laws import law


def chi_square_limit(freedom: int) -> float:
    """Exceeded once in 10,000 times (Wilson and Hilferty's approximation, z = 3.719)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * spread**0.5) ** 3


@pytest.mark.parametrize("sampled", [True, False], ids=["q", "q_None"])
@pytest.mark.parametrize("name", VERIFICATION_METHODS)
def test_verify_follows_the_law(name: str, sampled: bool) -> None:
    """Chi-square over where the path ends and the next token, 25,000 draws of each of the four
    trees in one batch of mixed rows. The seed is fixed."""
    verification, count = VERIFICATION_METHODS[name], 25_000
    tokens_BG, parents_BG, drawn_from_BGV, p_BMV = example(verification)
    q_BGV = drawn_from_BGV if sampled else None
    exact = law(verification, Proposal(tokens_BG, q_BGV, parents_BG), p_BMV)
    row_B = torch.arange(4 * count) % 4
    q_NGV = None if q_BGV is None else q_BGV[row_B]
    accepted_B, next_B, path_BG = verify(
        verification,
        Proposal(tokens_BG[row_B], q_NGV, parents_BG[row_B]),
        lookup(p_BMV[row_B]),
        RowDraws(range(4 * count)),
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


def test_local_methods_ask_for_p_only_where_they_come_by() -> None:
    for name, verification in VERIFICATION_METHODS.items():
        tokens_BG, parents_BG, q_BGV, p_BMV = (x[:1] for x in example(verification))
        for seed in range(20):
            asked: list[int | None] = []

            def p_of(
                place_B: Tensor | None, asked: list[int | None] = asked, p: Tensor = p_BMV
            ) -> Tensor:
                asked.append(None if place_B is None else int(place_B))
                return lookup(p)(place_B)

            proposal = Proposal(tokens_BG, q_BGV, parents_BG)
            verdict = verify(verification, proposal, p_of, RowDraws([seed]))
            path = [0] + [i + 1 for i in verdict.path_BK[0].tolist()]
            assert asked == (path if verification.node else [None]), name


def test_verify_depends_on_the_seeds_alone() -> None:
    for verification in VERIFICATION_METHODS.values():
        tokens, parents, q, p = (x.repeat_interleave(20, 0) for x in example(verification))
        seeds = range(len(tokens))
        one, two = (
            verify(verification, Proposal(tokens, q, parents), lookup(p), RowDraws(seeds))
            for _ in range(2)
        )
        assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("sampled", [True, False], ids=["q", "q_None"])
@pytest.mark.parametrize("name", VERIFICATION_METHODS)
def test_a_row_draws_the_same_among_any_neighbours(name: str, sampled: bool) -> None:
    """Two verdicts one after the other, of 40 mixed rows: alone without their padding, together,
    permuted, and with a part of the rows gone."""
    verification, count = VERIFICATION_METHODS[name], 40
    mixed = [torch.cat([x] * 10) for x in example(verification)]
    tokens_BG, parents_BG, drawn_from_BGV, p_BMV = mixed
    q_BGV, there_BG = drawn_from_BGV if sampled else None, tokens_BG >= 0

    def verdicts(rows: list[int], nodes: int) -> list[tuple[list[int], list[int], int, int]]:
        """The two paths, and the two next tokens, of each row."""
        q = None if q_BGV is None else q_BGV[rows, :nodes]
        proposal = Proposal(tokens_BG[rows, :nodes], q, parents_BG[rows, :nodes])
        p, draws = p_BMV[rows, : nodes + 1], RowDraws([100 + 7 * b for b in rows])
        both = [verify(verification, proposal, lookup(p), draws) for _ in range(2)]
        paths = [[[i for i in row if i >= 0] for row in v.path_BK.tolist()] for v in both]
        return [*zip(*paths, *(v.next_B.tolist() for v in both), strict=True)]

    nodes = [max([0, *(row.nonzero()[:, 0] + 1).tolist()]) for row in there_BG]
    alone = [verdicts([b], nodes[b])[0] for b in range(count)]
    assert len(set(nodes)) > 1 and len({str(found) for found in alone}) > 8
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2)).tolist()
    for rows in ([*range(count)], order, order[:11]):
        assert verdicts(rows, tokens_BG.shape[1]) == [alone[b] for b in rows]


@pytest.mark.parametrize("name", VERIFICATION_METHODS)
def test_float32_over_a_real_vocabulary(name: str) -> None:
    """What the decoder runs: p = q up to rounding, one-hot, a probability just above 1, disjoint,
    a drafted x with q(x) = 0, no q mass at all. 1e-5 is 84 float32 epsilons."""
    verification, V, g = VERIFICATION_METHODS[name], 4000, torch.Generator().manual_seed(1)
    shape = SHAPES["binary"] if verification.trees else [-1, 0, 1, 2, 3, 4]
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
        for x in law(verification, Proposal(tokens_BG, q, parents_BG), p_BMV):
            assert x.isfinite().all() and (x >= 0).all()
            assert torch.allclose(x.sum(-1), torch.ones(()), atol=1e-5)
        verdict = verify(
            verification, Proposal(tokens_BG, q, parents_BG), lookup(p_BMV), RowDraws(range(7))
        )
        assert verdict.next_B[2] == 7 and ((verdict.next_B >= 0) & (verdict.next_B < V)).all()
        last_B = verdict.path_BK.amax(-1) if verdict.path_BK.shape[1] else torch.full((7,), -1)
        if verification.lossless:
            assert last_B[3] == -1 and verdict.next_B[3] >= V // 2
        if (
            verification.lossless
            and q is not None
            and verification is not VERIFICATION_METHODS["point_mass"]
        ):
            assert last_B[4] == -1 and last_B[5] == -1


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_sampled_responses_are_those_of_a_row_alone(tree: bool) -> None:
    """Whole answers with a draft, of prompts of unequal lengths: alone, together and permuted.
    The rows end at different times."""
    target = make_target()
    shape = Static([[0], [1], [0, 0], [1, 0], [0, 1]]) if tree else Chain(3)
    way = Way(make_drafter("eagle3", target), shape, sampler=Sampler(1.0))
    prompts = [text(i, 3 + (5 * i) % 11)[0].tolist() for i in range(6)]
    seeds = [40 + 3 * i for i in range(6)]
    options: dict[str, Any] = {"max_new_tokens": 12, "eos": (3, 4, 5, 6)}
    alone = [
        generate(target, prompt, way, seed=seed, **options).ids
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    for order in ([0, 1, 2, 3, 4, 5], [4, 2, 5, 0]):
        mixed = [prompts[i] for i in order], [seeds[i] for i in order]
        made = decode(target, mixed[0], way, seeds=mixed[1], **options)
        assert [g.ids for g in made] == [alone[i] for i in order]

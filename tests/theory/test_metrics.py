"""The measures, on examples small enough for paper, and against simulated decoders.

Run alone: python -m pytest tests/theory/test_metrics.py
"""

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.theory.alpha import (
    DistributionPair,
    acceptance,
    expected_tokens,
    overlap,
    repeated_ngrams,
    visits,
)
from specdec.theory.intervals import Interval, ratio_interval, share_interval
from specdec.theory.leviathan import expected_tokens as tokens


def pair_of(p: Tensor, q: Tensor, target_argmax: list[int]) -> DistributionPair:
    argmax = torch.tensor(target_argmax)
    return DistributionPair(p.log(), q.log(), argmax, torch.full_like(argmax, -1))


# --- overlap and acceptance ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q", "beta"),
    [
        ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 0.2 + 0.3 + 0.2),
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], 1.0),
        ([1.0, 0.0, 0.0], [0.0, 0.5, 0.5], 0.0),
        ([0.0, 1.0, 0.0], [0.1, 0.8, 0.1], 0.8),
        ([0.1, 0.2, 0.0], [0.5, 0.5, 0.0], 0.3),  # p lies 0.7 outside: 0.3 is all there is
        ([0.0, 0.0, 0.0], [1.0, 0.0, 0.0], 0.0),
        ([0.5, 0.3, 0.2], [0.0, 0.0, 0.0], 0.0),  # a draft without mass
    ],
)
def test_overlap(p: list[float], q: list[float], beta: float) -> None:
    assert overlap(torch.tensor(p), torch.tensor(q)).item() == pytest.approx(beta)


def test_overlap_is_one_minus_total_variation() -> None:
    torch.manual_seed(0)
    p, q = (torch.randn(50, 9, dtype=torch.float64).softmax(-1) for _ in range(2))
    assert torch.allclose(overlap(p, q), 1 - 0.5 * (p - q).abs().sum(-1), atol=1e-14)
    assert torch.equal(overlap(p.view(5, 10, 9), q.view(5, 10, 9)).view(50), overlap(p, q))


def test_overlap_is_how_often_a_draft_is_accepted() -> None:
    """Σ_x q(x) min(1, p(x)/q(x)), summed over the draft, is what a decoder would count."""
    torch.manual_seed(1)
    p, q = (torch.randn(50, 9, dtype=torch.float64).softmax(-1) for _ in range(2))
    assert torch.allclose(overlap(p, q), (q * (p / q).clamp_max(1)).sum(-1), atol=1e-14)


def test_overlap_over_a_pruned_vocabulary_is_the_full_sum() -> None:
    """q is 0 outside the draft vocabulary; p is cut to it, and never renormalised."""
    torch.manual_seed(2)
    p_full = torch.randn(50, 12, dtype=torch.float64).softmax(-1)
    vocab = torch.tensor([1, 2, 5, 7, 11])
    q = torch.randn(50, 5, dtype=torch.float64).softmax(-1)
    q_full = torch.zeros_like(p_full).index_copy_(1, vocab, q)
    beta = overlap(p_full[:, vocab], q)
    assert torch.allclose(beta, overlap(p_full, q_full), atol=1e-15)
    assert (beta <= p_full[:, vocab].sum(-1) + 1e-15).all()
    p_cut = p_full[:, vocab] / p_full[:, vocab].sum(-1, keepdim=True)
    assert (overlap(p_cut, q) - beta).min() > 0.01  # what renormalising would have claimed


def test_acceptance_on_paper() -> None:
    p = torch.tensor(
        [
            [0.5, 0.3, 0.2],  # argmax p = argmax q
            [0.5, 0.3, 0.2],  # argmax q is another
            [0.1, 0.3, 0.2],  # argmax p, of mass 0.4, is outside the draft vocabulary
            [0.5, 0.3, 0.2],  # q has no mass
            [0.0, 0.0, 1.0],  # one-hot both, apart
            [0.0, 1.0, 0.0],  # one-hot both, the same
        ]
    )
    q = torch.tensor(
        [
            [0.6, 0.4, 0.0],
            [0.1, 0.7, 0.2],
            [0.2, 0.8, 0.0],
            [0.0, 0.0, 0.0],
            [1.0, 0.0, 0.0],
            [0.0, 1.0, 0.0],
        ]
    )
    sampled, greedy_draft, greedy = acceptance(pair_of(p, q, [0, 0, -1, 0, 2, 1]))
    assert sampled.tolist() == pytest.approx([0.8, 0.6, 0.4, 0, 0, 1])
    assert greedy_draft.tolist() == pytest.approx([0.5, 0.3, 0.3, 0, 0, 1])
    assert greedy.tolist() == [1, 0, 0, 0, 0, 1]
    assert all(x.dtype == torch.float32 and x.shape == (6,) for x in (sampled, greedy_draft))
    assert greedy.dtype == torch.float32


def test_rows_without_mass_accept_nothing() -> None:
    """argmax of a row of -inf is token 0: not even a target whose argmax is 0 accepts it."""
    p = torch.tensor([[1.0, 0.0], [0.9, 0.1]])
    for variant in acceptance(pair_of(p, torch.zeros(2, 2), [0, 0])):
        assert variant.tolist() == [0, 0]


def test_acceptance_of_a_target_that_cannot_be_met() -> None:
    """All of p outside the draft vocabulary; the marker -1 equals no token."""
    for variant in acceptance(pair_of(torch.zeros(1, 3), torch.tensor([[0.2, 0.3, 0.5]]), [-1])):
        assert variant.tolist() == [0]


def test_acceptance_does_not_renormalise() -> None:
    """The same q; the draft's part of p halved: two of the variants halve, greedy stays."""
    torch.manual_seed(3)
    p = torch.rand(20, 6).softmax(-1) / 8  # far below q, so that min(p, q) = p
    q = torch.full((20, 6), 1 / 6)
    one = acceptance(pair_of(p, q, [0] * 20))
    half = acceptance(pair_of(p / 2, q, [0] * 20))
    assert torch.allclose(one.sampled, torch.full((20,), 1 / 8))
    assert torch.allclose(half.sampled, one.sampled / 2)
    assert torch.allclose(half.greedy_draft, one.greedy_draft / 2)
    assert torch.equal(half.greedy, one.greedy)


def test_acceptance_carries_no_gradient() -> None:
    z = torch.randn(4, 5, requires_grad=True)
    pair = DistributionPair(
        torch.rand(4, 5).log_softmax(-1), z.log_softmax(-1), *torch.zeros(2, 4).long()
    )
    assert pair.beta.requires_grad
    assert not any(x.requires_grad for x in acceptance(pair))


def test_acceptance_leaves_the_pair_its_gradient() -> None:
    """Whichever comes first, the measure or the loss."""
    z = torch.randn(4, 5, requires_grad=True)
    pair = DistributionPair(
        torch.rand(4, 5).log_softmax(-1), z.log_softmax(-1), *torch.zeros(2, 4).long()
    )
    acceptance(pair)
    assert pair.beta.requires_grad and pair.q.requires_grad


def test_a_draft_that_is_the_target() -> None:
    torch.manual_seed(4)
    p = torch.randn(30, 8).softmax(-1)
    sampled, greedy_draft, greedy = acceptance(pair_of(p, p, p.argmax(-1).tolist()))
    assert torch.allclose(sampled, torch.ones(30), atol=1e-6)
    assert torch.allclose(greedy_draft, p.max(-1).values)
    assert greedy.tolist() == [1] * 30


# --- tokens per target pass ------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.75, 0.999, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 2, 7, 16])
def test_iid_tokens_is_the_geometric_sum(alpha: float, gamma: int) -> None:
    assert tokens(alpha, gamma) == pytest.approx(sum(alpha**k for k in range(gamma + 1)))


def test_expected_tokens_on_paper() -> None:
    alpha = torch.tensor([[0.5, 0.5, 0.5], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.9, 0.0, 1.0]])
    assert expected_tokens(alpha).tolist() == pytest.approx([1.875, 4.0, 1.0, 1.9])
    assert expected_tokens(torch.zeros(2, 0)).tolist() == [1, 1]  # nothing drafted


def test_expected_tokens_at_one_alpha_is_tokens() -> None:
    for alpha in (0.0, 0.3, 1.0):
        got = expected_tokens(torch.full((1, 5), alpha, dtype=torch.float64)).item()
        assert got == pytest.approx(tokens(alpha, 5))


def test_expected_tokens_is_the_mean_of_simulated_steps() -> None:
    """100,000 speculation steps; a length between 1 and 5 has a standard error below 2/√100,000 =
    0.0063, and 0.025 is four of them."""
    alpha = torch.tensor([0.9, 0.6, 0.8, 0.3], dtype=torch.float64)
    coins = torch.rand(100_000, 4, generator=torch.Generator().manual_seed(5)) < alpha
    simulated = 1 + coins.long().cumprod(-1).sum(-1).double().mean().item()
    assert abs(expected_tokens(alpha[None]).item() - simulated) < 0.025


# --- intervals -------------------------------------------------------------------------------


def test_ratio_is_pooled() -> None:
    """3 + 10 tokens in 1 + 9 passes: 1.3, where the mean of 3 and 10/9 would say 2.06. Two prompts
    have no interval."""
    interval = ratio_interval([3, 10], [1, 9])
    assert interval.value == interval.low == interval.high == pytest.approx(1.3)
    assert interval.n == 10 and not interval.claims


def test_interval_of_equal_prompts_is_a_point() -> None:
    interval = ratio_interval([2, 4, 6], [1, 2, 3])
    assert (interval.value, interval.low, interval.high, interval.n) == (2, 2, 2, 6)
    one = ratio_interval([3], [2])
    assert (one.value, one.low, one.high, one.n) == (1.5, 1.5, 1.5, 2)


def test_interval_covers_the_truth() -> None:
    """1,000 experiments of 40 prompts of 1 to 40 positions, whose own α's differ (Beta(4, 4)): the
    true pooled α is 1/2. A share of .95 has a standard error of .007, and the bounds are four of
    them away. An interval over positions, as if they were independent, covers far less."""
    rng = np.random.default_rng(7)
    covered = naive = 0
    for _ in range(1000):
        den = rng.integers(1, 41, 40)
        num = rng.binomial(den, rng.beta(4, 4, 40))
        interval = share_interval(num.tolist(), den.tolist())
        covered += interval.low <= 0.5 <= interval.high
        p = num.sum() / den.sum()
        naive += abs(p - 0.5) <= 1.96 * math.sqrt(p * (1 - p) / den.sum())
    assert 0.922 < covered / 1000 < 0.978
    assert naive / 1000 < 0.8


@pytest.mark.parametrize("n", [0, 1, 3])
def test_nothing_to_divide_by(n: int) -> None:
    assert ratio_interval([0.0] * n, [0.0] * n) == Interval(0.0, 0.0, 0.0, 0)


def test_prompts_without_positions() -> None:
    """They change neither the value nor n."""
    interval = ratio_interval([0, 1, 0, 0], [0, 2, 0, 0])
    assert (interval.value, interval.low, interval.high, interval.n) == (0.5, 0.5, 0.5, 2)


def test_prompts_without_positions_count_for_nothing() -> None:
    num, den = [3, 1, 7, 4, 2, 9], [9, 2, 8, 6, 7, 10]
    assert ratio_interval([*num, 0, 0, 0], [*den, 0, 0, 0]) == ratio_interval(num, den)


def test_interval_as_text() -> None:
    assert str(Interval(0.41234, 0.4, 0.42996, 7)) == "0.412 [0.400, 0.430]"


# --- visits ----------------------------------------------------------------------------------


def walk(alpha_TK: Tensor, coin: random.Random) -> list[int]:
    """The anchors at which a decoder starts its speculation steps."""
    t, anchors = 0, []
    while t < len(alpha_TK):
        anchors.append(t)
        n = 0
        while n < alpha_TK.shape[1] and coin.random() < alpha_TK[t, n]:
            n += 1
        t += n + 1  # the accepted tokens, and the target's own
    return anchors


def test_visits_on_paper() -> None:
    """α .5 then .4: a speculation step emits 1, 2 or 3 tokens with probability .5, .3 and .2."""
    alpha = torch.tensor([[0.5, 0.4]]).expand(4, 2)
    wanted = [1, 0.5, 0.5 * 0.5 + 0.3, 0.55 * 0.5 + 0.5 * 0.3 + 0.2]
    assert visits(alpha).tolist() == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("K", [1, 2, 5])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_greedy_visits_are_the_walk_of_a_greedy_decoder(K: int, share: float) -> None:
    """0 or 1 at every anchor and depth, with agreement after a miss, which counts for nothing."""
    generator = torch.Generator().manual_seed(8)
    for T in (1, 2, 7, 60):
        alpha = (torch.rand(T, K, generator=generator) < share).float()
        wanted = torch.zeros(T, dtype=torch.float64)
        wanted[walk(alpha, random.Random(0))] = 1
        assert torch.equal(visits(alpha), wanted)


def test_visits_conserve_probability() -> None:
    """Each token is emitted by one speculation step: over the steps at or before t, the probability
    of starting there and reaching past t sums to 1. A step at s reaches past t if it accepts at
    least t - s tokens, with probability Π_{j < t-s} α_{s,j}, and none if t - s > K."""
    for K in (1, 3, 6):
        torch.manual_seed(K)
        alpha = torch.rand(50, K, dtype=torch.float64)
        visit = visits(alpha)
        for t in range(50):
            total = sum(
                float(visit[s] * alpha[s, : t - s].prod()) for s in range(max(0, t - K), t + 1)
            )
            assert total == pytest.approx(1, abs=1e-12)


def test_visits_are_the_mean_of_simulated_walks() -> None:
    """4,000 walks: a share's standard error is at most √(.25/4,000) = 0.0079; 0.032 is four."""
    torch.manual_seed(9)
    alpha, coin = torch.rand(12, 3), random.Random(9)
    counts = torch.zeros(12, dtype=torch.float64)
    rows = alpha.double()
    for _ in range(4000):
        counts[walk(rows, coin)] += 1
    assert (visits(alpha) - counts / 4000).abs().max() < 0.032


def test_visits_at_one_alpha_come_once_in_expected_tokens() -> None:
    """Renewal theorem: far from the start an anchor is visited once in E[tokens] anchors."""
    alpha = torch.full((400, 4), 0.6, dtype=torch.float64)
    assert visits(alpha)[-1].item() == pytest.approx(1 / tokens(0.6, 4), abs=1e-9)


def test_visits_without_anchors_or_depths() -> None:
    assert visits(torch.zeros(0, 3)).shape == (0,)
    assert visits(torch.zeros(5, 0)).tolist() == [1] * 5  # vanilla decoding


# --- repetition ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "n", "counts"),
    [
        ([1, 2, 3, 4, 5, 6], 4, (0, 3)),
        ([1, 1, 1, 1, 1, 1, 1, 1], 4, (4, 5)),  # 5 grams, all the same
        ([1, 2, 1, 2, 1, 2], 2, (3, 5)),  # 12 21 12 21 12
        ([1, 2, 3, 4], 4, (0, 1)),
        ([1, 2, 3], 4, (0, 0)),  # shorter than n
        ([], 4, (0, 0)),
        ([7, 7], 1, (1, 2)),
    ],
)
def test_repeated_ngrams(ids: list[int], n: int, counts: tuple[int, int]) -> None:
    assert repeated_ngrams(ids, n) == counts


def test_repeated_ngrams_are_four_grams_by_default() -> None:
    assert repeated_ngrams([1, 2, 3, 4, 9, 1, 2, 3, 4]) == (1, 6)

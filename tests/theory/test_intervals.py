"""Intervals: of a paired difference, of a product of ratios and of a median; those of ratios are in
test_metrics.py.

Run alone: python -m pytest tests/theory/test_intervals.py
"""

import math

import numpy as np
import pytest

from specdec.theory import intervals
from specdec.theory.intervals import (
    Interval,
    difference_interval,
    median_interval,
    paired_difference,
    paired_products,
    paired_quotient,
    product_interval,
    ratio_interval,
    share_interval,
)


def test_the_median_of_thousands_of_timings_has_an_interval() -> None:
    """Of 1 to 2,000: order statistics about 1.96 √n / 2 = 44 places from the middle."""
    found = median_interval([float(x) for x in range(1, 2001)])
    assert found.low == pytest.approx(1000.5 - 44, abs=2)
    assert found.high == pytest.approx(1000.5 + 44, abs=2)


def test_a_difference_is_paired() -> None:
    """Prompts differ widely, but ours is .1 above theirs on each: the difference has no width,
    where two separate intervals would overlap. 3/10 + 8/10 over 2, less 2/10 + 7/10 over 2."""
    ours, theirs = ([3.0, 8.0, 5.0], [10.0] * 3), ([2.0, 7.0, 4.0], [10.0] * 3)
    found = difference_interval(ours, theirs)
    assert found.value == pytest.approx(0.1) and found.n == 3
    assert found.low == pytest.approx(0.1) == pytest.approx(found.high)
    back = difference_interval(theirs, ours)
    assert back.value == pytest.approx(-0.1)


def test_prompts_that_one_side_lacks_are_left_out() -> None:
    found = difference_interval(([1.0, 9.0], [2.0, 0.0]), ([1.0, 9.0], [4.0, 9.0]))
    assert (found.value, found.n) == (0.25, 1)
    assert difference_interval(([1.0], [0.0]), ([1.0], [1.0])) == Interval(0.0, 0.0, 0.0, 0)


def test_paired_figures_by_hand() -> None:
    """8/4 tokens a step less 9/6, of the same prompts; over it, 4/3."""
    ours, theirs = ([3.0, 5.0, 0.0], [1.0, 3.0, 0.0]), ([4.0, 5.0, 9.0], [3.0, 3.0, 9.0])
    assert paired_products([[ours]], [[theirs]]) == (2.0, 1.5)  # the third prompt has no steps
    both = paired_difference([[ours]], [[theirs]]), paired_quotient([[ours]], [[theirs]])
    assert [(x.value, x.n) for x in both] == [(0.5, 2), (pytest.approx(4 / 3), 2)]
    assert not any(x.claims for x in both)  # of two prompts


def test_paired_influences_by_hand() -> None:
    """Of four prompts with one step each, 0 1 1 2 more tokens than 2 2 2 2 are accepted. The
    influences of the difference are -1 0 0 1 and the leverages 1/4, so s² = 2 (4/3)² / 16 = 2/9,
    with 3 degrees of freedom and no skew. On the logarithm of the quotient they are those of ours
    over its mean of 3."""
    ours, theirs = ([2.0, 3.0, 3.0, 4.0], [1.0] * 4), ([2.0] * 4, [1.0] * 4)
    reach = 3.1824 * (2 / 9) ** 0.5
    more = paired_difference([[ours]], [[theirs]])
    assert (more.value, more.low, more.high) == pytest.approx((1, 1 - reach, 1 + reach), abs=1e-3)
    over = paired_quotient([[ours]], [[theirs]])
    bounds = [1.5 * math.exp(-reach / 3), 1.5 * math.exp(reach / 3)]
    assert [over.value, over.low, over.high] == pytest.approx([1.5, *bounds], abs=1e-3)


def test_a_paired_quotient_of_products_has_what_both_share_taken_out() -> None:
    """Both have the same plain seconds: those of a slow batch do not widen the quotient."""
    plain, steps = [1.0, 9.0, 3.0, 2.0], [2.0, 18.0, 6.0, 4.0]
    ours = [[(plain, [x / 2 for x in plain])]]
    theirs = [[(plain, steps)]]
    over = paired_quotient(ours, theirs)
    assert over.value == pytest.approx(4.0) and not over.claims
    counts = ([4.0, 6.0, 5.0], [2.0, 2.0, 2.0])
    again = paired_quotient([[counts], *ours], [[counts], *theirs])
    assert again.value == pytest.approx(4.0) and not again.claims


def test_a_side_of_zero_has_no_quotient() -> None:
    none, some = ([0.0] * 4, [3.0] * 4), ([1.0, 2.0, 0.0, 1.0], [3.0] * 4)
    assert paired_quotient([[none]], [[some]]) == Interval(0.0, 0.0, 0.0, 4)
    assert paired_quotient([[some]], [[none]]) == Interval(0.0, 0.0, 0.0, 4)
    zeros = paired_quotient([[some]], [[some]])  # a prompt without acceptance still counts
    assert (zeros.value, zeros.n) == (1.0, 4)


@pytest.mark.parametrize("n", [12, 40])
def test_paired_intervals_hold_the_truth_as_often_as_they_say(n: int) -> None:
    """Prompts differ in length and in difficulty for both drafts, B accepts .06 more. Of 600
    experiments, 95 % hold the truth; .92 is more than three standard errors below."""
    random = np.random.default_rng(n)
    held = np.zeros(2)
    for _ in range(600):
        steps = random.integers(10, 80, n)
        easy = random.beta(4, 6, n)
        a, b = (random.binomial(steps, np.clip(easy + more, 0, 1)) / 1.0 for more in (0, 0.06))
        sides = [[(b, steps)]], [[(a, steps)]]
        # lengths do not depend on difficulty, so the truth is that of the means
        mean = 0.4
        for i, (interval, truth) in enumerate(
            [(paired_difference(*sides), 0.06), (paired_quotient(*sides), (mean + 0.06) / mean)]
        ):
            held[i] += interval.low <= truth <= interval.high
    assert (held / 600 > 0.92).all() and (held / 600 < 0.99).all(), held / 600


def test_a_product_of_ratios_by_hand() -> None:
    """15/6 tokens a speculation step over 3 prompts; 6/3 s a token and 3/9 steps a second over 3
    others."""
    kept = [6.0, 4.0, 5.0], [2.0, 2.0, 2.0]
    step, speculation_steps = ([2.0, 1.0, 3.0], [1.0] * 3), ([1.0] * 3, [4.0, 2.0, 3.0])
    found = product_interval([kept], [step, speculation_steps])
    assert found.value == pytest.approx(15 / 6 * 6 / 3 * 3 / 9) and found.n == 3
    assert found.low < found.value < found.high
    alone, ratio = product_interval([kept]), ratio_interval(*kept)
    assert (alone.low, alone.high) == pytest.approx((ratio.low, ratio.high))
    same = product_interval([([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])], [([3.0] * 5, [1.0] * 5)])
    assert same == Interval(6.0, 6.0, 6.0, 3)


def test_the_ratios_of_a_group_vary_together() -> None:
    """Seconds a token times tokens a second are 1 if they are of the same observations; as two
    groups they vary apart."""
    slow, fast = ([1.0, 4.0, 9.0], [1.0, 1.0, 1.0]), ([1.0, 1.0, 1.0], [1.0, 4.0, 9.0])
    together, apart = product_interval([slow, fast]), product_interval([slow], [fast])
    assert together.value == apart.value == pytest.approx(1.0)
    assert together.low == together.high and not together.claims
    assert apart.low < 0.5 < 2 < apart.high


def test_observations_of_a_product_without_a_denominator_are_left_out() -> None:
    found = product_interval([([1.0, 9.0], [2.0, 0.0])], [([1.0, 9.0], [4.0, 9.0])])
    assert found.value == pytest.approx(0.5 * 10 / 13) and found.n == 1
    both = product_interval([([1.0, 9.0], [2.0, 0.0]), ([1.0, 9.0], [4.0, 9.0])])
    assert (both.value, both.n) == (0.125, 1)
    assert product_interval([([1.0], [0.0])], [([1.0], [1.0])]) == Interval(0.0, 0.0, 0.0, 0)


def test_medians_are_of_turns() -> None:
    """Medians 3 and 2; one stray turn does not move them."""
    assert median_interval([1.0, 3.0, 100.0]).value == 3.0
    assert median_interval([1.0, 3.0, 100.0], [2.0, 2.0, 2.0]).value == 1.5
    steady = median_interval([4.0] * 5, [2.0] * 5)
    assert steady == Interval(2.0, 2.0, 2.0, 5) and steady.text() == "2.000"


def test_an_interval_by_hand() -> None:
    """Values 1, 2, 3 over 1 each: R = 2 and Σe/(1 - h) on the logarithm are ∓(1/2)/(2/3) = ∓3/4, so
    s² = 2 · (3/4)² / 9 = 1/8; no skew, and t is 4.3027 with 1/(3/9) - 1 = 2 degrees of freedom."""
    found = ratio_interval([1.0, 2.0, 3.0], [1.0] * 3)
    reach = 4.302653 * math.sqrt(1 / 8)
    assert (found.low, found.high) == pytest.approx(
        (2 * math.exp(-reach), 2 * math.exp(reach)), rel=1e-5
    )


def test_student_s_quantiles() -> None:
    """From tables; between whole numbers too (3.5: R's qt)."""
    table = {1: 12.70620, 2: 4.302653, 3.5: 2.940088, 10: 2.228139, 100: 1.983972}
    for freedom, quantile in table.items():
        assert intervals._student(freedom) == pytest.approx(quantile, rel=2e-6)


def test_a_skewed_side_is_longer_and_a_bound_holds() -> None:
    skewed = ratio_interval([1.0] * 9 + [6.0], [1.0] * 10)
    even = ratio_interval([0.5, 2.5] * 5, [1.0] * 10)
    assert skewed.value == even.value == 1.5
    assert skewed.high / 1.5 > 1.2 * (1.5 / skewed.low)
    assert even.high / 1.5 == pytest.approx(1.5 / even.low)
    assert skewed.within(1, 3).high == 3 and skewed.within(1, 3).low >= 1


def test_shards_stay_between_0_and_1() -> None:
    found = share_interval([10.0, 9.0, 9.0], [10.0] * 3)
    assert 0 < found.low < 28 / 30 < found.high < 1
    for none in ([0.0] * 3, [10.0] * 3):
        assert not share_interval(none, [10.0] * 3).claims


def test_too_few_observations_claim_nothing() -> None:
    """A percentile bootstrap of two prompts held the truth in half of all cases."""
    for n in (1, 2):
        assert not ratio_interval([1.0, 5.0][:n], [1.0, 2.0][:n]).claims
        assert not share_interval([1.0, 5.0][:n], [4.0, 6.0][:n]).claims
        difference = difference_interval(([1.0, 3.0][:n], [2.0] * n), ([1.0] * n, [2.0] * n))
        assert not difference.claims
    many = ([float(x) for x in range(1, 9)], [2.0] * 8)
    assert not product_interval([many], [([1.0, 2.0], [1.0, 1.0])]).claims
    assert not median_interval([1.0, 2.0, 3.0, 4.0, 5.0]).claims


def test_the_interval_of_a_median_is_of_order_statistics() -> None:
    """6 timings: the least and the largest (96.9 %). 20: the 6th and the 15th (95.9 %; the 7th and
    14th would have 88.5 %)."""
    six = median_interval([4.0, 1.0, 2.0, 8.0, 3.0, 3.0])
    assert (six.low, six.value, six.high) == pytest.approx((1, 3, 8))
    twenty = median_interval([float(x) for x in range(1, 21)])
    assert (twenty.low, twenty.value, twenty.high) == pytest.approx((6, 10.5, 15))
    ratio = median_interval([float(x) for x in range(1, 21)], [2.0] * 20)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((3, 5.25, 7.5))


@pytest.mark.parametrize("n", [3, 5, 12])
def test_a_speedup_of_1_seldom_gains_at_small_n(n: int) -> None:
    """Timed batches whose lengths and speeds vary, with a true speedup of 1: a percentile bootstrap
    said "gains" in 12 % of cases at n = 3. 2.5 % of 1,500 has a standard error of .4 %."""
    rng = np.random.default_rng(n)
    gains = held = 0
    for _ in range(1500):
        tokens = np.exp(rng.normal(4, 0.8, n))
        plain, drafted = tokens * np.exp(rng.normal(0, 0.1, (2, n)))
        found = ratio_interval(plain.tolist(), drafted.tolist())
        gains += found.low > 1
        held += found.low <= 1 <= found.high
    assert gains / 1500 < 0.041 and held / 1500 > 0.93

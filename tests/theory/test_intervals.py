"""Intervals: of a paired difference, of a product of ratios and of a median; those of ratios are in
test_metrics.py.

Run alone: python -m pytest tests/theory/test_intervals.py
"""

import pytest

from specdec.theory.intervals import (
    Interval,
    difference_interval,
    median_interval,
    product_interval,
    ratio_interval,
)


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


def test_a_product_of_ratios_by_hand() -> None:
    """10/4 tokens a round over 2 prompts; 3/2 s a token and 2/6 rounds a second over 2 others."""
    kept = [6.0, 4.0], [2.0, 2.0]
    step, rounds = ([2.0, 1.0], [1.0, 1.0]), ([1.0, 1.0], [4.0, 2.0])
    found = product_interval([kept], [step, rounds])
    assert found.value == pytest.approx(10 / 4 * 3 / 2 * 2 / 6) and found.n == 2
    assert found.low < found.value < found.high
    assert product_interval([kept]).value == ratio_interval(*kept).value
    same = product_interval([([2.0, 4.0], [1.0, 2.0])], [([3.0] * 5, [1.0] * 5)])
    assert same == Interval(6.0, 6.0, 6.0, 2)


def test_the_ratios_of_a_group_are_resampled_together() -> None:
    """Seconds a token times tokens a second are 1 if they are of the same observations, whichever
    are drawn; as two groups they are drawn apart."""
    slow, fast = ([1.0, 4.0, 9.0], [1.0, 1.0, 1.0]), ([1.0, 1.0, 1.0], [1.0, 4.0, 9.0])
    together, apart = product_interval([slow, fast]), product_interval([slow], [fast])
    assert together.value == apart.value == pytest.approx(1.0)
    assert together.low == pytest.approx(1.0) == pytest.approx(together.high)
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

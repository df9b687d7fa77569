"""Intervals: of a paired difference and of a median; those of ratios are in test_metrics.py.

Run alone: python -m pytest tests/theory/test_intervals.py
"""

import pytest

from specdec.theory.intervals import Interval, difference_interval, median_interval


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


def test_medians_are_of_turns() -> None:
    """Medians 3 and 2; one stray turn does not move them."""
    assert median_interval([1.0, 3.0, 100.0]).value == 3.0
    assert median_interval([1.0, 3.0, 100.0], [2.0, 2.0, 2.0]).value == 1.5
    steady = median_interval([4.0] * 5, [2.0] * 5)
    assert steady == Interval(2.0, 2.0, 2.0, 5) and steady.text() == "2.000"

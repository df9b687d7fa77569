"""Curves of the report's pictures.

Run alone: python -m pytest tests/report/test_plots.py
"""

import pytest

from specdec.report.plots import smoothed


def test_a_smoothed_curve_neither_lags_nor_leans_to_its_first_value() -> None:
    falling = [10 - i / 10 for i in range(90)]
    assert smoothed(falling) == pytest.approx(falling)
    # windows of 7 values, but of 1, 3 and 5 at the ends
    assert smoothed([8, *[1.0] * 89])[:5] == pytest.approx([8, (8 + 2) / 3, (8 + 4) / 5, 2, 1])
    assert smoothed([3.0]) == [3] and smoothed([]) == []

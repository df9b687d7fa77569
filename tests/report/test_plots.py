"""Curves of the report's pictures.

Run alone: python -m pytest tests/report/test_plots.py
"""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.measure.results import Curve
from specdec.report import plots
from specdec.report.plots import smoothed


def test_a_smoothed_curve_neither_lags_nor_leans_to_its_first_value() -> None:
    falling = [10 - i / 10 for i in range(90)]
    assert smoothed(falling) == pytest.approx(falling)
    # windows of 7 values, but of 1, 3 and 5 at the ends
    assert smoothed([8, *[1.0] * 89])[:5] == pytest.approx([8, (8 + 2) / 3, (8 + 4) / 5, 2, 1])
    assert smoothed([3.0]) == [3] and smoothed([]) == []


@pytest.mark.parametrize("trained", [True, False], ids=["with the target", "text alone"])
def test_held_out_steps_outside_the_logged_ones_are_shown(
    trained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both plots have the same steps, and room for each point."""
    drawn: list[Axes] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.extend(figure.axes))
    sampled = [[0.2, 0.1] if trained else []] * 2
    curve = Curve([100, 200], [2.0, 1.0], sampled, [20, 260], [[0.3, 0.2], [0.6, 0.5]])
    plots.training(tmp_path / "training.png", curve)
    loss, alpha = drawn
    assert loss.get_xlim() == alpha.get_xlim()
    low, high = alpha.get_xlim()
    assert low < 20 and high > 260 and alpha.get_ylim()[1] > 0.6
    dots = [line for line in alpha.lines if line.get_marker() == "o"]
    assert [[*line.get_ydata()] for line in dots] == [[0.3, 0.6], [0.2, 0.5]]  # type: ignore[misc]

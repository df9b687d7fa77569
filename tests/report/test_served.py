"""The page of a draft that was measured in an engine, beside the report of its run.

Run alone: python -m pytest tests/report/test_served.py
"""

from dataclasses import replace
from pathlib import Path

import pytest

from specdec.errors import UserError
from specdec.measure.results import FILE
from specdec.measure.served import Served, ServedAt
from specdec.report import served_page
from specdec.theory.intervals import Interval
from tests.report.test_verdict import GAIN, at, hybrid, of, tree


def exactly(value: float) -> Interval:
    return Interval(value, value, value, 10)


def engine(tau: Interval, positions: int, temperature: float = 0.0) -> Served:
    shares = [exactly(0.5)] * positions
    figures = ServedAt(temperature, 30, tau, shares, exactly(40.0))
    return Served(
        "runs/a<b>/best", "vLLM 1 at http://x", None, 8, "held-out prompts", 48, [figures]
    )


def test_the_runs_own_figures_stand_below_the_engines(tmp_path: Path) -> None:
    ours = at(GAIN)
    report = of(tree(GAIN), ours, hybrid(GAIN))
    report.write(tmp_path)
    near = engine(Interval(ours.tau.low, ours.tau.low - 1, ours.tau.low, 8), ours.way.gamma)
    shown = served_page.write_served_page(tmp_path, near, tmp_path)
    rows = [line for line in shown.splitlines() if line.startswith("| T = 0")]
    assert [row.split(" | ")[0] for row in rows] == ["| T = 0", "| T = 0, the run's report"]
    assert f"| {ours.tau.text(2)} |" in rows[1] and f"| {ours.speculation_steps:,} |" in rows[1]
    assert "At T = 0 the two intervals of τ overlap." in shown
    beyond = ours.tau.high + 1
    far = engine(Interval(beyond, beyond - 0.1, beyond + 0.1, 8), ours.way.gamma)
    assert "do not overlap" in served_page.served_page_text(far, report)
    few = engine(exactly(beyond), ours.way.gamma)
    assert "too few prompts to compare" in served_page.served_page_text(few, report)
    deeper = engine(exactly(ours.tau.value), ours.way.gamma + 1)
    assert "compare the positions, not τ" in served_page.served_page_text(deeper, report)
    hotter = engine(exactly(ours.tau.value), ours.way.gamma, 0.7)
    assert "the run's report" not in served_page.served_page_text(hotter, report)
    assert "the run's report" not in served_page.served_page_text(near, of(tree(GAIN)))
    assert (tmp_path / "served.html").read_text().count("&lt;b&gt;") == 2  # in title and heading


def test_a_run_without_a_report_has_a_page_and_a_damaged_report_is_told(tmp_path: Path) -> None:
    near = engine(exactly(1.4), 2)
    assert "the run's report" not in served_page.write_served_page(
        tmp_path, near, tmp_path / "none"
    )
    (tmp_path / FILE).write_text("{")
    with pytest.raises(UserError, match="evaluate the draft again"):
        served_page.write_served_page(tmp_path, replace(near, prompts=9), tmp_path)

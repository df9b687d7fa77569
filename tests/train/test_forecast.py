"""The forecast of τ at the end of training, and the evaluations that are made for it.

Run alone: python -m pytest tests/train/test_forecast.py
"""

import math
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from specdec.files import read_json
from tests.runs import require_same_run
from tests.tiny import Tiny, records
from train.held_out import FEWEST, SHARES, forecast, looks
from train.tracking import Figures, Tracker

pytestmark = pytest.mark.usefixtures("one_thread")
RECORDED = read_json(Path(__file__).with_name("recorded_curves.json"))


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: run["name"])
def test_at_a_fifth_of_recorded_runs_it_is_near_their_end(run: dict[str, Any]) -> None:
    """With the evaluations at a tenth and a fifth alone, and with all of those so far."""
    steps, end = run["steps"], run["held_out"][-1][1]
    early = [(step, tau) for step, tau in run["held_out"] if step <= 0.2 * steps + 5]
    nearest = [min(early, key=lambda x: abs(x[0] - share * steps)) for share in SHARES]
    for points in (early, nearest):
        assert forecast(points, steps) == pytest.approx(end, abs=0.05)
    assert forecast(run["held_out"][:-1], steps) == pytest.approx(end, abs=0.03)


@pytest.mark.parametrize("slope", [0.08, 0.13, 0.18])
def test_a_curve_in_the_logarithm_of_the_step_is_continued(slope: float) -> None:
    points = [(s, 2 + 0.8 * (1 + slope * math.log(s / 1000)) - 1) for s in (100, 150, 200, 300)]
    assert forecast(points, 1000) == pytest.approx(1.8, abs=0.06)
    flat = forecast([(s, 1.5) for s in (100, 400, 700, 1000)], 1000)
    assert flat == pytest.approx(1.5, abs=0.02)


def test_a_forecast_is_a_tau_of_its_chains() -> None:
    """A chain of one token emits two tokens a pass at most, and one at least."""
    rising, falling = [(100, 1.5), (200, 1.98)], [(100, 1.3), (200, 1.01)]
    free, bound = forecast(rising, 1000), forecast(rising, 1000, 1)
    assert free is not None and free > 2 and bound == 2
    assert forecast(falling, 1000, 1) >= 1  # type: ignore[operator]


def test_there_is_none_before_two_evaluations() -> None:
    assert forecast([], 1000) is None
    assert forecast([(200, 1.3)], 1000) is None
    assert forecast([(10, 1.1), (200, 1.3)], 1000) is None, "the learning rate still rose"


def test_looks_are_taken_only_where_evaluations_are_rare() -> None:
    assert looks(1000, 250) == [100, 200]
    assert looks(225, 250) == [23, 45]
    assert not looks(1000, 100) and not looks(1000, 0) and not looks(FEWEST - 1, 250)


def test_a_run_forecasts_and_goes_on_doing_so_when_it_is_continued(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("loop.epochs=9", "loop.eval_every=100", "loop.save_every=20")  # 54 steps
    shown, update = list[str](), Progress.update

    def noted(self: Progress, *args: Any, **how: Any) -> None:
        shown.append(how.get("description", ""))
        update(self, *args, **how)

    monkeypatch.setattr(Progress, "update", noted)
    tiny.job(tmp_path / "whole", "medusa", *more)
    seen = records(tmp_path / "whole")
    found = {r["step"]: r["forecast"]["tau_greedy"] for r in seen if "forecast" in r}
    points = [(r["step"], r["held_out"]["tau_greedy"]) for r in seen if "held_out" in r]
    assert [step for step, _ in points] == [6, 11, 54]
    assert found == {11: forecast(points[:2], 54), 54: forecast(points, 54)}
    said = f"τ {points[1][1]:.2f} → {found[11]:.2f}"
    assert sum(line.endswith(said) for line in shown) == 54 - 11

    log = Tracker.log

    def interrupted(self: Tracker, step: int, figures: Figures) -> None:
        if step == 30:
            raise KeyboardInterrupt
        log(self, step, figures)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Tracker, "log", interrupted)
        tiny.job(tmp_path / "cut", "medusa", *more)
    shown.clear()
    tiny.job(tmp_path / "cut", "medusa", *more)
    steps = [line for line in shown if line.startswith("training")]
    assert len(steps) == 54 - 20 and all(line.endswith(said) for line in steps)
    require_same_run(tmp_path / "cut", tmp_path / "whole")
    again = [r["forecast"] for r in records(tmp_path / "cut") if "forecast" in r]
    assert again == [r["forecast"] for r in seen if "forecast" in r]

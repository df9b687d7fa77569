"""A tracker of another package: found by name, and shown all that a run logs.

Run alone: python -m pytest tests/train/test_tracking.py
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from specdec.errors import UserError
from specdec.measure.results import Results
from tests.tiny import Tiny
from train.tracked_run import TrackConfig, TrackedRun
from train.tracking import TRACKERS, files_of_trackers, require_tracker


class Notebook(TrackedRun):
    """A tracker in memory."""

    runs: ClassVar[list["Notebook"]] = []

    @classmethod
    def require_login(cls, cfg: TrackConfig) -> None:
        if cfg.entity == "nobody":
            raise UserError("track.entity: nobody has no notebook")

    def __init__(
        self, cfg: TrackConfig, folder: Path, name: str, run_id: str, settings: Mapping[str, Any]
    ) -> None:
        self.title, self.run_id, self.settings = cfg.title or name, run_id, settings
        self.steps: list[int] = []
        self.results: Results | None = None
        self.exit_code: int | None = None
        self.runs.append(self)

    def log(self, step: int, figures: Mapping[str, object]) -> None:
        assert {"train", "held_out"} & {*figures}
        self.steps.append(step)

    def log_results(self, results: Results, pictures: Mapping[str, Path], draft: Path) -> None:
        assert pictures and (draft / "draft.safetensors").exists()
        self.results = results

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> type[Notebook]:
    """The tracker under its name, without a package that brings it."""
    monkeypatch.setattr(Notebook, "runs", [])
    monkeypatch.setitem(TRACKERS, "notebook", Notebook)
    return Notebook


def test_a_run_is_logged_and_continued_in_another_tracker(
    tiny: Tiny, tmp_path: Path, notebook: type[Notebook]
) -> None:
    shown = ("track=wandb", "track.tracker=notebook", "track.mode=offline", "track.title=mine")
    for _ in range(2):  # the second time, the run is finished already
        tiny.job(tmp_path / "run", "medusa", *shown)
    first, second = notebook.runs
    assert first.run_id == second.run_id and first.title == "mine"
    assert first.settings["drafter"]["name"] == "medusa"
    assert {*range(1, 13)} == {*first.steps} and second.steps == []
    assert first.results is not None and first.results.measured
    assert first.exit_code == second.exit_code == 0
    assert {"notebook", "notebook-id", "wandb", "wandb-id"} <= {*files_of_trackers()}


def test_a_tracker_is_checked_before_the_target_is_loaded(
    tiny: Tiny, tmp_path: Path, notebook: type[Notebook]
) -> None:
    absent = ("target.path=nowhere", "track=wandb", "track.mode=online")
    with pytest.raises(UserError, match=r"tracker .notebok. is unknown.*notebook"):
        tiny.job(tmp_path / "run", "medusa", *absent, "track.tracker=notebok")
    with pytest.raises(UserError, match="nobody has no notebook"):
        tiny.job(
            tmp_path / "run", "medusa", *absent, "track.tracker=notebook", "track.entity=nobody"
        )
    require_tracker(TrackConfig(tracker="notebok", mode="disabled"))  # nothing is shown
    assert notebook.runs == []

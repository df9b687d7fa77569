"""A tracker of another package: found by name, and shown all that a run logs. TensorBoard, as
TensorBoard itself reads it.

Run alone: python -m pytest tests/train/test_tracking.py
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from specdec.errors import UserError
from specdec.measure.results import Results
from specdec.report import plots
from tests.measure.test_results import results
from tests.tiny import Tiny
from train.tensorboard_tracking import TensorBoardRun
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


# TensorBoard


def events_in(folder: Path) -> Any:
    """What TensorBoard shows of a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), {"scalars": 0, "tensors": 0, "images": 0})
    return found.Reload()


class Killed(BaseException):
    """Stands for a signal after which nothing is saved."""


def test_tensorboard_shows_each_step_of_a_resumed_run_once(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 5 to 7 come after the checkpoint: they are logged twice and shown once, as the second
    time has them."""
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    shown = ["track=tensorboard", "track.group=ours", "track.tags=[a,b]"]
    shown += ["loop.save_every=4", "decode.prompts=0"]
    log = TensorBoardRun.log

    def logged_until_7(self: TensorBoardRun, step: int, figures: Mapping[str, Any]) -> None:
        if "train" in figures:  # told from what is logged after the restart
            figures = {**figures, "train": {**figures["train"], "loss": [-1.0]}}
        log(self, step, figures)
        if step == 7:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(TensorBoardRun, "log", logged_until_7)
        with pytest.raises(Killed):
            tiny.job(run, "medusa", *shown)
    before = [(e.step, e.value) for e in events_in(run / "tensorboard").Scalars("train/loss/0")]
    assert before == [(step, -1.0) for step in range(1, 8)]  # all on the disk, before a close
    tiny.job(run, "medusa", *shown)
    events = events_in(run / "tensorboard")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {r["step"]: r["train"]["loss"][0] for r in records if "train" in r}
    assert [e.step for e in events.Scalars("train/loss/0")] == [*losses] == [*range(1, 13)]
    kept = {e.step: e.value for e in events.Scalars("train/loss/0")}
    assert all(kept[step] == -1.0 for step in range(1, 5))
    assert [kept[step] for step in range(5, 13)] == pytest.approx([*losses.values()][4:])
    held_out = [r["step"] for r in records if "held_out" in r]
    assert [e.step for e in events.Scalars("held_out/tau_greedy")] == held_out
    (described,) = events.Tensors("run/text_summary")
    words = described.tensor_proto.string_val[0].decode()
    assert "| group | ours |" in words and "| tags | a, b |" in words


@pytest.mark.usefixtures("pictures")
def test_tensorboard_shows_the_last_measurement_beside_the_settings(tmp_path: Path) -> None:
    """A finished run logs its results again: each figure is there once."""
    pytest.importorskip("tensorboard")
    picture = plots.Line([0, 1], [0, 1], plots.BLUE, "line")
    plots.curves(tmp_path / "a.png", [plots.Panel("title", "x", [picture])])
    measured, settings = results(), {"optim": {"lr": 0.002}, "drafter": {"name": "medusa"}}
    for _ in range(2):
        cfg = TrackConfig(tracker="tensorboard")
        shown = TensorBoardRun(cfg, tmp_path, "run", "1a", settings)
        shown.log_results(measured, {"plot": tmp_path / "a.png"}, tmp_path / "best")
        shown.finish(0)
    events = events_in(tmp_path / "tensorboard" / "results")
    for name, figure in measured.headline().items():
        (event,) = events.Scalars(name)
        assert (event.step, event.value) == (924, pytest.approx(figure))
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    content = events.summary_metadata[metadata.SESSION_START_INFO_TAG].plugin_data.content
    given = metadata.parse_session_start_info_plugin_data(content).hparams
    assert given["optim.lr"].number_value == 0.002
    assert given["drafter.name"].string_value == "medusa"
    assert "samples T=0/text_summary" in events.Tags()["tensors"]
    (image,) = events.Images("plot")
    assert image.width > 100


def test_tensorboard_says_what_it_cannot_do_before_the_target_is_loaded(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["target.path=nowhere", "track=tensorboard"]

    def told(*more: str) -> str:
        with pytest.raises(UserError) as error:
            tiny.job(tmp_path / "run", "medusa", *asked, *more)
        return str(error.value)

    monkeypatch.setattr("train.tensorboard_tracking.find_spec", lambda name: object())
    assert "track.mode=online: TensorBoard reads the run" in told("track.mode=online")
    assert "track.entity=us: TensorBoard has no users" in told("track.entity=us")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    monkeypatch.setattr("train.tensorboard_tracking.find_spec", lambda name: sys.modules[name])
    assert 'pip install -e ".[tensorboard]"' in told()


def test_the_curves_of_other_settings_are_deleted(tmp_path: Path) -> None:
    """A run that had not begun has a new id once its settings change."""
    pytest.importorskip("tensorboard")
    for run_id in ("1a", "1a", "2b"):
        shown = TensorBoardRun(TrackConfig(tracker="tensorboard"), tmp_path, "run", run_id, {})
        shown.log(1, {"x": 1.0, "none": None, "words": "no number", "list": [2]})
        shown.finish(0)
        ids = {path.suffix for path in (tmp_path / "tensorboard").iterdir()}
        assert ids == {f".{run_id}"}
    events = events_in(tmp_path / "tensorboard")
    assert sorted(events.Tags()["scalars"]) == ["list/0", "x"]

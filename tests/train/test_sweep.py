"""Sweeps: the line that ends one, how W&B shows its trials, and what Hydra's flags find.

Run alone: python -m pytest tests/train/test_sweep.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import wandb

from specdec.errors import UserError, exit_code_of
from specdec.signals import Terminated
from tests.processes import process
from tests.tiny import Tiny
from tests.told import require_one_line
from train.run_config import CONF, Arguments, composed, folder_of_hydra, register
from train.sweep import SweepTrial, best_of, tracked
from train.tracked_run import TrackConfig
from train.tracking import Tracker

LOW = SweepTrial(Path("sweep/0"), ["optim.lr=0.001", "name=x"], 1.25)
HIGH = SweepTrial(Path("sweep/1"), ["optim.lr=0.01", "name=x"], 1.5)
DIVERGED = SweepTrial(Path("sweep/2"), ["optim.lr=1e30", "name=x"], None)


def test_a_sweep_says_which_trial_was_best() -> None:
    """With the settings that tell it from the others, and where it is."""
    assert best_of([LOW, HIGH, DIVERGED]) == (
        "best of 3 trials (1 diverged): objective 1.5000 with optim.lr=0.01; it is in sweep/1"
    )
    assert best_of([HIGH, LOW]).startswith("best of 2 trials: objective 1.5000 with optim.lr=0.01")


def test_the_first_of_equal_trials_is_best() -> None:
    again = SweepTrial(Path("sweep/9"), LOW.overrides, LOW.objective)
    said = "best of 2 trials: objective 1.2500; it is in sweep/0"
    assert best_of([LOW, again]) == said


def test_a_sweep_of_which_all_trials_diverged_says_so() -> None:
    assert best_of([DIVERGED, DIVERGED]) == "all 2 trials diverged"
    assert best_of([]) == ""


# Weights & Biases


def test_each_trial_of_a_sweep_has_a_name_and_tags_of_its_own() -> None:
    """In the group of the sweep; what the user gives stays."""
    long = "data.path=" + "x" * 80
    one = tracked(TrackConfig(), "quick", 3, ["optim.lr=0.01", long])
    assert (one.title, one.group) == ("quick-3", "quick-sweep")
    assert one.tags == ["optim.lr=0.01", f"{long[:61]}..."] and len(one.tags[1]) == 64
    given = TrackConfig(title="mine", group="ours", tags=["x"])
    assert tracked(given, "quick", 3, ["optim.lr=0.01"]) == given
    with pytest.raises(UserError, match="has 65 characters: W&B takes 1 to 64"):
        TrackConfig(tags=["x" * 65])


class Recorded:
    """A run of W&B that notes how it begins and ends."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.ended: list[int] = []

    def init(self, **given: Any) -> "Recorded":
        self.begun.append(given)
        return self

    def log(self, *_: Any, **__: Any) -> None: ...

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (UserError("a mistake"), 2),
        (OSError("the disk"), 2),
        (RuntimeError("a bug"), 1),
        (KeyboardInterrupt(), 130),
        (Terminated(), 143),
        (SystemExit(3), 3),
    ],
    ids=repr,
)
def test_a_run_of_wandb_ends_with_the_exit_code_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int
) -> None:
    shown = Recorded()
    monkeypatch.setattr(wandb, "init", shown.init)
    try:
        with Tracker(tmp_path) as tracker:
            tracker.begin_run(TrackConfig(group="sweep", tags=["a=1"]), "name", {}, "1a")
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert shown.ended == [code] == [exit_code_of(error)]
    (begun,) = shown.begun
    assert (begun["name"], begun["group"], begun["tags"]) == ("name", "sweep", ["a=1"])


@pytest.mark.usefixtures("training_alone")
def test_a_run_of_wandb_goes_on_with_the_same_settings_only(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while the target answers, when the folder is not yet the run's."""
    shown = Recorded()
    monkeypatch.setattr(wandb, "init", shown.init)
    run, more = tmp_path / "run", [f"responses.root={tmp_path / 'responses'}", "track=wandb"]

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("train.pipeline.documents_of_run", interrupted)
        other = ["data.held_out=0.3"]
        for settings in ([], [], other, [*other, "track.title=other"], ["optim.lr=1e-3"], []):
            with pytest.raises(KeyboardInterrupt):
                tiny.job(run, "medusa", *more, *settings)
    monkeypatch.setattr("train.loop.prepare_learner", interrupted)
    for settings in ([], ["decode.prompts=1"]):  # the latter changes the digest, not the run
        with pytest.raises(KeyboardInterrupt):
            tiny.job(run, "medusa", *more, *settings)
    ids = [begun["id"] for begun in shown.begun]
    same = [ids[n] == ids[n - 1] for n in range(1, 8)]
    assert same == [True, False, True, False, False, True, True]
    assert len({*ids}) == 4


def test_wandb_denies_a_run_before_the_first_response(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an entity that is not the user's; nothing is left behind."""

    def denied(**_: Any) -> None:
        raise wandb.errors.CommError("permission denied: nobody/draftsmith.\nand a trace")

    monkeypatch.setattr(wandb, "init", denied)
    root = tmp_path / "responses"
    more = [f"responses.root={root}", "data.responses=target", "track=wandb", "track.entity=nobody"]
    told = "W&B did not start a run in the project 'draftsmith' of 'nobody' .permission denied"
    with pytest.raises(UserError, match=told) as error:
        tiny.job(tmp_path / "run", "medusa", *more)
    require_one_line(f"error: {error.value}\n", "track.entity", "track.mode=offline")
    assert not any(tmp_path.iterdir())


# A configuration of the user's own


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with an experiment and a primary configuration."""
    register()
    folder = tmp_path / "own=configs"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\nloop:\n  rows: 3\n")
    whole = "defaults:\n  - config\n  - _self_\nname: whole\n"
    (folder / "whole.yaml").write_text(whole)
    return folder


def test_flags_that_name_a_configuration_are_read_as_hydra_reads_them(own: Path) -> None:
    beside = ["--config-dir", str(own)]
    for sweeps in ([], ["-m"]):
        asked = Arguments.parsed([*sweeps, *beside, "experiment=mine", "name=x", "drafter=medusa"])
        kind = "x-sweep" if sweeps else "x"
        assert folder_of_hydra(asked) == (Path("runs") / kind, bool(sweeps))
        assert composed(asked.overrides, asked).loop.rows == 3
    named = Arguments.parsed([f"--config-dir={own}", "--config-name", "whole", "loop.rows=2"])
    assert folder_of_hydra(named) == (Path("runs/whole"), False)
    assert composed(named.overrides, named).name == "whole"
    assert Arguments.parsed(["--config-path", str(CONF)]).folder == CONF
    assert folder_of_hydra(Arguments.parsed(["search=lr"]))[1]  # its file says so
    for page in (["--help"], ["--cfg", "job"], ["--info", "defaults"], ["--hydra-help"]):
        assert not Arguments.parsed(page).runs
    with pytest.raises(UserError, match="there is no such folder"):
        folder_of_hydra(Arguments.parsed(["--config-dir", str(own / "none")]))
    with pytest.raises(UserError, match="experiment=other is unknown"):
        folder_of_hydra(Arguments.parsed([*beside, "experiment=other"]))


@pytest.mark.slow
def test_a_sweep_with_a_folder_of_configurations(tiny: Tiny, tmp_path: Path, own: Path) -> None:
    """Each trial is a run of W&B of its own. A rejected trial leaves no folder."""
    sweep = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    given = [x for x in tiny.overrides("medusa", "decode.prompts=0") if "rows" not in x]
    flags = ["-m", "--config-dir", str(own), "experiment=mine", sweep]
    done = process(["train.py", *flags, *given, "optim.lr=0.001,0.01"])
    assert done.returncode == 0, done.stderr[-2000:]
    for trial in ("0", "1"):
        found = json.loads((tmp_path / "sweep" / trial / "config.json").read_text())
        assert found["loop"]["rows"] == 3
        track = found["track"]
        lr = ("0.001", "0.01")[int(trial)]
        assert track["title"] == f"medusa-{trial}" and track["tags"] == [f"optim.lr={lr}"]
    again = tmp_path / "again"
    done = process(["train.py", "-m", f"hydra.sweep.dir={again}", *given, "data.max_length=128,5"])
    assert done.returncode == 2
    assert [path.name for path in again.iterdir() if path.is_dir()] == ["0"]


@pytest.mark.slow
def test_a_rejected_run_with_flags_leaves_no_folder(tiny: Tiny, tmp_path: Path, own: Path) -> None:
    script, *given = tiny.command(tmp_path / "run", "medusa", "data.path=/no/such/file")
    for flags in (["--config-dir", str(own)], ["--config-name", "config"]):
        done = process([script, *flags, *given])
        assert done.returncode == 2
        require_one_line(done.stderr, "no such file")
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_help_lists_the_groups_and_no_other_folder(own: Path) -> None:
    done = process(["train.py", "--config-dir", str(own), "--help"])
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    listed = {group: names.split(", ") for group, _, names in lines if (CONF / group).is_dir()}
    assert "accelerate" not in listed and "hydra" not in listed
    assert {"data", "drafter", "experiment", "recipe", "search", "target"} <= listed.keys()
    assert {"mine", "quickstart"} <= {*listed["experiment"]} and "medusa" in listed["drafter"]
    assert "qwen3_8b" in listed["recipe"]

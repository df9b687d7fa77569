"""Logs a run's figures: always to metrics.jsonl, and to a tracker such as Weights & Biases or
TensorBoard."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import exit_code_of, require
from specdec.files import read_lines, write_whole
from specdec.integrity import of_file
from specdec.measure.results import Curve, Results
from specdec.plugins import Plugins
from specdec.progress import tell
from train.tensorboard_tracking import TensorBoardRun
from train.tracked_run import TrackConfig, TrackedRun
from train.wandb_tracking import WandbRun

Figures = Mapping[str, object]  # by name: numbers, lists of numbers, or further mappings


def _require_tracked_run(name: str, value: Any) -> None:
    fits = isinstance(value, type) and issubclass(value, TrackedRun)
    require(fits, "is not a subclass of TrackedRun (train/tracked_run.py)")


# by the name that `track.tracker` gives
TRACKERS = Plugins[type[TrackedRun]](
    "draftsmith.trackers",
    "tracker",
    {"wandb": WandbRun, "tensorboard": TensorBoardRun},
    _require_tracked_run,
)


def require_tracker(cfg: TrackConfig) -> None:
    """Raise UserError if there is no such tracker, or if it does not support the settings."""
    if cfg.mode != "disabled":
        TRACKERS.named(cfg.tracker).require_login(cfg)


def files_of_trackers() -> list[str]:
    """The files that trackers may write in a run's folder: the run's files, and its id with a
    digest of the settings."""
    names = {*TRACKERS, *TRACKERS.installed()}
    return [file for name in sorted(names) for file in (name, f"{name}-id")]


class Tracker:
    """Appends each record to metrics.jsonl and, once `begin_run` was called, logs it to the
    tracker under the same names, until the end of a `with` block. Only the main process writes
    anything."""

    def __init__(self, folder: Path, main: bool = True) -> None:
        self.path = folder / "metrics.jsonl"
        self.main = main
        self._run: TrackedRun | None = None

    def begin_run(
        self, cfg: TrackConfig, name: str, settings: Mapping[str, Any], digest: str
    ) -> None:
        """Begin a run of this name in the tracker, or continue it, unless `cfg.mode` is disabled.
        While the folder has no config.json, it is continued only if the settings have the same
        `digest`. Raises UserError if the tracker rejects it, as W&B does for an entity that is not
        the user's."""
        folder = self.path.parent
        if not self.main or cfg.mode == "disabled":
            return
        noted = folder / f"{cfg.tracker}-id"  # a resumed run continues the same run of the tracker
        known = noted.read_text(encoding="utf-8").split() if noted.exists() else []
        if not known or (known[1:] != [digest] and not (folder / "config.json").exists()):
            known = [os.urandom(4).hex(), digest]
            write_whole(noted, " ".join(known))
        self._run = TRACKERS.named(cfg.tracker)(cfg, folder, name, known[0], settings)

    def log(self, step: int, figures: Figures) -> None:
        """Log the figures of a step."""
        if not self.main:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        if self._run:
            self._run.log(step, figures)

    def checksum(self) -> str:
        """The checksum of metrics.jsonl in its current state."""
        return of_file(self.path) if self.main and self.path.exists() else ""

    def rewind(self, step: int, checksum: str = "") -> None:
        """Drop the records after `step` from metrics.jsonl and the tracker: a resumed run writes
        them again. Prints a line if the remaining records do not match the `checksum` that was
        kept."""
        if self._run:
            self._run.rewind(step)
        if self.main and self.path.exists():
            records = (r for r in read_lines(self.path, ("step",)) if type(r["step"]) is int)
            kept = [r for r in records if r["step"] <= step]
            write_whole(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        if self.main and checksum and checksum != self.checksum():
            tell(
                f"{self.path} is damaged or was edited: the training curve in the report is not "
                "the one that was logged"
            )

    def log_results(self, results: Results, pictures: Mapping[str, Path], draft: Path) -> None:
        """Log a run's results, the report's pictures and the draft to the tracker, if one runs."""
        if self._run:
            self._run.log_results(results, pictures, draft)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """End the run with the exit code for `error`, so that the next trial of a sweep begins its
        own run."""
        if self._run:
            self._run.finish(exit_code_of(error))
            self._run = None


def curve(path: Path) -> Curve | None:
    """The training curve in a metrics.jsonl; None if nothing was trained."""
    if not path.exists():
        return None
    lines = read_lines(path, ("step",))
    train = list(filter(None, (_point(r, "train") for r in lines)))
    held_out = list(filter(None, (_point(r, "held_out") for r in lines)))
    if not train:
        return None
    depth = len(train[0][2])
    train = [p for p in train if len(p[2]) == depth]
    depth = depth or len(held_out[0][2] if held_out else [])  # on text alone, training has no α
    held_out = [p for p in held_out if len(p[2]) == depth]
    return Curve(
        [step for step, _, _ in train],
        [loss for _, loss, _ in train],
        [sampled for _, _, sampled in train],
        [step for step, _, _ in held_out],
        [sampled for _, _, sampled in held_out],
    )


def _point(record: dict[str, Any], side: str) -> tuple[int, float, list[float]] | None:
    """A point of the curve: the step, the loss at depth 0 and sampled α by depth. None if a record
    has no such side, or is damaged."""
    try:
        figures = record[side]
        loss = float(figures["loss"][0]) if side == "train" else 0.0
        if side == "train" and "text_probability" in figures:  # on text, without the target
            return int(record["step"]), loss, []
        sampled = (figures if side == "train" else figures["by_depth"])["sampled"]
        return int(record["step"]), loss, [float(alpha) for alpha in sampled]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None

"""The interface of a tracker such as Weights & Biases, and its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.errors import require, require_known
from specdec.measure.results import Results

MODES = ("offline", "online", "disabled")
LONGEST_TAG = 64  # characters of a tag that W&B takes


@dataclass
class TrackConfig:
    """A tracker that displays the run, in addition to metrics.jsonl. In a sweep, the default title
    is the sweep's name and the trial's number, the group is the sweep, and the tags are the
    settings that the sweep varies."""

    tracker: str = "wandb"  # wandb, tensorboard, or a tracker of an installed package
    # offline: no key or network needed, `wandb sync` uploads later; online; disabled
    mode: str = "offline"
    project: str = "draftsmith"  # project in the tracker
    entity: str | None = None  # user or team that owns the project; null: the tracker's default
    title: str | None = None  # the run's name in the tracker; null: name
    # group of the run in the tracker; null: none, in a sweep NAME-sweep
    group: str | None = None
    # tags of the run in the tracker; empty: none, in a sweep the settings that it varies
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_known("track", self, mode=MODES)
        for tag in self.tags:
            require(
                1 <= len(tag) <= LONGEST_TAG,
                f"track.tags: {tag[:80]!r} has {len(tag)} characters: W&B takes 1 to {LONGEST_TAG}",
            )


class TrackedRun:
    """One run of training in a tracker, from `__init__` to `finish`, in the main process. A tracker
    is a subclass, listed in `TRACKERS` (train/tracking.py). In the run's folder it may write only
    files with the tracker's name."""

    @classmethod
    def require_login(cls, cfg: TrackConfig) -> None:
        """Raise UserError if runs are to be displayed online but cannot be. Called before the
        target is loaded."""

    def __init__(
        self, cfg: TrackConfig, folder: Path, name: str, run_id: str, settings: Mapping[str, Any]
    ) -> None:
        """Open the run of this id, or continue it if the tracker has it already. `folder` is the
        run's folder, `name` its name unless `cfg.title` gives another, and `settings` its whole
        configuration. Raises UserError if the tracker does not allow it."""

    def log(self, step: int, figures: Mapping[str, object]) -> None:
        """Log figures of a step. The entries of a list are named `name/0`, `name/1`, …"""
        raise NotImplementedError

    def rewind(self, step: int) -> None:
        """Drop figures logged after this step: training continues there and logs them again. By
        default nothing is done, for trackers that ignore steps they already have."""

    def log_results(self, results: Results, pictures: Mapping[str, Path], draft: Path) -> None:
        """Log the results, the report's pictures by name, and the folder of the draft."""

    def finish(self, exit_code: int) -> None:
        """End the run, with the exit code of the command."""


def main_figures(results: Results) -> dict[str, float]:
    """τ and the speedup of every measurement. An artifact of W&B takes at most 100 figures, and
    there may be more."""
    figures = results.headline()
    return {name: x for name, x in figures.items() if name.endswith(("/tau", "/speedup"))}


def flat_figures(figures: object, name: str = "") -> dict[str, object]:
    """Nested figures by flat names: the entries of a list as `name/0`, `name/1`, …"""
    parts = dict(enumerate(figures)) if isinstance(figures, list) else figures
    if not isinstance(parts, Mapping):
        return {name: figures}
    flat = (flat_figures(part, f"{name}/{key}".lstrip("/")) for key, part in parts.items())
    return {n: x for one in flat for n, x in one.items()}

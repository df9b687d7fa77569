"""Runs in TensorBoard."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.errors import require
from specdec.measure.results import Results
from specdec.terminal import plain
from train.tracked_run import TrackConfig, TrackedRun, flat_figures, main_figures

FOLDER = "tensorboard"  # in the run's folder
RESULTS = "results"  # in that one: what was measured, written anew by each measurement
EVENTS = "events.out.tfevents.*"  # the names of TensorBoard's own files


class TensorBoardRun(TrackedRun):
    """A run whose curves are in the folder `tensorboard` of the run's folder. The names of its
    files end with the run's id."""

    @classmethod
    def require_login(cls, cfg: TrackConfig) -> None:
        """Raise UserError if TensorBoard is not installed, or does not support the settings."""
        require(
            find_spec("tensorboard") is not None,
            "track.tracker=tensorboard: the package tensorboard is not installed: "
            'run `pip install -e ".[tensorboard]"`, or give track=none',
        )
        require(
            cfg.mode != "online",
            "track.mode=online: TensorBoard reads the run's folder and has no online mode: give "
            "track.mode=offline",
        )
        require(
            cfg.entity is None,
            f"track.entity={cfg.entity}: TensorBoard has no users and teams: leave it out",
        )

    def __init__(
        self, cfg: TrackConfig, folder: Path, name: str, run_id: str, settings: Mapping[str, Any]
    ) -> None:
        self._folder, self._run_id = folder / FOLDER, run_id
        self._settings = settings
        for path in self._folder.rglob(EVENTS):  # files of a run with other settings
            if not path.name.endswith(f".{run_id}"):
                path.unlink()
        known = any(self._folder.glob(EVENTS))
        self._writer: Any = self._opened(self._folder)
        if not known:
            described = {"title": cfg.title or name, "project": cfg.project, "group": cfg.group}
            described |= {"tags": ", ".join(cfg.tags)}
            rows = (f"| {key} | {plain(str(x))} |" for key, x in described.items() if x)
            self._writer.add_text("run", "\n".join(["| | |", "| --- | --- |", *rows]), 0)
            self._writer.flush()

    def _opened(self, folder: Path, purge_step: int | None = None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        suffix = f".{self._run_id}"
        return SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=suffix)

    def log(self, step: int, figures: Mapping[str, object]) -> None:
        """Log the numbers among the figures and flush them to disk, so that a killed run loses none
        that its checkpoint counts."""
        for name, x in flat_figures(figures).items():
            if isinstance(x, int | float):
                self._writer.add_scalar(name, x, step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Continue in a new file, at whose beginning TensorBoard drops the later steps of earlier
        ones."""
        self._writer.close()
        self._writer = self._opened(self._folder, purge_step=step + 1)

    def log_results(self, results: Results, pictures: Mapping[str, Path], draft: Path) -> None:
        """Log the main figures with the settings (the tab HParams uses them to compare the trials
        of a sweep), all figures, samples, plots, and the path of the draft."""
        from matplotlib.image import imread
        from torch.utils.tensorboard.summary import hparams

        folder = self._folder / RESULTS
        for path in folder.glob(EVENTS):
            path.unlink()
        step = results.training.step if results.training else 0
        writer = self._opened(folder)
        named = {key.replace("/", "."): x for key, x in flat_figures(self._settings).items()}
        kept = {name: x for name, x in named.items() if isinstance(x, bool | int | float | str)}
        for summary in hparams(kept, main_figures(results)):
            writer.file_writer.add_summary(summary, step)
        for name, figure in results.headline().items():
            writer.add_scalar(name, figure, step)
        for at in results.asked:
            samples = (
                f"### {number}\n\n{plain(s.conversation())}\n\n{plain(s.response)}\n\nτ {s.tau:.2f}"
                for number, s in enumerate(at.samples, 1)
            )
            writer.add_text(f"samples T={at.way.temperature:g}", "\n\n".join(samples), step)
        for name, path in pictures.items():
            writer.add_image(name, imread(path), step, dataformats="HWC")
        writer.add_text("draft", str(draft), step)
        writer.close()

    def finish(self, exit_code: int) -> None:
        self._writer.close()

"""Where a run's figures go: metrics.jsonl always, Weights & Biases where it is wanted."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import nearest, require
from specdec.files import read_lines, write_whole
from specdec.measure.results import Curve, Results

if TYPE_CHECKING:
    from wandb import Run

    from train.config import Config

Figures = Mapping[str, object]  # numbers, lists of them, and such mappings by name
MODES = ("offline", "online", "disabled")


@dataclass
class TrackConfig:
    """`mode`: offline (no key, no network; `wandb sync` uploads later), online or disabled."""

    mode: str = "offline"
    project: str = "draftsmith"
    entity: str | None = None

    def __post_init__(self) -> None:
        require(
            self.mode in MODES, f"track.mode={self.mode!r} is unknown{nearest(self.mode, MODES)}"
        )


class Tracker:
    """Appends each record to metrics.jsonl, and logs it to W&B under the same names.

    On a process that is not the main one it does nothing.
    """

    def __init__(
        self, cfg: TrackConfig, folder: Path, name: str, config: "Config", main: bool = True
    ) -> None:
        self.path = folder / "metrics.jsonl"
        self.main = main
        self._run: Run | None = None
        if not main or cfg.mode == "disabled":
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = wandb.init(
            project=cfg.project,
            entity=cfg.entity,
            name=name,
            id=_run_id(folder),
            resume="allow",
            dir=folder,
            mode=cfg.mode,  # type: ignore[arg-type]
            config=asdict(config),
        )

    def log(self, step: int, figures: Figures) -> None:
        """Figures at a step; the entries of a list become `name/0`, `name/1`, … in W&B."""
        if not self.main:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        if self._run:
            self._run.log(_flat(figures), step=step)

    def rewind(self, step: int) -> None:
        """Drop the records after `step`: a resumed run writes them again."""
        if self.main and self.path.exists():
            kept = [r for r in read_lines(self.path, ("step",)) if r["step"] <= step]
            write_whole(self.path, "".join(json.dumps(r) + "\n" for r in kept))

    def report(self, results: Results, pictures: Mapping[str, Path], draft: Path) -> None:
        """The results of a run in W&B: samples, plots, a summary, and the draft as an artifact,
        which is never loaded back through W&B."""
        if not self._run:
            return
        import wandb

        for at in results.temperatures:
            rows = [[s.prompt, s.answer, s.tau] for s in at.samples]
            table = wandb.Table(columns=["prompt", "answer", "tau"], data=rows)
            self._run.log({f"samples T={at.temperature:g}": table})
        self._run.log({name: wandb.Image(str(path)) for name, path in pictures.items()})
        figures = results.headline()
        self._run.summary.update(figures)
        name = re.sub(r"[^\w.-]", "-", f"{results.name}-draft")
        artifact = wandb.Artifact(name, type="model", metadata=dict(figures))
        artifact.add_dir(str(draft))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        """End the W&B run, so that the next trial of a sweep begins one of its own."""
        if self._run:
            self._run.finish()
            self._run = None


def curve(path: Path) -> Curve | None:
    """The course of training in a metrics.jsonl, whose damaged lines are left out; None where
    nothing was trained."""
    if not path.exists():
        return None
    train, held_out = (read_lines(path, ("step", side)) for side in ("train", "held_out"))
    if not train:
        return None
    return Curve(
        [r["step"] for r in train],
        [r["train"]["loss"][0] for r in train],
        [r["train"]["sampled"] for r in train],
        [r["step"] for r in held_out],
        [r["held_out"]["by_depth"]["sampled"] for r in held_out],
    )


def _run_id(folder: Path) -> str:
    """The W&B id of this folder's run, made once, so that a resumed run goes on as the same."""
    path = folder / "wandb-id"
    if not path.exists():
        write_whole(path, os.urandom(4).hex())
    return path.read_text()


def _flat(figures: Figures, prefix: str = "") -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in figures.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            out |= {f"{prefix}{key}/{i}": x for i, x in enumerate(value)}
        else:
            out[f"{prefix}{key}"] = value
    return out

"""Where a run's figures go: metrics.jsonl always, Weights & Biases where it is wanted."""

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import nearest, require
from specdec.files import write_whole
from train.data.jsonl import records

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
        self, cfg: TrackConfig, folder: Path, name: str, config: Any, main: bool = True
    ) -> None:
        self.path = folder / "metrics.jsonl"
        self.main = main
        self._wandb: Any = None
        if not main or cfg.mode == "disabled":
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb.init(
            project=cfg.project,
            entity=cfg.entity,
            name=name,
            id=_run_id(folder),
            resume="allow",
            dir=folder,
            mode=cfg.mode,  # type: ignore[arg-type]
            config=dataclasses.asdict(config),
        )

    def log(self, step: int, record: dict[str, Any]) -> None:
        """One record at a step; nested lists become `name/0`, `name/1`, … in W&B."""
        if not self.main:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **record}) + "\n")
        if self._wandb:
            self._wandb.log(_flat(record), step=step)

    def rewind(self, step: int) -> None:
        """Drop the records after `step`: a resumed run writes them again."""
        if self.main and self.path.exists():
            kept = [r for r in read(self.path) if r["step"] <= step]
            write_whole(self.path, "".join(json.dumps(r) + "\n" for r in kept))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        if self._wandb:
            import wandb

            table = wandb.Table(columns=list(columns), data=[list(r) for r in rows])
            self._wandb.log({name: table})

    def artifact(self, folder: Path, name: str, metadata: dict[str, Any]) -> None:
        """The checkpoint as a W&B artifact (it is never loaded back through W&B)."""
        if self._wandb:
            import wandb

            allowed = re.sub(r"[^\w.-]", "-", name)
            artifact = wandb.Artifact(allowed, type="model", metadata=metadata)
            artifact.add_dir(str(folder))
            self._wandb.log_artifact(artifact)

    def images(self, pictures: dict[str, Path]) -> None:
        if self._wandb:
            import wandb

            self._wandb.log({k: wandb.Image(str(p)) for k, p in pictures.items()})

    def summary(self, figures: dict[str, Any]) -> None:
        if self._wandb:
            self._wandb.summary.update(_flat(figures))

    def close(self) -> None:
        """End the W&B run, so that the next trial of a sweep begins one of its own."""
        if self._wandb:
            self._wandb.finish()
            self._wandb = None


def read(path: Path) -> list[dict[str, Any]]:
    """The whole records of a metrics.jsonl; a line that is damaged or cut short is left out."""
    return records(path, ("step",)) if path.exists() else []


def _run_id(folder: Path) -> str:
    """The W&B id of this folder's run, made once, so that a resumed run goes on as the same."""
    path = folder / "wandb-id"
    if not path.exists():
        write_whole(path, os.urandom(4).hex())
    return path.read_text()


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            out |= {f"{prefix}{key}/{i}": x for i, x in enumerate(value)}
        else:
            out[f"{prefix}{key}"] = value
    return out

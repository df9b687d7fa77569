"""Runs in Weights & Biases."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import UserError, first_line, require
from specdec.measure.results import Results
from specdec.terminal import plain
from train.tracked_run import TrackConfig, TrackedRun, flat_figures, main_figures


class WandbRun(TrackedRun):
    """A run in W&B, with its files in the folder `wandb` of the run's folder."""

    @classmethod
    def require_login(cls, cfg: TrackConfig) -> None:
        """Raise UserError without a login. W&B itself would report this only when the run begins,
        after the target has answered. The environment may set W&B offline."""
        if cfg.mode != "online":
            return
        wanted = os.environ.get("WANDB_MODE", "online")
        require(
            wanted == "online",
            f"track.mode=online, but the environment has WANDB_MODE={wanted}: unset WANDB_MODE, or "
            "give track.mode=offline",
        )
        import wandb

        try:
            wandb.login()
        except wandb.Error as error:
            raise UserError(
                f"track.mode=online: {first_line(error).rstrip('.')}: run `wandb login`, set "
                "WANDB_API_KEY, or give track.mode=offline"
            ) from error

    def __init__(
        self, cfg: TrackConfig, folder: Path, name: str, run_id: str, settings: Mapping[str, Any]
    ) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        try:
            self._run: Any = wandb.init(
                project=cfg.project,
                entity=cfg.entity,
                name=cfg.title or name,
                group=cfg.group,
                tags=cfg.tags or None,
                id=run_id,
                resume="allow",
                dir=folder,
                mode=cfg.mode,  # type: ignore[arg-type]
                config=dict(settings),
            )
        except wandb.Error as error:
            place = f"project {cfg.project!r}" + f" of {cfg.entity!r}" * (cfg.entity is not None)
            reason = first_line(error).rstrip(".")
            raise UserError(
                f"track: W&B did not start a run in the {place} ({reason}): "
                "check track.entity and track.project, or give track.mode=offline or track=none"
            ) from error

    def log(self, step: int, figures: Mapping[str, object]) -> None:
        self._run.log(flat_figures(figures), step=step)

    def log_results(self, results: Results, pictures: Mapping[str, Path], draft: Path) -> None:
        """Log samples, plots, a summary, and the draft as an artifact, which is never loaded back
        from there."""
        import wandb

        for at in results.asked:
            rows = [[plain(s.conversation()), plain(s.response), s.tau] for s in at.samples]
            table = wandb.Table(columns=["prompt", "answer", "tau"], data=rows)
            self._run.log({f"samples T={at.way.temperature:g}": table})
        self._run.log({name: wandb.Image(str(path)) for name, path in pictures.items()})
        self._run.summary.update(results.headline())
        name = re.sub(r"[^\w.-]", "-", f"{results.name}-draft")
        artifact = wandb.Artifact(name, type="model", metadata=main_figures(results))
        artifact.add_dir(str(draft))
        self._run.log_artifact(artifact)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)

"""Where a run's figures go: always to metrics.jsonl, and to Weights & Biases if enabled."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.errors import UserError, exit_code_of, first_line, require, require_known
from specdec.files import read_lines, write_whole
from specdec.integrity import of_file
from specdec.measure.results import Curve, Results
from specdec.progress import tell
from specdec.terminal import plain

Figures = Mapping[str, object]  # by name: numbers, lists of numbers, or further mappings
MODES = ("offline", "online", "disabled")
# in a run's folder: the files of its W&B run, and that run's id with a digest of the settings
OF_WANDB = ("wandb", "wandb-id")
LONGEST_TAG = 64  # characters of a tag that W&B takes


@dataclass
class TrackConfig:
    """`mode`: offline (needs no key or network; `wandb sync` uploads later), online or disabled.
    `title` is the run's name in W&B (null: `name`); `group` and `tags` say what it belongs to. In a
    sweep, their defaults come from the trial: its title is the sweep's name and the trial's number,
    its group the sweep, and its tags the settings that the sweep varies."""

    mode: str = "offline"
    project: str = "draftsmith"
    entity: str | None = None
    title: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_known("track", self, mode=MODES)
        for tag in self.tags:
            require(
                1 <= len(tag) <= LONGEST_TAG,
                f"track.tags: {tag[:80]!r} has {len(tag)} characters: W&B takes 1 to {LONGEST_TAG}",
            )


def require_login(cfg: TrackConfig) -> None:
    """Raise UserError if runs are to be shown online but W&B has no key, or the environment sets it
    offline. W&B itself would say so only when the run begins, after the target has answered."""
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


class Tracker:
    """Appends each record to metrics.jsonl and, once `begin_wandb` was called, logs it to W&B under
    the same names, until the end of a `with` block. Only the main process writes anything."""

    def __init__(self, folder: Path, main: bool = True) -> None:
        self.path = folder / "metrics.jsonl"
        self.main = main
        self._run: Any = None  # a wandb.Run

    def begin_wandb(
        self, cfg: TrackConfig, name: str, settings: Mapping[str, Any], digest: str
    ) -> None:
        """Begin a run of W&B of this name, or continue it, unless `cfg.mode` is disabled. As long
        as the folder has no config.json, it is continued only if the settings have the same
        `digest`. Raises UserError if W&B does not let it begin, as with an entity that is not the
        user's."""
        folder = self.path.parent
        if not self.main or cfg.mode == "disabled":
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        noted = folder / OF_WANDB[1]  # a resumed run continues the same W&B run
        known = noted.read_text(encoding="utf-8").split() if noted.exists() else []
        if not known or (known[1:] != [digest] and not (folder / "config.json").exists()):
            known = [os.urandom(4).hex(), digest]
            write_whole(noted, " ".join(known))
        try:
            self._run = wandb.init(
                project=cfg.project,
                entity=cfg.entity,
                name=cfg.title or name,
                group=cfg.group,
                tags=cfg.tags or None,
                id=known[0],
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

    def log(self, step: int, figures: Figures) -> None:
        """Log the figures of a step. In W&B, the entries of a list become `name/0`, `name/1`, …"""
        if not self.main:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        if self._run:
            self._run.log(_flat(figures), step=step)

    def checksum(self) -> str:
        """The checksum of metrics.jsonl as it is now."""
        return of_file(self.path) if self.main and self.path.exists() else ""

    def rewind(self, step: int, checksum: str = "") -> None:
        """Drop the records after `step` from metrics.jsonl: a resumed run writes them again. Says
        so if what is left is not what was logged, whose `checksum` was kept."""
        if self.main and self.path.exists():
            records = (r for r in read_lines(self.path, ("step",)) if type(r["step"]) is int)
            kept = [r for r in records if r["step"] <= step]
            write_whole(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        if self.main and checksum and checksum != self.checksum():
            tell(
                f"{self.path} is damaged or was edited: the training curve in the report is not "
                "the one that was logged"
            )

    def report(self, results: Results, pictures: Mapping[str, Path], draft: Path) -> None:
        """Log a run's results to W&B: samples, plots, a summary, and the draft as an artifact,
        which is never loaded back from there."""
        if not self._run:
            return
        import wandb

        for at in results.asked:
            rows = [[plain(s.conversation()), plain(s.answer), s.tau] for s in at.samples]
            table = wandb.Table(columns=["prompt", "answer", "tau"], data=rows)
            self._run.log({f"samples T={at.way.temperature:g}": table})
        self._run.log({name: wandb.Image(str(path)) for name, path in pictures.items()})
        self._run.summary.update(results.headline())
        name = re.sub(r"[^\w.-]", "-", f"{results.name}-draft")
        artifact = wandb.Artifact(name, type="model", metadata=main_figures(results))
        artifact.add_dir(str(draft))
        self._run.log_artifact(artifact)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """End the W&B run, with the exit code that `error` leads to, so that the next trial of a
        sweep begins its own."""
        if self._run:
            self._run.finish(exit_code=exit_code_of(error))
            self._run = None


def main_figures(results: Results) -> dict[str, float]:
    """τ and the speedup of everything measured. An artifact takes at most 100 figures, and there
    may be more."""
    figures = results.headline()
    return {name: x for name, x in figures.items() if name.endswith(("/tau", "/speedup"))}


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
    train, held_out = ([p for p in side if len(p[2]) == depth] for side in (train, held_out))
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
        sampled = (figures if side == "train" else figures["by_depth"])["sampled"]
        return int(record["step"]), loss, [float(alpha) for alpha in sampled]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None


def _flat(figures: object, name: str = "") -> dict[str, object]:
    parts = dict(enumerate(figures)) if isinstance(figures, list) else figures
    if not isinstance(parts, Mapping):
        return {name: figures}
    flat = (_flat(part, f"{name}/{key}".lstrip("/")) for key, part in parts.items())
    return {n: x for one in flat for n, x in one.items()}

"""Settings and decisions that a continued run keeps since it began; `settled` applies them.

`CHANGES` is one table of the settings that may change. A setting of the groups in `NEVER` must
stay, unless the table names it. All other groups are listed key by key, so that each new setting
requires a decision: `change_of` raises KeyError for a setting that is not listed.

A run also keeps the rows that each step reads, whatever the number of processes that continue it,
so that a step keeps its rows, its anchors and its learning rate.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import uuid4

from accelerate import Accelerator
from accelerate.utils import gather_object

from specdec.errors import UserError, located, require
from specdec.files import make_folder, write_whole
from specdec.integrity import of_value
from specdec.runtime.cpu.machine_probes import native_dtype
from specdec.targets.target_config import TargetConfig, resolved
from train import training_checkpoint
from train.accelerated import accelerator_of, ranks_of
from train.budget import BUDGET
from train.data.conversations import DataConfig
from train.data.split import SHARE
from train.folder import BEGAN, WITHOUT_VALIDATION, config_of
from train.loop import LoopConfig
from train.renamed_keys import require_current_keys
from train.run_config import Config
from train.target_defaults import with_target_defaults


class Change(Enum):
    """The effect of a changed setting on a continued run."""

    NEVER = "must stay: it changes what is trained"
    PRESENCE = "may change, but not be added or left out"
    ALLOWED = "may change: it changes rounding at most, or what follows training"
    NO_EFFECT = "is not read: the run keeps what it began with"


NEVER = {"target", "drafter", "initialisation", "rounds", "data", "responses", "sampler", "loss"}
NEVER |= {"optim", "loop"}
_DECODE = (
    *("gamma", "prompts", "timed", "counting", "max_new_tokens", "temperatures", "top_p", "top_k"),
    *(
        "verification",
        "greedy_draft",
        "tree",
        "nodes",
        "branches",
        "paths",
        "fastest",
        "draft_length",
    ),
    *("draft_length_settings", "compile", "repeats", "batch", "seed"),
)
CHANGES: dict[str, Change] = {
    # where a run keeps what it can make again, on which device it computes, and how much at once
    "target.cache": Change.ALLOWED,
    "target.device": Change.ALLOWED,
    "responses.root": Change.ALLOWED,
    "responses.batch": Change.ALLOWED,
    "responses.shard": Change.ALLOWED,
    "responses.engines": Change.ALLOWED,  # others write other responses: the texts are compared
    "loss.chunk": Change.ALLOWED,
    "loop.rows": Change.ALLOWED,  # `RowsPerStep` compares what a step reads
    "loop.accumulate": Change.ALLOWED,
    "loop.save_every": Change.ALLOWED,
    "loop.log_every": Change.ALLOWED,
    "hidden_states.path": Change.ALLOWED,
    "hidden_states.root": Change.ALLOWED,
    "hidden_states.prefetch": Change.ALLOWED,
    "hidden_states.shard": Change.ALLOWED,
    "hidden_states.engines": Change.PRESENCE,
    "hidden_states.mode": Change.ALLOWED,  # but not to or from none: see `require_same_run`
    "hidden_states.bits": Change.NEVER,
    # the time after training
    **{f"decode.{name}": Change.ALLOWED for name in _DECODE},
    "combine_with": Change.ALLOWED,
    "export": Change.ALLOWED,
    "export_reference": Change.ALLOWED,
    "serve_in": Change.ALLOWED,
    "track.tracker": Change.ALLOWED,
    "track.mode": Change.ALLOWED,
    "track.project": Change.ALLOWED,
    "track.entity": Change.ALLOWED,
    "track.title": Change.ALLOWED,
    "track.group": Change.ALLOWED,
    "track.tags": Change.ALLOWED,
    "name": Change.ALLOWED,  # it chooses the folder
    # the clock began with the run, and its decisions are kept
    "budget.minutes": Change.NO_EFFECT,
    "budget.floor": Change.NO_EFFECT,
    "budget.spent": Change.NO_EFFECT,
    # `plan=true` trains nothing
    "plan": Change.NO_EFFECT,
    "planning.device": Change.NO_EFFECT,
    "planning.devices": Change.NO_EFFECT,
    "planning.tokens": Change.NO_EFFECT,
    "planning.alpha": Change.NO_EFFECT,
    "planning.fsdp": Change.NO_EFFECT,
}


def change_of(key: str) -> Change:
    """The effect on a continued run of a changed setting, such as "loop.rows". Raises KeyError for
    a setting that the table does not list."""
    if key in CHANGES:
        return CHANGES[key]
    if key.partition(".")[0] not in NEVER:
        raise KeyError(key)
    return Change.NEVER


@dataclass(frozen=True)
class RowsPerStep:
    """The settings and the number of processes with which a run began. `processes` is None if it is
    not known: runs before November 2026 did not record it."""

    rows: int
    accumulate: int
    processes: int | None

    def for_processes(self, cfg: LoopConfig, processes: int) -> tuple[LoopConfig, str]:
        """Settings with which `processes` read the same rows in each step, and a note for the user
        if they differ from the given ones. Raises UserError if the rows cannot be divided equally,
        or if the user gave settings, other than the run's own, with another number of rows."""
        if self.processes is None:
            return cfg, ""
        size = self.rows * self.accumulate * self.processes
        if cfg.rows * cfg.accumulate * processes == size:
            return cfg, ""
        said = f"each step of this run reads {size} packed rows"
        if (cfg.rows, cfg.accumulate) != (self.rows, self.accumulate):
            raise UserError(
                f"{said}, but {_settings(cfg)} on {_count(processes)} would read "
                f"{cfg.rows * cfg.accumulate * processes}: leave out loop.rows and "
                "loop.accumulate to continue it, or give another name="
            )
        if size % processes:
            fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise UserError(
                f"{said}, which {_count(processes)} cannot share equally: continue it on one of "
                f"these numbers of processes: {fitting}; or give another name="
            )
        share = size // processes
        rows = max(n for n in range(1, min(cfg.rows, share) + 1) if share % n == 0)
        shared = replace(cfg, rows=rows, accumulate=share // rows)
        return shared, (
            f"{said}: it began on {_count(self.processes)} with {_settings(cfg)}, and goes on with "
            f"{_settings(shared)} on {_count(processes)}"
        )


def _settings(cfg: LoopConfig) -> str:
    return f"loop.rows={cfg.rows} loop.accumulate={cfg.accumulate}"


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


@dataclass(frozen=True)
class SettledRun:
    """A run as it is done now: its configuration, with everything kept since it began, and its
    processes."""

    cfg: Config
    accelerator: Accelerator
    rows: RowsPerStep  # as the run began
    spread: str  # a note for the user on the rows of these processes
    dtype_reason: str  # why the target has its dtype, where that was not given
    decided: Sequence[str]  # notes for the user on settings that the target decided

    def settings_to_record(self) -> dict[str, Any]:
        """The settings for config.json, with the rows per step as the run began."""
        settings = asdict(self.cfg)
        settings["loop"] |= {"rows": self.rows.rows, "accumulate": self.rows.accumulate}
        return settings | {"processes": self.rows.processes}


def settled(cfg: Config, folder: Path) -> SettledRun:
    """Start the processes and fix the configuration of the run in this folder: the dtype of the
    target, the date, the held-out and validation fractions, the lengths and the sampling that
    depend on the target, and the rows of a step. Only this function does so, and a run keeps all of
    them. Raises UserError if the folder holds a run with other settings."""
    dtype, reason = dtype_of_run(cfg.target, folder)
    target = replace(cfg.target, dtype=dtype)
    accelerator = accelerator_of(target, cfg.loop.precision)
    ranks = ranks_of(accelerator)
    data = replace(cfg.data, date=date_of_run(cfg.data.date, folder))
    if (known := config_of(folder).get("data")) is not None:
        began = {"held_out": SHARE} | WITHOUT_VALIDATION | known
        names = [name for name in ("held_out", "validation") if getattr(data, name) is None]
        data = replace(data, **{name: began[name] for name in names})
    before = replace(cfg, target=target, data=data)
    cfg, decided = ranks.first(lambda: with_target_defaults(before, config_of(folder)))

    def rows_of_same_run() -> tuple[RowsPerStep, LoopConfig, str]:
        require_same_run(folder, cfg)
        rows = rows_per_step_of_run(folder, cfg.loop, ranks.world)
        return rows, *rows.for_processes(cfg.loop, ranks.world)

    rows, loop, spread = ranks.first(rows_of_same_run)
    return SettledRun(replace(cfg, loop=loop), accelerator, rows, spread, reason, decided)


def dtype_of_run(target: TargetConfig, folder: Path) -> tuple[str, str]:
    """The dtype that `target.dtype` resolves to, and the reason if it is auto. A run keeps the
    dtype that it began with, even on another kind of machine."""
    if target.dtype != "auto":
        return target.dtype, ""
    dtype = (config_of(folder).get("target") or {}).get("dtype", "auto")
    if dtype != "auto":
        return str(dtype), "as this run began"
    here = resolved(target)
    return here.dtype, native_dtype(here.device).reason


def date_of_run(date: str | None, folder: Path) -> str:
    """`data.date` or, if it is null, the time at which the run began, for chat templates that write
    a date. Otherwise a run continued tomorrow would have other prompts and need all responses
    again. `note_date` keeps it for a run that is interrupted before it has a config.json."""
    if date is not None:
        return date
    date = (config_of(folder).get("data") or {}).get("date")
    if date is None and (folder / BEGAN).exists():
        date, *sums = (folder / BEGAN).read_text(errors="replace", encoding="utf-8").split() or [""]
        with located(f"{folder / BEGAN} is damaged: delete it"):
            DataConfig(date=date)
            # an earlier version wrote no checksum
            require(sums in ([], [of_value(date, BEGAN)]), "its checksum differs")
    (date, *_) = gather_object(
        [date or datetime.now().isoformat(timespec="seconds")]
    )  # the same in all processes
    return str(date)


def note_date(date: str | None, folder: Path) -> None:
    """Record when the run in this folder began, unless it is known."""
    if date is not None and not (folder / BEGAN).exists():
        write_whole(folder / BEGAN, line_of_beginning(date, BEGAN))


def note_beginning(path: Path) -> None:
    """Record in this file when the first of several shards began, unless it is known: all of them
    render prompts with that time, as chat templates may write it."""
    make_folder(path.parent)
    partial = path.with_name(f"{path.name}.{uuid4().hex}")
    partial.write_text(
        line_of_beginning(datetime.now().isoformat(timespec="seconds"), path.name), encoding="utf-8"
    )
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()


def line_of_beginning(date: str, name: str) -> str:
    """The contents of the file `name` with the date of a run's beginning: the date and its
    checksum, because a damaged date would change the prompts."""
    return f"{date} {of_value(date, name)}\n"


def rows_per_step_of_run(folder: Path, cfg: LoopConfig, processes: int) -> RowsPerStep:
    """The rows per step of the run in this folder, as it began; for a new run, those of `cfg`."""
    theirs = config_of(folder)
    began = theirs.get("processes")
    if not began and training_checkpoint.steps(folder / "checkpoints"):
        return RowsPerStep(cfg.rows, cfg.accumulate, None)
    if not began:
        return RowsPerStep(cfg.rows, cfg.accumulate, processes)
    was = asdict(LoopConfig()) | theirs["loop"]
    return RowsPerStep(was["rows"], was["accumulate"], began)


def require_same_run(folder: Path, cfg: Config) -> None:
    """Raise UserError if a folder holds another run. A run of the same settings may continue:
    `CHANGES` says which of them may change."""
    if not (theirs := config_of(folder)):
        return
    require_current_keys(theirs, str(folder / "config.json"))
    other = "give another name=, or delete that folder"
    for group in fields(Config):
        ours, known = _settings_of(cfg, group.name), theirs.get(group.name)
        # a setting that did not exist when the run began had its default value
        default = type(getattr(cfg, group.name)) if is_dataclass(getattr(cfg, group.name)) else None
        was = (_plain(default()) if default else {}) | (known if isinstance(known, dict) else {})
        for key, value in ours.items() if isinstance(ours, dict) else ():
            change, before = change_of(f"{group.name}.{key}"), was.get(key)
            same = bool(before) == bool(value) if change is Change.PRESENCE else before == value
            require(
                same or change not in (Change.NEVER, Change.PRESENCE),
                f"{folder} holds a run with {group.name}.{key}={before!r}, not {value!r}: {other}",
            )
    stored = {"mode": "offline", "bits": None} | (theirs.get("hidden_states") or {})
    mode = cfg.hidden_states.mode
    require(
        (stored["mode"] == "none") == (mode == "none"),
        f"{folder} holds a run with hidden_states.mode={stored['mode']}, not {mode}, which trains "
        f"on other hidden states: {other}",
    )
    require(
        (stored["bits"] if stored["mode"] == "offline" else None)
        == (cfg.hidden_states.bits if cfg.hidden_states.mode == "offline" else None),
        f"{folder} holds a run with hidden_states.mode={stored['mode']} and hidden_states.bits="
        f"{stored['bits']}, whose hidden states are rounded otherwise: {other}",
    )
    require(
        cfg.budget.minutes is None or (folder / BUDGET).exists(),
        f"{folder} holds a run that began without budget.minutes, or has lost its {BUDGET}: leave "
        f"budget.minutes out to continue it, or {other}",
    )


def digest_of_settings(cfg: Config) -> str:
    """A short hash of the settings that identify runs without a config.json and determine the
    clock's decisions: those that must not change, the budget and the settings of measuring."""
    settings: dict[str, Any] = {"decode": _plain(cfg.decode), "budget": _plain(cfg.budget)}
    del settings["budget"]["spent"]
    for group in fields(Config):
        if isinstance(ours := _settings_of(cfg, group.name), dict):
            for key, value in ours.items():
                if change_of(name := f"{group.name}.{key}") is Change.NEVER:
                    settings[name] = value
    if cfg.hidden_states.mode == "none":  # of the others, each trains on the same hidden states
        settings["hidden_states.mode"] = "none"
    for name in ("data.date", "data.held_out", "data.validation"):  # as a run fills them in
        settings.pop(name, None)
    return of_value(settings)


def _settings_of(cfg: Config, group: str) -> Any:
    value = getattr(cfg, group)
    return _plain(value) if is_dataclass(value) else value


def _plain(config: Any) -> dict[str, Any]:
    """A configuration in the types that JSON reads back."""
    return dict(json.loads(json.dumps(asdict(config))))

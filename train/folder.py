"""The folder of a run: what it remembers of the run, and that one process holds it."""

import dataclasses
import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.files import read_json
from specdec.runtime.probes import native_dtype
from specdec.target.loading import resolved
from train.config import Config, with_objective
from train.data.template import Document

# of a configuration, whose values make a run what it is
GROUPS = ["target", "drafter", "stage", "data", "answers", "sampler", "objective", "optim", "loop"]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a run's folder; UserError where another process does."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is running in {folder}: wait for it, or give another name="
            ) from error
        yield


def require_same_run(folder: Path, cfg: Config) -> None:
    """A folder may hold an earlier start of the same run, to be continued, but no other run."""
    theirs = config_of(folder)
    if not theirs:
        return
    ours = json.loads(json.dumps(dataclasses.asdict(cfg)))
    for group in GROUPS:
        # a setting that is newer than the run was its default then
        default = json.loads(json.dumps(dataclasses.asdict(type(getattr(cfg, group))())))
        was = default | (theirs.get(group) or {})
        for key, value in ours[group].items():
            if was.get(key) != value:
                raise UserError(
                    f"{folder} holds a run with {group}.{key}={was.get(key)!r}, not {value!r}: "
                    "give another name=, or delete that folder"
                )


def require_same_texts(folder: Path, of: dict[str, str]) -> None:
    """As `_require_same_run`, of what is not in a configuration."""
    for name, was in config_of(folder).get("of", of).items():
        if was != of[name]:
            raise UserError(
                f"{folder}: the {name} changed since this run began: give another name=, or delete "
                "that folder"
            )


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a run's folder; empty where there is none."""
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        return with_objective(dict(read_json(path)))
    except (UserError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): give another name=, or delete it") from error


def digest(documents: Sequence[Document]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for document in documents:
        digest.update(json.dumps([document.ids.tolist(), document.mask.tolist()]).encode())
    return digest.hexdigest()


def with_dtype(cfg: Config, folder: Path) -> tuple[Config, str]:
    """The configuration with the dtype that `target.dtype=auto` stands for, and the reason. A run
    keeps the dtype with which it began, also on another kind of machine."""
    if cfg.target.dtype != "auto":
        return cfg, ""
    dtype = (config_of(folder).get("target") or {}).get("dtype", "auto")
    reason = "as this run began"
    if dtype == "auto":
        target = resolved(cfg.target)
        dtype, reason = target.dtype, native_dtype(target.device).reason
    return replace(cfg, target=replace(cfg.target, dtype=dtype)), reason

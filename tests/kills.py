"""Places in a job at which one of its processes, or its launcher, is killed.

`python -m tests.kills KILLS NOTES OVERRIDE…` is `train.py` with such places: KILLS maps ranks to
the arguments of `plant`, and NOTES is a folder in which each process notes that it killed.
"""

import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec.formats import draft as drafts
from train import checkpoint, loop, optim, pipeline
from train.data import answers
from train.features.source import Online
from train.tracking import Tracker

PLACES: dict[str, tuple[Any, str]] = {
    "answer": (answers, "decode"),
    "answer_file": (answers, "write_whole"),
    "features": (pipeline.Store, "fill"),
    "feature_row": (Online, "batch"),
    "feature_file": (pipeline.Store, "_add"),
    "rewind": (Tracker, "rewind"),
    "lr": (optim, "learning_rate"),
    "log": (Tracker, "log"),
    "evaluation": (loop, "evaluate"),
    "best": (drafts, "save"),
    "half_best": (drafts, "save_file"),
    "checkpoint": (checkpoint, "save"),
    "half": (checkpoint, "save_file"),
    "rename": (os, "rename"),
    "json": (json, "dumps"),
}


def plant(
    place: str,
    call: int,
    after: bool = False,
    delay: float = 0.0,
    launcher: bool = False,
    note: Path | None = None,
) -> None:
    """Kill this process, or its `launcher`, at the n-th call of a function: before it, after it, or
    `delay` seconds after it began, wherever the process is then. A `note` is written first."""
    owner, name = PLACES[place]
    original: Callable[..., Any] = getattr(owner, name)
    victim = os.getppid() if launcher else os.getpid()
    calls = 0

    def kill() -> None:
        if note:
            note.write_text(str(os.getpid()))
        os.kill(victim, signal.SIGKILL)

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        due = calls == call
        if due and delay:
            threading.Timer(delay, kill).start()
        if due and not delay and not after:
            kill()
        result = original(*args, **options)
        if due and not delay:
            kill()
        return result

    setattr(owner, name, counted)


def main() -> None:
    rank = os.environ.get("RANK", "0")
    kills = json.loads(sys.argv[1])
    if rank in kills:
        plant(*kills[rank], note=Path(sys.argv[2], rank))
    sys.argv[:] = ["train.py", *sys.argv[3:]]
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main()

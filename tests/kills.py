"""Places in a job at which processes of it are killed.

`python -m tests.kills DEATH NOTES OVERRIDE…` is `train.py` that dies so: DEATH is a `Death` as
JSON, and NOTES a folder in which each process notes its id, and the one that kills that it did.
"""

import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.formats import draft_checkpoint
from train import loop, optim, training_checkpoint
from train.data import responses
from train.hidden_states import filling
from train.hidden_states.batches import OnlineBatches
from train.hidden_states.store import HiddenStateStore
from train.tracking import Tracker

PLACES: dict[str, tuple[Any, str]] = {
    "response": (responses, "decode"),
    "response_file": (responses, "write_whole"),
    "hidden_states": (filling, "fill_from_batches"),
    "hidden_state_row": (OnlineBatches, "batch"),
    "hidden_state_file": (HiddenStateStore, "add_documents"),
    "rewind": (Tracker, "rewind"),
    "lr": (optim, "learning_rate"),
    "log": (Tracker, "log"),
    "evaluation": (loop, "evaluate"),
    "best": (draft_checkpoint, "write_draft"),
    "half_best": (draft_checkpoint, "save_file"),
    "checkpoint": (training_checkpoint, "save"),
    "half": (training_checkpoint, "save_file"),
    "rename": (os, "rename"),
    "json": (json, "dumps"),
}
LAUNCHER = -1  # the rank of the launcher, among those who are killed


@dataclass(frozen=True)
class Death:
    """The end of some ranks, or of their launcher: `delay` seconds after the process of rank `at`
    calls a place for the n-th time, wherever all of them are then."""

    at: int
    place: str
    call: int
    delay: float
    victims: Sequence[int]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plant(
    place: str, call: int, after: bool = False, delay: float = 0.0, kill: Callable[[], None] = die
) -> None:
    """`kill` at the n-th call of a function: before it, after it, or `delay` seconds after its
    beginning."""
    owner, name = PLACES[place]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call:
            return original(*args, **options)
        if delay:
            threading.Timer(delay, kill).start()
        elif not after:
            kill()
        result = original(*args, **options)
        if not delay:
            kill()
        return result

    setattr(owner, name, counted)


def main() -> None:
    rank, death, notes = int(os.environ["RANK"]), Death(**json.loads(sys.argv[1])), sys.argv[2]
    Path(notes, str(rank)).write_text(str(os.getpid()))

    def kill() -> None:
        for victim in sorted(death.victims, key=lambda victim: victim == rank):  # itself last
            of_rank = Path(notes, str(victim))
            pid = os.getppid() if victim == LAUNCHER else int(of_rank.read_text())
            Path(notes, "killed").touch()
            os.kill(pid, signal.SIGKILL)

    if rank == death.at:
        plant(death.place, death.call, delay=death.delay, kill=kill)
    sys.argv[:] = ["train.py", *sys.argv[3:]]
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main()

"""Jobs on one process or on several that are killed at planted places and then go on to their end.

Each process of a job is a fork of one that has imported everything.
"""

import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from specdec import errors
from specdec.errors import ReportedByAnotherProcess, UserError
from tests.kills import plant
from tests.processes import fork_of_server
from tests.tiny import Tiny
from train import pipeline
from train.run_config import Config

Kill = tuple[str, int, bool]  # a place in `PLACES`, at which call, and whether after it


@dataclass(frozen=True)
class Life:
    """One life of a job: how many processes it has, whether they shard the draft, and at which
    place each of those that are to die does so, by rank."""

    processes: int = 1
    sharded: bool = False
    kills: Mapping[int, Kill] | None = None


@dataclass(frozen=True)
class Lives:
    """Jobs of a tiny target."""

    tiny: Tiny

    def run(
        self, folder: Path, drafter: str, lives: Sequence[Life], *more: str, fails: bool = False
    ) -> tuple[list[list[int]], str]:
        """Live these lives one after another. Returns how each process of each life ended (0, the
        negative exit code, or the signal) and what all printed. Raises AssertionError if the last
        life fails, or with `fails` if it does not."""
        log, config = folder.with_suffix(".log"), self.tiny.config(drafter, *more)
        log.touch()
        ends = [_lived(config, folder, log, life, number) for number, life in enumerate(lives)]
        printed = log.read_text()
        assert any(ends[-1]) == fails, printed[-3000:]
        return ends, printed


def _lived(config: Config, folder: Path, log: Path, life: Life, number: int) -> list[int]:
    """Run the processes of a life to their ends. Like a launcher, kill all once one failed."""
    ranks = range(life.processes)
    children = [fork_of_server(_be, config, folder, log, life, number, rank) for rank in ranks]
    running = {child.sentinel: child for child in children}
    while running:
        for ended in wait(list(running)):
            child = running.pop(ended)  # type: ignore[arg-type]
            child.join()
            if child.exitcode:
                for other in running.values():
                    other.kill()
    return [-(child.exitcode or 0) for child in children]


def _be(config: Config, folder: Path, log: Path, life: Life, number: int, rank: int) -> None:
    """Be one process of a life, to its end."""
    sys.stdout = sys.stderr = log.open("a")
    code = 1
    try:
        torch.set_num_threads(1)
        pipeline.finished = lambda *_: None  # type: ignore[assignment]
        if life.processes > 1:
            meeting = log.with_suffix(f".life-{number}")
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": life.processes}
            world |= {"LOCAL_WORLD_SIZE": life.processes, "ACCELERATE_USE_CPU": "true"}
            if life.sharded:
                world |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": 2}
            os.environ |= {name: str(value) for name, value in world.items()}
            where: dict[str, Any] = {"rank": rank, "world_size": life.processes}
            torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", **where)
        if life.kills and rank in life.kills:
            plant(*life.kills[rank])
        pipeline.run(config, folder)
        code = 0
    except ReportedByAnotherProcess:  # as `command` does: the other prints its line first
        time.sleep(errors.GRACE)
        code = 2
    except UserError as error:
        print(f"error: {error}")
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)

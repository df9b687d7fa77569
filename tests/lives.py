"""Jobs on one process or on several that are killed at planted places and then go on to their end.

Python starts once for all jobs of a test module: each process of a job is a fork of one that has
imported everything. `Lives.run` is what tests call; this file is also that process's program.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdec import errors
from specdec.errors import Elsewhere, UserError
from tests.kills import plant
from tests.processes import environment
from tests.tiny import REPOSITORY, Tiny, compose
from train import pipeline

Kill = tuple[str, int, bool]  # a place in `PLACES`, at which call, and whether after it


@dataclass(frozen=True)
class Life:
    """One life of a job: how many processes it has, whether they shard the draft, and at which
    place each of those that are to die does so, by rank."""

    processes: int = 1
    sharded: bool = False
    kills: Mapping[int, Kill] | None = None


class Lives:
    """The process whose forks the jobs of a tiny target are."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "tests.lives"],
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, folder: Path, drafter: str, lives: Sequence[Life], *more: str, fails: bool = False
    ) -> tuple[list[list[int]], str]:
        """Live these lives one after another. Returns how each process of each life ended (0, the
        negative exit code, or the signal) and what all printed. Raises AssertionError if the last
        life fails, or with `fails` if it does not."""
        assert self._driver.stdin is not None and self._driver.stdout is not None
        log = folder.with_suffix(".log")
        plan = {"overrides": self.tiny.overrides(drafter, *more), "folder": str(folder)}
        plan |= {"lives": [asdict(life) for life in lives], "log": str(log)}
        print(json.dumps(plan), file=self._driver.stdin, flush=True)
        ends: list[list[int]] = json.loads(self._driver.stdout.readline())
        printed = log.read_text()
        assert any(ends[-1]) == fails, printed[-3000:]
        return ends, printed

    def close(self) -> None:
        self._driver.communicate()


def _lived(plan: Mapping[str, Any], life: Life, number: int) -> list[int]:
    """Fork the processes of a life and wait for them. Like a launcher, kill all once one failed."""
    ranks: dict[int, int] = {}
    for rank in range(life.processes):
        if (child := os.fork()) == 0:
            _be(plan, life, number, rank)
        ranks[child] = rank
    ends, left = [0] * life.processes, set(ranks)
    while left:
        child, status = os.wait()
        left.remove(child)
        code = os.waitstatus_to_exitcode(status)
        ends[ranks[child]] = -code
        if code:
            for other in left:
                os.kill(other, signal.SIGKILL)
    return ends


def _be(plan: Mapping[str, Any], life: Life, number: int, rank: int) -> None:
    """Be one process of a life, to its end."""
    sys.stdout = sys.stderr = open(plan["log"], "a")  # noqa: SIM115
    code = 1
    try:
        if life.processes > 1:
            meeting = Path(plan["log"]).with_suffix(f".life-{number}")
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": life.processes}
            world |= {"LOCAL_WORLD_SIZE": life.processes, "ACCELERATE_USE_CPU": "true"}
            if life.sharded:
                world |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": 2}
            os.environ |= {name: str(value) for name, value in world.items()}
            where: dict[str, Any] = {"rank": rank, "world_size": life.processes}
            torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", **where)
        if life.kills and rank in life.kills:
            plant(*life.kills[rank])
        pipeline.run(compose(plan["overrides"]), plan["folder"])
        code = 0
    except Elsewhere:  # as `command` does: the other prints its line first
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


def main() -> None:
    torch.set_num_threads(1)
    pipeline.finished = lambda *_: None
    number = 0
    for line in sys.stdin:
        plan, ends = json.loads(line), []
        compose(
            plan["overrides"]
        )  # once, rather than in each fork: half of the time of a short job
        for described in plan["lives"]:
            kills = {int(rank): kill for rank, kill in (described.pop("kills") or {}).items()}
            number += 1
            ends.append(_lived(plan, Life(**described, kills=kills), number))
        print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    main()

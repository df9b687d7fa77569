"""Processes end with the launcher that started them, and only with a launcher.

Run alone: python -m pytest tests/train/test_launcher.py
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment
from tests.tiny import REPOSITORY

# A launcher and its two ranks, one of which waits for the other in a collective operation. All
# write to the same pipe, whose reader sees its end once all of them have ended.
LAUNCHER = """
import os, sys, time
import torch.distributed as dist
from train.launcher import end_with_launcher

for rank in (0, 1):
    if os.fork() == 0:
        end_with_launcher()
        dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
        os.write(1, b"begun\\n")  # in one piece, unlike print
        while rank == 1:
            time.sleep(1)
        dist.barrier()
time.sleep(3600)
"""


def lived_on(launcher: subprocess.Popen[str]) -> bool:
    """Whether anything lives on after this launcher was killed; if so, it is killed, too."""
    assert launcher.stdout is not None and launcher.stdin is not None
    assert [launcher.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    launcher.kill()
    try:
        launcher.communicate(timeout=30)  # to the end of the pipe; they look twice a second
    except subprocess.TimeoutExpired:
        return True
    return False


def test_ranks_that_wait_for_each_other_end_with_their_launcher(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "meeting")],
        cwd=REPOSITORY,
        env=environment() | {"TORCHELASTIC_RUN_ID": "none"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert not lived_on(launcher)


@pytest.mark.parametrize("launched", [False, True])
def test_only_a_launched_process_watches_its_parent(launched: bool) -> None:
    """A command that was started in a shell goes on after the shell has gone (nohup)."""
    found = "import threading as t, train.launcher as l; l.end_with_launcher(); "
    found += "l.end_with_launcher(); print([x.name for x in t.enumerate()])"
    known = {k: v for k, v in environment().items() if k != "TORCHELASTIC_RUN_ID"}
    known |= {"TORCHELASTIC_RUN_ID": "none"} if launched else {}
    done = subprocess.run(
        [sys.executable, "-c", found], cwd=REPOSITORY, env=known, capture_output=True, text=True
    )
    assert done.stdout == f"{['MainThread', *(['watch-launcher'] if launched else [])]}\n"


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(("work", "code"), [("--help", 0), ("drafter=none", 2)])
def test_a_launched_process_ends_before_python_is_taken_apart(
    work: str, code: int, launched: bool
) -> None:
    """Then no thread of torch.distributed can abort it. What is to run at exit does run."""
    program = "import atexit, os, runpy, sys; say = lambda text: os.write(2, text + b'\\n')\n"
    program += "class Kept:\n  def __del__(self, say=say): say(b'taken apart')\n"
    program += "kept = Kept(); atexit.register(say, b'at exit'); sys.argv[0] = 'train.py'\n"
    program += "runpy.run_path('train.py', run_name='__main__')"
    known = {k: v for k, v in environment().items() if k != "TORCHELASTIC_RUN_ID"}
    known |= {"TORCHELASTIC_RUN_ID": "none"} if launched else {}
    command = [sys.executable, "-c", program, work]
    done = subprocess.run(command, cwd=REPOSITORY, env=known, capture_output=True, text=True)
    assert done.returncode == code
    assert (done.stdout.count("\n") > 10) == (code == 0)  # all of the help is flushed
    said = [line for line in done.stderr.splitlines() if line in ("at exit", "taken apart")]
    assert said == ["at exit", *([] if launched else ["taken apart"])]

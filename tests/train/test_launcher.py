"""Processes end with the launcher that started them, and only with a launcher.

Run alone: python -m pytest tests/train/test_launcher.py
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment, process
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


# `train.py WORK` in forks of one new Python, launched or not: they end as that Python would, and
# write to WORK-LAUNCHED.out and .err in a folder. Prints their exit codes.
ENDING = """
import atexit, os, runpy, sys
# as if it were the program: what is imported keeps hold of __main__, and so of `kept`
runpy.run_module("train.pipeline", run_name="__main__", alter_sys=True)

def say(text):
    os.write(2, text + b"\\n")

class Kept:
    def __del__(self, say=say):
        say(b"taken apart")

codes = []
for case in sys.argv[2:]:
    work, launched = case.split(":")
    if (child := os.fork()) == 0:
        for number, kind in ((1, "out"), (2, "err")):
            path = f"{sys.argv[1]}/{work}-{launched}.{kind}"
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        if launched == "True":
            os.environ["TORCHELASTIC_RUN_ID"] = "none"
        kept = Kept()
        atexit.register(say, b"at exit")
        sys.argv = ["train.py", work]
        runpy.run_path("train.py", run_name="__main__")
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(*codes)
"""
ENDS = [(work, code, how) for work, code in (("--help", 0), ("drafter=none", 2)) for how in (0, 1)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The folder of what `ENDING` wrote, and the exit codes in the order of `ENDS`."""
    folder = tmp_path_factory.mktemp("ended")
    cases = [f"{work}:{bool(how)}" for work, _, how in ENDS]
    done = process(["-c", ENDING, str(folder), *cases])
    assert done.returncode == 0, done.stderr
    return folder, [int(code) for code in done.stdout.split()]


@pytest.mark.parametrize(("work", "code", "launched"), ENDS)
def test_a_launched_process_ends_before_python_is_taken_apart(
    ended: tuple[Path, list[int]], work: str, code: int, launched: int
) -> None:
    """Then no thread of torch.distributed can abort it. What is to run at exit does run."""
    folder, codes = ended
    assert codes[ENDS.index((work, code, launched))] == code
    output, errors = (
        (folder / f"{work}-{bool(launched)}.{kind}").read_text() for kind in ("out", "err")
    )
    assert (output.count("\n") > 10) == (code == 0)  # all of the help is flushed
    said = [line for line in errors.splitlines() if line in ("at exit", "taken apart")]
    assert said == ["at exit", *([] if launched else ["taken apart"])]

"""How threads wait on a busy machine, decided before torch is imported.

Run alone: python -m pytest tests/test_busy_cores.py (a few seconds)
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from specdec import busy_cores
from tests.processes import environment
from tests.tiny import REPOSITORY

PROGRAM = """
from specdec.signals import prepare_process
prepare_process()
import os, sys
assert "torch" not in sys.modules
print(os.environ.get("GOMP_SPINCOUNT"))
"""
needs_cores = pytest.mark.skipif(
    not Path("/proc/stat").exists() or len(os.sched_getaffinity(0)) < 2,
    reason="Linux with two cores",
)


def spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


@pytest.fixture
def busy() -> Iterator[None]:
    """A process on every core that does nothing else than compute."""
    others = [
        multiprocessing.get_context("fork").Process(target=spin, args=(core,), daemon=True)
        for core in os.sched_getaffinity(0)
    ]
    for other in others:
        other.start()
    yield
    for other in others:
        other.kill()
        other.join()


@needs_cores
@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
        ({"OMP_NUM_THREADS": "1"}, "None"),
    ],
)
def test_threads_wait_briefly_beside_a_busy_process(given: dict[str, str], said: str) -> None:
    """Unless the user has decided that, or there is one thread."""
    names = {*busy_cores.OWN_CHOICE, busy_cores.WAITING, "OMP_NUM_THREADS"}
    others = {name: x for name, x in environment().items() if name not in names}
    run = [sys.executable, "-c", PROGRAM]
    printed = subprocess.check_output(run, cwd=REPOSITORY, env=others | given, text=True)
    assert printed.strip() == said


def ticks(*cores: tuple[int, int]) -> str:
    """/proc/stat of cores that were busy and idle for so long, with time stolen by others."""
    lines = [
        f"cpu{n} {busy - 1} 0 0 {idle - 2} 2 0 0 1 0 0" for n, (busy, idle) in enumerate(cores)
    ]
    return "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 0 3", "btime 12", ""])


@pytest.mark.parametrize(
    ("after", "used"),
    [
        ([(10, 20), (10, 20), (10, 20)], 0.0),
        ([(20, 20), (10, 20), (20, 10)], 1.0),
        ([(15, 25), (13, 27), (20, 20)], 0.8),
    ],
)
def test_busy_cores_are_those_of_this_process(
    after: list[tuple[int, int]],
    used: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand: the third core is not this process's, and waiting for a disk is no work."""
    stat = tmp_path / "stat"
    stat.write_text(ticks((10, 20), (10, 20), (10, 20)), encoding="utf-8")
    monkeypatch.setattr(busy_cores, "STAT", stat)
    monkeypatch.setattr(busy_cores, "_cores", lambda: {0, 1})
    monkeypatch.setattr(
        busy_cores.time, "sleep", lambda _: stat.write_text(ticks(*after), encoding="utf-8")
    )
    assert busy_cores.busy_cores() == pytest.approx(used)


@pytest.mark.parametrize("used", [0.4, 0.5])
def test_half_a_core_is_busy(used: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_cores, "busy_cores", lambda: used)
    monkeypatch.setattr(busy_cores, "_cores", lambda: {0, 1})
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with patch.dict(os.environ, {}, clear=True):
        busy_cores.wait_briefly_if_busy()
        assert busy_cores.waits_briefly() == (used >= 0.5)


def test_a_system_without_such_times_counts_as_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy_cores, "STAT", tmp_path / "none")
    assert busy_cores.busy_cores(0) == 0

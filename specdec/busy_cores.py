"""Shorten the time that threads spin while they wait for each other, if the machine is busy.

The threads of a matrix product meet at its end, and those that come first spin. If another process
holds one of the cores, the last thread waits for that core while the others spin. With one busy
core of two, a vanilla step then takes four times as long as on an idle machine. Threads that go to
sleep soon are twice as fast there, but reach two thirds of the speed on an idle machine (figures:
docs/notebook/machines.md).

This module uses the standard library only: libgomp reads its settings once, when torch loads it.
"""

import os
import sys
import time
from pathlib import Path

STAT = Path("/proc/stat")  # Linux alone
SECONDS = 0.1  # duration of the measurement: ten ticks of the kernel's clock
BUSY = 0.5  # in cores
SPINS = "1000"  # about 30 microseconds; libgomp's default is milliseconds
SPINNING, WAITING = "GOMP_SPINCOUNT", "DRAFTSMITH_WAITING"
OWN_CHOICE = (SPINNING, "OMP_WAIT_POLICY", "KMP_BLOCKTIME")  # settings of the user


def wait_briefly_if_busy() -> None:
    """Make waiting threads sleep soon if other processes keep at least half a core busy. Do nothing
    if the user has set how threads wait, if there is one thread, or if torch is already imported.
    Child processes inherit the setting."""
    decided = "torch" in sys.modules or any(name in os.environ for name in OWN_CHOICE)
    if decided or os.environ.get("OMP_NUM_THREADS") == "1" or len(_cores()) < 2:
        return
    if busy_cores() >= BUSY:
        os.environ[SPINNING] = SPINS
        os.environ[WAITING] = "briefly"


def waits_briefly() -> bool:
    """Whether `wait_briefly_if_busy` has made threads sleep soon."""
    return WAITING in os.environ


def busy_cores(seconds: float = SECONDS) -> float:
    """The number of this process's cores that other processes use, measured over `seconds`; 0 if
    the system does not report it."""
    before = _times()
    time.sleep(seconds)
    after = _times()
    shares = []
    for core in before.keys() & after.keys() & _cores():
        busy, whole = (after[core][n] - before[core][n] for n in (0, 1))
        shares.append(busy / max(1, whole))
    return sum(shares)


def _cores() -> set[int]:
    """The numbers of the cores that this process may use; empty if the system does not report
    them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _times() -> dict[int, tuple[int, int]]:
    """The busy time and the total time of each core, in ticks of the kernel's clock."""
    try:
        lines = STAT.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    times = {}
    for line in lines:
        name, *counts = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, idle, iowait, *rest = map(int, counts[:8])
            busy = user + nice + system + sum(rest)  # interrupts, and what a hypervisor took
            times[int(name[3:])] = busy, busy + idle + iowait
    return times

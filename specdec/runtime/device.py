"""A device: its free memory, and work that it does after the host has asked for it.

A GPU computes while the host goes on. When the host looks at a result, it waits until the GPU has
done all earlier work, and the GPU then waits for the host.
"""

import gc
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor

CGROUP = Path("/sys/fs/cgroup")  # where Linux says what a container may use
GROUP = {"cpu": 1 << 20}  # numbers of a group of rows, by the type of the device
GROUP_ELSEWHERE = 1 << 28


def is_awaited(x: Tensor) -> bool:
    """Whether the host waits for a device when it looks at the values of `x`."""
    return x.device.type != "cpu"


def perhaps_any(mask: Tensor) -> bool:
    """Whether anything in a mask is set, if that is known without waiting, which it is on the CPU;
    else True. For rare cases whose treatment leaves all other cases as they are."""
    return is_awaited(mask) or bool(mask.any())


def row_groups(rows: int, size: int, device: torch.device) -> list[slice]:
    """The rows of a batch in groups, for work on `size` numbers for each row that no row shares.
    Steps over few numbers find them in a CPU's cache; a GPU works faster the more rows there are,
    and a group has a limit only because of its memory."""
    most = max(1, GROUP.get(device.type, GROUP_ELSEWHERE) // max(1, size))
    return [slice(first, first + most) for first in range(0, rows, most)]


def finish(device: torch.device) -> None:
    """Wait until a device has done all that it was asked for."""
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        module.synchronize(*([] if device.type == "mps" else [device]))


class Stopwatch:
    """Seconds between marks on a device's own timeline; nothing waits until they are read. On a
    GPU the marks are events, which it passes when it has done all earlier work; the host's clock
    would count that work where the host next waits."""

    def __init__(self, device: torch.device) -> None:
        event = getattr(torch.get_device_module(device), "Event", None)
        self._event = None if device.type == "cpu" else event

    def mark(self) -> Any:
        if self._event is None:
            return perf_counter()
        event = self._event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two marks; waits until the device has passed the second."""
        if self._event is None:
            own: float = end - start
            return own
        end.synchronize()
        seconds: float = start.elapsed_time(end) / 1000
        return seconds


def free_bytes(device: torch.device) -> int | None:
    """The bytes that a program can still allocate on a device, including caches that torch would
    reuse; None where this cannot be asked (a Mac's GPU)."""
    if device.type == "cpu":
        free = psutil.virtual_memory().available
        limit = _left_in_container()
        least: int | None = free if limit is None else min(free, limit)
        return least
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    reused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(free) + int(reused)


def release() -> None:
    """Give back what torch has kept of memory that nothing uses any more."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _left_in_container() -> int | None:
    """What a container's limit leaves, cached files counted as free; None without a limit."""
    try:
        most = (CGROUP / "memory.max").read_text(encoding="utf-8").strip()
        if not most.isdecimal():  # "max": no limit
            return None
        taken = int((CGROUP / "memory.current").read_text(encoding="utf-8"))
        figures = dict(
            line.split()
            for line in (CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
        return max(0, int(most) - taken + int(figures.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None

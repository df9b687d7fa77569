"""A device: its free memory, and its asynchronous work.

A GPU computes while the host continues. If the host reads a result, it waits until the GPU has done
all earlier work, and the GPU then waits for the host.
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
    """Whether the host must wait for a device to read the values of `x`."""
    return x.device.type != "cpu"


def perhaps_any(mask: Tensor) -> bool:
    """Whether anything in a mask is set, if that is known without waiting (on the CPU); else True.
    For rare cases whose treatment does not change the other cases."""
    return is_awaited(mask) or bool(mask.any())


def row_groups(rows: int, size: int, device: torch.device) -> list[slice]:
    """The rows of a batch in groups, for work on `size` numbers for each row. On a CPU, small
    groups stay in its cache; a GPU is faster with more rows, and only its memory limits a group."""
    most = max(1, GROUP.get(device.type, GROUP_ELSEWHERE) // max(1, size))
    return [slice(first, first + most) for first in range(0, rows, most)]


def finish(device: torch.device) -> None:
    """Wait until a device has done all its work."""
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        module.synchronize(*([] if device.type == "mps" else [device]))


class Stopwatch:
    """Seconds between marks on a device's own timeline, without waiting until they are read. On a
    GPU the marks are events, which the GPU reaches after all earlier work; the host's clock would
    add that work to the next point where the host waits."""

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
        """The time between two marks. Waits until the device has reached the second."""
        if self._event is None:
            own: float = end - start
            return own
        end.synchronize()
        seconds: float = start.elapsed_time(end) / 1000
        return seconds


def free_bytes(device: torch.device) -> int | None:
    """The bytes that a program can still allocate on a device, including memory that torch caches;
    None if the device cannot report it (a Mac's GPU)."""
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


def capability(device: torch.device) -> float:
    """The CUDA capability of a device, such as 8.9; 0 for a CPU. Other accelerators count as 9, a
    GPU that computes with every quantised format."""
    if device.type != "cuda":
        return 0.0 if device.type == "cpu" else 9.0
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10


def release() -> None:
    """Return memory that torch caches and nothing uses."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _left_in_container() -> int | None:
    """The bytes left under a container's memory limit, with cached files counted as free; None
    without a limit."""
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

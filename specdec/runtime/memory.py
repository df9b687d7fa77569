"""How much memory is free on a device."""

import gc
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")  # where Linux says what a container may use


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

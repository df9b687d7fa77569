"""What devices can do: this machine's as measured, others as their makers say."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from torch.nn import functional as F

from specdec.errors import require_known, require_within
from specdec.runtime.device import finish, free_bytes

GIB = 2**30
SIZE, WIDTH = 1024, 8192  # of the products that are timed: many rows, and a single row
REPEATS = 5


@dataclass(frozen=True)
class Device:
    """`memory` in bytes that a program can use, `bandwidth` in bytes/s, `rate` in operations/s of
    dense products in bfloat16. `achieved` and `streamed` are the shares of `rate` and `bandwidth`
    that passes reach. A `gpu` waits for its kernels to be started, however little they compute."""

    name: str
    memory: float
    bandwidth: float
    rate: float
    achieved: float = 0.4
    streamed: float = 0.6
    gpu: bool = True


def _gpu(gib: float, terabytes: float, teraflops: float) -> tuple[float, float, float]:
    return 0.95 * gib * GIB, terabytes * 1e12, teraflops * 1e12


# memory in GiB, bandwidth in TB/s and dense bfloat16 Tflop/s, from NVIDIA's data sheets
DEVICES = {
    name: Device(name, *_gpu(*figures))
    for name, figures in {
        "a100": (80, 2.04, 312),
        "a100-40": (40, 1.56, 312),
        "b200": (180, 8.0, 2250),
        "h100": (80, 3.35, 989),
        "h200": (141, 4.8, 989),
        "l4": (24, 0.3, 121),
        "l40s": (48, 0.864, 362),
        "rtx4090": (24, 1.008, 165),
    }.items()
}


@dataclass
class PlanningConfig:
    """The assumptions of `plan=true`. `device` is "here", which is measured, or a kind of GPU:
    a100, a100-40, b200, h100, h200, l4, l40s or rtx4090. `devices` is how many of them there are.
    `tokens` are those of all training texts (null: counted in the data), and `alpha` is the
    share of drafted tokens that is expected to be accepted."""

    device: str = "here"
    devices: int = 1
    tokens: int | None = None
    alpha: float = 0.6

    def __post_init__(self) -> None:
        require_known("planning", self, device=("here", *DEVICES))
        require_within("planning", self, devices=1, tokens=1, alpha=(0, 1))


@torch.inference_mode()
def measured(device: torch.device, dtype: torch.dtype) -> Device:
    """This machine's device, timed for about a second."""
    generator = torch.Generator().manual_seed(0)
    many, square, one, wide = (
        torch.randn(*shape, generator=generator).to(device, dtype)
        for shape in ((SIZE, SIZE), (SIZE, SIZE), (1, SIZE), (WIDTH * 4, SIZE))
    )
    together = _best(lambda: F.linear(many, square), device)
    single = _best(lambda: F.linear(one, wide), device)
    free = free_bytes(device)
    return Device(
        name="this machine",
        memory=float(free if free is not None else psutil.virtual_memory().total),
        bandwidth=wide.numel() * wide.itemsize / single,
        rate=2 * SIZE**3 / together,
        achieved=0.7,  # what is timed is a product alone
        streamed=0.8,
        gpu=device.type != "cpu",
    )


def _best(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of some timings, in seconds."""
    times = []
    for _ in range(1 + REPEATS):
        finish(device)
        start = time.perf_counter()
        run()
        finish(device)
        times.append(time.perf_counter() - start)
    return min(times)

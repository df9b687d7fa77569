"""Probes of this machine: whether it multiplies bfloat16 natively, and whether an alternative way
to compute something runs here, agrees with the public operator and is faster."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.errors import first_line

REPEATS = 15  # timings of each way, in turn; the best of each counts
GAIN = 1.1  # an alternative must be at least this many times as fast as the public way
NATIVE = 0.75  # native bfloat16 takes at most this share of float32's time; AMX takes .3


class Answer(NamedTuple):
    """Whether a way to compute something is used, and the reason."""

    used: bool
    reason: str


def compare(
    ours: Callable[[], Tensor],
    public: Callable[[], Tensor],
    limit: float,
    gain: float = GAIN,
    repeats: int = REPEATS,
) -> Answer:
    """Whether to use `ours` in place of `public`: it must run, differ from the public result by at
    most `limit` (relative to the latter's norm), and be at least `gain` times as fast."""
    expected = public().double()
    try:
        actual = ours().double()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel or compiler may fail in any way; the public way ran
        return Answer(False, first_line(error))
    off = float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
    if not off <= limit:  # true for NaN as well
        return Answer(False, f"the result differs by {off:.1e} from the expected one")
    own, theirs = seconds(ours, public, repeats=repeats)
    return Answer(theirs >= gain * own, f"{theirs / own:.2f} times as fast as without")


def seconds(*ways: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """The time that each way takes: the shortest of `repeats` timings; the ways take turns."""
    best = [float("inf")] * len(ways)
    for _ in range(repeats):
        for i, way in enumerate(ways):
            began = perf_counter()
            way()
            best[i] = min(best[i], perf_counter() - began)
    return best


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, to probe a product: several threads wait for each other, so
    their times mean nothing while another process computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Choice(NamedTuple):
    """A dtype by its name, and why it was chosen."""

    dtype: str
    reason: str


@cache
def native_dtype(device: str) -> Choice:
    """bfloat16 where `device` multiplies it natively, else float32. A GPU reports it. A CPU is
    timed: oneDNN may leave instructions of the CPU unused, or be capped to fewer."""
    kind = torch.device(device).type
    if kind == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice("bfloat16", "this GPU multiplies bfloat16 natively")
        return Choice("float32", "this GPU does not multiply bfloat16 natively")
    if kind != "cpu":
        return Choice("float32", f"bfloat16 is not tried on {kind} devices")
    if (ratio := bfloat16_time()) <= NATIVE:
        return Choice("bfloat16", "this CPU multiplies bfloat16 natively")
    slow = f"this CPU takes {ratio:.1f} times as long to multiply bfloat16 as float32"
    return Choice("float32", slow)


def bfloat16_time() -> float:
    """The time of a product of 128 rows in bfloat16 on the CPU, divided by that in float32."""
    with one_thread(), torch.inference_mode():
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, 512, generator=generator) for n in (128, 1024))
        low = x.bfloat16(), weight.bfloat16()
        in_bfloat16, in_float32 = seconds(lambda: F.linear(*low), lambda: F.linear(x, weight))
    return in_bfloat16 / in_float32

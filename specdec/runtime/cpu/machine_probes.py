"""Facts about this machine, and what follows from them: which dtype it multiplies natively, and
whether an alternative way to compute something runs here and agrees with the public operator.

Nothing here is chosen by the clock: what rounds otherwise would then change from run to run. A
choice follows from the processor and from results that any run on it finds again.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.compat import onednn_multiplies_bfloat16
from specdec.errors import first_line

CPUINFO = Path("/proc/cpuinfo")
INTEL = "GenuineIntel"
NO_CAP = ("", "ALL", "DEFAULT")  # values of ONEDNN_MAX_CPU_ISA that leave oneDNN all instructions
# beginnings of those that leave it AVX-512 for bfloat16
AVX512_BFLOAT16 = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10")


class ProbeResult(NamedTuple):
    """Whether a way to compute something is used, and the reason if it is not."""

    used: bool
    reason: str


def agreement(
    ours: Callable[[], Tensor], public: Callable[[], Tensor], limit: float
) -> ProbeResult:
    """Whether to use `ours` in place of `public`: it must run, and differ from the public result by
    at most `limit` (relative to the latter's norm)."""
    expected = public().double()
    try:
        actual = ours().double()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel or compiler may fail in any way; the public way ran
        return ProbeResult(False, first_line(error))
    off = float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
    if not off <= limit:  # true for NaN as well
        return ProbeResult(False, f"the result differs by {off:.1e} from the expected one")
    return ProbeResult(True, "")


def seconds(ways: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The time that each way takes: the shortest of `repeats` timings; the ways take turns. It may
    be told, and must not choose between ways that round differently."""
    best = [float("inf")] * len(ways)
    for _ in range(repeats):
        for i, way in enumerate(ways):
            began = perf_counter()
            way()
            best[i] = min(best[i], perf_counter() - began)
    return best


class Processor(NamedTuple):
    """A CPU as the system reports it; empty where it does not."""

    vendor: str
    model: str
    flags: frozenset[str]


@cache
def processor() -> Processor:
    """This machine's CPU, from /proc/cpuinfo."""
    lines = (
        CPUINFO.read_text(errors="replace", encoding="utf-8").splitlines()
        if CPUINFO.exists()
        else []
    )
    pairs = (line.partition(":")[::2] for line in lines)
    known = {name.strip(): value.strip() for name, value in pairs}
    flags = known.get("flags") or known.get("Features") or ""
    return Processor(
        known.get("vendor_id", ""), known.get("model name", ""), frozenset(flags.split())
    )


class DtypeChoice(NamedTuple):
    """A dtype by its name, and why it was chosen."""

    dtype: str
    reason: str


@cache
def native_dtype(device: str) -> DtypeChoice:
    """bfloat16 where `device` multiplies it natively, else float32. A GPU reports it; for a CPU see
    `multiplies_bfloat16`."""
    kind = torch.device(device).type
    if kind == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return DtypeChoice("bfloat16", "this GPU multiplies bfloat16 natively")
        return DtypeChoice("float32", "this GPU does not multiply bfloat16 natively")
    if kind != "cpu":
        return DtypeChoice("float32", f"bfloat16 is not tried on {kind} devices")
    if multiplies_bfloat16():
        return DtypeChoice("bfloat16", "this CPU multiplies bfloat16 natively")
    return DtypeChoice("float32", "this CPU does not multiply bfloat16 natively")


def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 natively on this CPU: by AMX on one of Intel, by AMX or
    AVX-512 on another x86, by its own instructions on an Arm; and only as far as the environment's
    ONEDNN_MAX_CPU_ISA lets it. An Intel CPU with avx512_bf16 and without AMX took 1.7 times as long
    as in float32 (docs/notebook/machines.md). What the system does not report counts as missing."""
    if not torch.backends.mkldnn.is_available() or not onednn_multiplies_bfloat16():
        return False
    cpu = processor()
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    cap = cap.upper()
    by_amx = "amx_bf16" in cpu.flags and (cap in NO_CAP or "AMX" in cap)
    by_avx = "avx512_bf16" in cpu.flags and (cap in NO_CAP or cap.startswith(AVX512_BFLOAT16))
    by_arm = "bf16" in cpu.flags
    return by_amx or by_arm or (by_avx and cpu.vendor != INTEL)

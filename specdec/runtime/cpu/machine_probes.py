"""Facts about this machine and the choices that depend on them: the dtype that it multiplies
natively, and whether an alternative operator runs here and agrees with the public one.

No timing decides here: alternatives round differently, so results would change from run to run. A
choice depends only on the processor and on results that every run on it reproduces.
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
    """Whether an alternative is used, and the reason if it is not."""

    used: bool
    reason: str


def agreement(
    ours: Callable[[], Tensor], public: Callable[[], Tensor], limit: float
) -> ProbeResult:
    """Whether to use `ours` in place of `public`: it must run, and its relative difference from the
    public result (in norm) must be at most `limit`."""
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
    """The shortest of `repeats` timings of each function; the functions take turns. Use it for
    reports only, never to choose between functions that round differently."""
    best = [float("inf")] * len(ways)
    for _ in range(repeats):
        for i, way in enumerate(ways):
            began = perf_counter()
            way()
            best[i] = min(best[i], perf_counter() - began)
    return best


class Processor(NamedTuple):
    """A CPU as the system reports it; fields are empty if it does not."""

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
    """A dtype by its name, and the reason for the choice."""

    dtype: str
    reason: str


@cache
def native_dtype(device: str) -> DtypeChoice:
    """bfloat16 if `device` multiplies it natively, else float32. A GPU reports this; for a CPU see
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
    """Whether oneDNN multiplies bfloat16 natively on this CPU: with AMX on Intel, with AMX or
    AVX-512 on another x86, with its own instructions on Arm, within the limit of the environment
    variable ONEDNN_MAX_CPU_ISA. An Intel CPU with avx512_bf16 and without AMX took 1.7 times as
    long as in float32 (docs/notebook/machines.md). Features that the system does not report count
    as missing."""
    if not torch.backends.mkldnn.is_available() or not onednn_multiplies_bfloat16():
        return False
    cpu = processor()
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    cap = cap.upper()
    by_amx = "amx_bf16" in cpu.flags and (cap in NO_CAP or "AMX" in cap)
    by_avx = "avx512_bf16" in cpu.flags and (cap in NO_CAP or cap.startswith(AVX512_BFLOAT16))
    by_arm = "bf16" in cpu.flags
    return by_amx or by_arm or (by_avx and cpu.vendor != INTEL)

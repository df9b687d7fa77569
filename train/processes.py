"""The processes of a run, plain or sharded, as accelerate starts them."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)

from specdec.errors import UserError, require

if TYPE_CHECKING:
    from train.config import Config

T = TypeVar("T")


def accelerator_of(cfg: "Config") -> Accelerator:
    """The processes as `accelerate launch` started them, plain or sharded.

    accelerate 1.15 shards only on GPUs and the like: if asked for FSDP on CPU processes, it
    silently replicates the model. Its FSDP2 does run on CPUs once its state is set by hand, which
    no public option does. Every process starts from the same weights, so none are broadcast. Raises
    UserError for FSDP1, and if `target.dtype=auto` stands for different types on the machines.
    """
    patient = InitProcessGroupKwargs(timeout=timedelta(days=1))  # wait for the slowest process
    sharding = None
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        require(
            os.environ.get("FSDP_VERSION") == "2",
            "drafters are sharded by FSDP2 only: give --fsdp_version 2 to accelerate launch",
        )
        sharding = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    AcceleratorState._reset_state()  # an earlier run in this process may have another precision
    native = "bf16" if cfg.target.dtype == "bfloat16" else "no"
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=native if cfg.loop.precision == "auto" else cfg.loop.precision,
        kwargs_handlers=[patient],
        fsdp_plugin=sharding,
    )
    if sharding and accelerator.distributed_type is DistributedType.MULTI_CPU:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = sharding
    if len(dtypes := set(gather_object([cfg.target.dtype]))) > 1:
        raise UserError(
            f"the machines of this run chose different dtypes for the target ({dtypes}): give "
            "target.dtype=float32 or target.dtype=bfloat16"
        )
    return accelerator


def from_main(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """What `work` returns in the main process, which alone does it, in all processes. A UserError
    there is raised in all of them, so that none waits for the others."""
    outcome: list[T | UserError | None] = [None]
    if accelerator.is_main_process:
        try:
            outcome = [work()]
        except UserError as error:
            outcome = [error]
    (result,) = broadcast_object_list(outcome)
    if isinstance(result, UserError):
        raise result
    return result

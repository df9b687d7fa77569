"""The processes of a run, plain or sharded, as accelerate starts them."""

import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    gather_object,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from specdec.compat import forget_precision
from specdec.errors import UserError, require
from specdec.ranks import Ranks
from specdec.targets.loading import TargetLoader
from specdec.targets.target_config import TargetConfig, device_of
from train.launcher import end_with_launcher

# What a sharded draft computes is what a replicated one computes: weights, gradients and their sum
# over the processes are float32, and autocast alone (`Accelerator.autocast`) chooses what is
# multiplied in bfloat16. accelerate's own policy would gather weights in bfloat16, sum gradients in
# it, and round every floating input and output of `forward`, even inside dataclasses: log Z, the
# anchors' weights, the loss.
EXACT = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
OTHERS = ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")  # as in ACCELERATE_USE_…


def accelerator_of(target: TargetConfig, precision: str = "auto") -> Accelerator:
    """The processes as `accelerate launch` started them, plain or sharded, each on its own device.
    `accelerator.device` is the device of a process's target, draft and batches; `precision` is that
    of `LoopConfig`.

    accelerate 1.15 shards only on GPUs and the like: if asked for FSDP on CPU processes, it
    silently replicates the model. Its FSDP2 does run on CPUs once its state is set by hand, which
    no public option does. Every process starts from the same weights, so none are broadcast. A
    draft is one unit of sharding, since methods read weights outside of their modules' forward
    passes. Raises UserError for FSDP1 and other modes of accelerate, and if `target.dtype=auto`
    differs between machines; see also `_placed`.
    """
    end_with_launcher()
    patient = InitProcessGroupKwargs(timeout=timedelta(days=1))  # wait for the slowest process
    for kind in OTHERS:
        require(
            os.environ.get(f"ACCELERATE_USE_{kind}", "false").lower() != "true",
            f"accelerate's {kind.lower()} is not supported: drafts are trained on one process, on "
            "several, or sharded by FSDP2 (--use_fsdp --fsdp_version 2)",
        )
    sharding = None
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        require(
            os.environ.get("FSDP_VERSION") == "2",
            "drafters are sharded by FSDP2 only: give --fsdp_version 2 to accelerate launch",
        )
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="NO_WRAP",
            activation_checkpointing=False,
            cpu_ram_efficient_loading=False,
            mixed_precision_policy=EXACT,
        )
    forget_precision()  # an earlier run in this process may have another
    native = "bf16" if target.dtype == "bfloat16" else "no"
    device = _placed(device_of(target.device), patient)
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision=native if precision == "auto" else precision,
        kwargs_handlers=[patient],
        # the loop accumulates by itself; the launcher's number would divide the loss again
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        fsdp_plugin=sharding,
    )
    if sharding and accelerator.distributed_type is DistributedType.MULTI_CPU:
        if accelerator.mixed_precision != "no":  # as accelerate's state does on a GPU
            sharding.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = sharding
    if len(dtypes := set(gather_object([target.dtype]))) > 1:
        raise UserError(
            f"the machines of this run chose different dtypes for the target ({dtypes}): give "
            "target.dtype=float32 or target.dtype=bfloat16"
        )
    return accelerator


def ranks_of(accelerator: Accelerator, target: TargetLoader | None = None) -> Ranks:
    """The processes as `Ranks`; they may hold the target together."""
    team = None if target is None else target.team
    return Ranks(accelerator.process_index, accelerator.num_processes, team)


def _placed(device: torch.device, options: InitProcessGroupKwargs) -> torch.device:
    """Start accelerate's processes, each on the device that `target.device` resolves to. By
    default, accelerate would put the draft on the first GPU of any machine that has one. Several
    processes on GPUs take one each. Raises UserError if one device is named for several processes,
    or one that accelerate does not support."""
    state = PartialState(cpu=device.type == "cpu", **options.to_kwargs())
    if state.num_processes == 1:
        state.device = device
        if device.index is not None and device.type != "cpu":
            torch.get_device_module(device).set_device(device)
    require(
        state.device.type == device.type,
        f"target.device={device}: accelerate started {state.num_processes} processes on "
        f"{state.device.type}: leave target.device out",
    )
    require(
        device.index is None or state.num_processes == 1,
        f"target.device={device} names one device for {state.num_processes} processes: give "
        f"target.device={device.type}, and each process takes its own",
    )
    chosen: torch.device = state.device
    return chosen

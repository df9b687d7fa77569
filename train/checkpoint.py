"""What a run needs to continue exactly where it stopped: weights, optimisers, position.

A checkpoint is a folder: `training.safetensors` (the weights and the optimisers' state in float32)
and `training.json` (position, settings of the optimisers, the best figures so far). It appears
whole or not at all. It holds no generator's state, since all that a step draws follows from its
rows, and says nothing of processes: any number of them can continue from it.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from specdec.errors import UserError
from specdec.files import read_record, replaced
from specdec.formats.draft import require_same, untied
from specdec.measure.results import HeldOut
from train.processes import from_main

TENSORS, STATE = "training.safetensors", "training.json"
Optimizers = Sequence[torch.optim.Optimizer]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


@dataclass
class Best:
    """The best held-out value so far, the step at which it was found, and all figures there."""

    value: float
    step: int
    figures: HeldOut


@dataclass
class State:
    """How far a run has come."""

    step: int = 0
    rows: int = 0  # packed rows read so far: the position in the data
    tokens: int = 0  # in these rows
    seconds: float = 0.0
    best: Best | None = None
    waited: int = 0  # evaluations since the best one
    optimizer: list[dict[str, Any]] = field(default_factory=list)  # groups, as last saved


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict, even of a sharded model, on the main process; elsewhere it is empty.
    All processes call it."""
    return dict(get_model_state_dict(model, options=WHOLE))  # type: ignore[arg-type]


def named(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a checkpoint of this model holds, by name, in every process and without
    gathering anything: where the model is sharded, a tensor has the shape of the whole, but only
    this process's part of the numbers. A tensor of two names (tied embeddings) has the first."""
    ours: dict[str, Any] = dict(get_model_state_dict(model))
    parts = {n: x.to_local() if isinstance(x, DTensor) else x for n, x in ours.items()}
    return {n: ours[n] for n in untied(parts)}


def save(folder: Path, model: nn.Module, optimizers: Optimizers, state: State, main: bool) -> None:
    """Write the checkpoint `step-N` of this state and drop all but the newest two."""
    names, gathered = list(named(model)), weights(model)
    whole: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizers, options=WHOLE))
    if not main:  # only the main process has the whole state
        return
    tensors = {f"model.{n}": gathered[n] for n in names}
    for name, entry in whole["state"].items():
        tensors |= {f"optimizer.{name}|{key}": value for key, value in entry.items()}
    state.optimizer = whole["param_groups"]
    with replaced(folder / f"step-{state.step:07d}") as partial:
        contiguous = {n: x.detach().cpu().contiguous() for n, x in tensors.items()}
        save_file(contiguous, partial / TENSORS)
        (partial / STATE).write_text(json.dumps(asdict(state), indent=1))
    for old in steps(folder)[:-2]:
        shutil.rmtree(old)


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdecimal())


def load(
    folder: Path, model: nn.Module, optimizers: Optimizers, accelerator: Accelerator
) -> State | None:
    """Restore the newest checkpoint in `folder`; return its state, or None if there is none. The
    main process reads it and hands each other one its part, one tensor at a time. Raises UserError,
    in every process, if the checkpoint is damaged or belongs to another model."""
    tensors: dict[str, Tensor] = {}
    ours, known = named(model), get_model_state_dict(model).keys()

    def read() -> State | None:
        if not (found := steps(folder)):
            return None
        try:
            tensors.update(load_file(found[-1] / TENSORS))
            state = read_record(State, found[-1] / STATE)
        except (UserError, SafetensorError, OSError) as error:
            raise UserError(
                f"{found[-1]} cannot be read ({error}): delete that folder to use the one before it"
            ) from error
        there = {n: x for n, x in _of("model.", tensors).items() if n in ours or n not in known}
        require_same(there, ours, found[-1] / TENSORS)
        return state

    state = from_main(accelerator, read)
    if state is None:
        return None
    handed = accelerator.num_processes > 1
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=handed, strict=False)
    set_model_state_dict(model, _of("model.", tensors), options=options)  # type: ignore[arg-type]
    whole: dict[str, Any] = {}
    if accelerator.is_main_process:
        entries: dict[str, dict[str, Tensor]] = {}
        for name, x in _of("optimizer.", tensors).items():
            parameter, key = name.split("|")
            entries.setdefault(parameter, {})[key] = x
        whole = {"state": entries, "param_groups": state.optimizer}
    set_optimizer_state_dict(model, optimizers, whole, options=options)
    return state


def _of(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}

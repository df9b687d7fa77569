"""The state that a run needs to continue exactly where it stopped: weights, optimisers, position.

A checkpoint is a folder: `training.safetensors` (the weights and the optimisers' state in float32)
and `training.json` (position, settings of the optimisers, the best figures so far). It is complete
or absent. It holds no generator's state, since all random numbers of a step depend on its rows, and
nothing about processes: any number of them can continue from it. Both files have a checksum, and
their content is compared with the model before it is used, since an optimiser does not check its
state.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
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

from specdec.errors import Unreadable, UserError, first_line, require, require_within
from specdec.files import read_record, reading, replaced, require_file, write_json
from specdec.formats.stored_tensors import require_finite, require_same, untied
from specdec.integrity import Damaged, of_tensors
from specdec.measure.results import HeldOut
from specdec.progress import tell
from specdec.ranks import Ranks

TENSORS, STATE = "training.safetensors", "training.json"
Optimizers = Sequence[torch.optim.Optimizer]
MOMENTS = ({"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"})  # keys of the optimisers' state
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


@dataclass
class Best:
    """The best held-out value so far, the step at which it was found, and all figures there."""

    value: float
    step: int
    figures: HeldOut


@dataclass
class State:
    """The progress of a run."""

    step: int = 0
    rows: int = 0  # packed rows read so far: the position in the data
    tokens: int = 0  # in these rows
    seconds: float = 0.0
    waiting: float = 0.0  # seconds spent waiting for stored hidden states
    best: Best | None = None
    waited: int = 0  # evaluations since the best one
    evaluated: list[tuple[int, float]] = field(default_factory=list)  # the steps, and τ at T = 0
    gamma: int = 0  # γ of the chains for that τ; 0: the trained depth
    statistics: list[list[float]] = field(default_factory=list)  # sums since the last record
    owed: bool = False  # the evaluation of this step is still to come: SIGTERM was faster
    optimizer: list[dict[str, Any]] = field(default_factory=list)  # groups, as last saved
    # empty in checkpoints of earlier versions:
    run: str = ""  # the identity of the run
    metrics: str = ""  # the checksum of its metrics.jsonl
    tensors: str = ""  # checksum of the tensors

    def __post_init__(self) -> None:
        require_within("state", self, step=0, rows=0, tokens=0, seconds=0, waiting=0, waited=0)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The complete state dict, even of a sharded model, on the main process; elsewhere it is empty.
    All processes call it."""
    return dict(get_model_state_dict(model, options=WHOLE))  # type: ignore[arg-type]


def named(model: nn.Module) -> dict[str, Tensor]:
    """The tensors in a checkpoint of this model, by name, in every process and without gathering
    anything: in a sharded model, a tensor has the full shape, but only this process's part of the
    values. A tensor with two names (tied embeddings) has the first."""
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
    contiguous = {n: x.detach().cpu().contiguous() for n, x in tensors.items()}
    state.tensors = of_tensors(contiguous)
    with replaced(folder / _name(state)) as partial:
        save_file(contiguous, partial / TENSORS)
        write_json(partial / STATE, asdict(state))
    for old in steps(folder)[:-2]:
        shutil.rmtree(old)


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdecimal())


def load(
    folder: Path,
    model: nn.Module,
    optimizers: Optimizers,
    ranks: Ranks,
    run: str = "",
) -> State | None:
    """Restore the newest intact checkpoint of this run in `folder`; return its state, or None if
    there is no checkpoint. The main process reads it and sends every other process its part, one
    tensor at a time. A newer, damaged one is reported and renamed. Raises UserError, in every
    process, if none can be used, and Unreadable if the newest cannot be read."""
    tensors: dict[str, Tensor] = {}
    ours = named(model)
    every: dict[str, Any] = dict(get_model_state_dict(model))

    def read() -> State | None:
        damaged: list[tuple[Path, str]] = []
        for place in reversed(steps(folder)):
            try:
                state, stored = _read(place, ours, every, run)
            except Unreadable:  # it may be sound: training must not go back to an older one
                raise
            except (UserError, SafetensorError, OSError) as error:
                damaged.append((place, first_line(error)))
                continue
            tensors.update(stored)
            for bad, reason in damaged:
                aside = bad.with_name(f"damaged-{bad.name}")
                shutil.rmtree(aside, ignore_errors=True)
                bad.rename(aside)
                tell(
                    f"{bad} cannot be used ({reason}): it is now {aside.name}, and training goes "
                    f"on from {place.name}"
                )
            return state
        if damaged:
            place, reason = damaged[0]
            raise UserError(
                f"{place} cannot be used ({reason}), and there is no older checkpoint that can: "
                f"put it back, or delete {folder} to train again from the beginning"
            )
        return None

    state = ranks.first(read)
    if state is None:
        return None
    handed = ranks.world > 1
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=handed, strict=False)
    set_model_state_dict(model, _of("model.", tensors), options=options)  # type: ignore[arg-type]
    whole: dict[str, Any] = {}
    if ranks.rank == 0:
        entries: dict[str, dict[str, Tensor]] = {}
        for name, x in _of("optimizer.", tensors).items():
            parameter, key = name.split("|")
            entries.setdefault(parameter, {})[key] = x
        whole = {"state": entries, "param_groups": state.optimizer}
    set_optimizer_state_dict(model, optimizers, whole, options=options)
    return state


def _read(
    place: Path, ours: Mapping[str, Tensor], every: Mapping[str, Tensor], run: str
) -> tuple[State, dict[str, Tensor]]:
    """A checkpoint's state and tensors. `ours` are the tensors of the model that it must hold, and
    `every` those by all names. Raises UserError if it is damaged or belongs to another run or
    model."""
    state = read_record(State, place / STATE)
    require(place.name == _name(state), f"{place / STATE} is of step {state.step}")
    require(not run or state.run in ("", run), f"{place / STATE} is of another run")
    path = place / TENSORS
    require_file(path)
    with reading(path):
        tensors = load_file(path)
    if state.tensors and state.tensors != of_tensors(tensors):
        raise Damaged(f"{path} is damaged, or is not the file of this step (its checksum differs)")
    stored = _of("model.", tensors)
    stored = {n: x for n, x in stored.items() if n in ours or n not in every}  # tied ones: once
    require_same(stored, ours, path)
    for name, x in stored.items():
        kind = ours[name].dtype
        require(x.dtype == kind, f"{path}: tensor {name!r} is of type {x.dtype}, not {kind}")
    require_finite(tensors, path)
    moments: dict[str, set[str]] = {}
    for name, x in _of("optimizer.", tensors).items():
        parameter, _, key = name.partition("|")
        moments.setdefault(parameter, set()).add(key)
        shape = every[parameter].shape if parameter in every else None
        fits = x.numel() == 1 if key == "step" else x.shape == shape
        sane = key in ("exp_avg", "momentum_buffer") or bool((x >= 0).all())
        require(
            parameter in every and fits and sane and x.is_floating_point(),
            f"{path}: the optimiser's {name!r} does not fit the model",
        )
    for parameter, keys in moments.items():
        require(keys in MOMENTS, f"{path}: the optimiser's state of {parameter!r} is not complete")
    for group in state.optimizer:
        names = group.get("params")
        known = isinstance(names, list) and all(isinstance(n, str) and n in every for n in names)
        numbers = (group.get(name) for name in ("lr", "scale", "weight_decay"))
        require(
            known and all(isinstance(x, float | int) and math.isfinite(x) for x in numbers),
            f"{place / STATE}: optimizer: a group does not fit the model",
        )
    return state, tensors


def _name(state: State) -> str:
    return f"step-{state.step:07d}"


def _of(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}

"""A target that is larger than one device: its layers are distributed over GPUs, memory and disk.

The parts around the layers stay on the target's own device, where drafts read them. accelerate's
hooks move a layer's inputs to the layer's device, and bring an offloaded layer to the target's
device while it runs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import align_module_device, compute_module_sizes, get_max_memory
from torch import Tensor, nn

from specdec.errors import UserError, first_line, require

AUTO = "auto"
KEPT = 0.1  # fraction of each device's memory for caches and activations
DISK = "disk"

Place = int | str  # a GPU's number, "cpu" or "disk", as accelerate names them


def device_map(
    model: nn.Module,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
    max_memory: Mapping[int | str, str],
    itemsize: float | None = None,
) -> dict[str, Place]:
    """The device of each part of a model (on the meta device) with `count` layers. All parts around
    the layers go to `device`, then layer after layer to that device, to the other GPUs, to the
    CPU's memory and to disk. Each is filled up to `max_memory`, such as {0: "70GB", "cpu":
    "100GB"}, or up to nine tenths of its free memory. GPUs share the layers evenly. A weight takes
    as many bytes as one of `dtype`, or in quantised layers `itemsize`. Raises UserError if the
    memory cannot be read, or if `device` does not hold even the parts and one layer."""
    budgets = _budgets(device, max_memory)
    sizes: dict[str, float] = compute_module_sizes(model.to(dtype), dtype=dtype)
    stacks = {id(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count}
    fixed, layers = list[str](), list[str]()

    def walk(module: nn.Module, name: str) -> None:
        inside = any(id(m) in stacks for m in module.modules() if m is not module)
        if id(module) in stacks:
            layers.extend(f"{name}.{k}" for k in range(count))
        elif not inside:
            fixed.append(name)
        else:
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            fixed.extend(f"{name}.{leaf}".lstrip(".") for leaf, _ in own)
            for child, part in module.named_children():
                walk(part, f"{name}.{child}".lstrip("."))

    walk(model, "")
    if itemsize is not None:
        sizes |= {name: sizes[name] * itemsize / dtype.itemsize for name in layers}
    own, largest = sum(sizes[n] for n in fixed), max((sizes[n] for n in layers), default=0)
    total, (first, *_) = sum(sizes[n] for n in layers), budgets
    room = {place: float(size) for place, size in budgets.items()}
    room[first] -= own
    gpus = [place for place in room if isinstance(place, int)]
    if len(gpus) > 1 and sum(room[place] for place in gpus) >= total:
        share = (own + total) / len(gpus) + largest
        for place in gpus:
            room[place] = min(room[place], share - own * (place == first))
    if total > sum(room.values()) and DISK not in room:  # layers from disk pass through `device`
        room[first] -= largest
    require(
        room[first] >= 0,
        f"target.device_map={AUTO}: {_gb(own)} of embedding, head and norms and a layer of "
        f"{_gb(largest)} do not fit on {first!r}, which has {_gb(budgets[first])} for them: "
        "give more in target.max_memory, or a smaller target",
    )
    places: dict[str, Place] = dict.fromkeys(fixed, first)
    free = list(room)
    for name in layers:
        while free and room[free[0]] < sizes[name]:
            free.pop(0)
        places[name] = free[0] if free else DISK
        if free:
            room[free[0]] -= sizes[name]
    return places


def _budgets(device: torch.device, max_memory: Mapping[int | str, str]) -> dict[Place, int]:
    """The bytes that each place may hold: first the target's own device, then other GPUs, then the
    CPU's memory."""

    def number(x: Place) -> Place:
        return int(x) if str(x).isdigit() else x

    named: dict[Any, Any] = {number(place): number(x) for place, x in max_memory.items()}
    try:
        memory = get_max_memory(named) if named else get_max_memory()
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"target.max_memory={dict(max_memory)}: {first_line(error)}: give sizes such as "
            "{0: 70GB, cpu: 100GB}"
        ) from error
    if not named:
        memory = {place: int(size * (1 - KEPT)) for place, size in memory.items()}
    first: Place = (device.index or 0) if device.type == "cuda" else device.type
    if device.type == "cpu":
        memory = {place: size for place, size in memory.items() if not isinstance(place, int)}
    require(
        first in memory,
        f"target.max_memory={dict(max_memory)} leaves out {first!r}, where the target's embedding "
        f"and head are: add a size for it, such as {first}: 20GB",
    )
    return {first: memory[first]} | {k: int(x) for k, x in memory.items() if k not in (first, DISK)}


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def is_spread(model: Any) -> bool:
    """Whether a model was loaded with a device map, so that hooks move its layers' inputs."""
    return len(getattr(model, "hf_device_map", None) or {}) > 1


def in_words(model: Any) -> str:
    """The number of mapped parts in each place, for the first line that a program prints."""
    places = [str(place) for name, place in model.hf_device_map.items() if name[-1:].isdigit()]
    counts = {place: places.count(place) for place in dict.fromkeys(places)}
    return "layers: " + ", ".join(f"{n} on {place}" for place, n in counts.items())


@torch.no_grad()
def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state of a module by name, in sorted order; offloaded tensors are brought to memory one
    at a time."""
    for name in sorted(module.state_dict()):
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        with align_module_device(owner):
            yield name, getattr(owner, leaf).detach().clone()

"""Tensors in files: which of them a network has, and whether they are its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.compat import storage_of
from specdec.errors import UserError, require


def untied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with only the first name of a tensor that has two (tied embeddings)."""
    first: dict[Any, str] = {}
    for name, x in state.items():
        first.setdefault((storage_of(x), x.storage_offset(), x.shape), name)
    return {name: state[name] for name in first.values()}


def require_same(
    stored: Mapping[str, Any], wanted: Mapping[str, Tensor], where: Path | str
) -> None:
    """Raise UserError naming the first tensor that is missing, extra or of another shape. `stored`
    are tensors, or the slices of a file."""
    for name, x in wanted.items():
        require(name in stored, f"{where}: tensor {name!r} is missing")
        there = stored[name]
        theirs = list(there.shape if isinstance(there, Tensor) else there.get_shape())
        ours = list(x.shape)
        require(ours == theirs, f"{where}: tensor {name!r} has shape {theirs}, not {ours}")
    for name in stored:
        require(name in wanted, f"{where}: tensor {name!r} does not belong there")


def require_finite(tensors: Mapping[str, Tensor], where: Path | str) -> None:
    """Raise UserError naming the first tensor with a value that is not a finite number."""
    for name, x in tensors.items():
        if x.is_floating_point() and not x.isfinite().all():
            raise UserError(f"{where}: tensor {name!r} has values that are not finite")

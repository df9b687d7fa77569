"""A wrapper that hides a frozen object, such as the target, from the module that holds it."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Frozen(Generic[T]):
    """Holds an object so that it is not a submodule of the module that refers to it: it is not
    trained, moved or saved with that module. PyTorch registers only attributes that are modules."""

    held: T

"""A reference to something frozen, such as the target, from a module that trains."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Frozen(Generic[T]):
    """What a module holds in this wrapper is not a part of it: it is neither trained, nor moved,
    nor saved with the module, since PyTorch looks only at attributes that are modules."""

    held: T

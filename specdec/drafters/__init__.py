"""The drafting methods by name (see `registry`), and the base class of every drafter."""

from specdec.drafters.base import Drafter, frequent_tokens
from specdec.drafters.registry import (
    DRAFTERS,
    family,
    installed,
    shipped,
    with_copying,
)

__all__ = ["DRAFTERS", "Drafter", "family"]
__all__ += ["frequent_tokens", "installed", "shipped", "with_copying"]

"""The drafter families by name (see `registry`), and the class that every drafter extends."""

from specdec.drafters.predictor import frequent_tokens
from specdec.drafters.proposer import Drafter
from specdec.drafters.registry import (
    DRAFTERS,
    FAMILIES,
    add_installed,
    family,
    installed,
    with_copying,
)

__all__ = ["DRAFTERS", "FAMILIES", "Drafter", "add_installed", "family"]
__all__ += ["frequent_tokens", "installed", "with_copying"]

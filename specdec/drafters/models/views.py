"""Views of the target: modules that hold its very weights, but other layers or another attention.

A view is made of copies of the target's modules that share their parameters, so that nothing of
the target itself is touched, and no weight is copied.
"""

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from specdec.drafters.base import Sizes
from specdec.errors import require
from specdec.target.base import Target
from specdec.target.parts import Parts


@dataclass(kw_only=True)
class ViewSizes(Sizes):
    """`layers`: how many of the target's layers draft."""

    layers: int


def decoder_layers(target: Parts, name: str) -> int:
    """How many layers a decoder-only target has; UserError for one with an encoder."""
    whole = getattr(target.model.config, "is_encoder_decoder", False)
    require(
        not whole, f"drafter={name} needs a decoder-only target, and this one has an encoder too"
    )
    return int(target.config.num_hidden_layers)


def shallow(target: Target, layers: int) -> Any:
    """The target's base model with its first layers only."""
    base = target.model.base_model
    path = next(name for name, m in base.named_modules() if m is target.layers).split(".")
    top = outer = twin(base)
    for name in path[:-1]:
        inner = twin(outer.get_submodule(name))
        outer._modules[name], outer = inner, inner
    outer._modules[path[-1]] = nn.ModuleList(list(target.layers)[:layers])
    return top


def with_weights(target: Target) -> Any:
    """The target's base model with the one attention of transformers that returns its weights.
    It has configs of its own, from which its modules read which attention they compute."""
    seen: dict[int, Any] = {}

    def view(module: nn.Module) -> nn.Module:
        found = twin(module)
        for name, inner in module.named_children():
            found._modules[name] = view(inner)
        theirs = getattr(module, "config", None)
        if isinstance(theirs, PreTrainedConfig):
            ours = copy.deepcopy(theirs, seen)
            ours._attn_implementation = "eager"
            found.config = ours
        return found

    return view(target.model.base_model)


def twin(module: nn.Module) -> Any:
    """The same module, with dicts of submodules and of hooks of its own."""
    found = copy.copy(module)
    found._modules = dict(module._modules)
    found._forward_hooks = copy.copy(module._forward_hooks)
    return found

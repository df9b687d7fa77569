"""LoRA adapters on the target's own layers (Hu et al. 2022) that belong to a draft: they add
(alpha / rank) B A x to W x in a view of the target, and the target itself never has them.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from specdec.drafters.pretrained import LoraOptions, with_adapters
from specdec.drafters.views import shallow
from specdec.errors import require
from specdec.targets.parts import TargetParts, body_of
from specdec.targets.target import Target

Adapted = tuple[str, int, int]  # a linear layer: name in the base model, widths of input and output


class Adapters(nn.Module):
    """A and B of each layer in `adapted`, which `view` uses. They are trained, moved and saved with
    the draft; with rank 0 there are none."""

    pairs: Any  # A and B of each adapted layer, in their order

    def __init__(self, lora: LoraOptions, adapted: Sequence[Adapted]) -> None:
        super().__init__()
        self.lora, self.adapted = lora, adapted
        plain = partial(nn.Linear, bias=False)
        pairs = (nn.ModuleList([plain(n, lora.rank), plain(lora.rank, m)]) for _, n, m in adapted)
        self.pairs = nn.ModuleList(pairs)
        self.dropout = nn.Dropout(lora.dropout)

    def start(self) -> None:
        """Start without effect: B is zero, and A has nn.Linear's default, as in peft."""
        for _, up in self.pairs:
            up.weight.zero_()

    def view(self, target: Target, layers: int) -> Any:
        """The target's first layers with these adapters. Raises UserError if they do not fit."""
        body = shallow(target, layers)
        adapters = _empty_adapters(body, self.lora)
        require(
            list(self.adapted) == _widths(adapters),
            f"the draft's adapters do not fit the layers of {target.name}: train the draft again",
        )
        for layer, (down, up) in zip(adapters.values(), self.pairs, strict=True):
            layer.lora_A["default"], layer.lora_B["default"] = down, up
            layer.lora_dropout["default"] = self.dropout
        return body

    @torch.no_grad()
    def merged(self, target: Target) -> Target:
        """A copy of the target whose weights are W + (alpha / rank) B A, rounded once."""
        model, body = deepcopy(target.model), self.view(target, len(target.layers))
        for name, _, _ in self.adapted:
            weight = body_of(model).get_submodule(name).weight
            weight.copy_(weight + body.get_submodule(name).get_delta_weight("default"))
        name = f"{target.name}, adapted with its draft"
        return type(target)(model, target.tokenizer, name, target.revision)


def adapted_layers(target: TargetParts, layers: int, lora: LoraOptions) -> list[Adapted]:
    """The linear layers that get adapters, all within the target's first `layers` layers. Raises
    UserError if their weights are stored quantised, since adapters could not be added to them, and
    for a target with two streams (`TargetParts.require_one_width`)."""
    assert isinstance(target, Target)
    target.require_one_width()
    require(
        not lora.rank or target.quantisation is None,
        f"{lora.key}: {target.title} is quantised ({target.quantisation}), so adapters cannot be "
        "added to its weights: give a target that is not",
    )
    return _widths(_empty_adapters(shallow(target, layers), lora))


def _empty_adapters(body: Any, lora: LoraOptions) -> dict[str, Any]:
    """Put adapters without memory into a model; returns its adapted layers by name."""
    if not lora.rank:
        return {}
    with torch.device("meta"):
        with_adapters(body, lora)
    return {name: m for name, m in body.named_modules() if hasattr(m, "lora_A")}


def _widths(adapted: dict[str, Any]) -> list[Adapted]:
    return [(name, x.in_features, x.out_features) for name, x in adapted.items()]

"""Drafters that are views of the target: modules that share its weights but have fewer layers,
another attention, or LoRA adapters that belong to the draft.

A view consists of copies of the target's modules that share its parameters, so the target is not
changed and no weight is copied. Adapters (Hu et al. 2022) add (alpha / rank) B A x to W x in the
view alone.
"""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from specdec.compat import set_attention, twin
from specdec.context import Context
from specdec.drafters.base import Predictor, Sizes
from specdec.drafters.pretrained import LoraOptions, with_adapters
from specdec.errors import require
from specdec.frozen import Frozen
from specdec.runtime.cache import SlotCache, cache_argument, model_inputs
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts, body_of
from specdec.targets.target import Target


@dataclass(kw_only=True)
class ViewSizes(Sizes):
    """`layers`: the number of the target's layers that draft."""

    layers: int


class TargetViewDrafter(Predictor):
    """A drafter that runs the target's own weights. It continues a cache of the committed tokens
    before the anchor: the anchor takes the first scratch slot, drafted tokens the next ones."""

    Sizes = ViewSizes
    runs_target = True
    target: Target
    body: Frozen[Any]  # the model that drafts

    @abstractmethod
    def view(self, target: Target) -> Any:
        """The model that drafts, without its head."""

    @abstractmethod
    def cache_before_anchors(self, ctx: Context, cache: Any) -> SlotCache:
        """The cache to continue, updated to hold all tokens but the anchors."""

    def attach(self, target: TargetParts) -> None:
        assert isinstance(target, Target)
        self.target, self.body = target, Frozen(self.view(target))

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self.target.logits(hidden)

    def step(self, ids: Tensor, **attend: Any) -> Tensor:
        """Hidden states [B, T, D] of tokens [B, T]. `attend` holds transformers' arguments for
        attention: over the tokens of their text, or over the slots of a cache."""
        states: Tensor = self.body.held(input_ids=ids, **attend).last_hidden_state
        return self.target.before_head(states)

    def continued(self, cache: SlotCache, ids_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
        """Hidden states [B, T, D] of tokens that continue the content of the cache."""
        place = cache.place(ids_BT, parents_BT)
        inputs = model_inputs(self.target.config, place, self.target.dtype)
        taken = cache_argument(self.body.held)
        return self.step(ids_BT, use_cache=True, **inputs, **{taken: cache})

    def draft_growth(self, ctx: Context, cache: Any = None) -> Growth:
        if ctx.cache is None:
            return super().draft_growth(ctx)
        cache = self.cache_before_anchors(ctx, cache)

        def grow(tokens_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
            slots = None if parents_BT is None else parents_BT + 1
            return self.unembed(self.continued(cache, tokens_BT, slots), 0)

        anchor_B1 = torch.tensor([ids[-1:] for ids in ctx.rows()], device=ctx.ids_BT.device)
        return Growth(grow(anchor_B1, None)[:, -1], grow)


def decoder_layers(target: TargetParts, name: str) -> int:
    """The number of layers of a decoder-only target. Raises UserError for an encoder-decoder."""
    require(
        target.reads_pairs is None,
        f"drafter={name} needs a decoder-only target, not {target.reads_pairs}",
    )
    return target.depth


def count_of_runnable_layers(target: TargetParts, name: str) -> int:
    """The number of layers, for a draft that runs them itself. Raises UserError as `decoder_layers`
    does, and for a layer with recurrent state, which drafts would change."""
    require(
        target.reads_trees,
        f"drafter={name} runs layers of the target itself, but some of this target's keep a state, "
        "which drafts would move, or make their own masks: give another drafter",
    )
    return decoder_layers(target, name)


def shallow(target: Target, layers: int) -> Any:
    """The target's base model with its first layers only."""
    base = target.body
    model = twin(base)
    path = next(name for name, m in base.named_modules() if m is target.layers)
    model.set_submodule(path, model.get_submodule(path)[:layers])
    return model


def with_weights(target: Target) -> Any:
    """The target's model with eager attention, the only implementation in transformers that returns
    attention weights. The configs by which its modules choose their attention are copied."""
    model, copied = twin(target.body), dict[int, Any]()
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            module.config = copy.deepcopy(config, copied)
            set_attention(module.config, "eager")
    return model


Adapted = tuple[str, int, int]  # a linear layer: name in the base model, widths of input and output


class Adapters(nn.Module):
    """A and B of each layer in `adapted`, which `view` uses. They are trained, moved and saved with
    the draft; empty for rank 0."""

    pairs: Any  # A and B of each adapted layer, in their order

    def __init__(self, lora: LoraOptions, adapted: Sequence[Adapted]) -> None:
        super().__init__()
        self.lora, self.adapted = lora, adapted
        plain = partial(nn.Linear, bias=False)
        pairs = (nn.ModuleList([plain(n, lora.rank), plain(lora.rank, m)]) for _, n, m in adapted)
        self.pairs = nn.ModuleList(pairs)
        self.dropout = nn.Dropout(lora.dropout)

    def initialise(self) -> None:
        """Initialise without effect: B is zero, and A has nn.Linear's default, as in peft."""
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
        adapted = type(target)(model, target.tokenizer, name, target.revision)
        adapted.render_prompts_with(target.rendering)
        return adapted


def adapted_layers(target: TargetParts, layers: int, lora: LoraOptions) -> list[Adapted]:
    """The linear layers that get adapters, all within the target's first `layers` layers. Raises
    UserError for quantised weights, to which adapters cannot be added, and for a target with two
    streams (`TargetParts.require_one_width`)."""
    assert isinstance(target, Target)
    target.require_one_width()
    require(
        not lora.rank or target.quantisation is None,
        f"{lora.key}: {target.title} is quantised ({target.quantisation}), so adapters cannot be "
        "added to its weights: give a target that is not",
    )
    return _widths(_empty_adapters(shallow(target, layers), lora))


def _empty_adapters(body: Any, lora: LoraOptions) -> dict[str, Any]:
    """Add adapters without memory to a model and return its adapted layers by name."""
    if not lora.rank:
        return {}
    with torch.device("meta"):
        with_adapters(body, lora)
    return {name: m for name, m in body.named_modules() if hasattr(m, "lora_A")}


def _widths(adapted: dict[str, Any]) -> list[Adapted]:
    return [(name, x.in_features, x.out_features) for name, x in adapted.items()]

"""Drafters that are views of the target: modules that share its weights but have other layers or
another attention.

A view is made of copies of the target's modules that share its parameters, so the target itself is
not changed, and no weight is copied.
"""

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from specdec.compat import set_attention, twin
from specdec.context import Context
from specdec.drafters.predictor import Predictor
from specdec.drafters.proposer import Sizes
from specdec.errors import require
from specdec.frozen import Frozen
from specdec.runtime.cache import SlotCache, cache_argument, model_inputs
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target


@dataclass(kw_only=True)
class ViewSizes(Sizes):
    """`layers`: how many of the target's layers draft."""

    layers: int


class View(Predictor):
    """A drafter that runs the target's own weights. It continues a cache of the committed tokens
    before the anchor: the anchor takes the first scratch slot, drafted tokens the next ones."""

    Sizes = ViewSizes
    runs_target = True
    target: Target
    body: Frozen[Any]  # the model that drafts

    @abstractmethod
    def view(self, target: Target) -> Any:
        """The base model that drafts."""

    @abstractmethod
    def followed(self, ctx: Context, cache: Any) -> SlotCache:
        """The cache to continue, which has read all tokens but the anchors."""

    def attach(self, target: TargetParts) -> None:
        assert isinstance(target, Target)
        self.target, self.body = target, Frozen(self.view(target))

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self.target.logits(hidden)

    def step(self, ids: Tensor, **attend: Any) -> Tensor:
        """Hidden states [B, T, D] of tokens [B, T]. `attend` says, as transformers' models take it,
        what they see: the tokens of their text, or the slots of a cache."""
        states: Tensor = self.body.held(input_ids=ids, **attend).last_hidden_state
        return self.target.before_head(states)

    def continued(self, cache: SlotCache, ids_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
        """Hidden states [B, T, D] of tokens that continue what the cache holds."""
        place = cache.place(ids_BT, parents_BT)
        inputs = model_inputs(self.target.config, place, self.target.dtype)
        taken = cache_argument(self.body.held)
        return self.step(ids_BT, use_cache=True, **inputs, **{taken: cache})

    def begin(self, ctx: Context, cache: Any = None) -> Growth:
        if ctx.cache is None:
            return super().begin(ctx)
        cache = self.followed(ctx, cache)

        def grow(tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
            slots = None if parents_BW is None else parents_BW + 1
            return self.unembed(self.continued(cache, tokens_BW, slots), 0)

        anchor_B1 = torch.tensor([ids[-1:] for ids in ctx.rows()], device=ctx.ids_BT.device)
        return Growth(grow(anchor_B1, None)[:, -1], grow)


def decoder_layers(target: TargetParts, name: str) -> int:
    """How many layers a decoder-only target has. Raises UserError if it has an encoder."""
    whole = getattr(target.model.config, "is_encoder_decoder", False)
    require(not whole, f"drafter={name} needs a decoder-only target, not an encoder-decoder")
    return target.depth


def viewed_layers(target: TargetParts, name: str) -> int:
    """`decoder_layers`, for a draft that runs them itself. Raises UserError also if one of them
    keeps a state, which drafts would move."""
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
    """The target's base model with eager attention, the only one of transformers' that returns
    attention weights. It copies the configs that tell its modules which attention to compute."""
    model, copied = twin(target.body), dict[int, Any]()
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            module.config = copy.deepcopy(config, copied)
            set_attention(module.config, "eager")
    return model

"""Early exit (LayerSkip, Elhoushi et al. 2024; Draft & Verify, Zhang et al. 2024): the target's
first E layers draft for all of them, with its own final norm and head.

Nothing is added to the target: the draft is a view of it. While decoding it writes into the
target's cache, whose first E layers already hold the keys and values of every committed token:
there is no second cache, and no token is read twice. A drafted token costs E / L of a step and
the head. On targets that were not trained for it (layer dropout and an early-exit loss) early
layers agree little with the last; E near L agrees more and saves less.

Letters: B batch, T time, A anchors, W nodes grown at once, K depth, D width, S vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.context import Context
from specdec.drafters.base import Drafter, Sizes
from specdec.errors import UserError, require
from specdec.runtime.cache import SlotCache, model_inputs, size
from specdec.sampling.trees import Growth
from specdec.target.base import Target
from specdec.target.parts import Parts


@dataclass
class EarlyExitConfig:
    """`layers`: E, how many of the target's layers draft; None takes half of them."""

    name: str = "early_exit"
    depth: int = 4
    layers: int | None = None


@dataclass(kw_only=True)
class OwnLayers(Sizes):
    """`layers`: how many of the target's own layers draft."""

    layers: int


class EarlyExit(Drafter):
    Config = EarlyExitConfig
    Sizes = OwnLayers
    trainable = False
    reads_body = True
    _parts: tuple[Any, Target]  # the shallow model, and whose it is: never saved

    @classmethod
    def plan(cls, config: EarlyExitConfig, target: Parts) -> OwnLayers:
        L = decoder_layers(target, config.name)
        E = (L + 1) // 2 if config.layers is None else config.layers
        if not 1 <= E <= L:
            raise UserError(f"drafter.layers={E}: give 1 to {L}, the layers of this target")
        return OwnLayers(target_vocab=target.vocab_size, layers=E)

    def attach(self, target: Parts) -> None:
        assert isinstance(target, Target)
        self._parts = (shallow(target, self.sizes.layers), target)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        model = self._parts[0]
        if drafted_BAk is None:
            out_BTD = model(
                input_ids=ctx.ids_BT, position_ids=ctx.position_BT, use_cache=False
            ).last_hidden_state
            steps = torch.arange(self.depth, device=anchors_BA.device)
            index = (anchors_BA[..., None] + steps).clamp_max(ctx.ids_BT.shape[1] - 1)
            rows = out_BTD.gather(1, index.flatten(1)[..., None].expand(-1, -1, out_BTD.shape[-1]))
            return rows.view(*index.shape, -1)
        found = []
        for b, anchors in enumerate(anchors_BA.tolist()):
            for i, a in enumerate(anchors):
                ids = torch.cat([ctx.ids_BT[b, : a + 1], drafted_BAk[b, i]])[None]
                found.append(model(input_ids=ids, use_cache=False).last_hidden_state[0, a:])
        return torch.stack(found).view(*anchors_BA.shape, -1, found[0].shape[-1])

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self._parts[1].logits(hidden)

    def begin(self, ctx: Context, cache: Any = None) -> Growth:
        return super().begin(ctx) if ctx.cache is None else Shared(self, ctx, ctx.cache)

    def read(self, ids_BT: Tensor, cache: SlotCache, parents_BT: Tensor | None) -> Tensor:
        """Logits [B, T, S] of tokens that continue what the target's cache holds."""
        model, target = self._parts
        place = cache.place(*size(ids_BT), parents_BT)
        inputs = model_inputs(target.config, place, target.dtype)
        out = model(input_ids=ids_BT, past_key_values=cache, use_cache=True, **inputs)
        return target.logits(out.last_hidden_state)


class Shared:
    """Growth in the target's own cache: the anchor in its first scratch slot, drafts behind."""

    def __init__(self, drafter: EarlyExit, ctx: Context, cache: SlotCache) -> None:
        self.drafter, self.cache = drafter, cache
        cache.drop()
        last = torch.tensor([ids[-1:] for ids in ctx.rows()], device=ctx.ids_BT.device)
        self.logits_BS = drafter.read(last, cache, None)[:, -1]

    def grow(self, tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
        parents = None if parents_BW is None else parents_BW + 1
        return self.drafter.read(tokens_BW, self.cache, parents)

    def marginals(self, depth: int) -> Tensor | None:
        return None


def decoder_layers(target: Parts, name: str) -> int:
    """How many layers a decoder-only target has; UserError for one with an encoder."""
    whole = getattr(target.model.config, "is_encoder_decoder", False)
    require(not whole, f"drafter={name} drafts with a decoder-only target, this one has an encoder")
    return int(target.config.num_hidden_layers)


def shallow(target: Target, layers: int) -> Any:
    """The target's base model with its first layers only. Every module but the list of layers is
    the target's own: no weight is copied, and the target is as it was."""
    base = target.model.base_model
    path = next(name for name, m in base.named_modules() if m is target.layers).split(".")
    top = outer = _twin(base)
    for name in path[:-1]:
        inner = _twin(outer.get_submodule(name))
        outer._modules[name], outer = inner, inner
    outer._modules[path[-1]] = nn.ModuleList(list(target.layers)[:layers])
    return top


def _twin(module: nn.Module) -> nn.Module:
    """The same module, with a dict of submodules of its own."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin

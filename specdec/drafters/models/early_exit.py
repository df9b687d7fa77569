"""Early exit (LayerSkip, Elhoushi et al. 2024; Draft & Verify, Zhang et al. 2024): the target's
first E layers draft, followed by its own final norm and head.

The draft is a view of the target and adds no weights to it. While decoding it writes into the
target's own cache, whose first E layers already hold the keys and values of every committed token,
so that it needs no second cache and reads no token twice. A drafted token costs E / L of a step
plus the head. On targets that were not trained for it (layer dropout and an early-exit loss) early
layers agree little with the last; E near L agrees more and saves less.

Letters: B batch, T time, A anchors, W nodes grown at once, K depth, D width, S vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.context import Context
from specdec.drafters.base import Drafter, states
from specdec.drafters.models.views import ViewSizes, decoder_layers, shallow
from specdec.errors import UserError
from specdec.runtime.cache import SlotCache, model_inputs, size
from specdec.sampling.trees import Growth
from specdec.target.base import Target
from specdec.target.parts import Parts


@dataclass
class EarlyExitConfig:
    """`layers` is E, the number of the target's layers that draft; null takes half of them."""

    name: str = "early_exit"
    depth: int = 4
    layers: int | None = None


class EarlyExit(Drafter):
    Config = EarlyExitConfig
    Sizes = ViewSizes
    trainable = False
    reads_body = True
    _parts: tuple[Any, Target]  # the shallow model, and whose it is: never saved

    @classmethod
    def plan(cls, config: EarlyExitConfig, target: Parts) -> ViewSizes:
        L = decoder_layers(target, config.name)
        E = (L + 1) // 2 if config.layers is None else config.layers
        if not 1 <= E <= L:
            raise UserError(f"drafter.layers={E}: give 1 to {L}, the layers of this target")
        return ViewSizes(target_vocab=target.vocab_size, layers=E)

    def attach(self, target: Parts) -> None:
        assert isinstance(target, Target)
        self._parts = (shallow(target, self.sizes.layers), target)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        return states(self._whole, ctx, anchors_BA, drafted_BAk, self.depth)

    def _whole(self, ids: Tensor, position: Tensor | None, document: Tensor | None) -> Tensor:
        model = self._parts[0]
        return model(input_ids=ids, position_ids=position, use_cache=False).last_hidden_state

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self._parts[1].logits(hidden)

    def begin(self, ctx: Context, cache: Any = None) -> Growth:
        return super().begin(ctx) if ctx.cache is None else SharedGrowth(self, ctx, ctx.cache)

    def read(self, ids_BT: Tensor, cache: SlotCache, parents_BT: Tensor | None) -> Tensor:
        """Logits [B, T, S] of tokens that continue what the target's cache holds."""
        model, target = self._parts
        place = cache.place(*size(ids_BT), parents_BT)
        inputs = model_inputs(target.config, place, target.dtype)
        out = model(input_ids=ids_BT, past_key_values=cache, use_cache=True, **inputs)
        return target.logits(out.last_hidden_state)


class SharedGrowth:
    """Growth in the target's own cache: the anchor takes the first scratch slot, and drafted tokens
    the slots after it."""

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

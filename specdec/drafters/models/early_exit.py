"""Early exit (LayerSkip, Elhoushi et al. 2024; Draft & Verify, Zhang et al. 2024): the target's
first E layers draft, followed by its own final norm and head.

While decoding, the draft writes into the target's own cache, whose first E layers already hold the
keys and values of every committed token, so the draft needs no second cache and reads no token
twice. A drafted token costs E / L of a step plus the head. In targets that were not trained for
early exit (with layer dropout and an early-exit loss), early layers agree little with the last; E
near L agrees more and saves less.

Letters: B batch, A anchors, K depth, D width.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.context import Context
from specdec.drafters.base import states
from specdec.drafters.models.views import View, ViewSizes, decoder_layers, shallow
from specdec.errors import UserError
from specdec.runtime.cache import SlotCache
from specdec.target.base import Target
from specdec.target.parts import Parts


@dataclass
class EarlyExitConfig:
    """`layers` is E, the number of the target's layers that draft; null takes half of them."""

    name: str = "early_exit"
    depth: int = 4
    layers: int | None = None


class EarlyExit(View):
    Config = EarlyExitConfig

    @classmethod
    def plan(cls, config: EarlyExitConfig, target: Parts) -> ViewSizes:
        L = decoder_layers(target, config.name)
        E = (L + 1) // 2 if config.layers is None else config.layers
        if not 1 <= E <= L:
            raise UserError(f"drafter.layers={E}: give 1 to {L}, the layers of this target")
        return ViewSizes(target_vocab=target.vocab_size, layers=E)

    def view(self, target: Target) -> Any:
        return shallow(target, self.sizes.layers)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        return states(self.over_text, ctx, anchors_BA, drafted_BAk, self.depth)

    def over_text(self, ids: Tensor, position: Tensor | None, document: Tensor | None) -> Tensor:
        model = self.body[0]
        return model(input_ids=ids, position_ids=position, use_cache=False).last_hidden_state

    def followed(self, ctx: Context, cache: Any) -> SlotCache:
        ctx.cache.drop()
        return ctx.cache

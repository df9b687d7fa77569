"""Early exit (LayerSkip, Elhoushi et al. 2024; Draft & Verify, Zhang et al. 2024): the target's
first E layers draft, followed by its own final norm and head.

While decoding, the draft writes into the target's own cache, whose first E layers already hold the
keys and values of every committed token. A drafted token costs E / L of a step plus the head. In
targets that were not trained for early exit, early layers agree little with the last one; a larger
E agrees more and saves less.

With `lora.rank`, LoRA adapters (Hu et al. 2022) train those layers to agree. They are active only
while drafting, so p does not change. (LayerSkip trains the target itself, by layer dropout and
losses at several exits.) The adapted layers have other keys and values, so the draft keeps a cache
of its own. This costs E / L of the memory of the target's cache, a pass of E layers over the
prompt, and in each speculation step one over all new tokens instead of the anchor alone. In return,
depth k at anchor a is depth 0 at a + k, so training takes one pass over a text, not one for each
depth at every anchor.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from specdec.context import Context
from specdec.drafters.attention import entries, states
from specdec.drafters.base import DrafterConfig, Predictor, Trainable, growth_over
from specdec.drafters.pretrained import LoraOptions
from specdec.drafters.target_views import (
    Adapted,
    Adapters,
    TargetViewDrafter,
    ViewSizes,
    adapted_layers,
    count_of_runnable_layers,
)
from specdec.errors import require
from specdec.runtime.cache import SlotCache, new_cache
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts, longrope_lines
from specdec.targets.sequence_packing import by_document
from specdec.targets.target import Target


@dataclass
class EarlyExitConfig(DrafterConfig):
    """The target's first layers draft. With `lora.rank` above 0, they draft with adapters, and only
    the adapters are trained."""

    name: str = "early_exit"
    depth: int = 4
    layers: int | None = None  # E, the target's layers that draft; null: half of them
    lora: LoraOptions = field(default_factory=LoraOptions)


@dataclass(kw_only=True)
class EarlyExitSizes(ViewSizes):
    """`adapted`: the linear layers with adapters."""

    adapted: list[Adapted] = field(default_factory=list)


class EarlyExit(TargetViewDrafter, Trainable):
    Config = EarlyExitConfig
    Sizes = EarlyExitSizes

    def __init__(self, config: EarlyExitConfig, sizes: EarlyExitSizes) -> None:
        super().__init__(config, sizes)
        self.adapters = Adapters(config.lora, sizes.adapted)

    @classmethod
    def trains(cls, config: EarlyExitConfig) -> bool:
        return config.lora.rank > 0

    @classmethod
    def plan(cls, config: EarlyExitConfig, target: TargetParts) -> EarlyExitSizes:
        num_layers = count_of_runnable_layers(target, config.name)
        kept = (num_layers + 1) // 2 if config.layers is None else config.layers
        require(
            1 <= kept <= num_layers,
            f"drafter.layers={kept}: give 1 to {num_layers}, the layers of this target",
        )
        adapted = adapted_layers(target, kept, config.lora)
        return cls.Sizes.of_config(config, target, layers=kept, adapted=adapted)

    @property
    def train_depth(self) -> int:
        return 1  # given the text, depth k at anchor a is depth 0 at anchor a + k

    def initialise(self, target: TargetParts) -> None:
        self.adapters.initialise()

    def view(self, target: Target) -> Any:
        return self.adapters.view(target, self.sizes.layers)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        return states(self.over_text, ctx, anchors_BA, drafted_BAK, self.depth)

    def over_text(self, ids: Tensor, position: Tensor | None, document: Tensor | None) -> Tensor:
        lines = longrope_lines(self.target.config)
        return by_document(self.over_documents, ids, position, document, lines)

    def over_documents(self, ids_NT: Tensor) -> Tensor:
        """Hidden states [N, T, D] of texts [N, T]."""
        return self.step(ids_NT, use_cache=False, **self.target.position_inputs(ids_NT))

    def new_cache(self, capacity: int | None = None) -> SlotCache | None:
        return new_cache(self.target.config) if self.config.lora.rank else None

    def cache_before_anchors(self, ctx: Context, cache: Any) -> SlotCache:
        cache_of_target: SlotCache = ctx.cache
        return cache_of_target

    def draft_growth(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        if not self.config.lora.rank:
            return super().draft_growth(ctx)
        if cache is None:
            return Predictor.draft_growth(self, ctx)
        return growth_over(cache, ctx, partial(self.over_cache, cache))

    def over_cache(
        self, cache: SlotCache, ids_BT: Tensor, parents_BT: Tensor | None, last_B1: Tensor | None
    ) -> Tensor:
        """Logits [B, T, S] of tokens that continue the cached ones, or [B, 1, S] at `last_B1`."""
        hidden = self.continued(cache, ids_BT, parents_BT)
        return self.unembed(hidden if last_B1 is None else entries(hidden, last_B1), 0)

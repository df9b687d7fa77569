"""Parallel multi-token prediction (Gloeckle et al. 2024, arXiv 2404.19737): on the target's trunk,
which is all but its last layer, each head is one transformer layer and a final norm; the target's
unembedding is shared and frozen.

The paper's head 1 is the model's own last layer, which predicts the token after the last one that
the trunk has read. A drafter knows that token, the anchor, so depth k is the paper's head k + 2,
and the anchor itself is not read. The released model shares the final norm; here each head has a
copy, as the trunk is frozen. As in the paper, training holds the tensors of one head at a time. A
chunk of the loss reads the states of all heads, so that the target's logits are computed once. A
layer's activations are recomputed for its gradient, since a layer takes much less time than the
logits.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specdec.context import Context, HiddenStateSpec
from specdec.drafters.base import DrafterConfig, Limits, Sizes, Trainable, reading_no_draft
from specdec.drafters.layers import copy_last, llama_of
from specdec.drafters.recurrence import Prefix, Recurrent, RecurrentSizes
from specdec.errors import require
from specdec.runtime.cache import SlotCache
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts


@dataclass
class MTPHeadsConfig(DrafterConfig):
    """`depth` heads, each a transformer layer."""

    name: str = "mtp_heads"
    depth: int = 3
    # target: copy the target's last layer and final norm to each head; random: draw the weights at
    # random, as in the paper
    initialisation: str = "target"
    intermediate_size: int | None = None  # width of the MLP; null: the target's


@dataclass(kw_only=True)
class MTPHeadsSizes(RecurrentSizes):
    """`trunk`: the number of the target's layers in the trunk."""

    trunk: int


class Head(Prefix):
    """One head: a layer and a final norm on the trunk."""

    def __init__(self, sizes: MTPHeadsSizes) -> None:
        super().__init__(sizes.llama, sizes.target_vocab)
        self.needs = HiddenStateSpec(layers=(sizes.trunk,))

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return Recurrent.unembed(self, self.norm(hidden), k)

    def copy_from(self, target: TargetParts) -> None:
        after = copy_last(target, dict(self.layer.named_parameters()))
        if after is not None:
            self.norm.weight.copy_(after)


class Caches(list[SlotCache]):
    """A cache for each head."""

    def select(self, rows: list[int]) -> None:
        for cache in self:
            cache.select(rows)


class MTPHeads(Trainable):
    separate_heads = True
    Config = MTPHeadsConfig
    Sizes: ClassVar[type[Sizes]] = MTPHeadsSizes

    def __init__(self, config: MTPHeadsConfig, sizes: MTPHeadsSizes) -> None:
        super().__init__(config, sizes)
        self.needs = HiddenStateSpec(layers=(sizes.trunk,))
        self.limits = Limits(depth=config.depth, parallel=True)
        self.heads: Any = nn.ModuleList(Head(sizes) for _ in range(config.depth))

    @classmethod
    def plan(cls, config: MTPHeadsConfig, target: TargetParts) -> MTPHeadsSizes:
        trunk = target.depth - 1
        llama = llama_of(target, config.intermediate_size)
        require(trunk > 0, f"{target.name} has 1 layer, but mtp_heads needs 2: give another target")
        return MTPHeadsSizes.of_config(config, target, llama=llama, trunk=trunk)

    def initialise(self, target: TargetParts) -> None:
        for head in self.heads:
            head.initialise(target)
            if self.config.initialisation == "target":
                head.copy_from(target)

    def attach(self, target: TargetParts) -> None:
        for head in self.heads:
            head.attach(target)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        count = self.depth if drafted_BAK is None else drafted_BAK.shape[-1] + 1
        none = anchors_BA[..., None][..., :0]
        return torch.cat([head.hidden(ctx, anchors_BA, none) for head in self.heads[:count]], 2)

    def read_by_heads(self, ctx: Context, anchors_BA: Tensor) -> Tensor:
        none = anchors_BA[..., None][..., :0]
        again: Any = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is random
        states = [checkpoint(head.hidden, ctx, anchors_BA, none, **again) for head in self.heads]
        return torch.cat(states, 2)

    def heads_of(self, read_NKD: Tensor, first: int) -> Tensor:
        return read_NKD

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        logits: Tensor = self.heads[k].unembed(hidden, 0)
        return logits

    def new_cache(self, capacity: int | None = None) -> Caches:
        return Caches(head.new_cache(capacity) for head in self.heads)

    def draft_growth(self, ctx: Context, cache: Caches | None = None) -> Growth:
        caches = cache or [None] * self.depth
        begun = [head.draft_growth(ctx, c) for head, c in zip(self.heads, caches, strict=True)]
        return reading_no_draft(lambda k: begun[k].logits_BS)

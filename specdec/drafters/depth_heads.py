"""Common code of methods with a head for each depth on the target's final hidden state.

The state before the anchor is the target's at a - 1. From the anchor on, each token turns the state
of the token before it into its own state, and head k reads the state after k + 1 tokens: x_a, …,
x_{a+k}. Nodes of a tree therefore share the computation of their ancestors.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specdec.context import Context, HiddenStateSpec
from specdec.drafters.attention import entries, tokens_from
from specdec.drafters.base import Sizes, Trainable, grow_with_depth
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts

MOST_LAYERS = 64  # the most layers that one head may have


@dataclass(kw_only=True)
class HeadsSizes(Sizes):
    """`width`: that of the target's hidden state."""

    width: int


class Heads(Trainable):
    """A drafter with a head for each depth. A subclass implements `step`, and `output` if heads
    have their own layers. There is one LM head for each depth, or one for all; `width` is that of
    its input."""

    Sizes: ClassVar[type[HeadsSizes]] = HeadsSizes
    needs = HiddenStateSpec(final_hidden=True)

    def __init__(self, config: Any, sizes: HeadsSizes, width: int, one_head: bool, bias: bool):
        super().__init__(config, sizes)
        self.limits.depth = config.depth
        size = sizes.draft_vocab or sizes.target_vocab
        count = 1 if one_head else config.depth
        self.lm_heads: Any = nn.ModuleList(nn.Linear(width, size, bias=bias) for _ in range(count))

    @classmethod
    def plan(cls, config: Any, target: TargetParts) -> Any:
        return cls.Sizes.of_config(config, target, width=target.width)

    def first(self, ctx: Context, anchors_BA: Tensor, cache: Any = None) -> Tensor:
        """The state [B, A, F] before the anchor's token; with a cache, for one anchor per row."""
        last_BAD = entries(ctx.hidden_states(self.needs), (anchors_BA - 1).clamp_min(0))
        return last_BAD.to(self.lm_heads[0].weight.dtype)

    @abstractmethod
    def step(self, state: Tensor, tokens: Tensor, k: int) -> Tensor:
        """The state [B, A, F] after the tokens [B, A] that head k reads in addition to the heads
        before it."""

    def output(self, state: Tensor, k: int) -> Tensor:
        """The hidden state [B, A, D] of depth k, which `unembed` reads."""
        return state

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        logits: Tensor = self.lm_heads[min(k, len(self.lm_heads) - 1)](hidden)
        return logits

    def hidden(
        self,
        ctx: Context,
        anchors_BA: Tensor,
        drafted_BAK: Tensor | None,
        output: Callable[[Tensor, int], Tensor] | None = None,
    ) -> Tensor:
        """`Predictor.hidden`; training may pass its own `output`."""
        tokens_BAK = tokens_from(ctx, anchors_BA, drafted_BAK, self.depth)
        state, outputs = self.first(ctx, anchors_BA), []
        for k in range(tokens_BAK.shape[-1]):
            state = self.step(state, tokens_BAK[..., k], k)  # [B, A, F]
            outputs.append((output or self.output)(state, k))  # [B, A, D]
        return torch.stack(outputs, 2)  # [B, A, K, D]

    def draft_growth(self, ctx: Context, cache: Any = None) -> Growth:
        anchor_B1 = torch.tensor(ctx.counts(), device=ctx.ids_BT.device)[:, None] - 1
        before = self.first(ctx, anchor_B1, cache)
        nodes_BMF = self.step(before, ctx.ids_BT.gather(1, anchor_B1), 0)  # the anchor is the first

        def grow(tokens_BT: Tensor, parents_BT: Tensor | None, k: int) -> Tensor:
            nonlocal nodes_BMF
            above = nodes_BMF[:, -1:] if parents_BT is None else entries(nodes_BMF, parents_BT + 1)
            state = self.step(above, tokens_BT, k)
            nodes_BMF = torch.cat([nodes_BMF, state], 1)
            return self.unembed(self.output(state, k), k)

        return Growth(self.unembed(self.output(nodes_BMF, 0), 0)[:, 0], grow_with_depth(grow))

    def copy_head(self, target: TargetParts) -> None:
        """Initialise all LM heads with the target's."""
        for head in self.lm_heads:
            head.weight.copy_(target.own_head(self.vocab_S))

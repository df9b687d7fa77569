"""DSpark (deepseek-ai/DeepSpec:deepspec/modeling/dspark): a block with a Markov head.

Slot k predicts depth k, so the anchor's own slot predicts the token after it, and each depth's
logits get a bias that depends on the token before it: W2 W1[x], of low rank. Each depth thus
depends on the token drafted before it, although the block itself is one pass. In training that
token is the text's own. A linear head estimates each depth's acceptance, σ(w · [h; W1[x]] + b),
which decoding reads as the draft's confidence. The paper's loss is 0.1 CE + 0.9 ‖p − q‖₁ plus this
head's cross-entropy with the acceptance, whose gradient reaches the block too; depth k has the
weight e^{-k/4} (`experiment=dspark_paper`). Under other losses that gradient stops at the head.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from specdec.context import Context
from specdec.drafters.attention import tokens_from
from specdec.drafters.base import grow_with_depth
from specdec.drafters.block import Block, BlockConfig, BlockSizes
from specdec.sampling.trees import Growth


@dataclass
class DSparkConfig(BlockConfig):
    """A block with a Markov head and a confidence head."""

    bounds: ClassVar = {**BlockConfig.bounds, "rank": 1}
    name: str = "dspark"
    rank: int = 256  # rank of the Markov head


class DSpark(Block):
    Config = DSparkConfig
    estimates_acceptance = True
    first = 0

    def __init__(self, config: DSparkConfig, sizes: BlockSizes) -> None:
        super().__init__(config, sizes)
        self.markov_w1 = nn.Embedding(sizes.target_vocab, config.rank)
        size = sizes.draft_vocab or sizes.target_vocab
        self.markov_w2 = nn.Linear(config.rank, size, bias=False)
        self.confidence_head = nn.Linear(self.llama.hidden_size + config.rank, 1)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        """The block's states and W1 of the token before each depth [B, A, K, D + N]."""
        previous = self.markov_w1(tokens_from(ctx, anchors_BA, drafted_BAK, self.depth))
        return torch.cat([super().hidden(ctx, anchors_BA, drafted_BAK), previous], -1)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        D = self.llama.hidden_size
        logits: Tensor = self.head(hidden[..., :D]) + self.markov_w2(hidden[..., D:])
        return logits

    def growth(
        self, ctx: Context, logits_BKS: Tensor, states_BKD: Tensor, anchor_B: Tensor
    ) -> Growth:
        """The growth with each depth's logits given the token before it, and with the estimated
        acceptance."""

        def after(tokens_BT: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            previous_BTN = self.markov_w1(tokens_BT)
            state_BTD = states_BKD[:, depth, None].expand(-1, tokens_BT.shape[1], -1)
            own_BT = self.confidence(torch.cat([state_BTD, previous_BTN], -1))
            return logits_BKS[:, depth, None] + self.markov_w2(previous_BTN), own_BT

        def grow(tokens_BT: Tensor, parents_BT: Tensor | None, depth: int) -> Tensor:
            logits_BTS, state.own_BT = after(tokens_BT, depth)
            return logits_BTS

        first_B1S, own_B1 = after(anchor_B[:, None], 0)
        state = Growth(first_B1S[:, 0], grow_with_depth(grow), own_BT=own_B1)
        return state

    def confidence(self, hidden_NKD: Tensor) -> Tensor:
        alpha_NK: Tensor = self.confidence_head(hidden_NKD)[..., 0].float().sigmoid()
        return alpha_NK

"""Medusa-1 (Cai et al. 2024): parallel heads on the target's last hidden state.

Head k maps the hidden state at a - 1 to token a + 1 + k:
logits_k = W2_k (SiLU(W1_k h + b_k) + h), where W1 starts at zero and W2 as the target's LM head, so
training starts from the target's own head. The paper's formula has no b; the reference's layers
(FasterDecoding/Medusa, medusa/model/medusa_model.py) have one. It starts at random, so the
reference's heads do not start exactly as the target's. Letters: B batch, K heads, D width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.context import Context
from specdec.drafters.base import reading_no_draft
from specdec.drafters.heads import MOST_LAYERS, Heads, HeadsSizes
from specdec.sampling.trees import Growth
from specdec.target.parts import Parts


@dataclass
class MedusaConfig:
    """`depth` heads, each of `num_layers` residual layers and an LM head.

    With `shared_head` all heads use one trained LM head; without it each has its own, as in the
    paper. `bias` gives each layer the reference's b. `draft_vocab` null keeps the whole vocabulary.
    """

    name: str = "medusa"
    depth: int = 3
    num_layers: int = 1
    draft_vocab: int | None = 8192
    shared_head: bool = True
    bias: bool = False


class ResidualBlock(nn.Module):
    """x + SiLU(W1_l x + b_l) for each layer l in turn, with the names that vLLM loads."""

    def __init__(self, width: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class Medusa(Heads):
    Config = MedusaConfig
    parallel = True
    bounds = {"num_layers": (1, MOST_LAYERS)}

    def __init__(self, config: MedusaConfig, sizes: HeadsSizes) -> None:
        super().__init__(config, sizes, sizes.width, config.shared_head, bias=False)
        blocks = (
            ResidualBlock(sizes.width, config.num_layers, config.bias) for _ in range(config.depth)
        )
        self.blocks = nn.ModuleList(blocks)

    def start(self, target: Parts) -> None:
        for block in self.blocks:
            for layer in block.layers:  # type: ignore[union-attr]
                layer.weight.zero_()
        self.copy_head(target)

    def step(self, state: Tensor, tokens: Tensor, k: int) -> Tensor:
        """Heads read no token at all."""
        return state

    def output(self, state: Tensor, k: int) -> Tensor:
        return self.blocks[k](state)

    def begin(self, ctx: Context, cache: Any = None) -> Growth:
        """The logits after a node depend only on its depth, so they are computed once for each."""
        anchor_B1 = torch.tensor(ctx.counts(), device=ctx.ids_BT.device)[:, None] - 1
        hidden_BKD = self.hidden(ctx, anchor_B1, None)[:, 0]
        return reading_no_draft(lambda k: self.unembed(hidden_BKD[:, k], k))

"""Medusa-1 (Cai et al. 2024): parallel heads on the target's last hidden state.

Head k maps the hidden state at a - 1 to token a + 1 + k:
logits_k = W2_k (SiLU(W1_k h) + h), where W1 starts at zero and W2 as the target's LM head, so
training starts from the target's own head. Letters: B batch, A anchors, K heads, D width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.context import Context, Needs
from specdec.drafters.base import Drafter, Sizes, entries
from specdec.errors import require_within
from specdec.sampling.trees import Growth
from specdec.target.parts import Parts

MOST_LAYERS = 64


@dataclass
class MedusaConfig:
    """`depth` heads, each of `num_layers` residual layers and an LM head.

    With `shared_head` all heads use one trained LM head; without it each has its own, as in the
    paper. `draft_vocab` null keeps the whole vocabulary.
    """

    name: str = "medusa"
    depth: int = 3
    num_layers: int = 1
    draft_vocab: int | None = 8192
    shared_head: bool = True


@dataclass(kw_only=True)
class MedusaSizes(Sizes):
    """`width`: that of the target's hidden state."""

    width: int


class ResidualBlock(nn.Module):
    """x + SiLU(W1_l x) for each layer l in turn, with the names that vLLM loads."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class Medusa(Drafter):
    Config = MedusaConfig
    Sizes = MedusaSizes
    needs = Needs(final_hidden=True)
    parallel = True

    def __init__(self, config: MedusaConfig, sizes: MedusaSizes) -> None:
        super().__init__(config, sizes)
        self.max_depth = config.depth
        require_within("drafter", config, num_layers=(1, MOST_LAYERS))
        width, size = sizes.width, sizes.draft_vocab or sizes.target_vocab
        blocks = (ResidualBlock(width, config.num_layers) for _ in range(config.depth))
        self.blocks = nn.ModuleList(blocks)
        count = 1 if config.shared_head else config.depth
        self.lm_heads = nn.ModuleList(nn.Linear(width, size, bias=False) for _ in range(count))

    @classmethod
    def plan(cls, config: MedusaConfig, target: Parts) -> MedusaSizes:
        pruned = config.draft_vocab if (config.draft_vocab or 0) < target.vocab_size else None
        return MedusaSizes(target_vocab=target.vocab_size, draft_vocab=pruned, width=target.width)

    def start(self, target: Parts) -> None:
        rows = slice(None) if self.vocab_S is None else self.vocab_S
        for block in self.blocks:
            for layer in block.layers:  # type: ignore[union-attr]
                layer.weight.zero_()
        for head in self.lm_heads:
            head.weight.copy_(target.head.weight[rows])  # type: ignore[operator]

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        heads = self.depth if drafted_BAk is None else drafted_BAk.shape[-1] + 1
        assert ctx.final_BTD is not None
        last_BAD = entries(ctx.final_BTD, (anchors_BA - 1).clamp_min(0))
        last_BAD = last_BAD.to(next(self.parameters()).dtype)
        return torch.stack([self.blocks[k](last_BAD) for k in range(heads)], 2)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self.lm_heads[min(k, len(self.lm_heads) - 1)](hidden)

    def begin(self, ctx: Context, cache: Any = None) -> Growth:
        """Heads read no drafted tokens, so the logits after a node depend only on its depth."""
        anchor_B1 = torch.tensor(ctx.counts(), device=ctx.ids_BT.device)[:, None] - 1
        hidden_BKD = self.hidden(ctx, anchor_B1, None)[:, 0]
        depths = [0]  # the depth of the anchor, then of every node

        def grow(tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
            depth = 1 + depths[-1 if parents_BW is None else int(parents_BW[0, 0]) + 1]
            depths.extend([depth] * tokens_BW.shape[1])
            logits_BS = self.unembed(hidden_BKD[:, depth], depth)
            return logits_BS[:, None].expand(-1, tokens_BW.shape[1], -1)

        return Growth(
            self.unembed(hidden_BKD[:, 0], 0),
            grow,
            lambda depth: self.unembed_all(hidden_BKD[:, :depth]),
        )

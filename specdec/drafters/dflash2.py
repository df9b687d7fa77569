"""DFlash 2 (https://inco.ai/blog/dflash2): a bidirectional block with convolutions and a selector.

It follows NVIDIA-NeMo/Automodel (draft_qwen3_dflash2.py) and adds two things to DFlash. Before and
after attention and MLP, each slot is mixed with the slots just before it in its block: Conv(x)_j =
Σ_t k_{j,t} x_{j-t}, where k is a learned kernel plus a correction that is linear in the sub-layer's
normed input and shared by groups of channels. A selector makes each token depend on the one before
it: it adds ⟨A[x] * P h, B[y]⟩ to the logit of y after x, where h is the slot's state and A, B and P
are learned. Both have no effect at initialisation, so training starts from plain DFlash.

The reference's selector chooses among the 16 most likely tokens of a slot and is trained by a
separate loss. Here it scores the whole draft vocabulary, at little cost for rank 256, so that
training, measuring and verification share one q (`experiment=dflash2_paper`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specdec.context import Context
from specdec.drafters.attention import tokens_from
from specdec.drafters.base import grow_with_depth
from specdec.drafters.block import Block, BlockConfig, BlockSizes
from specdec.errors import require
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts


@dataclass
class DFlash2Config(BlockConfig):
    """DFlash with convolutions over a block's slots and a token selector."""

    bounds: ClassVar = {**BlockConfig.bounds, "taps": 1, "group": 1, "rank": 1, "candidates": 1}
    name: str = "dflash2"
    taps: int = 2  # slots mixed by a convolution: its own and those before it
    group: int = 16  # channels that share a kernel correction; a divisor of the target's width
    rank: int = 256  # rank of the selector
    # tokens of a slot, the likeliest before the selector, that may be drafted; null: all. Training
    # counts all tokens
    candidates: int | None = None


class Convolution(nn.Module):
    """The two convolutions around a sub-layer: side 0 on its input, side 1 on its output."""

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * width // group, bias=False)

    def entered(self, read: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """A sub-layer's input [B, N, D], convolved, and the kernel corrections of both its
        sides."""
        corrections = self.kernel_projection(read).unflatten(-1, (2, self.taps, -1))
        return self(read, corrections, 0, slots), corrections

    def forward(self, x: Tensor, corrections: Tensor, side: int, slots: int) -> Tensor:
        """x [B, N, D], convolved within each block of `slots` slots; `corrections`
        [B, N, 2, taps, G] are added to the kernel of each side."""
        grouped = x.unflatten(1, (-1, slots)).unflatten(-1, (-1, self.group))
        kernel = self.base_kernel[side].unflatten(-1, (-1, self.group))
        kernel = kernel + corrections[..., side, :, :, None].unflatten(1, (-1, slots))
        mixed = torch.zeros_like(grouped)
        for tap in range(min(self.taps, slots)):
            earlier = nn.functional.pad(grouped, (0, 0, 0, 0, tap, 0))[:, :, :slots]
            mixed = mixed + kernel[..., tap, :, :] * earlier
        return mixed.flatten(3).flatten(1, 2)


class Selector(nn.Module):
    def __init__(self, width: int, rank: int, target_vocab: int, draft_vocab: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(target_vocab, rank))
        self.successor_codebook = nn.Parameter(torch.empty(draft_vocab, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(self, gate: Tensor) -> Tensor:
        """The terms added to the logits [..., S], given A[x] * P h [..., N]."""
        return gate @ self.successor_codebook.T


class DFlash2(Block):
    Config = DFlash2Config

    def __init__(self, config: DFlash2Config, sizes: BlockSizes) -> None:
        super().__init__(config, sizes)
        D = self.llama.hidden_size
        require(
            D % config.group == 0,
            f"drafter.group={config.group}: give a divisor of the target's width, {D}",
        )
        for layer in self.layers:
            for name in ("attention_conv", "mlp_conv"):
                layer.add_module(name, Convolution(D, config.taps, config.group))
        size = sizes.draft_vocab or sizes.target_vocab
        self.candidate_selector = Selector(D, config.rank, sizes.target_vocab, size)

    def initialise(self, target: TargetParts) -> None:
        super().initialise(target)
        nn.init.normal_(self.candidate_selector.predecessor_codebook, std=0.02)
        self.candidate_selector.successor_codebook.zero_()
        for layer in self.layers:
            for conv in (layer.attention_conv, layer.mlp_conv):
                conv.kernel_projection.weight.zero_()
                conv.base_kernel.zero_()[:, 0] = 1

    def layer_input(self, layer: Any, x: Tensor) -> tuple[Tensor, Any]:
        entered: tuple[Tensor, Any] = layer.attention_conv.entered(
            layer.input_layernorm(x), self.slots
        )
        return entered

    def finish(self, layer: Any, x: Tensor, attended: Tensor, kept: Any) -> Tensor:
        stream = x + layer.attention_conv(attended, kept, 1, self.slots)
        read, kept = layer.mlp_conv.entered(layer.post_attention_layernorm(stream), self.slots)
        output: Tensor = stream + layer.mlp_conv(layer.mlp(read), kept, 1, self.slots)
        return output

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        """The block's states, and A[x] * P h of the token x before each depth [B, A, K, D + N]."""
        states, chosen = super().hidden(ctx, anchors_BA, drafted_BAK), self.candidate_selector
        before = tokens_from(ctx, anchors_BA, drafted_BAK, self.depth)
        gate = chosen.predecessor_codebook[before] * chosen.hidden_projection(states)
        return torch.cat([states, gate], -1)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        D = self.llama.hidden_size
        return self.chosen(self.head(hidden[..., :D]), self.candidate_selector(hidden[..., D:]))

    def chosen(self, unary: Tensor, added: Tensor) -> Tensor:
        """The sum [..., S] of a slot's logits and what the selector adds, for the slot's
        `candidates` alone; the others have no probability, except in training."""
        logits, most = unary + added, self.config.candidates
        if most is None or self.training or most >= logits.shape[-1]:
            return logits
        kept = torch.zeros_like(unary, dtype=torch.bool).scatter(-1, unary.topk(most).indices, True)
        return logits.masked_fill(~kept.expand_as(logits), -torch.inf)

    def growth(
        self, ctx: Context, logits_BKS: Tensor, states_BKD: Tensor, anchor_B: Tensor
    ) -> Growth:
        chosen = self.candidate_selector
        states_BKN = chosen.hidden_projection(states_BKD)

        def after(tokens_BT: Tensor, parents_BT: Tensor | None, depth: int) -> Tensor:
            gate_BTN = chosen.predecessor_codebook[tokens_BT] * states_BKN[:, depth, None]
            return self.chosen(logits_BKS[:, depth, None], chosen(gate_BTN))

        return Growth(after(anchor_B[:, None], None, 0)[:, 0], grow_with_depth(after))

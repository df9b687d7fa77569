"""Medusa (Cai et al. 2024): parallel heads on the target's last hidden state.

Head k maps the hidden state at a - 1 to token a + 1 + k: logits_k = W2_k (SiLU(W1_k h + b_k) + h),
where W1 is initialised with zero and W2 with the target's LM head, so training starts from the
target's own head. The paper's formula has no b; the reference's layers (FasterDecoding/Medusa,
medusa/model/medusa_model.py) have one. Its initial value is random, so the reference's heads do not
start exactly as the target's.

That is Medusa-1, which does not change the target. With `adapter.rank` above 0 it is Medusa-2: LoRA
adapters on the target are trained together with the heads, and decoding is lossless with respect to
the adapted target. The loss is KL(original ‖ adapted) at every anchor + λ sin(π t / 2T) · the
heads' loss at step t of T (section 2.3.2 of the paper; `medusa_self_distillation` and the schedule
`sine` of the reference's compute_loss). Unlike in the reference, the target's LM head, which may be
its embedding too, gets no adapter. In experiment=medusa2_paper the heads' weights learn four times
as fast (`optim.rates`).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specdec.context import Context
from specdec.drafters.base import DraftVocabConfig, reading_no_draft
from specdec.drafters.depth_heads import MOST_LAYERS, Heads, HeadsSizes
from specdec.drafters.pretrained import LoraOptions
from specdec.drafters.target_views import Adapted, Adapters, adapted_layers, decoder_layers
from specdec.errors import require_within
from specdec.frozen import Frozen
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts, longrope_lines
from specdec.targets.sequence_packing import by_document
from specdec.targets.target import Target


@dataclass
class TargetLoraOptions(LoraOptions):
    """Adapters on the target, trained together with the heads (Medusa-2)."""

    key: ClassVar[str] = "drafter.adapter"
    weight: float = 0.01  # λ, the weight of the heads' loss beside the target's

    def __post_init__(self) -> None:
        super().__post_init__()
        require_within(self.key, self, weight=0)


@dataclass
class MedusaConfig(DraftVocabConfig):
    """`depth` heads of residual layers, each for one depth."""

    bounds: ClassVar = {"num_layers": (1, MOST_LAYERS)}
    name: str = "medusa"
    depth: int = 3
    num_layers: int = 1  # residual layers per head
    # all heads share one trained LM head; false: one per head, as in the paper
    shared_head: bool = True
    bias: bool = False  # add a bias to each residual layer, as in the reference
    adapter: TargetLoraOptions = field(default_factory=TargetLoraOptions)


@dataclass(kw_only=True)
class MedusaSizes(HeadsSizes):
    """`adapted`: the target's linear layers with adapters."""

    adapted: list[Adapted] = field(default_factory=list)


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
    separate_heads = True
    Sizes = MedusaSizes
    sizes: MedusaSizes
    added = "adapters."

    def __init__(self, config: MedusaConfig, sizes: MedusaSizes) -> None:
        super().__init__(config, sizes, sizes.width, config.shared_head, bias=False)
        self.limits.parallel = True
        blocks = (
            ResidualBlock(sizes.width, config.num_layers, config.bias) for _ in range(config.depth)
        )
        self.blocks = nn.ModuleList(blocks)
        self.adapters = Adapters(config.adapter, sizes.adapted)

    @classmethod
    def plan(cls, config: MedusaConfig, target: TargetParts) -> MedusaSizes:
        sizes: MedusaSizes = super().plan(config, target)
        if cls.adapts_target(config):
            num_layers = decoder_layers(target, config.name)
            sizes.adapted = adapted_layers(target, num_layers, config.adapter)
        return sizes

    def step(self, state: Tensor, tokens: Tensor, k: int) -> Tensor:
        """The state unchanged: Medusa's heads read no token."""
        return state

    def output(self, state: Tensor, k: int) -> Tensor:
        output: Tensor = self.blocks[k](state)
        return output

    def read_by_heads(self, ctx: Context, anchors_BA: Tensor) -> Tensor:
        return self.first(ctx, anchors_BA)[:, :, None]

    def heads_of(self, read_NKD: Tensor, first: int) -> Tensor:
        return torch.stack([self.output(x, first + k) for k, x in enumerate(read_NKD.unbind(1))], 1)

    def draft_growth(self, ctx: Context, cache: Any = None) -> Growth:
        """The logits after a node depend only on its depth, so they are computed once for each."""
        anchor_B1 = torch.tensor(ctx.counts(), device=ctx.ids_BT.device)[:, None] - 1
        hidden_BKD = self.hidden(ctx, anchor_B1, None)[:, 0]
        return reading_no_draft(lambda k: self.unembed(hidden_BKD[:, k], k))

    def initialise(self, target: TargetParts) -> None:
        for block in self.blocks:
            for layer in block.layers:  # type: ignore[union-attr]
                layer.weight.zero_()
        self.copy_head(target)
        self.adapters.initialise()

    @classmethod
    def adapts_target(cls, config: MedusaConfig) -> bool:
        return config.adapter.rank > 0

    def attach(self, target: TargetParts) -> None:
        if self.adapts_target(self.config):
            assert isinstance(target, Target)
            self.body = Frozen(self.adapters.view(target, len(target.layers)))
            self.target = target

    def adapted(self, ctx: Context, progress: float) -> tuple[Tensor, float] | None:
        if not self.adapts_target(self.config):
            return None
        lines = longrope_lines(self.target.config)
        final_BTD = by_document(self._read, ctx.ids_BT, ctx.position_BT, ctx.document_BT, lines)
        weight = self.config.adapter.weight * math.sin(math.pi / 2 * progress)
        return final_BTD, weight

    def _read(self, ids_NT: Tensor) -> Tensor:
        """The adapted target's final states [N, T, D] of texts [N, T]."""
        inputs = self.target.position_inputs(ids_NT)
        state_NTD = self.body.held(input_ids=ids_NT, use_cache=False, **inputs).last_hidden_state
        return self.target.before_head(state_NTD)

    def with_adapters_merged(self, target: Target) -> "tuple[Medusa, Target]":
        if not self.adapts_target(self.config):
            return self, target
        config = replace(self.config, adapter=TargetLoraOptions())
        plain = type(self)(config, replace(self.sizes, adapted=[]))
        state = {n: x for n, x in self.state_dict().items() if not n.startswith(self.added)}
        plain.load_state_dict(state)
        plain.noted_alpha = self.noted_alpha
        return plain, self.adapters.merged(target)

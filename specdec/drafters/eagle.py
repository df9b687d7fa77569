"""EAGLE-1 (Li et al. 2024): one decoder layer that continues the target's last hidden state.

The input of the layer is fc(cat[e(x), h]), of width D, where h is the target's state after its
final norm or, at later depths, the layer's own output ĥ. There is no norm before or after the
layer, and the target's own LM head reads ĥ: embedding and head stay frozen, and the draft
vocabulary is the target's. So ĥ predicts h one position ahead, the objective of the paper's
regression loss. The tensors have the names and shapes that vLLM and SGLang load.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specdec.context import Context, HiddenStateSpec, KnownAnchors, TrainingMoment
from specdec.drafters.attention import text_after
from specdec.drafters.layers import Layer, away_from_zero, copy_last
from specdec.drafters.recurrence import INITIALISATIONS, RecurrentConfig, RecurrentSizes, Solved
from specdec.errors import require_within
from specdec.targets.parts import TargetParts


@dataclass
class EagleConfig(RecurrentConfig):
    """EAGLE-1."""

    initialisations: ClassVar[tuple[str, ...]] = INITIALISATIONS
    name: str = "eagle"
    # closed_form: solve for the best linear draft (least squares); target: copy the target's last
    # layer; random: draw the weights at random
    initialisation: str = "closed_form"
    # trained depths; null: all; 1: only depth 0, from the target's hidden states, as in the paper
    unroll: int | None = None
    # width of the uniform noise that training adds to the hidden states of a document of 512 tokens
    # (the paper: 0.2); longer documents get less; 0: none
    noise: float = 0.0
    # each depth reads the previous one's output without a gradient through it, as in HASS
    detach: bool = False
    bias: bool = False  # fc has a bias, as in EAGLE's own code; engines leave it out

    def __post_init__(self) -> None:
        super().__post_init__()
        require_within("drafter", self, unroll=(1, self.depth), noise=0)


class Eagle(Solved):
    Config: ClassVar[type] = EagleConfig
    needs = HiddenStateSpec(final_hidden=True)

    def __init__(self, config: Any, sizes: RecurrentSizes) -> None:
        super().__init__(config, sizes)
        D = self.llama.hidden_size
        self.fc = nn.Linear(2 * D, D, bias=getattr(config, "bias", False))
        self.layers = nn.ModuleList([Layer(self.llama, D)])

    def copy_from(self, target: TargetParts) -> None:
        """Copy the complete last layer of the target if it is Llama-like, else nothing.

        The copy works on states after the final norm; the original reads and writes the residual
        stream. Therefore weights that read the state are divided by the final norm's (q, k and v
        also include the weight of the norm before attention), and weights that write are multiplied
        by it. The norm removes the size of the stream, so the layer's contribution is scaled to
        `UPDATE` times the size of a random state.
        """
        layer, norm = self.layer, self.layer.post_attention_layernorm
        before_D = torch.empty_like(norm.weight)
        ours = dict(layer.named_parameters()) | {"input_layernorm.weight": before_D}
        if (after := copy_last(target, ours)) is None:
            return
        after_D = after.to(before_D)
        divisor_D = away_from_zero(after_D)
        drawn_ND = torch.randn(256, len(after_D), generator=torch.Generator().manual_seed(0))
        state_ND = drawn_ND.to(after_D) * after_D
        length = state_ND.square().mean().sqrt()
        attention = layer.self_attn
        for reads in (attention.q_proj, attention.k_proj, attention.v_proj):
            reads.weight.mul_(before_D / divisor_D)
        norm.weight.mul_(length / divisor_D)
        for writes in (attention.o_proj, layer.mlp.down_proj):
            writes.weight.mul_(after_D[:, None])
        layer.temper(state_ND, state_ND)

    def solve_closed_form(self, known: Callable[[], Iterable[KnownAnchors]]) -> None:
        """Initialise as the best linear draft (`solve_pairs`). At first attention adds nothing, and
        the MLP adds the result of `solve_mlp`."""
        self.solve_pairs(self.fc, known)
        self.layer.silence()
        self.solve_mlp(known)

    @property
    def train_depth(self) -> int:
        return self.config.unroll or self.depth

    def enter(self, embedding: Tensor, hidden_state: Tensor) -> tuple[Tensor, Tensor]:
        pair = self.fc(self.joined(embedding, hidden_state))
        return pair, pair

    def state_for_next_depth(self, hidden: Tensor) -> Tensor:
        """With `detach`, the aligned forwards of HASS (Zhang et al. 2025, arXiv 2408.15766;
        HArmonizedSS/HASS, model/cnets_hass.py).

        There, pass j reads every position t of the text. Its query and residual come from the
        output of pass j - 1 at t - 1; its keys are those of true hidden states up to t - (j - 1)
        and one of each pass i < j, from the output of pass i at t - j + i. So it is depth j - 1 of
        the anchor with pair t - (j - 1), with the inputs of our unrolled layer, but detached.
        The reference takes one backward pass for each loss, so gradients sum:
        `loss.depth_decay=1`. Two of its properties are not reproduced. Its masked scores are 0, not
        -inf, so masked positions count in the softmax's denominator, as in no engine. And pass j
        also trains on the first j - 1 positions of a response, whose anchors lie before the
        response.
        """
        return hidden.detach() if self.config.detach else hidden

    def noisy(self, ctx: Context, moment: TrainingMoment) -> Context:
        """The context with uniform noise of width `noise` · 512/n on the hidden states of each
        document of n tokens. The loss compares with hidden states without noise."""
        if not self.config.noise:
            return ctx
        position_BT, document_BT = ctx.documents()
        which_BT, real_BT = (position_BT == 0).cumsum(1) - 1, (document_BT >= 0).long()
        count_BT = torch.zeros_like(which_BT).scatter_add_(1, which_BT, real_BT).gather(1, which_BT)
        width_BT1 = self.config.noise * 512 / count_BT.clamp_min(1)[..., None]
        final_BTD = ctx.hidden_states(self.needs)
        draws = [
            torch.rand(final_BTD.shape[1:], generator=generator, device=final_BTD.device)
            for generator in moment.generators(final_BTD.device)
        ]
        noise_BTD = (torch.stack(draws) - 0.5) * width_BT1
        return replace(ctx, final_BTD=final_BTD + noise_BTD.to(final_BTD.dtype))

    def training_hidden(self, ctx: Context, anchors_BA: Tensor, moment: TrainingMoment) -> Tensor:
        """The states of the layer, unrolled to `train_depth` depths over noisy hidden states."""
        drafted_BAK = text_after(ctx.ids_BT, anchors_BA, self.train_depth - 1)
        return self.hidden(self.noisy(ctx, moment), anchors_BA, drafted_BAK)

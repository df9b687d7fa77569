"""The MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124): an RNN over the drafted tokens.

The state starts as the target's final hidden state at a - 1. At depth i, with n heads of width D,

    s ← GELU(LN_i(w_s P_i s + w_e √(D/2) E_i(x_{a+i}))),   logits_i = H_i s,
    w_s = ½^{1/2n},   w_e = √(1 - w_s²),

so that about half of the last state's magnitude comes from the first. The formulas, the exact GELU
and the start, all weights from N(0, 1/D), are those of the reference (foundation-model-stack/
fms-extras, fms_extras/models/speculator.py; its norm is LayerNormParameterized of fms). vLLM leaves
out w_s and divides w_e by it instead; after the norm, this is the same up to its eps.

Letters: D width of the state, V target vocabulary.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from specdec.drafters.heads import Heads, HeadsSizes
from specdec.errors import require
from specdec.target.parts import Parts

EPS = 1e-6  # the eps of every norm


@dataclass
class MlpConfig:
    """`depth` heads, each with an embedding table, a projection, a norm and an LM head of its own.

    `inner_dim` is the width of the state and the embeddings; null takes that of the target's state.
    With `tie_weights` all depths share one of each, except the first projection, whose input has
    the target's width. `scale_input` divides the target's state by √2 times its root mean square.
    `draft_vocab` null keeps the whole vocabulary, as the reference does; embeddings cover it all.
    """

    name: str = "mlp"
    depth: int = 3
    inner_dim: int | None = None
    tie_weights: bool = False
    scale_input: bool = False
    draft_vocab: int | None = 8192

    def __post_init__(self) -> None:
        require(
            not self.tie_weights or self.depth > 1,
            "drafter.tie_weights=true needs more than one head: give drafter.depth=2 or more",
        )


class ShiftedNorm(nn.RMSNorm):
    """x / rms(x) · weight + bias."""

    def __init__(self, width: int) -> None:
        super().__init__(width, EPS)
        self.bias = nn.Parameter(self.weight.new_zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class Mlp(Heads):
    Config = MlpConfig
    bounds = {"inner_dim": 1}

    def __init__(self, config: MlpConfig, sizes: HeadsSizes) -> None:
        D, V, n = config.inner_dim or sizes.width, sizes.target_vocab, config.depth
        super().__init__(config, sizes, D, config.tie_weights, bias=False)
        self.inner_dim = D
        count, projections = (1, 2) if config.tie_weights else (n, n)
        widths = [sizes.width] + [D] * (projections - 1)
        self.emb = nn.ModuleList(nn.Embedding(V, D) for _ in range(count))
        self.proj = nn.ModuleList(nn.Linear(width, D, bias=False) for width in widths)
        self.ln = nn.ModuleList(ShiftedNorm(D) for _ in range(count))
        self.state_weight = 0.5 ** (0.5 / n)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * D / 2)

    def start(self, target: Parts) -> None:
        for weight in (w for w in self.parameters() if w.ndim == 2):
            nn.init.normal_(weight, std=self.inner_dim**-0.5)

    def step(self, state: Tensor, tokens: Tensor, k: int) -> Tensor:
        if k == 0 and self.config.scale_input:
            state = nn.functional.rms_norm(state, state.shape[-1:], eps=EPS) / math.sqrt(2)
        emb, proj, ln = (parts[min(k, len(parts) - 1)] for parts in (self.emb, self.proj, self.ln))
        mixed = self.state_weight * proj(state) + self.token_weight * emb(tokens)
        return nn.functional.gelu(ln(mixed))

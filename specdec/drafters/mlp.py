"""The MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124): an RNN over the drafted tokens.

The state starts as the target's final hidden state at a - 1. At depth i, with n heads of width D,

    s ← GELU(LN_i(w_s P_i s + w_e √(D/2) E_i(x_{a+i}))),   logits_i = H_i s,
    w_s = ½^{1/2n},   w_e = √(1 - w_s²),

so that about half of the last state's magnitude comes from the first. The formulas, the exact GELU
and the initialisation of all weights from N(0, 1/D) are those of the reference
(foundation-model-stack/ fms-extras, fms_extras/models/speculator.py; its norm is
LayerNormParameterized of fms). vLLM omits w_s and divides w_e by it; after the norm, this is the
same up to its eps.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specdec.context import KnownAnchors
from specdec.drafters.base import DraftVocabConfig
from specdec.drafters.depth_heads import Heads, HeadsSizes
from specdec.drafters.recurrence import Squares, ridge
from specdec.errors import require
from specdec.frozen import Frozen
from specdec.targets.parts import TargetParts

EPS = 1e-6  # the eps of every norm
AT_ONCE = 8192  # rows of an embedding table that are computed at a time
SMALL, UPWARD = 0.5, 1.0  # weight and bias of norms where GELU is nearly linear


@dataclass
class MlpConfig(DraftVocabConfig):
    """`depth` heads, each with an embedding table, a projection, a norm and an LM head of its own.
    The embeddings cover the complete vocabulary."""

    initialisations: ClassVar[tuple[str, ...]] = ("closed_form", "random")
    bounds: ClassVar = {"inner_dim": 1}
    name: str = "mlp"
    depth: int = 3
    # closed_form: solve for the best linear heads (least squares); random: draw the weights at
    # random, as in the reference
    initialisation: str = "closed_form"
    # width of state and embeddings; null: that of the target's hidden state
    inner_dim: int | None = None
    # all depths share one of each, except the first projection, whose input has the target's width
    tie_weights: bool = False
    scale_input: bool = False  # divide the target's hidden state by √2 times its root mean square

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

    def __init__(self, config: MlpConfig, sizes: HeadsSizes) -> None:
        D, V, n = config.inner_dim or sizes.width, sizes.target_vocab, config.depth
        super().__init__(config, sizes, D, config.tie_weights, bias=False)
        self.inner_dim = D
        self.closed_form_depths = n
        count, projections = (1, 2) if config.tie_weights else (n, n)
        widths = [sizes.width] + [D] * (projections - 1)
        self.emb: Any = nn.ModuleList(nn.Embedding(V, D) for _ in range(count))
        self.proj: Any = nn.ModuleList(nn.Linear(width, D, bias=False) for width in widths)
        self.ln: Any = nn.ModuleList(ShiftedNorm(D) for _ in range(count))
        self.state_weight = 0.5 ** (0.5 / n)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * D / 2)

    def initialise(self, target: TargetParts) -> None:
        for weight in (w for w in self.parameters() if w.ndim == 2):
            nn.init.normal_(weight, std=self.inner_dim**-0.5)

    def attach(self, target: TargetParts) -> None:
        self._target = Frozen(target)

    def solve_closed_form(self, known: Callable[[], Iterable[KnownAnchors]]) -> None:
        """Initialise the heads to predict the target's next state, by least squares.

        At first the norms put GELU's inputs into its nearly linear range. The input of each norm
        can therefore be the best linear prediction of the target's next state, rescaled and rotated
        by `basis_DD` so that all its components have similar sizes. The LM head maps it back and
        applies the target's.
        """
        target, D, moments = self._target.held, self.inner_dim, Squares()
        for some in known():
            moments.add(some.wanted(0).float(), some.wanted(0).float())
        mean_DD = moments.xx / moments.rows
        size_D = mean_DD.diagonal().sqrt().clamp_min(1e-9)
        axes_DD = torch.linalg.eigh(mean_DD / size_D / size_D[:, None])[1]
        kept = min(D, len(size_D))
        drawn = torch.randn(D, kept, generator=torch.Generator().manual_seed(0)).to(size_D)
        basis_DD = (axes_DD[:, -kept:] / size_D[:, None]) @ torch.linalg.qr(drawn)[0].T
        basis_DD = basis_DD.float()
        for norm in self.ln:
            norm.weight.fill_(SMALL)
            norm.bias.fill_(UPWARD)

        for k, proj in enumerate(self.proj):  # if tied, the second serves all depths from 1 on
            emb, guess, tied = self.part(self.emb, k), Squares(), k >= len(self.emb)
            for some in known():
                state_ND, tokens_N = self.entered(self.at(some, k), k), some.tokens(k)
                wanted_ND = some.wanted(k).float() @ basis_DD
                if tied:
                    guess.add(state_ND, wanted_ND - self.token_weight * emb(tokens_N))
                else:
                    token_ND = target.embedding(tokens_N).to(state_ND)
                    guess.add(torch.cat([state_ND, token_ND], -1), wanted_ND)
            solved, width = ridge(guess.xx, guess.xy), proj.weight.shape[1]
            proj.weight.copy_(solved[:width].T / self.state_weight)
            if not tied:
                of_token_DD = (solved[width:] / self.token_weight).to(emb.weight)
                every_V = torch.arange(self.sizes.target_vocab, device=target.device)
                for ids in every_V.split(AT_ONCE):
                    emb.weight[ids] = target.embedding(ids).to(of_token_DD) @ of_token_DD

        own_head_SD = target.own_head(self.vocab_S)
        for i, head in enumerate(self.lm_heads):
            depths = range(self.depth) if len(self.lm_heads) == 1 else [i]
            back = Squares()
            for some in known():
                for k in depths:
                    back.add(self.at(some, k + 1), some.wanted(k).float())
            back_DD = ridge(back.xx, back.xy).T.to(own_head_SD)
            head.weight.copy_(own_head_SD @ back_DD)

    def at(self, some: KnownAnchors, k: int) -> Tensor:
        """The state [N, D] after k of the text's own tokens at known anchors."""
        state = some.before(some.ctx.hidden_states(self.needs)).to(self.proj[0].weight.dtype)
        for depth in range(k):
            state = self.step(state, some.tokens(depth), depth)
        return state

    def part(self, parts: nn.ModuleList, k: int) -> Any:
        """The element of `parts` for depth k."""
        return parts[min(k, len(parts) - 1)]

    def entered(self, state: Tensor, k: int) -> Tensor:
        """The state, rescaled for the projection of depth k."""
        if k > 0 or not self.config.scale_input:
            return state
        return nn.functional.rms_norm(state, state.shape[-1:], eps=EPS) / math.sqrt(2)

    def step(self, state: Tensor, tokens: Tensor, k: int) -> Tensor:
        emb, proj, ln = (self.part(parts, k) for parts in (self.emb, self.proj, self.ln))
        read = self.state_weight * proj(self.entered(state, k))
        return nn.functional.gelu(ln(read + self.token_weight * emb(tokens)))

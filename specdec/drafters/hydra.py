"""Hydra (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, which also read drafted tokens.

Head k reads c = cat[h, e(x_a), …, e(x_{a+k})], where e is the target's frozen embedding and h its
final hidden state at a - 1. The first layer is S c + SiLU(W c). W is initialised with zero; in the
reference, S is initialised like torch's linear layers. The other layers are x + SiLU(W x), and the
LM head is initialised with the target's. All of these have a bias (zankner/Hydra,
hydra/model/hydra_heads/mlp_head.py and prefix_mlp_head.py).

Hydra++ replaces h by the normed output of one decoder layer over the target's states, at committed
positions only. In the reference, which repeats one module, the layers of a head after the first
share their weights; here each has its own, as in the paper.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from specdec.context import Context, KnownAnchors, TrainingMoment
from specdec.drafters.attention import entries
from specdec.drafters.base import DraftVocabConfig
from specdec.drafters.depth_heads import MOST_LAYERS, Heads, HeadsSizes
from specdec.drafters.layers import llama_of
from specdec.drafters.recurrence import Prefix, Squares, ridge
from specdec.errors import require
from specdec.frozen import Frozen
from specdec.runtime.cache import SlotCache
from specdec.targets.parts import TargetParts


@dataclass
class HydraHeadsConfig(DraftVocabConfig):
    """`depth` heads, each of which reads the tokens drafted before it."""

    initialisations: ClassVar[tuple[str, ...]] = ("closed_form", "target")
    bounds: ClassVar = {"num_layers": (1, MOST_LAYERS)}
    name: str = "hydra"
    depth: int = 3
    # closed_form: solve for the best linear heads (least squares); target: copy the target's LM
    # head, as in the authors' code
    initialisation: str = "closed_form"
    num_layers: int = 1  # layers per head
    prefix: bool = False  # add Hydra++'s layer over the target's hidden states
    # probability of zeroing an input of a layer or LM head in training (Hydra++: 0.2)
    dropout: float = 0.0
    shared_head: bool = True  # all heads share one LM head; false: one per head

    def __post_init__(self) -> None:
        require(
            0 <= self.dropout < 1,
            f"drafter.dropout={self.dropout}: give a share of at least 0 and below 1",
        )


@dataclass(kw_only=True)
class HydraSizes(HeadsSizes):
    """`llama`: the keys of a LlamaConfig for the prefix layer, if there is one."""

    llama: dict[str, Any] | None = None


class Hydra(Heads):
    Config = HydraHeadsConfig
    Sizes = HydraSizes

    def __init__(self, config: HydraHeadsConfig, sizes: HydraSizes) -> None:
        D = sizes.width
        super().__init__(config, sizes, D, config.shared_head, bias=True)
        self.closed_form_depths = config.depth
        self.prefix = None if sizes.llama is None else Prefix(sizes.llama, sizes.target_vocab)
        read = [(k + 2) * D for k in range(config.depth)]
        self.skips: Any = nn.ModuleList(nn.Linear(F, D) for F in read)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(F if i == 0 else D, D) for i in range(config.num_layers))
            for F in read
        )

    @classmethod
    def plan(cls, config: HydraHeadsConfig, target: TargetParts) -> HydraSizes:
        sizes: HydraSizes = super().plan(config, target)
        sizes.llama = llama_of(target) if config.prefix else None
        return sizes

    def attach(self, target: TargetParts) -> None:
        target.require_one_width()
        self._embedding = Frozen(target.embedding)

    def first(self, ctx: Context, anchors_BA: Tensor, cache: Any = None) -> Tensor:
        """cat[h, 0, …, 0], with room for the embeddings of all depths."""
        if self.prefix is None:
            state = super().first(ctx, anchors_BA)
        elif cache is None:
            none_BA0 = anchors_BA[..., None][..., :0]
            state = self.prefix.norm(self.prefix.hidden(ctx, anchors_BA, none_BA0)[:, :, 0])
        else:
            state = self.prefix.draft_growth(ctx, cache).logits_BS[:, None]
        return pad(state, (0, self.depth * self.sizes.width))

    def step(self, state: Tensor, tokens: Tensor, k: int) -> Tensor:
        embedding, D = self._embedding.held(tokens).to(state.dtype), self.sizes.width
        return torch.cat([state[..., : (k + 1) * D], embedding, state[..., (k + 2) * D :]], -1)

    def output(
        self, state: Tensor, k: int, drop: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Tensor:
        layers = list(self.blocks[k].children())
        read = drop(state[..., : (k + 2) * self.sizes.width])  # c [B, A, (k + 2) D]
        x = self.skips[k](read) + silu(layers[0](read))  # S c + SiLU(W c) [B, A, D]
        for layer in layers[1:]:
            x = drop(x)
            x = x + silu(layer(x))
        return drop(x)

    def training_hidden(self, ctx: Context, anchors_BA: Tensor, moment: TrainingMoment) -> Tensor:
        """The heads with dropout, drawn for every position of a text."""
        generators, kept = moment.generators(anchors_BA.device), 1 - self.config.dropout

        def drop(x_BAF: Tensor) -> Tensor:
            drawn = x_BAF.new_empty(ctx.ids_BT.shape[1], x_BAF.shape[-1])
            masks = [drawn.clone().bernoulli_(kept, generator=g) for g in generators]
            dropped_BAF: Tensor = x_BAF * entries(torch.stack(masks), anchors_BA) / kept
            return dropped_BAF

        if kept == 1:
            return self.hidden(ctx, anchors_BA, None)
        return self.hidden(ctx, anchors_BA, None, lambda state, k: self.output(state, k, drop))

    def new_cache(self, capacity: int | None = None) -> SlotCache | None:
        return None if self.prefix is None else self.prefix.new_cache(capacity)

    def initialise(self, target: TargetParts) -> None:
        for layer in self.blocks.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.zero_()
        self.copy_head(target)
        if self.prefix is not None:
            self.prefix.initialise(target)

    def solve_closed_form(self, known: Callable[[], Iterable[KnownAnchors]]) -> None:
        """Initialise every head with the S that best predicts the target's final states from c,
        by least squares. The heads are then linear, since every W is zero and every bias is set
        to 0."""
        D, K, heads = self.sizes.width, self.depth, Squares()
        for some in known():
            every_BT = torch.arange(some.ctx.ids_BT.shape[1], device=some.row_N.device)
            every_BT = every_BT.expand_as(some.ctx.ids_BT)
            state = self.first(some.ctx, every_BT)[some.row_N, some.position_N]
            for k in range(K):
                state = self.step(state, some.tokens(k), k)
            heads.add(state, torch.cat([some.wanted(k).to(state) for k in range(K)], -1))
        for k, skip in enumerate(self.skips):
            read = slice((k + 2) * D)
            solved = ridge(heads.xx[read, read], heads.xy[read, k * D : (k + 1) * D])
            skip.weight.copy_(solved.T)
        for linear in (*self.skips, *self.blocks.modules(), *self.lm_heads):
            if isinstance(linear, nn.Linear):
                linear.bias.zero_()

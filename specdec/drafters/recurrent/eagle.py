"""EAGLE-1 (Li et al. 2024): one decoder layer that continues the target's last hidden state.

A pair enters through fc(cat[e(x), h]), D wide, where h is the target's state after its final norm
and later the layer's own output ĥ. There is no norm before the layer nor after it, and ĥ is read
by the target's own LM head: embedding and head stay frozen, and the draft vocabulary is the
target's. So ĥ is a forecast of h one position on, which is what the paper regresses. The tensors
are named and shaped as vLLM and SGLang load them.

Letters: B batch, T time, A anchors, K depth, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.context import Context, Needs
from specdec.drafters.recurrent.recurrence import (
    Layer,
    Recurrent,
    RecurrentSizes,
    llama_of,
    start_at_random,
)
from specdec.errors import require
from specdec.target.parts import Parts


@dataclass
class EagleConfig:
    """EAGLE-1. `unroll` trained depths, null for all `depth` of them; 1 is the paper's recipe,
    which reads the target's features alone.

    `start=target` copies the target's last layer around a pass-through of the feature; `random`
    is the paper's start.
    """

    name: str = "eagle"
    depth: int = 3
    unroll: int | None = None
    start: str = "target"
    intermediate_size: int | None = None  # None: the target's

    def __post_init__(self) -> None:
        require(
            self.unroll is None or 1 <= self.unroll <= self.depth,
            f"drafter.unroll={self.unroll}: give 1 to drafter.depth={self.depth}, or null",
        )


class Eagle(Recurrent):
    Config = EagleConfig
    needs = Needs(final_hidden=True)

    def __init__(self, config: EagleConfig, sizes: RecurrentSizes) -> None:
        super().__init__(config, sizes)
        D = self.llama.hidden_size
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.layers = nn.ModuleList([Layer(self.llama, D)])
        self._head: Callable[[Tensor], Tensor] | None = None
        self._head_dtype = torch.float32

    @classmethod
    def plan(cls, config: EagleConfig, target: Parts) -> RecurrentSizes:
        llama = llama_of(target, config.intermediate_size)
        return RecurrentSizes(target_vocab=target.vocab_size, llama=llama)

    def start(self, target: Parts) -> None:
        start_at_random(self)
        if self.config.start == "random":
            return
        D = self.llama.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, D:] = torch.eye(D)
        theirs = target.layer(-1)
        for name, weight in self.layer.named_parameters():
            if (source := theirs.get(name)) is not None and source.shape == weight.shape:
                weight.copy_(source)

    def attach(self, target: Parts) -> None:
        super().attach(target)
        self._head, self._head_dtype = target.logits, target.dtype

    @property
    def train_depth(self) -> int:
        return self.config.unroll or self.depth

    @property
    def layer(self) -> Layer:
        return self.layers[0]  # type: ignore[return-value]

    def features_of(self, ctx: Context) -> Tensor:
        assert ctx.final_BTD is not None
        return ctx.final_BTD

    def fuse(self, features: Tensor) -> Tensor:
        return features.to(self.fc.weight.dtype)

    def enter(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        pair = self.fc(torch.cat([embedding, feature], -1))
        return pair, pair

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        assert self._head is not None
        return self._head(hidden.to(self._head_dtype))

"""EAGLE-3 (Li et al. 2025): one decoder layer over fused target features, with a head of its own.

A pair is the concatenation of the normed embedding and the normed feature, 2D wide. The feature is
a linear map of the residual stream after several of the target's layers or, at later depths, the
layer's own output. The tensors have the names and shapes that vLLM and SGLang load.

Letters: D width, F features, S draft vocabulary.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.context import Context, Needs
from specdec.drafters.base import AnchorsConfig
from specdec.drafters.recurrent.recurrence import Layer, Recurrent, RecurrentSizes, llama_of
from specdec.errors import require
from specdec.target.parts import Parts


@dataclass
class Eagle3Config:
    """EAGLE-3. `layers` None reads the residual after 2, L/2 and L - 3 layers, as engines do.

    `start=target` copies the target's last layer and LM head and passes the highest feature
    through; `random` is the paper's start. `draft_vocab` null keeps the whole vocabulary.
    """

    name: str = "eagle3"
    depth: int = 3
    layers: list[int] | None = None
    draft_vocab: int | None = 8192
    start: str = "target"
    intermediate_size: int | None = None  # None: the target's
    norm_before_residual: bool = False
    anchors: AnchorsConfig = field(default_factory=AnchorsConfig)

    def __post_init__(self) -> None:
        layers = self.layers
        require(
            layers is None or (len(layers) > 0 and all(a < b for a, b in pairwise(layers))),
            f"drafter.layers={layers}: give distinct layers in rising order, as engines "
            "read them, or null for the default",
        )


@dataclass(kw_only=True)
class Eagle3Sizes(RecurrentSizes):
    """`layers`: the target's layers that are read."""

    layers: list[int]


class PairLayer(Layer):
    """Llama's layer over the concatenation of embedding and feature, each with its own norm."""

    input_layernorm: LlamaRMSNorm  # of the embedding
    hidden_norm: LlamaRMSNorm  # of the feature

    def __init__(self, llama: LlamaConfig) -> None:
        super().__init__(llama, 2 * llama.hidden_size, ("input_layernorm", "hidden_norm"))


class Eagle3(Recurrent):
    Config = Eagle3Config
    Sizes = Eagle3Sizes

    def __init__(self, config: Eagle3Config, sizes: Eagle3Sizes) -> None:
        super().__init__(config, sizes)
        self.needs = Needs(layers=tuple(sizes.layers))
        D = self.llama.hidden_size
        self.fc = nn.Linear(len(self.needs.layers) * D, D, bias=False)
        self.midlayer = PairLayer(self.llama)
        self.norm = LlamaRMSNorm(D, self.llama.rms_norm_eps)
        self.lm_head = nn.Linear(D, sizes.draft_vocab or sizes.target_vocab, bias=False)

    @classmethod
    def plan(cls, config: Eagle3Config, target: Parts) -> Eagle3Sizes:
        L = target.config.num_hidden_layers
        layers = config.layers or sorted({2, L // 2, L - 3})
        few = "" if config.layers else "; name some, as the default needs 6 layers or more"
        require(
            all(0 < k <= L for k in layers),
            f"drafter.layers={list(layers)}: layers of this target run from 1 to {L}{few}",
        )
        pruned = config.draft_vocab if (config.draft_vocab or 0) < target.vocab_size else None
        return Eagle3Sizes(
            target_vocab=target.vocab_size,
            draft_vocab=pruned,
            layers=list(layers),
            llama=llama_of(target, config.intermediate_size),
        )

    def copy_from(self, target: Parts) -> None:
        """Also copy the head and the final norm. If the target's last layer does not have the
        parts of a Llama layer, copy only those that fit."""
        D = self.llama.hidden_size
        rows = slice(None) if self.vocab_S is None else self.vocab_S
        self.lm_head.weight.copy_(target.head.weight[rows])
        theirs = target.layer(-1)
        ours = dict(self.midlayer.named_parameters())
        ours.pop("input_layernorm.weight")  # the target's norms the stream: it goes to the feature
        theirs["hidden_norm.weight"] = theirs.get("input_layernorm.weight", torch.ones(D))
        for name, weight in ours.items():
            source = theirs.get(name, torch.empty(0))
            if source.shape == weight.shape:
                weight.copy_(source)
            elif source.shape == (weight.shape[0], D):  # q, k, v: the feature's half
                weight[:, D:] = source
        final = getattr(target.norm, "weight", None)
        if final is not None and final.shape == self.norm.weight.shape:
            self.norm.weight.copy_(final)

    @property
    def layer(self) -> Layer:
        return self.midlayer

    def features_of(self, ctx: Context) -> Tensor:
        assert ctx.layers_BTF is not None
        return ctx.layers_BTF

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features.to(self.fc.weight.dtype))

    def enter(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        normed = layer.hidden_norm(feature)
        both = torch.cat([layer.input_layernorm(embedding), normed], -1)
        return both, normed if self.config.norm_before_residual else feature

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self.lm_head(self.norm(hidden))

"""EAGLE-3 (Li et al. 2025): decoder layers over fused target features, with a head of their own.

A pair is the concatenation of the normed embedding and the normed feature, 2D wide. The feature is
a linear map of the residual stream after several of the target's layers or, at later depths, the
output of the last layer. Layers above the first are Llama's own and read the stream alone. The
tensors have the names and shapes that vLLM and SGLang load.

Letters: D width, F features, S draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.context import Needs
from specdec.drafters.base import chosen_layers, require_rising
from specdec.drafters.recurrent.recurrence import (
    Layer,
    Recurrent,
    RecurrentConfig,
    RecurrentSizes,
    llama_of,
)
from specdec.errors import require
from specdec.target.parts import Parts

MOST_LAYERS = 64


@dataclass
class Eagle3Config(RecurrentConfig):
    """EAGLE-3. `layers` None reads the residual after 2, L/2 and L - 3 layers, as engines do.

    `start=target` copies the target's last `num_layers` layers and LM head and passes the highest
    feature through. `draft_vocab` null keeps the whole vocabulary.

    EAGLE-3.1 norms what the layers add up to (vLLM 0.32, llama_eagle3.py): `norm_before_fc` norms
    the concatenated features together, or `fc_norm` norms each of them, and `norm_output` norms the
    output that the next depth reads.
    """

    name: str = "eagle3"
    layers: list[int] | None = None
    draft_vocab: int | None = 8192
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        require_rising(self.layers)
        require(
            not (self.norm_before_fc and self.fc_norm),
            "drafter.norm_before_fc and drafter.fc_norm cannot be combined: give one of them",
        )


@dataclass(kw_only=True)
class Eagle3Sizes(RecurrentSizes):
    """`layers`: the target's layers that are read."""

    layers: list[int]


class Eagle3(Recurrent):
    Config = Eagle3Config
    Sizes = Eagle3Sizes
    bounds = {"num_layers": (1, MOST_LAYERS)}

    def __init__(self, config: Eagle3Config, sizes: Eagle3Sizes) -> None:
        super().__init__(config, sizes)
        self.needs = Needs(layers=tuple(sizes.layers))
        D, eps, count = self.llama.hidden_size, self.llama.rms_norm_eps, len(self.needs.layers)
        self.input_norm = LlamaRMSNorm(count * D, eps) if config.norm_before_fc else None
        norms = (LlamaRMSNorm(D, eps) for _ in range(count))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(count * D, D, bias=False)
        # the norms of the embedding and of the feature
        self.midlayer = Layer(self.llama, 2 * D, ("input_layernorm", "hidden_norm"))
        made = range(1, config.num_layers)
        above = {str(i): Layer(self.llama, D, ("input_layernorm",)) for i in made}
        self.layers = nn.ModuleDict(above)  # layers.1, …, as engines name them
        self.norm = LlamaRMSNorm(D, eps)
        self.lm_head = nn.Linear(D, sizes.draft_vocab or sizes.target_vocab, bias=False)

    @classmethod
    def plan(cls, config: Eagle3Config, target: Parts) -> Eagle3Sizes:
        L = target.config.num_hidden_layers
        require(
            config.start != "target" or config.num_layers <= L,
            f"drafter.num_layers={config.num_layers}: this target has only {L} layers to start "
            "from; give drafter.start=random",
        )
        layers = chosen_layers(config.layers, [2, L // 2, L - 3], target)
        llama = llama_of(target, config.intermediate_size)
        return cls.sized(config, target, llama=llama, layers=layers)

    def copy_from(self, target: Parts) -> None:
        """Also copy the head and the final norm. If the target's layers do not have the parts of
        a Llama layer, copy only those that fit."""
        D = self.llama.hidden_size
        rows = slice(None) if self.vocab_S is None else self.vocab_S
        self.lm_head.weight.copy_(target.head.weight[rows])
        for i, layer in enumerate([self.layer, *self.upper]):
            theirs, ours = target.layer(i - 1 - len(self.upper)), dict(layer.named_parameters())
            if layer is self.layer:
                ours.pop("input_layernorm.weight")  # the target's norm is for the feature
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

    @property
    def upper(self) -> Sequence[Layer]:
        return [*self.layers.values()]

    def fuse(self, features: Tensor) -> Tensor:
        features = super().fuse(features)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            chunks = zip(self.fc_norm, features.chunk(len(self.fc_norm), -1), strict=True)
            features = torch.cat([norm(chunk) for norm, chunk in chunks], -1)
        return self.fc(features)

    def onward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden

    def enter(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        normed = layer.hidden_norm(feature)
        both = torch.cat([layer.input_layernorm(embedding), normed], -1)
        return both, normed if self.config.norm_before_residual else feature

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self.lm_head(self.norm(hidden))

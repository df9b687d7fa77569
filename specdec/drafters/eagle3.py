"""EAGLE-3 (Li et al. 2025): decoder layers over fused target hidden states, with their own LM head.

The first layer reads a normed embedding and a normed hidden state side by side, 2D wide. The hidden
state is a linear map of the residual stream after several of the target's layers or, at later
depths, the output of the draft's last layer. Layers above the first are Llama's and read the
residual stream alone. The tensors have the names and shapes that vLLM and SGLang load.

This file has the configuration, the parts of the forward pass and the initialisation. The class
`Recurrent` (recurrence.py) unrolls them in training and drafting.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from specdec.context import HiddenStateSpec, KnownAnchors
from specdec.drafters.base import DraftVocabConfig, chosen_layers, require_rising
from specdec.drafters.layers import Layer, RMSNorm, copy_alike, copy_fitting, llama_of
from specdec.drafters.recurrence import (
    INITIALISATIONS,
    RecurrentConfig,
    RecurrentSizes,
    Solved,
    Squares,
    low_rank,
    ridge,
)
from specdec.errors import require
from specdec.targets.parts import TargetParts

MOST_LAYERS = 64
KEPT = 0.8  # the factor on M_h in a closed-form initialisation (see `Eagle3.solve_closed_form`)
DAMPING = 0.03  # damping of the inverse of 1 + M_h / s there, which is nearly singular


@dataclass
class Eagle3Config(RecurrentConfig, DraftVocabConfig):
    """EAGLE-3. EAGLE-3.1 has more norms (vLLM 0.32, llama_eagle3.py): `norm_before_fc` or
    `fc_norm`, and `norm_output`."""

    initialisations: ClassVar[tuple[str, ...]] = INITIALISATIONS
    bounds: ClassVar = {"num_layers": (1, MOST_LAYERS)}
    name: str = "eagle3"
    # closed_form: solve for the best linear draft (least squares); target: copy the target's last
    # num_layers layers and LM head; random: draw the weights at random
    initialisation: str = "closed_form"
    # ascending numbers, from 1, of the target layers after which the residual is read; null: 2, L/2
    # and L - 3 of L layers, as in engines
    layers: list[int] | None = None
    num_layers: int = 1  # layers of the draft
    norm_before_residual: bool = False  # the residual of the first layer is the normed hidden state
    norm_before_fc: bool = False  # norm the concatenated hidden states together
    fc_norm: bool = False  # norm each of the concatenated hidden states
    norm_output: bool = False  # norm the output read by the next depth

    def __post_init__(self) -> None:
        super().__post_init__()
        require_rising(self.layers)
        require(
            not (self.norm_before_fc and self.fc_norm),
            "drafter.norm_before_fc and drafter.fc_norm cannot be combined: give one of them",
        )


@dataclass(kw_only=True)
class Eagle3Sizes(RecurrentSizes):
    """`layers`: the layers of the target whose hidden states are read; `target_width`: the width of
    these states, if it differs from the draft's."""

    layers: list[int]
    target_width: int | None = None


class Eagle3(Solved):
    Config = Eagle3Config
    Sizes = Eagle3Sizes

    def __init__(self, config: Eagle3Config, sizes: Eagle3Sizes) -> None:
        super().__init__(config, sizes)
        self.needs = HiddenStateSpec(layers=tuple(sizes.layers))
        D, eps, count = self.llama.hidden_size, self.llama.rms_norm_eps, len(self.needs.layers)
        width = sizes.target_width or D
        self.input_norm = RMSNorm(count * width, eps) if config.norm_before_fc else None
        norms = (RMSNorm(width, eps) for _ in range(count))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(count * width, D, bias=False)
        # the norms of the embedding and of the hidden state
        self.midlayer = Layer(self.llama, 2 * D, ("input_layernorm", "hidden_norm"))
        numbers = range(1, config.num_layers)
        above = {str(i): Layer(self.llama, D, ("input_layernorm",)) for i in numbers}
        self.layers = nn.ModuleDict(above)  # layers.1, …, as engines name them
        self.norm = RMSNorm(D, eps)
        self.lm_head = nn.Linear(D, sizes.draft_vocab or sizes.target_vocab, bias=False)
        if config.initialisation == "closed_form" and not (config.norm_before_fc or config.fc_norm):
            # its weights are small, as the hidden states are large
            self.learning_rates = {"fc.*": 0.03}

    @classmethod
    def plan(cls, config: Eagle3Config, target: TargetParts) -> Eagle3Sizes:
        num_layers = target.depth
        require(
            config.initialisation == "random" or config.num_layers <= num_layers,
            f"drafter.num_layers={config.num_layers}: this target has only {num_layers} layers to "
            "start from; give drafter.initialisation=random",
        )
        layers = chosen_layers(config.layers, [2, num_layers // 2, num_layers - 3], target)
        llama = llama_of(target, config.intermediate_size, config.layer_config)
        if (width := target.width) == llama["hidden_size"]:
            return cls.Sizes.of_config(config, target, llama=llama, layers=layers)
        require(
            config.own_embedding and config.initialisation == "random",
            f"drafter.layer_config.hidden_size={llama['hidden_size']}: the width of {target.name} "
            f"is {width}, and a draft of another one needs an embedding of its own: give a draft "
            "that has one with drafter.from",
        )
        return cls.Sizes.of_config(config, target, llama=llama, layers=layers, target_width=width)

    @property
    def layer(self) -> Layer:
        return self.midlayer

    @property
    def upper(self) -> Sequence[Layer]:
        return [*self.layers.values()]

    # The forward pass: `fuse` and `enter` make the input of the first layer, `step` (`Recurrent`)
    # runs the layers, `unembed` is the head. `Recurrent.unrolled` takes the step in training, and
    # `Recurrent.draft_growth` in drafting.

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """The target's hidden states [..., F], F = layers · D, as one hidden state h [..., D]."""
        fused: Tensor = self.fc(self.normed(hidden_states))  # [..., F] -> [..., D]
        return fused

    def normed(self, hidden_states: Tensor) -> Tensor:
        """The hidden states [..., F] as fc reads them."""
        hidden_states = super().fuse(hidden_states)  # [..., F] in the draft's dtype
        if self.input_norm is not None:
            hidden_states = self.input_norm(hidden_states)  # [..., F], normed together
        if self.fc_norm is not None:
            chunks = hidden_states.chunk(len(self.fc_norm), -1)  # one per layer [..., D]
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            hidden_states = torch.cat(normed, -1)  # [..., F], each layer's normed by itself
        return hidden_states

    def enter(self, embedding: Tensor, hidden_state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        normed = layer.hidden_norm(hidden_state)  # n(h) [..., D]
        both = torch.cat([layer.input_layernorm(embedding), normed], -1)  # [e; n(h)] [..., 2D]
        # residual [..., D]
        return both, normed if self.config.norm_before_residual else hidden_state

    def state_for_next_depth(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden  # [..., D]

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))  # [..., D] -> [..., S]
        return logits

    @property
    def last_norm(self) -> RMSNorm:
        return self.norm

    def copy_from(self, target: TargetParts) -> None:
        """Copy the parts of the target's last layer, the head and the final norm. If the target's
        layers are not Llama-like, copy only the tensors that fit."""
        D = self.llama.hidden_size
        self.lm_head.weight.copy_(target.own_head(self.vocab_S))
        for i, layer in enumerate([self.layer, *self.upper]):
            theirs, ours = target.as_llama(i - 1 - len(self.upper)), dict(layer.named_parameters())
            if layer is self.layer:
                ours.pop("input_layernorm.weight")  # the target's norm is for the hidden state
                theirs["hidden_norm.weight"] = theirs.get("input_layernorm.weight", torch.ones(D))
            copy_alike(theirs, ours, D)
        copy_fitting(self.norm.weight, target.norm_weight)

    def solve_closed_form(self, known: Callable[[], Iterable[KnownAnchors]]) -> None:
        """Initialise as the draft that best predicts the target's final states, by least squares.

        At first a token attends almost only to itself, since queries and keys are the same random
        map of the embedding. Without the MLP, the layer is then linear in what it reads, apart from
        norms: out = h + [e; n(h)] M, where e is the normed embedding, h the fused hidden state or
        the output of the depth before, n a norm, and M has the rank of the values. The output
        should be u, the target's final state divided by the weight of its norm.

        First depth 0 is solved alone: x W + e B ≈ u, where x are the hidden states. Its output p is
        what depth 1 reads. Then both depths together give M, whose rows are M_e for e and M_h for
        n(h): x W + e M_e ≈ u and p + [e; n(p)] M ≈ u. Depth 0 reads h through M too, so W is solved
        again for this M and multiplied by the damped inverse of 1 + M_h / s, where s is the size of
        h. The MLP comes last (`solve_mlp`).
        """
        layer, D = self.midlayer, self.llama.hidden_size
        for norm in (layer.input_layernorm, layer.hidden_norm):
            norm.weight.fill_(1.0)
        first, later = Squares(), Squares()
        self.scale_last_norm(known())
        for some in known():
            x, e = self.normed(self.before(some)), layer.input_layernorm(self.token(some, 0))
            first.add(torch.cat([x, e], -1), self.wanted(some, 0))
        weight = ridge(first.xx, first.xy)
        for some in known():
            x, e = self.normed(self.before(some)), layer.input_layernorm(self.token(some, 0))
            output = torch.cat([x, e], -1) @ weight.to(x)
            both, residual = self.enter(self.token(some, 1), self.state_for_next_depth(output))
            later.add(both, self.wanted(some, 1) - residual)

        F = len(first.xx) - D  # the width of x
        xx, xy = first.xx.new_zeros(F + 2 * D, F + 2 * D), first.xy.new_zeros(F + 2 * D, D)
        for of, rows in ((first, slice(F + D)), (later, slice(F, None))):
            xx[rows, rows] += of.xx
            xy[rows] += of.xy
        rank = layer.self_attn.v_proj.out_features
        inner, outer = low_rank(ridge(xx, xy)[F:], later.xx, rank)
        inner[D:] *= KEPT
        M_e, M_h = (inner @ outer).split(D)
        solved = ridge(first.xx[:F, :F], first.xy[:F] - first.xx[:F, F:] @ M_e)
        fused, eye = solved, torch.eye(D).to(solved)
        for _ in range(3):  # s and fc depend on each other
            size = ((fused.T @ first.xx[:F, :F] @ fused).trace() / (first.rows * D)).sqrt()
            through = eye + M_h / (1.0 if self.config.norm_before_residual else size)
            fused = solved @ through.T @ (through @ through.T + DAMPING * eye).inverse()
        self.fc.weight.copy_(fused.T)
        layer.self_attn.see_oneself(inner, outer)

        for above in self.upper:
            above.silence()
        self.solve_mlp(known)

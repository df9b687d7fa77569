"""Inputs of the second implementation of a drafter (export_check.py): the files of an export, and a
random text with random states in place of the target's.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from specdec.drafters.base import Drafter
from specdec.formats.layout import Description, Tensors
from specdec.targets.parts import TargetParts

LENGTH = 192  # tokens of a trial, if the target has so many positions
BEYOND = 64  # tokens of a trial beyond a draft's window
LONGEST = 1024  # tokens of a trial for a larger window, which then has no effect
ANCHORS = (0.3, 0.99)  # positions of a trial's anchors, as fractions of its text
DEPTHS = 3  # the most depths that are compared
FINAL = -1  # in place of a layer's number: the final state, not the stream after a layer


@dataclass(frozen=True)
class CheckText:
    """A random text, its anchors, the number of depths to draft after them, and the target's
    states."""

    ids_T: Tensor
    anchors: tuple[int, ...]
    depths: int
    width: int

    @classmethod
    def drawn_for(cls, drafter: Drafter, target: TargetParts) -> "CheckText":
        depths, generator = min(drafter.depth, DEPTHS), torch.Generator().manual_seed(0)
        window = getattr(drafter.config, "window", None) or 0
        wanted = max(LENGTH, min(window + BEYOND, LONGEST))
        room = min(target.room(1), drafter.limits.positions or wanted + DEPTHS)
        length = min(wanted, room - depths)
        ids_T = torch.randint(target.vocab_size, (length + depths,), generator=generator)
        anchors = tuple(max(1, int(share * (length - 1))) for share in ANCHORS)
        return cls(ids_T.to(target.device), anchors, depths, target.width)

    def state(self, k: int) -> Tensor:
        """The residual stream [T, D] after k of the target's layers, or the final state (-1)."""
        drawn = torch.randn(
            len(self.ids_T), self.width, generator=torch.Generator().manual_seed(k + 2)
        )
        return drawn.to(self.ids_T.device)

    def following(self, anchor: int) -> Tensor:
        """The tokens that are drafted after an anchor."""
        return self.ids_T[anchor + 1 : anchor + self.depths]


@dataclass(frozen=True)
class ExportFolder:
    """The files of an export, and the parts of the target that an engine shares."""

    config: Description
    tensors: Tensors
    overrides: Description
    target: TargetParts
    path: Path

    def taken(self, prefix: str) -> Tensors:
        """The tensors whose names begin with `prefix`, by the rest of their names."""
        return {n.removeprefix(prefix): x for n, x in self.tensors.items() if n.startswith(prefix)}

    def embed(self, ids: Tensor) -> Tensor:
        shared = self.target.embedding.weight
        return embedding(ids, self.tensors.get("embed_tokens.weight", shared)).float()

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., V] of the draft's own head or the target's, scaled by the config."""
        own = self.tensors.get("lm_head.weight")
        weight = self.target.head.weight if own is None else own.float()
        scale: float = self.config.get("logit_scale", 1)
        scores = linear(states.to(weight.dtype), weight).float() * scale
        if cap := self.config.get("final_logit_softcapping"):
            scores = cap * torch.tanh(scores / cap)
        V = self.target.vocab_size
        size = self.config.get("draft_vocab_size") or self.config.get("vocab_size") or V
        if size == V:
            return scores
        whole = scores.new_full((*scores.shape[:-1], V), -torch.inf)
        whole[..., torch.arange(size, device=whole.device) + self.tensors["d2t"]] = scores
        return whole

"""The objective: which terms a draft is trained on, and how they are combined into one number.

Letters: N anchors, K depths.
"""

import inspect
import math
from dataclasses import dataclass, field
from functools import reduce

from torch import Tensor

from specdec.errors import nearest, require, require_known, require_within
from specdec.objectives.losses import TERMS
from specdec.objectives.piece import Piece


@dataclass
class ObjectiveConfig:
    """A weighted sum of terms (see losses.py), summed over the depths of each anchor with weights
    `depth_decay`^k, and averaged over anchors.

    `terms`: the weight of each term; a weight of 0 leaves a term out. `constants`: values for a
    term's own constants, such as `objective.constants.jsd.beta=0.1`. `per`: token averages over
    all anchors of a step equally; sequence averages over each text first, so long texts do not
    dominate. `chunk`: the number of anchors whose logits, at all depths, exist at a time.
    """

    terms: dict[str, float] = field(default_factory=lambda: {"nla": 1.0})
    constants: dict[str, dict[str, float]] = field(default_factory=dict)
    depth_decay: float = 0.8
    per: str = "token"
    chunk: int = 256

    def __post_init__(self) -> None:
        require_within("objective", self, chunk=1, depth_decay=0)
        require_known("objective", self, per=("token", "sequence"))
        require(any(self.terms.values()), "objective.terms is empty: give one, such as {nla: 1}")
        for kind in ("terms", "constants"):
            for name in getattr(self, kind):
                require(name in TERMS, f"objective.{kind}.{name} is unknown{nearest(name, TERMS)}")
        for name, given in self.constants.items():
            known = list(inspect.signature(TERMS[name]).parameters)[1:]
            for key in given:
                where = f"objective.constants.{name}.{key}"
                require(key in known, f"{where} is unknown{nearest(key, known)}")
        for name, weight in self.terms.items():
            require(math.isfinite(weight), f"objective.terms.{name}={weight}: give a finite weight")

    def loss(self, piece: Piece) -> Tensor:
        """The weighted sum of the terms [N, K]."""
        terms = [
            weight * TERMS[name](piece, **self.constants.get(name, {}))
            for name, weight in self.terms.items()
            if weight
        ]
        return reduce(Tensor.add, terms)

    def __str__(self) -> str:
        terms = " + ".join(f"{w:g} {name}" for name, w in self.terms.items() if w)
        return f"{terms}, depth k weighs {self.depth_decay:g}^k, per {self.per}"

"""The objective: which terms a draft is trained on, and how they become one number.

Letters: N anchors, K depths.
"""

import inspect
import math
from dataclasses import dataclass, field

from torch import Tensor

from specdec.errors import nearest, require
from specdec.objectives.losses import TERMS
from specdec.objectives.piece import Piece

NORMALISATIONS = ("token", "sequence")


@dataclass
class ObjectiveConfig:
    """A weighted sum of terms (see losses.py), at each anchor summed over depths with the weights
    `depth_decay`^k, and averaged over anchors.

    `terms`: the weight of each term; a weight of 0 leaves one out. `constants`: what a term's own
    constants are set to, such as `objective.constants.jsd.beta=0.1`. `per`: token averages over
    all anchors of a step alike; sequence averages over each text first, so that long texts do not
    dominate. `chunk`: anchors whose logits, at all depths, exist at a time.
    """

    terms: dict[str, float] = field(default_factory=lambda: {"nla": 1.0})
    constants: dict[str, dict[str, float]] = field(default_factory=dict)
    depth_decay: float = 0.8
    per: str = "token"
    chunk: int = 256

    def __post_init__(self) -> None:
        require(self.chunk >= 1, f"objective.chunk={self.chunk}: give 1 or more")
        require(
            0 <= self.depth_decay < math.inf,
            f"objective.depth_decay={self.depth_decay}: give a number of at least 0",
        )
        require(
            self.per in NORMALISATIONS,
            f"objective.per={self.per!r} is unknown{nearest(self.per, NORMALISATIONS)}",
        )
        for name, weight in self.terms.items():
            require(name in TERMS, f"objective.terms.{name} is unknown{nearest(name, TERMS)}")
            require(math.isfinite(weight), f"objective.terms.{name}={weight}: give a finite weight")
        require(any(self.terms.values()), "objective.terms is empty: give one, such as {nla: 1}")
        for name, given in self.constants.items():
            require(name in TERMS, f"objective.constants.{name} is unknown{nearest(name, TERMS)}")
            known = list(inspect.signature(TERMS[name]).parameters)[1:]
            for key in given:
                require(
                    key in known,
                    f"objective.constants.{name}.{key} is unknown{nearest(key, known)}",
                )

    def losses(self, piece: Piece) -> dict[str, Tensor]:
        """Each term's loss [N, K], before its weight."""
        return {
            name: TERMS[name](piece, **self.constants.get(name, {}))
            for name, weight in self.terms.items()
            if weight
        }

    def __str__(self) -> str:
        terms = " + ".join(f"{w:g} {name}" for name, w in self.terms.items() if w)
        return f"{terms}, depth k weighs {self.depth_decay:g}^k, per {self.per}"

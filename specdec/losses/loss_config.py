"""The configuration of the loss: its terms and their weighted sum."""

import inspect
import math
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from specdec.errors import nearest, require, require_between, require_known, require_within
from specdec.losses.loss_terms import (
    COMPARING,
    COUPLED,
    LOSS_TERMS,
    OF_TREES,
    LossInputs,
    ReadsTarget,
    TextInputs,
)
from specdec.sampling.trees import Static

SHARES = ("keep", "smooth", "until")  # constants from 0 to 1


@dataclass
class LossConfig:
    """A weighted sum of loss terms, summed over the depths of each anchor and averaged over
    anchors. A confidence head is trained beside them with weight 1, and its gradient reaches
    nothing else, unless `confidence` is among the terms."""

    # weight of each term, by name; 0 omits it; [FROM, TO, UNTIL]: from FROM linearly to TO when the
    # fraction UNTIL of the steps is done, as in {kl: [1, 0, 0.5], nla: [0, 1, 0.5]}
    terms: dict[str, Any] = field(default_factory=lambda: {"nla": 1.0})
    # constants of a term, as in loss.constants.jsd.beta=0.1; empty: each term's own
    constants: dict[str, dict[str, float]] = field(default_factory=dict)
    # folder of a trained draft, with which adaspec compares; null: none
    reference: str | None = None
    paths: list[list[int]] | None = None  # nodes of the tree for expected_tree; null: decode.paths
    depth_decay: float = 0.8  # weight of depth k is this number to the power k
    least_weight: float = 0.0  # least weight of a depth
    # token: average over all anchors of a step; sequence: average over each document first, so long
    # ones do not dominate
    per: str = "token"
    chunk: int = 256  # anchors whose logits, at all depths, are in memory at a time

    def __post_init__(self) -> None:
        require_within("loss", self, chunk=1, depth_decay=0, least_weight=0)
        require_known("loss", self, per=("token", "sequence"))
        for kind in ("terms", "constants"):
            for name in getattr(self, kind):
                require(
                    name in LOSS_TERMS,
                    f"loss.{kind}.{name} is unknown{nearest(name, LOSS_TERMS)}",
                )
        for name, constants in self.constants.items():
            known = set(inspect.signature(LOSS_TERMS[name]).parameters) - {"inputs", "paths"}
            for key, value in constants.items():
                where = f"loss.constants.{name}.{key}"
                require(key in known, f"{where} is unknown{nearest(key, known)}")
                if key in SHARES:
                    require_between(where, value, 0, 1)
                whole = float(value).is_integer() and value >= 1
                require(key != "k" or whole, f"{where}={value}: give a whole number >= 1")
        require(bool(self._used()), "loss.terms is empty: give one, such as {nla: 1}")

    def for_tree(self, drafted: list[list[int]] | None) -> "LossConfig":
        """This loss with the given paths of a tree, if a term reads paths and has none; otherwise
        the loss unchanged."""
        reads = any(name in OF_TREES for name in self._used())
        return replace(self, paths=drafted) if reads and self.paths is None else self

    def require_complete(self) -> None:
        """Raise UserError for a term without one of its inputs, and for inputs that no term
        reads."""
        used = self._used()
        comparing, of_trees = ([name for name in used if name in x] for x in (COMPARING, OF_TREES))
        require(
            not comparing or self.reference is not None,
            f"loss.terms.{', '.join(comparing)} compares with a draft trained before: "
            "give loss.reference=runs/NAME/best",
        )
        require(
            bool(comparing) or self.reference is None,
            f"loss.reference={self.reference} is read by {', '.join(COMPARING)} alone: omit "
            "it, or add that term",
        )
        require(
            not of_trees or self.paths is not None,
            f"loss.terms.{', '.join(of_trees)} is for the tree that will be drafted: "
            "give its paths, such as decode.tree=static decode.paths=[[0],[1],[0,0]]",
        )
        require(
            bool(of_trees) or self.paths is None,
            f"loss.paths is read by {', '.join(OF_TREES)} alone: omit it, or add that term",
        )
        if self.paths is not None:
            Static(self.paths)  # raises if they do not form a tree

    def loss(self, inputs: LossInputs) -> Tensor:
        """The weighted sum of the terms [N, K]."""
        terms, used = [], self._used()
        apart = self.trains_confidence_apart and not isinstance(inputs, TextInputs)
        if inputs.confidence is not None and apart:
            used["confidence"] = (1.0, 1.0, 1.0)
        for name, (first, last, until) in used.items():
            weight = first + (last - first) * min(1.0, inputs.progress / until)
            terms.append(weight * self._term(name, inputs))
        return reduce(Tensor.add, terms)

    def _term(self, name: str, inputs: LossInputs) -> Tensor:
        """A term [N, K] with its constants."""
        constants: dict[str, Any] = dict(self.constants.get(name, {}))
        if name in OF_TREES:
            constants["paths"] = self.paths
        return LOSS_TERMS[name](inputs, **constants)

    @property
    def terms_of_target(self) -> list[str]:
        """The terms that read p or the target's hidden states, found by calling each of them on
        dummy inputs without p. The others read q and the text's own tokens."""
        terms = []
        for name in self._used():
            x_NK, x_NKS = torch.zeros(1, 2), torch.zeros(1, 2, 4)
            inputs = TextInputs(
                x_NKS.log_softmax(-1),
                label=x_NK.long(),
                valid=x_NK == 0,
                logits=x_NKS,
                hidden=x_NKS,
                confidence=x_NK + 0.5,
                reference_log_q=x_NKS.log_softmax(-1),
            )
            try:
                self._term(name, inputs)
            except ReadsTarget:
                terms.append(name)
        return terms

    @property
    def couples(self) -> bool:
        """Whether the loss at one depth depends on other depths or on the number of the depth."""
        return any(name in COUPLED for name in self._used())

    @property
    def trains_confidence_apart(self) -> bool:
        """Whether the drafter's own estimate of acceptance gets a separate loss, because no term
        trains it. Its gradient changes only that estimate."""
        return "confidence" not in self.terms

    def __str__(self) -> str:
        terms = []
        for name, (first, last, until) in self._used().items():
            ramp = f"({first:g} to {last:g} over {until:.0%} of the run)"
            terms.append(f"{f'{first:g}' if first == last else ramp} {name}")
        least = f", at least {self.least_weight:g}" if self.least_weight else ""
        weights = f"depth k weighs {self.depth_decay:g}^k{least}"
        return f"{' + '.join(terms)}, {weights}, per {self.per}"

    def weight(self, depth: int) -> float:
        """The weight of this depth, counted from 0."""
        return max(self.depth_decay**depth, self.least_weight)

    def _used(self) -> dict[str, tuple[float, float, float]]:
        """FROM, TO and UNTIL of the terms, without terms whose weight is always 0."""
        ramps: dict[str, Any] = {}
        for name, weight in self.terms.items():
            ramp = weight if isinstance(weight, list | tuple) else (weight, weight, 1)
            finite = all(type(x) in (int, float) and math.isfinite(x) for x in ramp)
            require(
                finite and len(ramp) == 3 and 0 < ramp[2] <= 1,
                f"loss.terms.{name}={weight}: give a finite weight, or [FROM, TO, UNTIL] such "
                "as [0, 1, 0.5], where UNTIL is a share of the run above 0, up to 1",
            )
            if any(ramp[:2]):
                ramps[name] = ramp
        return ramps

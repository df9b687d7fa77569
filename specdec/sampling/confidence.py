"""Confidence: the draft's own estimate of the probability that the target accepts a drafted token,
given that it accepts all tokens before it. It is the token's q or an estimate of the drafting
method. A `Calibration`, fitted to held-out text (specdec.measure.calibration) and kept with the
draft, maps a confidence to the share of tokens of that confidence that the target accepted."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from specdec.errors import require, require_between

MOST = 1e3  # the largest scale or shift: fitted ones are far smaller
SURE = -1e-6  # log c is cut off here: at c = 1 the logit would be infinite


def logit(log_c: Tensor) -> Tensor:
    """log c - log (1 - c), from log c."""
    log_c = log_c.clamp_max(SURE)
    return log_c - (-log_c.expm1()).log()


@dataclass(frozen=True)
class Calibration:
    """At depth k, confidence c becomes σ(`scale`[k] · logit c + `shift`[k]) (Platt 1999). It rises
    with c, since scales are above 0. `accepted`[k] is the observed acceptance, given that all
    tokens before depth k were accepted. Depths beyond the lists use the last entry."""

    scale: list[float]
    shift: list[float]
    accepted: list[float]

    def __post_init__(self) -> None:
        size = len(self.scale)
        require(size > 0, "scale is empty: give a number for each depth")
        for name in ("shift", "accepted"):
            count = len(getattr(self, name))
            require(count == size, f"{name} has {count} numbers, but scale has {size}")
        for value in self.scale:
            require(0 < value <= MOST, f"scale holds {value}: give more than 0, at most {MOST:g}")
        for value in self.shift:
            require(abs(value) <= MOST, f"shift holds {value}: give {-MOST:g} to {MOST:g}")
        for value in self.accepted:
            require(0 <= value <= 1, f"accepted holds {value}: give a share from 0 to 1")

    def log(self, log_confidence: Tensor, depth: int) -> Tensor:
        """The logarithm of the calibrated confidence, given the logarithm of the confidence at this
        depth."""
        k = min(depth, len(self.scale) - 1)
        return logsigmoid(self.scale[k] * logit(log_confidence) + self.shift[k])


@dataclass(frozen=True)
class Calibrations:
    """A draft's calibrations, one for each variant of α: `greedy` at T = 0; at T > 0, `sampled` for
    tokens drawn from q, and `greedy_draft` for tokens picked as the most likely, such as the nodes
    of a dynamic tree. None: not calibrated."""

    greedy: Calibration | None = None
    greedy_draft: Calibration | None = None
    sampled: Calibration | None = None
    prompts: int = 0  # number of prompts in the fit

    def __post_init__(self) -> None:
        require_between("prompts", self.prompts, 0)

    def for_variant(self, variant: str) -> Calibration | None:
        calibration: Calibration | None = getattr(self, variant)
        return calibration


def variant_of(greedy: bool, picked: bool) -> str:
    """The variant of α for a sampler that is `greedy` or not, and for tokens that are `picked` as
    the most likely or else drawn from q."""
    return "greedy" if greedy else "greedy_draft" if picked else "sampled"

"""Confidence: the probability that the target accepts a drafted token, given that it accepted all
tokens before it, as the draft sees it: q of the token, or the family's own estimate of acceptance.
A `Calibration`, fitted to held-out text (see specdec.measure.confidence) and kept with the draft,
maps it to the share of such tokens that the target did accept."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from specdec.errors import require, require_between

MOST = 1e3  # the largest scale or shift: fitted ones are far smaller
SURE = -1e-6  # the largest log c that is read: at c = 1 its logit would be infinite


def logit(log_c: Tensor) -> Tensor:
    """log c - log (1 - c), from log c."""
    log_c = log_c.clamp_max(SURE)
    return log_c - (-log_c.expm1()).log()


@dataclass(frozen=True)
class Calibration:
    """At depth k, confidence c becomes σ(`scale`[k] · logit c + `shift`[k]) (Platt 1999), which
    rises with c since scales are above 0. `accepted`[k] is the acceptance that was observed, given
    that all tokens before were accepted. Depths beyond the lists count as the last one."""

    scale: list[float]
    shift: list[float]
    accepted: list[float]

    def __post_init__(self) -> None:
        size = len(self.scale)
        require(size > 0, "a calibration has no depth")
        for name in ("shift", "accepted"):
            found = len(getattr(self, name))
            require(found == size, f"a calibration has {size} scales, but {name} has {found}")
        for value in self.scale:
            require(0 < value <= MOST, f"scale {value}: expected more than 0, at most {MOST:g}")
        for value in self.shift:
            require(abs(value) <= MOST, f"shift {value}: expected {-MOST:g} to {MOST:g}")
        for value in self.accepted:
            require(0 <= value <= 1, f"accepted {value}: expected a share from 0 to 1")

    def log(self, log_confidence: Tensor, depth: int) -> Tensor:
        """The logarithm of calibrated confidence, from that of confidence at this depth."""
        k = min(depth, len(self.scale) - 1)
        return logsigmoid(self.scale[k] * logit(log_confidence) + self.shift[k])


@dataclass(frozen=True)
class Calibrations:
    """Those of a draft, for each way in which acceptance comes about (the variants of α): `greedy`
    at T = 0; at T > 0 `sampled` for tokens that are drawn from q, and `greedy_draft` for those that
    are picked as the likeliest, as the nodes of a dynamic tree are. None: not calibrated."""

    greedy: Calibration | None = None
    greedy_draft: Calibration | None = None
    sampled: Calibration | None = None
    prompts: int = 0  # that they were fitted to

    def __post_init__(self) -> None:
        require_between("prompts", self.prompts, 0)

    def of(self, variant: str) -> Calibration | None:
        found: Calibration | None = getattr(self, variant)
        return found


def variant_of(greedy: bool, picked: bool) -> str:
    """The variant of α by which drafts are accepted: with a `greedy` sampler or not, and with
    tokens that are `picked` as the likeliest or drawn from q."""
    return "greedy" if greedy else "greedy_draft" if picked else "sampled"

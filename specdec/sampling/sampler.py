"""The sampler: how logits become the distributions p and q, and how tokens are drawn from them.

One object warps target and draft in the same way in training, evaluation and decoding, so α means
the same everywhere.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.errors import UserError, require
from specdec.runtime.device import perhaps_any, row_groups

COLDEST = 1e-4  # the least temperature above 0: logits of 10^34 divided by it are still finite


def require_temperature(name: str, value: float) -> None:
    """Raise UserError unless a temperature is 0 or at least `COLDEST`."""
    require(
        value == 0 or COLDEST <= value < math.inf,
        f"{name}={value}: give 0 for greedy decoding, or a finite number of {COLDEST:g} or more",
    )


def require_cutoffs(group: str, settings: Any) -> None:
    """Raise UserError unless `top_k` and `top_p` of a settings group are valid."""
    require_top_k(group, settings.top_k)
    require_top_p(group, settings.top_p)


def require_top_k(group: str, top_k: int | None) -> None:
    """Raise UserError unless `top_k` is valid or None."""
    possible = top_k is None or top_k >= 0
    require(possible, f"{group}.top_k={top_k}: give a number of 0 or more (0 keeps all tokens)")


def require_top_p(group: str, top_p: float | None) -> None:
    """Raise UserError unless `top_p` is valid or None."""
    possible = top_p is None or 0 < top_p <= 1
    require(possible, f"{group}.top_p={top_p}: give a number above 0, up to 1")


class Summary(NamedTuple):
    """The numbers that determine p of a token from its logit alone, kept at each position when the
    logits are discarded: p(x) = exp(z_x / T - log_z) if z_x / T >= threshold, else 0. Before the
    cutoffs, p(x) = exp(z_x / T - whole_log_z)."""

    log_z_N: Tensor  # float32, log of the summed weights of the kept tokens
    threshold_N: Tensor  # float32, the smallest kept z / T
    argmax_N: Tensor  # int64, the token that greedy decoding takes
    whole_log_z_N: Tensor  # float32, log of the summed weights of all tokens

    @property
    def uncut(self) -> "Summary":
        """The summary for the sampler without cutoffs (`Sampler.uncut`)."""
        return self._replace(log_z_N=self.whole_log_z_N)


@dataclass
class Sampler:
    """The sampling for which a draft is trained: temperature, then top-k, then top-p. Tokens
    that tie with the last kept token are kept too, so the result does not depend on the order of
    a sort."""

    temperature: float = 1.0  # temperature of p and q; 0: greedy
    top_k: int = 0  # the most likely tokens kept; 0: all
    top_p: float = 1.0  # probability mass kept; 1: all

    def __post_init__(self) -> None:
        require_temperature("sampler.temperature", self.temperature)
        require_cutoffs("sampler", self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p is active at T > 0, so that some tokens cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def uncut(self) -> "Sampler":
        """The same temperature without top-k and top-p: no token has probability 0."""
        return replace(self, top_k=0, top_p=1.0) if self.truncates else self

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log-probabilities [..., V] in float32, -inf where a token cannot be drawn. A row of
        logits that are all -inf (a drafter with nothing to propose) stays all -inf."""
        if self.greedy:
            best = logits.argmax(-1, keepdim=True)
            hit = torch.full_like(logits, -torch.inf, dtype=torch.float32).scatter(-1, best, 0.0)
            return hit.masked_fill(logits.isneginf(), -torch.inf)
        scaled, _ = self._kept(logits)
        log_z = scaled.logsumexp(-1, keepdim=True)
        if not perhaps_any(empty := log_z.isneginf()):
            return scaled - log_z
        scaled = scaled.masked_fill(empty, 0.0)  # or the difference, and its gradient, would be NaN
        return (scaled - scaled.logsumexp(-1, keepdim=True)).masked_fill(empty, -torch.inf)

    def probs(self, logits: Tensor) -> Tensor:
        """Probabilities [..., V] in float32; see `log_probs`."""
        if self.greedy or self.truncates:
            return self.log_probs(logits).exp()
        scaled = self._scaled(logits)
        probs = scaled.softmax(-1)
        if perhaps_any(probs[..., 0].isnan()):  # a row without mass is all NaN
            probs = probs.masked_fill(scaled.amax(-1, keepdim=True).isneginf(), 0.0)
        return probs

    def summarise(self, logits_NV: Tensor) -> Summary:
        """Reduce target logits to the numbers that `log_probs_of` needs; temperature above 0."""
        scaled, threshold_N1 = self._kept(logits_NV)
        argmax_N = scaled.argmax(-1)  # float32, because bfloat16 argmax is slow on a CPU
        log_z_N = scaled.logsumexp(-1)
        whole_log_z_N = self._scaled(logits_NV).logsumexp(-1) if self.truncates else log_z_N
        return Summary(log_z_N, threshold_N1[:, 0], argmax_N, whole_log_z_N)

    def log_probs_of(self, logits_NS: Tensor, summary: Summary) -> Tensor:
        """log p [N, S] over part of the vocabulary, normalised over all of it."""
        scaled = self._scaled(logits_NS)
        log_p = scaled - summary.log_z_N[:, None]
        if not self.truncates:
            return log_p
        return log_p.masked_fill(scaled < summary.threshold_N[:, None], -torch.inf)

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits.float() if self.temperature == 1 else logits.float() / self.temperature

    def _kept(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled logits, -inf for tokens that top-k or top-p drops, and the smallest kept logit
        [..., 1], which is -inf if neither is active."""
        scaled = self._scaled(logits)
        if not self.truncates:
            return scaled, torch.full_like(scaled[..., :1], -torch.inf)
        ordered = scaled.sort(-1, descending=True).values
        least = ordered[..., -1:]
        if self.top_k:
            least = ordered[..., min(self.top_k, ordered.shape[-1]) - 1, None]
        if self.top_p < 1:
            probs = ordered.masked_fill(ordered < least, -torch.inf).softmax(-1)
            kept = (probs.cumsum(-1) - probs < self.top_p).sum(-1, keepdim=True).clamp_min(1)
            least = torch.maximum(least, ordered.gather(-1, kept - 1))
        return scaled.masked_fill(scaled < least, -torch.inf), least


def sample(probs: Tensor, uniform: Tensor) -> Tensor:
    """One token [...] for each row of probabilities [..., V]; see `draws`."""
    return draws(probs[None], uniform[None, ..., None])[0, ..., 0]


def draws(probs: Tensor, uniform: Tensor) -> Tensor:
    """Independent tokens [..., C] from each row of probabilities [..., V] (any positive sum), by
    inverting the distribution function in float64 at random numbers [..., C] from [0, 1). Raises
    UserError for a row whose sum is 0 or not finite."""
    probs_NV, uniform_NC = probs.flatten(0, -2), uniform.flatten(0, -2)
    drawn = [uniform_NC[:0].long()]
    for rows in row_groups(len(probs_NV), probs_NV.shape[1], probs.device):
        upto_NV = probs_NV[rows].cumsum(-1, dtype=torch.float64)
        mass_N1 = upto_NV[:, -1:]
        if not ((mass_N1 > 0) & mass_N1.isfinite()).all():
            raise UserError(
                "there is nothing to draw from: all probabilities are 0 or not finite numbers. "
                "Either the weights are damaged, or they overflow in this dtype (give float32), or "
                "a logits processor forbids every token"
            )
        drawn.append(torch.searchsorted(upto_NV, uniform_NC[rows] * mass_N1, right=True))
    return torch.cat(drawn).view(uniform.shape)

"""Training objectives, per position, and their computation in chunks.

Each objective takes a `Pair`, log p and log q over the draft vocabulary [N, S], and returns a
loss per position [N], unreduced. p is normalised over the full target vocabulary and
never again over the draft's: P = Σ_S p <= 1. With z the draft's logits and q = softmax(z), the
docstrings give the gradient ∂L/∂z that the tests check in float64.

Letters: N positions, K depth, S draft vocabulary, D width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import nearest, require
from specdec.theory.alpha import Pair

LOG_FLOOR = -60.0  # stands for log 0 where a divergence would be infinite

Loss = Callable[[Pair, "LossConfig"], Tensor]


@dataclass
class LossConfig:
    """The objective: its name, its constants, and the weights over depth, decay^k."""

    name: str = "nla"
    depth_decay: float = 0.8
    beta: float = 0.5  # jsd: the weight of p in the mixture
    eta: float = 3.0  # lk_hybrid: how fast KL gives way to TV as α grows
    chunk: int = 256  # anchors whose logits exist at a time

    def __post_init__(self) -> None:
        require(self.chunk >= 1, f"loss.chunk={self.chunk}: give 1 or more")
        require(
            0 <= self.depth_decay < math.inf,
            f"loss.depth_decay={self.depth_decay}: give a number of at least 0",
        )
        require(
            self.name in LOSSES, f"loss.name={self.name!r} is unknown{nearest(self.name, LOSSES)}"
        )


def kl(pair: Pair, cfg: LossConfig) -> Tensor:
    """Σ p (log p - log q), forward KL. ∂/∂z = P q - p."""
    return (pair.p * (_floor(pair.log_p) - _floor(pair.log_q))).sum(-1)


def reverse_kl(pair: Pair, cfg: LossConfig) -> Tensor:
    """Σ q (log q - log p). ∂/∂z = q (r - E_q[r]) with r = log q - log p."""
    return (pair.q * (_floor(pair.log_q) - _floor(pair.log_p))).sum(-1)


def jsd(pair: Pair, cfg: LossConfig) -> Tensor:
    """Generalised Jensen-Shannon (Agarwal et al. 2024, GKD): β KL(p|m) + (1 - β) KL(q|m),
    m = β p + (1 - β) q. ∂/∂z = (1 - β) q (r - E_q[r]) with r = log q - log m."""
    log_m = (cfg.beta * pair.p + (1 - cfg.beta) * pair.q).clamp_min(math.exp(LOG_FLOOR)).log()
    of_p = (pair.p * (_floor(pair.log_p) - log_m)).sum(-1)
    of_q = (pair.q * (_floor(pair.log_q) - log_m)).sum(-1)
    return cfg.beta * of_p + (1 - cfg.beta) * of_q


def ce(pair: Pair, cfg: LossConfig) -> Tensor:
    """-log q(label), the text's next token; 0 where the draft vocabulary lacks it (label -1).
    ∂/∂z = q - onehot(label)."""
    at_label = _floor(pair.log_q).gather(-1, pair.label.clamp_min(0)[:, None])[:, 0]
    return -at_label * (pair.label >= 0)


def tv(pair: Pair, cfg: LossConfig) -> Tensor:
    """1 - Σ min(p, q) = 1 - β, total variation. ∂/∂z = ½ q (s - E_q[s]), s = sign(q - p)."""
    return 1 - pair.beta


def nla(pair: Pair, cfg: LossConfig) -> Tensor:
    """-log β, the negative log acceptance. ∂/∂z = ∂TV/∂z / β: strong where β is small."""
    log_min = torch.minimum(pair.log_p, pair.log_q)  # from logarithms: β itself may underflow
    log_beta = log_min.logsumexp(-1)
    disjoint = log_beta.isneginf()
    if disjoint.any():
        log_beta = log_min.masked_fill(disjoint[:, None], LOG_FLOOR).logsumexp(-1)
    return -log_beta


def lk_hybrid(pair: Pair, cfg: LossConfig) -> Tensor:
    """λ KL + (1 - λ) TV with λ = exp(-η β) per token, no gradient through λ."""
    weight = torch.exp(-cfg.eta * pair.beta.detach())
    return weight * kl(pair, cfg) + (1 - weight) * tv(pair, cfg)


LOSSES: dict[str, Loss] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "ce": ce,
    "tv": tv,
    "nla": nla,
    "lk_hybrid": lk_hybrid,
}


def _floor(log_x: Tensor) -> Tensor:
    """log 0 as a number; whatever is finite stays, and keeps its gradient."""
    return log_x.masked_fill(log_x.isneginf(), LOG_FLOOR)


class _Chunked(torch.autograd.Function):
    """Runs a loss chunk by chunk and takes each chunk's gradient at once.

    The chunk's logits die before the next chunk's are made, in the forward pass and in the
    backward pass, which only scales gradients that are there already.
    """

    @staticmethod
    def forward(
        ctx: Any,
        part: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
        chunk: int,
        hidden: Tensor,
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, Tensor]:
        grad_hidden = torch.empty_like(hidden)
        grads: list[Tensor | None] = [None] * len(parameters)
        total, statistics = hidden.new_zeros((), dtype=torch.float32), None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            with torch.enable_grad():
                piece = hidden[rows].detach().requires_grad_()
                loss, seen = part(piece, rows)
                grad_hidden[rows], *new = torch.autograd.grad(
                    loss, [piece, *parameters], allow_unused=True
                )
            for i, grad in enumerate(new):
                if grad is not None:
                    held = grads[i]
                    grads[i] = grad.clone() if held is None else held.add_(grad)
            total += loss.detach()
            statistics = seen if statistics is None else statistics + seen
        assert statistics is not None
        ctx.save_for_backward(grad_hidden, *grads)
        ctx.mark_non_differentiable(statistics)
        return total, statistics

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        scale = grad_outputs[0]
        saved = [None if g is None else g * scale for g in ctx.saved_tensors]
        return None, None, *saved


def chunked(
    part: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
    hidden: Tensor,
    parameters: list[nn.Parameter],
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Sum of `part` over chunks of the rows of `hidden`.

    `part(rows of hidden, slice)` returns a summed loss (scalar, float32) and detached summed
    statistics; `parameters` are the trained ones that it reads. At most one chunk's
    intermediate tensors exist at a time. Without gradients, nothing is kept at all.
    """
    if len(hidden) == 0:
        raise ValueError("chunked: no rows")
    trained = hidden.requires_grad or any(p.requires_grad for p in parameters)
    if torch.is_grad_enabled() and trained:
        return _Chunked.apply(part, chunk, hidden, *parameters)
    pieces = [
        part(hidden[start : start + chunk], slice(start, start + chunk))
        for start in range(0, len(hidden), chunk)
    ]
    total = torch.stack([loss for loss, _ in pieces]).sum()
    return total, torch.stack([seen for _, seen in pieces]).sum(0)

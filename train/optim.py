"""The optimiser and its learning rate."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from specdec.drafters.base import Sizes
from specdec.errors import require, require_between, require_known, require_within

HIDDEN = ("adamw", "muon")


@dataclass
class OptimConfig:
    """AdamW for all weights, or Muon for the matrices of the hidden layers. The learning rate rises
    linearly to `lr`, then follows a cosine.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) is PyTorch's. Its updates
    are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so `lr` and
    `weight_decay` have the same meaning for both. A matrix with one row or column for each token of
    a vocabulary does not count as hidden. Muon multiplies in bfloat16: on a CPU that does not do so
    natively, a step takes several times as long.
    """

    lr: float | None = 1e-3  # peak learning rate; null: the drafter method's own
    hidden: str = "adamw"  # adamw or muon, for the matrices of the hidden layers
    # factors of the learning rate for parameters whose names match a shell pattern, as in {*.bias:
    # 0.5}
    rates: dict[str, float] = field(default_factory=dict)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # β₁ and β₂ of AdamW
    weight_decay: float = 0.01  # decoupled weight decay
    warmup: float = 0.05  # fraction of all steps in which the learning rate rises
    final: float = 0.02  # last learning rate as a fraction of lr
    clip: float = 0.5  # bound of the global gradient norm

    def __post_init__(self) -> None:
        require_within("optim", self, weight_decay=0, final=0, warmup=(0, 1))
        require_known("optim", self, hidden=HIDDEN)
        require(
            self.lr is None or 0 < self.lr < math.inf, f"optim.lr={self.lr}: give a number above 0"
        )
        for pattern, scale in self.rates.items():
            require_between(f"optim.rates.{pattern}", scale, 0)
        require(self.clip > 0, f"optim.clip={self.clip}: give a number above 0")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"optim.betas={self.betas}: give two numbers, each at least 0 and below 1",
        )


def trained_by_muon(p: Tensor, cfg: OptimConfig, sizes: Sizes) -> bool:
    """Whether Muon trains this parameter of a drafter of these sizes."""
    vocabularies = {sizes.target_vocab, sizes.draft_vocab}
    return cfg.hidden == "muon" and p.ndim == 2 and not vocabularies & {*p.shape}


def build(
    model: nn.Module, cfg: OptimConfig, sizes: Sizes, of_drafter: Mapping[str, float] | None = None
) -> list[torch.optim.Optimizer]:
    """The optimisers over the trained parameters of `model`, without weight decay on vectors. A
    group's learning rate is the common one times its `scale`, the product of the matching factors
    in the config's `rates` and in `of_drafter`. `sizes` are those of the drafter, with the sizes of
    both vocabularies. Raises UserError if a pattern in the config matches no parameter."""
    rates = [*(of_drafter or {}).items(), *cfg.rates.items()]
    named = {n.removeprefix("drafter."): p for n, p in model.named_parameters() if p.requires_grad}
    for pattern in cfg.rates:
        require(
            any(fnmatchcase(name, pattern) for name in named),
            f"optim.rates: no trained parameter matches {pattern!r}: match names such as "
            f"{', '.join(list(named)[:3])}",
        )
    assert cfg.lr is not None  # `train.run_config.resolve` sets it
    groups: dict[tuple[bool, float, float], list[Tensor]] = {}
    for name, p in named.items():
        hidden = trained_by_muon(p, cfg, sizes)
        decay = cfg.weight_decay if p.ndim >= 2 else 0.0
        scale = math.prod(x for pattern, x in rates if fnmatchcase(name, pattern))
        groups.setdefault((hidden, decay, scale), []).append(p)
    of_adamw: list[dict[str, Any]] = []
    of_muon: list[dict[str, Any]] = []
    for (hidden, decay, scale), some in groups.items():
        group = {"params": some, "weight_decay": decay, "scale": scale}
        (of_muon if hidden else of_adamw).append(group)
    optimizers: list[torch.optim.Optimizer] = []
    if of_adamw:
        optimizers.append(
            torch.optim.AdamW(of_adamw, cfg.lr, (cfg.betas[0], cfg.betas[1]), fused=True)
        )
    if of_muon:
        optimizers.append(torch.optim.Muon(of_muon, cfg.lr, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """The learning rate at a step, counted from 0 to steps - 1."""
    assert cfg.lr is not None
    warm = max(1, round(cfg.warmup * steps))
    if step < warm:
        return cfg.lr * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return cfg.lr * (cfg.final + (1 - cfg.final) * 0.5 * (1 + math.cos(math.pi * done)))

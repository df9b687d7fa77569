"""The optimiser and its learning rate."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from specdec.errors import require, require_within


@dataclass
class OptimConfig:
    """AdamW. The learning rate rises linearly to `lr` over the fraction `warmup` of all steps, then
    falls along a cosine to `final` · `lr`. `clip` bounds the global gradient norm.
    """

    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.01
    warmup: float = 0.05
    final: float = 0.02
    clip: float = 0.5

    def __post_init__(self) -> None:
        require_within("optim", self, weight_decay=0, final=0, warmup=(0, 1))
        require(0 < self.lr < math.inf, f"optim.lr={self.lr}: give a number above 0")
        require(self.clip > 0, f"optim.clip={self.clip}: give a number above 0")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"optim.betas={self.betas}: give two numbers, each at least 0 and below 1",
        )


def build(model: nn.Module, cfg: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser over the trained parameters of `model`, without weight decay on vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (cfg.betas[0], cfg.betas[1])
    return torch.optim.AdamW([g for g in groups if g["params"]], cfg.lr, betas, fused=True)


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """The learning rate at a step, counted from 0 to steps - 1."""
    warm = max(1, round(cfg.warmup * steps))
    if step < warm:
        return cfg.lr * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return cfg.lr * (cfg.final + (1 - cfg.final) * 0.5 * (1 + math.cos(math.pi * done)))

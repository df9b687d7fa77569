"""The optimiser and its learning rate."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specdec.drafters.base import Sizes
from specdec.errors import require, require_known, require_within

HIDDEN = ("adamw", "muon")


@dataclass
class OptimConfig:
    """AdamW, and for the hidden layers' matrices whichever of AdamW and Muon `hidden` names. The
    learning rate rises linearly to `lr` over the fraction `warmup` of all steps, then falls along a
    cosine to `final` · `lr`. `clip` bounds the global gradient norm.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) is PyTorch's. Its updates
    are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that `lr` and
    `weight_decay` mean the same for both. A matrix with one row or column for each token of a
    vocabulary is no hidden layer's. Muon multiplies in bfloat16: on a CPU without it, a step takes
    several times as long.
    """

    lr: float = 1e-3
    hidden: str = "adamw"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.01
    warmup: float = 0.05
    final: float = 0.02
    clip: float = 0.5

    def __post_init__(self) -> None:
        require_within("optim", self, weight_decay=0, final=0, warmup=(0, 1))
        require_known("optim", self, hidden=HIDDEN)
        require(0 < self.lr < math.inf, f"optim.lr={self.lr}: give a number above 0")
        require(self.clip > 0, f"optim.clip={self.clip}: give a number above 0")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"optim.betas={self.betas}: give two numbers, each at least 0 and below 1",
        )


def build(model: nn.Module, cfg: OptimConfig, sizes: Sizes) -> list[torch.optim.Optimizer]:
    """The optimisers over the trained parameters of `model`, without weight decay on vectors.
    `sizes`, the drafter's, tell how many tokens the vocabularies have."""
    vocabularies = {sizes.target_vocab, sizes.draft_vocab}

    def orthogonalised(p: Tensor) -> bool:
        return cfg.hidden == "muon" and p.ndim == 2 and not vocabularies & {*p.shape}

    trained = [p for p in model.parameters() if p.requires_grad]
    others = [p for p in trained if not orthogonalised(p)]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    given, betas = [g for g in groups if g["params"]], (cfg.betas[0], cfg.betas[1])
    made: list[torch.optim.Optimizer] = []
    if given:
        made.append(torch.optim.AdamW(given, cfg.lr, betas, fused=True))
    if hidden := [p for p in trained if orthogonalised(p)]:
        decay = cfg.weight_decay
        made.append(torch.optim.Muon(hidden, cfg.lr, decay, adjust_lr_fn="match_rms_adamw"))
    return made


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """The learning rate at a step, counted from 0 to steps - 1."""
    warm = max(1, round(cfg.warmup * steps))
    if step < warm:
        return cfg.lr * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return cfg.lr * (cfg.final + (1 - cfg.final) * 0.5 * (1 + math.cos(math.pi * done)))

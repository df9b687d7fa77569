"""Fits probabilities of acceptance to outcomes."""

from collections.abc import Callable

import torch
from torch import Tensor


def minimise(loss: Callable[[], Tensor], *parameters: Tensor) -> None:
    """Move float64 `parameters`, which need gradients, to the minimum of a smooth `loss` (L-BFGS).
    Call it in `torch.inference_mode(False)` with gradients enabled."""
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=500,
        tolerance_grad=1e-10,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return float(value.detach())

    optimizer.step(closure)

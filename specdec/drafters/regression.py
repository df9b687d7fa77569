"""Least squares in closed form, from which a draft can start before any gradient is computed.

Letters: N rows, X inputs, Y outputs, R rank.
"""

import torch
from torch import Tensor

from specdec.errors import require

RIDGE = 3e-3  # how much a weight is penalised, relative to the sum of squares of its input


class Squares:
    """The sums xᵀx [X, X] and xᵀy [X, Y] over all rows x, y that were added. They are kept in
    float64, and on the CPU if the rows are on a device without float64 (a Mac's GPU)."""

    def __init__(self) -> None:
        self.xx = self.xy = torch.zeros((), dtype=torch.float64)
        self.rows = 0

    def add(self, x_NX: Tensor, y_NY: Tensor) -> None:
        if not self.rows:
            X, Y = x_NX.shape[1], y_NY.shape[1]
            device = "cpu" if x_NX.device.type == "mps" else x_NX.device
            self.xx = torch.zeros(X, X, dtype=torch.float64, device=device)
            self.xy = torch.zeros(X, Y, dtype=torch.float64, device=device)
        self.xx += (x_NX.T @ x_NX).to(self.xx.device)
        self.xy += (x_NX.T @ y_NY).to(self.xy.device)
        self.rows += len(x_NX)


def ridge(xx_XX: Tensor, xy_XY: Tensor) -> Tensor:
    """The weights W [X, Y] with the smallest Σ ‖xW - y‖² + `RIDGE` Σ_i xx_ii ‖W_i‖². With this
    penalty, rescaling an input changes nothing but its weights. Raises UserError if a row that was
    summed was not finite."""
    require(
        bool(xx_XX.isfinite().all() and xy_XY.isfinite().all()),
        "the target's states are not finite numbers on the training texts, so no start can be "
        "solved for: its weights are damaged, or they overflow in this dtype (give "
        "target.dtype=float32)",
    )
    size_X = xx_XX.diagonal()
    penalty_X = RIDGE * size_X + 1e-12 * size_X.max().clamp_min(1e-12)
    penalised_XX = xx_XX.clone()
    penalised_XX.diagonal().add_(penalty_X)
    return torch.linalg.solve(penalised_XX, xy_XY)


def low_rank(weight_XY: Tensor, xx_XX: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors [X, R] and [R, Y], of equal norm and at most rank `rank`, whose product is nearest to
    the weights on the rows that xᵀx was summed over (reduced-rank regression)."""
    size_X, basis_XX = torch.linalg.eigh(xx_XX)
    root_X = size_X.clamp_min(float(size_X.max()) * 1e-9).sqrt()
    left, size, right = torch.linalg.svd((basis_XX * root_X).T @ weight_XY, full_matrices=False)
    left, size, right = left[:, :rank], size[:rank].sqrt(), right[:rank]
    inner, outer = (basis_XX / root_X) @ (left * size), size[:, None] * right
    balance = (outer.norm() / inner.norm()).sqrt()
    return inner * balance, outer / balance

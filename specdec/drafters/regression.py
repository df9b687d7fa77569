"""Least squares in closed form, from which a draft can start before any gradient is computed."""

import torch
from torch import Tensor

from specdec.errors import require

RIDGE = 3e-3  # how much a weight is penalised, relative to the sum of squares of its input


class Squares:
    """The sums xᵀx [F, F] and xᵀy [F, D] over all rows x, y that were added. They are kept in
    float64, and on the CPU if the rows are on a device without float64 (a Mac's GPU)."""

    def __init__(self) -> None:
        self.xx = self.xy = torch.zeros((), dtype=torch.float64)
        self.rows = 0

    def add(self, x_NF: Tensor, y_ND: Tensor) -> None:
        if not self.rows:
            F, D = x_NF.shape[1], y_ND.shape[1]
            device = "cpu" if x_NF.device.type == "mps" else x_NF.device
            self.xx = torch.zeros(F, F, dtype=torch.float64, device=device)
            self.xy = torch.zeros(F, D, dtype=torch.float64, device=device)
        self.xx += (x_NF.T @ x_NF).to(self.xx.device)
        self.xy += (x_NF.T @ y_ND).to(self.xy.device)
        self.rows += len(x_NF)


def ridge(xx_FF: Tensor, xy_FD: Tensor) -> Tensor:
    """The weights W [F, D] with the smallest Σ ‖xW - y‖² + `RIDGE` Σ_i xx_ii ‖W_i‖². With this
    penalty, rescaling an input changes nothing but its weights. Raises UserError if a row that was
    summed was not finite."""
    require(
        bool(xx_FF.isfinite().all() and xy_FD.isfinite().all()),
        "the target's states are not finite numbers on the training texts, so no start can be "
        "solved for: its weights are damaged, or they overflow in this dtype (give "
        "target.dtype=float32)",
    )
    size_F = xx_FF.diagonal()
    penalty_F = RIDGE * size_F + 1e-12 * size_F.max().clamp_min(1e-12)
    penalised_FF = xx_FF.clone()
    penalised_FF.diagonal().add_(penalty_F)
    weight_FD: Tensor = torch.linalg.solve(penalised_FF, xy_FD)
    return weight_FD


def low_rank(weight_FD: Tensor, xx_FF: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors [F, Lr] and [Lr, D], of equal norm and at most rank `rank`, whose product is nearest
    to the weights on the rows that xᵀx was summed over (reduced-rank regression)."""
    size_F, basis_FF = torch.linalg.eigh(xx_FF)
    root_F = size_F.clamp_min(float(size_F.max()) * 1e-9).sqrt()
    left, size, right = torch.linalg.svd((basis_FF * root_F).T @ weight_FD, full_matrices=False)
    left, size, right = left[:, :rank], size[:rank].sqrt(), right[:rank]
    inner, outer = (basis_FF / root_F) @ (left * size), size[:, None] * right
    balance = (outer.norm() / inner.norm()).sqrt()
    return inner * balance, outer / balance

"""RMSNorm of a few rows on a CPU, outside autograd."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.compat import version
from specdec.runtime.cpu import fast_paths_on

FEW = 16  # rows; of more, torch's own RMSNorm takes no longer


class FewRowsNorm:
    """RMSNorm with a weight [D]. For a few rows x it is computed as the LayerNorm of [x, -x], whose
    mean is 0 and whose variance is the mean square of x: on a CPU, torch has one operator for
    LayerNorm but needs eight for RMSNorm. It is not a module, so it adds nothing to a model's
    state."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.width = weight.shape[0]
        self.renew()

    def renew(self) -> None:
        """Discard the copy of the weight after the weight has changed."""
        self._twice: Tensor | None = None  # the weight, two times [2, D]
        self._copied: tuple[int, int] | None = None

    def renew_if_changed(self) -> None:
        """Call `renew` if the weight has changed since the last such call."""
        at = self.weight.data_ptr(), version(self.weight)
        if at != self._copied:
            self.renew()
            self._copied = at

    def __getstate__(self) -> dict[str, Any]:
        """The state without the copy, whose address is not valid elsewhere."""
        return self.__dict__ | {"_twice": None, "_copied": None}

    def __call__(self, x: Tensor) -> Tensor:
        """The normed states [..., D], for x in the weight's dtype."""
        if x.numel() > FEW * self.width or not x.is_cpu or not fast_paths_on():
            return F.rms_norm(x, (self.width,), self.weight, self.eps)
        if self._twice is None:
            self._twice = torch.stack([self.weight.detach()] * 2)
            self._signs = torch.tensor([[1.0], [-1.0]], dtype=x.dtype)
        both = x.unsqueeze(-2) * self._signs
        normed = F.layer_norm(both, (2, self.width), self._twice, None, self.eps)
        return normed.select(-2, 0)

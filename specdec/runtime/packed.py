"""Linear layers that read their weights in oneDNN's own layout, on a CPU.

Without it every product of a few rows, as a decoding step has, begins by turning the weight: a
step of SmolLM2-135M takes 1.5 times as long in bfloat16 and twice in float32. `torch.compile` with
frozen weights does the same inside a graph; this does it outside of one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEAST = 1 << 16  # weights; a smaller layer gains nothing
ROWS = 8  # that the layout is chosen for: best from 1 to 16, and no worse beyond
DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Linear):
    """As nn.Linear. Where no gradient is asked for, and outside a graph, it multiplies by a copy
    of its weight in oneDNN's layout, made when it is first needed and again when the weight
    changed: the layer then takes twice its memory."""

    _copy: Tensor | None = None
    _copied: tuple[int, int] | None = None  # the weight that was copied: its address and version

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not x.is_cpu
            or not x.numel()
            or x.dtype is not weight.dtype
            or x.dtype not in DTYPES
            or torch.is_autocast_enabled("cpu")
        ):
            return F.linear(x, weight, self.bias)
        at = weight.data_ptr(), weight._version
        if self._copied != at:
            self._copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
            self._copied = at
        return torch.ops.mkldnn._linear_pointwise(x, self._copy, self.bias, "none", [], "")

    def __getstate__(self) -> dict[str, Any]:
        """Without the copy, which cannot be pickled nor copied."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_copy", "_copied")}


def is_packed(module: nn.Module) -> bool:
    return any(isinstance(layer, PackedLinear) for layer in module.modules())


def pack(module: nn.Module) -> None:
    """Make the large linear layers of `module` PackedLinear, if it is on a CPU and torch has
    oneDNN. Its parameters and state dict stay as they are."""
    if not torch.backends.mkldnn.is_available():
        return
    for layer in module.modules():
        if type(layer) is not nn.Linear or layer.weight.numel() < LEAST:
            continue
        if layer.weight.is_cpu and layer.weight.dtype in DTYPES:
            layer.__class__ = PackedLinear

"""The RMSNorm of a draft's layers."""

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.runtime.cpu.few_row_norm import FewRowsNorm


class RMSNorm(LlamaRMSNorm):
    """Llama's RMSNorm; outside autograd and compiled graphs, with fewer operators, which in 16 bits
    round once where Llama's round twice."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self._fast: FewRowsNorm | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The normed states [..., D]."""
        weight, dtype = self.weight, hidden_states.dtype
        alike = dtype is weight.dtype and dtype is not torch.float64  # Llama's sums in float32
        plain = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not (alike and plain) or weight.is_inference():
            normed: Tensor = super().forward(hidden_states)
            return normed
        if self._fast is None or self._fast.weight is not weight:
            self._fast = FewRowsNorm(weight, self.variance_epsilon)
        self._fast.renew_if_changed()
        return self._fast(hidden_states)

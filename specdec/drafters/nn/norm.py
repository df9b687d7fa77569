"""The RMSNorm of a draft's layers."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class RMSNorm(LlamaRMSNorm):
    """Llama's RMSNorm. Outside autograd it is torch's own, one operator instead of eight, which in
    16 bits rounds once where Llama's rounds twice."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The normed states [..., D]."""
        weight, dtype = self.weight, hidden_states.dtype
        alike = dtype is weight.dtype and dtype is not torch.float64  # Llama's sums in float32
        if torch.is_grad_enabled() or not alike:
            normed: Tensor = super().forward(hidden_states)
            return normed
        return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)

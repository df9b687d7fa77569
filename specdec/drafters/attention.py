"""Attention of a draft's layers, and what its passes of training and of decoding have in common.

A family writes one `step` through its layers and hands each of them an `Attend`: attention over a
text's pairs, at anchors (`over_text`), or over the slots of a cache (`over_slots`). The step does
not know which.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.drafters.norm import RMSNorm
from specdec.drafters.rope import rotated
from specdec.runtime.cpu.packed_linear import JointLinear, joint, multiplies

SHARP = 16.0  # about the score that an input gives its own key, so that it sees little else

KeyValue = tuple[Tensor, Tensor]  # a key and a value [B, Hkv, …, Dh]


class Attention(nn.Module):
    """Grouped-query attention that reads `width` numbers per pair and returns D; with `head_norms`
    each query and key head passes an RMSNorm first, as in Qwen3."""

    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, llama: LlamaConfig, width: int, head_norms: bool = False) -> None:
        super().__init__()
        self.heads, self.head_dim = llama.num_attention_heads, int(llama.head_dim or 0)
        self.kv_heads = llama.num_key_value_heads or self.heads
        inner, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, shared, bias=False)
        self.v_proj = nn.Linear(width, shared, bias=False)
        self.o_proj = nn.Linear(inner, llama.hidden_size, bias=False)
        self._joint: JointLinear | None = None  # of q, k and v
        for name in ("q_norm", "k_norm"):
            norm = RMSNorm(self.head_dim, llama.rms_norm_eps) if head_norms else nn.Identity()
            self.add_module(name, norm)

    def keys_values(self, x_BPD: Tensor, rope: tuple[Tensor, Tensor]) -> KeyValue:
        keys = self.k_norm(self._heads(self.k_proj(x_BPD)))
        return rotated(keys, rope), self._heads(self.v_proj(x_BPD))

    def query(self, x_BAD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Queries [B, Hkv, Hg, A, Dh]."""
        query = rotated(self.q_norm(self._heads(self.q_proj(x_BAD))), rope)
        grouped: Tensor = query.unflatten(1, (self.kv_heads, -1))
        return grouped

    def at_once(
        self, x_BWD: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`query` and `keys_values` of the same places by one product with a packed weight; None
        where this is not possible, or not faster."""
        if not multiplies(x_BWD, self.q_proj.weight):
            return None
        self._joint = joint(self._joint, self.q_proj, self.k_proj, self.v_proj)
        if self._joint is None or not self._joint.faster(x_BWD):
            return None
        heads, turning = self._heads(self._joint(x_BWD)), self.heads + self.kv_heads
        turned, values = heads[:, :turning], heads[:, turning:]
        if not isinstance(self.q_norm, nn.Identity):
            query, keys = turned.split([self.heads, self.kv_heads], 1)
            turned = torch.cat([self.q_norm(query), self.k_norm(keys)], 1)
        turned = rotated(turned, rope)
        query, keys = turned[:, : self.heads], turned[:, self.heads :]
        return query.unflatten(1, (self.kv_heads, -1)), keys, values

    def _heads(self, x: Tensor) -> Tensor:
        """[B, A, H·Dh] -> [B, H, A, Dh]"""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads

    def joined(self, heads: Tensor) -> Tensor:
        """The heads' outputs [B, Hkv, Hg, A, Dh] -> [B, A, D]"""
        output: Tensor = self.o_proj(heads.flatten(1, 2).transpose(1, 2).flatten(2))
        return output

    def own_output(self, x: Tensor) -> Tensor:
        """The output [..., D] for inputs that see only themselves."""
        values = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))
        heads = values.repeat_interleave(self.heads // self.kv_heads, -2)
        output: Tensor = self.o_proj(heads.flatten(-2))
        return output

    def see_oneself(self, inner_FLr: Tensor, outer_LrD: Tensor) -> None:
        """Set the weights so that every input x [F] sees little but itself and the output is
        `x @ inner_FLr @ outer_LrD`. Queries and keys are the same random map of x's first D
        numbers."""
        (Lr, D), groups = outer_LrD.shape, self.heads // self.kv_heads
        self.v_proj.weight[:Lr] = inner_FLr.T.to(self.v_proj.weight)
        outputs = self.o_proj.weight.new_zeros(D, self.kv_heads * self.head_dim)
        outputs[:, :Lr] = outer_LrD.T
        of_heads = outputs.unflatten(1, (self.kv_heads, -1)).repeat_interleave(groups, 1)
        self.o_proj.weight.copy_(of_heads.flatten(1) / groups)
        drawn = torch.randn(
            self.kv_heads, self.head_dim, D, generator=torch.Generator().manual_seed(0)
        )
        own = drawn.to(outputs) * (SHARP / (self.head_dim**0.5 * D)) ** 0.5
        for projection, times in ((self.k_proj, 1), (self.q_proj, groups)):
            projection.weight.zero_()
            projection.weight[:, :D] = own.repeat_interleave(times, 0).flatten(0, 1)


class Attend(Protocol):
    """The attention of one pass. Every layer reads all W places of the pass, which get keys; the
    output of the last layer may be asked for at a few places only."""

    def __call__(self, i: int, attention: Attention, read: Tensor) -> Tensor:
        """What layer i adds to the residual stream, [B, Wo, D] at the places where its output is
        asked for. Its attention reads `read` [B, W, …]."""

    def asked(self, i: int, x: Tensor) -> Tensor:
        """The entries [B, Wo, …] of x [B, W, …] where the output of layer i is asked for."""


def fused(query: Tensor, keys: Tensor, values: Tensor, mask_BAP: Tensor | None) -> Tensor:
    """Attention [B, Hkv, Hg, A, Dh]. The heads of a group become extra rows of the query, so keys
    and values are not copied."""
    Hg, A = query.shape[2:4]
    mask = None if mask_BAP is None else mask_BAP[:, None].repeat(1, 1, Hg, 1)
    out = nn.functional.scaled_dot_product_attention(
        query.flatten(2, 3), keys, values, attn_mask=mask
    )
    by_anchor: Tensor = out.unflatten(2, (Hg, A))
    return by_anchor

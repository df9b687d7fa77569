"""Attention by groups of heads for decoding steps, registered with transformers as "grouped"."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from specdec.compat import attention_of
from specdec.errors import UserError
from specdec.runtime.cache import layer_kinds
from specdec.runtime.cpu import fast_paths_on

FEW = 256  # up to this many query rows of a KV head, one product over groups beats copied keys
# for each mask that is still in use, what `stacked` made of it, by groups and dtype
_stacks: Any = WeakIdKeyDictionary()


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Like transformers' `sdpa`, except for the few tokens of a decoding step: there, query heads
    that share a KV head become extra rows of one query, while `sdpa` would copy the keys for every
    query head. query [B, H, T, D], key and value [B, H, P, D]; returns [B, T, H, D]. Raises
    UserError if a model asks for attention sinks or a soft cap, which sdpa does not compute."""
    if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None:
        raise UserError(
            f"{type(module).__name__} has attention sinks or a soft cap, which sdpa leaves out: "
            "give target.attn_implementation=eager"
        )
    B, H, T, head_dim = query.shape
    groups = H // key.shape[1]
    alike = attention_mask is None or attention_mask.shape[1] == 1  # one mask for all heads
    few = alike and (T == 1 or (attention_mask is not None and groups * T <= FEW))
    if groups == 1 or not few or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None:
        attention_mask = stacked(attention_mask, groups, query.dtype)
    out = nn.functional.scaled_dot_product_attention(
        query.reshape(B, -1, groups * T, head_dim),
        key,
        value,
        attn_mask=attention_mask,
        scale=kwargs.get("scaling"),
    )
    return out.reshape(B, H, T, -1).transpose(1, 2).contiguous(), None


def stacked(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A mask [B, 1, T, P] in the form that sdpa adds to the scores of stacked groups [B, 1, groups
    · T, P]. All layers of a pass receive the same mask, so the result is cached for the mask's
    lifetime (in bfloat16, this saves 2 % of a pass of SmolLM2-135M over three tokens)."""
    masks = {} if torch.compiler.is_compiling() else _stacks.setdefault(mask, {})
    if (groups, dtype) not in masks:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
        masks[groups, dtype] = mask.repeat(1, 1, groups, 1)
    repeated: Tensor = masks[groups, dtype]
    return repeated


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


def use_grouped_attention(model: Any) -> None:
    """Switch a model from `sdpa` to `grouped_attention`. Other attention is unchanged, including
    sparse attention, whose indexer hides keys only under the name sdpa."""
    kinds = layer_kinds(model.config.get_text_config(decoder=True))
    sparse = any(kind.endswith("_sparse") or kind == "indexed_attention" for kind in kinds)
    if fast_paths_on() and attention_of(model.config) == "sdpa" and not sparse:
        model.set_attn_implementation("grouped")


def use_sdpa(model: Any) -> None:
    """Switch a model from `grouped_attention` back to `sdpa`."""
    if attention_of(model.config) == "grouped":
        model.set_attn_implementation("sdpa")

"""The attention of a recurrent draft: keys that all anchors of a text share, and later keys of
each anchor's own.

An anchor sees the shared keys of its document up to its own pair, and at depth k one further key
for each of its drafted tokens 1 … k. No other anchor sees those, so a text's anchors are read in
one pass.

Letters: B batch, P shared keys, A anchors, D width, H heads, G query heads a KV head, E head
width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import rotate_half

WHOLE = 1 << 18  # anchors × keys of a batch up to which all scores are held at once
BLOCK = 128  # anchors whose scores are held at once beyond that, and keys of a tile

KeyValue = tuple[Tensor, Tensor]  # a key and a value [B, Hkv, …, E]


class Sight(NamedTuple):
    """Which shared keys each anchor sees: those of its document from `first_BA` to `pair_BA`."""

    pair_BA: Tensor  # the anchor's own key, which it sees whatever else is hidden
    first_BA: Tensor  # the first key of the anchor's document
    document_BP: Tensor | None = None  # whose key it is, -2: nobody's; None: all of one document
    document_BA: Tensor | None = None

    def mask(self, anchors: slice, keys: slice) -> Tensor:
        """[B, a, p] of these anchors and keys."""
        pair_BA1 = self.pair_BA[:, anchors, None]
        key_P = torch.arange(keys.start, keys.stop, device=pair_BA1.device)
        seen_BAP = key_P <= pair_BA1
        if self.document_BP is not None and self.document_BA is not None:
            seen_BAP &= self.document_BA[:, anchors, None] == self.document_BP[:, None, keys]
            seen_BAP |= key_P == pair_BA1  # a row without any key would be NaN
        return seen_BAP

    def tiles(self, anchors: slice) -> slice:
        """The tiles of `BLOCK` keys that hold whatever these anchors see."""
        first, last = self.first_BA[:, anchors].min(), self.pair_BA[:, anchors].max()
        return slice(int(first) // BLOCK, int(last) // BLOCK + 1)


class Attention(nn.Module):
    """Grouped-query attention that reads `width` numbers a pair and returns D."""

    def __init__(self, llama: LlamaConfig, width: int) -> None:
        super().__init__()
        D, E = llama.hidden_size, int(llama.head_dim or 0)
        self.heads = llama.num_attention_heads
        self.kv_heads = llama.num_key_value_heads or self.heads
        self.head_dim = E
        self.q_proj = nn.Linear(width, self.heads * E, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * E, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * E, bias=False)
        self.o_proj = nn.Linear(self.heads * E, D, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[B, A, H·E] -> [B, H, A, E]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def join(self, heads: Tensor) -> Tensor:
        """What the heads attended to [B, Hkv, G, A, E] -> [B, A, D]"""
        return self.o_proj(heads.flatten(1, 2).transpose(1, 2).flatten(2))

    def keys_values(self, x_BPD: Tensor, rope: tuple[Tensor, Tensor]) -> KeyValue:
        return rotated(self.split(self.k_proj(x_BPD)), rope), self.split(self.v_proj(x_BPD))

    def query(self, x_BAD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[B, Hkv, G, A, E]"""
        query = rotated(self.split(self.q_proj(x_BAD)), rope)
        return query.unflatten(1, (self.kv_heads, -1))

    def over_cache(
        self, query: Tensor, keys: Tensor, values: Tensor, mask_BAP: Tensor | None
    ) -> Tensor:
        """Attention [B, A, D] over the keys and values of a cache, as drafting has it."""
        return self.join(_fused(query, keys, values, mask_BAP))

    def over_anchors(
        self, query: Tensor, shared: KeyValue, sight: Sight, own: tuple[KeyValue, ...]
    ) -> Tensor:
        """Attention [B, A, D] of all anchors of a text, as training has it.

        `own` holds a key and a value [B, Hkv, A, E] a drafted token; anchor i sees entry i of
        each. A long text is read a block of anchors at a time, against the tiles of keys that the
        block sees; the backward pass computes a block's scores anew. Memory then grows with the
        length of the text and not with its square.
        """
        B, A, P = len(query), query.shape[3], shared[0].shape[2]
        if B * A * P <= WHOLE:
            mask = sight.mask(slice(0, A), slice(0, P))
            return self.join(_whole(query, *shared, mask, own))
        tiles = [x.split(BLOCK, 2) for x in shared]

        def block(anchors: slice) -> Tensor:
            near = sight.tiles(anchors)
            mine = [[x[:, :, anchors] for x in pair] for pair in own]
            keys = torch.cat([*tiles[0][near], *(key for key, _ in mine)], 2)
            values = torch.cat([*tiles[1][near], *(value for _, value in mine)], 2)
            seen = slice(near.start * BLOCK, min(near.stop * BLOCK, P))
            mask = sight.mask(anchors, seen)
            alone = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
            mask = torch.cat([mask, *[alone.expand(B, -1, -1)] * len(own)], 2)
            return _fused(query[..., anchors, :], keys, values, mask)

        out = [
            checkpoint(
                block,
                slice(start, min(start + BLOCK, A)),
                use_reentrant=False,
                preserve_rng_state=False,  # nothing in it is drawn
            )
            for start in range(0, A, BLOCK)
        ]
        return self.join(torch.cat(out, 3))


def _fused(query: Tensor, keys: Tensor, values: Tensor, mask_BAP: Tensor | None) -> Tensor:
    """[B, Hkv, G, A, E]; the heads of a group are further rows of the query, so that keys and
    values are not copied."""
    G, A = query.shape[2:4]
    mask = None if mask_BAP is None else mask_BAP[:, None].repeat(1, 1, G, 1)
    out = nn.functional.scaled_dot_product_attention(
        query.flatten(2, 3), keys, values, attn_mask=mask
    )
    return out.unflatten(2, (G, A))


def _whole(
    query: Tensor, keys: Tensor, values: Tensor, mask_BAP: Tensor, own: tuple[KeyValue, ...]
) -> Tensor:
    """[B, Hkv, G, A, E], with all scores at once."""
    if not own:
        return _fused(query, keys, values, mask_BAP)
    G, A, E = query.shape[2:]
    P = keys.shape[2]
    scores = (query.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (G, A))
    scores = scores.masked_fill(~mask_BAP[:, None, None], -torch.inf)
    diagonal = torch.stack([(query * k[:, :, None]).sum(-1) for k, _ in own], -1)
    precise = torch.promote_types(scores.dtype, torch.float32)
    scores = torch.cat([scores, diagonal], -1).to(precise) * E**-0.5
    weights = scores.softmax(-1).to(values.dtype)
    out = (weights[..., :P].flatten(2, 3) @ values).unflatten(2, (G, A))
    for j, (_, v) in enumerate(own):
        out = out + weights[..., P + j, None] * v[:, :, None]
    return out


def rotated(x_BHAE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of heads, given cos and sin [B, A, E]."""
    cos, sin = (t[:, None].to(x_BHAE.dtype) for t in rope)
    return x_BHAE * cos + rotate_half(x_BHAE) * sin

"""The fused fast path: a causal target's forward pass over a cache, from the model's weights but
without its modules.

A decoding step reads few tokens, so on a CPU transformers' modules spend as much time on calls as
on products. This pass makes fewer calls: q, k and v are one product with one joint weight, and so
are the first two products of an MLP; the residual is added within a product; q and k are rotated in
place and written to the cache together with v; and masks, rotary factors, views of the cache and
the choice of products are made once for all layers. The pass recognises Llama-like layers (also
with biases and with norms of heads) by their submodules. A target's self-check (self_check.py) then
compares the pass with the model. If they differ, the target uses the model's modules.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.compat import (
    attention_of,
    hooks_of,
    parts_of,
    versions,
)
from specdec.runtime.cache import Place, SlotCache, Update, model_inputs
from specdec.runtime.cpu import fast_paths_on
from specdec.runtime.cpu.few_row_norm import FewRowsNorm
from specdec.runtime.cpu.grouped_attention import stacked
from specdec.runtime.cpu.packed_linear import JointLinear, Product, bucket

# Tokens of a pass. Passes over more gain nothing, and their masks grow with the square; but the
# modules would pack their weights once more, so this is longer than most prompts.
MOST = 1024
LINEAR = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


# kinds of rotary factors that depend on the position alone
FIXED_ROPE = ("default", "linear", "llama3", "yarn")


class OtherShape(Exception):
    """The model's layers have parts that this pass does not support."""


class LeanLayer:
    """A decoder layer. Raises OtherShape for unsupported parts."""

    def __init__(self, layer: Any) -> None:
        q, k, v, o, gate, up, down = (_part(layer, path) for path in LINEAR)
        # q, k and v; the output of attention; gate and up; the output of the MLP
        self.products = [_joint(q, k, v), _joint(o), _joint(gate, up), _joint(down)]
        self.act, attention = _part(layer, "mlp.act_fn.forward"), layer.self_attn
        self.head_dim, self.scale = _part(attention, "head_dim"), _part(attention, "scaling")
        heads, self.kv_heads = (x.out_features // self.head_dim for x in (q, k))
        self.groups = heads // self.kv_heads
        of_layer = ("input_layernorm", "post_attention_layernorm")
        self.before_attention, self.before_mlp = (_norm(_part(layer, name)) for name in of_layer)
        of_heads = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.head_norms = [] if None in of_heads else [_norm(norm) for norm in of_heads]

    @property
    def norms(self) -> list[FewRowsNorm]:
        return [self.before_attention, self.before_mlp, *self.head_norms]

    def __call__(
        self,
        x: Tensor,
        products: Sequence[Product],
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        update: Update,
    ) -> Tensor:
        """The residual stream [B · T, D] after this layer, computed by the `products` for this
        number of rows. `cos` and `sin` [B, T, 1, 1, D] are laid out for `Tensor.roll`; `update`
        writes to the cache and returns all keys and values."""
        to_qkv, to_output, to_gate_up, to_down = products
        B, T = cos.shape[:2]
        H, D, groups = self.kv_heads, self.head_dim, self.groups
        # the query heads, H at a time, then the keys and the values
        heads = to_qkv(self.before_attention(x)).view(B, T, groups + 2, H, D)
        if self.head_norms:
            parts = heads.split([groups, 1, 1], 2)
            both = zip(self.head_norms, parts, strict=False)
            heads = torch.cat([*(norm(part) for norm, part in both), parts[2]], 2)
        turned = heads[:, :, :-1]
        torch.addcmul(turned * cos, turned.roll(D // 2, -1), sin, out=turned)
        keys, values = update(heads[:, :, groups:])
        # the query heads that share a KV head become rows of one query (see grouped_attention.py)
        query = heads[:, :, :groups]
        if T == 1:  # no copy
            query = query.reshape(B, H, groups, D)
        else:
            query = query.reshape(B, T, H, groups, D).permute(0, 2, 3, 1, 4)
            query = query.reshape(B, H, groups * T, D)
        out = F.scaled_dot_product_attention(query, keys, values, mask, scale=self.scale)
        if T > 1:
            out = out.reshape(B, H * groups, T, D).transpose(1, 2)
        x = to_output(out.reshape(B * T, -1), x)
        gate, up = to_gate_up(self.before_mlp(x)).chunk(2, -1)
        return to_down(self.act(gate).mul_(up), x)


class LeanPass:
    """The layers of a model and the norm after them. `body` is the module of the `model` that holds
    the list of `layers`. Raises OtherShape for a model with unsupported parts, with a replaced
    method (as accelerate does), or on another device than a CPU."""

    def __init__(self, model: nn.Module, body: Any, layers: nn.ModuleList, config: Any) -> None:
        self.config = config
        usual = attention_of(config) in ("grouped", "sdpa")
        patched = any("forward" in vars(part) for part in model.modules())
        if not usual or patched or next(body.parameters()).device.type != "cpu":
            raise OtherShape
        self.embed, self.rotary = _part(body, "embed_tokens"), _part(body, "rotary_emb")
        self.layers = [LeanLayer(layer) for layer in layers]
        self.norm, self.dtype = _norm(_part(body, "norm")), self.embed.weight.dtype
        kinds = getattr(config, "layer_types", None) or [None] * len(layers)
        self.kinds = list(kinds)[: len(layers)]
        self.windowed = getattr(config, "sliding_window", None) is not None
        shapes = {(layer.kv_heads, layer.head_dim, layer.groups) for layer in self.layers}
        self.products = [product for layer in self.layers for product in layer.products]
        self.norms = [self.norm, *(norm for layer in self.layers for norm in layer.norms)]
        linear = [x for product in self.products for layer in product.layers for x in _own(layer)]
        self.weights = [*linear, *(norm.weight for norm in self.norms)]
        theirs = {id(x) for part in (*layers, body.norm) for x in part.parameters()}
        if theirs != {id(x) for x in self.weights} or len(shapes) > 1:
            raise OtherShape
        ((*self.of_keys, self.groups),) = shapes
        if any(x.is_inference() for x in self.weights):  # nothing tells whether these have changed
            raise OtherShape
        self._versions, self._hooks = versions(self.weights), hooks_of(model)
        inner = [parts_of(part) for layer in layers for part in layer.modules()]
        self._parts = [(parts, list(parts.values())) for parts in inner if parts]
        # products of all layers, by `bucket` of the number of rows; rotary factors by position
        self._products: dict[int, list[list[Product]]] = {}
        self._rotations: Tensor | None = None

    @classmethod
    def recognise(
        cls, model: nn.Module, body: Any, layers: nn.ModuleList, config: Any
    ) -> "LeanPass | None":
        """The pass of this model; None if the model is not Llama-like, or if the fast paths are
        turned off."""
        if not fast_paths_on():
            return None
        try:
            return cls(model, body, layers, config)
        except OtherShape:
            return None

    def inputs(self, place: Place, cache: SlotCache) -> dict[str, Any]:
        """`model_inputs` of a place in this cache, with a mask unless every token attends to all
        slots: without one, the model would make its own."""
        if place.mask_BTP is None and (place.position_BT.shape[1] > 1 or self.windowed):
            place = place._replace(mask_BTP=place.seen(cache.shown))
        return model_inputs(self.config, place, self.dtype)

    def takes(self, ids_BT: Tensor, passive: int = 0) -> bool:
        """Whether this class can make the pass over these tokens. The pass skips hooks, so it
        requires that there are none, except `passive` ones that only record their input, and it
        does not support replaced submodules (such as adapters)."""
        plain = not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        plain = plain and (not any(self._hooks) or sum(map(len, self._hooks)) == passive)
        plain = plain and all([list(parts.values()) == known for parts, known in self._parts])
        return plain and ids_BT.numel() <= MOST and not torch.compiler.is_compiling()

    def __call__(self, cache: Any, **inputs: Any) -> tuple[Tensor, dict[int, Tensor]]:
        """Call `through`, after reading the weights again if they have changed since the last
        pass."""
        if (now := versions(self.weights)) != self._versions:
            self._versions = now
            self._products.clear()
            for product in self.products:
                product.renew()
            for norm in self.norms:
                norm.renew()
        return self.through(cache, **inputs)

    def through(
        self,
        cache: Any,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Any,
        wanted: Sequence[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The final hidden state [B, T, D], and the residual stream after each number of layers in
        `wanted`. The other inputs are those of `inputs`."""
        x_BTD = self.embed(input_ids)
        cos, sin = self.rotation(x_BTD, position_ids, cache.shown)
        by_kind = attention_mask
        if not isinstance(by_kind, dict):
            by_kind = dict.fromkeys(self.kinds, attention_mask)
        added = {
            kind: None if mask is None else stacked(mask, self.groups, x_BTD.dtype)
            for kind, mask in by_kind.items()
        }
        updates = cache.updates(len(self.layers), *self.of_keys, x_BTD)
        x, seen = x_BTD.flatten(0, 1), dict[int, Tensor]()
        products = self.products_for(len(x))
        for k, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            x = layer(x, products[k], cos, sin, added[kind], updates[k])
            if k + 1 in wanted:
                seen[k + 1] = x.view_as(x_BTD)
        return self.norm(x).view_as(x_BTD), seen

    def products_for(self, rows: int) -> list[list[Product]]:
        """The products of each layer for this number of rows, looked up once for a pass or before
        it."""
        rows = bucket(rows)
        if rows not in self._products:
            inputs = {
                one.width: torch.empty(rows, one.width, dtype=self.dtype) for one in self.products
            }
            self._products[rows] = [
                [one.product(inputs[one.width]) for one in layer.products] for layer in self.layers
            ]
        return self._products[rows]

    def rotation(self, x: Tensor, position_BT: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, 1, 1, D] at positions below `end`, with the first half of sin negated.
        They come from a table unless they depend on the length of the text."""
        if getattr(self.rotary, "rope_type", None) not in FIXED_ROPE:
            return self._turned(x, position_BT)
        if self._rotations is None or len(self._rotations) < end:
            every_1T = torch.arange(max(1024, 2 * end))[None]
            self._rotations = torch.stack(self._turned(x, every_1T), 2)[0]
        cos, sin = F.embedding(position_BT, self._rotations.flatten(1)).chunk(2, -1)
        return cos[:, :, None, None], sin[:, :, None, None]

    def _turned(self, x: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(x, position_BT)
        first, second = sin.chunk(2, -1)
        return cos[:, :, None, None], torch.cat([-first, second], -1)[:, :, None, None]


def _part(module: Any, path: str) -> Any:
    """The object at a dotted path of attributes. Raises OtherShape if there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    if module is None:
        raise OtherShape
    return module


def _joint(*layers: nn.Module) -> JointLinear:
    """The layers as one joint layer. Raises OtherShape if this is not possible."""
    if (joint := JointLinear.joining(*layers)) is None:
        raise OtherShape
    return joint


def _norm(norm: Any) -> FewRowsNorm:
    """A `FewRowsNorm` for an RMSNorm. Raises OtherShape if it is none."""
    if not hasattr(norm, "variance_epsilon") or getattr(norm, "weight", None) is None:
        raise OtherShape
    return FewRowsNorm(norm.weight, norm.variance_epsilon)


def _own(layer: nn.Linear) -> list[Tensor]:
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias]

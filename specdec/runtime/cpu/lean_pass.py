"""A causal target's pass over a cache, from the model's weights but without its modules.

A step of decoding reads few tokens, so on a CPU transformers' modules spend as much time on calls
as on products. This pass makes fewer calls: q, k and v are one product with one packed weight, and
so are the first two products of an MLP; the residual is added within a product; and masks and
rotary factors are laid out once for all layers. The pass recognises layers of Llama's shape (also
with biases and with norms of heads) by their parts. A target's own checks (self_check.py) then
compare the pass with the model. If they differ, the target keeps to the model's modules.
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
    version,
)
from specdec.runtime.cache import Place, SlotCache, model_inputs
from specdec.runtime.cpu import fast_paths_on
from specdec.runtime.cpu.few_row_norm import FewRowsNorm
from specdec.runtime.cpu.grouped_attention import stacked
from specdec.runtime.cpu.packed_linear import JointLinear

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


class OtherShape(Exception):
    """The model's layers have parts that this pass does not know."""


class LeanLayer:
    """A decoder layer. Raises OtherShape for one that has other parts."""

    def __init__(self, layer: Any) -> None:
        q, k, v, o, gate, up, down = (_part(layer, path) for path in LINEAR)
        self.qkv, self.o = _joint(q, k, v), _joint(o)
        self.gate_up, self.down = _joint(gate, up), _joint(down)
        self.act, attention = _part(layer, "mlp.act_fn.forward"), layer.self_attn
        self.head_dim, self.scale = _part(attention, "head_dim"), _part(attention, "scaling")
        self.heads, self.kv_heads = (x.out_features // self.head_dim for x in (q, k))
        of_layer = ("input_layernorm", "post_attention_layernorm")
        self.before_attention, self.before_mlp = (_norm(_part(layer, name)) for name in of_layer)
        of_heads = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.head_norms = [] if None in of_heads else [_norm(norm) for norm in of_heads]

    @property
    def products(self) -> list[JointLinear]:
        return [self.qkv, self.o, self.gate_up, self.down]

    @property
    def norms(self) -> list[FewRowsNorm]:
        return [self.before_attention, self.before_mlp, *self.head_norms]

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, update: Any
    ) -> Tensor:
        """The residual stream [B, T, D] after this layer. `cos` and `sin` [B, 1, T, D] are laid
        out for `Tensor.roll`; `update` writes to the cache and returns all keys and values."""
        B, T, _ = x.shape
        H, num_kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        heads = self.qkv(self.before_attention(x)).view(B, T, -1, head_dim).transpose(1, 2)
        turned = heads[:, : H + num_kv_heads]
        if self.head_norms:
            both = zip(self.head_norms, turned.split([H, num_kv_heads], 1), strict=True)
            turned = torch.cat([norm(part) for norm, part in both], 1)
        turned = torch.addcmul(turned * cos, turned.roll(head_dim // 2, -1), sin)
        keys, values = update(turned[:, H:], heads[:, H + num_kv_heads :])
        # the query heads that share a KV head become rows of one query (see grouped_attention.py)
        query = turned[:, :H].reshape(B, num_kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(query, keys, values, mask, scale=self.scale)
        joined = out.reshape(B, H, T, head_dim).transpose(1, 2).reshape(B, T, H * head_dim)
        x = self.o(joined, x)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return self.down(self.act(gate) * up, x)


class LeanPass:
    """The layers of a model and the norm after them. `body` is the module of the `model` that holds
    the list of `layers`. Raises OtherShape for a model with other parts, with a method that was
    replaced (as accelerate does), or on another device than a CPU."""

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
        self.groups = {layer.heads // layer.kv_heads for layer in self.layers}
        self.products = [product for layer in self.layers for product in layer.products]
        self.norms = [self.norm, *(norm for layer in self.layers for norm in layer.norms)]
        linear = [x for product in self.products for layer in product.layers for x in _own(layer)]
        self.weights = [*linear, *(norm.weight for norm in self.norms)]
        theirs = {id(x) for part in (*layers, body.norm) for x in part.parameters()}
        if theirs != {id(x) for x in self.weights} or len(self.groups) > 1:
            raise OtherShape
        if any(x.is_inference() for x in self.weights):  # nothing tells whether these have changed
            raise OtherShape
        self._versions, self._hooks = self.versions(), hooks_of(model)
        inner = [parts_of(part) for layer in layers for part in layer.modules()]
        self._parts = [(parts, name, part) for parts in inner for name, part in parts.items()]

    @classmethod
    def recognise(
        cls, model: nn.Module, body: Any, layers: nn.ModuleList, config: Any
    ) -> "LeanPass | None":
        """The pass of this model; None for one that is not of the usual shape, and where the fast
        paths are turned off."""
        if not fast_paths_on():
            return None
        try:
            return cls(model, body, layers, config)
        except OtherShape:
            return None

    def inputs(self, place: Place, cache: SlotCache) -> dict[str, Any]:
        """`model_inputs` of a place in this cache, with a mask unless every token sees all slots:
        the model would make its own."""
        if place.mask_BTP is None and (place.position_BT.shape[1] > 1 or self.windowed):
            place = place._replace(mask_BTP=place.seen(cache.shown))
        return model_inputs(self.config, place, self.dtype)

    def versions(self) -> list[int]:
        return [version(x) for x in self.weights]

    def takes(self, ids_BT: Tensor, passive: int = 0) -> bool:
        """Whether this class can make the pass over these tokens. The pass would leave out hooks,
        except `passive` ones that only keep what they see, and parts that have replaced others
        (such as adapters)."""
        plain = not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        plain = plain and (not any(self._hooks) or sum(map(len, self._hooks)) == passive)
        plain = plain and all(parts[name] is part for parts, name, part in self._parts)
        return plain and ids_BT.numel() <= MOST and not torch.compiler.is_compiling()

    def __call__(self, cache: Any, **inputs: Any) -> tuple[Tensor, dict[int, Tensor]]:
        """`through`, after reading the weights anew if they have changed since the last pass."""
        if (versions := self.versions()) != self._versions:
            self._versions = versions
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
        """The final hidden state [B, T, D], and the residual stream after as many layers as each
        number in `wanted` says. The other inputs are those of `inputs`."""
        x, (groups,) = self.embed(input_ids), self.groups
        cos, sin = self.rotary(x, position_ids)
        first, second = sin.chunk(2, -1)
        cos, sin = cos[:, None], torch.cat([-first, second], -1)[:, None]
        by_kind = attention_mask
        if not isinstance(by_kind, dict):
            by_kind = dict.fromkeys(self.kinds, attention_mask)
        added = {k: None if m is None else stacked(m, groups, x.dtype) for k, m in by_kind.items()}
        seen, slots = dict[int, Tensor](), cache.slot_layers
        for k, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            x = layer(x, cos, sin, added[kind], slots[k].update)
            if k + 1 in wanted:
                seen[k + 1] = x
        return self.norm(x), seen


def _part(module: Any, path: str) -> Any:
    """What stands at a dotted path of attributes. Raises OtherShape if nothing does."""
    for name in path.split("."):
        module = getattr(module, name, None)
    if module is None:
        raise OtherShape
    return module


def _joint(*layers: nn.Module) -> JointLinear:
    """The layers as one. Raises OtherShape if this is not possible."""
    if (joint := JointLinear.joining(*layers)) is None:
        raise OtherShape
    return joint


def _norm(norm: Any) -> FewRowsNorm:
    """An RMSNorm. Raises OtherShape if it has no such parts."""
    if not hasattr(norm, "variance_epsilon") or getattr(norm, "weight", None) is None:
        raise OtherShape
    return FewRowsNorm(norm.weight, norm.variance_epsilon)


def _own(layer: nn.Linear) -> list[Tensor]:
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias]

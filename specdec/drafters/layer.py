"""A Llama layer of a draft, which takes its shape, and may copy its weights, from the target."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from specdec.drafters.attention import Attend, Attention
from specdec.drafters.norm import RMSNorm
from specdec.drafters.rope import FULL, alike, of_full_attention, rotary_width
from specdec.runtime.cpu.packed_linear import JointLinear, joint, multiplies
from specdec.targets.parts import UNBOUNDED, TargetParts

UPDATE = 0.25  # what a copied layer adds to a feature before training, relative to the feature
LONGEST = 1 << 17  # positions of a draft whose target sets no limit
READS = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
ATTENTION, FEED_FORWARD = (*READS, "self_attn.o_proj."), ("mlp.",)


class MLP(LlamaMLP):
    """Llama's MLP, whose first two products are one for packed weights."""

    def __init__(self, llama: LlamaConfig) -> None:
        super().__init__(llama)  # type: ignore[no-untyped-call]
        self._first: JointLinear | None = None
        self._last: JointLinear | None = None

    def added(self, stream: Tensor, x: Tensor) -> Tensor:
        """The stream [..., D] plus the output for x [..., D]."""
        if not multiplies(x, self.gate_proj.weight):
            return self._plainly(stream, x)
        self._first = joint(self._first, self.gate_proj, self.up_proj)
        self._last = joint(self._last, self.down_proj)
        if self._first is None or self._last is None or not self._first.faster(x):
            return self._plainly(stream, x)
        gate, up = self._first(x).chunk(2, -1)
        return self._last(self.act_fn(gate) * up, stream)

    def _plainly(self, stream: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self(x)
        return stream + out


class Layer(nn.Module):
    """A Llama layer whose attention reads `width` numbers, preceded by the family's `norms`; with
    `head_norms`, a Qwen3 layer."""

    input_layernorm: RMSNorm
    hidden_norm: RMSNorm

    def __init__(
        self,
        llama: LlamaConfig,
        width: int,
        norms: tuple[str, ...] = (),
        head_norms: bool = False,
    ) -> None:
        super().__init__()
        for name in norms:
            self.add_module(name, RMSNorm(llama.hidden_size, llama.rms_norm_eps))
        self.self_attn = Attention(llama, width, head_norms)
        self.post_attention_layernorm = RMSNorm(llama.hidden_size, llama.rms_norm_eps)
        self.mlp = MLP(llama)

    def entered(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads of the stream [..., D] from below, and the residual."""
        return self.input_layernorm(stream), stream

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        stream = residual + attended
        return self.leave(self.mlp.added(stream, self.post_attention_layernorm(stream)))

    def leave(self, stream: Tensor) -> Tensor:
        """The layer's output, from the stream after its MLP."""
        return stream

    def forward(self, read: Tensor, residual: Tensor, attend: Attend, i: int = 0) -> Tensor:
        """The output [B, Wo, D] of this layer, the i-th of a draft, where it is asked for it, from
        what attention reads at all places and the residual there."""
        added = attend(i, self.self_attn, read)
        return self.finish(attend.asked(i, residual), added)

    def silence(self) -> None:
        """Set the output weights to zero: the layer adds nothing to the residual."""
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()

    def temper(self, state_ND: Tensor, read_ND: Tensor) -> None:
        """Scale the output weights of attention and MLP so that both together add `UPDATE` times
        the size of states like `state_ND`, if attention sees only the state's own `read_ND`."""
        attention = self.self_attn
        mlp_ND = self.mlp(self.post_attention_layernorm(state_ND))
        added_ND = torch.cat([attention.own_output(read_ND), mlp_ND], 1)
        size, added = (x.square().sum(1).mean().sqrt() for x in (state_ND, added_ND))
        for writes in (attention.o_proj, self.mlp.down_proj):
            writes.weight.mul_(UPDATE * size / added)


def away_from_zero(weight_D: Tensor) -> Tensor:
    """A norm's weights as divisors: those near 0 are replaced by a tenth of their mean size."""
    size_D = weight_D.abs().clamp_min(0.1 * float(weight_D.abs().mean()))
    return torch.where(weight_D < 0, -size_D, size_D)


def fits(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> bool:
    """Whether `theirs` holds all tensors of `ours`, in the same shapes and not quantised."""
    tensors = [theirs.get(name, torch.empty(0)) for name in ours]
    same = [x.shape == y.shape for x, y in zip(tensors, ours.values(), strict=True)]
    return all(same) and all(x.element_size() > 1 for x in tensors)


def copy_alike(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], width: int) -> None:
    """Copy the tensors of a target's layer that mean the same as those of the same names in a
    draft's layer. q, k, v and o belong together, as do the parts of an MLP: they are copied only if
    all of them fit, since a single one of latent attention or of wider heads may have the right
    shape by chance. Attention that reads more than `width` numbers takes q, k and v as its last
    columns."""

    def place(name: str) -> Tensor | None:
        source, x = theirs.get(name), ours[name]
        if source is None or source.element_size() == 1:
            return None
        wide = name.startswith(READS) and source.shape == (x.shape[0], width)
        return x if source.shape == x.shape else x[:, -width:] if wide else None

    places = {name: place(name) for name in ours}
    together = [[n for n in ours if n.startswith(group)] for group in (ATTENTION, FEED_FORWARD)]
    apart = {n for names in together if any(places[n] is None for n in names) for n in names}
    for name, x in places.items():
        if x is not None and name not in apart:
            x.copy_(theirs[name])


def copy_fitting(x: Tensor, source: Tensor | None) -> None:
    """Copy a tensor of the target's, if there is one, to a weight of the same shape."""
    if source is not None and source.shape == x.shape:
        x.copy_(source)


def copy_last(target: TargetParts, ours: Mapping[str, Tensor]) -> Tensor | None:
    """Copy tensors of the target's last layer to those of the same names. Returns the weight of the
    norm after that layer. If there is no such norm, or a tensor does not fit, copies nothing and
    returns None."""
    theirs, after = target.as_llama(-1), target.norm_weight
    if after is None or not fits(theirs, ours):
        return None
    for name, x in ours.items():
        x.copy_(theirs[name])
    return after


def llama_of(target: TargetParts, intermediate_size: int | None = None) -> dict[str, Any]:
    """The keys of a LlamaConfig for a layer shaped like the target's own, and `rotary_dim` if only
    so many numbers of a head are rotated. Where the target's layers differ, it is shaped like the
    last one with full attention. Nothing of the target's config is shared or changed."""
    index, theirs = _full_attention(target.config)
    D, positions = target.width, target.positions

    def size(key: str, default: int) -> int:
        value = getattr(theirs, key, None)
        value = value[index] if isinstance(value, list | tuple) and len(value) > index else value
        return value if type(value) is int and value > 0 else default

    wanted = size("num_attention_heads", max(1, D // 64))
    heads = next(n for n in range(min(wanted, D), 0, -1) if D % n == 0)  # as LlamaConfig demands
    kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", D // wanted)
    head_dim += head_dim % 2
    kinds = getattr(theirs, "layer_types", None) or ()
    kind = kinds[index] if index < len(kinds) else None
    rope = of_full_attention(getattr(theirs, "rope_parameters", None), kind)
    rotary = rotary_width(rope, head_dim)
    if rope is not None:
        rope.pop("partial_rotary_factor", None)
    return {
        "hidden_size": D,
        "intermediate_size": intermediate_size or size("intermediate_size", 4 * D),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if heads % kv_heads == 0 else heads,
        "head_dim": head_dim,
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", None) or 1e-5,
        "max_position_embeddings": positions if positions < UNBOUNDED else LONGEST,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
    } | ({"rotary_dim": rotary} if rotary < head_dim else {})


def _full_attention(config: Any) -> tuple[int, Any]:
    """The index of a target's last layer with full attention (else of its last layer), and the
    config of that layer. In Gemma 4 its sizes differ from the model's, whose config raises if it is
    asked for them."""
    count, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or ()
    full = [k for k, kind in enumerate(kinds[:count]) if kind == FULL]
    index = full[-1] if full else count - 1
    various = getattr(config, "is_heterogeneous", False)
    return index, config.per_layer_config[index] if various else config


def config_of(llama: Mapping[str, Any]) -> LlamaConfig:
    """The config of a draft's layers, from its keys (`llama_of`) as they are on its card. A card of
    an earlier version may say how much of a head is rotated, or hold parameters by kind of layer:
    such a draft was trained without regard to them."""
    rope = of_full_attention(llama["rope_parameters"], None)
    if rope is not None:
        width = llama.get("rotary_dim") or llama["head_dim"]
        rope = alike(rope, width, llama["max_position_embeddings"])
    return LlamaConfig(**{**llama, "rope_parameters": rope})

"""The layers of a draft: Llama's (or Qwen3's), with norm, rotary positions, attention and MLP.

A layer has the sizes of the target's layers, and may copy their weights.

A method writes one `step` through its layers and passes each of them an `Attend`: attention over a
sequence (training) or over the slots of a cache (drafting), both in `attention.py`. The step does
not know which.

A draft has one kind of layer, which attends to the whole text, so it copies the rotary parameters
of the target's full attention. Engines and transformers interpret some of these differently; they
are replaced by parameters that both interpret alike (`alike`), so a draft is the same network
everywhere.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from specdec.errors import require
from specdec.runtime.cpu.few_row_norm import FewRowsNorm
from specdec.runtime.cpu.packed_linear import JointLinear, joint, multiplies
from specdec.targets.parts import UNBOUNDED, TargetParts, configs_of_layers


class RMSNorm(LlamaRMSNorm):
    """Llama's RMSNorm. Outside autograd and compiled graphs it uses fewer operators, which in 16
    bits round once where Llama's round twice."""

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


FULL = "full_attention"
THETA = 10000.0


def of_full_attention(rope: Mapping[str, Any] | None, kind: str | None) -> dict[str, Any] | None:
    """A copy of a target's rotary parameters for layers with full attention or, if they are given
    by kind of layer and there is no such kind, for layers of this `kind`. None if the target has
    none for these layers."""
    if not rope:
        return None
    by_kind = {name: x for name, x in rope.items() if isinstance(x, Mapping)}
    if not by_kind or "rope_type" in rope:
        return {name: copy.deepcopy(x) for name, x in rope.items() if name not in by_kind}
    taken = next((k for k in (FULL, kind) if k in by_kind), next(iter(by_kind)))
    return dict(copy.deepcopy(by_kind[taken]))


def alike(rope: Mapping[str, Any], width: int, positions: int) -> dict[str, Any]:
    """Rotary parameters that transformers and vLLM 0.32 interpret alike, for `width` rotated
    dimensions of a head and texts of up to `positions` tokens.

    `dynamic` changes nothing up to that length, and has a fixed base with `alpha`. `longrope` has
    two sets of factors; transformers chooses by a text's length, vLLM by the maximum length: a
    draft has the short set at any length. vLLM ignores the `factor` of `proportional`, and requires
    all parameters of `yarn`. Other keys, such as the sections of images, are dropped.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind, theta = "longrope" if kind == "su" else kind, rope.get("rope_theta") or THETA
    whole = rope.get("original_max_position_embeddings") or positions
    same = {"rope_type": kind, "rope_theta": theta}
    if kind == "proportional":
        return same
    if kind == "linear":
        return same | {"factor": float(rope["factor"])}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factors = {name: float(rope[name]) for name in names}
        return same | factors | {"original_max_position_embeddings": whole}
    if kind == "yarn":
        factor = float(rope.get("factor") or positions / whole)
        return same | {
            "factor": factor,
            "original_max_position_embeddings": whole,
            "attention_factor": _yarn_attention(rope, factor),
            "beta_fast": rope.get("beta_fast") or 32,
            "beta_slow": rope.get("beta_slow") or 1,
            "truncate": rope.get("truncate", True),
        }
    if kind == "longrope" and len(rope["short_factor"]) == width // 2:
        factor = rope.get("factor") or positions / whole
        usual = math.sqrt(1 + math.log(factor) / math.log(whole)) if factor > 1 else 1.0
        scale = rope.get("short_mscale") or rope.get("attention_factor") or usual
        short = [float(x) for x in rope["short_factor"]]
        return same | {
            "short_factor": short,
            "long_factor": list(short),
            "original_max_position_embeddings": whole,
            "attention_factor": float(scale),
        }
    if kind == "dynamic" and rope.get("alpha"):
        theta = theta * rope["alpha"] ** (width / (width - 2))
    return {"rope_type": "default", "rope_theta": theta}


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> float:
    """The factor on cos and sin that YaRN uses by default."""

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if (attention := rope.get("attention_factor")) is not None:
        return float(attention)
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    return float(grown(above) / grown(below)) if above and below else float(grown(1.0))


def rotary_width(rope: Mapping[str, Any] | None, head_dim: int) -> int:
    """The number of rotated dimensions of a head: even, from 2 to `head_dim`."""
    share = (rope or {}).get("partial_rotary_factor")
    share = 1.0 if share is None else float(share)
    return min(head_dim, max(2, int(head_dim * share) // 2 * 2))


def share_of(width: int, head_dim: int) -> float:
    """The `partial_rotary_factor` that a reader, which rounds down, converts to `width`."""
    share = width / head_dim
    return share if int(head_dim * share) == width else math.nextafter(share, 1.0)


class Rope(nn.Module):
    """Rotary factors for `rotated`, from a table that grows as needed. The config's `rotary_dim`
    (None: all) is the number of rotated dimensions of a head; with `proportional` parameters, the
    others are rotated by 0."""

    def __init__(self, llama: LlamaConfig) -> None:
        super().__init__()
        config, width = copy.deepcopy(llama), getattr(llama, "rotary_dim", None)
        rope: dict[str, Any] = config.rope_parameters  # type: ignore[assignment]
        if width is not None and rope["rope_type"] == "proportional":
            rope["partial_rotary_factor"] = share_of(width, int(llama.head_dim or 0))
        elif width is not None:
            config.head_dim = width
        self.rotary = LlamaRotaryEmbedding(config)
        self._table: tuple[Tensor, Tensor] | None = None

    def forward(self, position: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin [..., D] at positions below `end`; the first half of sin is negated."""
        device, table = position.device, self._table
        if table is None or len(table[0]) < end or table[0].device != device:
            with torch.inference_mode(False), torch.no_grad():  # it may be trained with later
                steps = torch.arange(max(2 * end, 1024), device=device)[None]
                cos, sin = self.rotary(torch.zeros((), device=device), steps)
            first, second = sin[0].chunk(2, -1)
            table = self._table = cos[0], torch.cat([-first, second], -1)
        return table[0][position], table[1][position]


def rotated(x_BHAD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of the first dimensions of heads, given cos and sin [B, A, D] from
    `Rope`; the other dimensions are unchanged. It is Llama's x · cos + cat(-x_2, x_1) · sin, where
    x_1 and x_2 are the halves of x; here sin includes the sign."""
    width = rope[0].shape[-1]
    if width < x_BHAD.shape[-1]:
        return torch.cat([rotated(x_BHAD[..., :width], rope), x_BHAD[..., width:]], -1)
    cos, sin = (t[:, None].to(x_BHAD.dtype) for t in rope)
    return torch.addcmul(x_BHAD * cos, x_BHAD.roll(width // 2, -1), sin)


SHARP = 16.0  # about the score that an input gives its own key, so that it sees little else

KeyValue = tuple[Tensor, Tensor]  # a key and a value [B, H, …, D]


class Attention(nn.Module):
    """Grouped-query attention with inputs of `width` numbers per pair and outputs of D; with
    `head_norms` each query and key head passes an RMSNorm first, as in Qwen3."""

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
        self._joint: JointLinear | None = None  # joint layer of q, k and v
        for name in ("q_norm", "k_norm"):
            norm = RMSNorm(self.head_dim, llama.rms_norm_eps) if head_norms else nn.Identity()
            self.add_module(name, norm)

    def keys_values(self, x_BPD: Tensor, rope: tuple[Tensor, Tensor]) -> KeyValue:
        keys = self.k_norm(self._heads(self.k_proj(x_BPD)))
        return rotated(keys, rope), self._heads(self.v_proj(x_BPD))

    def query(self, x_BAD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Queries [B, H, H, A, D]."""
        query = rotated(self.q_norm(self._heads(self.q_proj(x_BAD))), rope)
        grouped: Tensor = query.unflatten(1, (self.kv_heads, -1))
        return grouped

    def at_once(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`query` and `keys_values` of the same places by one product with a packed weight; None if
        this is not possible or not faster."""
        if not multiplies(x_BTD, self.q_proj.weight):
            return None
        self._joint = joint(self._joint, self.q_proj, self.k_proj, self.v_proj)
        if self._joint is None or not self._joint.faster(x_BTD):
            return None
        heads, turning = self._heads(self._joint(x_BTD)), self.heads + self.kv_heads
        turned, values = heads[:, :turning], heads[:, turning:]
        if not isinstance(self.q_norm, nn.Identity):
            query, keys = turned.split([self.heads, self.kv_heads], 1)
            turned = torch.cat([self.q_norm(query), self.k_norm(keys)], 1)
        turned = rotated(turned, rope)
        query, keys = turned[:, : self.heads], turned[:, self.heads :]
        return query.unflatten(1, (self.kv_heads, -1)), keys, values

    def _heads(self, x: Tensor) -> Tensor:
        """[B, A, H·D] -> [B, H, A, D]"""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads

    def joined(self, heads: Tensor) -> Tensor:
        """The heads' outputs [B, H, H, A, D] -> [B, A, D]"""
        output: Tensor = self.o_proj(heads.flatten(1, 2).transpose(1, 2).flatten(2))
        return output

    def own_output(self, x: Tensor) -> Tensor:
        """The output [..., D] for inputs that attend only to themselves."""
        values = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))
        heads = values.repeat_interleave(self.heads // self.kv_heads, -2)
        output: Tensor = self.o_proj(heads.flatten(-2))
        return output

    def see_oneself(self, inner_FN: Tensor, outer_ND: Tensor) -> None:
        """Set the weights so that every input x [F] attends almost only to itself and the output
        is `x @ inner_FN @ outer_ND`. Queries and keys are the same random map of x's first D
        numbers."""
        (rank, D), groups = outer_ND.shape, self.heads // self.kv_heads
        self.v_proj.weight[:rank] = inner_FN.T.to(self.v_proj.weight)
        outputs = self.o_proj.weight.new_zeros(D, self.kv_heads * self.head_dim)
        outputs[:, :rank] = outer_ND.T
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
    """The attention of one pass. Every layer reads all places of the pass and makes their keys; the
    output of the last layer may be requested at a few places only."""

    def __call__(self, i: int, attention: Attention, read: Tensor) -> Tensor:
        """What layer i adds to the residual stream at the requested positions: [B, T, D]. Its
        attention reads `read` [B, T, …]."""

    def asked(self, i: int, x: Tensor) -> Tensor:
        """The entries [B, T, …] of x [B, T, …] at the requested places of layer i."""


# size of a copied layer's output before training, relative to the hidden state
UPDATE = 0.25
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
        """The residual stream [..., D] plus the output for x [..., D]."""
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
    """A Llama layer whose attention reads `width` numbers, preceded by the method's `norms`; with
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
        """The input of attention, from the residual stream [..., D] of the layer below, and the
        residual."""
        return self.input_layernorm(stream), stream

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        stream = residual + attended
        return self.leave(self.mlp.added(stream, self.post_attention_layernorm(stream)))

    def leave(self, stream: Tensor) -> Tensor:
        """The layer's output, from the stream after its MLP."""
        return stream

    def forward(self, read: Tensor, residual: Tensor, attend: Attend, i: int = 0) -> Tensor:
        """The output [B, T, D] of this layer, the i-th of a draft, at the requested places, from
        the input of attention and the residual at all places."""
        added = attend(i, self.self_attn, read)
        return self.finish(attend.asked(i, residual), added)

    def silence(self) -> None:
        """Set the output weights to zero, so that the layer adds nothing to the residual."""
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()

    def temper(self, state_ND: Tensor, read_ND: Tensor) -> None:
        """Scale the output weights of attention and MLP so that both together add `UPDATE` times
        the size of states like `state_ND`, if attention attends only to the state's own
        `read_ND`."""
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
    """Copy the tensors of a target's layer to those of the same names and meaning in a draft's
    layer. q, k, v and o are copied only together, and so are the parts of an MLP, if all of them
    fit: a single one of latent attention or of wider heads may have the right shape by chance.
    Attention that reads more than `width` numbers takes q, k and v as its last columns."""

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
    """Copy a tensor of the target, if there is one, to a weight of the same shape."""
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


LAYER_COUNTS = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rotary_dim"),
)
LAYER_KEYS = (*LAYER_COUNTS, "rms_norm_eps", "rope_parameters")


def llama_of(
    target: TargetParts,
    intermediate_size: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The keys of a LlamaConfig for a layer with the target's sizes, and `rotary_dim` if only some
    dimensions of a head are rotated. If the target's layers differ, it is like the last one with
    full attention. `changes` replace some of the keys (`drafter.layer_config`). The target's config
    is neither shared nor changed. Raises UserError for a change of a key that is not one of
    `LAYER_KEYS`, and for a count that is not a positive integer."""
    keys = _like_target(target, intermediate_size)
    for name, value in (changes or {}).items():
        setting = f"drafter.layer_config.{name}={value}"
        require(name in LAYER_KEYS, f"{setting}: give one of {', '.join(LAYER_KEYS)}")
        counted = type(value) is int and value >= 1
        require(name not in LAYER_COUNTS or counted, f"{setting}: give an integer from 1")
        keys[name] = copy.deepcopy(value)
    if (width := keys.get("rotary_dim")) is not None and width >= keys["head_dim"]:
        del keys["rotary_dim"]
    return keys


def _like_target(target: TargetParts, intermediate_size: int | None) -> dict[str, Any]:
    """`llama_of` without changes."""
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


def require_width(llama: dict[str, Any], target: TargetParts) -> None:
    """Raise UserError for layers of another width than the target's, whose head reads them."""
    width = llama["hidden_size"]
    require(
        width == target.width,
        f"drafter.layer_config.hidden_size={width}: the states of this draft are read by the head "
        f"of {target.name}, whose width is {target.width}: give a draft of this target",
    )


def _full_attention(config: Any) -> tuple[int, Any]:
    """The index of a target's last layer with full attention (else of its last layer), and the
    config of that layer."""
    count, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or ()
    full = [k for k, kind in enumerate(kinds[:count]) if kind == FULL]
    index = full[-1] if full else count - 1
    return index, configs_of_layers(config)[index]


def config_of(llama: Mapping[str, Any]) -> LlamaConfig:
    """The config of a draft's layers, from the keys (`llama_of`) on its card. A card of an earlier
    version may have a partial rotary factor, or parameters by kind of layer; they are ignored, as
    such a draft was trained without them."""
    rope = of_full_attention(llama["rope_parameters"], None)
    if rope is not None:
        width = llama.get("rotary_dim") or llama["head_dim"]
        rope = alike(rope, width, llama["max_position_embeddings"])
    return LlamaConfig(**{**llama, "rope_parameters": rope})

"""The layers of targets' own MTP modules: transformers' decoder layer of each architecture, read by
the attention of drafts (attention.py).

    NATIVE[name]        what is peculiar to an architecture: its class, and how engines run it
    NativeModule        one module: norms, eh_proj, the decoder layer, and the norm before the head
    layer_keys(…)       the keys of a target's config that decide its layer

A target's attention is wrapped in a `NativeAttention`, which makes queries, keys and values from
its weights, so that training and drafting attend with the masks and caches of every other draft.

How vLLM 0.32 runs the modules, and these with it (deepseek_mtp.py, glm4_moe_mtp.py,
qwen3_next_mtp.py, qwen3_5_mtp.py, mimo_mtp.py):

| | eh_proj reads | the pair at position 0 | the next depth reads |
| --- | --- | --- | --- |
| DeepSeek-V3 | [embedding; hidden state] | has no embedding | the normed output |
| GLM-4.x | [embedding; hidden state] | has no embedding | the output before its norm |
| Qwen3-Next, Qwen3.5 | [embedding; hidden state] | is like the others | the normed output |
| MiMo | [hidden state; embedding] | has no embedding | the normed output |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specdec.drafters.layers import Attend, KeyValue, Rope, rotated
from specdec.errors import UserError, first_line, require

Rotation = tuple[Tensor, Tensor]


class NativeAttention:
    """Queries, keys and values of a target's attention module, in the form of `layers.Attention`:
    grouped heads with or without norms, rotated in part or whole. With `gated` (Qwen3-Next), half
    of q_proj gives gates for the heads' outputs."""

    gated = False

    def __init__(self, module: Any) -> None:
        self.module = module
        self.head_dim: int = module.head_dim
        self.gate: Tensor | None = None  # of the last query, which `joined` follows

    def at_once(self, x_BTD: Tensor, rope: Rotation) -> None:
        """There is no joint product."""

    def keys_values(self, x_BPD: Tensor, rope: Rotation) -> KeyValue:
        keys = self._heads(self.module.k_proj(x_BPD), "k_norm").transpose(1, 2)
        values = self._heads(self.module.v_proj(x_BPD)).transpose(1, 2)
        return rotated(keys, rope), values

    def query(self, x_BAD: Tensor, rope: Rotation) -> Tensor:
        """Queries [B, H, H, A, D]: key heads, then the query heads of each."""
        projected = self.module.q_proj(x_BAD)
        if self.gated:
            both = projected.unflatten(-1, (-1, 2 * self.head_dim))
            projected, gate = (x.flatten(-2) for x in both.chunk(2, -1))
            self.gate = gate
        query = rotated(self._heads(projected, "q_norm").transpose(1, 2), rope)
        groups: int = self.module.num_key_value_groups
        grouped: Tensor = query.unflatten(1, (-1, groups))
        return grouped

    def joined(self, heads: Tensor) -> Tensor:
        """The heads' outputs [B, H, H, A, D] -> [B, A, D]"""
        read = heads.flatten(1, 2).transpose(1, 2).flatten(2)
        if self.gate is not None:
            read, self.gate = read * self.gate.sigmoid(), None
        output: Tensor = self.module.o_proj(read)
        return output

    def _heads(self, x: Tensor, norm: str = "") -> Tensor:
        """[B, A, H·D] -> [B, A, H, D], after the heads' norm if the module has one."""
        heads = x.unflatten(-1, (-1, self.head_dim))
        normed: Tensor = getattr(self.module, norm)(heads) if hasattr(self.module, norm) else heads
        return normed


class GatedAttention(NativeAttention):
    gated = True


class LatentAttention(NativeAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Keys and values are
    expanded before they are cached, and values are padded to the width of the keys."""

    def __init__(self, module: Any) -> None:
        self.module, self.gate = module, None
        self.head_dim = module.qk_head_dim
        require(
            module.v_head_dim <= module.qk_head_dim,
            f"v_head_dim is {module.v_head_dim}: expected at most the {module.qk_head_dim} of keys",
        )

    def keys_values(self, x_BPD: Tensor, rope: Rotation) -> KeyValue:
        m = self.module
        latent, rotary = m.kv_a_proj_with_mqa(x_BPD).split([m.kv_lora_rank, m.qk_rope_head_dim], -1)
        both = m.kv_b_proj(m.kv_a_layernorm(latent))
        both = both.unflatten(-1, (-1, m.qk_nope_head_dim + m.v_head_dim)).transpose(1, 2)
        keys, values = both.split([m.qk_nope_head_dim, m.v_head_dim], -1)
        rotary = self._rotated(rotary[:, None], rope).expand(-1, keys.shape[1], -1, -1)
        return torch.cat([keys, rotary], -1), pad(values, (0, m.qk_head_dim - m.v_head_dim))

    def query(self, x_BAD: Tensor, rope: Rotation) -> Tensor:
        m = self.module
        low = x_BAD if m.q_lora_rank is None else m.q_a_layernorm(m.q_a_proj(x_BAD))
        query = (m.q_proj if m.q_lora_rank is None else m.q_b_proj)(low)
        query = query.unflatten(-1, (-1, m.qk_head_dim)).transpose(1, 2)
        plain, rotary = query.split([m.qk_nope_head_dim, m.qk_rope_head_dim], -1)
        query = torch.cat([plain, self._rotated(rotary, rope)], -1)
        scale = m.scaling * m.qk_head_dim**0.5  # attention itself divides by the root
        grouped: Tensor = (query * scale).unflatten(1, (-1, m.num_key_value_groups))
        return grouped

    def joined(self, heads: Tensor) -> Tensor:
        return super().joined(heads[..., : self.module.v_head_dim])

    def _rotated(self, x: Tensor, rope: Rotation) -> Tensor:
        """Rotary positions; DeepSeek's pairs are neighbours, not halves."""
        if self.module.config.rope_interleave:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
        return rotated(x, rope)


@dataclass(frozen=True)
class NativeArchitecture:
    """One architecture of transformers: the `module` and the prefix of its classes, the keys of its
    config that decide the layer, and how its module runs (see the table above)."""

    module: str
    classes: str
    config: str
    keys: tuple[str, ...]
    attention: type[NativeAttention] = NativeAttention
    rotary: str = "RotaryEmbedding"
    hidden_first: bool = False
    skips_first_embedding: bool = True
    recycles_normed: bool = True

    def part(self, name: str) -> Any:
        return getattr(import_module(f"transformers.models.{self.module}"), name)

    def of_modeling(self, name: str) -> Any:
        path = f"transformers.models.{self.module}.modeling_{self.module}"
        return getattr(import_module(path), self.classes + name)


Keys = tuple[str, ...]
SIZES: Keys = (
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
)
SIZES += ("intermediate_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
EXPERTS: Keys = ("moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob")
ROUTED: Keys = (
    *EXPERTS,
    "n_routed_experts",
    "n_shared_experts",
    "routed_scaling_factor",
    "n_group",
)
ROUTED += ("topk_group", "first_k_dense_replace", "attention_bias")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
QWEN = (*SIZES, "head_dim", "attention_bias")
SHARED = (*EXPERTS, "num_experts", "shared_expert_intermediate_size")
NATIVE = {
    "deepseek_v3": NativeArchitecture(
        module="deepseek_v3",
        classes="DeepseekV3",
        config="DeepseekV3Config",
        keys=(*SIZES, *ROUTED, *LATENT, "rope_interleave"),
        attention=LatentAttention,
    ),
    "glm4_moe": NativeArchitecture(
        module="glm4_moe",
        classes="Glm4Moe",
        config="Glm4MoeConfig",
        keys=(*SIZES, *ROUTED, "head_dim", "use_qk_norm"),
        recycles_normed=False,
    ),
    "qwen3_next": NativeArchitecture(
        module="qwen3_next",
        classes="Qwen3Next",
        config="Qwen3NextConfig",
        keys=(*QWEN, *SHARED, "decoder_sparse_step", "mlp_only_layers"),
        attention=GatedAttention,
        skips_first_embedding=False,
    ),
    "qwen3_5_text": NativeArchitecture(
        module="qwen3_5",
        classes="Qwen3_5",
        config="Qwen3_5TextConfig",
        keys=QWEN,
        attention=GatedAttention,
        rotary="TextRotaryEmbedding",
        skips_first_embedding=False,
    ),
    "qwen3_5_moe_text": NativeArchitecture(
        module="qwen3_5_moe",
        classes="Qwen3_5Moe",
        config="Qwen3_5MoeTextConfig",
        keys=(*(k for k in QWEN if k != "intermediate_size"), *SHARED),
        attention=GatedAttention,
        rotary="TextRotaryEmbedding",
        skips_first_embedding=False,
    ),
    "mimo": NativeArchitecture(
        module="qwen2",
        classes="Qwen2",
        config="Qwen2Config",
        keys=(*SIZES, "head_dim"),
        hidden_first=True,
    ),
}
LAYERED = ("layer_types", "mlp_layer_types")  # keys with an entry for each layer


def layer_keys(kind: str, described: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The keys of a target's config that decide the layer of its MTP module, with the defaults of
    transformers' class. The config has `layers` layers, and the module comes after them. Raises
    UserError for a config that the class does not accept."""
    native = NATIVE[kind]
    try:
        one = {key: value for key, value in described.items() if key not in LAYERED}
        config = native.part(native.config).from_dict(one | {"num_hidden_layers": 1})
        if kind == "mimo":  # Qwen2's config has no such key, and MiMo's does
            config.head_dim = described.get("head_dim") or (
                config.hidden_size // config.num_attention_heads
            )
        keys = {key: getattr(config, key) for key in native.keys}
    except Exception as error:  # whatever transformers' own checks raise
        raise UserError(
            f"its config does not describe a model of {native.classes} ({first_line(error)[:120]})"
        ) from error
    if (dense := keys.get("first_k_dense_replace")) is not None:  # after the last layer
        keys["first_k_dense_replace"] = int(layers < dense)
    return keys


def layer_config(kind: str, keys: Mapping[str, Any]) -> Any:
    """The config of transformers for one layer with full attention."""
    native = NATIVE[kind]
    kind_of_config = native.part(native.config)
    config = kind_of_config(**keys, num_hidden_layers=1, experts_implementation="eager")
    config.layer_types = ["full_attention"]
    return config


class NativeRope(Rope):
    """The rotary factors of a target's own class."""

    def __init__(self, kind: str, keys: Mapping[str, Any]) -> None:
        nn.Module.__init__(self)
        native = NATIVE[kind]
        self.rotary = native.of_modeling(native.rotary)(layer_config(kind, keys))
        self._table = None


class NativeModule(nn.Module):
    """One MTP module with the decoder layer of its target's architecture, and the interface of the
    module with a Llama layer."""

    enorm: nn.Module
    hnorm: nn.Module
    final_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init__(self, kind: str, keys: Mapping[str, Any]) -> None:
        super().__init__()
        self.native, config = NATIVE[kind], layer_config(kind, keys)
        D, norm = config.hidden_size, self.native.of_modeling("RMSNorm")
        for name in ("enorm", "hnorm", "final_layernorm"):
            self.add_module(name, norm(D, eps=config.rms_norm_eps))
        self.eh_proj = nn.Linear(2 * D, D, bias=False)
        layer = self.native.of_modeling("DecoderLayer")(config, 0)
        for name, part in layer.named_children():
            self.add_module(name, part)
        self.attention = self.native.attention(self.self_attn)

    def joined(self, embedding: Tensor, state: Tensor) -> Tensor:
        """The input of eh_proj for a pair [..., 2D]."""
        pair = [self.enorm(embedding), self.hnorm(state)]
        return torch.cat(pair[::-1] if self.native.hidden_first else pair, -1)

    def enter(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention for a pair [..., D], and the residual."""
        stream = self.eh_proj(self.joined(embedding, state))
        return self.input_layernorm(stream), stream

    def forward(self, read: Tensor, residual: Tensor, attend: Attend, i: int = 0) -> Tensor:
        """The output [B, T, D] at the requested places (see `layers.Layer`), after the norm if the
        next depth reads it so."""
        added = attend(i, self.attention, read)  # type: ignore[arg-type]
        stream = attend.asked(i, residual) + added
        stream = stream + self.mlp(self.post_attention_layernorm(stream))
        normed: Tensor = self.final_layernorm(stream) if self.native.recycles_normed else stream
        return normed

    def before_head(self, output: Tensor) -> Tensor:
        """The input of the head [..., D] for an output."""
        normed: Tensor = output if self.native.recycles_normed else self.final_layernorm(output)
        return normed

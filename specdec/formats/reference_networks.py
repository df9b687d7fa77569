"""A second implementation of each exported drafter, used only to check exports.

They are the networks that engines build from exports, made of transformers' classes
(export_check.py). An export in a layout without an entry in `REFERENCE_NETWORKS` is reported as not
compared.

Attention and rotary positions are those of GLM-4-MoE, which include Llama's and Qwen3's and partial
rotation; norm and MLP are Llama's; a draft LM has the class in its config. The input of layers from
pairs and blocks follows vLLM 0.32 (model_executor/models: llama_eagle.py, llama_eagle3.py,
medusa.py, mlp_speculator.py, mimo_v2_mtp.py, qwen3_dflash.py).
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention, Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specdec.compat import set_attention
from specdec.errors import UserError, require
from specdec.formats.check_text import FINAL, CheckText, ExportFolder
from specdec.formats.gguf_layout import LAYOUT as GGUF
from specdec.formats.gguf_networks import GGUF_NETWORKS
from specdec.formats.layout import Description, Tensors, shared_head


class LlamaBlock(nn.Module):
    """A layer of an exported draft, with an engine's names: attention over `width` numbers per
    pair, a norm and an MLP; subclasses add the norms before attention."""

    input_layernorm: LlamaRMSNorm
    hidden_norm: LlamaRMSNorm

    def __init__(self, config: LlamaConfig, width: int, head_norms: bool = False) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config.use_qk_norm = head_norms
        set_attention(config, "eager")
        self.self_attn = Glm4MoeAttention(config, 0)  # type: ignore[arg-type]
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(width, rows, bias=config.attention_bias))
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def attend(self, x_PD: Tensor, rope: tuple[Tensor, Tensor], sees_PP: Tensor) -> Tensor:
        mask = torch.zeros_like(sees_PP, dtype=x_PD.dtype).masked_fill(~sees_PP, -torch.inf)
        attended: Tensor = self.self_attn(x_PD[None], rope, mask[None, None])[0][0]
        return attended

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        stream = residual + attended
        output: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return output


def llama(config: Description) -> LlamaConfig:
    """The LlamaConfig of a description. Raises UserError for keys that engines read differently."""
    rope = config.get("rope_parameters") or older_rope(config)
    nested = [key for key, x in rope.items() if isinstance(x, dict)]
    require(
        not nested, f"rope_parameters holds dicts ({', '.join(nested)}), which vLLM cannot read"
    )
    kind = rope.get("rope_type", "default")
    unalike = (
        kind == "dynamic"
        or (kind == "longrope" and rope["short_factor"] != rope["long_factor"])
        or (kind == "proportional" and rope.get("factor", 1) != 1)
        or "mrope_section" in rope
    )
    require(not unalike, f"rope_parameters of type {kind} mean something else in vLLM")
    act = config.get("hidden_act", "silu")
    require(act == "silu", f"hidden_act is {act}, but engines have only silu in such a layer")
    names = "max_position_embeddings rms_norm_eps attention_bias mlp_bias head_dim hidden_size"
    names += " intermediate_size num_attention_heads num_key_value_heads hidden_act"
    sizes = {name: config[name] for name in names.split() if name in config}
    return LlamaConfig(**sizes, rope_parameters=dict(rope) or None)


def older_rope(config: Description) -> Description:
    """The rotary parameters in a config of transformers 4."""
    scaled = dict(config.get("rope_scaling") or {})
    if "type" in scaled:
        scaled.setdefault("rope_type", scaled.pop("type"))
    if "rope_theta" not in config and not scaled:
        return {}
    share = config.get("partial_rotary_factor")
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)} | scaled
    return rope if share is None else rope | {"partial_rotary_factor": share}


def rope_of(config: LlamaConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, P, N] at these positions."""
    embedding: Any = Glm4MoeRotaryEmbedding  # takes the configurations of other models, too
    rope: tuple[Tensor, Tensor] = embedding(config)(torch.zeros(()), positions.cpu()[None])
    return rope


def loaded(module: nn.Module, tensors: Tensors, unread: tuple[str, ...] = ()) -> Any:
    """A module with these tensors in float32. Raises UserError for names that do not match."""
    state = {n: x.float() for n, x in tensors.items() if not n.startswith(unread)}
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"an engine cannot load it ({' '.join(str(error).split())})") from error
    return module.to(next(iter(state.values())).device).eval()


def causal(count: int, device: torch.device, window: int | None = None) -> Tensor:
    """The mask [count, count] in which each position attends to itself and those before it; with a
    window, to the last `window` of these."""
    sees = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    return sees if window is None else sees.triu(1 - window)


def window_of(config: Description, i: int) -> int | None:
    """The window of layer i, as vLLM's llama.py and qwen3_dflash.py read a config. Raises UserError
    if `layer_types` has no such entry."""
    kinds = config.get("layer_types")
    require(
        not kinds or i < len(kinds),
        f"layer_types has {len(kinds or ())} entries, but vLLM reads entry {i + 1}",
    )
    window: int | None = config.get("sliding_window")
    return window if kinds and kinds[i] == "sliding_attention" else None


def unrolled(
    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    files: ExportFolder,
    hidden_states_PD: Tensor,
    trial: CheckText,
    anchor: int,
) -> Tensor:
    """The logits [K, V] at all depths of a layer that reads its own output there. `run` takes the
    embeddings and the hidden states [P, D] of pairs and returns, for each, the input of the head
    and the next depth's replacement for a hidden state."""
    ids_P, hidden_states_PD, logits = trial.ids_T[1 : anchor + 1], hidden_states_PD[:anchor], []
    for depth in range(trial.depths):
        read, state_for_next_depth = run(files.embed(ids_P), hidden_states_PD)
        logits.append(files.head(read[-1]))
        hidden_states_PD = torch.cat([hidden_states_PD, state_for_next_depth[-1:]])
        ids_P = torch.cat([ids_P, trial.following(anchor)[depth : depth + 1]])
    return torch.stack(logits)


def eagle(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    """EAGLE-1: fc over a pair, then a Llama layer without its first norm. Engines leave out a bias,
    which EAGLE's own code adds; no export has one, but what is written back as it came may."""
    config, fc = llama(files.config), files.tensors["fc.weight"].float()
    bias = files.tensors.get("fc.bias")
    block = loaded(LlamaBlock(config, config.hidden_size), files.taken("layers.0."))

    def run(embedding: Tensor, hidden_state: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.cat([embedding, hidden_state], -1)
        x = linear(pair, fc, None if bias is None else bias.float())
        rope = _on(x, rope_of(config, torch.arange(len(x))))
        layer = files.target.config.num_hidden_layers - files.config.get("target_layer_count", 0)
        sees = causal(len(x), x.device, window_of(files.config, layer))
        out = block.finish(x, block.attend(x, rope, sees))
        return out, out

    return unrolled(run, files, trial.state(FINAL), trial, anchor)


def layers_read(description: Description) -> list[int]:
    """The target's layers that an EAGLE-3 draft reads: as its config says or, with `depth`, the
    engines' default (vLLM's `get_eagle3_default_aux_hidden_state_layers`)."""
    ids = description.get("eagle_aux_hidden_state_layer_ids")
    nested = (description.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    depth = description.get("depth", 0)
    return list(ids or [k + 1 for k in nested or ()] or sorted({2, depth // 2, depth - 3}))


class Eagle3Layers(nn.Module):
    """The layers of EAGLE-3 (vLLM's llama_eagle3.py, `LlamaModel`)."""

    layers: Any
    fc_norm: Any

    def __init__(self, config: LlamaConfig, description: Description) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        ids, count = layers_read(description), description.get("num_hidden_layers", 1)
        if description.get("architectures") == ["Eagle3LlamaForCausalLM"]:
            count = 1  # AngelSlim's own code has one layer, whatever its config counts
        hidden_states = description.get("target_hidden_size", D) * len(ids)
        self.layers = nn.ModuleList(LlamaBlock(config, D if i else 2 * D) for i in range(count))
        for i, layer in enumerate(self.layers):
            layer.input_layernorm = LlamaRMSNorm(D, eps)
            if i == 0:
                layer.hidden_norm = LlamaRMSNorm(D, eps)
        self.fc, self.norm = nn.Linear(hidden_states, D, bias=False), LlamaRMSNorm(D, eps)
        if description.get("norm_before_fc", False):
            self.input_norm = LlamaRMSNorm(hidden_states, eps)
        if description.get("fc_norm", False):
            norms = (LlamaRMSNorm(hidden_states // len(ids), eps) for _ in ids)
            self.fc_norm = nn.ModuleList(norms)
        self.config, self.count = config, len(ids)
        self.normed_residual = description.get("norm_before_residual", False)
        self.normed_output = description.get("norm_output", False)
        self.windows = [window_of(description, i) for i in range(count)]

    def combined(self, x: Tensor) -> Tensor:
        if hasattr(self, "input_norm"):
            x = self.input_norm(x)
        if hasattr(self, "fc_norm"):
            pieces = zip(self.fc_norm, x.chunk(self.count, -1), strict=True)
            x = torch.cat([norm(piece) for norm, piece in pieces], -1)
        fused: Tensor = self.fc(x)
        return fused

    def forward(self, embedding: Tensor, hidden_state: Tensor) -> tuple[Tensor, Tensor]:
        rope = _on(hidden_state, rope_of(self.config, torch.arange(len(hidden_state))))
        stream = hidden_state
        for i, layer in enumerate(self.layers):
            if i == 0:
                normed = layer.hidden_norm(hidden_state)
                stream = normed if self.normed_residual else hidden_state
                read = torch.cat([layer.input_layernorm(embedding), normed], -1)
            else:
                read = layer.input_layernorm(stream)
            sees = causal(len(read), read.device, self.windows[i])
            stream = layer.finish(stream, layer.attend(read, rope, sees))
        normed = self.norm(stream)
        return normed, normed if self.normed_output else stream


APART = ("lm_head.", "embed_tokens.", "d2t", "t2d", "mask_hidden")  # not of the layers


def eagle3_layers(files: ExportFolder) -> Eagle3Layers:
    tensors = {n.replace("midlayer.", "layers.0."): x for n, x in files.tensors.items()}
    require("lm_head.weight" in tensors, "an engine needs lm_head.weight")
    network: Eagle3Layers = loaded(Eagle3Layers(llama(files.config), files.config), tensors, APART)
    return network


def eagle3(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    files = replace(files, config={**files.config, "depth": files.target.depth})
    layers, ids = eagle3_layers(files), layers_read(files.config)
    hidden_states = layers.combined(torch.cat([trial.state(k) for k in ids], -1))
    return unrolled(layers, files, hidden_states, trial, anchor)


def medusa(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    """Medusa's heads (vLLM's medusa.py)."""
    config, tensors, logits = files.config, files.tensors, []
    for k in range(min(trial.depths, config["num_heads"])):
        x = trial.state(FINAL)[anchor - 1]
        for i in range(config["num_hidden_layers"]):
            name = f"blocks.{k}.layers.{i}"
            bias = tensors[f"{name}.bias"].float() if config.get("medusa_fc_bias") else None
            x = x + silu(linear(x, tensors[f"{name}.weight"].float(), bias))
        head = tensors[f"lm_heads.{0 if config.get('original_lm_head') else k}.weight"]
        logits.append(linear(x, head.float()) * config.get("logit_scale", 1.0))
    return torch.stack(logits)


def peagle(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    """One pass over the pairs of the text and a masked pair for each depth above 0."""
    files = replace(files, config={**files.config, "depth": files.target.depth})
    layers, config = eagle3_layers(files), files.config
    ids, more = layers_read(config), trial.depths - 1
    mask = config["pard_token"] if "pard_token" in config else config["mask_token_id"]
    masks = torch.full((more,), mask, device=trial.ids_T.device)
    states = torch.cat([trial.state(k) for k in ids], -1)[:anchor]
    unknown = files.tensors["mask_hidden"].float().view(1, -1).expand(more, -1)
    hidden_states = layers.combined(torch.cat([states, unknown]))
    read, _ = layers(files.embed(torch.cat([trial.ids_T[1 : anchor + 1], masks])), hidden_states)
    return files.head(read[-trial.depths :])


def mlp(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    """vLLM's mlp_speculator.py, `generate_proposals`, over the text's own tokens."""
    config, tensors = files.config, files.taken("speculator.")
    tied, n, inner = config["tie_weights"], config["n_predict"], config["inner_dim"]

    def part(name: str, k: int) -> Tensor:
        module, _, leaf = name.rpartition(".")
        tied_to = {"proj": min(k, 1), "head": k}.get(module, 0)
        return tensors[f"{module}.{tied_to if tied else k}.{leaf}"].float()

    def normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    state, logits = trial.state(FINAL)[anchor - 1], []
    if config["scale_input"]:
        state = normed(state) / 2**0.5
    state_weight = 0.5 ** (0.5 / n)
    token_weight = ((1 - state_weight**2) * inner / 2) ** 0.5
    for k in range(trial.depths):
        token = part("emb.weight", k)[trial.ids_T[anchor + k]]
        mixed = linear(state, part("proj.weight", k)) + token_weight / state_weight * token
        state = gelu(part("ln.weight", k) * normed(mixed) + part("ln.bias", k))
        logits.append(linear(state, part("head.weight", k)))
    return torch.stack(logits)


class MTPLayer(LlamaBlock):
    """vLLM's mimo_v2_mtp.py, `MiMoV2MTPLayer`, by its names."""

    enorm: LlamaRMSNorm
    hnorm: LlamaRMSNorm
    final_layernorm: LlamaRMSNorm

    def __init__(self, config: LlamaConfig) -> None:
        D, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, D)
        self.pre_mlp_layernorm = self.post_attention_layernorm
        del self.post_attention_layernorm
        for name in ("enorm", "hnorm", "input_layernorm", "final_layernorm"):
            self.add_module(name, LlamaRMSNorm(D, eps))
        self.eh_proj = nn.Linear(2 * D, D, bias=False)

    def forward(
        self,
        embedding: Tensor,
        state: Tensor,
        rope: tuple[Tensor, Tensor],
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(state)], -1))
        sees = causal(len(x), x.device, window)
        x = x + self.attend(self.input_layernorm(x), rope, sees)
        out = self.final_layernorm(x + self.mlp(self.pre_mlp_layernorm(x)))
        return out, out


def mtp(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    """One prediction module, whose sizes vLLM reads in the target's config with the overrides. Its
    head is the target's. The factor and the cap of the target's logits are applied here; vLLM omits
    them, which changes no greedy draft."""
    served: dict[str, Any] = {**files.target.model.config.to_dict(), **files.overrides}
    unread = ("attention_value_scale", "add_swa_attention_sink_bias", "swa_v_head_dim")
    for name in unread:
        require(not served.get(name), f"vLLM's loader obeys the target's {name}")
    rope = {
        "rope_type": "default",
        "rope_theta": served.get("swa_rope_theta", served.get("rope_theta", 1000000)),
        "partial_rotary_factor": served.get("partial_rotary_factor", 1.0),
    }
    config = llama(
        {
            "hidden_size": served["hidden_size"],
            "intermediate_size": served["intermediate_size"],
            "num_attention_heads": served["swa_num_attention_heads"],
            "num_key_value_heads": served["swa_num_key_value_heads"],
            "head_dim": served["swa_head_dim"],
            "rms_norm_eps": served["layernorm_epsilon"],
            "attention_bias": served["attention_bias"],
            "hidden_act": served["hidden_act"],
            "max_position_embeddings": served.get("max_position_embeddings", 32768),
            "rope_parameters": rope,
        }
    )
    layer = loaded(MTPLayer(config), files.taken("model.mtp.layers.0."))
    scaled = replace(files, config=shared_head(files.target))
    size = served.get("sliding_window_size", -1)
    window = size if size > -1 else None

    def run(embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = layer(
            embedding, state, _on(state, rope_of(config, torch.arange(len(state)))), window
        )
        return output

    return unrolled(run, scaled, trial.state(FINAL), trial, anchor)


class DFlashLayers(nn.Module):
    """The layers of DFlash (vLLM's qwen3_dflash.py), by its names."""

    layers: Any

    def __init__(self, config: LlamaConfig, description: Description) -> None:
        super().__init__()
        D, eps, count = config.hidden_size, config.rms_norm_eps, description["num_hidden_layers"]
        self.layers = nn.ModuleList(LlamaBlock(config, D, head_norms=True) for _ in range(count))
        for layer in self.layers:
            layer.input_layernorm = LlamaRMSNorm(D, eps)
        hidden_states = len(description["dflash_config"]["target_layer_ids"]) * D
        self.fc = nn.Linear(hidden_states, D, bias=False)
        self.hidden_norm, self.norm = LlamaRMSNorm(D, eps), LlamaRMSNorm(D, eps)
        self.config = config
        sliding = description["dflash_config"].get("swa_window_size")
        described = {**description, "sliding_window": sliding or description.get("sliding_window")}
        self.windows = [window_of(described, i) for i in range(count)]

    def forward(self, hidden_states: Tensor, block: Tensor, causal_block: bool) -> Tensor:
        """The states of a block's slots, which follow the hidden states [P, F] and attend to all of
        them."""
        context, count = self.hidden_norm(self.fc(hidden_states)), len(block)
        P = len(hidden_states)
        rope = _on(block, rope_of(self.config, torch.arange(P + count)))
        for layer, window in zip(self.layers, self.windows, strict=True):
            sees = causal(P + count, block.device, window)
            if not causal_block:
                sees[P:, P:] = True
            read = torch.cat([context, layer.input_layernorm(block)])
            block = layer.finish(block, layer.attend(read, rope, sees)[P:])
        states: Tensor = self.norm(block)
        return states


def dflash(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    """A block of the anchor and of mask tokens, drafted at once, as long as it was trained for."""
    config, device = files.config, trial.ids_T.device
    settings = config["dflash_config"]
    size = config.get("block_size") or settings["block_size"]
    layers = loaded(DFlashLayers(llama(config), config), files.tensors, APART)
    hidden_states = torch.cat([trial.state(k + 1) for k in settings["target_layer_ids"]], -1)[
        :anchor
    ]
    slots = torch.full((size,), settings["mask_token_id"], device=device)
    slots[0] = trial.ids_T[anchor]
    states = layers(hidden_states, files.embed(slots), settings.get("causal", False))
    return files.head(states[1 : 1 + trial.depths])


def lm(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    """A draft LM, which reads the text alone."""
    model = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()
    ids_T = torch.cat([trial.ids_T[: anchor + 1], trial.following(anchor)])
    read: Tensor = model.to(ids_T.device)(input_ids=ids_T[None]).logits[0, anchor:]
    return read


def _on(x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = (t.to(x.device) for t in rope)
    return cos, sin


ReferenceNetwork = Callable[[ExportFolder, CheckText, int], Tensor]
REFERENCE_NETWORKS: dict[tuple[str, str], ReferenceNetwork] = {  # by drafter and layout
    ("eagle", "hf"): eagle,
    ("eagle3", "hf"): eagle3,
    ("eagle3", "speculators"): eagle3,
    ("peagle", "hf"): peagle,
    ("peagle", "speculators"): peagle,
    ("medusa", "hf"): medusa,
    ("mlp", "hf"): mlp,
    ("mtp", "hf"): mtp,
    ("dflash", "hf"): dflash,
    ("jetspec", "hf"): dflash,
    ("lm", "hf"): lm,
    **{(name, GGUF): network for name, network in GGUF_NETWORKS.items()},
}

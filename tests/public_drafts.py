"""Drafts in other people's layouts, written by hand from their published configs, at a tiny scale.

`PUBLIC[name](target)` gives a config.json and tensors for a target; `write_public` writes them to a
folder. Configs keep the keys of the originals, which each function names, with small sizes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.targets.target import Target

Files = tuple[dict[str, Any], dict[str, Tensor]]
S, HEADS, KV, HEAD_DIM, MLP, SLOTS = 40, 4, 2, 6, 20, 4


def drawn(seed: int = 0) -> Callable[..., Tensor]:
    """Random numbers of a shape, in bfloat16; norms are near 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator) * 0.2
        return (x + (len(shape) == 1)).to(torch.bfloat16)

    return draw


def layer(
    draw: Callable[..., Tensor], name: str, D: int, width: int, *norms: str
) -> dict[str, Any]:
    """A decoder layer whose attention reads `width` numbers."""
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, width),
        "self_attn.k_proj": (KV * HEAD_DIM, width),
        "self_attn.v_proj": (KV * HEAD_DIM, width),
        "self_attn.o_proj": (D, HEADS * HEAD_DIM),
        "mlp.gate_proj": (MLP, D),
        "mlp.up_proj": (MLP, D),
        "mlp.down_proj": (D, MLP),
        "post_attention_layernorm": (D,),
        **{norm: (D,) for norm in norms},
    }
    return {f"{name}.{part}.weight": draw(*shape) for part, shape in shapes.items()}


def sizes(target: Target, **more: Any) -> dict[str, Any]:
    """The keys of sizes that every trainer writes."""
    return {
        "hidden_size": target.width,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05,
        "vocab_size": target.vocab_size,
        **more,
    }


def vocabulary(target: Target, rising: bool = True) -> dict[str, Tensor]:
    """The maps of a draft vocabulary of S tokens, in ascending order or by frequency."""
    order = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(3))[:S]
    ids_S = order.sort().values if rising else order
    inside_V = torch.zeros(target.vocab_size, dtype=torch.bool)
    inside_V[ids_S] = True
    return {"d2t": ids_S - torch.arange(S), "t2d": inside_V}


def default_count(target: Target) -> int:
    """How many layers a draft reads that does not name them: 2, L/2 and L - 3, each once."""
    return len({2, target.depth // 2, target.depth - 3})


def eagle3_tensors(
    target: Target, name: str = "midlayer", D: int = 0, rows: int = S, aux: int = 0
) -> dict[str, Tensor]:
    draw, D, aux = drawn(), D or target.width, aux or default_count(target)
    return {
        "fc.weight": draw(D, aux * target.width),
        **layer(draw, name, D, 2 * D, "input_layernorm", "hidden_norm"),
        "norm.weight": draw(D),
        "lm_head.weight": draw(rows, D),
    }


def eagle3(target: Target) -> Files:
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B (EAGLE: eagle/traineagle3/config.json)."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "draft_vocab_size": S,
        **sizes(target),
    }
    tensors = eagle3_tensors(target) | vocabulary(target)
    return config, {n: x.half() if x.is_floating_point() else x for n, x in tensors.items()}


def eagle3_wide(target: Target) -> Files:
    """A draft of another width with an embedding of its own, as that of LLaMA3.3-Instruct-70B."""
    config, _ = eagle3(target)
    D = 24
    tensors = eagle3_tensors(target, D=D) | vocabulary(target)
    tensors["embed_tokens.weight"] = drawn(5)(target.vocab_size, D)
    return config | {"hidden_size": D, "target_hidden_size": target.width}, tensors


def specforge(target: Target) -> Files:
    """SpecForge: configs/llama3-70B-ealge3.json, with llama3's rotary positions."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "draft_vocab_size": S,
        **sizes(target),
    }
    return config, eagle3_tensors(target) | vocabulary(target)


def specforge31(target: Target) -> Files:
    """SpecForge: configs/qwen3-30B-A3B-eagle3.1.json, with a norm for each chunk."""
    config, tensors = specforge(target)
    config |= {"fc_norm": True, "norm_output": True, "sliding_window": None}
    config |= {"use_sliding_window": False, "max_window_layers": 48}
    chunks = range(default_count(target))
    norms = {f"fc_norm.{i}.weight": drawn(7 + i)(target.width) for i in chunks}
    return config, tensors | norms


def angelslim(target: Target) -> Files:
    """AngelSlim: train/configs/qwen2.5-7b-eagle3.json and qwen3-8b-eagle3.json."""
    config = {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_mrope": False,
        "use_sliding_window": False,
        "draft_vocab_size": S,
        **sizes(target, num_hidden_layers=28),  # the target's: there is one layer
    }
    return config, eagle3_tensors(target) | vocabulary(target)


def modelopt(target: Target) -> Files:
    """Model-Optimizer: export/plugins/hf_spec_export.py (`llama_eagle_template_config`). Its draft
    vocabulary is in order of frequency, and there is no t2d."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "draft_vocab_size": S,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 2, 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
        **sizes(target),
    }
    tensors = eagle3_tensors(target, "layers.0", aux=3) | vocabulary(target, rising=False)
    return config, {n: x for n, x in tensors.items() if n != "t2d"}


def speculators(target: Target) -> Files:
    """RedHatAI's EAGLE-3 drafts (vllm-project/speculators), which repeat the embedding."""
    config = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": S,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "embed_requires_grad": False,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"architectures": [], "name_or_path": "someone/target"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "attention_bias": False,
            "hidden_act": "silu",
            "max_position_embeddings": 262144,
            "model_type": "llama",
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            **sizes(target),
        },
    }
    tensors = eagle3_tensors(target, "layers.0", aux=3) | vocabulary(target)
    tensors["input_norm.weight"] = drawn(8)(3 * target.width)
    return config, tensors | {"embed_tokens.weight": drawn(5)(target.vocab_size, target.width)}


def peagle(target: Target) -> Files:
    """P-EAGLE of speculators: EAGLE-3 with a hidden state for masked pairs."""
    config, tensors = speculators(target)
    config |= {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle"}
    config |= {"mask_token_id": 5}
    return config, tensors | {"mask_hidden": drawn(9)(1, 1, 3 * target.width)}


def peagle_vllm(target: Target) -> Files:
    """P-EAGLE in a flat config (SpecForge: configs/qwen3-8b-peagle.json), with all the tokens."""
    config, _ = specforge(target)
    tensors = eagle3_tensors(target, rows=target.vocab_size)
    config |= {"architectures": ["PEagleDraftModel"], "draft_vocab_size": target.vocab_size}
    hidden = drawn(9)(1, 1, default_count(target) * target.width)
    return config | {"mask_token_id": 5}, tensors | {"mask_hidden": hidden}


def eagle(target: Target) -> Files:
    """yuhuili/EAGLE-LLaMA3-Instruct-8B (EAGLE: train/EAGLE-LLaMA3-Instruct-8B.json)."""
    config, _ = eagle3(target)
    del config["draft_vocab_size"]
    draw, D = drawn(), target.width
    tensors = {
        "fc.weight": draw(D, 2 * D),
        **layer(draw, "layers.0", D, D),
        "embed_tokens.weight": draw(target.vocab_size, D),
    }
    return config | {"rope_theta": 500000.0, "bias": False}, tensors


def eagle_biased(target: Target) -> Files:
    """yuhuili/EAGLE-Vicuna-7B-v1.3, without the key `bias`: fc has one."""
    config, tensors = eagle(target)
    del config["bias"]
    return config, tensors | {"fc.bias": drawn(6)(target.width)}


def medusa(target: Target) -> Files:
    """FasterDecoding/medusa-vicuna-7b-v1.3, whose config has these three keys."""
    draw, D = drawn(), target.width
    config = {
        "medusa_num_heads": 2,
        "medusa_num_layers": 2,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    tensors = {}
    for h in range(2):
        for i in range(2):
            tensors[f"{h}.{i}.linear.weight"] = draw(D, D)
            tensors[f"{h}.{i}.linear.bias"] = draw(D)
        tensors[f"{h}.2.weight"] = draw(target.vocab_size, D)
    return config, tensors


def medusa_vllm(target: Target) -> Files:
    """Medusa as converted for vLLM."""
    _, theirs = medusa(target)
    tensors = {}
    for name, x in theirs.items():
        h, i, *rest = name.split(".")
        kept = f"blocks.{h}.layers.{i}.{rest[-1]}" if len(rest) > 1 else f"lm_heads.{h}.weight"
        tensors[kept] = x
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "medusa_fc_bias": True}
    config |= {"hidden_size": target.width, "vocab_size": target.vocab_size, "num_heads": 2}
    return config | {"num_hidden_layers": 2, "truncated_vocab_size": None}, tensors


def block_tensors(target: Target, count: int = 2) -> dict[str, Tensor]:
    draw, D = drawn(), target.width
    tensors = {"fc.weight": draw(D, 2 * D), "hidden_norm.weight": draw(D), "norm.weight": draw(D)}
    for i in range(count):
        tensors |= layer(draw, f"layers.{i}", D, D, "input_layernorm")
        for name in ("q_norm", "k_norm"):
            tensors[f"layers.{i}.self_attn.{name}.weight"] = draw(HEAD_DIM)
    return tensors


def dflash(target: Target) -> Files:
    """z-lab/Qwen3-8B-DFlash-b16 (SpecForge: configs/qwen3-8b-dflash.json)."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": SLOTS,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3]},
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_target_layers": 6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        **sizes(target, num_hidden_layers=2),
        "layer_types": ["full_attention"] * 2,
    }
    return config, block_tensors(target)


def jetspec(target: Target) -> Files:
    """A block whose slots see only those before them, by the key that vLLM reads."""
    config, tensors = dflash(target)
    config["dflash_config"]["causal"] = True
    return config, tensors


def dflash_speculators(target: Target) -> Files:
    """speculators' DFlash (models/dflash/config.py), which repeats embedding and head."""
    flat, tensors = dflash(target)
    config = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [2, 4],
        "block_size": SLOTS,
        "draft_vocab_size": target.vocab_size,
        "mask_token_id": 7,
        "projector_type": "dflash",
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "shift_label": False,
        "auf": False,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "x/y"}},
        "speculators_model_type": "dflash",
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_act": "silu",
            "max_position_embeddings": 40960,
            "rope_theta": flat["rope_theta"],
            **sizes(target, num_hidden_layers=2),
        },
    }
    return config, tensors | {
        "embed_tokens.weight": target.embedding.weight.detach().clone(),
        "lm_head.weight": target.head.weight.detach().clone(),
    }


def dflash2(target: Target) -> Files:
    """z-lab's DFlash 2 (dflash: tests/fixtures/dflash2-config.json), with full attention."""
    config, tensors = dflash(target)
    del config["block_size"]
    config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    config["dflash_config"] |= {
        "block_size": SLOTS,
        "conv_group_size": 8,
        "conv_kernel_size": 2,
        "selector_rank": 4,
        "selector_top_k": 16,
    }
    draw, D, V = drawn(11), target.width, target.vocab_size
    for i in range(2):
        for name in ("attention_conv", "mlp_conv"):
            tensors[f"layers.{i}.{name}.base_kernel"] = draw(2, 2, D)
            tensors[f"layers.{i}.{name}.kernel_projection.weight"] = draw(4 * D // 8, D)
    for name in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{name}"] = draw(V, 4)
    return config, tensors | {"candidate_selector.hidden_projection.weight": draw(4, D)}


def dspark(target: Target) -> Files:
    """deepseek-ai/dspark_qwen3_4b_block7 (DeepSpec: modeling/dspark/qwen3/config.py), which repeats
    the target's embedding and head."""
    config, tensors = dflash(target)
    del config["dflash_config"], config["auto_map"]
    config |= {"architectures": ["Qwen3DSparkModel"], "mask_token_id": 7}
    config |= {"target_layer_ids": [1, 3], "num_anchors": 512, "enable_confidence_head": True}
    config |= {"confidence_head_with_markov": True, "markov_rank": 4}
    config |= {"markov_head_type": "vanilla"}
    draw, D, V = drawn(12), target.width, target.vocab_size
    return config, tensors | {
        "markov_head.markov_w1.weight": draw(V, 4),
        "markov_head.markov_w2.weight": draw(V, 4),
        "confidence_head.proj.weight": draw(1, D + 4),
        "confidence_head.proj.bias": draw(1),
        "embed_tokens.weight": target.embedding.weight.detach().clone(),
        "lm_head.weight": target.head.weight.detach().clone(),
    }


def dspark_specforge(target: Target) -> Files:
    """SpecForge: configs/qwen3-8b-dspark.json."""
    config, tensors = dspark(target)
    moved = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    moved += ("enable_confidence_head", "confidence_head_with_markov")
    inner = {key: config.pop(key) for key in moved}
    config |= {"architectures": ["DSparkDraftModel"]}
    config["dflash_config"] = inner | {"projector_type": "dspark", "confidence_head_alpha": 1.0}
    return config, {n: x for n, x in tensors.items() if not n.startswith(("embed", "lm_head"))}


def dspark_speculators(target: Target) -> Files:
    """speculators' DSpark with a draft vocabulary, whose W1 has the target's tokens."""
    flat, tensors = dspark(target)
    keys = ("mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    keys += ("confidence_head_with_markov", "block_size")
    kept = vocabulary(target)
    ids_S = kept["d2t"] + torch.arange(S)
    tensors |= kept | {"markov_head.markov_w2.weight": drawn(13)(S, 4)}
    tensors |= {"lm_head.weight": target.head.weight.detach()[ids_S].clone()}
    config = {key: flat[key] for key in keys}
    config |= {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [2, 4],
        "draft_vocab_size": S,
        "max_anchors": 3072,
        "sample_from_anchor": True,
        "ce_loss_alpha": 0.1,
        "speculators_config": {"algorithm": "dspark", "verifier": {"name_or_path": "x/y"}},
        "speculators_model_type": "dspark",
        "target_hidden_size": None,
        "transformer_layer_config": {
            "attention_bias": False,
            "hidden_act": "silu",
            "model_type": "qwen3",
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            **sizes(target, num_hidden_layers=2),
        },
    }
    return config, tensors


def native(target: Target, **more: Any) -> dict[str, Any]:
    """The keys of a target's own config, as far as they decide the layer of its MTP module."""
    return sizes(target, num_hidden_layers=target.depth, hidden_act="silu", **more)


def glm(target: Target) -> Files:
    """zai-org/GLM-4.5, config.json, with a dense layer: the module after the last layer."""
    D, draw, name = target.width, drawn(7), f"model.layers.{target.depth}"
    norms = ("input_layernorm", "enorm", "hnorm", "shared_head.norm")
    tensors = layer(draw, name, D, D, *norms) | {f"{name}.eh_proj.weight": draw(D, 2 * D)}
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
    more = {"first_k_dense_replace": target.depth + 1, "use_qk_norm": False} | rope
    named = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
    return native(target, **named, **more), tensors


def qwen3_5(target: Target) -> Files:
    """Qwen/Qwen3.5-9B, config.json: half of q_proj gives the gates."""
    D, draw, name = target.width, drawn(8), "mtp.layers.0"
    tensors = layer(draw, name, D, D, "input_layernorm")
    tensors[f"{name}.self_attn.q_proj.weight"] = draw(2 * HEADS * HEAD_DIM, D)
    tensors |= {f"{name}.self_attn.{x}_norm.weight": draw(HEAD_DIM) for x in "qk"}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    tensors |= {f"mtp.{norm}.weight": draw(D) for norm in norms}
    tensors["mtp.fc.weight"] = draw(D, 2 * D)
    named = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    return native(target, **named), tensors


def mimo(target: Target) -> Files:
    """XiaomiMiMo/MiMo-7B-RL, config.json: a layer of Qwen2, whose q, k and v have biases."""
    D, draw, name = target.width, drawn(9), "model.mtp_layers.0"
    norms = ("input_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm")
    tensors = layer(draw, name, D, D, *norms) | {f"{name}.input_proj.weight": draw(D, 2 * D)}
    for part, heads in (("q", HEADS), ("k", KV), ("v", KV)):
        tensors[f"{name}.self_attn.{part}_proj.bias"] = draw(heads * HEAD_DIM)
    named = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    return native(target, num_nextn_predict_layers=1, **named), tensors


# MTP modules of targets' own checkpoints, which have the target's tensors too
NATIVE_MODULES: dict[str, Callable[[Target], Files]] = {
    "GLM": glm,
    "Qwen3.5": qwen3_5,
    "MiMo": mimo,
}

PUBLIC: dict[str, Callable[[Target], Files]] = {
    "EAGLE-3": eagle3,
    "EAGLE-3 of another width": eagle3_wide,
    "SpecForge": specforge,
    "SpecForge, EAGLE-3.1": specforge31,
    "AngelSlim": angelslim,
    "Model-Optimizer": modelopt,
    "speculators": speculators,
    "speculators, P-EAGLE": peagle,
    "P-EAGLE for vLLM": peagle_vllm,
    "EAGLE-1": eagle,
    "EAGLE-1 with a bias": eagle_biased,
    "Medusa": medusa,
    "Medusa for vLLM": medusa_vllm,
    "z-lab, DFlash": dflash,
    "JetSpec": jetspec,
    "speculators, DFlash": dflash_speculators,
    "z-lab, DFlash 2": dflash2,
    "DeepSpec, DSpark": dspark,
    "SpecForge, DSpark": dspark_specforge,
    "speculators, DSpark": dspark_speculators,
}


def write_public(folder: Path, files: Files, weights: str = "model.safetensors") -> Path:
    """Write a draft as its trainer does: a pickle for the names that end so."""
    config, tensors = files
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    if weights.endswith(".safetensors"):
        save_file(tensors, folder / weights)
    else:
        torch.save(tensors, folder / weights)
    return folder

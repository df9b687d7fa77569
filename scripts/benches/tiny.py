"""Tiny random targets of every architecture, each with a tokenizer and texts to train on.

The default configuration of an architecture is made small by rules for the names of its keys, and
every length threshold that a text can reach is reduced to a few tokens (`shrunken_config.py`);
where a rule does not fit, `PATCHES` has the values. Weights are large enough that tokens differ,
and every part has an effect: norms and biases are random too.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from specdec.targets.shrunken_config import BOUNDS, HEADS, LAYERS, NARROW, THRESHOLDS
from specdec.targets.target import Target

VOCAB, POSITIONS = 256, 256
SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|im_start|>", "<unk>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
SMALL: dict[str, Any] = {
    **NARROW,
    **dict.fromkeys(BOUNDS, POSITIONS),
    **dict.fromkeys(("vocab_size", "n_words", "decoder_vocab_size", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCAB),
    **dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), 0.3),
    **dict.fromkeys(("embed_init_std", "embedding_initializer_range"), 0.3),
    **dict.fromkeys(("num_kv_shared_layers",), 0),
}
WANTED = "eagle3"  # the family of drafters whose share of all targets is counted
# the encoder-decoders that read text; the others hear, or see
TEXT_TO_TEXT = [
    *(
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "fsmt",
        "led",
        "longt5",
        "m2m_100",
    ),
    *("marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet"),
    *("switch_transformers", "t5", "t5gemma", "t5gemma2", "umt5"),
]
# models that see as well, and whose text part AutoModelForCausalLM does not load by itself
SEEING = [
    *("aria", "aya_vision", "deepseek_vl", "exaone4_5", "glm4v", "glm4v_moe", "idefics3"),
    *("internvl", "kimi_k25", "lfm2_vl", "llava", "llava_next", "llava_onevision", "mistral3"),
    *("minicpmv4_6", "ovis2", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("smolvlm", "video_llama_3"),
]
# exceptions to the rules, by model type; a key may be a path into a nested configuration
MIXED = ["linear_attention", "full_attention"] * 2
SWITCHED = ["sliding_attention", "full_attention"] * 2
PATCHES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3]},
    "cohere_compass_text": {
        "layer_types": SWITCHED,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            },
            "full_attention": None,
        },
    },
    "cpmant": {"prompt_length": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2}
    | {"n_output_layers": 1, "layer_types": SWITCHED},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
    | {"first_k_dense_replace": 1},
    "dots3_note": {"vision_config.adapter_in_dim": 32, "vision_config.adapter_out_dim": 32},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n_text": {
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_assistant": {
        "text_config.hidden_size_per_layer_input": 0,
        "text_config.vocab_size_per_layer_input": 0,
        "text_config.num_kv_shared_layers": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": MIXED},
    "hrm_text": {"num_hidden_layers": 4, "num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "minimax_m3_vl_text": {"index_n_heads": 2},  # as many as it has KV heads
    "ministral": {"head_dim": 8, "layer_types": SWITCHED},
    "moshi": {"sliding_window": POSITIONS},  # as its own: transformers reads it with a cache alone
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [8, 24],
        "attn_layers": ["local", "lsh"] * 2,
        "num_buckets": 4,
    },
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8, "shape_vocab_size": 64},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # its cache is laid out for 64 · n
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_dt_rank": 4},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
for _kind in ("qwen2_vl", "qwen2_5_vl"):
    PATCHES[_kind] = {"text_config.rope_parameters": MROPE}
for _kind in ("glm4v", "glm4v_moe"):
    PATCHES[_kind] = {"text_config.rope_parameters": MROPE | {"partial_rotary_factor": 1.0}}
PATCHES["qwen4_exp"] = {f"text_config.{k}": x for k, x in PATCHES["qwen4_exp_text"].items()}
# other settings of a kind of model that change how it computes
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    **{
        f"llama, {kind} RoPE": ("llama", {"rope_parameters": {"rope_type": kind, **more}})
        for kind, more in {
            "linear": {"rope_theta": 1e4, "factor": 4.0},
            "dynamic": {"rope_theta": 1e4, "factor": 4.0},
            "yarn": {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
            "llama3": {
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        }.items()
    },
    "phi3, longrope RoPE": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 4.0, 6.0],
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "minimax_m3_vl_text, sparse layers": (
        "minimax_m3_vl_text",
        {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    ),
    "qwen2, sliding window": ("qwen2", {"use_sliding_window": True, "layer_types": SWITCHED}),
    "stablelm, parallel residual": ("stablelm", {"use_parallel_residual": True}),
    "gpt_neox, sequential residual": ("gpt_neox", {"use_parallel_residual": False}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "falcon, new architecture": ("falcon", {"new_decoder_architecture": True}),
    "gemma4_text, shared keys": ("gemma4_text", {"num_kv_shared_layers": 2}),
    "opt, narrow embedding": ("opt", {"word_embed_proj_dim": 16}),
}


@dataclass(frozen=True)
class Tiny:
    """One row of the matrix: an architecture, and its changes to the configuration beyond the
    rules. `decoder` is whether the model reads one text, as a causal LM does."""

    name: str
    kind: str
    decoder: bool = True
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def title(self) -> str:
        """The class that transformers makes."""
        names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if self.kind in SEEING:
            names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if not self.decoder:
            names = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        return str(names[self.kind])


def architectures() -> list[Tiny]:
    """Every architecture of AutoModelForCausalLM, the variants, multimodal ones, and those of
    AutoModelForSeq2SeqLM."""
    causal = [Tiny(kind, kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    variants = [Tiny(name, kind, True, more) for name, (kind, more) in VARIANTS.items()]
    seeing = [Tiny(kind, kind) for kind in SEEING]
    both = [Tiny(f"{kind}, encoder-decoder", kind, False) for kind in TEXT_TO_TEXT]
    return sorted([*causal, *variants, *seeing], key=lambda tiny: tiny.name) + both


def config_of(tiny: Tiny) -> Any:
    """The small configuration of an architecture. May raise any error of transformers."""
    kind = CONFIG_MAPPING[tiny.kind]
    patch = {**PATCHES.get(tiny.kind, {}), **tiny.overrides}
    try:
        default = kind().to_dict()
    except ValueError:  # its default values contradict each other
        default = kind(**{k: x for k, x in merged({}, patch).items()}).to_dict()
    small = merged(_small(default), patch)
    if tiny.decoder and "is_decoder" in default:
        small["is_decoder"], small["is_encoder_decoder"] = True, False
    config = kind(**small)
    for of_text in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        of_text.bos_token_id, of_text.eos_token_id, of_text.pad_token_id = 1, 2, 0
    if not tiny.decoder:
        config.decoder_start_token_id = 0
    return config


def _small(default: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that a rule makes smaller, with their new values."""
    small: dict[str, Any] = {}
    longest = max((x for key in BOUNDS if isinstance(x := default.get(key), int)), default=0)
    lengths = [default.get(key) for key in ("num_hidden_layers", "n_layer", "num_layers")]
    for key, value in default.items():
        if isinstance(value, dict) and "model_type" in value:
            small[key] = {"model_type": value["model_type"], **_small(value)}
        elif isinstance(value, dict) and value.keys() & THRESHOLDS.keys():  # rotary parameters
            small[key] = value | {k: passed(k, x, longest) for k, x in value.items()}
        elif key in THRESHOLDS and isinstance(value, int) and value > 0:
            small[key] = passed(key, value, longest)
        elif isinstance(value, list) and len(value) in lengths and value:
            small[key] = sample(value)
        elif key in SMALL and value is not None and not isinstance(value, list | dict):
            small[key] = SMALL[key]
        elif key.endswith(("_token_id", "_token_index")) and value is not None:
            small[key] = VOCAB - 1 - sum(map(ord, key)) % 20  # a token that no text has
    for heads, of_keys in (("num_attention_heads", "num_key_value_heads"), ("n_head", "n_head_kv")):
        if default.get(of_keys) is not None and default.get(of_keys) == default.get(heads):
            small[of_keys] = HEADS
        elif default.get(of_keys) == 1:
            small[of_keys] = 1
    return small


def passed(key: str, value: Any, longest: int) -> Any:
    """A threshold that texts reach, unless the `longest` text does not reach the default."""
    if key not in THRESHOLDS or not isinstance(value, int):
        return value
    return min(value, POSITIONS if 0 < longest <= value else THRESHOLDS[key])


def sample(by_layer: Sequence[Any]) -> list[Any]:
    """Per-layer entries for a small model, with each kind of entry as often as the others."""
    kinds = [x for n, x in enumerate(by_layer) if x not in by_layer[:n]]
    return [kinds[n % len(kinds)] for n in range(LAYERS)]


def merged(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the values of a patch, whose keys may be paths into nested
    configurations."""
    found = dict(config)
    for path, value in patch.items():
        part, _, key = path.rpartition(".")
        if part:
            found[part] = {**found.get(part, {}), key: value}
        else:
            found[key] = value
    return found


@torch.no_grad()
def save(tiny: Tiny, folder: Path, seed: int = 0) -> None:
    """Write a random checkpoint of an architecture, with a tokenizer."""
    torch.manual_seed(seed)
    config = config_of(tiny)
    auto = Target.auto_class(config) if tiny.decoder else AutoModelForSeq2SeqLM
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    for weight in model.parameters():
        if weight.dim() < 2:
            weight += 0.1 * torch.randn_like(weight)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer(TEMPLATE if tiny.decoder else None).save_pretrained(folder)


def words() -> list[str]:
    """Made-up words, as many as the vocabulary has besides special tokens, roles and marks."""
    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
    pairs = [a + b for a in syllables for b in syllables[::7]]
    return pairs[: VOCAB - len(SPECIAL) - 5]


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word, space and mark, so that every offset is exact.
    Encoder-decoders have no chat template."""
    vocab = [*SPECIAL, "system", "user", "assistant", " ", "."]
    ids = {word: i for i, word in enumerate([*vocab, *words()])}
    model = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    model.pre_tokenizer = Split(Regex(r"\w+|\s|[^\w\s]"), "isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )


def conversations(count: int, seed: int = 0) -> Iterator[str]:
    """Chats of 8 and 12 made-up words, as JSON lines."""
    draw, known = random.Random(seed), words()[:80]
    for i in range(count):
        asked, response = (" ".join(draw.choices(known, k=k)) + "." for k in (8, 12))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": response}]
        yield json.dumps({"id": f"chat{i}", "messages": turns})


def pairs(count: int, seed: int = 0) -> Iterator[str]:
    """Sources of 8 and targets of 12 made-up words, as JSON lines."""
    for line in conversations(count, seed):
        asked, response = (turn["content"] for turn in json.loads(line)["messages"])
        yield json.dumps({"source": asked, "target": response})

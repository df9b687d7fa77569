"""The config.json of somebody else's draft, read key by key.

Each key is checked as it is read. A key that nobody reads may change what the network computes, so
it is an error, unless it is one of the keys that change nothing (`HARMLESS`), or is off.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.drafters.layers import THETA, rotary_width
from specdec.errors import UserError

MOST = 2**31 - 1

# keys that do not change which tokens a draft proposes: bookkeeping, training, and generation
HARMLESS = {"_name_or_path", "architectures", "auto_map", "model_type", "transformers_version"}
HARMLESS |= {"dtype", "torch_dtype", "use_cache", "initializer_range", "attention_dropout"}
HARMLESS |= {"hidden_dropout", "resid_pdrop", "embd_pdrop", "pretraining_tp", "bos_token_id"}
HARMLESS |= {"eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id"}
HARMLESS |= {"decoder_start_token_id", "tie_word_embeddings"}
HARMLESS |= {"is_decoder", "add_cross_attention"}
HARMLESS |= {"cross_attention_hidden_size", "return_dict", "output_attentions"}
HARMLESS |= {"output_hidden_states", "torchscript", "use_bfloat16", "pruned_heads"}
HARMLESS |= {"chunk_size_feed_forward", "max_length", "min_length", "do_sample", "early_stopping"}
HARMLESS |= {"num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p"}
HARMLESS |= {"typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"}
HARMLESS |= {"encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"}
HARMLESS |= {"output_scores", "return_dict_in_generate", "forced_bos_token_id"}
HARMLESS |= {"forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"}
HARMLESS |= {"suppress_tokens", "begin_suppress_tokens", "finetuning_task", "id2label", "label2id"}
HARMLESS |= {"tokenizer_class", "prefix", "problem_type", "task_specific_params", "tf_legacy_loss"}
HARMLESS |= {"max_window_layers", "attn_implementation", "_attn_implementation"}
HARMLESS |= {"num_target_layers", "num_anchors", "max_anchors", "embed_requires_grad"}
HARMLESS |= {"has_no_defaults_at_init", "base_model_ep_plan", "speculators_version"}
HARMLESS |= {"speculators_config", "num_aux_hidden_states", "max_sequence_length"}
HARMLESS |= {"target_model_type", "use_mrope", "reuse_target_lm_head", "enable_sp_ulysses"}
HARMLESS |= {"confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma"}


# what a config of transformers means where it leaves out a key (`to_diff_dict`)
_LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
_LLAMA |= {"vocab_size": 32000, "max_position_embeddings": 2048}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen3": _LLAMA
    | {"intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128}
    | {"vocab_size": 151936, "max_position_embeddings": 32768},
}


class ForeignConfig:
    """The keys of a config, or of an object within it, whose name is `inside`."""

    def __init__(self, where: Path | str, keys: Mapping[str, Any], inside: str = "") -> None:
        self.where, self.keys, self.inside = where, keys, inside
        self.unread = set(keys)
        self.parts: list[ForeignConfig] = []
        self.defaults: Mapping[str, Any] = {}  # of keys that are missing

    def wrong(self, key: str, expected: str) -> UserError:
        """The error for a key whose value is not the expected one."""
        said = json.dumps(self.keys.get(key), default=repr)
        said = said if len(said) <= 60 else f"{said[:57]}..."
        return UserError(f"{self.where}: {self.inside}{key[:80]} is {said}: expected {expected}")

    def get(self, key: str) -> Any:
        """Any value; None if the key is missing and has no default."""
        self.unread.discard(key)
        return self.keys.get(key, self.defaults.get(key))

    def count(self, key: str, default: int | None = None, most: int = MOST) -> int:
        """A whole number from 1 to `most`."""
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(key, f"a whole number from 1 to {most}")
        return value

    def token(self, key: str) -> int | None:
        """The id of a token."""
        value = self.get(key)
        if value is not None and (type(value) is not int or not 0 <= value <= MOST):
            raise self.wrong(key, "the id of a token")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number above 0."""
        value = self.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < math.inf or value > 1e30:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str:
        """A text; empty if the key is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value or ""

    def counts(self, key: str, least: int) -> list[int] | None:
        """A list of rising whole numbers; None if it is missing or empty."""
        value = self.get(key)
        if value is None or value == []:
            return None
        whole = isinstance(value, list) and all(type(x) is int for x in value)
        if not whole or len(value) > 1024 or min(value) < least or sorted(set(value)) != value:
            raise self.wrong(key, f"rising whole numbers from {least}")
        return list(value)

    def part(self, key: str) -> "ForeignConfig":
        """An object within this one; empty if it is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        part = ForeignConfig(self.where, value or {}, f"{self.inside}{key}.")
        self.parts.append(part)
        return part

    def layers_part(self) -> "ForeignConfig":
        """The config of the layers in speculators' layout, where what is missing has the default of
        transformers' class."""
        part = self.part("transformer_layer_config")
        kind = part.text("model_type") or "llama"
        if kind not in DEFAULTS:
            raise part.wrong("model_type", " or ".join(DEFAULTS))
        part.defaults = DEFAULTS[kind]
        return part

    def only(self, key: str, *allowed: Any) -> None:
        """Raise UserError for a key that is there with another value than the first of these: no
        network of ours has that."""
        value = self.get(key)
        alike = any(type(value) is type(x) and value == x for x in allowed)
        numbers = {type(value), *map(type, allowed)} <= {int, float}
        if value is not None and not alike and not (numbers and value in allowed):
            expected = json.dumps(allowed[0] if allowed else None)
            raise self.wrong(key, f"{expected}, as this draft cannot be read otherwise")

    def require_all_read(self) -> None:
        """Raise UserError for a key that was not read and is not known to be harmless."""
        for key in sorted(self.unread - HARMLESS):
            if self.keys[key] not in (None, False, [], {}, ""):
                raise self.wrong(key, "no such key: it may change what the network computes")
        for part in self.parts:
            part.require_all_read()


def layers_of_foreign(described: ForeignConfig, eps: float = 1e-6) -> dict[str, Any]:
    """The keys of a LlamaConfig by which a foreign draft's layers differ from the target's
    (`drafter.shape`), from the keys that transformers and engines read. `eps` is of norms, if the
    config has none. Raises UserError for layers that no draft of ours has."""
    described.only("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "qkv_bias"):
        described.only(key, False)
    described.only("quantization_config")
    require_full_attention(described)
    D, heads = described.count("hidden_size"), described.count("num_attention_heads")
    kv_heads = described.count("num_key_value_heads", heads)
    head_dim = described.count("head_dim", max(1, D // heads))
    if heads % kv_heads:
        raise described.wrong("num_key_value_heads", f"a divisor of {heads}")
    if head_dim % 2:
        raise described.wrong("head_dim", "an even number")
    rope, width = rope_of_foreign(described, head_dim)
    return {
        "hidden_size": D,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": described.number("rms_norm_eps", eps),
        "max_position_embeddings": described.count("max_position_embeddings", 2048),
        "rope_parameters": rope,
        "rotary_dim": width,
    }


def require_full_attention(described: ForeignConfig) -> None:
    """Raise UserError for layers that see only a part of the text."""
    kinds, window = described.get("layer_types"), described.get("sliding_window")
    asked = described.get("use_sliding_window")
    if kinds and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise described.wrong("layer_types", "full_attention alone")
    if window is not None and asked is not False and not kinds:
        raise described.wrong("sliding_window", "null: a draft is imported without a window")


def rope_of_foreign(described: ForeignConfig, head_dim: int) -> tuple[dict[str, Any], int]:
    """A foreign draft's rotary parameters in the form of transformers 5, from those or from the
    keys of version 4, and how many numbers of a head are rotated. Raises UserError for a type that
    engines read differently from each other."""
    theta = described.number("rope_theta", THETA)
    share = described.get("partial_rotary_factor")
    older, rope = described.part("rope_scaling"), described.part("rope_parameters")
    chosen = rope if rope.keys else older
    if share is None:
        share = chosen.get("partial_rotary_factor")
    if share is not None and (type(share) not in (int, float) or not 0 < share <= 1):
        raise described.wrong("partial_rotary_factor", "a number from 0 to 1")
    kind = chosen.text("rope_type") or chosen.text("type") or "default"
    if kind not in ("default", "mrope", "linear", "llama3", "yarn"):
        name = "rope_type" if "rope_type" in chosen.keys else "type"
        raise chosen.wrong(name, "default, linear, llama3 or yarn")
    parameters: dict[str, Any] = {
        "rope_type": "default" if kind == "mrope" else kind,
        "rope_theta": chosen.number("rope_theta", theta),
    }
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for key in needed.get(kind, ()):
        if chosen.get(key) is None:
            raise chosen.wrong(key, f"a number, for rope_type {kind}")
    of_kind = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "linear": ("factor",)}
    of_kind["yarn"] = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale")
    of_kind["yarn"] += ("mscale_all_dim",)
    for key in of_kind.get(kind, ()):
        if chosen.get(key) is not None:
            parameters[key] = chosen.number(key, 1.0)
    original = "original_max_position_embeddings"
    if kind in ("llama3", "yarn") and chosen.get(original) is not None:
        parameters[original] = chosen.count(original)
    if kind == "yarn" and chosen.get("truncate") is not None:
        parameters["truncate"] = chosen.flag("truncate", True)
    for of_images in ("mrope_section", "mrope_interleaved"):  # a text has one position
        chosen.get(of_images)
    for part in (older, rope):
        for key in ("rope_type", "type", "rope_theta", "partial_rotary_factor"):
            part.get(key)
        if part is not chosen:
            part.unread.clear()  # the same in the form of another version
    return parameters, rotary_width({"partial_rotary_factor": share}, head_dim)

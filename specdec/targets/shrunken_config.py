"""Small copies of configurations: few layers, narrow widths, and every length threshold reduced to
a few tokens, by rules for the names of the keys.

`shrunken_twin.py` makes models of them, and `scripts/bench targets` tiny targets.
"""

from collections.abc import Mapping, Sequence
from typing import Any

VOCAB, LAYERS, WIDTH, HEADS, HEAD = 96, 4, 32, 4, 8
POSITIONS = 128  # more than the longest text that a twin reads
LONGEST = 72  # tokens of it; chunks of 64 are written into the code of some recurrent layers
WORDS = range(3, 64)  # the tokens that its texts consist of; special tokens have other ids

# Keys of configurations that say how wide and deep a model is, and what they become.
NARROW: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim"), WIDTH),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "lru_width"), WIDTH),
    **dict.fromkeys(("encoder_hidden_size", "backbone_hidden_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "dim_ff", "dff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "d_inner"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "feed_forward_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "shared_experts_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("num_query_groups", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "kv_channels", "d_kv"), HEAD),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), HEAD),
    **dict.fromkeys(("dim_head", "d_head", "attention_head_dim", "attention_head_size"), HEAD),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), HEAD),
    **dict.fromkeys(("index_head_dim", "qk_head_dim"), 2 * HEAD),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("laurel_rank", "gated_norm_rank", "adapter_rank", "loop_gate_rank"), 4),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCAB),
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("query_pre_attn_scalar",), HEAD),
    **dict.fromkeys(("rotary_dim",), HEAD // 2),
    # with few heads, all scores may be 0, and any key may be chosen
    **dict.fromkeys(("index_n_heads",), 32),
    **dict.fromkeys(("router_hidden_size",), 16),
    **dict.fromkeys(("embed_dim", "hidden_size_global", "out_hidden_size"), WIDTH),
    **dict.fromkeys(("depth",), 2),
    **dict.fromkeys(("vocab_size", "n_words", "decoder_vocab_size", "unpadded_vocab_size"), VOCAB),
}
# Keys that say from which length on a model computes in another way, and what they are cut to.
THRESHOLDS: dict[str, int] = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size"), 8),
    **dict.fromkeys(("local_attention", "attention_window_size", "keep_window_size"), 8),
    **dict.fromkeys(("attention_window", "local_attention_window_len"), 8),
    **dict.fromkeys(("attention_chunk_size", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("original_max_position_embeddings",), 12),
    **dict.fromkeys(("floor_scale", "log_scaling_n_floor"), 4),
    **dict.fromkeys(("index_topk", "indexer_budget"), 8),
    **dict.fromkeys(("index_topk_blocks", "sparse_topk_blocks", "num_random_blocks"), 1),
    **dict.fromkeys(("index_block_size", "sparse_block_size", "global_block_size"), 4),
    **dict.fromkeys(("indexer_compress_ratio", "block_size", "rescale_every"), 2),
    **dict.fromkeys(("heavily_compressed_attention",), 8),
    **dict.fromkeys(("rel_extent",), 8),
    **dict.fromkeys(("local_radius",), 3),
    **dict.fromkeys(("num_global_tokens", "num_buckets", "relative_attention_num_buckets"), 8),
    **dict.fromkeys(("position_bias_num_buckets",), 8),
    **dict.fromkeys(("relative_attention_max_distance", "relative_max_distance"), 16),
    **dict.fromkeys(("position_bias_max_distance",), 16),
}
# Keys that bound the positions of a text.
BOUNDS: dict[str, int] = {
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), POSITIONS),
    **dict.fromkeys(("max_seq_len", "context_length", "model_max_length"), POSITIONS),
    **dict.fromkeys(("max_target_positions", "max_source_positions"), POSITIONS),
    **dict.fromkeys(("max_decoder_position_embeddings",), POSITIONS),
    **dict.fromkeys(("max_encoder_position_embeddings",), POSITIONS),
}
# lists of the numbers of layers that are of one kind
NUMBERED = (
    *("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs"),
    *("hybrid_layer_ids", "cross_attention_layers"),
)
OF_SOME = "per_layer_config"  # values of some layers that replace the configuration's
# exceptions to the rules about names, by model type
FITTED: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64},
    "minimax_m3_vl_text": {"index_n_heads": 2},  # as many as it has KV heads
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # its cache is laid out for 64 · n
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3]},
    "cpmant": {"prompt_length": 4},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [8, 24]},
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8, "shape_vocab_size": 64},
    "hrm_text": {"num_layers_per_stack": None},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note_text": {"head_dim": 16},
}


def shrunken_config(config: Any) -> Any:
    """A configuration of the same class for a model of a few hundred kilobytes, with every length
    threshold at a few tokens. May raise any error of transformers."""
    whole = config.to_dict()
    for key in ("quantization_config", "transformers_version", "architectures", "auto_map"):
        whole.pop(key, None)
    small: Any = type(config)(**_shrunken(whole))
    for part in {id(c): c for c in (small, small.get_text_config(decoder=True))}.values():
        part.dtype = "float32"
    return small


def _shrunken(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration, or of a nested one, changed by the tables of rules."""
    bounds = [x for key in BOUNDS if isinstance(x := whole.get(key), int) and x > 0]
    longest = max(bounds, default=None)
    small = {key: _cut(key, value, longest) for key, value in whole.items()}
    small |= _of_layers(whole, longest)
    for heads, of_keys in (("num_attention_heads", "num_key_value_heads"), ("n_head", "n_head_kv")):
        if (count := whole.get(of_keys)) is not None and of_keys in small:
            alike = count == whole.get(heads)
            small[of_keys] = HEADS if alike else 1 if count == 1 else HEADS // 2
    width, old = small.get("head_dim") or HEAD, whole.get("head_dim")
    if old is None and whole.get("hidden_size") and whole.get("num_attention_heads"):
        old = whole["hidden_size"] // whole["num_attention_heads"]
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := small.get(key), dict):
            small[key] = _rope(rope, width, old or width)
    fitted = FITTED.get(str(whole.get("model_type")), {})
    return small | {key: value for key, value in fitted.items() if key in small}


def _cut(key: str, value: Any, longest: int | None) -> Any:
    """One entry of a configuration, reduced for a twin. A threshold that the `longest` text does
    not reach is not reached by the twin's texts either."""
    if isinstance(value, dict):
        if "model_type" in value:
            return _shrunken(value)
        return {name: _cut(str(name), part, longest) for name, part in value.items()}
    if key.endswith(("_token_id", "_token_index", "_token_ids")) and value is not None:
        if isinstance(value, list):
            return [_cut(key, x, longest) for x in value]
        return value if isinstance(value, int) and value < WORDS.start else _special(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and key in NARROW:
        return min(NARROW[key], value) if key in AT_MOST else NARROW[key]
    if number and key in THRESHOLDS:
        passed = longest is None or value < longest
        return min(THRESHOLDS[key] if passed else POSITIONS, value) if value > 0 else value
    if number and key in BOUNDS:
        return BOUNDS[key] if value > 0 else value
    if isinstance(value, list) and value and key in THRESHOLDS | NARROW:
        return [_cut(key, x, longest) for x in value]
    return value


# counts of which a model may have fewer than the table says
AT_MOST = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "num_experts"),
    *("n_routed_experts", "num_local_experts", "moe_num_experts", "n_shared_experts"),
    *("num_shared_experts", "moe_num_shared_experts", "first_k_dense_replace", "num_dense_layers"),
    *("num_query_groups", "hidden_size_per_layer_input"),
)


def _special(token: int) -> int:
    """A token id that replaces a special one and that no text of a twin contains."""
    return VOCAB - 1 - int(token) % (VOCAB - WORDS.stop)


def _of_layers(whole: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
    """The per-layer entries of a configuration for a twin's few layers: each kind of layer in order
    of first occurrence."""
    counts = {n for key in DEPTHS if isinstance(n := whole.get(key), int) and n > 0}
    by_layer: dict[str, Any] = {}
    for count in sorted(counts, reverse=True):
        lists = {
            key: value
            for key, value in whole.items()
            if isinstance(value, list) and len(value) == count and key not in NUMBERED
            if not key.endswith(("_token_id", "_token_ids"))
        }
        numbered = {key: whole[key] for key in NUMBERED if isinstance(whole.get(key), list)}
        others = {int(k): x for k, x in (whole.get(OF_SOME) or {}).items()}
        if not lists and not numbered and not others:
            continue
        kinds: list[tuple[Any, ...]] = []
        for k in range(count):
            kind = *(x[k] for x in lists.values()), *(k in x for x in numbered.values())
            if (kind := (*kind, others.get(k))) not in kinds:
                kinds.append(kind)
        layers = [kinds[k % len(kinds)] for k in range(max(LAYERS, len(kinds)))]
        for i, key in enumerate(lists):
            by_layer[key] = [_cut(key, layer[i], longest) for layer in layers]
        for i, key in enumerate(numbered, len(lists)):
            by_layer[key] = [k for k, layer in enumerate(layers) if layer[i]]
        if others:
            by_layer[OF_SOME] = {k: _shrunken(x[-1]) for k, x in enumerate(layers) if x[-1]}
        for key in DEPTHS:
            if whole.get(key) == count:
                by_layer[key] = len(layers)
    if whole.get("num_kv_shared_layers"):
        kinds = by_layer.get("layer_types") or [None]
        by_layer["num_kv_shared_layers"] = len({str(kind) for kind in kinds})
    return by_layer


DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"),
    *("decoder_layers", "num_decoder_layers", "encoder_layers", "num_encoder_layers"),
)


def _rope(rope: Mapping[str, Any], width: int, old: int) -> dict[str, Any]:
    """Rotary parameters for heads of a smaller width."""
    smaller = dict(rope)
    for key, value in rope.items():
        if isinstance(value, dict):  # values of a kind of layer
            smaller[key] = _rope(value, width, old)
        elif isinstance(value, list) and value and all(isinstance(x, int | float) for x in value):
            if key == "mrope_section":
                smaller[key] = _sections(value, max(1, round(sum(value) * width / old)))
            else:  # one factor for each pair of numbers that is rotated
                count = max(1, round(len(value) * width / old))
                smaller[key] = [value[i * len(value) // count] for i in range(count)]
    return smaller


def _sections(sections: Sequence[float], total: int) -> list[int]:
    """Integers in about these proportions, with this sum."""
    parts = [int(x * total / sum(sections)) for x in sections]
    parts[0] += total - sum(parts)
    return parts

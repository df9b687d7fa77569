"""A shrunken twin of a target: the same classes and configuration, with few layers, narrow widths
and every length threshold cut to a few tokens.

A target's own check reads some 14 tokens and compares the model with itself. It cannot see what
sets in later (a scale that grows with the position, a window, sparse blocks, other rotary factors),
nor what our own attention and fused fast path leave out. A twin passes all of these within a few
dozen tokens. Its logits are compared with those of a model that this project's code never touched.
"""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.compat import attention_of, random_model
from specdec.context import FeatureSpec
from specdec.errors import first_line
from specdec.runtime.cache import cache_argument
from specdec.runtime.states import bounds_steps, in_steps

VOCAB, LAYERS, WIDTH, HEADS, HEAD = 96, 4, 32, 4, 8
POSITIONS = 128  # more than the longest text that a twin reads
MOST = 8_000_000  # weights; a model of more is no twin, since a rule has missed a key
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
    **dict.fromkeys(("index_n_heads",), 32),  # of few, all may score 0, and any key may be chosen
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
OF_SOME = "per_layer_config"  # what some layers have instead of what the configuration says
# what no rule about names can know, by kind of model
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


# The largest distance of logits in float32. Models that are read correctly stay below 1e-5, even
# with very large weights; MPT, whose biases depend on slots, is off by 7e-3 to 8e-2.
SHARP = 1e-3


class NoTwin(Exception):
    """No twin can be made of this model; the message says why."""


def shrunken_config(config: Any) -> Any:
    """A configuration of the same class, small enough for a model of a few hundred kilobytes whose
    every length threshold is a few tokens. May raise whatever transformers raises."""
    whole = config.to_dict()
    for key in ("quantization_config", "transformers_version", "architectures", "auto_map"):
        whole.pop(key, None)
    small: Any = type(config)(**_shrunken(whole))
    for part in {id(c): c for c in (small, small.get_text_config(decoder=True))}.values():
        part.dtype = "float32"
    return small


def _shrunken(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration, or of a part of one, with what the tables say."""
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
    """One entry of a configuration as a twin has it. A threshold that the `longest` text does not
    pass is not passed by the twin's texts either."""
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
    """A token that no text of a twin has, in the place of a special one."""
    return VOCAB - 1 - int(token) % (VOCAB - WORDS.stop)


def _of_layers(whole: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
    """What a configuration says by layer, for the few layers that a twin has: each kind of layer in
    turn, in the order in which they first occur."""
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
        if isinstance(value, dict):  # those of a kind of layer
            smaller[key] = _rope(value, width, old)
        elif isinstance(value, list) and value and all(isinstance(x, int | float) for x in value):
            if key == "mrope_section":
                smaller[key] = _sections(value, max(1, round(sum(value) * width / old)))
            else:  # one factor for each pair of numbers that is rotated
                count = max(1, round(len(value) * width / old))
                smaller[key] = [value[i * len(value) // count] for i in range(count)]
    return smaller


def _sections(sections: Sequence[float], total: int) -> list[int]:
    """Whole numbers in about these proportions, with this sum."""
    parts = [int(x * total / sum(sections)) for x in sections]
    parts[0] += total - sum(parts)
    return parts


@torch.no_grad()
def shrunken_model(kind: Any, config: Any, attention: str | None) -> Any:
    """A random model of class `kind` in float32 on the CPU, as transformers makes it. Its matrices
    have the size of new ones, and no part is silent: norms and biases are random too. Leaves the
    states of all random generators as they are."""
    with _random_states_kept(), torch.device("cpu"):
        torch.manual_seed(0)
        model = random_model(kind, config, attention)
    draw = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if not weight.is_floating_point():
            continue
        if weight.dim() < 2:
            weight += 0.1 * torch.randn(weight.shape, generator=draw)
        else:
            weight.normal_(std=weight.shape[-1] ** -0.5, generator=draw)
    return model.float().eval().requires_grad_(False)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


# --- What is compared ---------------------------------------------------------------------------

# prompts of rows that are read together: on each side of every threshold, and just before some
PROMPTS = (4, 7, 13, LONGEST - 12)
TREE = (-1, 0, -1, 1)  # of which node each node is a child; -1: of the last committed token
PATHS = ((0, 1, 3), (2,))  # the nodes of the tree that follow one another
# for each round after the prompt: how many tokens it reads, and what each row keeps of them
ROUNDS: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = (
    (4, ((0, 1, 3), (2,), (0, 1), (0, 1, 3))),
    (1, ((0,), (0,), (0,), (0,))),
    (4, ((0,), (0, 1, 3), (2,), (0, 1))),
    (1, ((0,), (0,), (0,), (0,))),
    (4, ((0, 1, 3), (0, 1), (0, 1, 3), (2,))),
)
DOCUMENTS = (12, 13, 11, 4), (20, 16)  # of packed rows; padding follows those of the second row


class ShrunkenTwin:
    """A twin of a target, and the logits that transformers gives for it. Raises NoTwin where none
    can be made."""

    def __init__(self, model: Any, attention: str | None) -> None:
        """`attention` is that of the target; transformers' own choice stands in for `grouped`."""
        self.attention = attention if attention in ("eager", "sdpa", "grouped") else None
        try:
            self.config = shrunken_config(model.config)
            own = self.attention if self.attention in ("eager", "sdpa") else None
            with torch.device("meta"), _random_states_kept():
                empty = random_model(type(model), self.config)
            if sum(x.numel() for x in empty.parameters()) > MOST:
                raise NoTwin("its configuration has widths that are not known")
            lacking = _classes(model) - _classes(empty)
            if lacking:
                raise NoTwin(f"a small one would lack its {min(lacking)}")
            # the parts of a model that sees may have other attention than their whole
            if own == attention_of(empty.config):
                own = None
            self.plain = shrunken_model(type(model), self.config, own)
            self.ours = copy.deepcopy(self.plain)
            if (self.attention is not None and own is not None) or self.attention == "grouped":
                self.ours.set_attn_implementation(self.attention)
            self._steps = any(map(bounds_steps, self.plain.modules()))
            self._known: dict[Any, Tensor] = {}
            self._decodes = bool(self.config.is_encoder_decoder)
            ids = tuple(_words(0, LONGEST // 2))
            finite = self.logits(ids, {}, encoded=len(ids) // 2 * self._decodes).isfinite().all()
        except (NoTwin, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # configurations and models may raise anything
            raise NoTwin(first_line(error)) from error
        if not finite:
            raise NoTwin("its logits are not finite")

    @torch.no_grad()
    def logits(
        self,
        ids: tuple[int, ...],
        inputs: Mapping[str, Tensor],
        prompt: int = 0,
        encoded: int = 0,
    ) -> Tensor:
        """transformers' logits [T, V] of one text by itself: of a single pass, or, where steps of
        one token are bounded otherwise (Mamba 2) and a `prompt` length is given, of its steps. The
        first `encoded` tokens are for the encoder, and have no logits."""
        key = ids, bool(inputs), prompt if self._steps else 0
        if key not in self._known:
            text = torch.tensor([ids])
            if encoded:
                for part in self.plain.modules():  # it may have read a short text before
                    if hasattr(part, "set_attention_type"):
                        part.set_attention_type(self.config.attention_type)
                parts = {"input_ids": text[:, :encoded], "decoder_input_ids": text[:, encoded:]}
                self._known[key] = self.plain(use_cache=False, **parts).logits[0]
            elif self._steps and prompt:
                self._known[key] = self._stepped(text, prompt)
            else:
                self._known[key] = self.plain(input_ids=text, use_cache=False, **inputs).logits[0]
        return self._known[key]

    def _stepped(self, ids_1T: Tensor, prompt: int) -> Tensor:
        taken, kept, logits = cache_argument(self.plain), None, list[Tensor]()
        for part in (
            ids_1T[:, :prompt],
            *(ids_1T[:, t, None] for t in range(prompt, len(ids_1T[0]))),
        ):
            more: dict[str, Any] = {} if kept is None else {taken: kept}
            out = self.plain(input_ids=part, use_cache=True, **more)
            logits.append(out.logits[0])
            kept = next(out[key] for key in (taken, "cache", "past_key_values") if key in out)
        return torch.cat(logits)


def _classes(model: Any) -> set[str]:
    """The names of the classes of a model's parts that its own file defines."""
    own = type(model).__module__
    return {type(part).__name__ for part in model.modules() if type(part).__module__ == own}


def _words(seed: int, count: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS.start, WORDS.stop, (count,), generator=draw).tolist()


def _text(target: Any, seed: int, length: int) -> list[int]:
    """A text of so many tokens; of an encoder-decoder, the last few are for the decoder."""
    if (seq2seq := getattr(target, "seq2seq", None)) is None:
        return _words(seed, length)
    marks = [seq2seq.start] * (2 if seq2seq.twice else 1)
    decoded = min(length // 4, 9)
    encoded = _words(seed, length - decoded - len(marks))
    return [*encoded, *marks, *_words(seed + 50, decoded)]


@torch.no_grad()
def errors_of_texts(target: Any, twin: ShrunkenTwin) -> Iterator[float]:
    """The distances of logits from transformers' own for a long text, for a batch, and for
    documents that share rows. `target` is a target made of `twin.ours`."""
    for batch in ((0,), (1, 2)):
        rows = [_text(target, seed, LONGEST) for seed in batch]
        _, final = target.features(torch.tensor(rows), FeatureSpec())
        for ids, ours in zip(rows, target.logits(final), strict=True):
            theirs = _theirs(target, twin, ids)
            yield distance(ours[-len(theirs) :], theirs)
    texts = [[_text(target, 3 + n, n) for n in lengths] for lengths in DOCUMENTS]
    width = max(sum(map(len, row)) for row in texts)
    ids_BT = torch.full((len(texts), width), WORDS.start)
    position_BT, document_BT = torch.zeros_like(ids_BT), torch.full_like(ids_BT, -1)
    places = list[tuple[int, slice, list[int]]]()
    for b, row in enumerate(texts):
        begin = 0
        for n, text in enumerate(row):
            part = slice(begin, begin + len(text))
            ids_BT[b, part], document_BT[b, part] = torch.tensor(text), n
            position_BT[b, part] = torch.arange(len(text))
            places.append((b, part, text))
            begin = part.stop
        position_BT[b, begin:] = torch.arange(width - begin)
    _, final = target.features(
        ids_BT, FeatureSpec(), position_BT=position_BT, document_BT=document_BT
    )
    ours_BTV = target.logits(final)
    for b, part, text in places:
        theirs = _theirs(target, twin, text)
        yield distance(ours_BTV[b, part][-len(theirs) :], theirs)


@torch.no_grad()
def errors_over_cache(target: Any, twin: ShrunkenTwin) -> Iterator[float]:
    """The same for passes over a cache: prompts of unequal length, trees whose paths are kept,
    single tokens, and rows that change places."""
    for lengths in _together(target, PROMPTS):
        cache = target.new_cache()
        texts = [_text(target, 10 + n, n) for n in lengths]
        prompts = list(map(len, texts))
        padded = [text + [WORDS.start] * (max(prompts) - len(text)) for text in texts]
        _, final = target.features(torch.tensor(padded), FeatureSpec(), cache=cache)
        for text, ours in zip(texts, target.logits(final), strict=True):
            theirs = _theirs(target, twin, text, len(text))
            yield distance(ours[: len(text)][-len(theirs) :], theirs)
        cache.keep(prompts)
        for seed, (tokens, kept) in enumerate(ROUNDS):
            room = target.room(min(map(len, texts))) - max(map(len, texts))
            if tokens > room:
                break
            if seed == 2:
                cache.select(range(len(texts))[::-1])
                texts, prompts = texts[::-1], prompts[::-1]
            ids = [_words(100 * seed + b, tokens) for b in range(len(texts))]
            trees = target.reads_trees and tokens > 1
            paths = PATHS if trees else (tuple(range(tokens)),)
            parents = torch.tensor([TREE] * len(texts)) if trees else None
            _, final = target.features(
                torch.tensor(ids), FeatureSpec(), cache=cache, parents_BT=parents
            )
            for b, ours in enumerate(target.logits(final)):
                for path in paths:
                    text = texts[b] + [ids[b][i] for i in path]
                    theirs = _theirs(target, twin, text, prompts[b])
                    yield distance(ours[list(path)], theirs[-len(path) :])
            some = [kept[b] if trees else tuple(range(len(kept[b]))) for b in range(len(texts))]
            padded_path = [[*path, *[-1] * (tokens - len(path))] for path in some]
            cache.keep(list(map(len, some)), torch.tensor(padded_path) if trees else None)
            texts = [texts[b] + [ids[b][i] for i in some[b]] for b in range(len(texts))]


def _together(target: Any, prompts: Sequence[int]) -> list[list[int]]:
    """The prompts that may be read in one batch: with LongRoPE, those on one side of its line."""
    by_room: dict[int, list[int]] = {}
    for n in prompts:
        by_room.setdefault(target.room(n), []).append(n)
    return list(by_room.values())


def _theirs(target: Any, twin: ShrunkenTwin, ids: Sequence[int], prompt: int = 0) -> Tensor:
    inputs = target.position_inputs(torch.tensor([ids]))
    encoded = len(ids) - target.placed(ids)
    return twin.logits(tuple(ids), inputs, prompt, encoded)


class TwinCheck:
    """What the twin of a target shows, computed when it is asked for, and once for all targets of
    one kind in this process. Raises NoTwin where no twin can be made."""

    _known: dict[Any, dict[Any, bool | str]] = {}

    def __init__(self, target: Any) -> None:
        self._target, self._attention = target, attention_of(target.model.config)
        try:
            small = json.dumps(shrunken_config(target.model.config).to_dict(), default=str)
        except Exception as error:  # a configuration may raise anything
            raise NoTwin(first_line(error)) from error
        model = target.model
        key = type(model), small, self._attention, *sorted(_classes(model))
        self._verdicts = self._known.setdefault(key, {})
        self._made: tuple[ShrunkenTwin, Any] | None = None

    @classmethod
    def forget(cls) -> None:
        """Compute again what was found, also for targets of kinds that were checked before."""
        cls._known.clear()

    def texts_right(self) -> bool:
        """Whether long texts, batches and packed documents get transformers' logits."""

        def errors(ours: Any, twin: ShrunkenTwin) -> Iterator[float]:
            if hasattr(ours, "seq2seq"):
                ours.seq2seq.encodes_apart = self._apart
            return errors_of_texts(ours, twin)

        return self._once(("texts", self._apart), errors)

    def lean_right(self) -> bool:
        """Whether passes over a cache get transformers' logits in the fused fast path, of which
        there must be one."""
        if self._target.lean is None or not self.texts_right():
            return False

        def errors(ours: Any, twin: ShrunkenTwin) -> Iterator[float]:
            (ours.reading, ours.counted), ours.lean_allowed = self._way or (None, False), True
            return iter([math.inf]) if ours.lean is None else errors_over_cache(ours, twin)

        return self._once("lean", errors)

    def cache_right(self, steps: bool = False) -> bool:
        """Whether passes over a cache get transformers' logits in the reading that the target has
        now. `steps`: modules with states read one token at a time from now on (`in_steps`)."""

        def errors(ours: Any, twin: ShrunkenTwin) -> Iterator[float]:
            if self._way is not None:
                ours.reading, ours.counted = self._way
            ours.lean_allowed = False
            for module in ours.holders if steps else ():
                in_steps(module)
            return errors_over_cache(ours, twin)

        return self._once(("cache", self._way, self._apart, steps), errors)

    @property
    def _way(self) -> tuple[Any, bool] | None:
        """How the target reads on now, if it has several ways."""
        reading = getattr(self._target, "reading", None)
        return None if reading is None else (reading, self._target.counted)

    @property
    def _apart(self) -> bool:
        """Whether an encoder reads texts of unequal length apart."""
        return (
            bool(self._target.seq2seq.encodes_apart) if hasattr(self._target, "seq2seq") else False
        )

    def _once(self, what: Any, errors: Callable[[Any, ShrunkenTwin], Iterator[float]]) -> bool:
        if isinstance(reason := self._verdicts.get("none"), str):
            raise NoTwin(reason)
        if what not in self._verdicts:
            try:
                ours, twin = self._twin()
                self._verdicts[what] = all(error <= SHARP for error in errors(ours, twin))
            except NoTwin as error:
                self._verdicts["none"] = str(error)
                raise
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception:  # a model may refuse our masks or our cache in any way
                self._verdicts[what] = False
        return bool(self._verdicts[what])

    def _twin(self) -> tuple[Any, ShrunkenTwin]:
        """The twin as a target, and transformers' side of it."""
        if self._made is None:
            twin = ShrunkenTwin(self._target.model, self._attention)
            try:
                self._made = twin, self._target.twin_target(twin.ours)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                raise NoTwin(first_line(error)) from error
        return self._made[1], self._made[0]


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The distance of logits [..., V], relative to their spread; infinite if shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = (x.double() - x.double().mean(-1, keepdim=True) for x in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-9))

"""Drafts as llama.cpp loads them: one GGUF file, without the target's embedding or (where the draft
has none of its own) its head, which llama.cpp shares.

Read from llama.cpp's graphs (src/models/eagle3.cpp, dflash.cpp) and drafting loop
(common/speculative.cpp). `target_layers` are the layers whose input is read, which are our numbers
of the layers after which states are read. Ids of a pruned draft vocabulary are absolute. `eagle3`
rotates neighbouring numbers of a head, and its query and key weights are permuted for that;
`dflash` rotates halves, as transformers does. Of scaled rotary positions, both take one factor for
all frequencies, and `eagle3` also a factor for each. A block is drafted as it was trained only with
as many tokens as `depth` says.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.block import Block
from specdec.drafters.dflash2 import DFlash2
from specdec.drafters.dspark import DSpark
from specdec.drafters.eagle3 import Eagle3
from specdec.drafters.layers import Rope
from specdec.errors import require
from specdec.formats.gguf_file import (
    ARCHITECTURE,
    SUFFIX,
    Keys,
    read_keys,
    read_tensors,
    tensor_names,
    write_gguf,
)
from specdec.formats.gguf_tokenizer import MASK
from specdec.formats.layout import (
    OTHER,
    Description,
    ExportLayout,
    Tensors,
    refuse_biased_head,
    refuse_window,
)
from specdec.targets.output_head import soft_cap
from specdec.targets.parts import TargetParts

LAYOUT = "gguf"
EAGLE3, DFLASH = "eagle3", "dflash"  # architectures of llama.cpp
FACTORS = "rope_freqs.weight"
STILL = 1e30  # the factor of a frequency of 0, which llama.cpp divides by
ATTENTION = {
    "self_attn.q_proj.": "attn_q.",
    "self_attn.k_proj.": "attn_k.",
    "self_attn.v_proj.": "attn_v.",
    "self_attn.o_proj.": "attn_output.",
    "post_attention_layernorm.": "ffn_norm.",
    "mlp.gate_proj.": "ffn_gate.",
    "mlp.up_proj.": "ffn_up.",
    "mlp.down_proj.": "ffn_down.",
}
AROUND = {"norm.": "output_norm.", "lm_head.": "output."}


def layer_keys(architecture: str, llama: Any, layers: int) -> Keys:
    """The keys of layers of this config, for an architecture of llama.cpp."""
    factors = rope_factors(llama)
    one = 1.0 if varies(factors) else float(factors[0])
    scaling: Keys = {"rope.scaling.type": "linear", "rope.scaling.factor": one} if one != 1 else {}
    attention = float(rotary_of(llama).attention_scaling)
    scaling |= {"rope.scaling.attn_factor": attention} if attention != 1 else {}
    head_dim = head_dim_of(llama)
    keys = {
        "block_count": layers,
        "context_length": llama.max_position_embeddings,
        "embedding_length": llama.hidden_size,
        "feed_forward_length": llama.intermediate_size,
        "attention.head_count": llama.num_attention_heads,
        "attention.head_count_kv": llama.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(llama.rms_norm_eps),
        "rope.dimension_count": 2 * len(factors),
        "rope.freq_base": float(llama.rope_parameters["rope_theta"]),
        "vocab_size": llama.vocab_size,
        **scaling,
    }
    return {ARCHITECTURE: architecture} | under(architecture, keys)


def under(architecture: str, keys: Keys) -> Keys:
    """Keys with the architecture's name in front."""
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def head_dim_of(llama: Any) -> int:
    return int(getattr(llama, "head_dim", None) or llama.hidden_size // llama.num_attention_heads)


def rotary_of(llama: Any) -> Any:
    """The rotary frequencies of a config's layers, computed on the CPU."""
    with torch.device("cpu"):
        return Rope(llama).rotary


def rope_factors(llama: Any) -> Tensor:
    """By how much each rotary frequency [N] is lower than the unscaled one, theta^(-i / N)."""
    frequencies = rotary_of(llama).inv_freq.double()
    theta, count = float(llama.rope_parameters["rope_theta"]), len(frequencies)
    plain = theta ** -(torch.arange(count, dtype=torch.float64) / count)
    factors = torch.where(frequencies > 0, plain / frequencies, STILL).float()
    return torch.where((factors - 1).abs() < 1e-6, torch.ones_like(factors), factors)


def varies(factors: Tensor) -> bool:
    """Whether frequencies are scaled by different factors."""
    return bool((factors - factors[0]).abs().max() > 1e-5 * factors[0])


def interleaved(weight: Tensor, llama: Any, back: bool = False) -> Tensor:
    """Rows [heads · head_dim, …] in the order in which the numbers that are rotated together are
    neighbours, from that in which they are half the rotated width apart; `back` reverses it."""
    width, order = 2 * len(rope_factors(llama)), torch.arange(head_dim_of(llama))
    order[:width] = torch.arange(width).view(2, -1).T.flatten()
    if back:
        order = order.argsort()
    heads: Tensor = weight.unflatten(0, (-1, len(order)))
    return heads[:, order].flatten(0, 1).contiguous()


def draft_keys(architecture: str, drafter: Any, layers: int) -> Keys:
    """The keys that all drafts have."""
    return {
        **layer_keys(architecture, drafter.llama, layers),
        f"{architecture}.target_layers": list(drafter.needs.layers),
    }


def with_ids(tensors: Tensors) -> Tensors:
    """The draft vocabulary as `d2t`."""
    vocab_S = tensors.pop("vocab_S", None)
    return tensors if vocab_S is None else tensors | {"d2t": vocab_S.long()}


def without_ids(tensors: Tensors) -> Tensors:
    ids = tensors.pop("d2t", None)
    return tensors if ids is None else tensors | {"vocab_S": ids}


def refuse_last_layer(drafter: Any, target: TargetParts) -> None:
    """Raise UserError for a draft that reads the state after the target's last layer: there,
    llama.cpp accepts other tokens than our decoder."""
    last = target.depth
    require(
        last not in drafter.needs.layers,
        f"llama.cpp gives a draft another state after the target's last layer, {last}: train with "
        "other drafter.layers, or export it for another engine",
    )


# EAGLE-3


def eagle3_keys(drafter: Eagle3, target: TargetParts) -> Description:
    own = {
        "target_hidden_size": target.width,
        "norm_before_residual": drafter.config.norm_before_residual,
        "norm_before_fc": drafter.config.norm_before_fc,
    }
    return draft_keys(EAGLE3, drafter, layers=1) | under(EAGLE3, own)


def refuse_eagle3(drafter: Eagle3, target: TargetParts) -> None:
    """Raise UserError for a head that llama.cpp does not load or would run differently."""
    config, count = drafter.config, len(drafter.needs.layers)
    refuse_last_layer(drafter, target)
    for wrong, setting in (
        (config.num_layers != 1, "drafter.num_layers=1"),
        (config.fc_norm, "drafter.fc_norm=false"),
        (config.norm_output, "drafter.norm_output=false"),
        (config.window is not None, "drafter.window=null"),
        (config.own_embedding, "drafter.own_embedding=false"),
        (count != 3, "three of the target's layers in drafter.layers"),
    ):
        require(
            not wrong,
            f"llama.cpp has no EAGLE-3 head like this one: train with {setting}, or export it for "
            "another engine",
        )


def eagle3_to_engine(drafter: Eagle3, tensors: Tensors) -> Tensors:
    tensors = with_ids(tensors)
    for name in ROTATED:
        tensors[name] = interleaved(tensors[name], drafter.llama)
    factors = rope_factors(drafter.llama)
    return tensors | ({FACTORS: factors} if varies(factors) else {})


def eagle3_from_engine(drafter: Eagle3, tensors: Tensors) -> Tensors:
    """Raises UserError for rotary factors that are not the draft's."""
    tensors, factors = without_ids(tensors), rope_factors(drafter.llama)
    stored = tensors.pop(FACTORS, None)
    fits = torch.equal(stored, factors) if stored is not None else not varies(factors)
    require(fits, f"tensor {FACTORS!r} does not fit the draft's rotary positions")
    for name in ROTATED:
        require(name in tensors, f"tensor {name!r} is missing")
        tensors[name] = interleaved(tensors[name], drafter.llama, back=True)
    return tensors


ROTATED = tuple(f"midlayer.self_attn.{x}_proj.weight" for x in "qk")


EAGLE3_NAMES = {
    **{f"midlayer.{ours}": f"blk.0.{theirs}" for ours, theirs in ATTENTION.items()},
    "midlayer.input_layernorm.": "blk.0.attn_norm.",
    "midlayer.hidden_norm.": "blk.0.attn_norm_2.",
    "input_norm.": "enc.output_norm.",
    **AROUND,
}


# Blocks: DFlash and its relatives


def dflash_keys(drafter: Block, target: TargetParts) -> Description:
    return {
        **draft_keys(DFLASH, drafter, drafter.config.num_layers),
        f"{DFLASH}.block_size": drafter.slots,
        MASK: drafter.sizes.mask_token,
    }


def refuse_dflash(drafter: Block, target: TargetParts) -> None:
    """Raise UserError for a block that llama.cpp would run differently."""
    refuse_window(drafter, target)
    refuse_biased_head(drafter, target)
    refuse_last_layer(drafter, target)
    require(
        not varies(rope_factors(drafter.llama)),
        f"llama.cpp scales all rotary frequencies of a {drafter.config.name} draft alike, but the "
        f"rotary positions of {target.name} are of type "
        f"{drafter.llama.rope_parameters['rope_type']}: {OTHER}",  # type: ignore[index]
    )


def dflash_to_engine(drafter: Block, tensors: Tensors) -> Tensors:
    """A draft with a pruned vocabulary has the rows of the target's head for the tokens kept."""
    if drafter.vocab_S is not None:
        tensors[HEAD] = drafter.target.head.weight[drafter.vocab_S]
    return with_ids(tensors)


def dflash_from_engine(drafter: Block, tensors: Tensors) -> Tensors:
    if drafter.vocab_S is not None:
        require(tensors.pop(HEAD, None) is not None, f"tensor {HEAD!r} is missing")
    return without_ids(tensors)


HEAD = "lm_head.weight"
MOST_LAYERS = 64
IN_BLOCKS = {
    **ATTENTION,
    "input_layernorm.": "attn_norm.",
    "self_attn.q_norm.": "attn_q_norm.",
    "self_attn.k_norm.": "attn_k_norm.",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.": "attn_conv_proj.",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.": "ffn_conv_proj.",
}
DFLASH_NAMES = {
    **{
        f"layers.{i}.{ours}": f"blk.{i}.{theirs}"
        for i in range(MOST_LAYERS)
        for ours, theirs in IN_BLOCKS.items()
    },
    "hidden_norm.": "enc.output_norm.",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.": "selector_hidden.",
    "confidence_head.": "conf_proj.",
    **AROUND,
}


# DFlash 2: the selector chooses among the likeliest tokens of each slot

CANDIDATES = 16  # the paper's number
SUCCESSORS = "candidate_selector.successor_codebook"


def candidates(drafter: DFlash2) -> int:
    """How many tokens of a slot the selector chooses among, k: llama.cpp packs k ids and k² scores
    into a row as wide as a state."""
    fitting = (math.isqrt(4 * drafter.llama.hidden_size + 1) - 1) // 2
    rows: int = drafter.sizes.draft_vocab or drafter.sizes.target_vocab
    return min(CANDIDATES, fitting, rows)


def refuse_dflash2(drafter: DFlash2, target: TargetParts) -> None:
    """Raise UserError for a draft that llama.cpp would run differently, and for one with a number
    of candidates of its own, whose export could not be compared at all tokens."""
    refuse_dflash(drafter, target)
    require(
        drafter.config.candidates is None,
        f"llama.cpp drafts among {candidates(drafter)} candidates, not the draft's own "
        f"{drafter.config.candidates}: train with drafter.candidates=null",
    )


def dflash2_keys(drafter: DFlash2, target: TargetParts) -> Description:
    config, cap = drafter.config, soft_cap(target.config)
    own = {
        "conv_kernel_size": config.taps,
        "conv_group_size": config.group,
        "selector_rank": config.rank,
        "selector_top_k": candidates(drafter),
        **({"final_logit_softcapping": cap} if cap else {}),
        **({"logit_scale": target.head_factor} if target.head_factor != 1 else {}),
    }
    return dflash_keys(drafter, target) | under(DFLASH, own)


def dflash2_to_engine(drafter: DFlash2, tensors: Tensors) -> Tensors:
    """Successors have a row for each token of the target's vocabulary, zeros outside the draft's
    own."""
    if (vocab_S := drafter.vocab_S) is not None:
        rows_SN = tensors[SUCCESSORS]
        rows_VN = rows_SN.new_zeros(drafter.sizes.target_vocab, rows_SN.shape[1])
        tensors[SUCCESSORS] = rows_VN.index_copy(0, vocab_S, rows_SN)
    return dflash_to_engine(drafter, tensors)


def dflash2_from_engine(drafter: DFlash2, tensors: Tensors) -> Tensors:
    tensors = dflash_from_engine(drafter, tensors)
    if (vocab_S := tensors.get("vocab_S")) is not None and SUCCESSORS in tensors:
        tensors[SUCCESSORS] = tensors[SUCCESSORS][vocab_S]
    return tensors


def selector_note(drafter: DFlash2, hidden_AKD: Tensor) -> str:
    """At how many places the likeliest token is not among those that llama.cpp chooses from."""
    D, k, outside = drafter.llama.hidden_size, candidates(drafter), 0
    for depth in range(hidden_AKD.shape[1]):
        states = hidden_AKD[:, depth]
        best_A1 = drafter.unembed(states, depth).argmax(-1, keepdim=True)
        among_AN = drafter.head(states[:, :D]).topk(k).indices
        outside += int((among_AN != best_A1).all(-1).sum())
    places = hidden_AKD.shape[:2].numel()
    return (
        f"; llama.cpp's selector chooses among the {k} likeliest tokens of a slot, which leaves "
        f"out the draft's own choice at {outside} of {places} places"
    )


# DSpark: each token biases the next one


def dspark_keys(drafter: DSpark, target: TargetParts) -> Description:
    return dflash_keys(drafter, target) | {f"{DFLASH}.sample_from_anchor": True}


def refuse_dspark(drafter: DSpark, target: TargetParts) -> None:
    """Also raise UserError for a target that scales or caps its logits: llama.cpp adds the bias of
    the token before to logits that are neither."""
    refuse_dflash(drafter, target)
    require(
        target.head_factor == 1 and not soft_cap(target.config),
        f"{target.name} scales or caps its logits, which llama.cpp leaves out before it adds the "
        f"biases of a dspark draft: {OTHER}",
    )


# Files of other projects


def method_of_file(path: Path) -> Any:
    """The drafting method of a draft's GGUF file, by its architecture and, for the relatives of
    DFlash, by what llama.cpp (src/models/dflash.cpp) tells them apart by. Raises UserError as
    `read_keys` does."""
    keys = read_keys(path)
    architecture = keys.get(ARCHITECTURE)
    if architecture != DFLASH:
        return architecture
    if f"{DFLASH}.selector_rank" in keys:
        return "dflash2"
    return "dspark" if "markov_w1.weight" in tensor_names(path) else DFLASH


def in_one_file(**how: Any) -> ExportLayout:
    """A layout of one GGUF file."""
    return ExportLayout(**how, suffix=SUFFIX, save=write_gguf, load=read_tensors)


DFLASH_LAYOUT = in_one_file(
    config=dflash_keys,
    to_engine=dflash_to_engine,
    from_engine=dflash_from_engine,
    refuse=refuse_dflash,
    prefixes=DFLASH_NAMES,
)
GGUF_LAYOUTS = {
    "eagle3": in_one_file(
        config=eagle3_keys,
        to_engine=eagle3_to_engine,
        from_engine=eagle3_from_engine,
        refuse=refuse_eagle3,
        prefixes=EAGLE3_NAMES,
    ),
    "dflash": DFLASH_LAYOUT,
    "dflash2": replace(
        DFLASH_LAYOUT,
        config=dflash2_keys,
        refuse=refuse_dflash2,
        to_engine=dflash2_to_engine,
        from_engine=dflash2_from_engine,
        note=selector_note,
    ),
    "dspark": replace(DFLASH_LAYOUT, config=dspark_keys, refuse=refuse_dspark),
}

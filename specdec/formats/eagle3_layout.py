"""EAGLE-3 in the format that vLLM and SGLang load by method, and in vLLM's self-describing
format.

Imports, by the trainers' code and published configs:

| written by | architecture | layer | layers that are read | d2t |
| --- | --- | --- | --- | --- |
| EAGLE (traineagle3) | LlamaForCausalLM | midlayer | the default | ascending |
| SpecForge | LlamaForCausalLMEagle3 | midlayer | the default, or eagle_config | ascending |
| AngelSlim | Eagle3LlamaForCausalLM | midlayer | the default, or eagle_config | ascending |
| Model-Optimizer | LlamaForCausalLMEagle3 | layers.0 | eagle_config | by frequency, no t2d |
| speculators | Eagle3DraftModel | layers.0 | eagle_aux_hidden_state_layer_ids | ascending |

The ids in eagle_config are one less than ours. speculators norms the residual unless its config
says otherwise, the others do not. A draft may have an embedding, and a width, of its own.
"""

from collections.abc import Collection
from typing import Any

import torch

from specdec.drafters.base import Drafter
from specdec.drafters.eagle3 import MOST_LAYERS, Eagle3
from specdec.errors import require
from specdec.formats.foreign_config import ForeignConfig, layers_of_foreign
from specdec.formats.import_layout import (
    EMBEDDING,
    HEAD,
    ImportLayout,
    Shapes,
    architecture,
    draft_vocabulary,
    kind_of_speculators,
    proposed_depth,
    renamed_prefixes,
)
from specdec.formats.layout import (
    Description,
    ExportLayout,
    Tensors,
    one_layer,
    refuse_sinks,
    special_tokens,
    window_of,
)
from specdec.targets.parts import TargetParts


def hf(drafter: Eagle3, target: TargetParts) -> Description:
    """`architectures: [LlamaForCausalLMEagle3]`, for vLLM and SGLang."""
    ids = list(drafter.needs.layers)
    return {
        **layers(drafter),
        **network_description(drafter, target),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_aux_hidden_states": len(ids),
        "eagle_config": {  # SGLang reads the layers only here, and adds 1 to each
            "eagle_aux_hidden_state_layer_ids": [k - 1 for k in ids],
            "use_aux_hidden_state": True,
        },
        **special_tokens(target),
    }


def speculators(drafter: Eagle3, target: TargetParts) -> Description:
    """The speculators format: `vllm serve DIR` needs nothing else."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafter.config.depth}
    architectures = list(target.model.config.architectures or [])
    return {
        **network_description(drafter, target),
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": layers(drafter),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": architectures},
        },
    }


def layers(drafter: Eagle3) -> Description:
    """The layers as a Llama, whose first layer engines widen. SGLang takes one layer only."""
    count = drafter.config.num_layers
    return {**one_layer(drafter), "num_hidden_layers": count, **window_of(drafter, count)}


def network_description(drafter: Eagle3, target: TargetParts) -> Description:
    """The description of the network that both layouts share."""
    alike = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {
        "draft_vocab_size": drafter.lm_head.out_features,
        "target_hidden_size": target.width,
        "eagle_aux_hidden_state_layer_ids": list(drafter.needs.layers),
        **{name: getattr(drafter.config, name) for name in alike},
        "tie_word_embeddings": False,
    }


def to_engine(drafter: Drafter, tensors: Tensors) -> Tensors:
    """`d2t` holds offsets: draft token i is target token i + d2t[i]. Engines accept neither `d2t`
    nor `t2d` for a draft with the whole vocabulary."""
    if (vocab_S := tensors.pop("vocab_S", None)) is None:
        return tensors
    inside_V = torch.zeros(drafter.sizes.target_vocab, dtype=torch.bool, device=vocab_S.device)
    inside_V[vocab_S] = True
    offset_S = vocab_S - torch.arange(len(vocab_S), device=vocab_S.device)
    return tensors | {"d2t": offset_S, "t2d": inside_V}


def from_engine(drafter: Drafter, tensors: Tensors) -> Tensors:
    """Raises UserError if `d2t` and `t2d` contradict each other."""
    if (offset_S := tensors.pop("d2t", None)) is None:
        return tensors
    vocab_S, inside_V = offset_S + torch.arange(len(offset_S)), tensors.pop("t2d", None)
    require(
        inside_V is not None and torch.equal(inside_V.nonzero()[:, 0], vocab_S),
        "tensors 'd2t' and 't2d' describe different draft vocabularies",
    )
    return tensors | {"vocab_S": vocab_S}


LAYOUTS = {
    "hf": ExportLayout(hf, to_engine, from_engine, refuse_sinks),
    "speculators": ExportLayout(
        speculators, to_engine, from_engine, refuse_sinks, prefixes={"midlayer.": "layers.0."}
    ),
}

# IMPORTS

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel")
ONE_LAYER = ("Eagle3LlamaForCausalLM",)  # whose config may count the target's layers
FIRST = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
MASK_HIDDEN = "mask_hidden"  # of P-EAGLE alone
# what Model-Optimizer's drafts may vary, in eagle_config, and ours have
REGULAR = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "has_lm_head": True,
    "parallel_draft_step": 1,
}


def recognises(config: ForeignConfig, names: Collection[str]) -> bool:
    """An architecture of EAGLE-3, or its tensors: EAGLE's own config names a plain Llama."""
    described = architecture(config) in ARCHITECTURES or any(name in names for name in FIRST)
    return kind_of_speculators(config) is None and MASK_HIDDEN not in names and described


def recognises_speculators(config: ForeignConfig, names: Collection[str]) -> bool:
    return kind_of_speculators(config) == "eagle3"


def settings(config: ForeignConfig, shapes: Shapes) -> dict[str, Any]:
    """The settings of a draft in one flat config."""
    return network(config, config, shapes, normed_residual=False)


def settings_of_speculators(config: ForeignConfig, shapes: Shapes) -> dict[str, Any]:
    """The settings of a draft whose layers are described apart."""
    layers = config.layers_part()
    config.get("speculators_model_type")
    return network(config, layers, shapes, normed_residual=True) | proposed_depth(config)


def network(
    config: ForeignConfig, layers: ForeignConfig, shapes: Shapes, normed_residual: bool
) -> dict[str, Any]:
    """The settings of EAGLE-3's network. Raises UserError for a network that is not ours."""
    nested = config.part("eagle_config")
    for key, value in REGULAR.items():
        nested.only(key, value)
    nested.get("parallel_draft_heads_num_layers")  # of heads that REGULAR excludes
    below = nested.counts("eagle_aux_hidden_state_layer_ids", 0)
    read, inner = config.counts("eagle_aux_hidden_state_layer_ids", 1), None
    if below is not None:
        inner = [k + 1 for k in below]
    if None not in (read, inner) and read != inner:
        raise config.wrong("eagle_aux_hidden_state_layer_ids", f"{inner}, as eagle_config says")
    vocab = layers.count("vocab_size")
    shape = layers_of_foreign(layers)
    config.count("target_hidden_size", shape["hidden_size"])  # compared with the tensors
    if HEAD not in shapes and (config.get("tie_word_embeddings") or EMBEDDING in shapes):
        raise config.wrong("tie_word_embeddings", f"false, with a tensor {HEAD!r}")
    known = {"layers": read or inner} if read or inner else {}  # else the engines' default
    if architecture(config) in ONE_LAYER:
        layers.keys = {**layers.keys, "num_hidden_layers": 1}
    return known | {
        "num_layers": layers.count("num_hidden_layers", 1, MOST_LAYERS),
        "intermediate_size": layers.count("intermediate_size"),
        "layer_config": shape,
        "own_embedding": EMBEDDING in shapes,
        "draft_vocab": draft_vocabulary(config, shapes, vocab),
        "norm_before_residual": config.flag("norm_before_residual", normed_residual),
        "norm_before_fc": config.flag("norm_before_fc", False),
        "fc_norm": config.flag("fc_norm", False),
        "norm_output": config.flag("norm_output", False),
        "initialisation": "random",
    }


IMPORTS = {
    "hf": ImportLayout(
        "EAGLE-3, SpecForge, AngelSlim, Model-Optimizer",
        recognises,
        settings,
        renamed_prefixes(("layers.0.", "midlayer.")),
        defaults={HEAD: lambda target, vocab_S: target.own_head(vocab_S)},
    ),
    "speculators": ImportLayout(
        "speculators",
        recognises_speculators,
        settings_of_speculators,
        renamed_prefixes(("layers.0.", "midlayer.")),
    ),
}

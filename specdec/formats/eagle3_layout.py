"""EAGLE-3 as vLLM and SGLang load it by method, and in vLLM's self-describing format."""

import torch

from specdec.drafters.base import Drafter
from specdec.drafters.eagle3 import Eagle3
from specdec.errors import require
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
        **described(drafter, target),
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
        **described(drafter, target),
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


def described(drafter: Eagle3, target: TargetParts) -> Description:
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
    """Raises UserError if the two descriptions of the draft vocabulary contradict each other."""
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

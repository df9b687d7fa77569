"""EAGLE-3 as vLLM and SGLang load it by method, and in vLLM's self-describing format."""

from typing import Any

import torch
from torch import Tensor

from specdec.drafters.recurrent.eagle3 import Eagle3
from specdec.errors import UserError
from specdec.formats.layout import Checkpoint, Layout, Tensors, special_tokens
from specdec.target.base import Target


def hf(drafter: Eagle3, target: Target) -> Checkpoint:
    """`architectures: [LlamaForCausalLMEagle3]`, for vLLM and SGLang."""
    ids = list(drafter.needs.layers)
    config = {
        **drafter.llama.to_dict(),
        **_described(drafter, target),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "fc_norm": False,
        "norm_output": False,
        "num_aux_hidden_states": len(ids),
        # SGLang reads this one alone, and adds 1 to each
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [k - 1 for k in ids],
            "use_aux_hidden_state": True,
        },
        **special_tokens(target),
    }
    return _tensors(drafter, "midlayer"), config


def speculators(drafter: Eagle3, target: Target) -> Checkpoint:
    """The speculators format: `vllm serve DIR` needs nothing else."""
    config = {
        **_described(drafter, target),
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": {
            **drafter.llama.to_dict(),
            "model_type": "llama",
            "num_hidden_layers": 1,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": drafter.config.depth}
            ],
            "verifier": {
                "name_or_path": target.name,
                "architectures": list(target.model.config.architectures or []),
            },
        },
    }
    return _tensors(drafter, "layers.0"), config


def read(drafter: Eagle3, tensors: Tensors) -> Tensors:
    """Tensors of either layout by the drafter's own names. Raises UserError where the two
    descriptions of the draft vocabulary contradict each other."""
    found = {n.replace("layers.0.", "midlayer.", 1): x for n, x in tensors.items()}
    if (offset := found.pop("d2t", None)) is not None:
        vocab_S, inside = offset + torch.arange(len(offset)), found.pop("t2d", None)
        if inside is None or not torch.equal(inside.nonzero()[:, 0], vocab_S):
            raise UserError("tensors 'd2t' and 't2d' describe different draft vocabularies")
        found["vocab_S"] = vocab_S
    return found


def _described(drafter: Eagle3, target: Target) -> dict[str, Any]:
    """What both layouts say of the network."""
    return {
        "draft_vocab_size": drafter.lm_head.out_features,
        "target_hidden_size": target.width,
        "eagle_aux_hidden_state_layer_ids": list(drafter.needs.layers),
        "norm_before_residual": drafter.config.norm_before_residual,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
    }


def _tensors(drafter: Eagle3, layer: str) -> dict[str, Tensor]:
    """The weights, with the decoder layer under the given name. `d2t` holds offsets: draft token
    i is target token i + d2t[i]; with the whole vocabulary engines accept neither it nor `t2d`."""
    state = dict(drafter.state_dict())
    vocab_S = state.pop("vocab_S", None)
    tensors = {
        (n.replace("midlayer", layer, 1) if n.startswith("midlayer.") else n): x
        for n, x in state.items()
    }
    if vocab_S is not None:
        tensors["d2t"] = vocab_S - torch.arange(len(vocab_S), device=vocab_S.device)
        tensors["t2d"] = torch.zeros(drafter.target_vocab, dtype=torch.bool, device=vocab_S.device)
        tensors["t2d"][vocab_S] = True
    return tensors


LAYOUTS = {"hf": Layout("eagle3", hf, read), "speculators": Layout("eagle3", speculators, read)}

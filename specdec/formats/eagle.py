"""EAGLE-1 as vLLM and SGLang load it: no LM head, no norm, and the target's embedding."""

from specdec.drafters.recurrent.eagle import Eagle
from specdec.formats.layout import Checkpoint, Layout, Tensors, special_tokens
from specdec.target.base import Target


def hf(drafter: Eagle, target: Target) -> Checkpoint:
    """`architectures: [LlamaForCausalLM]`, which an engine that drafts by method `eagle` prefixes.
    Of a target's own scaling of its logits, engines know a factor."""
    config = {
        **drafter.llama.to_dict(),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "logit_scale": getattr(target.config, "logit_scale", None) or 1.0,
        **special_tokens(target),
    }
    return dict(drafter.state_dict()), config


def read(drafter: Eagle, tensors: Tensors) -> Tensors:
    return tensors


LAYOUTS = {"hf": Layout("eagle", hf, read)}

"""EAGLE-1 as vLLM and SGLang load it: no LM head, no norm, and the target's embedding."""

from specdec.drafters.recurrent.eagle import Eagle
from specdec.formats.layout import Description, Layout, one_layer, special_tokens
from specdec.target.base import Target


def config(drafter: Eagle, target: Target) -> Description:
    """`architectures: [LlamaForCausalLM]`, to which engines add a prefix for method `eagle`. Of the
    ways in which targets scale their logits, engines support only a constant factor."""
    return {
        **one_layer(drafter),
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "logit_scale": getattr(target.config, "logit_scale", None) or 1.0,
        **special_tokens(target),
    }


LAYOUTS = {"hf": Layout("eagle", config)}

"""EAGLE-1 as vLLM and SGLang load it: no LM head, no norm, and the target's embedding."""

from specdec.drafters.eagle import Eagle
from specdec.formats.layout import (
    Description,
    ExportLayout,
    one_layer,
    refuse_biased_head,
    refuse_sinks,
    shared_head,
    special_tokens,
    window_of,
)
from specdec.targets.parts import TargetParts


def config(drafter: Eagle, target: TargetParts) -> Description:
    """`architectures: [LlamaForCausalLM]`, to which engines add a prefix for method `eagle`."""
    return {
        **one_layer(drafter),
        **window_of(drafter, 1),
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        **shared_head(target),
        **special_tokens(target),
    }


def refuse(drafter: Eagle, target: TargetParts) -> None:
    refuse_biased_head(drafter, target)
    refuse_sinks(drafter, target)


LAYOUTS = {"hf": ExportLayout(config, refuse=refuse)}

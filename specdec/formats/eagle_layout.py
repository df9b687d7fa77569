"""EAGLE-1 in the format that vLLM and SGLang load: no LM head, no norm, and the target's
embedding."""

from specdec.drafters.eagle import Eagle
from specdec.formats.layout import (
    Description,
    ExportLayout,
    one_layer,
    refuse_biased_head,
    shared_head,
    special_tokens,
)
from specdec.targets.parts import TargetParts


def config(drafter: Eagle, target: TargetParts) -> Description:
    """`architectures: [LlamaForCausalLM]`, to which engines add a prefix for method `eagle`."""
    return {
        **one_layer(drafter),
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        **shared_head(target),
        **special_tokens(target),
    }


LAYOUTS = {"hf": ExportLayout(config, refuse=refuse_biased_head)}

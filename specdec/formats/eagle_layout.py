"""EAGLE-1 in the format that vLLM and SGLang load: no LM head, no norm, and the target's
embedding.

Imports: the repositories of EAGLE-1, EAGLE-2 and HASS, whose files hold an embedding too. Without
the key `bias`, EAGLE's own code gives fc a bias, which engines leave out, so that such a draft is
measured there without it.
"""

from collections.abc import Collection
from typing import Any

from specdec.drafters.eagle import Eagle
from specdec.errors import require
from specdec.formats.foreign_config import ForeignConfig, layers_of_foreign
from specdec.formats.import_layout import (
    EMBEDDING,
    ImportLayout,
    Shapes,
    architecture,
    draft_vocabulary,
    kind_of_speculators,
    require_same_head,
)
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
    """`architectures: [LlamaForCausalLM]`, to which engines add a prefix for method `eagle`. vLLM
    0.32 numbers the draft's layer after the target's. For EAGLE-3 it subtracts their number before
    it reads `layer_types`; for EAGLE (llama_eagle.py, llama.py) only if the config has it."""
    window = window_of(drafter, 1)
    if window:
        window["target_layer_count"] = target.config.num_hidden_layers
    return {
        **one_layer(drafter),
        **window,
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        **shared_head(target),
        **special_tokens(target),
    }


def refuse(drafter: Eagle, target: TargetParts) -> None:
    """Raise UserError for what engines would leave out."""
    refuse_biased_head(drafter, target)
    refuse_sinks(drafter, target)
    require(
        not drafter.config.bias,
        "engines leave out the bias of fc: train with drafter.bias=false, or give export=null",
    )


LAYOUTS = {"hf": ExportLayout(config, refuse=refuse)}

ARCHITECTURES = ("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
FC, ATTENTION = "fc.weight", "layers.0.self_attn.q_proj.weight"


def recognises(config: ForeignConfig, names: Collection[str]) -> bool:
    """Whether this is EAGLE-1: a Llama layer with `fc`, which joins embedding and hidden
    state, and without EAGLE-3's norm of the hidden state."""
    pairs = FC in names and ATTENTION in names and "layers.0.hidden_norm.weight" not in names
    return pairs and architecture(config) in ARCHITECTURES and kind_of_speculators(config) is None


def settings(config: ForeignConfig, shapes: Shapes) -> dict[str, Any]:
    """The settings of a draft in EAGLE-1's layout."""
    config.only("num_hidden_layers", 1)
    for key in ("bias", "logit_scale", "final_logit_softcapping"):
        config.get(key)  # the tensors say the first, and `require_same_head` compares the others
    vocab = config.count("vocab_size")
    if draft_vocabulary(config, shapes, vocab) is not None:
        raise config.wrong("draft_vocab_size", f"the whole vocabulary, {vocab}")
    return {
        "intermediate_size": config.count("intermediate_size"),
        "layer_config": layers_of_foreign(config),
        "own_embedding": EMBEDDING in shapes,
        "bias": "fc.bias" in shapes,
        "initialisation": "random",
    }


IMPORTS = {
    "hf": ImportLayout("EAGLE-1, EAGLE-2, HASS", recognises, settings, fits=require_same_head)
}

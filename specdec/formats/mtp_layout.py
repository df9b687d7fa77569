"""One multi-token prediction module in vLLM's format, for any target.

vLLM finds a module by its target's architecture. Only its loader for MiMo-V2 has a plain Llama
layer as its block (vllm/model_executor/models/mimo_v2_mtp.py in 0.32): [enorm(e); hnorm(h)] →
eh_proj → layer → final norm, whose output is read by the head and the next step. The loader shares
the embedding and head of any target, but reads the module's sizes from the target's config; keys
that a target lacks are therefore written beside the draft, for `--hf-overrides`. It silently skips
unknown tensors. deepseek_mtp (latent attention, experts) and ernie_mtp (no final norm) do not fit
this module.
"""

from specdec.drafters.mtp import MTP
from specdec.errors import require
from specdec.formats.layout import (
    OTHER,
    Description,
    ExportLayout,
    one_layer,
    refuse_biased_head,
    refuse_sinks,
    special_tokens,
    window_of,
)
from specdec.targets.parts import TargetParts


def overrides(drafter: MTP, target: TargetParts) -> Description:
    """The keys of the module's attention and norms. They are MiMo-V2's own, so they change no
    target. The rotated part of a head is also the target's own (see `refuse`)."""
    described = one_layer(drafter)
    rope = described["rope_parameters"]
    names = {
        "layernorm_epsilon": "rms_norm_eps",
        "swa_num_attention_heads": "num_attention_heads",
        "swa_num_key_value_heads": "num_key_value_heads",
        "swa_head_dim": "head_dim",
    }
    keys = {theirs: described[ours] for theirs, ours in names.items()}
    keys["swa_rope_theta"] = rope["rope_theta"]
    if (share := rope.get("partial_rotary_factor")) is not None:
        keys["partial_rotary_factor"] = share
    if drafter.window is not None:
        keys["sliding_window_size"] = drafter.window
    if not hasattr(target.model.config, "attention_bias"):
        keys["attention_bias"] = False
    return keys


def config(drafter: MTP, target: TargetParts) -> Description:
    """`architectures: [MiMoV2FlashForCausalLM]`, by which vLLM chooses the loader."""
    return {
        **one_layer(drafter),
        **window_of(drafter, 1),
        **overrides(drafter, target),
        "architectures": ["MiMoV2FlashForCausalLM"],
        "tie_word_embeddings": False,
        **special_tokens(target),
    }


def refuse(drafter: MTP, target: TargetParts) -> None:
    """Raise UserError for drafts that the loader would read differently: several modules, scaled
    rotary positions, or a target whose config does not fit the module."""
    theirs, ours = target.model.config, drafter.llama
    rope: Description = ours.rope_parameters  # type: ignore[assignment]
    theirs_rope = getattr(theirs, "rope_parameters", None) or {}
    by_kind = [key for key, x in theirs_rope.items() if isinstance(x, dict)]
    act = getattr(theirs, "hidden_act", None)
    partial = getattr(ours, "rotary_dim", None) is not None
    require(
        not drafter.config.native,
        "the module is the target's own, and engines look for it in the target's checkpoint: omit "
        "the layout",
    )
    require(
        not drafter.several,
        "engines run one module at every depth: train with drafter.modules=1 to export it, or give "
        "export=null",
    )
    refuse_biased_head(drafter, target)
    refuse_sinks(drafter, target)
    require(
        rope["rope_type"] == "default",
        "vLLM's loader of mtp supports only plain rotary positions, but this target's are of type "
        f"{rope['rope_type']}: {OTHER}",
    )
    require(
        not partial or not by_kind,
        f"the kinds of layers of {target.name} rotate different parts of their heads, but vLLM's "
        f"loader of mtp would make them alike: {OTHER}",
    )
    require(
        partial or getattr(theirs, "partial_rotary_factor", None) in (None, 1),
        f"vLLM's loader of mtp rotates as much of a head as {target.name} does, unlike this draft: "
        f"{OTHER}",
    )
    require(
        getattr(theirs, "hidden_size", None) == ours.hidden_size
        and getattr(theirs, "vocab_size", None) == target.vocab_size,
        f"vLLM's loader of mtp reads its sizes in the config of {target.name}, which does not have "
        f"them: {OTHER}",
    )
    require(
        theirs.to_dict().get("intermediate_size") == ours.intermediate_size,
        "vLLM's loader gives the module an MLP of the target's size: train with "
        f"drafter.intermediate_size=null if you set it to {ours.intermediate_size}; else {OTHER}",
    )
    require(
        act == "silu",
        f"vLLM's loader of mtp needs a target whose config has hidden_act=silu, but that of "
        f"{target.name} has {act}: {OTHER}",
    )
    for key in OBEYED:
        require(
            getattr(theirs, key, None) in (None, False, -1),
            f"vLLM's loader gives the module the {key} of {target.name}, which the draft does not "
            f"have: {OTHER}",
        )


OBEYED = (  # keys of a target's config that the loader obeys and the module does not have
    "attention_bias",
    "attention_value_scale",
    "swa_v_head_dim",
    "sliding_window_size",
    "add_swa_attention_sink_bias",
)
PREFIXES = {
    "layers.0.post_attention_layernorm.": "model.mtp.layers.0.pre_mlp_layernorm.",
    "layers.": "model.mtp.layers.",
}
LAYOUTS = {"hf": ExportLayout(config, refuse=refuse, prefixes=PREFIXES, overrides=overrides)}

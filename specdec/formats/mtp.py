"""One multi-token prediction module as vLLM loads it, for a target of any kind.

vLLM finds a module by its target's architecture. Its loader for MiMo-V2 is the one whose block is a
plain Llama layer (vllm/model_executor/models/mimo_v2_mtp.py in 0.32): [enorm(e); hnorm(h)] →
eh_proj → layer → final norm, whose output the head and the next step read. The loader shares
the embedding and head of any target, but reads the module's sizes from the target's config, so the
keys that a target lacks are written beside the draft, for `--hf-overrides`. It skips unknown
tensors in silence. deepseek_mtp (latent attention, experts) and ernie_mtp (no final norm) do not
fit this module.
"""

from specdec.drafters.recurrent.mtp import MTP
from specdec.errors import require
from specdec.formats.layout import Description, Layout, one_layer, special_tokens
from specdec.target.base import Target


def overrides(drafter: MTP, target: Target) -> Description:
    """The keys of the module's attention and norms: MiMo-V2's own, so they change no target."""
    llama = drafter.llama
    found = {
        "layernorm_epsilon": llama.rms_norm_eps,
        "swa_num_attention_heads": llama.num_attention_heads,
        "swa_num_key_value_heads": llama.num_key_value_heads,
        "swa_head_dim": llama.head_dim,
        "swa_rope_theta": (llama.rope_parameters or {}).get("rope_theta", 10000.0),
    }
    return found if hasattr(target.config, "attention_bias") else {**found, "attention_bias": False}


def config(drafter: MTP, target: Target) -> Description:
    """`architectures: [MiMoV2FlashForCausalLM]`, by which vLLM chooses the loader. Raises UserError
    for what the loader would read differently: several modules, scaled rotary positions, an MLP of
    another size than the target's, attention biases, an activation other than SiLU."""
    rope, theirs = drafter.llama.rope_parameters or {}, target.config
    other = "export a draft of another family, such as eagle3"
    require(
        not drafter.several,
        "engines run one module at every depth: train with drafter.modules=1 to export it",
    )
    require(
        rope.get("rope_type", "default") == "default",
        "vLLM's loader supports only plain rotary positions, but this target's are of type "
        f"{rope.get('rope_type')}: {other}",
    )
    require(
        getattr(theirs, "intermediate_size", None) == drafter.llama.intermediate_size,
        "vLLM's loader gives the module an MLP of the target's size: train with "
        "drafter.intermediate_size=null",
    )
    require(
        not getattr(theirs, "attention_bias", False),
        f"vLLM's loader gives the module attention biases, as in {target.name}: {other}",
    )
    act = theirs.hidden_act
    require(act == "silu", f"vLLM's loader needs a target with silu, not {act}: {other}")
    return {
        **one_layer(drafter),
        **overrides(drafter, target),
        "architectures": ["MiMoV2FlashForCausalLM"],
        "tie_word_embeddings": False,
        **special_tokens(target),
    }


PREFIXES = {
    "layers.0.post_attention_layernorm.": "model.mtp.layers.0.pre_mlp_layernorm.",
    "layers.": "model.mtp.layers.",
}
LAYOUTS = {"hf": Layout("mtp", config, prefixes=PREFIXES, overrides=overrides)}

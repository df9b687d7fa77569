"""The MLP speculator as its authors publish it and vLLM's `mlp_speculator.py` loads it.

vLLM 0.32 still has that file but no longer registers its class, so no engine can check an export.
The loader removes `speculator.` from names, drops unknown tensors in silence, and reads only the
first name of tied weights. `top_k_tokens_per_head` must have an entry for each head, though nothing
reads it. The vocabulary is always whole.
"""

from specdec.drafters.recurrent.mlp import Mlp
from specdec.formats import heads
from specdec.formats.layout import Description, Layout
from specdec.target.base import Target


def config(drafter: Mlp, target: Target) -> Description:
    """`architectures: [MLPSpeculatorPreTrainedModel]`. The tree is the authors' for three heads."""
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": target.vocab_size,
        "emb_dim": target.width,
        "inner_dim": drafter.inner_dim,
        "n_predict": drafter.config.depth,
        "tie_weights": drafter.config.tie_weights,
        "scale_input": drafter.config.scale_input,
        "top_k_tokens_per_head": [max(5 - k, 1) for k in range(drafter.config.depth)],
        "n_candidates": 5,
    }


PREFIXES = {heads.HEAD: "speculator.head.", "": "speculator."}
LAYOUTS = {
    "hf": Layout("mlp_speculator", config, heads.write, heads.read, heads.objection, PREFIXES)
}

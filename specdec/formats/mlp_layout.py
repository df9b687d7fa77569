"""The MLP speculator in the format that its authors publish and vLLM's `mlp_speculator.py` loads.

vLLM 0.32 still has that file but no longer registers its class, so no engine can check an export.
The loader removes `speculator.` from names, silently drops unknown tensors, and reads only the
first name of tied weights, except that its heads are never tied: a tied head is written for each
depth. `top_k_tokens_per_head` must have an entry for each head, although no code reads it. The
vocabulary is always complete.
"""

import torch

from specdec.drafters.mlp import Mlp
from specdec.errors import require
from specdec.formats import heads_layout
from specdec.formats.layout import Description, ExportLayout, Tensors
from specdec.targets.parts import TargetParts


def config(drafter: Mlp, target: TargetParts) -> Description:
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


def to_engine(drafter: Mlp, tensors: Tensors) -> Tensors:
    tensors = heads_layout.to_engine(drafter, tensors)
    if drafter.config.tie_weights:
        one = tensors[f"{heads_layout.HEAD}0.weight"]
        tensors |= {
            f"{heads_layout.HEAD}{k}.weight": one.clone() for k in range(1, drafter.config.depth)
        }
    return tensors


def from_engine(drafter: Mlp, tensors: Tensors) -> Tensors:
    """Raises UserError if the copies of a tied head differ."""
    if drafter.config.tie_weights:
        for k in range(1, drafter.config.depth):
            copy = tensors.pop(f"{heads_layout.HEAD}{k}.weight", None)
            alike = copy is not None and torch.equal(copy, tensors[f"{heads_layout.HEAD}0.weight"])
            require(alike, f"tensor 'speculator.head.{k}.weight' is not the tied head")
    return heads_layout.from_engine(drafter, tensors)


PREFIXES = {heads_layout.HEAD: "speculator.head.", "": "speculator."}
LAYOUTS = {
    "hf": ExportLayout(
        config,
        to_engine,
        from_engine,
        objection=heads_layout.objection,
        prefixes=PREFIXES,
    )
}

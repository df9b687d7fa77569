"""Medusa in vLLM's format, always with the complete vocabulary.

vLLM's loader silently drops unknown tensors and leaves missing ones uninitialised. Layers have a
bias only if `medusa_fc_bias` is true; its default is false.
"""

from specdec.drafters.medusa import Medusa
from specdec.formats import heads_layout
from specdec.formats.layout import Description, ExportLayout
from specdec.targets.parts import TargetParts


def config(drafter: Medusa, target: TargetParts) -> Description:
    """`architectures: [MedusaModel]`, for vLLM."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.width,
        "vocab_size": target.vocab_size,
        "num_heads": drafter.config.depth,
        "num_hidden_layers": drafter.config.num_layers,
        "medusa_fc_bias": drafter.config.bias,
        "original_lm_head": drafter.config.shared_head,
    }


LAYOUTS = {
    "hf": ExportLayout(
        config,
        heads_layout.to_engine,
        heads_layout.from_engine,
        objection=heads_layout.objection,
    )
}

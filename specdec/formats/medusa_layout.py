"""Medusa in vLLM's format, always with the complete vocabulary.

vLLM's loader silently drops unknown tensors and leaves missing ones uninitialised. Layers have a
bias only if `medusa_fc_bias` is true; its default is false.

Imports: that layout, and that of the authors (FasterDecoding/Medusa, TGI), whose config has the
numbers of heads and layers alone. There, head h is a sequence of layers `{h}.{l}.linear`, which
have a bias, and of its LM head `{h}.{number of layers}`.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any

from specdec.drafters.depth_heads import MOST_LAYERS
from specdec.drafters.medusa import Medusa
from specdec.formats import heads_layout
from specdec.formats.foreign_config import ForeignConfig
from specdec.formats.import_layout import ImportLayout, Shapes, architecture
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

MOST_HEADS = 128


def recognises(config: ForeignConfig, names: Collection[str]) -> bool:
    return architecture(config) == "MedusaModel" and "num_heads" in config.keys


def settings(config: ForeignConfig, shapes: Shapes) -> dict[str, Any]:
    """The settings of heads in vLLM's layout. Without `original_lm_head`, each has an LM head."""
    config.only("model_type", "medusa")
    for key in ("truncated_vocab_size", "token_map", "medusa_choices"):
        config.only(key)
    config.only("logit_scale", 1.0)
    config.count("hidden_size")
    config.count("vocab_size")
    heads = config.count("num_heads", most=MOST_HEADS)
    return {
        "depth": heads,
        "num_layers": config.count("num_hidden_layers", most=MOST_LAYERS),
        "bias": config.flag("medusa_fc_bias", False),
        "shared_head": config.flag("original_lm_head", False),
        "draft_vocab": None,
    }


def recognises_authors(config: ForeignConfig, names: Collection[str]) -> bool:
    return "medusa_num_heads" in config.keys and architecture(config) != "MedusaModel"


def settings_of_authors(config: ForeignConfig, shapes: Shapes) -> dict[str, Any]:
    """The settings of heads in the authors' layout, whose layers have a bias."""
    config.text("base_model_name_or_path")
    config.get("medusa_choices")  # the tree that their decoder drafts
    return {
        "depth": config.count("medusa_num_heads", most=MOST_HEADS),
        "num_layers": config.count("medusa_num_layers", 1, MOST_LAYERS),
        "bias": True,
        "shared_head": False,
        "draft_vocab": None,
    }


def engine_names(names: Iterable[str]) -> dict[str, str]:
    """The authors' names to vLLM's."""
    renamed = {}
    for name in names:
        if layer := re.fullmatch(r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)", name):
            renamed[name] = "blocks.{}.layers.{}.{}".format(*layer.groups())
        elif head := re.fullmatch(r"(\d{1,3})\.\d{1,3}\.weight", name):
            renamed[name] = f"lm_heads.{head[1]}.weight"
        else:
            renamed[name] = name
    return renamed


IMPORTS = {
    "hf": ImportLayout("vLLM's Medusa", recognises, settings, depths=True),
    "authors": ImportLayout(
        "Medusa",
        recognises_authors,
        settings_of_authors,
        engine_names,
        weights="medusa_lm_head.safetensors",
        depths=True,
    ),
}

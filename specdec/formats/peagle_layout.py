"""P-EAGLE in the format of vLLM 0.32: EAGLE-3 with `mask_hidden` and the id of the mask token,
served with `"parallel_drafting": true`. SGLang does not support it. Imports: speculators and
SpecForge."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from specdec.drafters.peagle import PEagle
from specdec.errors import require
from specdec.formats import eagle3_layout
from specdec.formats.foreign_config import ForeignConfig
from specdec.formats.import_layout import Shapes, kind_of_speculators
from specdec.formats.layout import Description, refuse_sinks
from specdec.targets.parts import TargetParts


def hf(drafter: PEagle, target: TargetParts) -> Description:
    return {**eagle3_layout.hf(drafter, target), "mask_token_id": drafter.mask_token}


def speculators(drafter: PEagle, target: TargetParts) -> Description:
    """The format with which `vllm serve DIR` turns parallel drafting on by itself."""
    described = eagle3_layout.speculators(drafter, target)
    described |= {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle"}
    described["speculators_config"]["algorithm"] = "peagle"
    return {**described, "mask_token_id": drafter.mask_token}


def refuse(drafter: PEagle, target: TargetParts) -> None:
    refuse_sinks(drafter, target)
    require(
        not drafter.config.fc_norm,
        "vLLM reads drafter.fc_norm of peagle only in the layout hf: give export=hf",
    )


LAYOUTS = {
    "hf": replace(eagle3_layout.LAYOUTS["hf"], config=hf),
    "speculators": replace(eagle3_layout.LAYOUTS["speculators"], config=speculators, refuse=refuse),
}


def recognises(config: ForeignConfig, names: Collection[str]) -> bool:
    return eagle3_layout.MASK_HIDDEN in names and kind_of_speculators(config) is None


def recognises_speculators(config: ForeignConfig, names: Collection[str]) -> bool:
    return kind_of_speculators(config) == "peagle"


def masked(config: ForeignConfig) -> dict[str, Any]:
    """The setting of the mask token, which vLLM reads by either name."""
    mask = config.token("mask_token_id")
    mask = config.token("pard_token") if mask is None else mask
    if mask is None:
        raise config.wrong("mask_token_id", "the id of a token")
    config.only("norm_output", False)
    return {"mask_token": mask}


def settings(config: ForeignConfig, shapes: Shapes) -> dict[str, Any]:
    return eagle3_layout.settings(config, shapes) | masked(config)


def settings_of_speculators(config: ForeignConfig, shapes: Shapes) -> dict[str, Any]:
    return eagle3_layout.settings_of_speculators(config, shapes) | masked(config)


IMPORTS = {
    "hf": replace(
        eagle3_layout.IMPORTS["hf"],
        written_by="SpecForge",
        recognises=recognises,
        settings=settings,
    ),
    "speculators": replace(
        eagle3_layout.IMPORTS["speculators"],
        recognises=recognises_speculators,
        settings=settings_of_speculators,
    ),
}

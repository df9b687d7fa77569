"""P-EAGLE as vLLM 0.32 loads it: EAGLE-3 with `mask_hidden` and the id of the mask token, served
with `"parallel_drafting": true`. SGLang does not have it."""

from dataclasses import replace

from specdec.drafters.peagle import PEagle
from specdec.errors import require
from specdec.formats import eagle3_layout
from specdec.formats.layout import Description, refuse_sinks
from specdec.targets.parts import TargetParts


def hf(drafter: PEagle, target: TargetParts) -> Description:
    return {**eagle3_layout.hf(drafter, target), "mask_token_id": drafter.mask_token}


def speculators(drafter: PEagle, target: TargetParts) -> Description:
    """The format by which `vllm serve DIR` turns parallel drafting on by itself."""
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

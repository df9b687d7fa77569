"""A draft LM as a plain Hugging Face checkpoint."""

from specdec.drafters.models.lm import LM
from specdec.formats.draft import untied
from specdec.formats.layout import Checkpoint, Layout, Tensors, special_tokens
from specdec.target.base import Target

PREFIX = "model."  # of the drafter's own names


def hf(drafter: LM, target: Target) -> Checkpoint:
    tensors = {n.removeprefix(PREFIX): x for n, x in untied(drafter.state_dict()).items()}
    config = {
        **drafter.model.config.to_dict(),
        "architectures": [type(drafter.model).__name__],
        **special_tokens(target),
    }
    return tensors, config


def read(drafter: LM, tensors: Tensors) -> Tensors:
    return {f"{PREFIX}{name}": x for name, x in tensors.items()}


LAYOUTS = {"hf": Layout("draft_model", hf, read, whole_model=True)}

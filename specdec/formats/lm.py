"""A draft LM as a plain Hugging Face checkpoint."""

from specdec.drafters.models.lm import LM
from specdec.formats.layout import Description, Layout, special_tokens
from specdec.target.base import Target


def config(drafter: LM, target: Target) -> Description:
    return {
        **drafter.model.config.to_dict(),
        "architectures": [type(drafter.model).__name__],
        **special_tokens(target),
    }


LAYOUTS = {"hf": Layout("draft_model", config, prefixes={"model.": ""}, whole_model=True)}

"""What an engine needs to know of a family: one `Layout` for each format that it loads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.target.base import Target

Tensors = dict[str, Tensor]
Checkpoint = tuple[Tensors, dict[str, Any]]  # tensors and config.json, as an engine reads them


def nothing_wrong(drafter: Any, logits_NS: Tensor) -> str | None:
    return None


@dataclass(frozen=True)
class Layout:
    """A family's weights as an engine names, shapes and describes them.

    `method` is vLLM's name for drafting with them. `write` turns a drafter into a checkpoint and
    `read` the tensors of one back into the drafter's own; `objection` says why an engine would
    draft something else than the drafter, whose logits on a short text it is given, or None.
    A draft that is a `whole_model` is written with the target's tokenizer.
    """

    method: str
    write: Callable[[Any, Target], Checkpoint]
    read: Callable[[Any, Tensors], Tensors]
    objection: Callable[[Any, Tensor], str | None] = nothing_wrong
    whole_model: bool = False


def special_tokens(target: Target) -> dict[str, Any]:
    """The ids of the target's special tokens, as a config names them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(target.config, name, None) for name in names}

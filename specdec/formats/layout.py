"""What an engine needs to know about a family: one `Layout` for each format it loads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specdec.target.base import Target

Tensors = dict[str, Tensor]
Description = dict[str, Any]  # config.json


def unchanged(drafter: Any, tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Layout:
    """A family's weights as an engine names, shapes and describes them. `write` converts the
    drafter's tensors to the engine's before they are renamed; `read` converts them back after they
    are renamed back. `objection` takes the drafter's logits on a short text and says why an engine
    would draft differently, or returns None."""

    method: str  # vLLM's name for drafting with such weights
    config: Callable[[Any, Target], Description]
    write: Callable[[Any, Tensors], Tensors] = unchanged
    read: Callable[[Any, Tensors], Tensors] = unchanged
    objection: Callable[[Any, Tensor], str | None] | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)  # of names: ours, then the engine's
    whole_model: bool = False  # it is written with the target's tokenizer
    parallel: bool = False  # vLLM's option `parallel_drafting`
    # keys that the engine looks for in the target's own config; they are written beside the draft
    overrides: Callable[[Any, Target], Description] | None = None


def renamed(tensors: Tensors, prefixes: Mapping[str, str]) -> Tensors:
    """The tensors, with the first of the `prefixes` that fits a name replaced by its new one."""
    old = {name: next(filter(name.startswith, prefixes), "") for name in tensors}
    return {prefixes.get(old[n], "") + n.removeprefix(old[n]): x for n, x in tensors.items()}


def one_layer(drafter: Any) -> Description:
    """The config of a one-layer Llama, for the layer of a recurrent drafter."""
    return {**drafter.llama.to_dict(), "model_type": "llama", "num_hidden_layers": 1}


def special_tokens(target: Target) -> Description:
    """The ids of the target's special tokens, as a config names them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(target.config, name, None) for name in names}

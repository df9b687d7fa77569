"""The tensors of a checkpoint's files as the model has them.

transformers renames many tensors when it loads a model, and puts some together: the experts of a
layer, which most checkpoints store one by one, become one tensor. Here it is done for a part of the
model at a time, so that a checkpoint can be read without holding the model.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass
class ConvertedTensors:
    """Tensors of the files that become one or more tensors of the model; `converter` is None where
    one tensor is only renamed. `sources` are their names and the patterns that these match."""

    name: str
    converter: Any
    sources: list[tuple[str, Any]]

    def tensors(self, model: nn.Module, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name; `read` gives a tensor of the files."""
        if self.converter is None:
            return {self.name: read(self.sources[0][0])}
        conversion: Any = copy.deepcopy(self.converter)  # it keeps what it collects
        for source, pattern in self.sources:
            conversion.add_tensor(self.name, source, pattern, read(source))
        converted = conversion.convert(self.name, model=model, config=model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in converted.items()}


def converted_tensors(model: Any, names: Iterable[str]) -> list[ConvertedTensors]:
    """How the tensors of these names in a checkpoint's files become tensors of `model`, which may
    be on the meta device. What transformers would not load, such as modules for multi-token
    prediction, is left out."""
    state = dict[str, Tensor](model.state_dict())
    transforms = get_model_conversion_mapping(model)
    renamings = [x for x in transforms if isinstance(x, WeightRenaming)]
    converters = [x for x in transforms if isinstance(x, WeightConverter)]
    by_pattern = {pattern: x for x in converters for pattern in x.source_patterns}
    prefix, by_name = model.base_model_prefix, dict[str, ConvertedTensors]()
    for source in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, state)
        if name not in state and source in state:
            name, pattern = rename_source_key(source, [], [], prefix, state)
        if name in state:
            converter = None if pattern is None else by_pattern[pattern]
            group = by_name.setdefault(name, ConvertedTensors(name, converter, []))
            group.sources.append((source, pattern))
    return list(by_name.values())

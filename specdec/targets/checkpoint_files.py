"""The safetensors files of a checkpoint: tensors by name, a hash of all of them, and layers that
stay on disk.

A layer's weights are read by name when a draft is initialised from them. The hash of all weights is
stored in the cache of targets when they are first read, and is valid while the files are unchanged.
transformers renames many tensors when it loads a model and merges some: the experts of a layer,
which most checkpoints store separately, become one tensor. This module does the same for a part of
the model at a time, so a checkpoint can be read without holding the model.
"""

import copy
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from specdec.errors import UserError, first_line, require
from specdec.files import reading, write_whole
from specdec.integrity import of_value
from specdec.progress import tell
from specdec.runtime.quantised import plain
from specdec.targets.fingerprint import computing_keys, digest_of_weights, fingerprint_of

# floating-point types in the header of a safetensors file, by their significant bits
SIGNIFICANT = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8}
AGAIN = "copy or download it again"
HASH = re.compile("[0-9a-f]{32}")


def file_of_model(
    path: str, name: str, revision: str | None = None, downloads: bool = True
) -> str | None:
    """The path of a file of a folder or a hub model, downloaded if necessary; None if there is no
    such file, or no connection."""
    kinds = ("missing_entries", "connection_errors")
    quiet: Any = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    return cached_file(path, name, revision=revision, local_files_only=not downloads, **quiet)


@dataclass(frozen=True)
class SafetensorsFiles:
    """The safetensors files of a checkpoint: `files` maps a tensor's name to its file, and `kinds`
    to its stored type. `notes` is a folder for their hashes, and `computed` has the
    `computing_keys` of the config."""

    files: dict[str, Path]
    kinds: dict[str, str]
    notes: Path
    computed: str

    @classmethod
    def find(
        cls, path: str, revision: str | None, cache: Path, config: Any
    ) -> "SafetensorsFiles | None":
        """The weights of a folder or a hub model; None if it has no safetensors. Raises UserError
        naming a file that is missing or damaged."""

        def file_of(name: str) -> str | None:
            return file_of_model(path, name, revision)

        if single := file_of(SAFE_WEIGHTS_NAME):
            names = dict.fromkeys(_kinds(Path(single)), SAFE_WEIGHTS_NAME)
        elif index := file_of(SAFE_WEIGHTS_INDEX_NAME):
            names = _weight_map(Path(index))
        else:
            return None
        shards: dict[str, Path] = {}
        types: dict[str, str] = {}
        for name in sorted(set(names.values())):
            shard = file_of(name)
            require(shard is not None, f"{path}: {name}, a file with weights, is missing: {AGAIN}")
            shards[name] = Path(shard or "")
            types |= _kinds(shards[name])
        if lacking := sorted(names.keys() - types.keys()):
            raise UserError(f"{path}: no file holds {lacking[0]!r}, which its index lists: {AGAIN}")
        files = {name: shards[shard] for name, shard in names.items()}
        return cls(files, types, cache / "fingerprints", computing_keys(config))

    @property
    def note(self) -> Path:
        """The file with the hash of the weights. Its name identifies the weights' files, and
        changes with them: a change sets the time `ctime`, which no program can reset."""
        states = []
        for file in sorted({shard.resolve() for shard in self.files.values()}):
            at = file.stat()
            states.append([str(file), at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino])
        digest = hashlib.blake2b(json.dumps(states).encode(), digest_size=12).hexdigest()
        return self.notes / digest

    @property
    def kind(self) -> str | None:
        """The type in SIGNIFICANT as which most tensors are stored."""
        counts = Counter(kind for kind in self.kinds.values() if kind in SIGNIFICANT)
        return counts.most_common(1)[0][0] if counts else None

    def tensor(self, name: str) -> Tensor:
        """A tensor by its name in the files."""
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def fingerprint(self) -> str:
        """The fingerprint of the target (see fingerprint.py). The weights are read once, and their
        hash is kept while the files are unchanged."""
        note = self.note
        if (weights := _noted(note)) is None:
            weights = digest_of_weights((name, self.tensor(name)) for name in sorted(self.files))
            if note == self.note:  # else the files changed in the meantime
                with suppress(OSError):  # a folder that may not be written: hashed again next time
                    note.parent.mkdir(parents=True, exist_ok=True)
                    write_whole(note, f"{weights} {of_value(weights, note.name)}\n")
        return fingerprint_of(weights, self.computed)

    @property
    def is_noted(self) -> bool:
        """Whether the hash is known without reading the weights."""
        return _noted(self.note) is not None

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, by the rest of their names."""
        tensors: dict[str, Tensor] = {}
        for name in self.files:
            if name.startswith(prefix):
                tensors[name.removeprefix(prefix)] = self.tensor(name)
        return tensors


def _noted(note: Path) -> str | None:
    """The hash in a note; None if there is none or it is damaged."""
    try:
        weights, *sums = note.read_bytes().decode().split() if note.is_file() else ("",)
    except OSError:  # unreadable is not damaged: the weights are read again
        return None
    except ValueError:
        weights, sums = "", ["damaged"]
    right = bool(HASH.fullmatch(weights)) and sums == [of_value(weights, note.name)]
    if not right and (weights or sums):
        tell(f"{note} is damaged: the whole target is read again")
    return weights if right else None


def _kinds(path: Path) -> dict[str, str]:
    """The types of the tensors of a safetensors file, by name, from its header."""
    try:
        with reading(path), safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({first_line(error)}): it is cut short or damaged: {AGAIN}"
        ) from error


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, from the index of a checkpoint in several files."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if names and all(isinstance(part, str) for pair in names.items() for part in pair):
            return dict(names)
        reason = "its weight_map does not map names to files"
    except (ValueError, OSError, TypeError, AttributeError) as error:
        reason = first_line(error)
    except KeyError:
        reason = "it has no weight_map"
    raise UserError(f"{index} cannot be read ({reason}): {AGAIN}")


@dataclass
class StoredLayers:
    """The layers of a target that stay in its checkpoint's files and are read one at a time.
    `config` is that of the complete model; `empty` makes it on the meta device, as a map of the
    files; `whole` loads the target, for layers that are stored in another form."""

    files: SafetensorsFiles
    config: Any
    empty: Callable[[], nn.Module]
    whole: Callable[[], Any]

    def weights(self, layer: str) -> dict[str, Tensor]:
        """The weights of the layer with this name in the model, by their names within the layer.
        Empty if the files do not hold all of them as plain numbers."""
        prefix = f"{layer}."
        renamed = get_checkpoint_conversion_mapping(
            self.config.get_text_config(decoder=True).model_type
        )
        tensors = ({} if renamed else self.files.under(prefix)) or self._converted(prefix)
        return tensors if all(map(plain, tensors.values())) else {}

    def _converted(self, prefix: str) -> dict[str, Tensor]:
        model, of_files = self._named
        expected = [name for name in model.state_dict() if name.startswith(prefix)]
        tensors: dict[str, Tensor] = {}
        for part in of_files:
            if part.name.startswith(prefix):
                tensors |= part.tensors(model, self.files.tensor)
        if tensors.keys() != set(expected):
            return {}
        return {name.removeprefix(prefix): tensors[name] for name in expected}

    @cached_property
    def _named(self) -> tuple[nn.Module, list["ConvertedTensors"]]:
        """The empty model, and the conversions from the files' tensors to its own."""
        model = self.empty()
        return model, converted_tensors(model, self.files.files)


@dataclass
class ConvertedTensors:
    """Tensors of the files that become one or more tensors of the model; `converter` is None if one
    tensor is only renamed. `sources` are their names and the patterns that these match."""

    name: str
    converter: Any
    sources: list[tuple[str, Any]]

    def tensors(self, model: nn.Module, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name; `read` returns a tensor of the files."""
        if self.converter is None:
            return {self.name: read(self.sources[0][0])}
        conversion: Any = copy.deepcopy(self.converter)  # it keeps what it collects
        for source, pattern in self.sources:
            conversion.add_tensor(self.name, source, pattern, read(source))
        converted = conversion.convert(self.name, model=model, config=model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in converted.items()}


def converted_tensors(model: Any, names: Iterable[str]) -> list[ConvertedTensors]:
    """The conversions from tensors with these names in a checkpoint's files to tensors of `model`,
    which may be on the meta device. Tensors that transformers would not load, such as modules for
    multi-token prediction, are skipped."""
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

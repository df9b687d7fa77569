"""The parts of a target whose layers stay on disk.

A checkpoint's embedding, norm and head are loaded, a layer's weights read by name when a draft
starts from them. The fingerprint, a sum over every weight, is noted beside the cache of targets
when the whole model was loaded once, for as long as the checkpoint's files stay as they were.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from specdec.files import write_whole
from specdec.target.parts import Parts


@dataclass(frozen=True)
class Weights:
    """The safetensors files of a checkpoint, and which of them holds a tensor."""

    files: dict[str, Path]  # by the name of the tensor

    @classmethod
    def of(cls, path: str, revision: str | None) -> "Weights | None":
        """Those of a folder or of a hub's model; None where it has none in safetensors."""

        def found(name: str) -> Path | None:
            at = cached_file(
                path,
                name,
                revision=revision,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            return None if at is None else Path(at)

        if single := found(SAFE_WEIGHTS_NAME):
            with safe_open(single, framework="pt") as file:
                return cls(dict.fromkeys(file.keys(), single))
        if index := found(SAFE_WEIGHTS_INDEX_NAME):
            names = json.loads(index.read_text())["weight_map"]
            shards = {name: found(name) for name in set(names.values())}
            if all(shards.values()):
                return cls({name: shards[shard] for name, shard in names.items()})  # type: ignore[misc]
        return None

    def identity(self) -> str:
        """One string for the files as they are: where, how large and when written."""
        files = sorted({path.resolve() for path in self.files.values()})
        states = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
        return hashlib.blake2b(json.dumps(states).encode(), digest_size=12).hexdigest()

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, by the rest of their names."""
        found: dict[str, Tensor] = {}
        for path in sorted({p for name, p in self.files.items() if name.startswith(prefix)}):
            with safe_open(path, framework="pt") as file:
                found |= {
                    name.removeprefix(prefix): file.get_tensor(name)
                    for name in file.keys()  # noqa: SIM118
                    if name.startswith(prefix)
                }
        return found


@dataclass(frozen=True)
class Note:
    """Where the fingerprint of a checkpoint is noted, under `root`."""

    root: Path
    weights: Weights

    @property
    def path(self) -> Path:
        return self.root / "fingerprints" / self.weights.identity()

    def read(self) -> str | None:
        try:
            return self.path.read_text().strip() or None
        except OSError:
            return None

    def write(self, fingerprint: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, fingerprint + "\n")


class StoredParts(Parts):
    """The parts of a checkpoint: `model` is it without layers, `config` that of the whole.

    `whole` loads the target, for the layers of models whose checkpoints name their tensors
    otherwise than the model does.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        revision: str | None,
        config: Any,
        weights: Weights,
        fingerprint: str,
        whole: Callable[[], Parts],
    ) -> None:
        super().__init__(model, tokenizer, name, revision)
        self.config = config.get_text_config(decoder=True)
        self._weights = weights
        self._fingerprint = fingerprint
        self._whole = whole

    @property
    def prefix(self) -> str:
        lists = (n for n, m in self.model.named_modules() if isinstance(m, nn.ModuleList))
        return next(name for name in lists if not len(self.model.get_submodule(name)))

    def fingerprint(self) -> str:
        return self._fingerprint

    def layer(self, k: int) -> dict[str, Tensor]:
        k %= self.config.num_hidden_layers
        found = self._weights.under(f"{self.prefix}.{k}.")
        if not found or get_checkpoint_conversion_mapping(self.config.model_type):
            return self._whole().layer(k)
        return {name: x.to(self.device, self.dtype) for name, x in found.items()}

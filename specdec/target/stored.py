"""The parts of a target whose layers stay on disk.

A layer's weights are read by name when a draft starts from them. The fingerprint is noted in the
cache of targets when the whole model is first loaded, and holds while the files are unchanged.
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
    """The safetensors files of a checkpoint: `files` maps a tensor's name to the file that holds
    it, and `note` is the file for the target's fingerprint, whose name changes when the
    checkpoint does."""

    files: dict[str, Path]
    note: Path

    @classmethod
    def of(cls, path: str, revision: str | None, cache: Path) -> "Weights | None":
        """The weights of a folder or a hub model; None if it has none in safetensors."""
        kinds = ("missing_entries", "connection_errors")
        quiet: Any = {f"_raise_exceptions_for_{kind}": False for kind in kinds}

        def found(name: str) -> str | None:
            return cached_file(path, name, revision=revision, **quiet)

        if single := found(SAFE_WEIGHTS_NAME):
            with safe_open(single, framework="pt") as file:
                names = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        elif index := found(SAFE_WEIGHTS_INDEX_NAME):
            names = json.loads(Path(index).read_text())["weight_map"]
        else:
            return None
        shards = {name: Path(found(name) or "") for name in set(names.values())}
        if not all(shard.is_file() for shard in shards.values()):
            return None
        states = sorted(
            [str(f), f.stat().st_size, f.stat().st_mtime_ns]
            for f in {shard.resolve() for shard in shards.values()}
        )
        digest = hashlib.blake2b(json.dumps(states).encode(), digest_size=12).hexdigest()
        files = {name: shards[shard] for name, shard in names.items()}
        return cls(files, cache / "fingerprints" / digest)

    def fingerprint(self) -> str | None:
        """The noted fingerprint, if there is one."""
        return (self.note.read_text().strip() if self.note.is_file() else "") or None

    def write(self, fingerprint: str) -> None:
        self.note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.note, fingerprint + "\n")

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, by the rest of their names."""
        found: dict[str, Tensor] = {}
        for name, path in self.files.items():
            if name.startswith(prefix):
                with safe_open(path, framework="pt") as file:
                    found[name.removeprefix(prefix)] = file.get_tensor(name)
        return found


class StoredParts(Parts):
    """The parts of a checkpoint: `model` has no layers, and `config` is that of the whole model.
    `whole` loads the target, in order to read layers if the checkpoint and the model name their
    tensors differently."""

    def __init__(
        self, *of_parts: Any, config: Any, weights: Weights, whole: Callable[[], Parts]
    ) -> None:
        super().__init__(*of_parts)
        self.config = config.get_text_config(decoder=True)
        self.layers = next(
            m for m in self.model.modules() if isinstance(m, nn.ModuleList) and not len(m)
        )
        self.stored = weights.fingerprint()
        self.weights, self._whole = weights, whole

    def layer(self, k: int) -> dict[str, Tensor]:
        k %= self.config.num_hidden_layers
        found = self.weights.under(f"{self.prefix}.{k}.")
        if not found or get_checkpoint_conversion_mapping(self.config.model_type):
            return self._whole().layer(k)
        return {name: x.to(self.device, self.dtype) for name, x in found.items()}

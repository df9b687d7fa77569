"""The target's features of packed rows: online, or from a cache on disk.

A cache holds, for every row, what the drafter reads and what p is made of, in the target's
dtype: the features that `Needs` names, the final hidden state, and the sampler's summary.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.context import Context, Needs
from specdec.errors import UserError, nearest, require
from specdec.files import make_folder, write_whole
from specdec.forcing.teacher import Batch, summarise
from specdec.sampling.sampler import Sampler, Summary
from specdec.target.base import Target
from train.data.packing import Row

SHARD = 64  # rows a file
CACHES = ("disk", "online")


@dataclass
class FeaturesConfig:
    """`cache`: "disk" computes each row once and reads it back every epoch; "online" runs the
    target at every step and stores nothing. `path` null: a folder of its own under `root`."""

    cache: str = "disk"
    path: str | None = None
    root: str = "cache/features"

    def __post_init__(self) -> None:
        known = nearest(self.cache, CACHES)
        require(self.cache in CACHES, f"features.cache={self.cache!r} is unknown{known}")
        require(bool(self.root.strip()), "features.root is empty: give a folder")
        require(self.path is None or bool(self.path.strip()), "features.path is empty: give null")


class Online:
    """Batches of rows, read by the target whenever they are asked for."""

    def __init__(self, target: Target, needs: Needs, sampler: Sampler, rows: Sequence[Row]) -> None:
        self.target, self.needs, self.sampler, self.rows = target, needs, sampler, rows

    def batch(self, indices: Sequence[int]) -> Batch:
        """Rows by index, padded to the longest of them."""
        rows = [self.rows[i] for i in indices]
        device = self.target.device
        ids_BT = _padded([r.ids for r in rows], 0).to(device)
        position_BT = _padded([r.position for r in rows], 0).to(device)
        document_BT = _padded([r.document for r in rows], -1).to(device)
        ctx, final = self.target.features(
            ids_BT, self.needs, position_BT=position_BT, document_BT=document_BT
        )
        mask_BT = _padded([r.mask for r in rows], 0).bool().to(device)
        return Batch(ctx, final, summarise(self.target, final, self.sampler), mask_BT)


class Disk(Online):
    """The same batches from files, each made once; what is missing is made by `fill`."""

    def __init__(
        self,
        target: Target,
        needs: Needs,
        sampler: Sampler,
        rows: Sequence[Row],
        cfg: FeaturesConfig,
    ) -> None:
        super().__init__(target, needs, sampler, rows)
        self.meta = {
            "target": target.name,
            "fingerprint": target.fingerprint(),
            "dtype": str(target.dtype),
            "layers": list(needs.layers),
            "sampler": asdict(sampler),
            "rows": _digest(rows),
        }
        key = hashlib.blake2b(json.dumps(self.meta).encode(), digest_size=8).hexdigest()
        self.folder = Path(cfg.path) if cfg.path else Path(cfg.root) / key
        self._check()

    def bytes(self, shards: Sequence[int]) -> int:
        """Size on disk of these shards."""
        width = self.target.width * (len(self.needs.layers) + 1)
        return self._tokens(shards) * (width * self.target.dtype.itemsize + 16)

    def missing(self) -> list[int]:
        """Shards that are not there yet, or cut short."""
        return [s for s in range(-(-len(self.rows) // SHARD)) if not self._whole(s)]

    def fill(self, progress: Progress, shards: Sequence[int]) -> None:
        """Make shards; one that was cut off is not there and is made again.

        Raises UserError where the disk cannot hold them.
        """
        make_folder(self.folder)
        free, wanted = shutil.disk_usage(self.folder).free, self.bytes(shards)
        if wanted > free:
            raise UserError(
                f"the feature cache needs {-(-wanted // 1_000_000):,} MB more, and the disk of "
                f"{self.folder} has {free // 1_000_000:,} MB free: set features.cache=online, or "
                "another features.root"
            )
        write_whole(self.folder / "meta.json", json.dumps(self.meta, indent=1))
        task = progress.add_task("target features", total=self._tokens(shards))
        for s in shards:
            tensors: dict[str, Tensor] = {}
            for i in range(s * SHARD, min((s + 1) * SHARD, len(self.rows))):
                tensors |= {f"{i}.{name}": x for name, x in self._row(i).items()}
                progress.advance(task, len(self.rows[i].ids))
            partial = self._file(s).with_suffix(f".partial-{uuid4().hex}")
            save_file(tensors, partial)
            partial.rename(self._file(s))
        progress.remove_task(task)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = [self.rows[i] for i in indices]
        device = self.target.device
        stored = [self._read(i) for i in indices]
        names = stored[0].keys()
        column = {n: _stacked([s[n] for s in stored]).to(device) for n in names}
        ctx = Context(
            _padded([r.ids for r in rows], 0).to(device),
            column.get("layers"),
            column["final"] if self.needs.final_hidden else None,
            _padded([r.document for r in rows], -1).to(device),
            _padded([r.position for r in rows], 0).to(device),
        )
        summary = Summary(column["log_z"], column["threshold"], column["argmax"].long())
        mask_BT = _padded([r.mask for r in rows], 0).bool().to(device)
        return Batch(ctx, column["final"], summary, mask_BT)

    def _row(self, i: int) -> dict[str, Tensor]:
        batch = super().batch([i])
        kept = {
            "final": batch.final_BTD,
            "log_z": batch.summary.log_z_N,
            "threshold": batch.summary.threshold_N,
            "argmax": batch.summary.argmax_N.int(),
        }
        if batch.ctx.layers_BTF is not None:
            kept["layers"] = batch.ctx.layers_BTF
        return {name: x[0].contiguous().cpu() for name, x in kept.items()}

    def _read(self, i: int) -> dict[str, Tensor]:
        with safe_open(self._file(i // SHARD), framework="pt") as shard:
            names = [n for n in shard.keys() if n.startswith(f"{i}.")]  # noqa: SIM118
            return {n.split(".", 1)[1]: shard.get_tensor(n) for n in names}

    def _tokens(self, shards: Sequence[int]) -> int:
        return sum(len(r.ids) for s in shards for r in self.rows[s * SHARD : (s + 1) * SHARD])

    def _whole(self, shard: int) -> bool:
        """Whether a shard is there, with its last row."""
        last = min((shard + 1) * SHARD, len(self.rows)) - 1
        try:
            with safe_open(self._file(shard), framework="pt") as found:
                return f"{last}.final" in found.keys()  # noqa: SIM118
        except (OSError, SafetensorError):
            return False

    def _file(self, shard: int) -> Path:
        return self.folder / f"rows-{shard:05d}.safetensors"

    def _check(self) -> None:
        """A cache that was made for something else is an error, never silently used."""
        path = self.folder / "meta.json"
        if not path.exists():
            return
        try:
            theirs = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"the feature cache's {path} is damaged ({error}): delete that folder"
            ) from error
        for name, ours in self.meta.items():
            if theirs.get(name) != ours:
                raise UserError(
                    f"the feature cache {self.folder} was made with {name}={theirs.get(name)!r}, "
                    f"this run has {ours!r}: give another features.path, or delete that folder"
                )


def _digest(rows: Sequence[Row]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for row in rows:
        digest.update(np.stack([row.ids, row.position]).astype(np.int64).tobytes())
    return digest.hexdigest()


def _padded(rows: Sequence[NDArray[Any]], fill: int) -> Tensor:
    out = torch.full((len(rows), max(map(len, rows))), fill, dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.from_numpy(row)
    return out


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    out = rows[0].new_zeros(len(rows), max(map(len, rows)), *rows[0].shape[1:])
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out

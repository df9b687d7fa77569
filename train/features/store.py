"""The target's features on disk, document by document: filled from any source, read as a source.

A document is looked up by its tokens, so that other rows, other data and larger runs can use the
features stored before.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Self
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from specdec.context import Context, Needs
from specdec.decoding.answers import Record
from specdec.errors import require, require_known
from specdec.files import make_folder, read_record, write_whole
from specdec.forcing.teacher import Batch, summarise
from specdec.sampling.sampler import Sampler, Summary
from specdec.target.base import Target
from specdec.target.parts import Parts
from train.data.packing import Row
from train.features.source import Source, texts

SHARD = 64  # rows whose documents go into one file
OPEN = 64  # files kept open at a time
PARTS = ("final", "log_z", "threshold", "argmax", "layers")  # the names of tensors, see `parts_of`
Features = dict[str, Tensor]  # of the tokens of one document [T, …], or of rows [B, T, …]


@dataclass
class FeaturesConfig:
    """`cache`: "disk" computes each document once and reads it back every epoch; "online" runs the
    target at every step and stores nothing. `path` null: a folder of its own under `root`."""

    cache: str = "disk"
    path: str | None = None
    root: str = "cache/features"

    def __post_init__(self) -> None:
        require_known("features", self, cache=("disk", "online"))
        require(bool(self.root.strip()), "features.root is empty: give a folder")
        require(self.path is None or bool(self.path.strip()), "features.path is empty: give null")


@dataclass(frozen=True)
class Kind:
    """What the features of a store were made from: other kinds are never read in their place."""

    fingerprint: str  # of the target
    dtype: str
    layers: tuple[int, ...]
    sampler: Sampler
    width: int

    @classmethod
    def of(cls, target: Parts, needs: Needs, sampler: Sampler) -> Self:
        dtype = str(target.dtype)
        return cls(target.fingerprint(), dtype, needs.layers, sampler, target.width)

    def bytes(self, tokens: int) -> int:
        """Size on disk of the features of `tokens` tokens."""
        itemsize = getattr(torch, self.dtype.removeprefix("torch.")).itemsize
        return tokens * (self.width * (len(self.layers) + 1) * itemsize + 12)


def parts_of(final: Tensor, summary: Summary, layers: Tensor | None) -> Features:
    """The tensors to store, in the target's dtype: the final hidden state [..., D], the summary of
    p, each [...], and the layers that the drafter reads [..., F], if any."""
    parts = (final, summary.log_z_N, summary.threshold_N, summary.argmax_N.int(), layers)
    return {name: x for name, x in zip(PARTS, parts, strict=True) if x is not None}


class Store:
    """Features of documents in a folder, in files of a few hundred documents each.

    A file appears whole or not at all, and truncated files are ignored. Raises UserError if the
    folder holds features of another kind.
    """

    def __init__(self, cfg: FeaturesConfig, kind: Kind) -> None:
        self.kind = kind
        key = hashlib.blake2b(json.dumps(asdict(kind)).encode(), digest_size=8).hexdigest()
        self.folder = Path(cfg.path) if cfg.path else Path(cfg.root) / key
        self._files: dict[str, Path] = {}  # by the name of a document
        self._open = lru_cache(OPEN)(partial(safe_open, framework="pt"))
        self._decoded: dict[str, Features] = {}  # not written yet
        self._require_kind()
        self.refresh()

    def refresh(self) -> None:
        """See what other processes have stored."""
        self._open.cache_clear()
        self._files.clear()
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    names = {name.split(".")[0] for name in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError):
                continue
            self._files |= dict.fromkeys(names, path)

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with documents that are not stored yet, reduced to those documents."""
        left = []
        for row in rows:
            unknown = [np.r_[x] for name, x in documents(row) if name not in self._files]
            if unknown:
                at = np.concatenate(unknown)
                left.append(Row(*(getattr(row, f.name)[at] for f in fields(row))))
        return left

    def fill(self, source: Source, progress: Progress) -> None:
        """Store all documents of a source's rows. Raises UserError where the disk cannot hold
        them."""
        tokens = sum(len(row.ids) for row in source.rows)
        self.prepare(tokens)
        task = progress.add_task("target features", total=tokens)
        for start in range(0, len(source.rows), SHARD):
            found: dict[str, Features] = {}
            for i in range(start, min(start + SHARD, len(source.rows))):
                row, batch = source.rows[i], source.batch([i])
                parts = parts_of(batch.final_BTD, batch.summary, batch.ctx.layers_BTF)
                for name, x in documents(row):
                    found[name] = {n: part[0, x].cpu().contiguous() for n, part in parts.items()}
                progress.advance(task, len(row.ids))
            self._add(found)
        progress.remove_task(task)

    def record(self, target: Target) -> Record:
        """Makes `decode` keep, for `write` to store, the features that the target computes as it
        answers, so that it need not read its own text again.

        The target emits the last token of an answer but never reads it, so its features are stored
        as 0. Nothing uses them: that token's p is at the position before it, and anchors end
        earlier still.
        """

        def keep(text: list[int], ctx: Context) -> None:
            final = ctx.final_BTD
            assert final is not None
            parts = parts_of(final, summarise(target, final, self.kind.sampler), ctx.layers_BTF)
            lacking = len(text) - final.shape[1]  # the last token
            self._decoded[name_of(np.array(text, np.int32))] = {
                n: pad(x[0], (0, 0) * (x.dim() - 2) + (0, lacking)).cpu() for n, x in parts.items()
            }

        return Record(Needs(self.kind.layers), keep)

    def write(self) -> None:
        """Store what was recorded since the last call."""
        if self._decoded:
            self._add(self._decoded)
            self._decoded = {}

    def prepare(self, tokens: int) -> None:
        """Make the folder. Raises UserError if its disk has no room for `tokens` more tokens."""
        make_folder(self.folder)
        short = self.kind.bytes(tokens) - shutil.disk_usage(self.folder).free
        require(
            short <= 0,
            f"the feature cache needs {megabytes(self.kind.bytes(tokens))} more, and the disk of "
            f"{self.folder} is {megabytes(short)} short of that: set features.cache=online, or "
            "another features.root",
        )
        write_whole(self.folder / "meta.json", json.dumps(asdict(self.kind), indent=1))

    def _add(self, found: Mapping[str, Features]) -> None:
        """Write documents, by their names, as one file."""
        tensors = {f"{n}.{part}": x for n, f in found.items() for part, x in f.items()}
        name = hashlib.blake2b("".join(sorted(found)).encode(), digest_size=12).hexdigest()
        path = self.folder / f"{name}.safetensors"
        partial = path.with_suffix(f".partial-{uuid4().hex}")
        save_file(tensors, partial)
        partial.rename(path)
        self._open.cache_clear()  # it may hold the file that was replaced
        self._files |= dict.fromkeys(found, path)

    def read(self, name: str) -> Features:
        """A document's features, by its name; KeyError if it is not stored."""
        file = self._open(self._files[name])
        parts = PARTS if self.kind.layers else PARTS[:-1]
        return {part: file.get_tensor(f"{name}.{part}") for part in parts}

    def _require_kind(self) -> None:
        path = self.folder / "meta.json"
        theirs = read_record(Kind, path, "delete that folder") if path.exists() else self.kind
        for name, ours in asdict(self.kind).items():
            was = asdict(theirs)[name]
            require(
                was == ours,
                f"the feature cache {self.folder} was made with {name}={was!r}, this run has "
                f"{ours!r}: give another features.path, or delete that folder",
            )


class Disk:
    """Rows whose documents are all in a store."""

    def __init__(
        self, store: Store, needs: Needs, rows: Sequence[Row], device: torch.device
    ) -> None:
        self.store, self.needs, self.rows, self.device = store, needs, rows, device

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = [self.rows[i] for i in indices]
        ctx, mask_BT = texts(rows, self.device)
        parts: Features = {}  # the documents in their places [B, T, …], 0 at padding
        for b, row in enumerate(rows):
            for document, x in documents(row):
                for name, part in self.store.read(document).items():
                    if name not in parts:
                        parts[name] = part.new_zeros(*ctx.ids_BT.shape, *part.shape[1:])
                    parts[name][b, x] = part
        final, log_z, threshold, argmax, *layers = (
            parts[name].to(self.device) for name in PARTS if name in parts
        )
        ctx.layers_BTF = layers[0] if layers else None
        ctx.final_BTD = final if self.needs.final_hidden else None
        return Batch(ctx, final, Summary(log_z, threshold, argmax.long()), mask_BT)


def documents(row: Row) -> Iterator[tuple[str, slice]]:
    """The name and the place of each document in a row."""
    starts = np.flatnonzero(row.position == 0).tolist()
    for x in map(slice, starts, [*starts[1:], len(row.ids)]):
        yield name_of(row.ids[x]), x


def name_of(ids: NDArray[np.int32]) -> str:
    """The name that a document is stored under: a hash of its tokens."""
    return hashlib.blake2b(ids.astype(np.int32).tobytes(), digest_size=12).hexdigest()


def megabytes(count: int) -> str:
    """A number of bytes in megabytes, rounded up to a tenth."""
    return f"{-(-count // 10**5) / 10:,.1f} MB"

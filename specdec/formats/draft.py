"""A draft on disk: `draft.safetensors`, and `drafter.json` that says what it is and for whom."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.drafters import Drafter, family
from specdec.errors import UserError
from specdec.files import replaced
from specdec.runtime.packed import is_packed, pack
from specdec.target.base import Target

FORMAT = 1
WEIGHTS, CARD = "draft.safetensors", "drafter.json"
PARTS: dict[str, Any] = {"family": str, "config": dict, "shape": dict, "target": dict}  # of a card
TARGET: dict[str, Any] = {
    "name": str,
    "revision": str | None,
    "fingerprint": str,
    "vocab_size": int,
}


def save(
    folder: Path,
    drafter: Drafter,
    target: Target,
    weights: Mapping[str, Tensor] | None = None,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write a draft; the folder appears whole or not at all.

    `weights` stands in for the drafter's own state dict (gathered from sharded processes);
    `notes` are kept in the card as they are. Raises UserError for a weight that is not finite.
    """
    state = drafter.state_dict() if weights is None else weights
    kept = untied(drafter.state_dict())
    tensors = {name: state[name].detach().cpu().contiguous() for name in kept}
    require_finite(tensors, f"{folder}: not written")
    card = {
        "format": FORMAT,
        "family": drafter.config.name,
        "config": dataclasses.asdict(drafter.config),
        "shape": dataclasses.asdict(drafter.sizes),
        "target": {
            "name": target.name,
            "revision": target.revision,
            "fingerprint": target.fingerprint(),
            "vocab_size": target.vocab_size,
            "width": target.width,
        },
        "notes": notes or {},
    }
    with replaced(folder) as partial:
        save_file(tensors, partial / WEIGHTS)
        (partial / CARD).write_text(json.dumps(card, indent=1))


def load(folder: Path, target: Target, dtype: torch.dtype | None = None) -> Drafter:
    """Read a draft for its target, in `dtype` (None: the target's).

    Raises UserError for a folder that is no draft, a draft of another target, a truncated file,
    and, naming the tensor, for one that is missing, extra or of another shape.
    """
    card = read_card(folder)
    theirs = card["target"]
    if theirs["vocab_size"] != target.vocab_size:
        raise UserError(
            f"{folder}: this draft is for a target with a vocabulary of {theirs['vocab_size']} "
            f"({theirs['name']}), {target.name} has {target.vocab_size}: give that target"
        )
    if theirs["fingerprint"] != target.fingerprint():
        raise UserError(
            f"{folder}: this draft was trained for {theirs['name']} with other weights than "
            f"{target.name} has: give that target, or train a draft for this one"
        )
    kind = family(card["family"])
    try:
        drafter = kind(kind.Config(**card["config"]), kind.Sizes(**card["shape"]))
    except UserError as error:
        raise UserError(f"{folder / CARD}: {error}") from error
    except Exception as error:  # whatever a family's parts say of values that were not theirs
        raise UserError(f"{folder / CARD} is not a draft's card: {_line(error)}") from error
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{folder / WEIGHTS} cannot be read ({error}): the file is cut short or damaged"
        ) from error
    wanted = untied(drafter.state_dict())
    require_same(tensors, wanted, folder / WEIGHTS)
    for name, x in tensors.items():
        if x.is_floating_point() != wanted[name].is_floating_point():
            raise UserError(f"{folder / WEIGHTS}: tensor {name!r} is of type {x.dtype}")
    require_finite(tensors, folder / WEIGHTS)
    _require_vocabulary(tensors.get("vocab_S"), target.vocab_size, folder / WEIGHTS)
    drafter.load_state_dict(tensors, strict=False)  # strict=False: what is tied comes along
    drafter.to(target.device, dtype or target.dtype)
    drafter.attach(target)
    if is_packed(target.model):
        pack(drafter)
    return drafter.eval()


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a draft folder. Raises UserError where there is none, or a newer one."""
    try:
        card = json.loads((folder / CARD).read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{folder} holds no draft ({CARD} is missing): give the checkpoint folder of a run, "
            "such as runs/NAME/best"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CARD} is not a draft's card: {error}") from error
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise UserError(f"{folder / CARD} is not of a format that this version reads ({FORMAT})")
    for where, keys in ((card, PARTS), (card.get("target"), TARGET)):
        for key, kind in keys.items():
            if not isinstance(where, dict) or not isinstance(where.get(key), kind):
                raise UserError(
                    f"{folder / CARD} is not a draft's card: {key!r} is missing, or of a wrong type"
                )
    return card


def untied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the second name of a tensor that has two (tied embeddings)."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, x in state.items():
        place = (x.data_ptr(), x.shape)
        if place not in seen:
            kept[name] = x
            seen.add(place)
    return kept


def require_same(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: Path | str
) -> None:
    """Raise UserError naming the first tensor that is missing, extra or of another shape."""
    for name in wanted:
        if name not in found:
            raise UserError(f"{where}: tensor {name!r} is missing")
        if found[name].shape != wanted[name].shape:
            raise UserError(
                f"{where}: tensor {name!r} has shape {list(found[name].shape)}, "
                f"not {list(wanted[name].shape)}"
            )
    for name in found:
        if name not in wanted:
            raise UserError(f"{where}: tensor {name!r} does not belong there")


def require_finite(tensors: Mapping[str, Tensor], where: Path | str) -> None:
    """Raise UserError naming the first tensor with a value that is not a finite number."""
    for name, x in tensors.items():
        if x.is_floating_point() and not x.isfinite().all():
            raise UserError(f"{where}: tensor {name!r} has values that are not finite")


def _require_vocabulary(vocab_S: Tensor | None, size: int, where: Path) -> None:
    if vocab_S is not None and not (
        bool((vocab_S[1:] > vocab_S[:-1]).all()) and vocab_S[0] >= 0 and vocab_S[-1] < size
    ):
        raise UserError(f"{where}: the draft vocabulary does not rise within 0 to {size - 1}")


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or repr(error)

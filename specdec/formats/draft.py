"""A draft on disk: `draft.safetensors`, and `drafter.json`, a card that says what it is and for
which target.

Files may come from anywhere, so nothing in them is trusted. The card is checked field by field
against the family's dataclasses, the network that it describes is laid out without memory and
compared with the header of the weights, and only then are weights read.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.context import Context
from specdec.drafters import Drafter, family
from specdec.drafters.base import Sizes
from specdec.errors import UserError, require
from specdec.files import read_record, record, replaced
from specdec.runtime.packed import is_packed, pack
from specdec.target.base import Target
from specdec.target.encoder_decoder import Seq2SeqTarget
from specdec.target.parts import Parts

FORMAT = 1
WEIGHTS, CARD = "draft.safetensors", "drafter.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # types that weights may be stored in
WHOLE = {torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}  # and those of buffers
MOST_MODULES = 1024  # layers, heads and experts that a card may ask for, of each kind


@dataclass(frozen=True)
class TargetOf:
    """The target that a draft was made for. `width`: of its hidden states; 0: not known."""

    name: str
    revision: str | None
    fingerprint: str
    vocab_size: int
    width: int = 0


@dataclass(frozen=True)
class Card:
    """What a draft's card says, checked. `notes` are kept as they were given."""

    family: str
    config: Any  # the family's `Config`
    sizes: Any  # the family's `Sizes`
    target: TargetOf
    notes: dict[str, Any]


@dataclass
class _File:
    """A card as JSON. `shape` holds the sizes."""

    format: int
    family: str
    config: dict[str, Any]
    shape: dict[str, Any]
    target: TargetOf
    notes: dict[str, Any] = field(default_factory=dict)


def save(
    folder: Path | str,
    drafter: Drafter,
    target: Parts,
    weights: Mapping[str, Tensor] | None = None,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write a draft; the folder appears whole or not at all.

    `weights` stands in for the drafter's own state dict (gathered from sharded processes);
    `notes` are kept in the card as they are. Raises UserError for a weight that is not finite.
    """
    folder = Path(folder)
    state = drafter.finished(drafter.state_dict() if weights is None else weights)
    with torch.device("meta"):  # what is on disk has the names that `load` will look for
        kept = untied(type(drafter)(drafter.config, drafter.sizes).state_dict())
    tensors = {name: state[name].detach().cpu().contiguous() for name in kept}
    require_finite(tensors, f"{folder}: not written")
    card = _File(
        format=FORMAT,
        family=drafter.config.name,
        config=dataclasses.asdict(drafter.config),
        shape=dataclasses.asdict(drafter.sizes),
        target=TargetOf(
            target.name, target.revision, target.fingerprint(), target.vocab_size, target.width
        ),
        notes=notes or {},
    )
    with replaced(folder) as partial:
        save_file(tensors, partial / WEIGHTS)
        (partial / CARD).write_text(json.dumps(dataclasses.asdict(card), indent=1))


def load(folder: Path | str, target: Target, dtype: torch.dtype | None = None) -> Drafter:
    """Read a draft for its target, in `dtype` (None: the target's), ready to draft.

    Raises UserError as `read` does, and for a draft that fails to draft a few tokens.
    """
    folder = Path(folder)
    drafter = read(folder, target)
    drafter.to(target.device, dtype or target.dtype)
    drafter.attach(target)
    if drafter.state_dict():
        _require_drafting(drafter, target, folder)
    elif type(drafter).plan(drafter.config, target) != drafter.sizes:
        raise UserError(f"{folder / CARD}: shape does not fit {target.name}: make the draft again")
    if is_packed(target.model):
        pack(drafter)
    return drafter.eval()


def read(folder: Path | str, target: Parts) -> Drafter:
    """A draft's config and weights as they are on disk, on the CPU and not attached to its target.

    Raises UserError for a folder that holds no draft, a card with a value that cannot be, a draft
    of another target, a truncated file, and, naming the tensor, for one that is missing, extra,
    or of another shape or type.
    """
    folder = Path(folder)
    card = read_card(folder)
    _require_target(card, target, folder)
    kind, where = family(card.family), folder / WEIGHTS
    try:
        with torch.device("meta"):
            planned = kind(card.config, card.sizes)
    except UserError as error:
        raise UserError(f"{folder / CARD}: {error}") from error
    except Exception as error:  # whatever transformers' and torch's own checks raise
        raise UserError(
            f"{folder / CARD}: no {card.family} can be built from this card ({_line(error)}): "
            "train the draft again"
        ) from error
    _require_header(where, untied(planned.state_dict()))
    try:
        tensors = load_file(where)
    except (SafetensorError, OSError) as error:
        raise _damaged(where, error) from error
    require_finite(tensors, where)
    drafter = kind(card.config, card.sizes)
    drafter.load_state_dict(tensors, strict=False)  # strict=False: what is tied comes along
    try:
        drafter.require_sound()
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return drafter


def digest(folder: Path | str) -> str:
    """A short hash of a draft's card and weights."""
    found = hashlib.blake2b(digest_size=12)
    for name in (CARD, WEIGHTS):
        found.update((Path(folder) / name).read_bytes())
    return found.hexdigest()


def read_card(folder: Path | str) -> Card:
    """The card of a draft folder. Raises UserError where there is none, where it is of another
    version, and, naming file and key, for a value of a wrong type or out of range."""
    folder = Path(folder)
    path = folder / CARD
    require(
        path.is_file(),
        f"{folder} holds no draft ({CARD} is missing): give the checkpoint folder of a run, such "
        "as runs/NAME/best",
    )
    file = read_record(_File, path)
    require(
        file.format == FORMAT,
        f"{path}: format {file.format} is not the one that this version reads ({FORMAT})",
    )
    try:
        kind = family(file.family)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    config: Any = record(kind.Config, file.config, f"{path}: config")
    sizes = record(kind.Sizes, file.shape, f"{path}: shape")
    if config.name != file.family:
        raise UserError(f"{path}: config: the name {config.name!r} is not {file.family!r}")
    for part, given in (("config", file.config), ("shape", file.shape)):
        _require_sane(given, f"{path}: {part}")
    _require_sizes(sizes, file.target, f"{path}: shape")
    return Card(file.family, config, sizes, file.target, file.notes)


def untied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the second name of a tensor that has two (tied embeddings)."""
    seen: set[Any] = set()
    kept = {}
    for name, x in state.items():
        place = (x.untyped_storage()._cdata, x.storage_offset(), x.shape)
        if place not in seen:
            kept[name] = x
            seen.add(place)
    return kept


def require_same(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: Path | str
) -> None:
    """Raise UserError naming the first tensor that is missing, extra or of another shape."""
    _require_shapes(
        {name: list(x.shape) for name, x in found.items()},
        {name: list(x.shape) for name, x in wanted.items()},
        where,
    )


def require_finite(tensors: Mapping[str, Tensor], where: Path | str) -> None:
    """Raise UserError naming the first tensor with a value that is not a finite number."""
    for name, x in tensors.items():
        if x.is_floating_point() and not x.isfinite().all():
            raise UserError(f"{where}: tensor {name!r} has values that are not finite")


def _require_shapes(
    found: Mapping[str, list[int]], wanted: Mapping[str, list[int]], where: Path | str
) -> None:
    for name, shape in wanted.items():
        require(name in found, f"{where}: tensor {name!r} is missing")
        if found[name] != shape:
            raise UserError(f"{where}: tensor {name!r} has shape {found[name]}, not {shape}")
    for name in found:
        require(name in wanted, f"{where}: tensor {name!r} does not belong there")


def _require_header(path: Path, wanted: Mapping[str, Tensor]) -> None:
    """Compare the tensors that a file announces with those of a network, before any is read."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: list(x.get_shape()) for name, x in slices.items()}
            types = {name: x.get_dtype() for name, x in slices.items()}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error
    _require_shapes(shapes, {name: list(x.shape) for name, x in wanted.items()}, path)
    for name, x in wanted.items():
        known = FLOATS if x.is_floating_point() else (WHOLE[x.dtype],)
        if types[name] not in known:
            raise UserError(
                f"{path}: tensor {name!r} is of type {types[name]}, expected {' or '.join(known)}"
            )


def _require_target(card: Card, target: Parts, folder: Path) -> None:
    theirs = card.target
    if theirs.vocab_size != target.vocab_size:
        raise UserError(
            f"{folder}: this draft is for a target with a vocabulary of {theirs.vocab_size} "
            f"({theirs.name}), {target.name} has {target.vocab_size}: give that target"
        )
    if theirs.fingerprint != target.fingerprint():
        raise UserError(
            f"{folder}: this draft was trained for {theirs.name} with other weights than "
            f"{target.name} has: give that target, or train a draft for this one"
        )


def _require_sizes(sizes: Sizes, target: TargetOf, where: str) -> None:
    if not sizes.target_vocab == target.vocab_size >= 1:
        raise UserError(
            f"{where}: target_vocab is {sizes.target_vocab}, the target's vocabulary has "
            f"{target.vocab_size} tokens"
        )
    if sizes.draft_vocab is not None and not 1 <= sizes.draft_vocab <= sizes.target_vocab:
        raise UserError(
            f"{where}: draft_vocab is {sizes.draft_vocab}: expected 1 to {sizes.target_vocab}"
        )


def _require_sane(given: Mapping[str, Any], where: str) -> None:
    """Raise UserError for numbers that no network has, and for counts of modules that would
    take for ever to build."""
    for key, value in _numbers(given, ""):
        most = MOST_MODULES if "layer" in key or "expert" in key or "depth" in key else 2**31
        if not abs(value) <= most:  # nor is NaN
            raise UserError(f"{where}: {key} is {str(value)[:24]}: expected at most {most}")


def _numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """All numbers within a value of JSON, each with the keys that lead to it."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(part, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for part in value:
            yield from _numbers(part, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


@torch.no_grad()
def _require_drafting(drafter: Drafter, target: Target, folder: Path) -> None:
    """Draft once, on features of zeros: a network that is whole and yet not one for this target
    shows here, not in the middle of an answer."""
    layers = target.config.num_hidden_layers if drafter.needs.layers else 0
    if any(not 0 < k <= layers for k in drafter.needs.layers):
        raise UserError(
            f"{folder}: this draft reads layers {list(drafter.needs.layers)}, and "
            f"{target.name} has {layers}: train it again"
        )
    T = 6
    ids_BT = torch.arange(T, device=target.device)[None] % target.vocab_size
    if isinstance(target, Seq2SeqTarget):  # whose texts hold a start token, or (BART) two in a row
        ids_BT[:] = (target.seq2seq.start + 1) % target.vocab_size
        ids_BT[:, 2:4] = target.seq2seq.start
    features = torch.zeros(1, T, target.width * max(1, len(drafter.needs.layers)))
    features = features.to(target.device, target.dtype)
    ctx = Context(ids_BT, features, features[..., : target.width])
    try:
        hidden = drafter.hidden(ctx, torch.tensor([[T - 1]], device=target.device), None)
        finite = not drafter.unembed(hidden[:, :, 0], 0).isnan().any()
    except Exception as error:  # a shape or a setting that torch refuses
        raise UserError(
            f"{folder}: this draft cannot draft for {target.name} ({_line(error)}): train it again"
        ) from error
    require(finite, f"{folder}: this draft's logits are not numbers: train it again")


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} cannot be read ({_line(error)}): the file is cut short or damaged; copy it again, "
        "or train the draft again"
    )


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:300] or repr(error)

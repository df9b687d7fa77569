"""A draft on disk: `draft.safetensors`, and `drafter.json`, a card that describes it and its
target. `calibration.json` is beside them once the draft's confidence has been calibrated.

Nothing in these files is trusted: the card is checked against its checksum and field by field, the
network that it describes is built on the meta device and compared with the weights' header, and
only then are weights read and compared with the checksum on the card. The calibration's checksum
includes that of the weights, so that the three files belong together.
"""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.context import Context
from specdec.drafters import family
from specdec.drafters.base import Drafter, Predictor
from specdec.errors import UserError, located, require
from specdec.files import (
    new_file,
    read_record,
    reading,
    record,
    replaced,
    require_file,
    wait_for_replacement,
    write_json,
)
from specdec.formats import draft_import
from specdec.formats.foreign_files import CONFIG
from specdec.formats.import_layout import Origin
from specdec.formats.stored_tensors import require_finite, require_same, untied
from specdec.integrity import KEY, Damaged, of_tensors
from specdec.progress import tell
from specdec.runtime.cpu.packed_linear import is_packed, pack
from specdec.sampling.confidence import Calibrations
from specdec.targets.parts import TargetParts
from specdec.targets.prompt_rendering import DEFAULT_RENDERING, PromptRendering
from specdec.targets.target import Target

FORMAT = 2
WEIGHTS, CARD = "draft.safetensors", "drafter.json"
CALIBRATION = "calibration.json"
TRAINED_ON = "trained_on.npz"  # record of training prompts; see train.data.prompts_trained_on
REMEDY = "calibrate the draft again with scripts/evaluate --calibrate"
FLOATS = ("F64", "F32", "F16", "BF16")  # types that weights may be stored in
WHOLE = {torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}  # and those of buffers
MOST_MODULES = 1024  # layers, heads and experts that a card may ask for, of each kind


@dataclass(frozen=True)
class TargetOf:
    """The target of a draft. `width` is that of its hidden states; 0: unknown."""

    name: str
    revision: str | None
    fingerprint: str
    vocab_size: int
    width: int = 0
    # rendering of prompts beyond the target's own files
    rendering: PromptRendering = DEFAULT_RENDERING


@dataclass(frozen=True)
class Card:
    """The contents of a draft's card. `notes` are kept as given."""

    format: int
    family: str
    config: Any  # the family's `Config`
    shape: Any  # the family's `Sizes`
    target: TargetOf
    notes: dict[str, Any] = field(default_factory=dict)
    weights: str = ""  # their checksum; empty: they are not compared with it
    origin: Origin | None = None  # the files that the draft, or an earlier one, was imported from


def write_draft(
    folder: Path | str,
    drafter: Drafter,
    target: TargetParts,
    weights: Mapping[str, Tensor] | None = None,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write a draft; the folder is complete or absent. `weights`, such as those gathered from
    sharded processes, replace the drafter's own state dict; `notes` go into the card unchanged.
    Raises UserError for a weight that is not finite."""
    folder = Path(folder)
    state = drafter.weights_to_save(drafter.state_dict() if weights is None else weights)
    with torch.device("meta"):  # files have the names that `load_draft` expects
        kept = untied(type(drafter)(drafter.config, drafter.sizes).state_dict())
    tensors = {name: state[name].detach().cpu().contiguous() for name in kept}
    require_finite(tensors, f"{folder}: not written")
    theirs = TargetOf(
        target.name,
        target.revision,
        target.fingerprint(),
        target.vocab_size,
        target.width,
        target.rendering,
    )
    config = drafter.config
    card = Card(
        format=FORMAT,
        family=config.name,
        config=config,
        shape=drafter.sizes,
        target=theirs,
        notes=notes or {},
        weights=of_tensors(tensors),
        origin=drafter.origin,
    )
    with replaced(folder, (WEIGHTS, CARD, CALIBRATION, TRAINED_ON)) as partial:
        save_file(tensors, partial / WEIGHTS)
        write_json(partial / CARD, asdict(card))
        if drafter.calibrations.prompts:
            write_calibrations(partial, drafter)


def copy_trained_on(draft: Path | str, *folders: Path | str) -> None:
    """Copy the record of a draft's training data, from its folder or that of its run, into other
    folders of it, if it exists."""
    sources = [place / TRAINED_ON for place in (Path(draft), Path(draft).parent)]
    path = next((path for path in sources if path.is_file()), None)
    for folder in map(Path, folders):
        if path is not None and folder.is_dir() and folder != path.parent:
            with new_file(folder / TRAINED_ON) as partial:
                shutil.copyfile(path, partial)


def write_calibrations(folder: Path | str, drafter: Drafter) -> None:
    """Write the calibrations of a draft beside its weights, in a folder from `write_draft`. Raises
    UserError as `require_calibratable` does."""
    require_calibratable(folder)
    of_weights = read_card(folder).weights
    write_json(Path(folder) / CALIBRATION, asdict(drafter.calibrations), of_weights)


def require_calibratable(folder: Path | str) -> None:
    """Raise UserError for somebody else's draft."""
    require(
        not is_foreign_draft(folder),
        f"{folder} is a draft of another trainer, and its folder is not changed: train it further "
        "with drafter.from, and calibrate the draft of that run",
    )


def load_draft(
    folder: Path | str,
    target: Target,
    dtype: torch.dtype | None = None,
    other_weights: bool = False,
) -> Drafter:
    """Load a draft for its target, in `dtype` (None: the target's), ready to draft. `other_weights`
    is that of `load_draft_with_target`. Raises
    UserError as `read_draft` does, for a draft that fails to draft a few tokens, and for one with
    adapters on the target (see `load_draft_with_target`)."""
    drafter, own = load_draft_with_target(folder, target, dtype, other_weights)
    require(
        own is target,
        f"{folder}: this draft is for a target that was adapted along with it: load both, with "
        "load_draft_with_target",
    )
    return drafter


def load_draft_with_target(
    folder: Path | str,
    target: Target,
    dtype: torch.dtype | None = None,
    other_weights: bool = False,
) -> tuple[Drafter, Target]:
    """Load a draft as `load_draft` does, and the target that it drafts for: the given one, or a
    copy of it with the adapters that were trained with the draft. With `other_weights`, as
    `read_draft` has it, prints the `note_of_other_weights`."""
    folder = Path(folder)
    stored = read_draft(folder, target, other_weights)
    if note := note_of_other_weights(folder, target):
        tell(note)
    drafter: Drafter = stored.to(target.device)
    drafter, target = drafter.with_adapters_merged(target)
    drafter.calibrations = stored.calibrations
    drafter.to(target.device, dtype or target.dtype)
    drafter.attach(target)
    if drafter.state_dict():
        require_drafting(drafter, target, folder)
    elif type(drafter).plan(drafter.config, target) != drafter.sizes:
        raise UserError(f"{folder / CARD}: shape does not fit {target.name}: make the draft again")
    if is_packed(target.model):
        pack(drafter)
    return drafter.eval(), target


def read_draft(folder: Path | str, target: TargetParts, other_weights: bool = False) -> Drafter:
    """A draft with the config and weights on disk, on the CPU and not attached to its target. With
    `other_weights`, the target may be a fine-tuned or quantised form of the draft's own.
    Raises UserError as `read_card` does, for a draft of another target, for a truncated file or a
    damaged calibration, and, naming the tensor, for one that is missing, extra, or of another shape
    or type. A draft in a public layout is read as `ForeignDraft.drafter` does."""
    if is_foreign_draft(folder):
        return draft_import.foreign_draft(folder).drafter(target)
    folder = Path(folder)
    card = read_card(folder)
    theirs, kind, path = card.target, family(card.family), folder / CARD
    require(
        theirs.vocab_size == target.vocab_size,
        f"{folder}: this draft is for {theirs.name}, with a vocabulary of {theirs.vocab_size}, but "
        f"{target.name} has {target.vocab_size}: give {theirs.name}",
    )
    require(
        other_weights or theirs.fingerprint == target.fingerprint(),
        f"{folder}: this draft was trained for {theirs.name}, with other weights, or another "
        f"config, than those of {target.name}: give the draft's own target, or train a draft for "
        "this one (drafter.from=FOLDER initialisation.other_target=true starts from that draft, "
        "and scripts/evaluate --other-target measures it as it is)",
    )
    try:
        with located(path), torch.device("meta"):
            planned = kind(card.config, card.shape)
    except UserError:
        raise
    except Exception as error:  # transformers and torch raise any error
        raise UserError(
            f"{path}: no {card.family} can be built from this card ({_line(error)}): train the "
            "draft again"
        ) from error
    tensors = _read_weights(folder / WEIGHTS, untied(planned.state_dict()))
    _require_described(card, tensors, folder / WEIGHTS)
    drafter = kind(card.config, card.shape)
    drafter.load_state_dict(tensors, strict=False)  # strict=False: tied tensors come along
    drafter.noted_alpha, drafter.origin = _alpha(card.notes), card.origin
    path = folder / CALIBRATION
    if path.exists():
        remedy = f"delete it, and {REMEDY}"
        drafter.calibrations = read_record(Calibrations, path, remedy, card.weights)
    with located(folder / WEIGHTS):
        drafter.require_sound()
    return drafter


def note_of_other_weights(folder: Path | str, target: TargetParts) -> str:
    """A note for the user if a draft was trained for other weights than the target's; else empty,
    also for a draft in a public layout, whose files do not say it."""
    theirs = read_card(folder).target
    if theirs.fingerprint in ("", target.fingerprint()):
        return ""
    return (
        f"{folder} was trained for {theirs.name}, with other weights than those of {target.name}: "
        "fewer of its tokens are accepted than with its own target"
    )


def require_undamaged_draft(folder: Path | str) -> Card:
    """The card of a draft with intact files. Raises UserError as `read_card` does, and for weights
    that cannot be read or have a wrong checksum."""
    folder = Path(folder)
    card, path = read_card(folder), folder / WEIGHTS
    require_file(path)
    try:
        with reading(path):
            tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error
    _require_described(card, tensors, path)
    return card


def digest_of_draft(folder: Path | str) -> str:
    """A short hash of a draft's card and weights."""
    if is_foreign_draft(folder):
        return draft_import.foreign_draft(folder).digest()
    hasher = hashlib.blake2b(digest_size=12)
    for name in (CARD, WEIGHTS):
        require_file(Path(folder) / name)
        hasher.update((Path(folder) / name).read_bytes())
    return hasher.hexdigest()


def is_foreign_draft(folder: Path | str) -> bool:
    """Whether a folder, or a name on a hub, is not a draft of ours, but may be one in a public
    layout."""
    return not wait_for_replacement(Path(folder) / CARD) and draft_import.is_foreign(folder)


@dataclass(frozen=True)
class Imported:
    """A draft in a public layout, or one that was trained from such a draft: its family, its
    layout, and the settings of the drafter's config that it decides."""

    family: str
    layout: str
    settings: dict[str, Any]


def imported(folder: Path | str) -> Imported | None:
    """What a draft decides because it was imported; None if it was not. Raises UserError as
    `read_card` does."""
    if is_foreign_draft(folder):
        foreign = draft_import.foreign_draft(folder)
        name, layout, settings = foreign.family, foreign.layout_name, foreign.settings
    else:
        card = read_card(folder)
        if card.origin is None:
            return None
        name, layout = card.family, card.origin.layout
        settings = {key: getattr(card.config, key) for key in card.origin.settings}
    fixed = draft_import.IMPORTS[name, layout].depths
    return Imported(name, layout, {k: x for k, x in settings.items() if k != "depth" or fixed})


def card_of_foreign(folder: Path | str) -> Card:
    """What the files of a draft in a public layout say. Its config and sizes are those of its
    target, too, and are not in it. Raises UserError as `draft_import.foreign_draft` does."""
    foreign = draft_import.foreign_draft(folder)
    rows = foreign.files.config.get("vocab_size")
    theirs = TargetOf(*foreign.of_target, "", rows if isinstance(rows, int) else 0)
    notes = {"run": f"imported from {folder}"}  # of no run that may be beside it
    return Card(FORMAT, foreign.family, foreign.settings, None, theirs, notes)


def read_card(folder: Path | str) -> Card:
    """The card of a draft folder. Raises UserError if there is none, if it is of another version,
    and, naming file and key, for a value that has the wrong type or is out of range. For a draft in
    a public layout, what its files say (`card_of_foreign`)."""
    if is_foreign_draft(folder):
        return card_of_foreign(folder)
    path = Path(folder) / CARD
    require(
        wait_for_replacement(path) and path.is_file(),
        f"{folder} holds no draft ({CARD} or {CONFIG} is missing): give the checkpoint folder of a "
        "run, such as runs/NAME/best, or a draft in a public layout",
    )
    try:
        card = read_record(Card, path)
    except Damaged as error:
        raise Damaged(
            f"{error}: copy the draft again or, if you meant to edit it, delete its key {KEY!r}"
        ) from error
    with located(path):
        known = f"format is {card.format}, but this version reads {FORMAT}: train the draft again"
        require(card.format == FORMAT, known)
        kind = family(card.family)
        keys = {*card.config} if isinstance(card.config, dict) else set()
        require(
            "start" not in keys - {f.name for f in fields(kind.Config)},
            "config has the key 'start' of an earlier version, which is now 'initialisation': "
            "train the draft again",
        )
        config: Any = record(kind.Config, card.config, "config")
        sizes = record(kind.Sizes, card.shape, "shape")
        theirs = config.name
        require(theirs == card.family, f"config.name is {theirs!r}, not {card.family!r}")
        _require_sane(card.config, "config")
        _require_sane(card.shape, "shape")
        if (origin := card.origin) is not None:
            listed = (card.family, origin.layout) in draft_import.IMPORTS
            own_keys = origin.settings.keys() <= {f.name for f in fields(kind.Config)}
            require(listed and own_keys, f"origin is of no known layout of {card.family}")
        ours, theirs = sizes.target_vocab, card.target.vocab_size
        require(
            ours == theirs >= 1,
            f"shape: target_vocab is {ours}, but the target's vocabulary has {theirs} tokens",
        )
        require(
            sizes.draft_vocab is None or 1 <= sizes.draft_vocab <= ours,
            f"shape: draft_vocab is {sizes.draft_vocab}: expected 1 to {ours}",
        )
    return replace(card, config=config, shape=sizes)


def _read_weights(path: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, if its header lists exactly those of a network."""
    require_file(path)
    try:
        with reading(path), safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            require_same(slices, wanted, path)
            for name, x in wanted.items():
                kind = slices[name].get_dtype()
                known = FLOATS if x.is_floating_point() else (WHOLE[x.dtype],)
                require(
                    kind in known,
                    f"{path}: tensor {name!r} is of type {kind}, expected {' or '.join(known)}",
                )
            tensors = {name: file.get_tensor(name) for name in slices}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error
    require_finite(tensors, path)
    return tensors


def _unreadable(path: Path, error: Exception) -> Damaged:
    return Damaged(
        f"{path} cannot be read ({_line(error)}): the file is cut short or damaged; copy it "
        "again, or train the draft again"
    )


def _require_described(card: Card, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise Damaged unless the weights are those that the card describes."""
    if card.weights and card.weights != of_tensors(tensors):
        raise Damaged(
            f"{path} is damaged, or is not the file that {CARD} describes (its checksum differs): "
            "copy the draft again, or train it again"
        )


def _require_sane(value: Any, where: str, key: str = "") -> None:
    """Raise UserError for numbers that no network has, and for numbers of modules that would take
    forever to build. `key` is the path to the value."""
    if isinstance(value, dict):
        for name, part in value.items():
            _require_sane(part, where, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for part in value:
            _require_sane(part, where, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        counts = key.endswith(("layer", "layers", "expert", "experts", "depth"))
        most = MOST_MODULES if counts else 2**31
        fits = abs(value) <= most  # NaN does not
        require(fits, f"{where}: {key} is {str(value)[:24]}: expected at most {most}")


@torch.no_grad()
def require_drafting(drafter: Drafter, target: Target, folder: Path) -> None:
    """Draft once, on hidden states of zeros. Raises UserError for a draft that fails on this
    target."""
    read = drafter.needs.layers
    layers = target.config.num_hidden_layers if read else 0
    require(
        all(0 < k <= layers for k in read),
        f"{folder}: this draft reads layers {list(read)}, but {target.name} has {layers}: "
        "train a draft for this target",
    )
    text = target.example([i % target.vocab_size for i in range(6)])
    ids_BT = torch.tensor([text], device=target.device)
    hidden_states = torch.zeros(1, 6, target.width * max(1, len(read))).to(
        target.device, target.dtype
    )
    ctx = Context(ids_BT, hidden_states, hidden_states[..., : target.width])
    try:
        finite = _finite(drafter, ctx, torch.full_like(ids_BT[:, :1], 5))
    except Exception as error:  # a shape or a setting that torch refuses
        raise UserError(
            f"{folder}: this draft cannot draft for {target.name} ({_line(error)}): train it again"
        ) from error
    require(finite, f"{folder}: this draft's logits are not numbers: train it again")


def _finite(drafter: Drafter, ctx: Context, anchors_BA: Tensor) -> bool:
    """Whether the logits of depth 0 are numbers."""
    if drafter.copies:
        drafter.copied(ctx, anchors_BA, drafter.depth)
        head = drafter.copying_head
        return head is None or _finite(head[0], ctx, anchors_BA)
    assert isinstance(drafter, Predictor)
    hidden = drafter.hidden(ctx, anchors_BA, None)
    return not drafter.unembed(hidden[:, :, 0], 0).isnan().any()


def _alpha(notes: dict[str, Any]) -> list[float]:
    """The α that training recorded in a card; empty if the card has no valid ones."""
    try:
        alpha = [float(a) for a in notes["held_out"]["by_depth"]["greedy"]]
    except (KeyError, TypeError, ValueError):
        return []
    return alpha if all(0 <= a <= 1 for a in alpha) else []


def _line(error: Exception) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split())[:300] or repr(error)

"""The checks before work begins, each as early as it can be made: of the settings and the data, of
what they ask of the target, and of what the texts ask of target and draft. A check changes nothing,
and raises UserError if something is wrong."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from specdec.decoding.config import beyond_training, require_fitting
from specdec.decoding.decode import require_room
from specdec.decoding.draft_answers import require_writes
from specdec.drafters import family
from specdec.drafters.base import Drafter
from specdec.errors import require
from specdec.files import require_writable
from specdec.formats import draft_checkpoint, draft_export
from specdec.progress import console
from specdec.targets.parts import TargetParts
from train import training_checkpoint
from train.data.conversations import DataConfig
from train.data.reader import require_readable
from train.hidden_states.store import in_megabytes
from train.initialisation import require_starts
from train.run_config import Config
from train.run_documents import RunDocuments
from train.tracked_run import TrackConfig
from train.tracking import require_tracker


def check_files(data: DataConfig, track: TrackConfig, drafts: Sequence[str | None]) -> None:
    """Everything that can be checked before the target is loaded, by one process: the data, the
    tracker and the drafts that the run reads. Raises UserError."""
    require_readable(data)
    require_tracker(track)
    for named in drafts:
        if named is not None:
            draft_checkpoint.read_card(named)


def check_target(cfg: Config, folder: Path, parts: TargetParts) -> None:
    """Everything that can be checked before a text is read: that engines serve the target where
    they are to answer for it, that the drafts that a run begins with are of this target, that the
    draft can be exported to the run's folder, and that there is room for it. Raises UserError."""
    require(
        parts.reads_pairs is None or not cfg.answering.engines,
        f"{parts.title} is {parts.reads_pairs}, which engines do not serve here: leave out "
        "answers.from and features.from",
    )
    if cfg.export is not None and draft_export.layout_names(cfg.drafter.name):
        draft_export.require_exportable(cfg.drafter, parts, cfg.export)
        draft_export.require_free(folder / "export")
    if cfg.export is not None and cfg.family.adapts_target(cfg.drafter):
        draft_export.require_free(folder / "export-target")
    require_starts(cfg.stage, cfg.drafter, parts)
    if cfg.objective.reference is not None:
        draft_checkpoint.read_draft(cfg.objective.reference, parts)
    for place in folders_of(cfg, folder):
        require_writable(place)
    _require_room_for_draft(cfg, folder, parts)


def folders_of(cfg: Config, folder: Path) -> list[Path]:
    """The folders that a run writes to, all of which exist by now."""
    places = [folder]
    if cfg.data.answers == "target":
        places.append(Path(cfg.answers.root))
    if cfg.stores_features:
        places.append(Path(cfg.features.path or cfg.features.root))
    return places


def _require_room_for_draft(cfg: Config, folder: Path, parts: TargetParts) -> None:
    """Raise UserError if a new run's disk has no room for the least that training writes: a
    checkpoint of the weights and one number for each from the optimizer, and the best draft."""
    lora = getattr(cfg.drafter, "lora", None)  # then the drafter shows its trained weights late
    if not cfg.trains or (lora and lora.rank) or training_checkpoint.steps(folder / "checkpoints"):
        return
    kind = family(cfg.drafter.name)
    sizes = kind.plan(cfg.drafter, parts)
    with torch.device("meta"):
        drafter = kind(cfg.drafter, sizes)
    weights = sum(x.numel() for x in drafter.parameters() if x.requires_grad)
    needed, free = 3 * 4 * weights, shutil.disk_usage(folder).free
    require(
        needed <= free,
        f"the checkpoints of this draft need {in_megabytes(needed)} or more, and the disk of "
        f"{folder} has {in_megabytes(free)} free: make room, or give another name= or "
        "hydra.run.dir=",
    )


def check_texts(cfg: Config, drafter: Drafter, parts: TargetParts, texts: RunDocuments) -> None:
    """Raise UserError for texts that are too long, and for decoding that would fail later."""
    documents = [*texts.train, *texts.validation]
    longest = max(parts.placed(d.ids.tolist()) for d in documents)
    for name, room in (("target", parts.positions), ("drafter", drafter.limits.positions)):
        require(
            room is None or longest <= room,
            f"a document of {longest} tokens does not fit the {room} positions of the {name}: "
            f"give data.max_length={room}",
        )
    if cfg.rounds.data.endswith("alone"):
        require_writes(drafter)
    require_fitting(cfg.decode, drafter, parts)
    if warning := beyond_training(cfg.decode, drafter):
        console.print(warning)
    prompts = [p.ids.tolist() for p in texts.prompts[: texts.measured]]
    if prompts:
        require_room(parts, prompts, cfg.decode.max_new_tokens)

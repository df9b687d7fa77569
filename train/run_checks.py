"""The checks of a user's settings, each as early as it can be made. A check changes nothing, and
raises UserError if something is wrong.

| what is checked | where | when |
| --- | --- | --- |
| a value by itself | `__post_init__` of the group's dataclass | as it is made |
| unknown keys, types, what is missing | `run_config.resolve` | as Hydra composes |
| settings that do not go together | `Config.check`, from `run_config.checked` | after that |
| that a run in this folder may go on with them | `continued.settled` | as the run begins |
| files: the data, the tracker, the drafts | `check_files` | before the target is loaded |
| what they ask of the target and the disk | `check_target` | before a text is read |
| what the texts ask of target and draft | `check_texts` | before training |
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.decoding.config import DecodeConfig, beyond_training, require_fitting
from specdec.decoding.decode import require_room
from specdec.decoding.draft_responses import require_writes_alone
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
from train.data.rendering import own_chat_template
from train.data.sequences import Prompt
from train.hidden_states.store import in_megabytes
from train.initialisation import InitialisationConfig, require_initialisation
from train.run_documents import RunDocuments
from train.tracked_run import TrackConfig
from train.tracking import require_tracker


def check_files(data: DataConfig, track: TrackConfig, drafts: Sequence[str | None]) -> None:
    """Check everything that can be checked before the target is loaded, in one process: the data,
    the tracker and the drafts that the run reads. Raises UserError."""
    require_readable(data)
    own_chat_template(data)
    require_tracker(track)
    for named in drafts:
        if named is not None:
            draft_checkpoint.read_card(named)


def check_target(
    parts: TargetParts,
    drafter: Any,
    stage: InitialisationConfig,
    reference: str | None,
    export: str | None,
    folder: Path,
    stores: Sequence[Path],
    engines: Sequence[str],
) -> None:
    """Check everything that can be checked before a text is read, for a run in `folder` that trains
    the configured `drafter`: that `engines` serve the target, that the drafts that a run begins
    with (`stage`, `reference`) are for this target, that the draft can be exported in the layout
    `export`, and that the run can write to its folder and the `stores`. Raises UserError."""
    require(
        not (engines and parts.reads_pairs is not None),
        f"{parts.title} is {parts.reads_pairs}, which engines do not serve here: leave out "
        "responses.from and hidden_states.from",
    )
    known = None if stage.draft is None else draft_checkpoint.imported(stage.draft)
    as_it_came = known is not None and known.layout == export
    if export is not None and (as_it_came or draft_export.exports(drafter.name, export)):
        if not as_it_came:
            draft_export.require_exportable(drafter, parts, export)
        draft_export.require_free(draft_export.export_path(folder, drafter.name, export))
    if export is not None and family(drafter.name).adapts_target(drafter):
        draft_export.require_free(folder / "export-target")
    require_initialisation(stage, drafter, parts)
    if reference is not None:
        draft_checkpoint.read_draft(reference, parts)
    for place in (folder, *stores):
        require_writable(place)
    _require_room_for_draft(drafter, folder, parts)


def _require_room_for_draft(config: Any, folder: Path, parts: TargetParts) -> None:
    """Raise UserError if a new run's disk has no room for the minimum that training a drafter of
    this config writes: a checkpoint of the weights and one number for each from the optimizer, and
    the best draft."""
    kind = family(config.name)
    lora = getattr(config, "lora", None)  # then the drafter shows its trained weights late
    begun = training_checkpoint.steps(folder / "checkpoints")
    if not kind.trains(config) or (lora and lora.rank) or begun:
        return
    sizes = kind.plan(config, parts)
    with torch.device("meta"):
        drafter = kind(config, sizes)
    weights = sum(x.numel() for x in drafter.parameters() if x.requires_grad)
    needed, free = 3 * 4 * weights, shutil.disk_usage(folder).free
    require(
        needed <= free,
        f"the checkpoints of this draft need {in_megabytes(needed)} or more, and the disk of "
        f"{folder} has {in_megabytes(free)} free: make room, or give another name= or "
        "hydra.run.dir=",
    )


def check_prompts(prompts: Sequence[Prompt], parts: TargetParts, decode: DecodeConfig) -> None:
    """Raise UserError for prompts that cannot be measured, before any response is generated."""
    measured = [prompt.ids.tolist() for prompt in prompts[: decode.prompts]]
    if measured:
        require_room(parts, measured, decode.max_new_tokens)


def check_texts(
    texts: RunDocuments, drafter: Drafter, parts: TargetParts, decode: DecodeConfig, alone: bool
) -> None:
    """Raise UserError for texts that are too long, and for decoding settings that would fail later:
    in the final evaluation, or in later rounds in which the draft writes `alone`."""
    documents = [*texts.train, *texts.validation]
    longest = max(parts.placed(d.ids.tolist()) for d in documents)
    for name, room in (("target", parts.positions), ("drafter", drafter.limits.positions)):
        require(
            room is None or longest <= room,
            f"a document of {longest} tokens does not fit the {room} positions of the {name}: "
            f"give data.max_length={room}",
        )
    if alone:
        require_writes_alone(drafter)
    require_fitting(decode, drafter, parts)
    if warning := beyond_training(decode, drafter):
        console.print(warning)

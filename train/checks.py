"""The checks before work begins, each as early as it can be made: of the settings and the data, of
what they ask of the target, and of what the texts ask of target and draft. A check changes nothing,
and raises UserError if something is wrong."""

from pathlib import Path

from specdec.decoding.config import beyond_training, require_fitting
from specdec.decoding.decode import require_room
from specdec.decoding.draft_answers import require_writes
from specdec.drafters.proposer import Drafter
from specdec.errors import require
from specdec.formats import draft as drafts
from specdec.formats import export
from specdec.progress import console
from specdec.targets.parts import Parts
from train.config import Config
from train.data.split import require_readable
from train.folder import require_same_run
from train.texts import Texts
from train.tracking import require_login


def check(cfg: Config, folder: Path) -> None:
    """Everything that can be checked before the target is loaded, by one process: the settings, the
    run's folder and the data. Raises UserError."""
    require_same_run(folder, cfg)
    cfg.check()
    require_readable(cfg.data)
    require_login(cfg.track)
    if cfg.objective.reference is not None:
        drafts.read_card(cfg.objective.reference)


def check_target(cfg: Config, parts: Parts) -> None:
    """Raise UserError for an export that this target does not have, and for an encoder-decoder that
    engines are to answer for."""
    require(
        not (cfg.answering.engines and parts.model.config.is_encoder_decoder),
        f"{parts.title} is an encoder-decoder, which engines do not serve here: leave out "
        "answers.from and features.from",
    )
    if cfg.export is not None and export.layout_names(cfg.drafter.name):
        export.require_exportable(cfg.drafter, parts, cfg.export)


def check_texts(cfg: Config, drafter: Drafter, parts: Parts, texts: Texts) -> None:
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

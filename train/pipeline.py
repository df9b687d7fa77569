"""The main job: from a target and conversations to a measured, exported draft."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import (
    gather_object,
    set_seed,
)
from rich.progress import Progress

from specdec.decoding.config import require_fitting
from specdec.decoding.decode import require_room
from specdec.drafters import Drafter, family
from specdec.errors import UserError, require
from specdec.files import make_folder, record, write_whole
from specdec.forcing.teacher import TeacherForcing
from specdec.formats import draft as drafts
from specdec.formats import export
from specdec.measure.evaluate import Subject, evaluate
from specdec.measure.results import Results, Training
from specdec.progress import bars, console
from specdec.report import report
from specdec.target.base import Target
from specdec.target.loading import TargetOnDemand, opening
from specdec.target.parts import Parts
from train.config import Config
from train.data.packing import pack
from train.data.split import require_readable
from train.data.template import Document
from train.features.source import Online, Source
from train.features.store import Disk, Kind, Store, megabytes
from train.folder import alone, digest, require_same_run, require_same_texts, with_dtype
from train.loop import Diverged, Keep, Outcome, train
from train.processes import accelerator_of
from train.rounds import written
from train.stages import starting
from train.texts import Texts, texts_of
from train.tracking import Tracker, curve

DIVERGED = 0.0  # the objective of a diverged trial: finite, since a sweeper dies of NaN


def run(cfg: Config, folder: Path | str | None = None) -> float:
    """Run the whole job in `folder` (default runs/NAME); returns the held-out objective.

    A folder that holds an interrupted run of the same configuration is continued; a finished
    one is not trained again. Raises UserError for what the user can mend; a run that diverged
    returns a finite worst value, and says so, only under a sweeper (see `train.py`).
    """
    folder = Path(folder or Path("runs") / cfg.name)
    cfg, reason = with_dtype(cfg, folder)
    accelerator = accelerator_of(cfg)
    main = accelerator.is_main_process
    console.quiet = not main
    if len(dtypes := set(gather_object([cfg.target.dtype]))) > 1:
        raise UserError(
            f"the machines of this run chose different dtypes for the target ({dtypes}): give "
            "target.dtype=float32 or target.dtype=bfloat16"
        )
    if accelerator.num_processes == 1:
        set_seed(cfg.loop.seed)
    require_same_run(folder, cfg)
    require(
        cfg.rounds.count == 1 or cfg.rounds.data == "target" or cfg.data.answers == "target",
        f"rounds.data={cfg.rounds.data} has prompts answered anew: give data.answers=target",
    )
    require_readable(cfg.data)  # all that can be told before the target is loaded
    make_folder(folder)
    if cfg.data.answers == "target":
        make_folder(Path(cfg.answers.root))
    if cfg.features.cache == "disk" and family(cfg.drafter.name).trainable:
        make_folder(Path(cfg.features.path or cfg.features.root))
    accelerator.wait_for_everyone()
    with alone(folder) if main else nullcontext():
        tracker = Tracker(cfg.track, folder, cfg.name, cfg, main)
        try:
            with bars(console, main) as progress:
                return _run(cfg, reason, folder, accelerator, tracker, progress)
        finally:
            tracker.close()


def _run(
    cfg: Config,
    reason: str,
    folder: Path,
    accelerator: Accelerator,
    tracker: Tracker,
    progress: Progress,
) -> float:
    started, main = time.monotonic(), accelerator.is_main_process
    with accelerator.main_process_first():  # a GGUF target is made dense once
        target = TargetOnDemand(replace(cfg.target, device=_device(cfg, accelerator)))
        fingerprint = target.parts.fingerprint()
    kind = family(cfg.drafter.name)
    if kind.reads_body:
        target.whole()
    console.print(opening(target.parts, cfg.target, reason))
    texts = texts_of(cfg, folder, target, accelerator, progress, started)
    seed = cfg.loop.seed
    drafter = starting(cfg.stage, cfg.drafter, target.parts, texts.train, seed, console)
    _require_positions(target.parts, drafter, [*texts.train, *texts.held_out])
    require_fitting(cfg.decode, drafter)
    measured = texts.prompts[: texts.measured]
    require_room(target.parts, [p.ids.tolist() for p in measured], cfg.decode.max_new_tokens)
    of = {"target": fingerprint, "training data": digest(texts.train)}
    of["held-out data"] = digest(texts.held_out)
    if cfg.stage.draft is not None:
        of["draft that training starts from"] = drafts.digest(cfg.stage.draft)
    require_same_texts(folder, of)
    if main:  # the folder is this run's from here on; a mistake before leaves it free
        described = dataclasses.asdict(cfg) | {"of": of, "records": texts.records}
        write_whole(folder / "config.json", json.dumps(described, indent=1))

    outcome: Outcome | None = None
    if kind.trainable:
        trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
        console.print(
            f"drafter {cfg.drafter.name}: {trained:,} trained parameters\n"
            f"objective: {cfg.objective}"
        )
        both = (texts.train, texts.held_out)
        data, held_out = _sources(cfg, target, drafter, both, accelerator, progress)
        forcing = TeacherForcing(drafter, target.parts, cfg.sampler, cfg.objective)
        before = target.parts.checksum()
        outcome = train(
            replace(cfg.loop, epochs=cfg.loop.epochs * cfg.rounds.count),
            cfg.optim,
            accelerator,
            forcing,
            target.parts,
            _by_round(cfg, folder, target, drafter, texts, data, accelerator, progress),
            held_out,
            folder,
            tracker,
            progress,
        )
        console.print(
            f"trained {outcome.step} of {outcome.steps} steps, {outcome.tokens:,} tokens at "
            f"{outcome.tokens_per_second:,.0f} tokens/s; best held-out τ (walked, greedy) "
            f"{outcome.held_out.tau_greedy:.3f}"
        )
        if target.parts.checksum() != before:
            raise RuntimeError("training changed the target's weights: a bug, please report it")
    elif main:
        drafts.save(folder / "best", drafter, target.parts)
    accelerator.wait_for_everyone()
    objective = outcome.objective if outcome else None
    if main:
        results = _finish(cfg, folder, target.whole(), texts, outcome, tracker, progress)
        if objective is None:
            objective = results.temperatures[0].tau.value
    accelerator.wait_for_everyone()
    return float(objective if objective is not None else DIVERGED)


def _require_positions(target: Parts, drafter: Drafter, documents: Sequence[Document]) -> None:
    longest = max(target.placed(d.ids.tolist()) for d in documents)
    rooms = {"target": target.positions, "drafter": drafter.positions}
    for name, room in rooms.items():
        if room is not None and longest > room:
            raise UserError(
                f"a document of {longest} tokens does not fit the {room} positions of the {name}: "
                f"give data.max_length={room}"
            )


def _by_round(
    cfg: Config,
    folder: Path,
    target: TargetOnDemand,
    drafter: Drafter,
    texts: Texts,
    data: Source,
    accelerator: Accelerator,
    progress: Progress,
) -> Callable[[int, Keep], Source]:
    """Where the rows of an epoch come from, by the round that it is in."""
    latest = {0: data}

    def source(epoch: int, keep: Keep) -> Source:
        number = epoch // cfg.loop.epochs
        if number not in latest:
            where = folder / "rounds" / str(number)
            missing = cfg.rounds.data != "target" and not (where / "draft").exists()
            accelerator.wait_for_everyone()  # all have seen the same
            if missing:
                keep(where / "draft")
            documents = written(
                cfg.rounds,
                number,
                where,
                target,
                texts.asked,
                texts.train,
                cfg.answers,
                accelerator,
                progress,
            )
            console.print(f"round {number + 1} of {cfg.rounds.count}, data={cfg.rounds.data}")
            latest.clear()
            (latest[number],) = _sources(cfg, target, drafter, [documents], accelerator, progress)
        return latest[number]

    return source


def _sources(
    cfg: Config,
    target: TargetOnDemand,
    drafter: Drafter,
    texts: Sequence[Sequence[Document]],
    accelerator: Accelerator,
    progress: Progress,
) -> list[Source]:
    """Where the rows of each of these sets of texts come from. With features on disk, the target's
    layers are in memory only while it reads what is missing there."""
    sides = [pack(side, cfg.data.max_length) for side in texts]
    needs, sampler = drafter.needs, cfg.sampler
    if cfg.features.cache == "online":
        return [Online(target.whole(), needs, sampler, rows) for rows in sides]
    kind = Kind.of(target.parts, needs, sampler)
    store = Store(cfg.features, kind)
    missing = store.missing([row for rows in sides for row in rows])
    if missing:
        size = megabytes(kind.bytes(sum(len(row.ids) for row in missing)))
        console.print(f"feature cache {store.folder}: {size} to come")
    world, rank = accelerator.num_processes, accelerator.process_index
    accelerator.wait_for_everyone()  # all have seen the same rows missing
    if mine := missing[rank::world]:
        store.fill(Online(target.whole(), needs, sampler, mine), progress)
    accelerator.wait_for_everyone()
    store.refresh()
    if not drafter.reads_body:
        target.release()
        drafter.attach(target.parts)
    device = target.parts.device
    return [Disk(store, needs, side, device) for side in sides]


def _finish(
    cfg: Config,
    folder: Path,
    target: Target,
    texts: Texts,
    outcome: Outcome | None,
    tracker: Tracker,
    progress: Progress,
) -> Results:
    """Measure the best draft with the decoder; report, W&B and export."""
    drafter = drafts.load(folder / "best", target)
    count = min(len(texts.prompts), texts.measured)
    task = progress.add_task("decoding", total=count * len(cfg.decode.temperatures))
    results = evaluate(
        Subject(cfg.name, target, drafter, cfg.data.path),
        [p.ids.tolist() for p in texts.prompts],
        replace(cfg.decode, prompts=texts.measured),
        lambda line: progress.update(task, advance=1, description=f"decoding  {line}"),
        [p.words for p in texts.prompts],
    )
    progress.remove_task(task)
    if outcome is not None:
        ended = record(Training, dataclasses.asdict(outcome), "the outcome of training")
        results.training = replace(ended, curve=curve(folder / "metrics.jsonl"))
    pictures = report.write(folder / "report", results)
    tracker.report(results, pictures, folder / "best")
    console.print(report.summary(results))
    console.print(f"report: {folder / 'report' / 'report.md'}")
    if cfg.export is not None and export.layout_names(cfg.drafter.name):
        where = folder / "export"
        checked = export.write(where, drafter, target, cfg.export)
        console.print(f"exported to {where} ({cfg.export}); {checked}")
    return results


def _device(cfg: Config, accelerator: Accelerator) -> str:
    return str(accelerator.device) if cfg.target.device == "auto" else cfg.target.device


__all__ = ["DIVERGED", "Diverged", "run"]

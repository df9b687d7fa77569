"""The main job: from a target and conversations to a measured, exported draft."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from uuid import uuid4

from specdec.decoding.alone import require_alone
from specdec.decoding.config import beyond_training, require_fitting
from specdec.decoding.decode import require_room
from specdec.drafters import with_copying
from specdec.drafters.base import Drafter
from specdec.drafters.capabilities import Solves
from specdec.drafters.predictor import Predictor
from specdec.errors import memory_for, require
from specdec.files import folder_for, make_folder, read_json, write_json
from specdec.forcing.teacher import TeacherForcing
from specdec.formats import draft as drafts
from specdec.formats import export
from specdec.integrity import of_value
from specdec.measure.confidence import CALIBRATING, calibrate
from specdec.measure.evaluate import Subject, evaluate
from specdec.measure.results import FILE, Results, Training
from specdec.progress import bars, console
from specdec.ranks import ALONE, Ranks
from specdec.report import report
from specdec.targets.base import Target
from specdec.targets.loading import TargetOnDemand, opening
from train import checkpoint, measurement
from train.config import Config
from train.data.packing import Row, pack
from train.data.split import require_readable
from train.data.template import Document
from train.features.source import Online, Source
from train.features.store import Disk, Store, megabytes
from train.folder import (
    alone,
    config_of,
    digest,
    portion_of,
    require_same_run,
    require_same_texts,
    with_date,
    with_dtype,
    with_share,
)
from train.job import Job
from train.loop import Keep, train
from train.portion import Portion
from train.processes import accelerator_of, from_main
from train.rounds import RoundsConfig, written
from train.stages import starting
from train.start import regress
from train.texts import Texts, texts_of
from train.tracking import Tracker, curve

LESS_AT_ONCE = (
    "lower loop.rows (and raise loop.accumulate as much, so that a step reads as many rows), "
    "objective.chunk or data.max_length; the same command continues from the last checkpoint"
)


def run(cfg: Config, folder: Path | str | None = None) -> float:
    """Run the whole job in `folder` (default runs/NAME). Returns the best held-out objective or, if
    the drafter has no weights to train, τ at the first temperature.

    An interrupted run of the same configuration is continued there. A finished one is not trained
    again, and measured again only if something has changed that its figures depend on; its report
    and export are always written again. Raises UserError for the user's mistakes, and `Diverged` if
    the loss or the gradient is not finite.
    """
    started, folder = time.monotonic(), Path(folder or Path("runs") / cfg.name)
    cfg, reason = with_dtype(cfg, folder)
    accelerator = accelerator_of(cfg)
    main = accelerator.is_main_process
    console.quiet = not main

    cfg = with_share(with_date(cfg, folder), folder)
    cfg.objective.require_complete(cfg.decode.paths)
    from_main(accelerator, lambda: _require_runnable(cfg, folder))
    processes = accelerator.num_processes
    portion = from_main(accelerator, lambda: portion_of(folder, cfg.loop, processes))
    loop, spread = from_main(accelerator, lambda: portion.shared(cfg.loop, processes))
    cfg = replace(cfg, loop=loop)

    with ExitStack() as held:
        from_main(accelerator, lambda: held.enter_context(alone(folder)))
        make_folder(folder)  # on another machine it may not be the one that is locked
        if cfg.data.answers == "target":
            held.enter_context(folder_for(Path(cfg.answers.root)))
        if cfg.stores_features:
            held.enter_context(folder_for(Path(cfg.features.path or cfg.features.root)))
        accelerator.wait_for_everyone()
        tracker = held.enter_context(closing(Tracker(folder, main)))
        progress = held.enter_context(bars(console, main))
        with accelerator.main_process_first():  # one process makes a GGUF target dense
            target = TargetOnDemand(replace(cfg.target, device=str(accelerator.device)))
            fingerprint = target.parts.fingerprint()
        if cfg.needs_layers:
            target.whole()
        console.print(opening(target.parts, cfg.target, reason))
        if cfg.export is not None and export.layout_names(cfg.drafter.name):
            layout = cfg.export
            from_main(
                accelerator, lambda: export.require_exportable(cfg.drafter, target.parts, layout)
            )
        if spread:
            console.print(spread)
        identity = from_main(accelerator, lambda: config_of(folder).get("identity") or uuid4().hex)
        job = Job(cfg, folder, accelerator, target, tracker, progress, started, identity)
        texts = texts_of(job)
        drafter = starting(cfg.stage, cfg.drafter, target.parts, texts.train, cfg.loop.seed)
        job.ranks.first(lambda: _require_possible(job, drafter, texts))
        job.ranks.first(lambda: _record(job, texts, fingerprint, portion))
        tracker.begin(cfg)

        training = _trained(job, drafter, texts)
        accelerator.wait_for_everyone()
        results = _finish(job, texts, training)
        accelerator.wait_for_everyone()
    if training is not None:
        return training.objective
    return results.temperatures[0].tau.value if results else 0.0


def _require_runnable(cfg: Config, folder: Path) -> None:
    """Everything that can be checked before the target is loaded, by one process: the settings, the
    run's folder and the data. Raises UserError."""
    require_same_run(folder, cfg)
    require(
        not cfg.rounds.answers_again or cfg.data.answers == "target",
        f"rounds.data={cfg.rounds.data} answers the prompts again: give data.answers=target",
    )
    require(
        cfg.data.rounds is None or cfg.rounds == RoundsConfig(),
        "data.rounds trains on the rounds of a log: leave out all rounds.* settings",
    )
    require(
        not cfg.trains_at_visits or cfg.budget.minutes is None,
        "budget.minutes cannot plan training on a decoder's rounds: give loop.max_tokens instead",
    )
    require_readable(cfg.data)
    if cfg.objective.reference is not None:
        drafts.read_card(cfg.objective.reference)


def _record(job: Job, texts: Texts, fingerprint: str, portion: Portion) -> None:
    """Write the run's config.json, unless the folder holds a run of other texts or models: then
    raise UserError. Until here, an error leaves the folder free for another run."""
    cfg = job.cfg
    of = {"target": fingerprint, "training data": digest(texts.train)}
    of["held-out data"] = digest(texts.held_out)
    if cfg.stage.draft is not None:
        of["draft that training starts from"] = drafts.digest(cfg.stage.draft)
    if cfg.objective.reference is not None:
        of["reference draft"] = drafts.digest(cfg.objective.reference)
    if (plan := job.folder / "plan.json").exists():
        of["plan"] = of_value(read_json(plan))
    require_same_texts(job.folder, of)
    described = asdict(cfg) | {"of": of, "records": texts.records, "identity": job.identity}
    described["loop"] |= {"rows": portion.rows, "accumulate": portion.accumulate}
    described["processes"] = portion.processes
    described["data"] |= {"held_out": texts.share}
    write_json(job.folder / "config.json", described)


def _require_possible(job: Job, drafter: Drafter, texts: Texts) -> None:
    """Raise UserError for texts that are too long, and for decoding that would fail later."""
    parts, documents = job.target.parts, [*texts.train, *texts.held_out]
    longest = max(parts.placed(d.ids.tolist()) for d in documents)
    for name, room in (("target", parts.positions), ("drafter", drafter.limits.positions)):
        require(
            room is None or longest <= room,
            f"a document of {longest} tokens does not fit the {room} positions of the {name}: "
            f"give data.max_length={room}",
        )
    if job.cfg.rounds.data.endswith("alone"):
        require_alone(drafter)
    decode = job.cfg.decode
    require_fitting(decode, drafter)
    if warning := beyond_training(decode, drafter):
        console.print(warning)
    prompts = [p.ids.tolist() for p in texts.prompts[: texts.measured]]
    require_room(parts, prompts, decode.max_new_tokens)


def _trained(job: Job, drafter: Drafter, texts: Texts) -> Training | None:
    """Train the drafter and write it to the folder's `best`. A drafter that has no weights to train
    is only written, and the result is None."""
    cfg = job.cfg
    if not cfg.trains:
        if job.main:
            drafts.save(job.folder / "best", drafter, job.target.parts)
        return None
    count = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    console.print(
        f"drafter {cfg.drafter.name}: {count:,} trainable parameters\nobjective: {cfg.objective}"
    )
    on_policy = cfg.rounds.data == "on_policy"
    first = [] if on_policy else texts.train
    data, held_out = _sources(job, drafter, [first, texts.held_out])
    parts, reference = job.target.parts, None
    if cfg.objective.reference is not None:
        reference = drafts.read(cfg.objective.reference, parts).to(parts.device)
        reference.attach(parts)
        reference.eval().requires_grad_(False)
    forcing = TeacherForcing(
        drafter, parts, cfg.sampler, cfg.objective, reference, cfg.trains_at_visits
    )
    before = job.target.parts.checksum()
    fresh = cfg.stage.draft is None and not checkpoint.steps(job.folder / "checkpoints")
    if fresh and isinstance(drafter, Solves) and drafter.regresses:
        texts_read = data
        if not data.rows:  # on-policy training makes its rows later
            (texts_read,) = _sources(job, drafter, [texts.train])
        regress(job, drafter, texts_read)
    known = {} if on_policy else {0: data}
    rows_of_round = partial(_of_round, job, drafter, texts, known)
    with memory_for("training", LESS_AT_ONCE):
        training = train(job, forcing, rows_of_round, held_out)
    if job.target.parts.checksum() != before:
        raise RuntimeError("training changed the target's weights: a bug, please report it")
    console.print(
        f"trained {training.step} of {training.steps} steps, {training.tokens:,} tokens at "
        f"{training.tokens_per_second:,.0f} tokens/s; on held-out text, the best draft should let "
        f"the target write {training.held_out.tau_greedy:.2f} tokens a pass (τ at T = 0)"
    )
    return training


def _of_round(
    job: Job, drafter: Drafter, texts: Texts, latest: dict[int, Source], epoch: int, keep: Keep
) -> Source:
    """The rows that an epoch reads: those of its round. `latest` maps the number of the latest
    round to its rows, and is updated when a new round begins."""
    rounds, number = job.cfg.rounds, epoch // job.cfg.loop.epochs
    if number not in latest:
        documents = written(job, number, texts, keep)
        console.print(f"round {number + 1} of {rounds.count}, data={rounds.data}")
        latest.clear()
        (latest[number],) = _sources(job, drafter, [documents])
    return latest[number]


def _sources(job: Job, drafter: Drafter, texts: Sequence[Sequence[Document]]) -> list[Source]:
    """A source of rows for each list of documents. If features are kept on disk, the missing ones
    are computed first; then the target's layers are freed, unless the drafter runs them."""
    cfg, target, accelerator = job.cfg, job.target, job.accelerator
    sides = [pack(side, cfg.data.max_length) for side in texts]
    needs, sampler = drafter.needs, cfg.sampler
    if not cfg.stores_features:
        return [Online(target.whole(), needs, sampler, rows) for rows in sides]
    store = Store(cfg.features, target.parts, needs, sampler)
    missing = store.missing([row for rows in sides for row in rows])
    if missing:
        size = megabytes(store.kind.bytes(sum(len(row.ids) for row in missing)))
        console.print(f"feature cache {store.folder}: {size} to be added")
    accelerator.wait_for_everyone()  # until all have seen which rows are missing
    if mine := missing[accelerator.process_index :: accelerator.num_processes]:
        with memory_for("computing the target's features", "lower data.max_length"):
            store.fill(Online(target.whole(), needs, sampler, mine), job.progress)
    accelerator.wait_for_everyone()
    store.refresh()
    if not cfg.needs_layers:
        target.release()
        drafter.attach(target.parts)

    def again(row: Row) -> None:
        """Store the features of a row that were found to be damaged."""
        with bars(console, False) as quiet:
            store.fill(Online(target.whole(), needs, sampler, [row]), quiet)
        if not cfg.needs_layers:
            target.release()

    return [Disk(store, needs, side, target.parts.device, again) for side in sides]


@memory_for(
    "measuring the draft",
    "lower decode.batch or decode.max_new_tokens; training is complete, and the same command "
    "measures again",
)
def _finish(job: Job, texts: Texts, training: Training | None) -> Results | None:
    """Calibrate and measure the best draft, unless that was done before in the same way; write and
    log a report, and export. Processes that do not see the run's folder (they may have disks of
    their own) take no part, and get None; then the first measures alone."""
    cfg, folder, ranks = job.cfg, job.folder, job.ranks
    sees = ranks.shared(range(ranks.world), lambda _: (folder / "best").is_dir())
    if not all(sees):
        if not job.main:
            return None
        ranks = ALONE
    original = job.target.whole()
    drafter, target = drafts.load_pair(folder / "best", original)
    results = ranks.first(lambda: measurement.results_of(job, texts, ranks.world))
    if results is None:
        results = _measured(job, texts, drafter, target, original, ranks)
    else:
        console.print(
            f"this run is finished and was measured with these settings before: its report is "
            f"{folder / 'report' / 'report.md'}; to measure it again, delete "
            f"{folder / 'report' / FILE}, or give scripts/evaluate {folder / 'best'}"
        )
    if training is not None:
        seen = curve(folder / "metrics.jsonl")
        results.training = replace(training, curve=seen, trained_on=str(cfg.objective))
    ranks.first(lambda: _write(job, results, drafter, target, original))
    ranks.first(lambda: measurement.note(job, texts, ranks.world))
    return results


def _measured(
    job: Job, texts: Texts, drafter: Drafter, target: Target, original: Target, ranks: Ranks
) -> Results:
    """Calibrate the best draft, and measure it with the decoder."""
    cfg, folder, also = job.cfg, job.folder, None
    prompts = [p.ids.tolist() for p in texts.prompts]
    others = prompts[texts.measured :][:CALIBRATING]
    if others and isinstance(drafter, Predictor):
        console.print(f"calibrating confidence on {len(others)} prompts that are not measured")
        drafter.calibrations = calibrate(target, drafter, others, cfg.decode, ranks)
        ranks.first(lambda: drafts.keep_calibrations(folder / "best", drafter))
    if cfg.also is not None:
        also = with_copying(drafter, cfg.also, target, cfg.decode.gamma)
        also.fit([d.ids.tolist() for d in texts.train], [d.mask.tolist() for d in texts.train])
        ranks.first(lambda: drafts.save(folder / f"with-{cfg.also}", also, target))
    return evaluate(
        Subject(cfg.name, target, drafter, cfg.data.path, also, original),
        prompts,
        replace(cfg.decode, prompts=texts.measured),
        job.progress,
        [p.words for p in texts.prompts],
        ranks=ranks,
        earlier=[p.earlier for p in texts.prompts],
    )


def _write(job: Job, results: Results, drafter: Drafter, target: Target, original: Target) -> None:
    """Write and log the report, and export the draft."""
    cfg, folder = job.cfg, job.folder
    pictures = report.write(folder / "report", results)
    job.tracker.report(results, pictures, folder / "best")
    console.print(report.summary(results))
    console.print(f"report: {folder / 'report' / 'report.md'}")
    if cfg.export is not None and export.layout_names(cfg.drafter.name):
        checked = export.write(folder / "export", drafter, target, cfg.export)
        console.print(f"exported to {folder / 'export'} ({cfg.export}); {checked}")
        if target is not original:
            export.write_target(folder / "export-target", target)
            console.print(f"exported the adapted target to {folder / 'export-target'}")

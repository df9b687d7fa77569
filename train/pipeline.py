"""The main job: from a target and conversations to a measured, exported draft. `run` reads from top
to bottom; each stage is passed what it needs."""

import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from uuid import uuid4

from accelerate import Accelerator
from rich.progress import Progress

from specdec.drafters.base import Drafter, Trainable
from specdec.errors import memory_for
from specdec.files import folder_for, make_folder
from specdec.forcing.teacher import TeacherForcing
from specdec.formats import draft_checkpoint
from specdec.integrity import of_value
from specdec.measure.results import Training
from specdec.progress import bars, console
from specdec.sampling.trees import DEEPEST
from specdec.targets.loading import TargetLoader, opening
from train import loop, training_checkpoint
from train.accelerated import accelerator_of, ranks_of
from train.budget_timing import planned
from train.data.prompts_trained_on import TrainedOn, before_this_stage
from train.data.response_files import ResponsesRead, cut_responses
from train.folder import (
    BEGAN,
    as_begun,
    config_of,
    describe,
    digest_of_settings,
    dtype_of_run,
    locked,
    note_date,
)
from train.hidden_states.filling import RunHiddenStates
from train.initialisation import earlier_drafts, initial_drafter, regress
from train.measurement import finished
from train.planning import print_plan
from train.run_checks import check_files, check_target, check_texts
from train.run_config import Config, checked
from train.run_documents import RunDocuments, documents_of_run, respond_to_shard, split_of_run
from train.shards import AFTERWARDS, note_beginning, shard_of
from train.tracking import Tracker
from train.training_rounds import draft_of_round, written

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
    cfg = checked(cfg)
    if cfg.plan:
        print_plan(cfg, Path(folder or Path("runs") / cfg.name))
        return 0.0
    started, folder = time.monotonic(), Path(folder or Path("runs") / cfg.name)
    sharing = cfg.share
    if sharing is not None and cfg.data.date is None:
        note_beginning(folder / BEGAN)
    dtype, reason = dtype_of_run(cfg.target, folder)
    accelerator = accelerator_of(replace(cfg.target, dtype=dtype), cfg.loop.precision)
    ranks, main = ranks_of(accelerator), accelerator.is_main_process
    console.quiet = not main

    # Settle: what this run keeps since it began; then check its files, before the target is loaded.
    cfg, rows, spread = as_begun(cfg, folder, dtype, ranks)
    drafts = [cfg.objective.reference, cfg.stage.draft]
    ranks.first(lambda: check_files(cfg.data, cfg.track, drafts))

    with ExitStack() as held:
        # several processes may do shares of the same run at once
        lock = folder if sharing is None else folder / "shares" / sharing.replace("/", "-of-")
        ranks.first(lambda: held.enter_context(locked(lock)))
        make_folder(folder)  # on another machine it may not be the one that is locked
        if cfg.data.answers == "target":
            held.enter_context(folder_for(Path(cfg.answers.root)))
        if cfg.stores_features:
            held.enter_context(folder_for(Path(cfg.features.path or cfg.features.root)))
        accelerator.wait_for_everyone()
        tracker = held.enter_context(Tracker(folder, main))
        progress = held.enter_context(bars(console, main))

        # Load the target, and check what the run asks of it.
        with accelerator.main_process_first():  # one process makes a GGUF target dense
            placed = replace(cfg.target, device=str(accelerator.device))
            target = TargetLoader(placed, alone=bool(cfg.features.engines))
            fingerprint = target.parts.fingerprint()
        ranks = ranks_of(accelerator, target)
        if cfg.needs_layers:
            target.whole()
        console.print(opening(target.parts, cfg.target, reason))
        ranks.first(lambda: check_target(cfg, folder, target.parts))
        if spread:
            console.print(spread)
        identity = ranks.first(lambda: config_of(folder).get("identity") or uuid4().hex)
        if sharing is None:  # before the responses: the tracker may not let the run begin
            shares = [cfg.data.held_out, cfg.data.validation]
            settings = of_value([digest_of_settings(cfg), *shares])
            ranks.first(lambda: tracker.begin_run(cfg.track, cfg.name, asdict(cfg), settings))

        # Documents: as much data as fits the budget, with the target's responses if it responds.
        # The features that it computes while it answers are kept.
        starts_from = earlier_drafts(cfg.stage, cfg.drafter)
        split = split_of_run(
            cfg.data, cfg.answers, target.parts, ranks, cfg.drafter.depth, starts_from
        )
        size, measured = planned(cfg, folder, split, target, accelerator, started)
        split.train = split.train[:size]
        hidden_states = RunHiddenStates.of_run(
            stored=cfg.features if cfg.stores_features else None,
            drafter=cfg.drafter,
            sampler=cfg.sampler,
            length=cfg.data.max_length,
            keeps_layers=cfg.needs_layers,
            target=target,
            accelerator=accelerator,
            progress=progress,
        )
        if cfg.data.answers == "target":
            ranks.first(lambda: note_date(cfg.data.date, folder))
        if cfg.answers.shard is not None:
            respond_to_shard(cfg, split, target, hidden_states.store, accelerator, progress)
            return 0.0
        texts = documents_of_run(
            cfg=cfg,
            split=split,
            measured=measured,
            target=target,
            store=hidden_states.store,
            accelerator=accelerator,
            progress=progress,
            responses_read=ResponsesRead(folder),
        )
        if (shard := shard_of("features.shard", cfg.features.shard)) is not None:
            hidden_states.fill_shard(shard, [texts.train, texts.validation])
            console.print(f"features: {shard} is done; {AFTERWARDS} features.shard")
            return 0.0

        # Initialise: fresh weights, or those of an earlier draft. Now the folder is this run's.
        drafter = initial_drafter(cfg.stage, cfg.drafter, target.parts, texts.train, cfg.loop.seed)
        ranks.first(lambda: check_texts(cfg, drafter, target.parts, texts))
        ranks.first(lambda: describe(cfg, folder, identity, rows, fingerprint, texts))
        earlier = before_this_stage(starts_from)
        ranks.first(lambda: TrainedOn.of_texts(texts.train).after(earlier).write(folder))

        # Train, round by round.
        training = None
        if cfg.trains:
            with memory_for("training", LESS_AT_ONCE):
                training = _trained(
                    cfg=cfg,
                    folder=folder,
                    identity=identity,
                    drafter=drafter,
                    target=target,
                    texts=texts,
                    hidden_states=hidden_states,
                    accelerator=accelerator,
                    tracker=tracker,
                    progress=progress,
                )
        elif main:
            draft_checkpoint.write_draft(
                folder / "best", drafter, target.parts, notes={"run": identity}
            )
        accelerator.wait_for_everyone()

        # Measure, report, export.
        results = finished(cfg, folder, texts, training, target, ranks, tracker, progress)
        accelerator.wait_for_everyone()
    if training is not None:
        return training.objective
    return results.asked[0].tau.value if results else 0.0


def _trained(
    cfg: Config,
    folder: Path,
    identity: str,
    drafter: Drafter,
    target: TargetLoader,
    texts: RunDocuments,
    hidden_states: RunHiddenStates,
    accelerator: Accelerator,
    tracker: Tracker,
    progress: Progress,
) -> Training:
    """Train the drafter, and write it to the folder's `best`."""
    rounds = cfg.rounds
    count = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    console.print(
        f"drafter {cfg.drafter.name}: {count:,} trainable parameters\nobjective: {cfg.objective}"
    )
    on_policy = rounds.data == "on_policy"  # then every round, the first too, writes its own texts
    source, validation = hidden_states.sources(
        drafter, [[] if on_policy else texts.train, texts.validation]
    )
    parts, reference = target.parts, None  # not earlier: the target's layers may be freed now
    if cfg.objective.reference is not None:
        reference = draft_checkpoint.read_draft(cfg.objective.reference, parts).to(parts.device)
        reference.attach(parts)
        reference.eval().requires_grad_(False)
    forcing = TeacherForcing(
        drafter, parts, cfg.sampler, cfg.objective, reference, cfg.trains_at_visits
    )
    before = parts.checksum()
    trained = ranks_of(accelerator).first(lambda: training_checkpoint.steps(folder / "checkpoints"))
    assert isinstance(drafter, Trainable)
    if cfg.stage.draft is None and not trained and drafter.closed_form_start:
        (known,) = hidden_states.sources(drafter, [texts.train]) if on_policy else (source,)
        regress(drafter, known, cfg.data.max_length, accelerator, progress)
    gamma = min(cfg.decode.deepest(drafter.depth), drafter.limits.depth or DEEPEST)
    learner = loop.prepare_learner(
        forcing=forcing,
        parts=parts,
        cfg=cfg.loop,
        schedule=cfg.optim,
        folder=folder,
        run=identity,
        accelerator=accelerator,
        tracker=tracker,
        gamma=gamma,
    )
    whole = replace(cfg.loop, epochs=cfg.loop.epochs * rounds.count)
    for number in range(rounds.count):
        if number and learner.ended:
            break
        if number or on_policy:
            if (draft := draft_of_round(rounds, folder, number)) is not None:
                learner.write_round_draft(draft)
            documents = written(
                cfg=rounds,
                answers=cfg.answering,
                number=number,
                documents=texts.train,
                asked=texts.asked,
                draft=draft,
                target=target,
                accelerator=accelerator,
                progress=progress,
                responses_read=ResponsesRead(folder),
            )
            console.print(f"round {number + 1} of {rounds.count}, data={rounds.data}")
            console.print(str(cut_responses(documents, parts.eos, cfg.answers)))
            (source,) = hidden_states.sources(drafter, [documents])
        epochs = range(number * cfg.loop.epochs, (number + 1) * cfg.loop.epochs)
        loop.train(learner, source, validation, whole, cfg.optim, epochs, tracker, progress)
    loop.finish(learner, validation, whole, tracker)
    training = loop.trained(learner)
    if parts.checksum() != before:
        raise RuntimeError("training changed the target's weights: a bug, please report it")
    console.print(
        f"trained {training.step} of {training.steps} steps, {training.tokens:,} tokens at "
        f"{training.tokens_per_second:,.0f} tokens/s; on held-out text, the best draft has a "
        f"simulated τ of {training.held_out.tau_greedy:.2f} (T = 0, in chains "
        f"of {training.held_out.gamma or drafter.depth})"
    )
    return training

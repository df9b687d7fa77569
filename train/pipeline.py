"""The main job: from a target and conversations to a measured, exported draft. `run` reads from top
to bottom; each stage gets only what it needs. `fill_shard` is another job with the same first
stages: a part of the work before training, for independent processes or machines."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.progress import Progress

from specdec.drafters.base import Trainable
from specdec.errors import memory_for
from specdec.files import folder_for, make_folder
from specdec.forcing.teacher import TeacherForcing
from specdec.formats import draft_checkpoint
from specdec.integrity import of_value
from specdec.measure.results import Training
from specdec.progress import bars, console
from specdec.ranks import Ranks
from specdec.sampling.trees import DEEPEST
from specdec.targets.loading import TargetLoader, opening
from train import loop, training_checkpoint
from train.accelerated import ranks_of
from train.budget import Budget, shares_of_run
from train.continued import SettledRun, digest_of_settings, note_beginning, note_date, settled
from train.data.lengths import advice_on_rows
from train.data.prompts_trained_on import TrainedOn, before_this_stage
from train.data.rendering import prompt_rendering
from train.data.response_files import ResponsesConfig, ResponsesRead, cut_responses
from train.data.responses import documents_with_responses
from train.data.split import DataSplit
from train.folder import (
    BEGAN,
    chat_template_of_run,
    config_of,
    describe,
    locked,
    note_chat_template,
)
from train.hidden_states.batches import BatchSource
from train.hidden_states.filling import RunHiddenStates
from train.hidden_states.store import HiddenStateStore
from train.initialisation import (
    earlier_drafts,
    initial_drafter,
    initialise_in_closed_form,
    reference_draft,
)
from train.loop import Learner
from train.measurement import FinalSettings, finished
from train.run_checks import check_files, check_prompts, check_target, check_texts
from train.run_config import Config
from train.run_documents import RunDocuments, documents_of_run, fill_in_time, split_of_run
from train.shards import AFTERWARDS, shard_of
from train.tracking import Tracker
from train.training_rounds import RoundsConfig, draft_of_round, written

LESS_AT_ONCE = (
    "lower loop.rows (and raise loop.accumulate as much, so that a step reads as many rows), "
    "loss.chunk or data.max_length; the same command continues from the last checkpoint"
)
TEXT_ALONE = (
    "hidden_states.mode=none: training does not run the target; only held-out evaluation and the "
    "final measurement do"
)


def run(
    cfg: Config, folder: Path | str | None = None, now: Callable[[], float] = time.monotonic
) -> float:
    """Run the complete job of a checked configuration in `folder` (default runs/NAME). Returns the
    best held-out objective or, if the drafter has no weights to train, τ at the first temperature.

    An interrupted run of the same configuration is continued there. A finished one is not trained
    again, and is measured again only if its figures would change; its report and export are always
    written again. `now` is the clock of `budget.minutes`. Raises UserError for the user's mistakes,
    and `Diverged` if the loss or the gradient is not finite.
    """
    started, folder = now(), Path(folder or Path("runs") / cfg.name)
    with opened(cfg, folder, lock=folder) as job:
        cfg, target, ranks, tracker = job.settled.cfg, job.target, job.ranks, job.tracker
        accelerator, progress = job.settled.accelerator, job.progress
        identity = ranks.first(lambda: config_of(folder).get("identity") or uuid4().hex)
        # before the responses: the tracker may not let the run begin
        shares = [cfg.data.held_out, cfg.data.validation]
        digest = of_value([digest_of_settings(cfg), *shares])
        ranks.first(lambda: tracker.begin_run(cfg.track, cfg.name, asdict(cfg), digest))

        # Documents: as much data as fits the budget, with the target's responses if it responds.
        # The hidden states that it computes while it responds are kept.
        split = job.split()
        ranks.first(lambda: check_prompts(split.prompts, target.parts, cfg.decode))
        budget = Budget(
            cfg.budget,
            folder,
            settings=digest_of_settings(cfg),
            begun=ranks.first(lambda: bool(config_of(folder))),
            ranks=ranks,
            shares=shares_of_run(cfg.writes_texts, cfg.rounds_with_texts, cfg.trains),
            now=now,
            started=started,
        )
        hidden_states = job.hidden_states()
        store = hidden_states.store if cfg.responses_bring_hidden_states else None
        if cfg.data.responses == "target":
            ranks.first(lambda: note_date(cfg.data.date, folder))
        texts = job.documents(split, store, folder, budget)
        fill_in_time(texts, split, hidden_states, budget, cfg.rounds, cfg.data.limit)

        # Initialise: fresh weights, or those of an earlier draft. Now the folder is this run's.
        drafter = initial_drafter(
            cfg.initialisation, cfg.drafter, target.parts, texts.train, cfg.loop.seed
        )
        alone = cfg.rounds.data.endswith("alone")
        drafts = {"draft that training starts from": cfg.initialisation.draft}
        drafts["reference draft"] = cfg.loss.reference

        def note_run() -> None:
            check_texts(texts, drafter, target.parts, cfg.decode, alone)
            note_chat_template(folder, target.rendering.chat_template)
            describe(
                folder,
                identity,
                job.settled.settings_to_record(),
                drafts,
                job.fingerprint,
                texts,
                target.rendering.chat_template,
            )
            TrainedOn.of_texts(texts.train).after(before_this_stage(job.starts_from)).write(folder)

        ranks.first(note_run)

        # Train: initialise in closed form if the drafter can, then step by step.
        training = None
        if cfg.trains:
            assert isinstance(drafter, Trainable)
            with memory_for("training", LESS_AT_ONCE):
                count = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
                console.print(
                    f"drafter {cfg.drafter.name}: {count:,} trainable parameters\nloss: {cfg.loss}"
                )
                rows = cfg.loop.rows * cfg.loop.accumulate * accelerator.num_processes
                lengths = [len(document.ids) for document in texts.train]
                if advice := advice_on_rows(lengths, cfg.data.longest_document, rows):
                    console.print(advice)
                # on-policy rounds generate all that they train on, even the first
                on_policy = cfg.rounds.data == "on_policy"
                if alone_on_text := cfg.trains_on_text_alone:
                    (validation,) = hidden_states.sources(drafter, [texts.validation])
                    source = hidden_states.text_source(drafter, texts.train)
                    console.print(TEXT_ALONE)
                else:
                    source, validation = hidden_states.sources(
                        drafter, [[] if on_policy else texts.train, texts.validation]
                    )
                parts = target.parts  # not earlier: the target's layers may be freed now
                reference = reference_draft(cfg.loss.reference, parts)
                forcing = TeacherForcing(
                    drafter,
                    parts,
                    cfg.sampler,
                    cfg.loss,
                    reference,
                    visited=cfg.trains_at_visits,
                    text_alone=alone_on_text,
                )
                before = parts.checksum()
                begun = ranks.first(lambda: training_checkpoint.steps(folder / "checkpoints"))
                if (
                    cfg.initialisation.draft is None
                    and not begun
                    and drafter.closed_form_initialisation
                ):
                    known = source
                    if on_policy:
                        (known,) = hidden_states.sources(drafter, [texts.train])
                    initialise_in_closed_form(
                        drafter, known, cfg.data.longest_document, accelerator, progress
                    )
                learner = loop.prepare_learner(
                    forcing=forcing,
                    parts=parts,
                    cfg=replace(cfg.loop, epochs=cfg.loop.epochs * cfg.rounds.count),
                    schedule=cfg.optim,
                    held_out=validation,
                    folder=folder,
                    run=identity,
                    accelerator=accelerator,
                    tracker=tracker,
                    gamma=min(cfg.decode.deepest(drafter.depth), drafter.limits.depth or DEEPEST),
                )
                training = trained_in_rounds(
                    learner=learner,
                    rounds=cfg.rounds,
                    texts=texts,
                    responses=cfg.response_generation,
                    source=source,
                    hidden_states=hidden_states,
                    budget=budget,
                )
                if parts.checksum() != before:
                    raise RuntimeError(
                        "training changed the target's weights: a bug, please report it"
                    )
            budget.end_training()
        elif ranks.rank == 0:
            draft_checkpoint.write_draft(
                folder / "best", drafter, target.parts, notes={"run": identity}
            )
        accelerator.wait_for_everyone()

        # Measure, report, export.
        settings = FinalSettings(
            name=cfg.name,
            data=cfg.data.name,
            decode=cfg.decode,
            combine_with=cfg.combine_with,
            export=cfg.export,
            needs_layers=cfg.needs_layers,
            packed=cfg.target.packed,
            serve_in=cfg.serve_in,
            export_reference=cfg.export_reference,
        )
        results = finished(
            settings, folder, texts, training, target, ranks, tracker, progress, budget
        )
        accelerator.wait_for_everyone()
    if training is not None:
        return training.objective
    return results.asked[0].tau.value if results else 0.0


def fill_shard(cfg: Config, folder: Path | str | None = None) -> None:
    """Fill the shard of a checked configuration: generate a part of the responses
    (`responses.shard`), or compute a part of the hidden states (`hidden_states.shard`), as the run
    in `folder` (default runs/NAME) would. Several processes may fill shards of a run at once.
    Raises UserError for the user's mistakes."""
    folder = Path(folder or Path("runs") / cfg.name)
    assert cfg.share is not None
    if cfg.data.date is None:
        note_beginning(folder / BEGAN)
    with opened(cfg, folder, lock=folder / "shares" / cfg.share.replace("/", "-of-")) as job:
        cfg, target, ranks = job.settled.cfg, job.target, job.ranks
        accelerator, progress = job.settled.accelerator, job.progress
        split = job.split()
        hidden_states = job.hidden_states()
        store = hidden_states.store if cfg.responses_bring_hidden_states else None
        if cfg.data.responses == "target":
            ranks.first(lambda: note_date(cfg.data.date, folder))

        if (shard := shard_of("responses.shard", cfg.responses.shard)) is not None:
            if store is not None:
                store.prepare(0)
            for prompts in (split.train if cfg.reads_plain_responses else [], split.validation):
                if prompts:
                    documents_with_responses(
                        target, prompts, cfg.response_generation, accelerator, progress, store
                    )
            console.print(f"responses: {shard} is done; {AFTERWARDS} responses.shard")
        elif (shard := shard_of("hidden_states.shard", cfg.hidden_states.shard)) is not None:
            texts = job.documents(split, store, folder)
            hidden_states.fill_shard(shard, [texts.train, texts.validation])
            console.print(f"hidden states: {shard} is done; {AFTERWARDS} hidden_states.shard")


@dataclass
class OpenJob:
    """A job whose folder is locked and whose target is loaded."""

    settled: SettledRun
    target: TargetLoader
    fingerprint: str  # fingerprint of the target
    ranks: Ranks
    tracker: Tracker
    progress: Progress

    @property
    def starts_from(self) -> list[Path]:
        """The folders of the drafts that training starts from."""
        cfg = self.settled.cfg
        return earlier_drafts(cfg.initialisation, cfg.drafter)

    def split(self) -> DataSplit[Any]:
        """The data of the run, split; prints a summary. Raises UserError as `split_of_run`."""
        cfg = self.settled.cfg
        return split_of_run(
            cfg.data,
            cfg.responses,
            self.target.parts,
            self.ranks,
            cfg.drafter.depth,
            self.starts_from,
        )

    def documents(
        self,
        split: DataSplit[Any],
        store: HiddenStateStore | None,
        folder: Path,
        budget: Budget | None = None,
    ) -> RunDocuments:
        """The texts of the run in `folder`, with responses and hidden states (see
        `documents_of_run`)."""
        cfg, responds = self.settled.cfg, self.settled.cfg.data.responses == "target"
        return documents_of_run(
            split=split,
            measured=cfg.decode.prompts,
            responses=cfg.response_generation if responds else None,
            reads_training=cfg.reads_plain_responses,
            from_log=bool(cfg.data.decoding_log),
            target=self.target,
            store=store,
            accelerator=self.settled.accelerator,
            progress=self.progress,
            responses_read=ResponsesRead(folder),
            budget=budget,
        )

    def hidden_states(self) -> RunHiddenStates:
        """The source of the target's hidden states for the run."""
        cfg = self.settled.cfg
        return RunHiddenStates.of_run(
            stored=cfg.hidden_states if cfg.stores_held_out else None,
            held_out_alone=cfg.trains_on_text_alone,
            drafter=cfg.drafter,
            sampler=cfg.sampler,
            length=cfg.data.longest_document,
            keeps_layers=cfg.needs_layers,
            target=self.target,
            accelerator=self.settled.accelerator,
            progress=self.progress,
        )


@contextmanager
def opened(cfg: Config, folder: Path, lock: Path) -> Iterator[OpenJob]:
    """Begin a job of the run in `folder`, and hold the `lock` during the block: fix its
    configuration, check its files, load the target, and check that the target supports the run.
    Raises UserError for the user's mistakes."""
    run = settled(cfg, folder)
    cfg, accelerator = run.cfg, run.accelerator
    ranks, main = ranks_of(accelerator), accelerator.is_main_process
    console.quiet = not main
    drafts = [cfg.loss.reference, cfg.initialisation.draft]
    ranks.first(lambda: check_files(cfg.data, cfg.track, drafts))
    chat_template = ranks.first(lambda: chat_template_of_run(cfg.data, folder))
    with ExitStack() as held:
        ranks.first(lambda: held.enter_context(locked(lock)))
        make_folder(folder)  # on another machine it may not be the one that is locked
        for store in cfg.stores:
            held.enter_context(folder_for(store))
        accelerator.wait_for_everyone()
        tracker = held.enter_context(Tracker(folder, main))
        progress = held.enter_context(bars(console, main))

        with accelerator.main_process_first():  # one process makes a GGUF target dense
            placed = replace(cfg.target, device=str(accelerator.device))
            target = TargetLoader(placed, alone=bool(cfg.hidden_states.engines))
            fingerprint = target.parts.fingerprint()
        rendering = prompt_rendering(cfg.data, target.parts.tokenizer, chat_template)
        target.render_prompts_with(rendering)
        ranks = ranks_of(accelerator, target)
        if cfg.needs_layers:
            target.whole()
        console.print(opening(target.parts, cfg.target, run.dtype_reason))
        ranks.first(
            lambda: check_target(
                parts=target.parts,
                drafter=cfg.drafter,
                stage=cfg.initialisation,
                reference=cfg.loss.reference,
                export=cfg.export,
                folder=folder,
                stores=cfg.stores,
                engines=cfg.response_generation.engines,
            )
        )
        for line in [*run.decided, *([run.spread] if run.spread else [])]:
            console.print(line)
        yield OpenJob(run, target, fingerprint, ranks, tracker, progress)


def trained_in_rounds(
    learner: Learner,
    rounds: RoundsConfig,
    texts: RunDocuments,
    responses: ResponsesConfig,
    source: BatchSource,
    hidden_states: RunHiddenStates,
    budget: Budget,
) -> Training:
    """Train in rounds, each with a part of the learner's epochs; the best draft goes to the run's
    `best`. The first round reads the rows of `source`; with on-policy training, every round trains
    on its own documents."""
    folder, progress = learner.folder, hidden_states.progress
    on_policy, drafter = rounds.data == "on_policy", learner.forcing.drafter
    each = learner.cfg.epochs // rounds.count
    for number in range(rounds.count):
        if number and learner.ended:
            break
        if number or on_policy:
            if (draft := draft_of_round(rounds, folder, number)) is not None:
                learner.write_round_draft(draft)
            documents = written(
                cfg=rounds,
                responses=responses,
                number=number,
                documents=texts.train,
                asked=texts.asked,
                draft=draft,
                target=hidden_states.target,
                accelerator=learner.accelerator,
                progress=progress,
                budget=budget,
                responses_read=ResponsesRead(folder),
                stored=hidden_states.store is not None,
            )
            stage = f"texts of round {number + 1}"
            if rounds.writes_texts(responses.sampler.temperature)[number]:
                documents = hidden_states.fill_in_time(
                    documents, budget, stage, stage, floor=budget.cfg.floor
                )
            console.print(f"round {number + 1} of {rounds.count}, data={rounds.data}")
            parts = learner.parts
            console.print(str(cut_responses(documents, parts.eos, responses, parts.positions)))
            (source,) = hidden_states.sources(drafter, [documents])
        learner.time = budget.training(number, rounds.count) or learner.time
        loop.train(learner, source, range(number * each, (number + 1) * each), progress)
    loop.finish(learner, progress)
    training = loop.trained(learner)
    console.print(
        f"trained {training.step} of {training.steps} steps, {training.tokens:,} tokens at "
        f"{training.tokens_per_second:,.0f} tokens/s; on held-out text, the best draft has a "
        f"simulated τ of {training.held_out.tau_greedy:.2f} (T = 0, in chains "
        f"of {training.held_out.gamma or drafter.depth})"
    )
    return training

"""The main job: from a target and conversations to a measured, exported draft."""

import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from rich.console import Console
from rich.progress import Progress

from specdec.decoding.config import require_fitting
from specdec.decoding.decode import require_room
from specdec.drafters import Drafter, family
from specdec.errors import UserError, require
from specdec.files import make_folder, read_json, read_record, record, write_whole
from specdec.forcing.teacher import TeacherForcing
from specdec.formats import draft as drafts
from specdec.formats import export
from specdec.measure.evaluate import Subject, evaluate
from specdec.measure.results import Results, Training
from specdec.progress import bars
from specdec.report import report
from specdec.runtime.probes import native_dtype
from specdec.target.base import Target
from specdec.target.loading import TargetOnDemand, opening, resolved
from specdec.target.parts import Parts
from train import optim
from train.config import Config, with_objective
from train.data.answers import answered
from train.data.packing import pack
from train.data.sources import require_readable
from train.data.split import split_documents, split_prompts
from train.data.template import Document, Prompt, prompt_of
from train.features.decoded import Decoded
from train.features.source import Online, Source
from train.features.store import Disk, Kind, Store, megabytes
from train.loop import Diverged, Keep, Outcome, train
from train.plan import POOR, Plan, Work, fitted, measured
from train.rounds import written
from train.stages import StageConfig, starting
from train.tracking import Tracker, curve

console = Console(highlight=False, soft_wrap=True)
# of a configuration, whose values make a run what it is
GROUPS = ["target", "drafter", "stage", "data", "answers", "sampler", "objective", "optim", "loop"]
DIVERGED = 0.0  # the objective of a diverged trial: finite, since a sweeper dies of NaN


@dataclasses.dataclass
class Texts:
    """What training and evaluation read."""

    train: list[Document]
    held_out: list[Document]
    prompts: list[Prompt]  # held out, for the decoder
    records: int  # of the data that were read
    asked: list[Prompt] = dataclasses.field(default_factory=list)  # whose answers `train` has


def run(cfg: Config, folder: Path | str | None = None) -> float:
    """Run the whole job in `folder` (default runs/NAME); returns the held-out objective.

    A folder that holds an interrupted run of the same configuration is continued; a finished
    one is not trained again. Raises UserError for what the user can mend; a run that diverged
    returns a finite worst value, and says so, only under a sweeper (see `train.py`).
    """
    folder = Path(folder or Path("runs") / cfg.name)
    cfg, reason = _with_dtype(cfg, folder)
    accelerator = _accelerator(cfg)
    main = accelerator.is_main_process
    console.quiet = not main
    if len(dtypes := set(gather_object([cfg.target.dtype]))) > 1:
        raise UserError(
            f"the machines of this run chose different dtypes for the target ({dtypes}): give "
            "target.dtype=float32 or target.dtype=bfloat16"
        )
    if accelerator.num_processes == 1:
        set_seed(cfg.loop.seed)
    _require_same_run(folder, cfg)
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


def _accelerator(cfg: Config) -> Accelerator:
    """The processes as `accelerate launch` started them, plain or sharded.

    accelerate 1.15 shards on accelerators only: asked for FSDP on CPU processes it replicates the
    model without a word. Its FSDP2 runs there as well once its state says so, which no public
    option does. Every process starts from the same weights: they need not be sent around.
    """
    patient = InitProcessGroupKwargs(timeout=timedelta(days=1))  # for the slowest process
    sharding = None
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        require(
            os.environ.get("FSDP_VERSION") == "2",
            "drafters are sharded by FSDP2: give --fsdp_version 2 to accelerate launch",
        )
        sharding = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    AcceleratorState._reset_state()  # an earlier run in this process may have another precision
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=_precision(cfg),
        kwargs_handlers=[patient],
        fsdp_plugin=sharding,
    )
    if sharding and accelerator.distributed_type is DistributedType.MULTI_CPU:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = sharding
    return accelerator


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a run's folder; UserError where another process does."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is running in {folder}: wait for it, or give another name="
            ) from error
        yield


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
    texts = _texts(cfg, folder, target, accelerator, progress, started)
    seed = cfg.loop.seed
    drafter = starting(cfg.stage, cfg.drafter, target.parts, texts.train, seed, console)
    _require_positions(target.parts, drafter, [*texts.train, *texts.held_out])
    require_fitting(cfg.decode, drafter)
    measured = texts.prompts[: cfg.decode.prompts]
    require_room(target.parts, [p.ids.tolist() for p in measured], cfg.decode.max_new_tokens)
    of = {"target": fingerprint, "training data": _digest(texts.train)}
    of["held-out data"] = _digest(texts.held_out)
    if cfg.stage.draft is not None:
        of["draft that training starts from"] = drafts.digest(cfg.stage.draft)
    _require_same_texts(folder, of)
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


def _texts(
    cfg: Config,
    folder: Path,
    target: TargetOnDemand,
    accelerator: Accelerator,
    progress: Progress,
    started: float,
) -> Texts:
    """Conversations as documents: with the data's answers, or with the target's own; as many as
    fit the budget of a run that began at `started`."""

    def fitting(train: Sequence[Document | Prompt], held_out: Sequence[Document | Prompt]) -> int:
        return _fitting(cfg, folder, target, train, held_out, accelerator, started)

    tokenizer = target.parts.tokenizer
    if cfg.data.answers == "data":
        texts = split_documents(cfg.data, tokenizer)
        tally = texts.tally
        found = [prompt_of(c, tokenizer, cfg.data.max_prompt) for c in texts.conversations]
        made = Texts(
            texts.train[: fitting(texts.train, texts.held_out)],
            texts.held_out,
            [p for p in found if not isinstance(p, str)],
            tally.read,
        )
        if why := Counter(p for p in found if isinstance(p, str)):
            said = ", ".join(f"{n:,} {reason}" for reason, n in why.most_common())
            require(bool(made.prompts), f"{cfg.data.path}: no held-out prompt to decode: {said}")
            console.print(f"held out, but not decoded: {said}")
    else:
        split = split_prompts(cfg.data, tokenizer)
        tally = split.tally
        _require_both(split.train, split.held_out)  # before hours of answering
        longest = max(len(p.ids) for p in [*split.train, *split.held_out])
        if longest + cfg.answers.max_new_tokens > cfg.data.max_length:
            raise UserError(
                f"a prompt of {longest} tokens and answers.max_new_tokens="
                f"{cfg.answers.max_new_tokens} do not fit data.max_length={cfg.data.max_length}: "
                "raise the last, or lower data.max_prompt or answers.max_new_tokens"
            )
        keep = _keeping(cfg, target)
        asked = split.train[: fitting(split.train, split.held_out)]
        made = Texts(
            answered(target, asked, cfg.answers, accelerator, progress, keep),
            answered(target, split.held_out, cfg.answers, accelerator, progress, keep),
            split.held_out,
            tally.read,
            asked,
        )
    console.print(f"conversations from {cfg.data.path}\n{tally}")
    _require_both(made.train, made.held_out)
    for name, documents in (("train", made.train), ("held out", made.held_out)):
        console.print(
            f"{name}: {len(documents):,} documents, {sum(len(d.ids) for d in documents):,} tokens, "
            f"{sum(int(d.mask.sum()) for d in documents):,} of them the assistant's"
        )
    return made


def _keeping(cfg: Config, target: TargetOnDemand) -> Decoded | None:
    """What stores the features of answers as they are decoded, where features are stored at all."""
    kind = family(cfg.drafter.name)
    if not kind.trainable or cfg.features.cache != "disk":
        return None
    with torch.device("meta"):
        needs = kind(cfg.drafter, kind.plan(cfg.drafter, target.parts)).needs
    store = Store(cfg.features, Kind.of(target.parts, needs, cfg.sampler))
    store.prepare(0)
    return Decoded(store, needs, cfg.sampler)


def _fitting(
    cfg: Config,
    folder: Path,
    target: TargetOnDemand,
    train: Sequence[Document | Prompt],
    held_out: Sequence[Document | Prompt],
    accelerator: Accelerator,
    started: float,
) -> int:
    """How many training conversations fit `cfg.budget`, printed with the time that each stage
    should take. A resumed run keeps the number in its plan.json."""
    path = folder / "plan.json"
    if path.exists():
        kept = read_record(Plan, path)
        console.print(f"{path}: {kept.conversations:,} training conversations, as planned before")
        return kept.conversations
    if cfg.budget.minutes is None or not train or not held_out:
        return len(train)
    console.print(f"budget: {cfg.budget.minutes:g} minutes; timing this machine for some seconds")
    theirs = cfg.data.answers == "target"
    batch = cfg.answers.batch if theirs else cfg.loop.rows
    body = target.whole()
    rehearsed = _rehearsal(cfg, body, train, accelerator)
    speeds = measured(body, [t.ids.tolist() for t in train], batch, rehearsed)
    evaluated = min(cfg.decode.prompts, len(held_out)) * cfg.decode.max_new_tokens
    work = Work(
        epochs=cfg.loop.epochs * cfg.rounds.count if family(cfg.drafter.name).trainable else 0,
        new=cfg.answers.max_new_tokens if theirs else 0,
        kept=theirs and _keeping(cfg, target) is not None,
        decoded=2 * evaluated * len(cfg.decode.temperatures) * cfg.decode.repeats,
        watched=1 / (cfg.loop.eval_every * cfg.loop.rows * cfg.data.max_length)
        if cfg.loop.eval_every
        else 0.0,
    )
    left = 60 * cfg.budget.minutes - cfg.budget.spent - (time.monotonic() - started)
    lengths = [[len(t.ids) for t in side] for side in (train, held_out)]
    plan = fitted(left, cfg.budget.floor, speeds, work, *lengths)
    plan = broadcast_object_list([plan])[0]  # every process keeps to the first one's
    console.print(str(plan))
    if plan.conversations < POOR:
        console.print(
            f"that is fewer than {POOR} conversations: the figures will be poor; give a larger "
            "budget.minutes for better ones"
        )
    if accelerator.is_main_process:
        write_whole(path, json.dumps(dataclasses.asdict(plan), indent=1))
    return plan.conversations


def _rehearsal(
    cfg: Config,
    target: Target,
    texts: Sequence[Document | Prompt],
    accelerator: Accelerator,
) -> Callable[[], int]:
    """A training step on texts as long as those to come, of a draft that is thrown away."""
    if not family(cfg.drafter.name).trainable:
        return lambda: 1
    documents = []
    for text in texts[: 8 * cfg.loop.rows]:
        if isinstance(text, Prompt):  # whose answer is not written yet: the prompt stands for it
            ids = np.resize(text.ids, len(text.ids) + cfg.answers.max_new_tokens)
            text = Document(text.id, ids, np.arange(len(ids)) >= len(text.ids))
        documents.append(text)
    drafter = starting(StageConfig(), cfg.drafter, target, documents, 0, console)
    rows = pack(documents, cfg.data.max_length)[: cfg.loop.rows]
    batch = Online(target, drafter.needs, cfg.sampler, rows).batch(range(len(rows)))
    forcing = TeacherForcing(drafter, target, cfg.sampler, cfg.objective)
    optimizer = optim.build(forcing, cfg.optim)

    def step() -> int:
        anchors = [forcing.anchors(r.mask, r.document, r.position, 0) for r in rows]
        with accelerator.autocast():
            loss, _ = forcing(batch, anchors)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return sum(len(r.ids) for r in rows)

    return step


def _require_both(train: Sequence[Any], held_out: Sequence[Any]) -> None:
    for name, side in (("train", train), ("held out", held_out)):
        if not side:
            raise UserError(f"no {name} conversation: give more data or change data.held_out")


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
    count = min(len(texts.prompts), cfg.decode.prompts)
    task = progress.add_task("decoding", total=count * len(cfg.decode.temperatures))
    results = evaluate(
        Subject(cfg.name, target, drafter, cfg.data.path),
        [p.ids.tolist() for p in texts.prompts],
        cfg.decode,
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


def _require_same_run(folder: Path, cfg: Config) -> None:
    """A folder may hold an earlier start of the same run, to be continued, but no other run."""
    theirs = _config_of(folder)
    if not theirs:
        return
    ours = json.loads(json.dumps(dataclasses.asdict(cfg)))
    for group in GROUPS:
        # a setting that is newer than the run was its default then
        default = json.loads(json.dumps(dataclasses.asdict(type(getattr(cfg, group))())))
        was = default | (theirs.get(group) or {})
        for key, value in ours[group].items():
            if was.get(key) != value:
                raise UserError(
                    f"{folder} holds a run with {group}.{key}={was.get(key)!r}, not {value!r}: "
                    "give another name=, or delete that folder"
                )


def _require_same_texts(folder: Path, of: dict[str, str]) -> None:
    """As `_require_same_run`, of what is not in a configuration."""
    for name, was in _config_of(folder).get("of", of).items():
        if was != of[name]:
            raise UserError(
                f"{folder}: the {name} changed since this run began: give another name=, or delete "
                "that folder"
            )


def _config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a run's folder; empty where there is none."""
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        return with_objective(dict(read_json(path)))
    except (UserError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): give another name=, or delete it") from error


def _digest(documents: Sequence[Document]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for document in documents:
        digest.update(json.dumps([document.ids.tolist(), document.mask.tolist()]).encode())
    return digest.hexdigest()


def _with_dtype(cfg: Config, folder: Path) -> tuple[Config, str]:
    """The configuration with the dtype that `target.dtype=auto` stands for, and the reason. A run
    keeps the dtype with which it began, also on another kind of machine."""
    if cfg.target.dtype != "auto":
        return cfg, ""
    dtype = (_config_of(folder).get("target") or {}).get("dtype", "auto")
    reason = "as this run began"
    if dtype == "auto":
        target = resolved(cfg.target)
        dtype, reason = target.dtype, native_dtype(target.device).reason
    return replace(cfg, target=replace(cfg.target, dtype=dtype)), reason


def _precision(cfg: Config) -> str:
    if cfg.loop.precision == "auto":
        return "bf16" if cfg.target.dtype == "bfloat16" else "no"
    return cfg.loop.precision


def _device(cfg: Config, accelerator: Accelerator) -> str:
    return str(accelerator.device) if cfg.target.device == "auto" else cfg.target.device


__all__ = ["DIVERGED", "Diverged", "run"]

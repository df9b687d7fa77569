"""The texts that a run reads: conversations with the data's answers or the target's own, as many
as fit its budget."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.progress import Progress

from specdec.drafters import family
from specdec.errors import UserError, require
from specdec.files import read_record, write_whole
from specdec.forcing.teacher import TeacherForcing
from specdec.measure.strategy import LEARNING
from specdec.progress import console
from specdec.target.base import Target
from specdec.target.loading import TargetOnDemand
from train import optim
from train.config import Config
from train.data.answers import answered
from train.data.packing import pack
from train.data.split import split_documents, split_prompts
from train.data.template import Document, Prompt
from train.features.source import Online
from train.features.store import Kind, Store
from train.plan import POOR, Plan, Work, fitted, timed
from train.stages import StageConfig, starting


@dataclasses.dataclass
class Texts:
    """What training and evaluation read."""

    train: list[Document]
    held_out: list[Document]
    prompts: list[Prompt]  # held out, for the decoder
    measured: int  # how many of these prompts the final evaluation answers
    records: int  # of the data that were read
    asked: list[Prompt] = dataclasses.field(default_factory=list)  # whose answers `train` has


def texts_of(
    cfg: Config,
    folder: Path,
    target: TargetOnDemand,
    accelerator: Accelerator,
    progress: Progress,
    started: float,
) -> Texts:
    """Conversations as documents: with the data's answers, or with the target's own; as many as
    fit the budget of a run that began at `started`."""

    def fitting(
        train: Sequence[Document | Prompt], held_out: Sequence[Document | Prompt]
    ) -> tuple[int, int]:
        return _fitting(cfg, folder, target, train, held_out, accelerator, started)

    tokenizer = target.parts.tokenizer
    if cfg.data.answers == "data":
        texts = split_documents(cfg.data, tokenizer)
        tally = texts.tally
        size, measured = fitting(texts.train, texts.held_out)
        made = Texts(
            texts.train[:size],
            texts.held_out,
            texts.prompts,
            measured,
            tally.read,
        )
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
        size, measured = fitting(split.train, split.held_out)
        asked = split.train[:size]
        made = Texts(
            answered(target, asked, cfg.answers, accelerator, progress, keep),
            answered(target, split.held_out, cfg.answers, accelerator, progress, keep),
            split.held_out,
            measured,
            tally.read,
            asked,
        )
    console.print(f"conversations from {cfg.data.path}\n{tally}")
    _require_both(made.train, made.held_out)
    require(
        bool(made.prompts),
        f"{cfg.data.path}: no held-out prompt to decode: raise "
        f"data.max_prompt={cfg.data.max_prompt}",
    )
    for name, documents in (("train", made.train), ("held out", made.held_out)):
        console.print(
            f"{name}: {len(documents):,} documents, {sum(len(d.ids) for d in documents):,} tokens, "
            f"{sum(int(d.mask.sum()) for d in documents):,} of them the assistant's"
        )
    return made


def _keeping(cfg: Config, target: TargetOnDemand) -> Store | None:
    """What stores the features of answers as they are decoded, where features are stored at all."""
    kind = family(cfg.drafter.name)
    if not kind.trainable or cfg.features.cache != "disk":
        return None
    with torch.device("meta"):
        needs = kind(cfg.drafter, kind.plan(cfg.drafter, target.parts)).needs
    store = Store(cfg.features, Kind.of(target.parts, needs, cfg.sampler))
    store.prepare(0)
    return store


def _fitting(
    cfg: Config,
    folder: Path,
    target: TargetOnDemand,
    train: Sequence[Document | Prompt],
    held_out: Sequence[Document | Prompt],
    accelerator: Accelerator,
    started: float,
) -> tuple[int, int]:
    """How many training conversations and prompts of the final evaluation fit `cfg.budget`, printed
    with the time that each stage should take. A resumed run keeps the numbers in its plan.json."""
    path = folder / "plan.json"
    if path.exists():
        kept = read_record(Plan, path)
        console.print(f"{path}: {kept.conversations:,} training conversations, as planned before")
        return kept.conversations, kept.prompts
    if cfg.budget.minutes is None or not train or not held_out:
        return len(train), cfg.decode.prompts
    console.print(f"budget: {cfg.budget.minutes:g} minutes; timing this machine for some seconds")
    theirs = cfg.data.answers == "target"
    batch = cfg.answers.batch if theirs else cfg.loop.rows
    body = target.whole()
    rehearsed = rehearsal(cfg, body, train, accelerator)
    speeds = timed(body, [t.ids.tolist() for t in train], batch, rehearsed)
    drafted = cfg.decode.max_new_tokens * len(cfg.decode.temperatures)
    work = Work(
        epochs=cfg.loop.epochs * cfg.rounds.count if family(cfg.drafter.name).trainable else 0,
        new=cfg.answers.max_new_tokens if theirs else 0,
        kept=theirs and _keeping(cfg, target) is not None,
        prompts=min(cfg.decode.prompts, len(held_out)),
        decoded=2 * drafted * cfg.decode.repeats,
        learned=LEARNING * drafted,  # for the oracle
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
    return plan.conversations, plan.prompts


def rehearsal(
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
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), cfg.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        return sum(len(r.ids) for r in rows)

    return step


def _require_both(train: Sequence[Any], held_out: Sequence[Any]) -> None:
    for name, side in (("train", train), ("held out", held_out)):
        if not side:
            raise UserError(f"no {name} conversation: give more data or change data.held_out")

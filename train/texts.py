"""The texts that a run reads: conversations, pairs or plain texts, with the data's answers or the
target's own, as many as fit its budget."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.errors import require
from specdec.progress import console
from train.data.answers import answered, logged
from train.data.conversations import TEXTS
from train.data.split import Split, split_documents, split_prompts
from train.data.template import Document, Prompt
from train.features.store import Store
from train.job import Job
from train.plan import planned


@dataclass
class Texts:
    """What training and evaluation read."""

    train: list[Document]  # prompts without answers if on-policy rounds need no more
    held_out: list[Document]
    prompts: list[Prompt]  # held out, for the decoder
    measured: int  # how many of these the final evaluation answers
    records: int  # number of records read from the data
    asked: list[Prompt] = field(default_factory=list)  # training prompts, if the target answers


def texts_of(job: Job) -> Texts:
    """The texts of a run. Features that are kept on disk are stored while the target answers."""
    cfg, parts = job.cfg, job.target.parts
    require(
        not (cfg.data.format in TEXTS and parts.model.config.is_encoder_decoder),
        f"{parts.title} is an encoder-decoder, which does not read plain text: give data=pairs",
    )
    answering = cfg.data.answers == "target"
    split: Split[Any] = (split_prompts if answering else split_documents)(cfg.data, parts.tokenizer)
    console.print(f"data from {cfg.data.path}\n{split.tally}")
    for name, side in (("training", split.train), ("held-out", split.held_out)):
        require(bool(side), f"no {name} conversation: give more data or change data.held_out")
    most, new, asked, keep = cfg.data.max_prompt, cfg.answers.max_new_tokens, [], None
    require(
        bool(split.prompts),
        f"{cfg.data.path}: no held-out prompt to decode: raise data.max_prompt={most}",
    )
    longest = max(len(text.ids) for text in [*split.train, *split.held_out])
    require(
        not answering or longest + new <= cfg.data.max_length,
        f"a prompt of {longest} tokens and answers.max_new_tokens={new} do not fit "
        f"data.max_length={cfg.data.max_length}: raise data.max_length, or lower "
        f"data.max_prompt={most} or answers.max_new_tokens",
    )
    size, measured = planned(job, split.train, split.held_out)
    train, held_out = split.train[:size], split.held_out
    logs = cfg.data.rounds and Path(cfg.data.rounds)
    if answering and cfg.stores_features:
        with torch.device("meta"):
            needs = cfg.family(cfg.drafter, cfg.family.plan(cfg.drafter, parts)).needs
        keep = Store(cfg.features, parts, needs, cfg.sampler)
        keep.prepare(0)
    if answering:
        asked = train
        train, held_out = (
            answered(job.target, prompts, cfg.answers, job.accelerator, job.progress, keep)
            for prompts in (train if cfg.reads_plain_answers else [], held_out)
        )
        train = train or [Document(p.id, p.ids, np.zeros(len(p.ids), np.bool_)) for p in asked]
    if logs:
        train = logged(logs, cfg.drafter.depth, parts, split.prompts)
    for name, documents in (("train", train), ("held out", held_out)):
        console.print(
            f"{name}: {len(documents):,} documents, {sum(len(d.ids) for d in documents):,} tokens, "
            f"{sum(int(d.mask.sum()) for d in documents):,} of them the assistant's"
        )
    return Texts(train, held_out, split.prompts, measured, split.tally.read, asked)

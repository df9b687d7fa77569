"""The texts that a run reads: conversations, pairs or plain texts, with the data's answers or the
target's own, as many as fit its budget. Of several processes the first reads the data, and hands
what it made of them to the others."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.errors import require
from specdec.progress import console
from train.data.answers import answered, logged
from train.data.conversations import TEXTS
from train.data.split import SHARE, Split, split_documents, split_prompts
from train.data.template import Document, Prompt
from train.features.store import Store
from train.folder import note_date
from train.job import Job
from train.plan import FEWEST, planned


@dataclass
class Texts:
    """What training and evaluation read."""

    train: list[Document]  # prompts without answers if on-policy rounds need no more
    held_out: list[Document]
    prompts: list[Prompt]  # held out, for the decoder
    measured: int  # how many of these the final evaluation answers
    records: int  # number of records read from the data
    share: float  # of all conversations, held out
    asked: list[Prompt] = field(default_factory=list)  # training prompts, if the target answers


def texts_of(job: Job) -> Texts:
    """The texts of a run. Features that are kept on disk are stored while the target answers."""
    cfg, parts, ranks = job.cfg, job.target.parts, job.ranks
    split: Split[Any] = Split()

    def read() -> list[Any]:
        nonlocal split
        split = _split(job)
        return split.train

    train, held_out = ranks.handed(read), ranks.handed(lambda: split.held_out)
    prompts, records = ranks.handed(lambda: split.prompts), ranks.first(lambda: split.tally.read)
    share = ranks.first(lambda: split.share)
    answering, asked, keep = cfg.data.answers == "target", [], None
    size, measured = planned(job, train, held_out)
    train = train[:size]
    if answering and cfg.stores_features:
        with torch.device("meta"):
            needs = cfg.family(cfg.drafter, cfg.family.plan(cfg.drafter, parts)).needs
        keep = Store(cfg.features, parts, needs, cfg.sampler)
        keep.prepare(0)
    if answering:
        ranks.first(lambda: note_date(cfg, job.folder))
        asked = train
        train, held_out = (
            answered(job.target, some, cfg.answers, job.accelerator, job.progress, keep)
            for some in (train if cfg.reads_plain_answers else [], held_out)
        )
        train = train or [Document(p.id, p.ids, np.zeros(len(p.ids), np.bool_)) for p in asked]
    if cfg.data.rounds:
        logs = Path(cfg.data.rounds)
        train = ranks.handed(lambda: logged(logs, cfg.drafter.depth, parts, prompts))
    for name, documents in (("train", train), ("held out", held_out)):
        console.print(
            f"{name}: {len(documents):,} documents, {sum(len(d.ids) for d in documents):,} tokens, "
            f"{sum(int(d.mask.sum()) for d in documents):,} of them the assistant's"
        )
    return Texts(train, held_out, prompts, measured, records, share, asked)


def _split(job: Job) -> Split[Any]:
    """The data of a run, split: prompts if the target answers them, else documents. Raises
    UserError if a side is empty, or if its texts cannot be used."""
    cfg, parts = job.cfg, job.target.parts
    require(
        not (cfg.data.format in TEXTS and parts.model.config.is_encoder_decoder),
        f"{parts.title} is an encoder-decoder, which does not read plain text: give data=pairs",
    )
    answering = cfg.data.answers == "target"
    split: Split[Any] = (split_prompts if answering else split_documents)(cfg.data, parts.tokenizer)
    console.print(f"data from {cfg.data.path}\n{split.tally}")
    if split.share > SHARE and cfg.data.held_out is None:
        console.print(
            f"held out, to measure on: {len(split.held_out)} of "
            f"{len(split.held_out) + len(split.train)} conversations (data.held_out= sets "
            "another share)"
        )
    for name, side in (("training", split.train), ("held-out", split.held_out)):
        require(bool(side), f"no {name} conversation: give more data or change data.held_out")
    most, new = cfg.data.max_prompt, cfg.answers.max_new_tokens
    require(
        bool(split.prompts),
        f"{cfg.data.path}: no held-out prompt to decode: raise data.max_prompt={most}",
    )
    if (few := len(split.prompts)) < FEWEST:
        console.print(
            f"the draft is measured on {few} held-out {'prompt' if few == 1 else 'prompts'}, too "
            "few for any claim: give more data"
        )
    for text in (*split.train, *split.held_out, *split.prompts):
        if text.ids.max(initial=0) >= parts.embedding.num_embeddings:  # else far slower
            parts.require_embedded(text.ids, f"{cfg.data.path}: record {text.id!r}")
    longest = max(len(text.ids) for text in [*split.train, *split.held_out])
    require(
        not answering or longest + new <= cfg.data.max_length,
        f"a prompt of {longest} tokens and answers.max_new_tokens={new} do not fit "
        f"data.max_length={cfg.data.max_length}: raise data.max_length, or lower "
        f"data.max_prompt={most} or answers.max_new_tokens",
    )
    return split

"""The documents and prompts of a run: conversations, pairs or plain texts, with the responses of
the data or of the target. With several processes, the first reads the data, all of them render and
tokenise, and all get the same documents."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from rich.progress import Progress

from specdec.errors import UserError
from specdec.measure.decoded_prompts import LEAST_PROMPTS
from specdec.measure.results import CutResponses
from specdec.progress import console
from specdec.ranks import Ranks
from specdec.targets.loading import TargetLoader
from specdec.targets.parts import TargetParts
from train.budget import (
    LEAST_VALIDATION,
    READING,
    VALIDATION,
    VALIDATION_KEY,
    Budget,
    StageTime,
    places_of,
)
from train.data.conversations import DataConfig
from train.data.response_files import ResponsesConfig, ResponsesRead, cut_responses
from train.data.responses import documents_with_responses
from train.data.run_data import DataCounts, read_run_data, unusable_data
from train.data.sequences import Document, Prompt, uniform_token_weights
from train.data.split import SHARE, DataSplit
from train.hidden_states.filling import RunHiddenStates
from train.hidden_states.store import HiddenStateStore
from train.training_rounds import RoundsConfig


@dataclass
class RunDocuments:
    """The inputs of training and evaluation. See `DataSplit`."""

    train: list[Document]  # without responses if only later training rounds generate them
    validation: list[Document]  # held out, to select the best draft on
    prompts: list[Prompt]  # the decoder's, of the test part
    validation_prompts: list[Prompt]  # the decoder's, for calibration and choices; may be empty
    measured: int  # number of `prompts` in the final evaluation
    records: int  # number of records read from the data
    share: float  # held-out fraction of all conversations
    validation_share: float  # validation fraction of these; 0: all select and all are reported
    asked: list[Prompt] = field(default_factory=list)  # training prompts, if the target answers
    cut: CutResponses | None = None  # counts of the target's cut responses
    counts: DataCounts | None = None  # counts before any response was generated


def split_of_run(
    data: DataConfig,
    responses: ResponsesConfig,
    parts: TargetParts,
    ranks: Ranks,
    depth: int = 1,
    starts_from: Collection[Path] = (),
) -> DataSplit[Any]:
    """Call `read_run_data` and print a summary. Raises UserError if the run cannot use its data."""
    split = read_run_data(data, parts, depth, ranks, starts_from)
    console.print(f"data from {data.name}\n{split.tally}\n{DataCounts.of_split(split)}")
    if split.share > SHARE and data.held_out is None:
        console.print(
            f"held out, to measure on: {len(split.held_out)} of "
            f"{len(split.held_out) + len(split.train)} conversations (data.held_out= sets "
            "another share)"
        )
    if split.validation_share:
        console.print(
            f"the best draft is selected on {len(split.validation)} held-out conversations "
            f"(validation), and measured on {len(split.test)} others (test)"
        )
    else:
        console.print(
            f"{len(split.held_out)} held-out conversations are too few for a validation part: the "
            "draft is selected on the prompts that it is measured on, so its figures are slightly "
            "too high"
            if data.validation is None
            else "data.validation=0: the draft is selected on the prompts that it is measured on, "
            "so its figures are slightly too high"
        )

    def require_usable() -> None:
        for reason in unusable_data(data, split, responses.longest_response, parts):
            raise UserError(reason)

    ranks.first(require_usable)
    if (few := len(split.prompts)) < LEAST_PROMPTS:
        console.print(
            f"the draft is measured on {few} held-out {'prompt' if few == 1 else 'prompts'}, so "
            "the intervals are wide: give data.held_out=0.4 or more data"
        )
    return split


def documents_of_run(
    split: DataSplit[Any],
    measured: int,
    responses: ResponsesConfig | None,
    reads_training: bool,
    from_log: bool,
    target: TargetLoader,
    store: HiddenStateStore | None,
    accelerator: Accelerator,
    progress: Progress,
    responses_read: ResponsesRead | None = None,
    budget: Budget | None = None,
) -> RunDocuments:
    """The texts of a run's split. Up to `measured` of its held-out prompts are measured. Unless the
    data's responses are used, the target generates them with the settings `responses`, and `store`
    keeps the hidden states that it computes meanwhile. Responses to the training prompts are
    generated only if the run `reads_training`. With `from_log`, the training documents are those of
    a decoder's log. `responses_read` is as in `documents_with_responses`. The `budget` limits their
    number."""
    train, validation, asked = split.train, split.validation, list[Prompt]()
    cut: CutResponses | None = None
    if responses is not None:
        asked = [] if from_log else train
        if store is not None:
            store.prepare(0)

        def responses_in(some: Sequence[Prompt], time: StageTime | None) -> list[Document]:
            return documents_with_responses(
                target,
                some,
                responses,
                accelerator,
                progress,
                store,
                responses_read=responses_read,
                time=time,
            )

        if budget is None:
            train, validation = (
                responses_in(some, None) for some in (train if reads_training else [], validation)
            )
        else:
            part = 1 - READING if store is None else 1.0
            validation = budget.texts_in_time(
                "texts",
                f"{VALIDATION_KEY} responses",
                validation,
                responses_in,
                VALIDATION * part,
                LEAST_VALIDATION,
            )
            train = budget.texts_in_time(
                "texts",
                "responses",
                train if reads_training else [],
                responses_in,
                part,
                budget.cfg.floor,
            )
        parts = target.parts
        cut = cut_responses([*train, *validation], parts.eos, responses, parts.positions)
        console.print(str(cut))
        if train:  # engines may leave prompts unanswered
            with_response_too = {d.ids[~d.mask].tobytes() for d in train}
            asked = [prompt for prompt in asked if prompt.ids.tobytes() in with_response_too]
        train = train or [_without_response(prompt) for prompt in asked]
    if from_log:
        train, asked = split.train, []
    for name, documents in (("train", train), ("validation", validation)):
        console.print(
            f"{name}: {len(documents):,} documents, {sum(len(d.ids) for d in documents):,} tokens, "
            f"{sum(int(d.mask.sum()) for d in documents):,} of them the assistant's"
        )
    return RunDocuments(
        train=train,
        validation=validation,
        prompts=split.prompts,
        validation_prompts=split.validation_prompts,
        measured=min(measured, len(split.prompts)),
        records=split.tally.read,
        share=split.share,
        validation_share=split.validation_share,
        asked=asked,
        cut=cut,
        counts=DataCounts.of_split(split),
    )


def fill_in_time(
    texts: RunDocuments,
    split: DataSplit[Any],
    hidden_states: RunHiddenStates,
    budget: Budget,
    rounds: RoundsConfig,
    limit: int | None,
) -> None:
    """Store the hidden states of a run's texts as long as the budget allows, drop texts without
    them, and print the number of training texts. Without a budget, nothing is done."""
    if not budget.active:
        return
    key = f"{VALIDATION_KEY} hidden states"
    texts.validation = hidden_states.fill_in_time(
        texts.validation, budget, "texts", key, VALIDATION, LEAST_VALIDATION
    )
    if rounds.data != "on_policy":  # whose first round writes its own texts
        texts.train = hidden_states.fill_in_time(
            texts.train, budget, "texts", "hidden states", 1.0, budget.cfg.floor
        )
        texts.asked = [texts.asked[place] for place in places_of(texts.train, texts.asked)]
    budget.say_texts(len(texts.train), len(split.train), len(split.held_out), limit)


def _without_response(prompt: Prompt) -> Document:
    """A placeholder document for a prompt that only later rounds answer."""
    ids = prompt.ids
    silent = np.zeros(len(ids), np.bool_)
    weight = uniform_token_weights(len(ids), prompt.weight)
    document = Document(prompt.id, ids, silent, weight=weight)
    document.opening, document.placed = prompt.opening, prompt.placed
    return document

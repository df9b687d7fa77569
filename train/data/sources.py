"""Where conversations come from: JSON files also cut short, folders, packages, hub datasets, and
files of prompts. Nothing is trusted: records are bounded in size, and whatever cannot be read is
counted or told in one line.
"""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.errors import UserError, require
from specdec.target.gguf import find_package_file
from train.data.conversations import (
    Conversation,
    DataConfig,
    Tally,
    conversation_of,
    opening_of,
    role_of,
    turns_of,
)

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
ACCEPTED = (
    'ShareGPT {"conversations": [{"from": "human", "value": "…"}, …]} or '
    '{"messages": [{"role": "user", "content": "…"}, …]}, as a JSON array or one a line'
)
LARGEST = 1 << 26  # characters or bytes of one record; what is longer is no conversation
PIECE = 1 << 16  # characters that are read of an array at a time
NESTED = "records nested too deeply"


def read(cfg: DataConfig, tally: Tally) -> Iterator[Conversation]:
    """The conversations of `cfg.path`, in order. Raises UserError where there is none."""
    last, first_record = None, ""
    for name, record in _records(cfg, tally):
        tally.read += 1
        conversation = conversation_of(record, name, cfg.format, tally)
        if isinstance(conversation, str):
            tally.count(tally.dropped, conversation)
            first_record = first_record or f"; the first record: {_described(record)}"
        else:
            turns = turns_of(record, cfg.format) or []
            if last is not None and _next_piece(*last, turns) == conversation.id:
                conversation = replace(conversation, opening=opening_of(last[0]))
            last = conversation, turns
            yield conversation
        if tally.read == cfg.records:
            tally.count(tally.unread, f"whatever follows, after data.records={cfg.records}")
            break
    if last is None:
        why = (tally.reasons() or "it is empty") + first_record
        raise UserError(f"{cfg.path}: no conversation in it ({why}); accepted: {ACCEPTED}")


def require_readable(cfg: DataConfig) -> None:
    """Raise UserError where a local `cfg.path` is missing or holds no conversation. Reads up to the
    first conversation; a hub dataset is not looked at."""
    if cfg.path.startswith("package:") or Path(cfg.path).exists() or _names_a_file(cfg.path):
        next(read(cfg, Tally()))


def _described(record: Any) -> str:
    if isinstance(record, dict):
        return f"keys {', '.join(map(str, record))}"[:100]
    return f"a list of {len(record)}" if isinstance(record, list) else repr(record)[:100]


def _next_piece(last: Conversation, turns: Sequence[Any], following: Sequence[Any]) -> str | None:
    """The id of the record that goes on with the same chat. ShareGPT files a long chat in pieces
    xyz_0, xyz_11, …: the number counts turns, and where a piece begins with an answer, that is
    the last one of the piece before, again."""
    chat, _, number = last.id.rpartition("_")
    if not chat or not (number.isascii() and number.isdecimal() and len(number) < 10):
        return None
    if role_of(turns[-1]) != "assistant":
        return None
    return f"{chat}_{int(number) + len(turns) - (role_of(following[0]) == 'assistant')}"


def _names_a_file(path: str) -> bool:
    """Whether a path that does not exist was meant as a file, not as the name of a hub dataset."""
    return Path(path).suffix in SUFFIXES or Path(path).is_absolute() or path.startswith(".")


def _records(cfg: DataConfig, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Every record with a name for it."""
    if cfg.path.startswith("package:"):
        files = [find_package_file(cfg.path.removeprefix("package:"), ".json")]
    elif (path := Path(cfg.path)).is_dir():
        skip = ("dataset_info.json", "state.json")  # what datasets writes beside its arrow files
        found = (f for f in path.rglob("*") if f.suffix in SUFFIXES and f.name not in skip)
        files = sorted(f for f in found if f.is_file())
        if not files:
            raise UserError(f"{path}: no {', '.join(SUFFIXES)} file in this folder")
    elif path.exists():
        require(path.is_file(), f"{path}: is not a regular file")
        files = [path]
    elif _names_a_file(cfg.path):
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
    from datasets import load_dataset  # type: ignore[import-untyped] # slow to import, seldom used

    try:
        for i, record in enumerate(load_dataset(*args, streaming=True, **kwargs)):
            yield f"{Path(where).stem}:{i}", record
    except Exception as error:  # offline, gated, no such split, …
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = (
            "cannot be read"
            if Path(where).exists()
            else "is neither a local file nor a dataset that can be read"
        )
        raise UserError(f"{where}: {what}: {line}") from error


def _json(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Records of a JSON array or of JSON lines, whichever the file holds. What cannot be parsed is
    counted: in JSON lines each line by itself; in an array all that follows, since nothing tells
    where the next record begins."""
    try:
        with path.open("rb") as file:
            head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        yield from (_array if head.startswith(b"[") else _lines)(path, tally)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _lines(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        n = 0
        while line := file.readline(LARGEST):
            n, example = n + 1, f"line {n + 1} of {path.name}"
            line = line.removeprefix(b"\xef\xbb\xbf") if n == 1 else line  # a byte order mark
            if len(line) >= LARGEST - 3:
                tally.count(tally.unread, f"lines of more than {LARGEST >> 20} MB", example)
                while line and not line.endswith(b"\n"):
                    line = file.readline(LARGEST)
                continue
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                deep = isinstance(error, RecursionError)
                tally.count(tally.unread, NESTED if deep else "broken JSON line", example)
                continue
            yield f"{path.stem}:{n}", record


def _array(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Elements of an array, parsed one by one out of a window of text that moves over the file.
    Bytes that are not UTF-8 become surrogates, which cost only the record that they are in."""
    decoder, n, reason = json.JSONDecoder(), 0, ""
    with (
        path.open("rb") as raw,
        io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        text, at, ended, wanted = "", 0, False, "["

        def more() -> None:
            nonlocal text, at, ended
            piece = file.read(max(PIECE, len(text) - at))  # doubles: time grows with the text
            text, at, ended = text[at:] + piece, 0, not piece

        while not reason:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at == len(text) and not ended:
                more()
            elif at == len(text):
                reason = "record cut off by the end of the file"
            elif text[at] == "]" and (wanted == "," or (wanted == "value" and n == 0)):
                return
            elif wanted != "value":
                wanted, at, reason = "value", at + 1, "" if text[at] == wanted else "broken"
            else:
                try:
                    record, end = decoder.raw_decode(text, at)
                except RecursionError:
                    reason = NESTED
                except ValueError as error:
                    begun = str(error).startswith("Unterminated string") or (
                        getattr(error, "pos", 0) > len(text) - 16
                    )
                    if begun and not ended and len(text) - at < LARGEST:
                        more()
                    else:
                        reason = "record cut off by the end of the file" if begun else "broken"
                else:
                    if isinstance(record, int | float) and len(text) - end < 3 and not ended:
                        more()  # the number might go on, as 2 does in 2e+5
                        continue
                    yield f"{path.stem}:{n}", record
                    n, at, wanted = n + 1, end, ","
        percent = 100 * raw.tell() // max(1, path.stat().st_size)
    if reason == "broken":
        reason = f"whatever follows broken JSON, about {percent} % into the file"
    elif reason == NESTED:
        reason = f"whatever follows a record nested too deeply, about {percent} % into the file"
    tally.count(tally.unread, reason, f"{path.name}, after {n:,} whole records")


# Files of prompts


def read_prompts_file(path: str | Path) -> list[Conversation]:
    """Prompts to evaluate on: a text file with one a line, or JSON lines or a JSON array of strings
    or of records with "prompt", "messages", or "turns" (Spec-Bench, of which the first turn is
    taken: the later ones depend on an answer). Raises UserError that names the line or the item
    which is none of these."""
    path, found = Path(path), []
    for where, record in _prompt_records(path):
        messages: Any = None
        if isinstance(record, dict):
            turns = record.get("turns")
            first = turns[0] if isinstance(turns, list) and turns else None
            messages, record = record.get("messages"), record.get("prompt") or first
        messages = messages or [{"role": "user", "content": record}]
        name = f"{path.stem}:{where.split()[-1]}"
        conversation = conversation_of({"messages": messages}, name, "messages", Tally())
        if isinstance(conversation, str):
            raise UserError(
                f"{path}, {where}: {conversation}; give one prompt a line, or JSON with "
                '"prompt", "messages" or "turns"'
            )
        found.append(conversation)
    if not found:
        raise UserError(f"{path}: no prompt in it")
    return found


def _prompt_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each record stands, and the record: a line of text, or what its JSON says."""
    require(path.is_file() or not path.exists(), f"{path}: is not a regular file")
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path}: more than {LARGEST >> 20} MB, too large for prompts")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    if "\0" in text:
        raise UserError(f"{path}: cannot be read as UTF-8 text (it holds null bytes)")
    lines = [(n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    bracket = text.lstrip().startswith("[")
    if path.suffix == ".json" or (bracket and path.suffix == ".jsonl"):
        whole = _parsed(text, path, "the whole file", strict=False)
        whole = [whole] if isinstance(whole, dict) else whole
        if isinstance(whole, list):
            yield from ((f"item {n}", record) for n, record in enumerate(whole, 1))
            return
    is_json = path.suffix in (".jsonl", ".json") or all(x[0] == "{" for _, x in lines)
    for n, line in lines:
        where = f"line {n}"
        yield where, _parsed(line, path, where) if is_json else line


def _parsed(text: str, path: Path, where: str, strict: bool = True) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UserError(f"{path}, {where}: JSON nested too deeply") from error
    except ValueError as error:
        if not strict:
            return None
        raise UserError(f"{path}, {where}: not JSON ({error})") from error

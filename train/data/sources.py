"""Where records come from: JSON files (even truncated ones), tables, plain text, folders, packages,
hub datasets, and files of prompts. Records are bounded in size, and whatever cannot be read is
counted or reported in one line."""

import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from specdec.errors import UserError, first_line, require
from specdec.target.gguf import find_package_file
from train.data.conversations import (
    TEXTS,
    Conversation,
    DataConfig,
    Tally,
    Unusable,
    conversation_of,
)

SUFFIXES: tuple[str, ...] = (".jsonl", ".json", ".parquet", ".arrow")
LARGEST = 1 << 26  # characters or bytes of one record; anything longer is not a conversation
PIECE = 1 << 16  # characters of an array that are read at a time
LEAD = re.compile(r"[ \t\r\n]*([\[,]?)[ \t\r\n]*")  # what precedes an element of an array


def records(cfg: DataConfig, tally: Tally) -> Iterator[tuple[str, Any]]:
    """The place and the content of every record of `cfg.path`, in order."""
    files = files_of(cfg)
    if files is None:
        yield from _dataset(cfg.path, cfg.path, split=cfg.split)
    for file in files or ():
        try:
            if file.suffix in (".parquet", ".arrow"):
                yield from _dataset(file, file.suffix[1:], data_files=str(file), split="train")
            elif file.suffix == ".tsv" and cfg.format == "pairs":
                yield from _table(file, cfg.pair, tally)
            elif file.suffix not in SUFFIXES and cfg.format in TEXTS:
                yield from _texts(file, cfg.format == "lines", tally)
            else:
                yield from _json(file, tally)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from error


def files_of(cfg: DataConfig) -> list[Path] | None:
    """The files that `data.path` names; None if it is the name of a hub dataset. Raises UserError
    if there is no such file or folder, or no file of a known type in the folder."""
    path, suffixes = cfg.path, SUFFIXES
    suffixes += (".tsv",) * (cfg.format == "pairs") + (".txt",) * (cfg.format in TEXTS)
    if path.startswith("package:"):
        return [find_package_file(path.removeprefix("package:"), ".json")]
    file = Path(path)
    if file.is_dir():
        skip = ("dataset_info.json", "state.json")  # datasets' own, beside its arrow files
        found = (f for f in file.rglob("*") if f.suffix in suffixes and f.name not in skip)
        files = sorted(f for f in found if f.is_file())
        require(bool(files), f"{path}: no {', '.join(suffixes)} file in this folder")
        return files
    if not file.exists() and not (file.is_absolute() or file.suffix in suffixes or path[:1] == "."):
        return None
    require(file.exists(), f"{path}: no such file or folder")
    require(file.is_file(), f"{path}: is not a regular file")
    return [file]


def _dataset(path: str | Path, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Records that the datasets library reads on demand."""
    from datasets import load_dataset  # type: ignore[import-untyped] # slow to import, seldom used

    try:
        for n, record in enumerate(load_dataset(*args, streaming=True, **kwargs), 1):
            yield f"{path}, row {n}", record
    except Exception as error:  # offline, gated, no such split, …
        what = "" if isinstance(path, Path) else ", either as a local file or as a dataset"
        raise UserError(f"{path} cannot be read{what}: {first_line(error)}") from error


def _json(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Records of a JSON array or of JSON lines. Broken JSON is counted and left out: a broken line
    by itself, but in an array everything that follows, since nothing shows where the next record
    begins."""
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    yield from (_array if head.startswith(b"[") else _objects)(path, tally)


def _lines(path: Path, tally: Tally) -> Iterator[tuple[str, bytes]]:
    """The place and the content of each line. Lines that are too long are counted and left out."""
    with path.open("rb") as file:
        for n in count(1):
            line, place = file.readline(LARGEST), f"{path}, line {n}"
            if not line:
                return
            if len(line) == LARGEST:
                tally.count(tally.unread, f"lines of more than {LARGEST >> 20} MB", place)
                while line and not line.endswith(b"\n"):
                    line = file.readline(LARGEST)
            else:
                yield place, line.removeprefix(b"\xef\xbb\xbf") if n == 1 else line


def _objects(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    for place, line in _lines(path, tally):
        if line.strip():
            try:
                yield place, json.loads(line)
            except RecursionError:
                tally.count(tally.unread, "records nested too deeply", place)
            except ValueError:
                tally.count(tally.unread, "broken JSON line", place)


def _table(path: Path, pair: Sequence[str], tally: Tally) -> Iterator[tuple[str, dict[str, str]]]:
    """Rows of tab-separated columns, by column number if `pair` has numbers; otherwise the first
    line names the columns. Bytes that are not UTF-8 become surrogates, so that only the row that
    contains them is lost."""
    numbered, names = all(key.isdecimal() for key in pair), list[str]()
    for place, line in _lines(path, tally):
        cells = line.decode(errors="surrogateescape").rstrip("\r\n").split("\t")
        if cells == [""]:
            continue
        if numbered:
            yield place, {str(i): cell for i, cell in enumerate(cells, 1)}
        elif names:
            yield place, dict(zip(names, cells, strict=False))
        else:
            names = cells
            require(
                set(pair) <= set(names),
                f"{place}: no columns {' and '.join(pair)} in this header: give the names of two "
                "columns or, if the file has no header, their numbers, as in data.pair=[1,2]",
            )


def _texts(path: Path, by_line: bool, tally: Tally) -> Iterator[tuple[str, str]]:
    """Texts of one line each, or of several lines up to a blank one. A text of several lines is cut
    after the line with which it exceeds `LARGEST` characters."""
    lines: list[str] = []
    place, size = "", 0
    for at, line in chain(_lines(path, tally), [("", b"")]):
        text = line.decode(errors="surrogateescape").rstrip("\r\n")
        if lines and (by_line or not text.strip() or size > LARGEST):
            yield place, "\n".join(lines)
            lines, size = [], 0
        if text.strip():
            place, size = place if lines else at, size + len(text)
            lines.append(text)


def _array(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Elements of an array, parsed one by one from a window of text that moves over the file.
    Bytes that are not UTF-8 become surrogates, so that only the record that contains them is lost.
    """
    decoder, n, text, at, ended = json.JSONDecoder(), 0, "", 0, False
    with (
        path.open("rb") as raw,
        io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        while True:
            lead, wrong, cut = LEAD.match(text, at), "", False
            assert lead is not None
            if text.startswith("]", lead.end()) and lead[1] == ("" if n else "["):
                return
            try:
                if lead[1] != ("," if n else "["):
                    raise ValueError
                record, end = decoder.raw_decode(text, lead.end())
                cut = end > len(text) - 3  # a number might continue, as 2 does in 2e+5
            except RecursionError:
                wrong = "a record nested too deeply"
            except ValueError as error:
                wrong = "broken JSON"
                cut = lead.end() == len(text) or str(error).startswith("Unterminated string")
                cut = cut or getattr(error, "pos", -16) > len(text) - 16
            if cut and not ended and len(text) - at < LARGEST:
                piece = file.read(max(PIECE, len(text) - at))  # doubling keeps the time linear
                text, at, ended = text[at:] + piece, 0, not piece
            elif wrong:
                break
            else:
                n, at = n + 1, end
                yield f"{path}, item {n}", record
        percent = 100 * raw.tell() // max(1, path.stat().st_size)
    if cut and not ended:
        wrong = f"a record of more than {LARGEST >> 20} MB"
    reason = f"whatever follows {wrong}, about {percent} % into the file"
    if cut and ended:
        reason = "record cut off by the end of the file"
    tally.count(tally.unread, reason, f"{path}, after {n:,} complete records")


# Files of prompts


def read_prompts_file(path: str | Path) -> list[Conversation]:
    """Prompts to evaluate on, from a text file with one prompt per line, or from JSON lines or a
    JSON array. JSON holds strings, or records with "prompt", "messages" or "turns" (as in
    Spec-Bench; only the first turn is used, since later ones depend on an answer). Raises UserError
    naming the line or item that is none of these."""
    found, tally = [], Tally()
    for place, record in _prompt_records(Path(path), tally):
        messages: Any = None
        if isinstance(record, dict):
            turns = record.get("turns")
            first = turns[0] if isinstance(turns, list) and turns else None
            messages, record = record.get("messages"), record.get("prompt") or first
        messages = messages or [{"role": "user", "content": record}]
        try:
            found.append(conversation_of({"messages": messages}, place, "messages", Tally()))
        except Unusable as reason:
            raise UserError(
                f"{place}: {reason}; give one prompt per line, or JSON with "
                '"prompt", "messages" or "turns"'
            ) from reason
    for what in tally.unread:
        raise UserError(f"{tally.examples[what][0]}: cannot be read ({what})")
    require(bool(found), f"{path}: no prompt in it: give one prompt per line")
    return found


def _prompt_records(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    """The place of each record, and the record: a line of text or a JSON value."""
    require(path.is_file() or not path.exists(), f"{path}: is not a regular file")
    try:
        size = path.stat().st_size
        require(size <= LARGEST, f"{path}: more than {LARGEST >> 20} MB, too large for prompts")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    require("\0" not in text, f"{path}: cannot be read as UTF-8 text (it holds null bytes)")
    lines = [(n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    # this may be a single record that spans several lines
    if path.suffix == ".json" and text.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            yield str(path), json.loads(text)
            return
    if path.suffix in (".json", ".jsonl") or all(line.startswith("{") for _, line in lines):
        yield from _json(path, tally)
    else:
        yield from ((f"{path}, line {n}", line) for n, line in lines)

"""Reads records from JSON files (even truncated ones), tables, plain text, folders, packages, hub
data sets, and files of prompts, whatever their compression and encoding. Records are limited in
size. Everything that cannot be read is counted, or raises an error."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from specdec.compat import csv_rows
from specdec.errors import UserError, first_line, require
from specdec.hub import require_on_hub
from specdec.targets.gguf import find_package_file
from train.data.conversations import (
    TEXTS,
    Conversation,
    DataConfig,
    Repeated,
    Tally,
    Unusable,
)
from train.data.data_files import require_whole, split_files
from train.data.record_shapes import is_record
from train.data.records import conversation_of_record

SUFFIXES: tuple[str, ...] = (".jsonl", ".json", ".ndjson", ".csv", ".parquet", ".arrow")
LARGEST = 1 << 26  # characters or bytes of one record; anything longer is not a conversation
PIECE = 1 << 16  # characters of an array that are read at a time
LEAD = re.compile(r"[ \t\r\n]*([\[,]?)[ \t\r\n]*")  # text before an element of an array
MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}"]')  # strings and brackets of JSON
# the beginning of an object in which a list of records follows no more than plain values
WRAPPED = re.compile(
    r'\s*\{\s*(?:"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[^\s"\[\]{},]+)\s*,\s*)*"[^"\\]*"\s*:\s*(?=\[\s*\{)'
)
TABLES = (".parquet", ".arrow")
# what SPEED-Bench has in the place of prompts whose source does not allow a copy
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
PACKED = (".gz", ".bz2", ".xz", ".zst")  # endings of compressed files
BOM = b"\xef\xbb\xbf"
HEAD = 4096  # the bytes at the beginning that show an encoding
BUFFER = 1 << 16
MAGIC = {  # the first bytes of compressed files
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
OTHER = {  # the first bytes of files that are not text to train on
    b"PK\x03\x04": "a zip archive: unpack it",
    b"7z\xbc\xaf": "a 7z archive: unpack it",
    b"Rar!": "a rar archive: unpack it",
    b"%PDF": "a PDF: give its text",
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself: run `git lfs pull`",
    b"<!DOCTYPE": "a web page, not the file itself: download it again",
    b"<!doctype": "a web page, not the file itself: download it again",
    b"<html": "a web page, not the file itself: download it again",
}
WIDE = {  # first bytes of wide encodings, with a byte order mark, white space or ASCII
    "utf-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "utf-16": rb"\xff\xfe|\xfe\xff",
    "utf-32-le": rb"[\x09-\x7e]\0\0\0",
    "utf-32-be": rb"\0\0\0[\x09-\x7e]",
    "utf-16-le": rb"([\x09-\x7e]\0){2}",
    "utf-16-be": rb"(\0[\x09-\x7e]){2}",
}


@dataclass
class TextFile:
    """`stream` yields UTF-8; `percent_read` is the part of the file that has been read."""

    stream: IO[bytes]
    percent_read: Callable[[], int]


def records(cfg: DataConfig, tally: Tally) -> Iterator[tuple[str, Any]]:
    """The place and the content of every record of `cfg.path`, in order."""
    files = files_of(cfg, tally)
    if files is None:
        subset = [] if cfg.subset is None else [cfg.subset]
        require_on_hub("data.path", cfg.path, "dataset")
        yield from _dataset(cfg.path, cfg.path, *subset, split=cfg.split)
    for file in files or ():
        try:
            suffix = _suffix(file)
            if suffix in (".parquet", ".arrow"):
                yield from _dataset(file, suffix[1:], data_files=str(file), split="train")
            elif suffix == ".csv" or (suffix == ".tsv" and cfg.format not in TEXTS):
                yield from _table(file, cfg, tally)
            elif suffix not in SUFFIXES and cfg.format in TEXTS:
                yield from _texts(file, cfg.format == "lines", tally)
            elif suffix == ".txt" and cfg.format == "auto":
                yield from _texts(file, True, tally)
            else:
                yield from _json(file, tally)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from error


def files_of(cfg: DataConfig, tally: Tally | None = None) -> list[Path] | None:
    """The files of `data.path`; None if it is the name of a hub data set. Files of other splits of
    a folder are counted as unread. Raises UserError if there is no such file, folder, subset or
    split, or no file of a known type in the folder."""
    path, suffixes = cfg.path, SUFFIXES
    suffixes += (".tsv",) * (cfg.format == "pairs") + (".txt",) * (cfg.format in TEXTS)
    if path.startswith("package:"):
        require_whole(cfg)
        return [find_package_file(path.removeprefix("package:"), ".json")]
    file = Path(path)
    if file.is_dir():
        return split_files(cfg, lambda f: _suffix(f) in suffixes, suffixes, tally or Tally())
    local = file.is_absolute() or _suffix(file) in suffixes or path[:1] == "."
    if not file.exists() and not local:
        return None
    require(file.exists(), f"{path}: no such file or folder")
    require(file.is_file(), f"{path}: is not a regular file")
    require_whole(cfg)
    return [file]


def _suffix(file: Path) -> str:
    """The file name's suffix in lower case, without that of a compression."""
    name = Path(file.stem) if file.suffix.lower() in PACKED else file
    return name.suffix.lower()


def _dataset(path: str | Path, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Records that the datasets library reads on demand."""
    from datasets import load_dataset  # slow to import, seldom used

    try:
        for n, record in enumerate(load_dataset(*args, streaming=True, **kwargs), 1):
            yield f"{path}, row {n}", record
    except Exception as error:  # offline, gated, no such split, …
        what = "" if isinstance(path, Path) else ", either as a local file or as a dataset"
        raise UserError(f"{path} cannot be read{what}: {first_line(error)}") from error


def _json(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Records of a JSON array, of an object that wraps one, or of JSON values one after another:
    one a line, or each over several lines. Broken JSON is counted and skipped: a broken line alone,
    but in an array everything after it, since the next record cannot be found."""
    with opened(path, tally) as file:
        head = file.stream.peek(PIECE)  # type: ignore[attr-defined]
        text = head[:PIECE].decode(errors="ignore")
        skipped = 0 if text.lstrip().startswith("[") and not _lists(text) else _wrapped(text)
        if skipped is None:
            yield from _objects(path, file, tally)
        else:
            yield from _array(path, file, skipped, tally)


def _lists(text: str) -> bool:
    """Whether each line of a text is a list, as opposed to one list over all lines."""
    first, _, rest = text.lstrip().partition("\n")
    return rest.lstrip().startswith("[") and _opened(first.encode()) == 0


def _wrapped(text: str) -> int | None:
    """The position in a text where the list of records in a wrapping object begins; None if there
    is none."""
    if (start := WRAPPED.match(text)) is None:
        return None
    first = text[text.index("[", start.end()) + 1 :]
    try:
        record, _ = json.JSONDecoder().raw_decode(first.lstrip())
    except (ValueError, RecursionError):
        return None  # longer than the text, or broken
    return start.end() if is_record(record) else None


def _lines(path: Path, file: TextFile, tally: Tally) -> Iterator[tuple[str, bytes]]:
    """The place and the content of each line. Lines that are too long are counted and skipped."""
    for n in count(1):
        line, place = file.stream.readline(LARGEST), f"{path}, line {n}"
        if not line:
            return
        if len(line) == LARGEST:
            tally.count(tally.unread, f"lines of more than {LARGEST >> 20} MB", place)
            while line and not line.endswith(b"\n"):
                line = file.stream.readline(LARGEST)
        else:
            yield place, line


def _lines_of(path: Path, tally: Tally) -> Iterator[tuple[str, bytes]]:
    with opened(path, tally) as file:
        yield from _lines(path, file, tally)


def _objects(path: Path, file: TextFile, tally: Tally) -> Iterator[tuple[str, Any]]:
    """JSON values one after another. A value that is incomplete at the end of its line continues in
    the next lines, up to a line that is an object by itself."""
    held, start, depth = bytearray(), "", 0

    def lost(place: str, reason: str = "broken JSON line") -> None:
        tally.count(tally.unread, reason, place)

    for place, line in _lines(path, file, tally):
        if not line.strip():
            continue
        change = _opened(line) if held else None
        whole = change == 0 and line.startswith(b"{")
        if held and (whole or change is None or depth + change < 0):
            lost(start)
            held.clear()
        if not held:
            if (values := _values(place, line, lost)) is not None:
                yield from ((place, value) for value in values)
                continue
            start, depth, change = place, 0, _opened(line)
            if change is None or change <= 0:
                lost(place)
                continue
        assert change is not None
        held += line
        depth += change
        if depth == 0:
            if (values := _values(start, bytes(held), lost)) is None:
                lost(start)
            yield from ((start, value) for value in values or ())
            held.clear()
        elif len(held) > LARGEST:
            lost(start, f"records of more than {LARGEST >> 20} MB")
            held.clear()
    if held:
        lost(start)


def _opened(line: bytes) -> int | None:
    """The number of brackets that a line opens, less those that it closes; None if it cannot be
    part of JSON, where strings end in the line in which they begin."""
    depth = 0
    for mark in MARKS.finditer(line):
        if mark[0] == b'"':
            return None
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(mark[0], 0)
    return depth


def _values(place: str, data: bytes, lost: Callable[..., None]) -> list[Any] | None:
    """The values in one or several lines: one value, or objects one after another, with or without
    commas between them. None if they are broken or incomplete. Text that is not UTF-8 or nested too
    deeply is counted as `lost`."""
    try:
        text, values, at = data.decode("utf-8", "surrogatepass"), list[Any](), 0
        text = text.strip()
        while at < len(text):
            value, at = DECODER.raw_decode(text, at)
            values.append(value)
            at = LEAD.match(text, at).end()  # type: ignore[union-attr]
    except RecursionError:
        lost(place, "records nested too deeply")
        return []
    except UnicodeDecodeError:
        if _opened(data):
            return None  # it goes on
        lost(place, "line that is not UTF-8")
        return []
    except ValueError:
        return None
    several = len(values) > 1 or text.endswith(",")
    return values if not several or all(isinstance(value, dict) for value in values) else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, marked as `Repeated` if a key has two different values."""
    of_keys = dict(pairs)
    if len(of_keys) < len(pairs) and any(of_keys[key] != value for key, value in pairs):
        return Repeated(of_keys)
    return of_keys


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _table(path: Path, cfg: DataConfig, tally: Tally) -> Iterator[tuple[str, dict[str, str]]]:
    """Rows of a table, whose columns are named by its first line or, if `cfg.pair` has numbers, by
    their numbers. Empty cells are missing. Bytes that are not UTF-8 become surrogates, so that only
    their row is lost."""
    pairs = cfg.format == "pairs"
    numbered, names = pairs and all(key.isdecimal() for key in cfg.pair), list[str]()
    quoted = _suffix(path) == ".csv"
    for place, cells in _cells(path, quoted, tally):
        if not any(cells):
            continue
        if numbered:
            yield place, {str(i): cell for i, cell in enumerate(cells, 1)}
        elif not names:
            names = cells
            require(
                not pairs or {key.partition(".")[0] for key in cfg.pair} <= set(names),
                f"{place}: no columns {' and '.join(cfg.pair)} in this header: give the names of "
                "two columns or, if the file has no header, their numbers, as in data.pair=[1,2]",
            )
        elif quoted and any(cells[len(names) :]):
            tally.count(tally.unread, "rows with more cells than the header has", place)
        else:
            yield place, {k: cell for k, cell in zip(names, cells, strict=False) if pairs or cell}


def _cells(path: Path, quoted: bool, tally: Tally) -> Iterator[tuple[str, list[str]]]:
    """The cells of each row: between tabs or, `quoted` as in CSV files, commas."""
    place = ""

    def lines(file: TextFile) -> Iterator[str]:
        nonlocal place
        for at, line in _lines(path, file, tally):
            place = place or at
            yield line.decode(errors="surrogateescape")

    with opened(path, tally) as file:
        if not quoted:
            for text in lines(file):
                yield place, text.rstrip("\r\n").split("\t")
                place = ""
            return
        try:
            for cells in csv_rows(lines(file), LARGEST):
                yield place, cells
                place = ""
        except csv.Error as error:
            tally.count(tally.unread, f"whatever follows a broken row ({error})", place)


def _texts(path: Path, by_line: bool, tally: Tally) -> Iterator[tuple[str, str]]:
    """Texts of one line each, or of several lines up to a blank one. A text of several lines is cut
    after the line in which it exceeds `LARGEST` characters."""
    lines: list[str] = []
    place, size = "", 0
    for at, line in chain(_lines_of(path, tally), [("", b"")]):
        text = line.decode(errors="surrogateescape").rstrip("\r\n")
        if lines and (by_line or not text.strip() or size > LARGEST):
            yield place, "\n".join(lines)
            lines, size = [], 0
        if text.strip():
            place, size = place if lines else at, size + len(text)
            lines.append(text)


def _array(path: Path, file: TextFile, skipped: int, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Elements of an array that begins after `skipped` characters, parsed one by one from a
    moving window of text. Bytes that are not UTF-8 become surrogates, so that only their record
    is lost."""
    n, text, at, ended, comma = 0, "", skipped, False, False
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    while True:
        lead, wrong, cut = LEAD.match(text, at), "", False
        assert lead is not None
        if text.startswith("]", lead.end()):
            comma = n > 0 and lead[1] == ","
            if comma or lead[1] == ("" if n else "["):
                break
        try:
            if lead[1] != ("," if n else "["):
                raise ValueError
            record, end = DECODER.raw_decode(text, lead.end())
            cut = end > len(text) - 3  # a number might continue, as 2 does in 2e+5
        except RecursionError:
            wrong = "a record nested too deeply"
        except ValueError as error:
            wrong = "broken JSON"
            cut = lead.end() == len(text) or str(error).startswith("Unterminated string")
            cut = cut or getattr(error, "pos", -16) > len(text) - 16
        if cut and not ended and len(text) - at < LARGEST:
            data = file.stream.read(max(PIECE, len(text) - at))  # doubling keeps the time linear
            piece, ended = decoder.decode(data, final=not data), not data
            text, at = (text[at:] + piece, 0) if at <= len(text) else (text + piece, at)
        elif wrong:
            break
        else:
            n, at = n + 1, end
            yield f"{path}, item {n}", record
    place = f"{path}, after {n:,} complete records"
    if not wrong:
        if comma:
            tally.count(tally.unread, "nothing after the last comma", place)
        rest = text[lead.end() + 1 :]
        while not rest.strip() and (data := file.stream.read(PIECE)):
            rest = data.decode(errors="replace")
        if rest.strip() != "}" * bool(skipped):
            tally.count(tally.unread, "whatever follows the end of the list", place)
        return
    if cut and not ended:
        wrong = f"a record of more than {LARGEST >> 20} MB"
    reason = f"whatever follows {wrong}, about {file.percent_read()} % into the file"
    if cut and ended:
        reason = "record cut off by the end of the file"
    tally.count(tally.unread, reason, place)


# Text files as UTF-8


@contextmanager
def opened(path: Path, tally: Tally) -> Iterator[TextFile]:
    """A text file, read as UTF-8 without a byte order mark. gzip, bzip2, xz and zstd are recognised
    by the first bytes, as are UTF-16 and UTF-32. If compressed data are damaged or incomplete, the
    text ends there, and this is counted. Raises UserError for archives and the like."""
    with path.open("rb", buffering=BUFFER) as raw:
        size = max(1, path.stat().st_size)

        def percent_read() -> int:
            return 100 * raw.tell() // size

        head = _head(raw)
        for magic, what in OTHER.items():
            if head.startswith(magic):
                raise UserError(f"{path} is {what}")
        unpacked: Any = raw
        for magic, method in MAGIC.items():
            if head.startswith(magic):
                unpacked = io.BufferedReader(_Careful(_unpacked(raw, method), path, tally), BUFFER)
                head = _head(unpacked)
                break
        encoding = next((e for e, start in WIDE.items() if re.match(start, head)), None)
        if encoding:
            unpacked = io.BufferedReader(_Recoded(unpacked, encoding), BUFFER)
            head = _head(unpacked)
        if head.startswith(BOM):
            unpacked.read(len(BOM))
        yield TextFile(unpacked, percent_read)


def _head(stream: Any) -> bytes:
    """The first bytes of a stream, without consuming them."""
    return bytes(stream.peek(HEAD)[:HEAD])


def _unpacked(raw: IO[bytes], method: str) -> Any:
    if method == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if method == "bzip2":
        return bz2.BZ2File(raw)
    if method == "xz":
        return lzma.LZMAFile(raw)
    import pyarrow  # slow to import, seldom used

    return pyarrow.CompressedInputStream(raw, "zstd")


class _Careful(io.RawIOBase):
    """A decompressed stream that ends at damaged data and counts the damage."""

    def __init__(self, packed: Any, path: Path, tally: Tally) -> None:
        self.packed, self.path, self.tally = packed, path, tally

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.packed.read1(len(buffer))  # as much as can be read before the damage
        except (EOFError, ValueError, zlib.error, lzma.LZMAError, OSError) as error:
            if getattr(error, "errno", None):  # the disk, not the data
                raise
            reason = "whatever follows a place where the compressed file is cut or damaged"
            self.tally.count(self.tally.unread, reason, str(self.path))
            self.packed, data = io.BytesIO(), b""
        buffer[: len(data)] = data
        return len(data)


class _Recoded(io.RawIOBase):
    """A stream in another encoding, converted to UTF-8. An invalid unit becomes bytes that are not
    UTF-8, so that only its record is lost."""

    def __init__(self, stream: IO[bytes], encoding: str) -> None:
        self.stream, self.ready = stream, b""
        self.decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            data = self.stream.read(1 << 16)
            try:
                text = self.decoder.decode(data, final=not data)
                self.ready = text.encode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                self.ready = b"\xff"
                self.decoder.reset()
            if not data:
                break
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count


# Files of prompts


def read_prompts_file(path: str | Path, tally: Tally | None = None) -> list[Conversation]:
    """Prompts to evaluate on, from a text file with one prompt per line, or from JSON lines or a
    JSON array. JSON holds strings, or records in any known form (`conversation_of_record`); their
    tools, system turns and template arguments are part of the prompt. Of a record with only the
    user's "turns", as in Spec-Bench, the first is the prompt and the others are `later`, since they
    depend on a response. A published suite is read as it is: compressed, or as a table. Raises
    UserError naming the line or item that is none of these. Ignored fields are counted in
    `tally`."""
    cfg, tally, conversations = DataConfig(responses="target"), tally or Tally(), []
    for place, record in _prompt_records(Path(path), tally):
        tally.read += 1
        turns = record.get("turns") if isinstance(record, dict) else None
        require(
            not (isinstance(turns, list) and any(PLACEHOLDER in str(turn) for turn in turns)),
            f"{place}: SPEED-Bench does not ship this prompt but a placeholder: prepare the suite "
            "with its own script first",
        )
        try:
            conversations.append(
                replace(conversation_of_record(record, place, cfg, tally), id=place)
            )
        except Unusable as reason:
            raise UserError(
                f"{place}: {reason}; give one prompt per line, or JSON with "
                '"prompt", "messages" or "turns"'
            ) from reason
    for what in tally.unread:
        raise UserError(f"{tally.examples[what][0]}: cannot be read ({what})")
    require(bool(conversations), f"{path}: no prompt in it: give one prompt per line")
    return conversations


def _prompt_records(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    """The place of each record, and the record: a line of text or a JSON value."""
    table = _suffix(path) in TABLES or path.suffix.lower() in PACKED
    text = ""
    try:
        require(path.exists(), f"{path}: no such file")
        require(path.is_file(), f"{path}: is not a regular file")
        if not table:
            size = path.stat().st_size
            require(size <= LARGEST, f"{path}: more than {LARGEST >> 20} MB, too large for prompts")
            text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    if table:
        yield from records(DataConfig(str(path), responses="target"), tally)
        return
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

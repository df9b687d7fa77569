"""Text files as UTF-8, whatever their compression and encoding, and the kinds of files that hold no
text."""

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from specdec.errors import UserError
from train.data.conversations import Tally

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
WIDE = {  # how wide encodings begin, with a mark of their own or with white space or ASCII
    "utf-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "utf-16": rb"\xff\xfe|\xfe\xff",
    "utf-32-le": rb"[\x09-\x7e]\0\0\0",
    "utf-32-be": rb"\0\0\0[\x09-\x7e]",
    "utf-16-le": rb"([\x09-\x7e]\0){2}",
    "utf-16-be": rb"(\0[\x09-\x7e]){2}",
}


@dataclass
class TextFile:
    """`stream` gives UTF-8; `percent` says how much of the file has been read."""

    stream: IO[bytes]
    percent: Callable[[], int]


@contextmanager
def opened(path: Path, tally: Tally) -> Iterator[TextFile]:
    """A text file, read as UTF-8 without a byte order mark. gzip, bzip2, xz and zstd are known by
    the first bytes, as are UTF-16 and UTF-32. Where compressed data are damaged or cut, the text
    ends, and this is counted. Raises UserError for archives and the like."""
    with path.open("rb", buffering=BUFFER) as raw:
        size = max(1, path.stat().st_size)

        def percent() -> int:
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
        yield TextFile(unpacked, percent)


def _head(stream: Any) -> bytes:
    """The first bytes of a stream, which are not consumed."""
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
    """A decompressed stream that ends where the data are damaged, and counts that."""

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
    """A stream in another encoding, as UTF-8. A unit that is no character becomes bytes that are
    not UTF-8, so that only the record that contains it is lost."""

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

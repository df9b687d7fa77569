"""A generator of damage to files: bits flipped, files cut, emptied, deleted, swapped and edited.

`corrupt(files, others, seed)` damages one of some files, or a line of it, and says what it did.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FAR = [None, True, -1, 0, 1, 2.5, 10**12, float("nan"), "", "x", [], {}, [[]]]


def corrupt(files: Sequence[Path], others: Callable[[Path], Sequence[Path]], seed: int) -> str:
    """Damage one of the files in a way that suits its kind. `others` are the files of other runs,
    steps or caches that could be mistaken for it. Returns what was done; the file is never the same
    as before."""
    draw = random.Random(seed)
    for _ in range(1000):
        path = draw.choice(list(files))
        before = path.read_bytes()
        name, work = draw.choice(WAYS)
        after = work(path, before, others(path), draw)
        if after is None:
            path.unlink()
            return f"{name} of {path}"
        if after != before:
            path.write_bytes(after)
            return f"{name} of {path}"
    raise AssertionError("nothing was damaged")


def header(whole: bytes) -> int:
    """Where the numbers of a safetensors file begin."""
    return 8 + int.from_bytes(whole[:8], "little")


def flipped(whole: bytes, start: int, end: int, count: int, draw: random.Random) -> bytes:
    found = bytearray(whole)
    for _ in range(count if end > start else 0):
        found[draw.randrange(start, end)] ^= 1 << draw.randrange(8)
    return bytes(found)


def flip_in_header(path: Path, whole: bytes, _: Any, draw: random.Random) -> bytes:
    end = header(whole) if path.suffix == ".safetensors" else len(whole)
    return flipped(whole, 0, min(end, len(whole)), 1, draw)


def flip_in_numbers(path: Path, whole: bytes, _: Any, draw: random.Random) -> bytes:
    start = header(whole) if path.suffix == ".safetensors" else 0
    return flipped(whole, start, len(whole), draw.choice([1, 1, 8]), draw)


def cut(path: Path, whole: bytes, _: Any, draw: random.Random) -> bytes:
    return whole[: draw.choice([0, draw.randrange(len(whole) + 1), len(whole) - 1])]


def grown(path: Path, whole: bytes, _: Any, draw: random.Random) -> bytes:
    return whole + draw.randbytes(draw.choice([1, 100]))


def blanked(path: Path, whole: bytes, _: Any, draw: random.Random) -> bytes:
    start = draw.randrange(len(whole)) if whole else 0
    return whole[:start] + bytes(min(64, len(whole) - start)) + whole[start + 64 :]


def swapped(path: Path, whole: bytes, others: Sequence[Path], draw: random.Random) -> bytes:
    return draw.choice(others).read_bytes() if others else whole


def deleted(path: Path, whole: bytes, _: Any, draw: random.Random) -> None:
    return None


def edited(path: Path, whole: bytes, _: Any, draw: random.Random) -> bytes:
    """JSON with another value somewhere: a file, one of its lines, or the header of tensors."""
    if path.suffix == ".safetensors":
        end = header(whole)
        text = json.dumps(changed(json.loads(whole[8:end]), draw)).encode()
        return len(text).to_bytes(8, "little") + text + whole[end:]
    if path.suffix == ".jsonl":
        lines = whole.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(changed(json.loads(lines[at]), draw)).encode()
        return b"".join(line + b"\n" for line in lines)
    if path.suffix == ".json":
        return json.dumps(changed(json.loads(whole), draw), indent=1).encode()
    return whole


def changed(value: Any, draw: random.Random) -> Any:
    """A value with one leaf replaced or nudged, or one entry removed."""
    if isinstance(value, dict | list) and value:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if draw.random() < 0.1:
            del value[key]
        else:
            value[key] = changed(value[key], draw)
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or draw.random() < 0.3:
        return draw.choice(FAR)
    return draw.choice([value + 1, value - 1, value * 2, value * 0.5])


WAYS: list[tuple[str, Callable[..., bytes | None]]] = [
    ("a bit flipped in the header", flip_in_header),
    ("bits flipped in the numbers", flip_in_numbers),
    ("a cut", cut),
    ("bytes after the end", grown),
    ("zeros in the middle", blanked),
    ("a swap", swapped),
    ("an edit", edited),
    ("an edit ", edited),
    ("a deletion", deleted),
]

"""Checksums that detect damage to files of a run.

A JSON object has its checksum under the key `checksum`; the checksum of tensors is in a JSON object
or in the header of their file. A checksum also covers a `context`, such as the inputs of the
values, which is not stored beside it: a file that was moved to another place therefore fails the
check. Checksums detect damage, mistakes and edits; they do not resist forgery.

Objects without a checksum are from an earlier version and are accepted. The hash is xxh3, which is
faster than most programs read memory (some 10 GB/s on one core).
"""

import ast
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from specdec.errors import UserError

KEY = "checksum"
CHUNK = 2**20  # bytes that are read at a time


class Damaged(UserError):
    """The data on disk differ from the data that were written."""


def of_value(value: Any, context: str = "") -> str:
    """The checksum of a value as JSON represents it, independent of the layout of the text."""
    return _of_json(json.loads(json.dumps(value)), context)


def of_tensors(tensors: Mapping[str, Tensor], context: str = "") -> str:
    """The checksum of tensors: their names, types, shapes and bytes."""
    digest = xxh3_128(context.encode())
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        digest.update(f"\n{name} {x.dtype} {list(x.shape)}\n".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def of_file(path: Path) -> str:
    """The checksum of a file's bytes."""
    digest = xxh3_128()
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            digest.update(part)
    return digest.hexdigest()


def of_code(paths: Iterable[Path]) -> str:
    """The checksum of Python files: their names and syntax trees, without comments, docstrings and
    layout."""
    digest = xxh3_128()
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0] if node.body else None
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    node.body = node.body[1:]
        digest.update(f"\n{path.parent.name}/{path.name} {ast.dump(tree)}".encode())
    return digest.hexdigest()


def sealed(value: Mapping[str, Any], context: str = "") -> dict[str, Any]:
    """A copy of an object with its checksum added."""
    return {**value, KEY: of_value(value, context)}


def unsealed(value: Any, context: str = "", where: object = "") -> Any:
    """An object without its checksum, after checking it; any other value unchanged. Raises Damaged,
    beginning with `where`, if the checksum is wrong."""
    if not isinstance(value, dict) or KEY not in value:
        return value
    rest = {key: x for key, x in value.items() if key != KEY}
    if value[KEY] != _of_json(rest, context):
        raise Damaged(f"{where} is damaged, was edited, or was moved here (its checksum differs)")
    return rest


def _of_json(value: Any, context: str) -> str:
    """The checksum of a value that was read from JSON, where keys are text and lists are lists."""
    return xxh3_128(f"{context}\n{json.dumps(value, sort_keys=True)}".encode()).hexdigest()

"""JSON lines that a run wrote itself, and may have been interrupted in."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def records(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The records that have these keys; a line that is cut short or damaged is left out."""
    found = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and all(key in record for key in keys):
            found.append(record)
    return found

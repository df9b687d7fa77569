"""What `train.py` prints for a mistake."""

import re
from pathlib import Path

import pytest

import train
from specdec.errors import UserError, command
from tests.tiny import compose


def require_one_line(text: str, *parts: str) -> None:
    """One line that begins with "error:" and has every part (regular expressions)."""
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    assert lines[0].startswith("error: ")
    for part in parts:
        assert re.search(part, lines[0]), f"{part!r} is not in {lines[0]!r}"


def told(
    capsys: pytest.CaptureFixture[str], overrides: list[str], folder: Path | None = None
) -> str:
    """What `train.py` prints on stderr for these overrides, in this process; without a folder,
    before the job starts."""
    capsys.readouterr()
    with pytest.raises(UserError) as caught:
        config = compose(overrides)
        if folder is not None:
            train.run(config, folder)
    capsys.readouterr()

    def mistaken() -> None:
        raise caught.value

    with pytest.raises(SystemExit) as ended:
        command(mistaken)
    assert ended.value.code == 2
    return capsys.readouterr().err

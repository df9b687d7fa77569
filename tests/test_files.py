"""Files that appear whole or not at all.

Run alone: pytest tests/test_files.py
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec.files import replaced, write_whole


def test_an_interrupted_block_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    with replaced(tmp_path / "draft") as partial:
        (partial / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), replaced(tmp_path / "draft") as partial:
        (partial / "b").write_text("new")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]
    assert [p.name for p in (tmp_path / "draft").iterdir()] == ["a"]
    with replaced(tmp_path / "draft") as partial:
        (partial / "b").write_text("new")
    assert [p.name for p in (tmp_path / "draft").iterdir()] == ["b"]


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o007, 0o660)])
def test_files_get_the_mode_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    """safetensors creates its files readable by their owner alone."""
    before = os.umask(umask)
    try:
        with replaced(tmp_path / "draft") as partial:
            (partial / "card.json").write_text("{}")
            (partial / "below").mkdir()
            save_file({"x": torch.ones(2)}, partial / "below" / "model.safetensors")
    finally:
        os.umask(before)
    files = [p for p in (tmp_path / "draft").rglob("*") if p.is_file()]
    assert {oct(p.stat().st_mode & 0o777) for p in files} == {oct(mode)} and len(files) == 2


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_whole(tmp_path / "state.json", text)
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    assert (tmp_path / "state.json").read_text() == "two"

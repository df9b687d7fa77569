"""Only files of our connector are read and deleted, whatever path an engine names.

Run alone: python -m pytest tests/engines/test_states.py (under 10 s)
"""

import ast
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec.engines.client import ServerUnavailable
from specdec.engines.vllm import FOLDER_MARK, MARK, remove_states, states_of
from specdec.errors import UserError
from tests.tiny import REPOSITORY

TEXT, WIDTH = [1, 2, 3], 4


def written(path: Path, metadata: dict[str, str] | None, width: int = WIDTH) -> Path:
    """A file of hidden states after layer 1, beside an empty lock."""
    tensors = {"hidden_states": torch.zeros(3, 1, width), "token_ids": torch.tensor(TEXT)}
    save_file(tensors, path, metadata)
    path.with_name(f"{path.name}.lock").touch()
    return path


def read(path: Path, text: Sequence[int] = TEXT) -> Any:
    reply = {"kv_transfer_params": {"hidden_states_path": str(path), "layers": [1]}}
    return states_of(reply, text, [1], WIDTH)


def test_a_file_of_our_connector_is_read_and_deleted(tmp_path: Path) -> None:
    (tmp_path / FOLDER_MARK).touch()
    (states,) = read(written(tmp_path / "a.safetensors", MARK))
    assert states.shape == (3, WIDTH)
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER_MARK]


@pytest.mark.parametrize("kind", ["folder", "header", "name", "link", "no tensors"])
def test_a_foreign_file_is_neither_read_nor_deleted(tmp_path: Path, kind: str) -> None:
    """The user's own weights, in a folder of theirs or in ours, or behind a link."""
    if kind != "folder":
        (tmp_path / FOLDER_MARK).touch()
    path = tmp_path / ("a.bin" if kind == "name" else "a.safetensors")
    if kind == "no tensors":
        path.write_text("my notes")
        path.with_name(f"{path.name}.lock").touch()
    elif kind == "link":
        (tmp_path / "theirs").mkdir()
        path.symlink_to(written(tmp_path / "theirs" / "w.safetensors", MARK))
        path.with_name(f"{path.name}.lock").touch()
    else:
        written(path, None if kind == "header" else MARK)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="which our connector did not write") as error:
        read(path)
    assert "\n" not in str(error.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_more_bytes_than_the_tokens_need_are_not_read(tmp_path: Path) -> None:
    (tmp_path / FOLDER_MARK).touch()
    path = written(tmp_path / "a.safetensors", MARK, width=2**17)
    with pytest.raises(UserError, match=r"1,57\d,\d+ bytes of states where at most 120 fit"):
        read(path)


def test_a_named_pipe_for_a_lock_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / FOLDER_MARK).touch()
    os.mkfifo(tmp_path / "a.safetensors.lock")
    with pytest.raises(ServerUnavailable, match="was not written"):
        read(tmp_path / "a.safetensors")


def test_only_our_files_are_removed_when_an_engine_starts(tmp_path: Path) -> None:
    """`scripts/serve --states FOLDER` deleted every *.safetensors there."""
    written(tmp_path / "weights.safetensors", None)
    written(tmp_path / "ours.safetensors", MARK)
    remove_states(tmp_path)
    assert (tmp_path / "ours.safetensors").exists(), "the folder is not marked"
    (tmp_path / FOLDER_MARK).touch()
    remove_states(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [FOLDER_MARK, "weights.safetensors", "weights.safetensors.lock"]


def test_the_connector_writes_these_marks() -> None:
    """It runs in vLLM's environment and imports nothing from here."""
    tree = ast.parse((REPOSITORY / "scripts" / "hidden_states.py").read_text())
    constants = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert constants == {"FOLDER_MARK": FOLDER_MARK, "MARK": MARK}

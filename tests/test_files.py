"""Files that appear whole or not at all.

Run alone: pytest tests/test_files.py
"""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from specdec import files
from specdec.errors import UserError, of_files
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


def test_only_our_files_are_replaced(tmp_path: Path) -> None:
    """The user's files, folders and links stay, as they were, and a name is never taken."""
    draft, elsewhere = tmp_path / "draft", tmp_path / "elsewhere"
    elsewhere.write_text("apart")
    with replaced(draft, ("w*", "card")) as partial:
        (partial / "w1").write_text("old")
        (partial / "w2").write_text("old")
        (partial / "card").write_text("old")
    (draft / "notes.md").write_text("mine")
    (draft / "notes.md").chmod(0o640)
    (draft / "plots").mkdir()
    (draft / "plots" / "w1").write_text("mine")
    (draft / "link").symlink_to(elsewhere)
    with replaced(draft, ("w*", "card")) as partial:
        (partial / "w1").write_text("new")
        (partial / "card").write_text("new")
    texts = {str(p.relative_to(draft)): p.read_text() for p in draft.rglob("*") if p.is_file()}
    assert texts == {
        "w1": "new",
        "card": "new",
        "notes.md": "mine",
        "plots/w1": "mine",
        "link": "apart",
    }
    assert (draft / "link").is_symlink() and elsewhere.read_text() == "apart"
    assert (draft / "notes.md").stat().st_mode & 0o777 == 0o640
    with (
        pytest.raises(UserError, match="was not written by us"),
        replaced(draft, ("w*", "card")) as partial,
    ):
        (partial / "notes.md").write_text("new")
    assert (draft / "notes.md").read_text() == "mine" and (draft / "w1").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft", "elsewhere"]


def test_folders_beside_it_are_the_users(tmp_path: Path) -> None:
    """Only names that we alone give are cleared away: what a killed program left behind."""
    mine = [".draft.old", ".draft.partial", ".draft.x.old", ".draft2." + 32 * "0" + ".old"]
    left = [".draft." + 32 * "0" + ".partial", ".draft." + 32 * "1" + ".old"]
    for name in ("draft", *mine, *left):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text(name)
    with replaced(tmp_path / "draft") as partial:
        (partial / "a").write_text("new")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["draft", *mine])
    assert all((tmp_path / name / "thesis").read_text() == name for name in mine)


def test_a_folder_that_a_killed_program_moved_away_comes_back(tmp_path: Path) -> None:
    """Killed between the two renames: the old folder is whole under its temporary name."""
    moved = tmp_path / f".draft.{32 * 'a'}.old"
    moved.mkdir()
    (moved / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), replaced(tmp_path / "draft"):
        raise KeyboardInterrupt
    assert (tmp_path / "draft" / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_the_current_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that holds it: a shell would stand in a folder that is gone."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    for name in (".", "..", "../../a", "/"):
        with (
            pytest.raises(UserError, match="is the current folder or holds it"),
            replaced(Path(name)),
        ):
            pass
    with replaced(Path("c")) as partial:
        (partial / "x").write_text("")
    assert [p.name for p in Path().iterdir()] == ["c"]


def test_a_linked_folder_is_replaced_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "disk")
    with replaced(tmp_path / "here") as partial:
        (partial / "a").write_text("new")
    assert (tmp_path / "disk" / "a").read_text() == "new" and (tmp_path / "here").is_symlink()


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_whole(tmp_path / "state.json", text)
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    assert (tmp_path / "state.json").read_text() == "two"


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_reader_finds_a_folder_at_any_moment_of_its_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """Looked for before each rename: with an exchange of names it is always there; without one, a
    reader waits for it."""
    if not exchanges:
        monkeypatch.setattr(files, "exchange", lambda *_: False)
    path, seen, rename = tmp_path / "draft" / "x", list[bool](), os.rename
    for n in range(2):
        with files.replaced(path.parent) as partial:
            (partial / "x").write_text(str(n))

    def looking(*names: Any) -> None:
        seen.append(path.exists())
        if not path.exists():
            threading.Timer(0.1, lambda: rename(*names)).start()
            assert files.wait_for_replacement(path)
        else:
            rename(*names)

    monkeypatch.setattr(os, "rename", looking)
    with files.replaced(path.parent) as partial:
        (partial / "x").write_text("2")
    assert path.read_text() == "2"
    assert seen == ([True] if exchanges else [True, False])
    assert not files.wait_for_replacement(tmp_path / "other" / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_a_name_that_is_not_utf8_is_rejected_before_the_work(tmp_path: Path) -> None:
    """JSON and safetensors cannot hold it: a run would train to its end, and then not save."""
    with pytest.raises(UserError, match="not UTF-8"):
        files.make_folder(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write knows no name, and neither does safetensors."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError) as text:
            write_whole(tmp_path / "a.json", "text")
    with pytest.raises(SafetensorError) as tensors, replaced(tmp_path / "draft"):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    for error, name in ((text, "a.json"), (tensors, "draft")):
        assert str(of_files(error.value)).startswith(f"{tmp_path / name}: No space left on device")
    assert not list(tmp_path.iterdir())

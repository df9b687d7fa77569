"""Files in folders that several users and processes share: unreadable is not damaged, nothing is
deleted that somebody else may need, and modes follow the umask.

Run alone: python -m pytest tests/test_shared_files.py (under 20 s)
"""

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.context import HiddenStateSpec
from specdec.errors import Unreadable, UserError
from specdec.files import new_file, read_json, recover, remove_abandoned, replaced, write_json
from specdec.sampling.sampler import Sampler
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.tiny import REPOSITORY, Tiny, compose
from train.data.conversations import SourceConfig
from train.data.sequences import Document
from train.folder import locked
from train.hidden_states.store import HiddenStatesConfig, HiddenStateStore
from train.run_config import PATHS, expand_home

NOBODY = 65534


def as_another_user(work: Callable[[], Any]) -> Any:
    """What `work` returns, or the text of the UserError that it raises, in a process of a user who
    is not root and owns nothing here."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.seteuid(NOBODY)
            try:
                ended = work()
            except UserError as error:
                ended = f"{type(error).__name__}: {error}"
            os.write(write, json.dumps(ended).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(said)


@contextmanager
def without_descriptors() -> Iterator[None]:
    """No file can be opened in this block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 8, before[1]))
    try:
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for number in opened:
            os.close(number)


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder in which everybody may read and write, with parents that let them pass."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in tmp_path.parents[:3]:
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | 0o711)
    tmp_path.chmod(0o755)
    return folder


def store_in(tiny: Tiny, folder: Path, **more: Any) -> HiddenStateStore:
    target = load_target(TargetConfig(str(tiny.target), "float32", "cpu"))
    cfg = HiddenStatesConfig(**{"path": str(folder), **more})
    return HiddenStateStore(cfg, target, HiddenStateSpec((1,)), Sampler())


def filled(tiny: Tiny, folder: Path) -> tuple[HiddenStateStore, Any]:
    """A store with one document, and that document's ids."""
    store = store_in(tiny, folder)
    target = load_target(TargetConfig(str(tiny.target), "float32", "cpu"))
    store.prepare(8)
    document = Document("x", torch.arange(1, 9).int().numpy(), torch.ones(8).bool().numpy())
    with torch.no_grad():
        ids = torch.from_numpy(document.ids).long()[None]
        ctx, final = target.hidden_states(ids, HiddenStateSpec((1,)))
    store.hold_document(document.ids.tolist(), final, ctx.layers_BTF, target)
    store.write()
    store.refresh()
    return store, document.ids


def test_another_user_s_hidden_states_are_skipped_and_stay(
    tiny: Tiny, open_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reported as damaged, and deleted, before."""
    store, ids = filled(tiny, open_folder)
    (path,) = open_folder.glob("*.safetensors")
    before = path.read_bytes()
    path.chmod(0o600 if os.geteuid() == 0 else 0)

    def look() -> bool:
        store.refresh()
        return store.has(ids)

    assert as_another_user(look) is False
    path.chmod(0o644)
    assert path.read_bytes() == before and look()


def test_without_a_file_descriptor_nothing_is_damaged(tiny: Tiny, open_folder: Path) -> None:
    store, ids = filled(tiny, open_folder)
    write_json(open_folder / "x.json", {"a": 1})
    before = {path.name: path.read_bytes() for path in open_folder.iterdir()}
    for work in (store.refresh, lambda: read_json(open_folder / "x.json")):
        with without_descriptors(), pytest.raises((Unreadable, OSError)) as error:
            work()
        assert not isinstance(error.value, FileNotFoundError)
    assert {path.name: path.read_bytes() for path in open_folder.iterdir()} == before
    store.refresh()
    assert store.has(ids)


def test_a_damaged_file_is_put_aside_and_not_deleted(tiny: Tiny, open_folder: Path) -> None:
    store, ids = filled(tiny, open_folder)
    (path,) = open_folder.glob("*.safetensors")
    path.write_bytes(damaged := path.read_bytes()[:-100])
    store.refresh()
    assert not store.has(ids) and not path.exists()
    assert path.with_name(f"{path.name}.damaged").read_bytes() == damaged


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_hidden_states_follow_the_umask(tiny: Tiny, open_folder: Path, umask: int) -> None:
    """safetensors gives its files mode 0600 whatever the umask."""
    before = os.umask(umask)
    try:
        filled(tiny, open_folder)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in open_folder.iterdir()}
    assert modes == {0o666 & ~umask}


WRITER = """
import sys, time
from pathlib import Path
from specdec.files import new_file, replaced
kind, path = sys.argv[1], Path(sys.argv[2])
with (new_file if kind == "file" else replaced)(path) as partial:
    (partial if kind == "file" else partial / "x").write_text("half")
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_began_is_removed_and_what_is_being_written_stays(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "target"
    remove = (lambda: remove_abandoned(tmp_path)) if kind == "file" else (lambda: recover(path))
    command = [sys.executable, "-c", WRITER, kind, str(path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        before = sorted(tmp_path.iterdir())
        remove()
        assert sorted(tmp_path.iterdir()) == before and len(before) == 2
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    remove()
    assert not [*tmp_path.iterdir()]


def test_what_an_earlier_version_began_is_removed_after_a_day(tmp_path: Path) -> None:
    """It held no lock, so only its age says that nobody writes it. Other names are left alone."""
    names = [f"a.partial-{n * 32}" for n in "01"] + ["b.partial-x", "c.safetensors"]
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    os.utime(tmp_path / names[1], (time.time(), time.time()))
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


@pytest.fixture(params=["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some file systems are."""

    def flock(*_: Any) -> None:
        raise OSError(getattr(errno, request.param), "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("without_locks")
def test_without_locks_files_are_written_and_what_may_be_being_written_stays(
    tmp_path: Path,
) -> None:
    file, folder = tmp_path / "x.safetensors", tmp_path / "draft"
    for text in ("old", "new"):
        with new_file(file) as partial, replaced(folder) as begun:
            partial.write_text(text)
            (begun / "a").write_text(text)
            before = sorted(tmp_path.iterdir())
            remove_abandoned(tmp_path)
            recover(folder)
            assert sorted(tmp_path.iterdir()) == before
        assert file.read_text() == (folder / "a").read_text() == text
        assert {*tmp_path.iterdir()} == {file, folder}


@pytest.mark.usefixtures("without_locks")
def test_without_locks_what_a_killed_process_began_is_removed_after_a_day(tmp_path: Path) -> None:
    """An old folder that it had moved away comes back at once."""
    begun, hidden = f"x.partial-{'0' * 32}", f".draft.{'0' * 32}"
    (tmp_path / f"{hidden}.partial").mkdir()
    (tmp_path / f"{hidden}.old").mkdir()
    for name in (begun, f"{begun}.lock", f"{hidden}.lock"):
        (tmp_path / name).touch()
    remove_abandoned(tmp_path)
    recover(tmp_path / "draft")
    names = {begun, f"{begun}.lock", f"{hidden}.lock", f"{hidden}.partial", "draft"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        os.utime(tmp_path / name, (0, 0))
    remove_abandoned(tmp_path)
    recover(tmp_path / "draft")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("write", [new_file, replaced])
def test_a_lock_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Any]
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match="Input/output"), write(tmp_path / "x"):
        pass
    assert len(os.listdir("/dev/fd")) == before
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("without_locks")
def test_a_run_without_a_lock_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(tmp_path / "run"), locked(tmp_path / "run"):
        pass
    (line,) = capsys.readouterr().err.splitlines()  # said once in a process
    assert f"{tmp_path / 'run'} is on a file system without locks" in line


def test_new_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with new_file(path) as partial:
        save_file({"a": torch.zeros(2)}, partial)
        assert not path.exists()
    with pytest.raises(FileNotFoundError), new_file(path) as partial:
        save_file({"a": torch.ones(2)}, partial)
        raise FileNotFoundError
    assert [*tmp_path.iterdir()] == [path]
    assert load_file(path)["a"].tolist() == [0, 0]
    with replaced(tmp_path / "y") as folder:
        (folder / "z").touch()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors", "y"]


def test_the_room_for_hidden_states_of_responses_is_announced_and_checked(
    tiny: Tiny,
    open_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two prompts of 3 tokens with responses of up to 5: 8 tokens at least, 16 at most."""
    store = store_in(tiny, open_folder)
    least, most = store.kind.bytes(8), store.kind.bytes(16)

    def prepared(free: int) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        store.prepare_for_responses([[1, 2, 3]] * 2, 5)
        said = capsys.readouterr()
        assert "(if every response has 5 tokens)" in " ".join(said.out.split())
        return " ".join(said.err.split())

    assert "may become full" not in prepared(most)
    assert "may become full" in prepared(most - 1)
    with pytest.raises(UserError, match=r"hidden_states\.path$"):
        prepared(least - 1)


@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        (
            {},
            "give hidden_states.bits=8 or hidden_states.mode=online or another hidden_states.path",
        ),
        ({"bits": 8}, "give hidden_states.mode=online or another hidden_states.path"),
        ({"mode": "none"}, "give hidden_states.bits=8 or another hidden_states.path"),
        ({"path": None, "bits": 8, "mode": "none"}, "give another hidden_states.root"),
    ],
)
def test_a_full_disk_is_told_with_what_would_help(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, ways: str
) -> None:
    store = store_in(tiny, tmp_path / "store", root=str(tmp_path / "root"), **settings)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(UserError, match=f"{re.escape(ways)}$"):
        store.prepare(8)


def test_home_is_written_for_a_tilde_in_every_path(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`responses.root=~/x` made a folder named ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compose(tiny.overrides("eagle3", "responses.root=~/x")).responses.root == str(
        tmp_path / "x"
    )
    cfg = tiny.config()
    cfg.data.sources = [SourceConfig("~/a")]
    settings = [key.split(".") for key in PATHS if not key.startswith("drafter.")]
    for group, name in settings:
        assert hasattr(getattr(cfg, group), name)
        setattr(getattr(cfg, group), name, f"~/{group}.{name}")
    expand_home(cfg)
    for group, name in settings:
        assert getattr(getattr(cfg, group), name) == str(tmp_path / f"{group}.{name}")
    assert cfg.data.sources[0].path == str(tmp_path / "a")

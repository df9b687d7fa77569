"""Commands in processes of their own.

Importing torch and transformers takes most of the time of a short command. So the scripts run as
forks of one process that has imported them, which a test session starts once.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from multiprocessing.process import BaseProcess
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from types import ModuleType
from unittest.mock import patch

import pytest

from specdec import errors
from tests.tiny import REPOSITORY

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])


def environment() -> dict[str, str]:
    """One thread, no network, no W&B, and this repository first on the path."""
    given = {k: v for k, v in os.environ.items() if not k.startswith("HYDRA_")}
    return given | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(REPOSITORY),
        "COLUMNS": "80",
    }


def process(
    arguments: Sequence[str], timeout: float = 120, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in the repository, to its end, with `more` in its environment. A
    script is run by `forked`; a new Python is started for a module or for code."""
    if arguments[0].startswith("-"):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env=environment() | more,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        child = forked(arguments, out, err, **more)
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            raise subprocess.TimeoutExpired(list(arguments), timeout, out.read_text())
        return subprocess.CompletedProcess(
            list(arguments), child.exitcode, out.read_text(), err.read_text()
        )


def forked(arguments: Sequence[str], out: Path, err: Path, **more: str) -> BaseProcess:
    """A process that runs this script as `python ARGUMENTS` does, and writes to these files or
    pipes. It is a fork of one that has imported what scripts import: `more` in its environment
    is seen by what reads variables later than that."""
    return fork_of_server(_run, list(arguments), out, err, environment() | more)


def fork_of_server(target: Callable[..., object], *args: object) -> BaseProcess:
    """A started process that calls this function of an importable module."""
    child = FORKS.Process(target=target, args=args)
    with patch.dict(os.environ, environment(), clear=True):  # the first one starts the server
        child.start()
    return child


@contextmanager
def launched(
    arguments: Sequence[str], count: int, folder: Path, **more: str
) -> Iterator[list[BaseProcess]]:
    """`count` processes of `python ARGUMENTS` that form a group, as a launcher starts them. What
    they print is in `folder`/RANK.out and .err. Whichever still run at the end are killed."""
    folder.mkdir(exist_ok=True)
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = []
    for rank in range(count):
        own = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | more
        out, err = folder / f"{rank}.out", folder / f"{rank}.err"
        children.append(forked(arguments, out, err, **own))
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.join()


def together(
    arguments: Sequence[str], count: int, folder: Path, timeout: float = 240, **more: str
) -> None:
    """Run `launched` processes to their end; fails as soon as one of them does."""
    with launched(arguments, count, folder, **more) as children:
        until, ended = time.monotonic() + timeout, list[int | None]([None])
        while None in ended:
            time.sleep(0.05)
            ended = [child.exitcode for child in children]
            if set(ended) - {0, None} or time.monotonic() > until:
                time.sleep(1)  # until the others have said why
                said = [(folder / f"{rank}.err").read_text()[-2000:] for rank in range(count)]
                raise AssertionError(f"exit codes {ended}: {said}")


def _run(arguments: list[str], out: Path, err: Path, given: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(given)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(REPOSITORY)
    sys.argv, sys.path[0] = arguments, str((REPOSITORY / arguments[0]).parent)
    sys.path[1:1] = given["PYTHONPATH"].split(os.pathsep)
    runpy.run_path(arguments[0], run_name="__main__")


def script_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module, without running it."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    monkeypatch.setattr(errors, "command", lambda main: None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = SourceFileLoader(f"script_{name}", str(REPOSITORY / "scripts" / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module

"""The target and the scripts that the tests of measuring share."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.targets.target import Target
from tests.engine import FakeEngine
from tests.tiny import REPOSITORY, architectures, make_tokenizer, random_target


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = make_tokenizer()
    target = random_target(architectures(len(tokenizer), 4)["llama"])
    target.tokenizer = tokenizer
    return target


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a script prints, in this process, and its exit code."""

    def run(name: str, *arguments: str) -> tuple[str, int]:
        path = str(REPOSITORY / "scripts" / name)
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        try:
            runpy.run_path(path, run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        out, err = capsys.readouterr()
        assert not err, err
        return out, code

    return run


@pytest.fixture
def check(script: Any) -> Any:
    """What scripts/check prints of an export on an engine, and its exit code."""

    def run(export: Path, engine: FakeEngine, *more: str) -> tuple[str, int]:
        out, code = script("check", str(export), "--engine", engine.url, *more)
        return out, code

    return run

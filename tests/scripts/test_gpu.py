"""`scripts/bench gpu`: what a GPU is asked, tried on the CPU; and tests on another device.

Run alone: python -m pytest tests/scripts/test_gpu.py
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.drafters import frequent_tokens
from specdec.errors import UserError
from tests.device import Placed
from tests.processes import process
from tests.tiny import REPOSITORY, make_tiny


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))


Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run these pieces, commands of Python each, and return what the bench printed."""
    from benches import gpu as bench

    def ran(minutes: float = 9.0, **commands: Any) -> str:
        todo = [
            bench.GpuPart(name, (sys.executable, "-c", code), resumes=True)
            for name, code in commands.items()
        ]
        monkeypatch.setattr(bench, "pieces", lambda *_: todo)
        bench.gpu(dry=True, minutes=minutes, folder=tmp_path)
        return capsys.readouterr().out

    return ran


def counted(path: Path, then: str = "") -> str:
    """A piece that notes in a file that it ran, prints a table, and does something more."""
    return f"open({str(path)!r}, 'a').write('x'); print('| a | b |', flush=True); {then}"


def test_a_piece_that_is_done_is_not_run_again_and_its_rows_stay(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        assert "| a | b |\n" in run(one=counted(tmp_path / "ran"))
    assert (tmp_path / "ran").read_text() == "x"
    assert "| a | b |" in (tmp_path / "rows.md").read_text()
    run(one=counted(tmp_path / "ran", "1"))  # another command
    assert (tmp_path / "ran").read_text() == "xx"


def test_a_piece_that_fails_is_named_and_tried_again_after_the_others(
    run: Run, tmp_path: Path
) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    for calls in (1, 2):
        with pytest.raises(UserError, match=r"the piece one failed with 1: it broke"):
            run(one=counted(bad, "raise SystemExit('it broke')"), two=counted(good))
        assert bad.read_text() == "x" * calls and good.read_text() == "x"
    assert "| a | b |" in (tmp_path / "rows.md").read_text()


def test_a_call_ends_in_time_and_the_next_goes_on(run: Run, tmp_path: Path) -> None:
    """A piece that sleeps unless it ran before: interrupted in the first call, done in the next."""
    from benches import gpu as bench

    ran = tmp_path / "ran"
    sleepy = counted(ran, f"import time; len(open({str(ran)!r}).read()) > 1 or time.sleep(600)")
    with pytest.raises(SystemExit) as stopped:
        run(minutes=(bench.GRACE + 5) / 60, one=sleepy)  # within which Python has started
    assert stopped.value.code == 3
    kept = json.loads((tmp_path / "one.json").read_text())
    assert kept["status"] is None and kept["calls"] == 1
    assert "KeyboardInterrupt" in kept["output"]
    assert "begun 2 times" in run(one=sleepy)
    assert ran.read_text() == "xx"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benches import gpu as bench

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no GPU here: add --dry"):
        bench.gpu(folder=tmp_path)


def test_what_the_tests_make_is_placed_on_the_device_and_nothing_else() -> None:
    with Placed(torch.device("meta")):
        drawn = torch.randn(2, generator=torch.Generator().manual_seed(0), requires_grad=True)
        assert drawn.device.type == "meta" and drawn.requires_grad and drawn.is_leaf
        assert torch.ones(2, device="cpu").device.type == "cpu"
        assert frequent_tokens([[1, 2], [3]], 2).device.type == "cpu"  # made by the product
    assert torch.ones(2).device.type == "cpu"


@pytest.mark.slow
def test_a_dry_run_does_every_piece(tmp_path: Path) -> None:
    """End to end with the tiny target and its data, as processes; a second call runs nothing."""
    tiny, kept = make_tiny(tmp_path / "tiny"), tmp_path / "kept"
    given = [x for x in tiny.overrides() if not x.startswith("track=")]
    for _ in range(2):
        done = process(
            ["scripts/bench", "gpu", "--dry", "--folder", str(kept), *given], timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
    rows = (kept / "rows.md").read_text()
    assert rows.count("## ") == 5 and "1 of 1" in rows and "transformers, plain" in rows
    assert "head: " not in done.stdout and rows.strip() in done.stdout
    assert {json.loads(path.read_text())["calls"] for path in kept.glob("*.json")} == {1}

"""Memory that runs out is one line, and what is free is known.

Run alone: python -m pytest tests/runtime/test_memory.py (a few seconds)
"""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from specdec.errors import UserError, command, is_out_of_memory, memory_for
from specdec.runtime import memory
from tests.tiny import Tiny
from tests.told import require_one_line
from train import pipeline

ERRORS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_memory_that_runs_out_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> None:
        raise error

    said = r"memory ran out while reading .*: lower it"
    with pytest.raises(UserError, match=said), memory_for("reading", "lower it"):
        failing()
    with pytest.raises(SystemExit) as ended:
        command(failing)
    assert ended.value.code == 2
    require_one_line(capsys.readouterr().err, "memory ran out", "smaller batch")


def test_other_errors_pass() -> None:
    bug = RuntimeError("a shape is wrong")
    assert not is_out_of_memory(bug)
    with pytest.raises(RuntimeError, match="a shape is wrong"), memory_for("reading", "lower it"):
        raise bug


def test_an_allocation_that_no_machine_can_make_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("stage", "function", "parts"),
    [
        ("training", "train", [r"loop\.rows", "continues from the last checkpoint"]),
        ("measuring the draft", "evaluate", [r"decode\.batch", "training is complete"]),
    ],
)
def test_a_stage_names_what_to_lower(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    function: str,
    parts: list[str],
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ERRORS[1]

    monkeypatch.setattr(pipeline, function, failing)
    with pytest.raises(UserError, match=f"memory ran out while {stage}") as caught:
        tiny.job(tmp_path / "run", "medusa")
    require_one_line(f"error: {caught.value}", *parts)


def test_free_memory_is_what_the_machine_or_its_container_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = SimpleNamespace(available=10_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    cpu = torch.device("cpu")
    assert memory.free_bytes(cpu) == 10_000  # no limit is known
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(cpu) == 10_000
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 1500\n")
    assert memory.free_bytes(cpu) == 2500  # 5000 - 4000 + 1500

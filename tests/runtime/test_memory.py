"""Memory that runs out is one line, and what is free is known.

Run alone: python -m pytest tests/runtime/test_memory.py (a few seconds)
"""

import json
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from specdec.context import HiddenStateSpec
from specdec.decoding import fitting
from specdec.decoding.way import Way
from specdec.errors import UserError, command, is_out_of_memory, memory_for
from specdec.forcing.batch import summarise
from specdec.runtime import device
from specdec.runtime.cpu.machine_probes import native_dtype
from specdec.sampling.sampler import Sampler
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.tiny import Tiny, architectures, random_target
from tests.told import require_one_line
from train import loop, measurement
from train.data import responses

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
    ("stage", "where", "function", "parts"),
    [
        ("training", loop, "train", [r"loop\.rows", "continues from the last checkpoint"]),
        (
            "measuring the draft",
            measurement,
            "evaluate",
            [r"decode\.batch", "training is complete"],
        ),
    ],
)
def test_a_stage_names_what_to_lower(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    where: ModuleType,
    function: str,
    parts: list[str],
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ERRORS[1]

    monkeypatch.setattr(where, function, failing)
    with pytest.raises(UserError, match=f"memory ran out while {stage}") as caught:
        tiny.job(tmp_path / "run", "medusa")
    require_one_line(f"error: {caught.value}", *parts)


def test_free_memory_is_what_the_machine_or_its_container_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = SimpleNamespace(available=10_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    cpu = torch.device("cpu")
    assert device.free_bytes(cpu) == 10_000  # no limit is known
    (tmp_path / "memory.max").write_text("max\n")
    assert device.free_bytes(cpu) == 10_000
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 1500\n")
    assert device.free_bytes(cpu) == 2500  # 5000 - 4000 + 1500


def test_rows_that_fit_are_counted_from_the_cache_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys and values of 2 layers of 2 heads of 8 numbers, 4 bytes each: 256 bytes a position.
    Three hidden states are 3 · 32 · 4 bytes a position."""
    target = random_target(architectures(vocab=50, layers=2)["llama"])
    prompt, new = [*range(10)], 30
    for needs, states in ((HiddenStateSpec(), 0), (HiddenStateSpec((1, 2), final_hidden=True), 3)):
        kept = (256 + states * 32 * 4) * (10 + 30) * 2
        row = kept + 4 * 4 * 50 + 24 * 32 * 4 * 10
        monkeypatch.setattr(fitting, "free_bytes", lambda _, row=row: 10 * row)
        assert fitting.rows_that_fit(target, prompt, new, needs) == 8  # four fifths
        monkeypatch.setattr(fitting, "free_bytes", lambda _, row=row: 12.49 * row)
        assert fitting.rows_that_fit(target, prompt, new, needs) == 9
        monkeypatch.setattr(fitting, "free_bytes", lambda _: 1)
        assert fitting.rows_that_fit(target, prompt, new, needs) == 1
        monkeypatch.setattr(fitting, "free_bytes", lambda _: None)
        assert fitting.rows_that_fit(target, prompt, new, needs) is None


@pytest.mark.parametrize("kind", ["free memory", "an error"])
def test_responses_are_those_of_smaller_batches(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """A batch of 16 does not fit: no more than 3 prompts are then answered at once, and the
    responses are the same in float32."""
    sizes: list[int] = []

    def decode(target: Any, prompts: Any, way: Way, **options: Any) -> Any:
        rows = options["at_once"]
        sizes.append(rows)
        if kind == "an error" and rows > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return decoding(target, prompts, way, **options)

    decoding, options = responses.decode, ["data.responses=target", "export=null"]
    roots = [f"responses.root={tmp_path / name}" for name in ("whole", "small")]
    tiny.job(tmp_path / "one", "ngram", *options, roots[0])
    monkeypatch.setattr(responses, "decode", decode)
    if kind == "free memory":
        monkeypatch.setattr(responses, "rows_that_fit", lambda *_: 3)
    tiny.job(tmp_path / "two", "ngram", *options, roots[1])
    failed = [size for size in sizes if size > 3]
    assert failed == ([16, 16, 8, 4] if kind == "an error" else [])  # held out, training
    texts = [
        {r["prompt"]: r["ids"] for r in map(json.loads, "".join(lines).splitlines())}
        for lines in (
            [f.read_text() for f in (tmp_path / name).rglob("*.jsonl")]
            for name in ("whole", "small")
        )
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 29


def test_a_single_prompt_that_does_not_fit_is_one_line(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(responses, "decode", decode)
    with pytest.raises(UserError, match="answering a single prompt") as caught:
        tiny.job(
            tmp_path / "run", "ngram", "data.responses=target", f"responses.root={tmp_path / 'a'}"
        )
    require_one_line(f"error: {caught.value}", r"responses\.max_new_tokens", "are kept")


SUMMARY = """
import psutil, torch
from specdec.forcing.batch import summarise
from specdec.sampling.sampler import Sampler
from specdec.targets.target_config import TargetConfig
from specdec.targets.loading import TargetLoader

torch.set_num_threads(1)
parts = TargetLoader(TargetConfig(dtype="bfloat16", device="cpu")).parts
final = torch.randn(1, 4000, parts.width, dtype=parts.dtype)
before = psutil.Process().memory_info().rss
summarise(parts, final, Sampler(1.0))
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    native_dtype("cpu").dtype != "bfloat16", reason="too slow where bfloat16 is not native"
)
def test_summarising_a_long_text_leaves_no_memory_behind() -> None:
    """All logits at once would take 786 MB."""
    load_target(TargetConfig(dtype="bfloat16", device="cpu")).fingerprint()
    done = subprocess.run([sys.executable, "-c", SUMMARY], capture_output=True, text=True)
    assert int(done.stdout.splitlines()[-1]) < 5e8, done.stderr[-500:]


def test_a_summary_keeps_nothing_that_a_chunk_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small results that lay where a chunk's logits had been cost 1.3 GB in all, since the next
    chunk then took new memory. So those of a chunk must be gone once the next but one is made."""
    target = random_target(architectures(64, layers=1)["llama"])
    final_BTD = torch.randn(2, 50, 32)
    expected = summarise(target, final_BTD, Sampler())
    made: list[list[weakref.ref[torch.Tensor]]] = []
    plain = Sampler.summarise

    def noted(sampler: Sampler, logits: torch.Tensor) -> Any:
        assert not any(part() is not None for chunk in made[:-1] for part in chunk)
        parts = plain(sampler, logits)
        made.append([weakref.ref(part) for part in parts])
        return parts

    monkeypatch.setattr(Sampler, "summarise", noted)
    found = summarise(target, final_BTD, Sampler(), chunk=8)
    assert len(made) == 13
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)

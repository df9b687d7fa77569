"""What is found out about a machine, and what follows from it. The same faults are put in front of
every machine; `slow` and `native` stand for a CPU without and with instructions for bfloat16.

Run alone: python -m pytest tests/runtime/cpu/test_machine_probes.py
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.busy_cores import WAITING
from specdec.errors import UserError
from specdec.measure.machine import machine_of
from specdec.measure.results import Results
from specdec.runtime.cpu import machine_probes, packed_linear
from specdec.runtime.cpu.machine_probes import (
    DtypeChoice,
    ProbeResult,
    Processor,
    agreement,
    native_dtype,
)
from specdec.targets import loading, target_config
from specdec.targets.loading import load_target, opening
from specdec.targets.target_config import TargetConfig, resolved
from tests.processes import process
from tests.tiny import Tiny
from train import continued, pipeline

ONE, TWO = torch.ones(3), torch.full((3,), 2.0)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What this process already found of its machine is found again, before and after a test."""
    memories = (native_dtype, packed_linear.obstacle, packed_linear.probe, machine_probes.processor)
    for memory in memories:
        memory.cache_clear()
    yield
    for memory in memories:
        memory.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, cap: str | None = None) -> None:
    """Pretend a CPU with these flags, of which oneDNN may use what `cap` says."""
    native_dtype.cache_clear()
    packed_linear.probe.cache_clear()
    cpu = Processor(vendor, "a CPU", frozenset(flags.split()))
    monkeypatch.setattr(machine_probes, "processor", lambda: cpu)
    monkeypatch.setattr(packed_linear, "processor", lambda: cpu)
    monkeypatch.setattr(machine_probes, "onednn_multiplies_bfloat16", lambda: True)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    if cap is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)


def test_what_does_not_run_or_differs_is_not_used() -> None:
    def fails() -> torch.Tensor:
        raise RuntimeError("no such kernel\nand a trace")

    assert agreement(lambda: ONE, lambda: ONE, 1e-6) == (True, "")
    assert agreement(fails, lambda: ONE, 1e-6) == (False, "no such kernel")
    missing = agreement(lambda: torch.ops.mkldnn.no_such_operator(ONE), lambda: ONE, 1e-6)
    assert missing.used is False
    found = agreement(lambda: ONE + 1e-3, lambda: ONE, 1e-4)
    assert found == (False, "the result differs by 1.0e-03 from the expected one")
    assert not agreement(lambda: ONE * float("nan"), lambda: ONE, 1.0).used


def test_ways_are_timed_in_turn() -> None:
    called: list[str] = []
    ways = [lambda: called.append("a"), lambda: called.append("b")]
    taken = machine_probes.seconds(ways, 4)
    assert "".join(called) == "abababab" and len(taken) == 2


NEWER = "avx512f avx512_bf16"


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("vendor", "flags", "cap", "dtype"),
    [
        ("GenuineIntel", f"{NEWER} amx_bf16", None, "bfloat16"),
        ("GenuineIntel", f"{NEWER} amx_bf16", "AVX512_CORE_AMX", "bfloat16"),
        ("GenuineIntel", f"{NEWER} amx_bf16", "AVX512_CORE_BF16", "float32"),
        ("GenuineIntel", f"{NEWER} amx_bf16", "AVX2", "float32"),
        ("GenuineIntel", NEWER, None, "float32"),  # 1.7 times as long as float32
        ("GenuineIntel", "avx512f avx512_vnni", None, "float32"),  # Cascade Lake
        ("AuthenticAMD", NEWER, None, "bfloat16"),
        ("AuthenticAMD", NEWER, "DEFAULT", "bfloat16"),
        ("AuthenticAMD", NEWER, "avx512_core_bf16", "bfloat16"),
        ("AuthenticAMD", NEWER, "AVX512_CORE", "float32"),
        ("AuthenticAMD", "avx2", None, "float32"),
        ("", "fp asimd bf16", None, "bfloat16"),  # an Arm
        ("", "", None, "float32"),  # a system that does not say
    ],
)
def test_auto_is_bfloat16_where_a_cpu_multiplies_it_natively(
    monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, cap: str | None, dtype: str
) -> None:
    on(monkeypatch, vendor, flags, cap)
    assert native_dtype("cpu").dtype == dtype
    assert resolved(TargetConfig("somewhere", device="cpu")).dtype == dtype
    for given in target_config.DTYPES:  # what is asked for is obeyed
        assert resolved(TargetConfig("somewhere", given, "cpu")).dtype == given
    native_dtype.cache_clear()
    monkeypatch.setattr(machine_probes, "onednn_multiplies_bfloat16", lambda: False)
    assert native_dtype("cpu").dtype == "float32"  # a build of torch that cannot


@pytest.mark.usefixtures("forgotten")
def test_a_processor_is_read_as_the_system_reports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A x86, an Arm, a file that says nothing, and none."""
    said = {
        "processor : 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t\t: fpu avx2\n": (
            ("GenuineIntel", "Xeon", {"fpu", "avx2"})
        ),
        "processor\t: 0\nFeatures\t: fp bf16\nCPU implementer\t: 0x41\n": ("", "", {"fp", "bf16"}),
        "\x00\n\n": ("", "", set()),
    }
    for number, (text, expected) in enumerate(said.items()):
        monkeypatch.setattr(machine_probes, "CPUINFO", tmp_path / str(number))
        (tmp_path / str(number)).write_text(text)
        machine_probes.processor.cache_clear()
        assert machine_probes.processor() == expected
    monkeypatch.setattr(machine_probes, "CPUINFO", tmp_path / "none")
    machine_probes.processor.cache_clear()
    assert machine_probes.processor() == ("", "", set())


@pytest.mark.usefixtures("forgotten")
def test_a_gpu_is_asked_without_what_torch_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU from before Ampere has no bfloat16, which torch emulates slowly, and says it has."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    assert native_dtype("cuda") == ("float32", "this GPU does not multiply bfloat16 natively")
    native_dtype.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert native_dtype("cuda:1").dtype == "bfloat16"


def test_this_machine_answers_for_itself() -> None:
    """Whatever this machine is, the real probes run on it without a traceback."""
    assert native_dtype("cpu").dtype in ("float32", "bfloat16")
    for dtype in (*packed_linear.DTYPES, torch.float64):
        reason = packed_linear.obstacle(dtype)
        assert reason is None or len(reason.splitlines()) == 1
        if dtype in packed_linear.DTYPES:
            response = packed_linear.probe(512, 256, dtype, 4)
            assert bool(response.reason) is not response.used
            assert reason is None or not response.used


@pytest.mark.parametrize("device", ["cuda:99", "meta", "nonsense"])
def test_a_device_that_is_not_there_is_told_before_the_model_is_loaded(device: str) -> None:
    with pytest.raises(UserError, match=f"target.device='{device}' is not available here"):
        load_target(TargetConfig("no-such-folder", device=device))


def test_an_unknown_dtype_is_told_with_those_there_are() -> None:
    message = "target.dtype='bfloat' is unknown; did you mean 'bfloat16'"
    with pytest.raises(UserError, match=re.escape(message)):
        load_target(TargetConfig("no-such-folder", "bfloat"))


@pytest.mark.parametrize("dtype", ["auto", *target_config.DTYPES])
@pytest.mark.parametrize("packs", [True, False])
def test_the_opening_line_says_what_was_chosen_and_why(
    tiny: Tiny, dtype: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "LEAST", 1)
    cfg = TargetConfig(str(tiny.target), dtype, "cpu", packed=packs)
    target = load_target(cfg)
    line = opening(target, cfg)
    chosen = native_dtype("cpu") if dtype == "auto" else DtypeChoice(dtype, "")
    assert f", {chosen.dtype} on cpu" in line and "\n" not in line
    assert (f"({native_dtype('cpu').reason}" in line) is (dtype == "auto")
    assert ("packed" in line.partition(" on cpu")[2]) is packs
    assert "busy" not in line
    monkeypatch.setenv(WAITING, "briefly")
    assert "other processes keep a core busy" in opening(target, cfg)
    assert "threads wait briefly" in str(machine_of(target))


def test_it_tells_whether_weights_are_packed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The responses of the probe are the test's own."""
    monkeypatch.setattr(packed_linear, "LEAST", 1)
    monkeypatch.setattr(packed_linear, "obstacle", lambda _: None)
    monkeypatch.setattr(
        packed_linear, "probe", lambda out, width, dtype, rows: ProbeResult(rows > 1, "")
    )
    target = load_target(TargetConfig(str(tiny.target), "float32", "cpu"))
    said = "its weights are packed"
    assert (
        packed_linear.packing_in_words(target.model, torch.float32)
        == f"{said} for 4 or 16 rows at once"
    )
    monkeypatch.setattr(packed_linear, "probe", lambda *_: ProbeResult(True, ""))
    assert packed_linear.packing_in_words(target.model, torch.float32) == said
    monkeypatch.setattr(packed_linear, "probe", lambda *_: ProbeResult(False, ""))
    assert "are not used" in packed_linear.packing_in_words(target.model, torch.float32)
    monkeypatch.setattr(packed_linear, "obstacle", lambda _: "needs avx512bw")
    assert packed_linear.packing_in_words(target.model, torch.float32) == (
        "weights are not packed: needs avx512bw"
    )


def test_a_run_keeps_the_dtype_with_which_it_began(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training_alone: None
) -> None:
    """Begun with auto where bfloat16 is native, continued where it is slow, and the other way
    round; a dtype that is asked for and another than the run's is refused."""
    for began, elsewhere in (("bfloat16", "float32"), ("float32", "bfloat16")):
        run = tmp_path / began
        said: list[Any] = []
        monkeypatch.setattr(pipeline.console, "print", lambda *x, to=said, **_: to.extend(x))
        for native in (began, elsewhere):
            choice = DtypeChoice(native, f"{native} is native")
            for module in (loading, target_config, continued):
                monkeypatch.setattr(module, "native_dtype", lambda _, found=choice: found)
            tiny.job(run, "medusa", "target.dtype=auto")
            assert json.loads((run / "config.json").read_text())["target"]["dtype"] == began
        lines = [str(line) for line in said if str(line).startswith("target ")]
        assert [
            f"{began} on cpu ({reason}" in line
            for reason, line in zip((f"{began} is native", "as this run began"), lines, strict=True)
        ] == [True, True]
        with pytest.raises(UserError, match=f"target.dtype='{began}', not '{elsewhere}'"):
            tiny.job(run, "medusa", f"target.dtype={elsewhere}")


@pytest.mark.slow
def test_the_default_dtype_works_from_training_to_generation(tiny: Tiny, tmp_path: Path) -> None:
    """As a new user would run them, in processes of their own."""
    run = tmp_path / "run"
    asked = tiny.command(run, "eagle3", "target.dtype=auto", "decode.prompts=1", "name=run")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("why is the sky blue?\n")
    evaluate = ["scripts/evaluate", str(run / "best"), "--prompts", str(prompts)]
    generate = ["scripts/generate", str(run / "best"), "why is the sky blue?"]
    short = ["--max-new-tokens", "6"]
    dtypes = set()
    for command in (asked, evaluate + short, generate + short):
        done = process(command)
        assert done.returncode == 0, done.stderr[-3000:]
        first = next(line for line in done.stdout.splitlines() if line.startswith("target "))
        dtypes.add("float32 on cpu (" in first)
    assert len(dtypes) == 1
    results = Results.load(run / "evaluation-prompts")
    recorded = json.loads((run / "config.json").read_text())["target"]["dtype"]
    assert results.machine.dtype == recorded
    if torch.backends.cpu.get_cpu_capability() == "AVX2":  # scripts/test caps a second run to it
        assert recorded == "float32" and dtypes == {True}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", *target_config.DTYPES])
@pytest.mark.parametrize("packs", [True, False])
def test_a_job_runs_in_every_dtype_packed_or_not(
    tiny: Tiny, tmp_path: Path, dtype: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses, hidden states, training, decoding and report."""
    monkeypatch.setattr(packed_linear, "LEAST", 1)
    settings = ["data.responses=target", "loop.epochs=1", "decode.prompts=1", "export=null"]
    settings += [f"target.dtype={dtype}", f"target.packed={str(packs).lower()}"]
    assert tiny.job(tmp_path / "run", "eagle3", *settings) >= 1
    results = json.loads((tmp_path / "run" / "report" / "results.json").read_text())
    assert results["machine"]["dtype"] == (native_dtype("cpu").dtype if dtype == "auto" else dtype)

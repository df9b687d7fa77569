"""Runs with the same seed on one machine are the same, bit for bit: whatever a clock says, and
whatever else is in the caches that they share.

Run alone: python -m pytest tests/train/test_repeated.py
"""

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec.context import HiddenStateSpec
from specdec.drafters import attention
from specdec.runtime.cpu import machine_probes, packed_linear
from specdec.runtime.cpu.packed_linear import PackedLinear
from specdec.sampling.sampler import Sampler
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.runs import require_same_run
from tests.tiny import Tiny, architectures, make_tokenizer
from train import measurement
from train.hidden_states import batches
from train.hidden_states.store import HiddenStatesConfig, HiddenStateStore, name_of, names_of_parts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def forgotten() -> None:
    """What this process found of its machine is found again."""
    for memory in (
        machine_probes.native_dtype,
        packed_linear.obstacle,
        packed_linear.probe,
        attention._probed,
    ):
        memory.cache_clear()


def lying(*taken: float) -> Callable[[], float]:
    """A clock by which every second stretch of time takes as long as the next of these numbers, as
    if two ways that take turns took so long."""
    now, steps = 0.0, itertools.chain.from_iterable((0.0, x) for x in itertools.cycle(taken))

    def clock() -> float:
        nonlocal now
        now += next(steps)
        return now

    return clock


def wide(folder: Path) -> str:
    """A target whose layers are large enough to be packed; as a setting."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = architectures(len(tokenizer), 2, positions=512)["llama"]
    config.update({"hidden_size": 384, "intermediate_size": 512, "head_dim": 96})
    config.update({"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # logits of a few units, so that answers are no repeated token
        for weight in model.parameters():
            weight.mul_(0.2 if weight.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"target.path={folder}"


def stored(root: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in root.glob("*/*.safetensors"):
        tensors |= load_file(file)
    return tensors


def responses(root: Path) -> list[str]:
    """The lines of all files of responses."""
    return sorted(x for file in root.rglob("*.jsonl") for x in file.read_text().splitlines())


@pytest.mark.usefixtures("forgotten", "training_alone")
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_no_clock_changes_a_number(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """By one clock every alternative way takes half the time of the public one, by the other twice
    as much. The responses, hidden states, losses and drafts are the same."""
    target = wide(tmp_path / "target")
    for name, times in (("first", (1.0, 2.0)), ("second", (2.0, 1.0))):
        monkeypatch.setattr(machine_probes, "perf_counter", lying(*times))
        for memory in (machine_probes.native_dtype, packed_linear.obstacle, packed_linear.probe):
            memory.cache_clear()
        roots = [f"{kind}.root={tmp_path / name / kind}" for kind in ("responses", "hidden_states")]
        more = [*roots, target, f"target.dtype={dtype}", "data.responses=target", "loop.epochs=1"]
        tiny.job(tmp_path / name / "run", "eagle3", *more, "drafter.layers=[1,2]")
    loaded = load_target(TargetConfig(str(tmp_path / "target"), "float32", "cpu"))
    packs = sum(isinstance(part, PackedLinear) for part in loaded.model.modules())
    assert packs or packed_linear.obstacle(torch.float32)  # else nothing was tried
    first, second = (stored(tmp_path / name / "hidden_states") for name in ("first", "second"))
    assert first.keys() == second.keys() and len(first) > 100
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    lines = [responses(tmp_path / name / "responses") for name in ("first", "second")]
    assert lines[0] == lines[1] and len(lines[0]) == 29
    require_same_run(tmp_path / "second" / "run", tmp_path / "first" / "run")


@pytest.mark.usefixtures("training_alone")
def test_hidden_states_that_a_round_has_read_stay_as_they_are(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second round of on-policy training writes the same text with other drafted tokens, beside
    which the target may round it otherwise: here, it does so in every pass. The run that filled the
    store and the one that finds it filled still read the same."""
    passes, read = itertools.count(), batches.read_drafts

    def rounding(*given: Any) -> tuple[Any, Tensor, Tensor]:
        ctx, final_1TD, after_NKD = read(*given)
        by = 1 + 1e-6 * next(passes)
        ctx.layers_BTF = ctx.layers_BTF * by
        return ctx, final_1TD * by, after_NKD

    monkeypatch.setattr(batches, "read_drafts", rounding)
    more = ["data.responses=target", "rounds.count=2", "rounds.data=on_policy", "loop.epochs=1"]
    more.append(f"hidden_states.root={tmp_path / 'hidden_states'}")
    for name in ("filled", "read"):
        tiny.job(tmp_path / name, "eagle3", *more)
    require_same_run(tmp_path / "read", tmp_path / "filled")
    files = [load_file(file) for file in (tmp_path / "hidden_states").glob("*/*.safetensors")]
    assert sum(map(len, files)) == len(set().union(*files))  # nothing is stored twice


def test_of_a_document_that_is_stored_twice_the_first_counts(tiny: Tiny, tmp_path: Path) -> None:
    """Two runs that fill a store at once, each of which sees that a document is missing."""
    cfg = TargetConfig(str(tiny.target), "float32", "cpu")
    target, needs = load_target(cfg), HiddenStateSpec((1,))
    text = [5, 6, 7, 8]
    stores = [
        HiddenStateStore(HiddenStatesConfig(path=str(tmp_path / "x")), target, needs, Sampler())
        for _ in range(4)
    ]
    stores[0].prepare(0)
    for n, store in enumerate(stores[:3]):  # each with another document, so the names differ
        final_1TD = torch.full((1, 4, target.width), float(n))
        store.hold_document(text, final_1TD, final_1TD, target)
        store.hold_document([*text, n], final_1TD, final_1TD, target)
        store.write()
    for n, path in enumerate(stores[2].folder.glob("*.safetensors")):
        if any(name.endswith("final") and x[0, 0] == 1 for name, x in load_file(path).items()):
            os.utime(path, ns=(1, 1))
        else:
            os.utime(path, ns=(10 + n, 10 + n))
    late = stores[3]
    late.refresh()
    name = name_of(torch.tensor(text, dtype=torch.int32).numpy())
    hidden_states = late._document(name, names_of_parts(Sampler(), layers=True), (4,))
    assert hidden_states["final"].eq(1).all() and hidden_states["layers"].eq(1).all()


def test_a_finished_run_is_measured_again_for_numbers_and_not_for_words(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The reason for a dtype was once a timing, which changed from start to start. Of the code,
    formulas count, and docstrings and comments do not."""
    counted, machine = [], measurement.machine_of
    measured = measurement._measured
    monkeypatch.setattr(measurement, "_measured", lambda *x: counted.append(1) or measured(*x))
    more = ["loop.epochs=1", "decode.prompts=1", "decode.temperatures=[0]", "export=null"]
    for reason in ("3.6 times as long", "3.5 times as long"):
        monkeypatch.setattr(
            measurement, "machine_of", lambda x, why=reason: replace(machine(x), reason=why)
        )
        tiny.job(tmp_path / "run", "medusa", *more)
    assert counted == [1]
    monkeypatch.setattr(measurement, "machine_of", lambda x: replace(machine(x), threads=99))
    tiny.job(tmp_path / "run", "medusa", *more)
    assert counted == [1, 1]
    code = tmp_path / "specdec"
    shutil.copytree(measurement.SPECDEC, code)
    monkeypatch.setattr(measurement, "SPECDEC", code)
    request.addfinalizer(measurement.measuring_code.cache_clear)
    for name, old, new, times in (
        ("decoding/verification_methods.py", '"""', '"""In other words: ', 2),
        ("theory/leviathan.py", "\ndef ", "\n# a comment\ndef ", 2),
        ("report/markdown.py", "\ndef ", "\nMORE = 1\ndef ", 2),  # no figure depends on it
        ("theory/leviathan.py", "    return ", "    return 1 * ", 3),
    ):
        text = (code / name).read_text(encoding="utf-8")
        assert old in text
        (code / name).write_text(text.replace(old, new, 1), encoding="utf-8")
        measurement.measuring_code.cache_clear()  # as in a new process
        tiny.job(tmp_path / "run", "medusa", *more)
        assert len(counted) == times, name

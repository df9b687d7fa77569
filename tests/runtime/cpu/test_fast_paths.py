"""One switch turns off all fast paths of a CPU, and nothing else changes.

Run alone: python -m pytest tests/runtime/cpu/test_fast_paths.py
"""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from specdec.compat import attention_of
from specdec.context import HiddenStateSpec
from specdec.runtime import cpu
from specdec.runtime.cache import SlotCache
from specdec.runtime.cpu import packed_linear
from specdec.runtime.cpu.compiled_pass import Compiled
from specdec.runtime.cpu.few_row_norm import FewRowsNorm
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.tiny import Tiny


def test_a_target_without_fast_paths(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "LEAST", 1)
    cfg = TargetConfig(str(tiny.target), "float32", "cpu")
    fast = load_target(cfg)
    monkeypatch.setattr(cpu, "_ON", False)
    plain = load_target(cfg)
    assert fast.lean is not None and attention_of(fast.model.config) == "grouped"
    assert plain.lean is None and attention_of(plain.model.config) == "sdpa"
    assert not packed_linear.is_packed(plain.model)
    assert cpu.SWITCH in packed_linear.packing_in_words(plain.model, torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected, logits = (
        target.logits(target.hidden_states(ids, HiddenStateSpec(), cache=target.new_cache())[1])
        for target in (fast, plain)
    )
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)  # both round in float32


def test_norms_and_compiled_passes_are_the_public_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_ON", False)
    torch.manual_seed(0)
    x, weight = torch.randn(2, 48), torch.rand(48)
    assert torch.equal(FewRowsNorm(weight, 1e-5)(x), F.rms_norm(x, (48,), weight, 1e-5))
    way = Compiled(lambda cache, x: (2 * x,))
    cache = SlotCache(0, capacity=8)
    cache.place(torch.tensor([[1, 2]]))
    assert torch.equal(way(cache, x=x)[0], 2 * x) and way.graph is None and not way.ways


@pytest.mark.parametrize(("value", "on"), [(None, True), ("1", True), ("0", False)])
def test_the_environment_is_the_switch(value: str | None, on: bool) -> None:
    environment = {name: x for name, x in os.environ.items() if name != cpu.SWITCH}
    environment |= {} if value is None else {cpu.SWITCH: value}
    code = f"import runpy; print(runpy.run_path({cpu.__file__!r})['fast_paths_on']())"  # no torch
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert out.stdout.decode().strip() == str(on), out.stderr.decode()

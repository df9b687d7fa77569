"""Linear layers with a packed weight are the same layers, whatever the probes of a machine say.

Run alone: python -m pytest tests/runtime/cpu/test_packed_linear.py
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.decoding.decode import decode, generate
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS
from specdec.drafters.medusa import Medusa
from specdec.formats import draft_checkpoint, draft_export
from specdec.runtime.cpu import packed_linear
from specdec.runtime.cpu.machine_probes import ProbeResult, Processor
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.tiny import random_drafter, random_target, save_target

WIDE = {
    "vocab_size": 61,
    "hidden_size": 384,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # of sums of 300 products of N(0, 1)


PACKABLE = [dtype for dtype in TOLERANCE if packed_linear.obstacle(dtype) is None]  # here


PROBE = packed_linear.probe.__wrapped__  # without its memory


def answering(used: bool) -> Callable[..., ProbeResult]:
    return lambda *_: ProbeResult(used, "the test says so")


@pytest.fixture(autouse=True)
def the_copy_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not depend on this machine: packed weights are used where they run at all."""
    monkeypatch.setattr(packed_linear, "probe", answering(True))


def layer(dtype: torch.dtype, bias: bool = True) -> packed_linear.PackedLinear:
    torch.manual_seed(0)
    return packed_linear.PackedLinear(nn.Linear(300, 500, bias=bias).to(dtype))


def plain(of: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, of.weight, of.bias)


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_the_layer(dtype: torch.dtype, bias: bool) -> None:
    one = layer(dtype, bias)
    for shape in ((300,), (1, 300), (8, 300), (2, 3, 300), (100, 300), (0, 300), (2, 0, 300)):
        x = torch.randn(shape).to(dtype)
        with torch.inference_mode():
            found = one(x)
        torch.testing.assert_close(found, plain(one, x), rtol=0, atol=TOLERANCE[dtype])
    with torch.no_grad():
        strided = torch.randn(4, 600).to(dtype)[:, ::2]
        torch.testing.assert_close(one(strided), plain(one, strided), rtol=0, atol=TOLERANCE[dtype])
    assert one._copy is not None and one._copy.layout is torch._mkldnn


def test_each_number_of_rows_is_multiplied_as_its_probe_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to 3 rows by the public operator and more by the copy, as on an Intel CPU with AVX-512; no
    copy where none is used."""
    asked, used = [], []

    def probe(out: int, width: int, dtype: torch.dtype, rows: int) -> ProbeResult:
        asked.append((out, width, dtype, rows))
        return ProbeResult(rows > 3, "")

    def product(*given: Tensor) -> Tensor:
        used.append(given[0].shape[0])
        return multiply(*given)

    multiply = packed_linear.packed_product
    monkeypatch.setattr(packed_linear, "probe", probe)
    monkeypatch.setattr(packed_linear, "packed_product", product)
    one = layer(torch.float32)
    with torch.no_grad():
        for rows in (1, 2, 3):
            x = torch.randn(rows, 300)
            assert torch.equal(one(x), plain(one, x)) and one._copy is None
        for rows in (4, 5, 17, 65, 3000):
            one(torch.randn(rows, 300))
            one(torch.randn(1, 300))  # its response is remembered
    assert asked == [(500, 300, torch.float32, n) for n in (1, 2, 3, 4, 8, 64, 256, 256)]
    assert used == [4, 5, 17, 65, 3000]


def test_a_probe_refuses_what_does_not_run_disagrees_or_does_not_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each response a machine may give is put in the place of the packed product."""
    probe = PROBE
    shape = (512, 256, torch.float32, 4)
    right = nn.functional.linear  # of what `probe` draws

    def put(name: str, way: Callable[..., Tensor]) -> None:
        monkeypatch.setattr(packed_linear, name, way)

    def fails(*_: Any) -> Tensor:
        raise RuntimeError("bf16 path needs the cpu support avx512bw\nand a trace")

    monkeypatch.setattr(packed_linear, "packing_pays", lambda *_: True)
    put("packed_copy", fails)
    assert probe(*shape) == (False, "bf16 path needs the cpu support avx512bw")
    put("packed_copy", lambda weight: weight)
    put("packed_product", fails)
    assert not probe(*shape).used
    for wrong in (1.001, float("nan")):
        put("packed_product", lambda x, w, b, by=wrong: right(x, w) * by)
        response = probe(*shape)
        assert not response.used and "differs" in response.reason
    put("packed_product", lambda x, w, b: right(x, w))
    assert probe(*shape) == (True, "")
    monkeypatch.setattr(packed_linear, "packing_pays", lambda *_: False)
    assert not probe(*shape).used


@pytest.mark.parametrize(
    ("vendor", "capability", "machine", "rows"),
    [
        ("AuthenticAMD", "AVX512", "x86_64", [1, 2, 3, 4, 64, 65, 1000]),
        ("AuthenticAMD", "AVX2", "x86_64", [1, 2, 3, 4, 64, 65, 1000]),
        ("GenuineIntel", "AVX512", "x86_64", [4, 64]),
        ("GenuineIntel", "AVX2", "AMD64", [1, 2, 3, 4, 64]),
        ("", "DEFAULT", "aarch64", []),
    ],
)
def test_which_products_pay_follows_from_the_processor(
    monkeypatch: pytest.MonkeyPatch, vendor: str, capability: str, machine: str, rows: list[int]
) -> None:
    """As docs/notebook/machines.md has it: float32 on an Intel CPU is MKL's own ground, but for a
    few rows where they read memory best. In other dtypes, copies pay on every x86."""
    monkeypatch.setattr(packed_linear, "processor", lambda: Processor(vendor, "", frozenset()))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(packed_linear.platform, "machine", lambda: machine)
    every = [1, 2, 3, 4, 64, 65, 1000]
    assert [n for n in every if packed_linear.packing_pays(torch.float32, n)] == rows
    assert [n for n in every if packed_linear.packing_pays(torch.bfloat16, n)] == (
        every if vendor else []
    )
    for dtype in packed_linear.DTYPES:  # what is tried for a number of rows holds for it
        for n in range(1, 400):
            assert packed_linear.packing_pays(
                dtype, packed_linear.bucket(n)
            ) is packed_linear.packing_pays(dtype, n)


def test_a_dtype_that_this_machine_cannot_pack_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As bfloat16 is on a CPU with AVX2 only: nothing is replaced, and the reason is told."""

    def fails(*_: Any) -> Tensor:
        raise RuntimeError("needs avx512bw")

    monkeypatch.setattr(packed_linear, "packed_copy", fails)
    packed_linear.obstacle.cache_clear()
    try:
        module = nn.Sequential(nn.Linear(300, 500))
        packed_linear.pack(module)
        assert type(module[0]) is nn.Linear
        assert packed_linear.obstacle(torch.float32) == "needs avx512bw"
    finally:
        packed_linear.obstacle.cache_clear()


def test_gradients_flow_and_a_changed_weight_is_read() -> None:
    one = layer(torch.float32)
    x = torch.randn(4, 300, requires_grad=True)
    one(x).sum().backward()
    assert x.grad is not None and one.weight.grad is not None and one._copy is None
    with torch.no_grad():
        before = one(x)
        one.weight.mul_(2)  # as an optimizer's step
        torch.testing.assert_close(one(x), plain(one, x))
        assert not torch.allclose(one(x), before)
        one.weight.data = torch.zeros_like(one.weight)  # as a move to another device and back
        assert torch.equal(one(x), one.bias.expand(4, 500))
        assert one.double()(x.double()).dtype is torch.float64  # not packed: computed as it was


def test_autocast_is_obeyed() -> None:
    one = layer(torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert one(torch.randn(2, 300)).dtype is torch.bfloat16


def test_it_is_copied_pickled_and_saved_as_any_layer() -> None:
    one, x = layer(torch.float32), torch.randn(2, 300)
    with torch.no_grad():
        expected = one(x)
        for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert torch.equal(twin(x), expected)
            twin.weight.zero_()
            assert torch.equal(one(x), expected)
    assert list(one.state_dict()) == ["weight", "bias"]


def test_only_large_layers_of_its_types_are_packed_in_their_places() -> None:
    class Other(nn.Linear):
        pass

    large = nn.Linear(300, 500)
    layers = [nn.Linear(4, 4), nn.Linear(300, 500).double(), Other(300, 500), large]
    module = nn.Sequential(*layers, nn.ModuleDict({"again": large}))
    names = list(module.state_dict())
    packed_linear.pack(module)
    assert [type(x) is packed_linear.PackedLinear for x in module[:4]] == [
        False,
        False,
        False,
        True,
    ]
    assert module[3] is module[4]["again"] and module[3].weight is large.weight
    assert type(large) is nn.Linear and list(module.state_dict()) == names


@pytest.mark.parametrize("asked", [True, False])
def test_a_target_and_its_draft_are_packed_where_asked(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From disk; greedy text in float32 is that of the layers as they are."""
    monkeypatch.setattr(packed_linear, "LEAST", 1)
    folder = save_target(tmp_path / "target")
    bare = load_target(TargetConfig(str(folder), "float32", "cpu", packed=False))
    draft_checkpoint.write_draft(
        tmp_path / "draft", random_drafter(Medusa.Config(), bare, 0.1), bare
    )
    target = load_target(TargetConfig(str(folder), "float32", "cpu", packed=asked))
    drafter = draft_checkpoint.load_draft(tmp_path / "draft", target)
    for module in (target.model, drafter):
        found = {type(m) for m in module.modules() if isinstance(m, nn.Linear)}
        assert found == {packed_linear.PackedLinear if asked else nn.Linear}
    assert target.fingerprint() == bare.fingerprint()
    expected = generate(bare, [1, 2, 3], max_new_tokens=20, eos=()).ids
    assert generate(target, [1, 2, 3], max_new_tokens=20, eos=()).ids == expected
    made = generate(target, [1, 2, 3], Way(drafter), max_new_tokens=20, eos=())
    assert made.ids == expected and made.steps


def test_an_export_of_a_packed_draft_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of float32 in another order would not be the same logits; layers of 300 and more are
    wide enough to be summed otherwise."""
    monkeypatch.setattr(packed_linear, "LEAST", 1)
    target = random_target(LlamaConfig(**WIDE))
    drafter = random_drafter(Medusa.Config(), target, 0.1)
    plain_logits = drafter.unembed(torch.ones(1, 384), 0)
    packed_linear.pack(drafter)
    with torch.no_grad():
        assert not torch.equal(drafter.unembed(torch.ones(1, 384), 0), plain_logits)
    draft_export.write_export(tmp_path / "out", drafter, target)
    assert packed_linear.is_packed(draft_export.read_export(tmp_path / "out", drafter, target))


def together(dtype: torch.dtype, bias: bool) -> tuple[packed_linear.JointLinear, list[nn.Linear]]:
    torch.manual_seed(0)
    layers = [
        packed_linear.PackedLinear(nn.Linear(300, n, bias=bias).to(dtype)) for n in (500, 200)
    ]
    one = packed_linear.joint(None, *layers)
    assert one is not None
    return one, list(layers)


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_read_the_same_are_one_product(dtype: torch.dtype, bias: bool) -> None:
    one, layers = together(dtype, bias)
    for shape in ((300,), (1, 300), (2, 3, 300), (100, 300)):
        x, residual = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 700).to(dtype)
        wanted = torch.cat([plain(layer, x) for layer in layers], -1)
        with torch.inference_mode():
            found, added = one(x), one(x, residual)
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(added, wanted + residual, rtol=0, atol=2 * TOLERANCE[dtype])
    assert one._copy is not None and one._copy.layout is torch._mkldnn
    again = pickle.loads(pickle.dumps(one))
    assert again._copy is None
    with torch.inference_mode():
        torch.testing.assert_close(again(x), found)


def test_one_product_reads_each_of_its_weights_anew() -> None:
    one, layers = together(torch.float32, True)
    x = torch.randn(2, 300)
    for layer in layers:
        for parameter in (layer.weight, layer.bias):
            with torch.no_grad():
                one.renew_if_changed()
                kept = one(x)
                copied = one._copy
                one.renew_if_changed()
                assert one._copy is copied  # nothing has changed
                parameter.add_(1.0)
                assert packed_linear.joint(one, *layers) is one
                wanted = torch.cat([plain(layer, x) for layer in layers], -1)
                assert not torch.allclose(kept, wanted, atol=0.1)
                torch.testing.assert_close(one(x), wanted, rtol=0, atol=1e-4)


def test_only_packed_layers_that_are_alike_become_one() -> None:
    one, other = layer(torch.float32), layer(torch.float32, bias=False)
    assert packed_linear.joint(None, one, nn.Linear(300, 500)) is None
    assert packed_linear.joint(None, one, other) is None
    assert packed_linear.joint(None, one, nn.Identity()) is None
    assert packed_linear.joint(None, one, layer(torch.float32)) is not None


@pytest.mark.parametrize("family", ["eagle3", "mtp", "dflash", "eagle"])
def test_a_packed_draft_is_the_draft(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers then have one product for q, k and v, and one for the first two of an MLP."""
    made = list[int]()
    multiply = packed_linear.JointLinear.__call__

    def counted(self: packed_linear.JointLinear, *given: Any) -> Tensor:
        made.append(len(self.layers))
        return multiply(self, *given)

    target = random_target(LlamaConfig(**WIDE | {"num_hidden_layers": 6}))
    target.lean_allowed = False  # its own pass multiplies so too
    config = DRAFTERS[family].Config()
    drafter = random_drafter(config, target, 0.1)
    monkeypatch.setattr(packed_linear.JointLinear, "__call__", counted)
    prompt, responses = [5, 6, 7, 8, 9, 10], []
    for step in range(3):
        if step == 1:
            packed_linear.pack(drafter)
        if step == 2:  # changed weights are read anew
            with torch.no_grad():
                for parameter in drafter.parameters():
                    parameter.mul_(1.5)
        proposals = []
        for batch in ([prompt], [prompt, prompt[:4]]):
            proposals += decode(target, batch, Way(drafter), max_new_tokens=12, eos=())
        responses.append([(g.ids, g.steps) for g in proposals])
        assert bool(made) == (step > 0)
    assert responses[0] == responses[1] and {2, 3} <= set(made)
    unpacked = random_drafter(config, target, 0.1)
    unpacked.load_state_dict(drafter.state_dict())
    again = generate(target, prompt, Way(unpacked), max_new_tokens=12, eos=())
    assert (again.ids, again.steps) == responses[2][0]

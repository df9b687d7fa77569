"""The pass without modules either equals the model's own or is not used.

Run alone: python -m pytest tests/runtime/cpu/test_lean_pass.py
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specdec.context import HiddenStateSpec
from specdec.runtime.cpu import packed_linear as packing
from specdec.runtime.cpu.machine_probes import ProbeResult
from specdec.runtime.cpu.packed_linear import obstacle, pack
from specdec.targets.target import Target

V, LAYERS = 61, (1, 3)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "every query head its own": ("llama", {"num_key_value_heads": 4}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "norms of heads": ("qwen3", {"head_dim": 16}),
    "a window": ("mistral", {"sliding_window": 6}),
    "windows in some layers": (
        "qwen3",
        {
            "sliding_window": 6,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "factors on residual and attention": (
        "granite",
        {"residual_multiplier": 0.4, "attention_multiplier": 0.3, "embedding_multiplier": 2.0},
    ),
    "layers without positions": ("smollm3", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "norms after the layers": ("olmo2", {}),
    "norms around the MLP": ("gemma2", {"head_dim": 8, "sliding_window": 8}),
    "pairs that are rotated as neighbours": ("cohere", {}),
    "experts": ("mixtral", {"num_local_experts": 4}),
}


def target_of(
    kind: str, dtype: torch.dtype = torch.float32, packed: bool = False, **config: Any
) -> Target:
    torch.manual_seed(0)
    made = AutoConfig.for_model(
        kind, **SMALL | HEADS | {"vocab_size": V, "initializer_range": 0.3} | config
    )
    model = AutoModelForCausalLM.from_config(made).to(dtype).eval()
    for name, x in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # otherwise zeros and ones
            torch.nn.init.normal_(x, 1.0 if name.endswith("weight") else 0.0, 0.3)
    if packed:
        pack(model)
    return Target(model, None, kind)


def passes(target: Target, lean: bool) -> list[Tensor]:
    """States of layers, and logits, of a prefill, of chains, of a tree and of single tokens, over
    rows of equal and unequal length."""
    target.lean_allowed, needs = lean, HiddenStateSpec(layers=LAYERS, final_hidden=True)
    ids = torch.randint(3, V, (2, 40), generator=torch.Generator().manual_seed(1))
    tree = torch.tensor(2 * [[-1, 0, -1, 1]])
    cache, read = target.new_cache(), list[Tensor]()

    def step(some: Tensor, counts: Sequence[int], parents: Tensor | None = None) -> None:
        ctx, logits = target.step(some, needs, cache, parents)
        assert ctx.layers_BTF is not None and ctx.final_BTD is not None
        read.extend((ctx.layers_BTF, ctx.final_BTD, logits))
        cache.commit(counts)

    with torch.inference_mode():
        step(ids[:, :9], [9, 9])
        step(ids[:, 9:10], [1, 1])  # rows of equal length
        step(ids[:, 10:14], [4, 4])
        step(ids[:, 14:18], [2, 3], tree)
        step(ids[:, 18:19], [1, 1])  # rows of unequal length
        step(ids[:, 19:22], [3, 1])
    return read


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_lean_pass_is_the_models_own(kind: str, packed: bool) -> None:
    """If packed, the layers are as wide as they must be for packing."""
    name, config = KINDS[kind]
    wide = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
    target = target_of(name, packed=packed, **(wide if packed else {}) | config)
    assert target.lean is not None
    for ours, theirs in zip(passes(target, True), passes(target, False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_with_other_layers_keeps_its_modules(kind: str) -> None:
    name, config = OTHERS[kind]
    target = target_of(name, **config)
    assert target.lean is None


def test_in_16_bits_it_differs_by_rounding() -> None:
    target = target_of("qwen3", torch.bfloat16, initializer_range=0.1)
    assert target.lean is not None
    for ours, theirs in zip(passes(target, True), passes(target, False), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 0.03


def test_weights_that_change_are_read_anew() -> None:
    target = target_of("qwen2", packed=True, hidden_size=256, intermediate_size=512)
    before = passes(target, True)
    with torch.no_grad():
        for x in target.model.parameters():
            x.mul_(1.1)
    after = passes(target, True)
    assert not torch.allclose(before[-1], after[-1])
    for ours, theirs in zip(after, passes(target, False), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-4


@pytest.mark.skipif(obstacle(torch.float32) is not None, reason="this CPU packs no weights")
def test_a_target_begins_with_no_packed_copies_in_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check at its start passes through the modules; the lean pass has copies of its own."""
    monkeypatch.setattr(packing, "probe", lambda *_: ProbeResult(True, ""))
    target = target_of("llama", packed=True, hidden_size=256, intermediate_size=512)
    assert target.lean is not None
    linear = [x for x in target.layers.modules() if isinstance(x, packing.PackedLinear)]
    assert linear and all(x._copy is None for x in linear)
    assert all(x._copy is not None for x in target.lean.products if x.packs)
    with torch.inference_mode():
        target.hidden_states(torch.arange(3, 9)[None], HiddenStateSpec())
    assert all(x._copy is not None for x in linear)


class Half(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def test_parts_of_another_kind_are_called() -> None:
    """Both parts that were there when the target was made and parts that replace others later."""
    target = target_of("llama")
    before = passes(target, True)
    layer: Any = target.layers[0]
    layer.mlp.down_proj = Half(48, 32, bias=False)
    halved = passes(target, True)
    assert not torch.allclose(halved[-1], before[-1])
    assert all(map(torch.equal, halved, passes(target, False)))
    assert Target(target.model, None, "halved").lean is None


def test_a_method_that_was_replaced_is_called() -> None:
    model = target_of("llama").model
    inner = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **more: inner(*args, **more) * 2
    assert Target(model, None, "patched").lean is None


@pytest.mark.parametrize("part", ["model", "model.layers.1.mlp", "lm_head"])
def test_hooks_on_modules_are_called(part: str) -> None:
    target, calls = target_of("llama"), list[str]()
    hook = target.model.get_submodule(part).register_forward_hook(lambda *_: calls.append(part))
    theirs = passes(target, True)
    assert len(calls) == 6
    hook.remove()
    assert all(map(torch.equal, theirs, passes(target, False)))
    passes(target, True)
    assert len(calls) == 6


@pytest.mark.slow
def test_graphs_of_passes_do_not_get_in_its_way() -> None:
    """A graph's hooks stay on the layers, and only read them."""
    target, one = target_of("llama"), torch.tensor([[5]])
    with torch.inference_mode():
        target.step(one, HiddenStateSpec(LAYERS), target.new_cache(256))
        before = passes(target, True)
        target.lean_allowed = True
        with Calls() as calls:
            target.step(one, HiddenStateSpec(), target.new_cache())
    target = target_of("llama")
    assert all(map(torch.equal, before, passes(target, True)))
    with Calls() as own, torch.inference_mode():
        target.step(one, HiddenStateSpec(), target.new_cache())
    assert calls.count == own.count


class Calls(TorchDispatchMode):
    """Counts operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return self.by_name.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_name[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def test_it_makes_fewer_calls() -> None:
    target, counts = target_of("llama", num_hidden_layers=12), list[int]()
    for lean in (True, False):
        target.lean_allowed, cache = lean, target.new_cache()
        with torch.inference_mode():
            target.step(torch.tensor([[3, 4, 5]]), HiddenStateSpec(), cache)
            cache.commit([3])
            with Calls() as calls:
                target.step(torch.tensor([[6, 7]]), HiddenStateSpec(), cache)
        counts.append(calls.count)
    assert counts[0] < 0.75 * counts[1], counts


def operators_of_a_step(layers: int, rows: int, tokens: int, lengths: list[int]) -> Counter[str]:
    """Of one pass over these rows, whose caches hold so many tokens; later passes are alike."""
    target = target_of("llama", packed=True, num_hidden_layers=layers)
    needs, cache = HiddenStateSpec(), target.new_cache()
    ids = torch.randint(3, V, (rows, 9 + 2 * tokens), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        target.step(ids[:, :9], needs, cache)
        cache.commit(lengths)
        target.step(ids[:, 9 : 9 + tokens], needs, cache)  # copies and tables are made
        cache.commit([tokens] * rows)
        with Calls() as calls:
            target.step(ids[:, 9 + tokens :], needs, cache)
    return calls.by_name


@pytest.mark.skipif(obstacle(torch.float32) is not None, reason="this CPU packs no weights")
@pytest.mark.parametrize(
    ("rows", "tokens", "lengths", "moved"),
    [(1, 1, [9], 0), (1, 4, [9], 4), (3, 1, [9, 9, 9], 0), (3, 4, [9, 7, 8], 4)],
    ids=["vanilla", "a chain", "a batch", "a ragged batch"],
)
def test_operators_of_a_layer(
    rows: int, tokens: int, lengths: list[int], moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of one step is 28 operators at most: each of two norms takes 4, q, k and v 2 and
    their rotation 4, the cache 2, attention 4, and the other products, the activation and the
    residual 8. Of several tokens, the heads are moved to the rows of one query and back, by
    `moved` more. Keys and values are written by one operator, and nothing is concatenated."""
    monkeypatch.setattr(packing, "LEAST", 0)
    few, many = (operators_of_a_step(n, rows, tokens, lengths) for n in (2, 6))
    per_layer = {name: (count - few[name]) / 4 for name, count in many.items()}
    assert sum(per_layer.values()) <= 28 + moved, per_layer
    assert per_layer["slice"] <= 3 and per_layer.get("cat", 0) == 0, per_layer
    written = [per_layer.get(name, 0) for name in ("copy_", "index_put_")]
    assert sum(written) == 1, per_layer


def test_a_stack_is_the_buffers_of_its_layers() -> None:
    """A cache that was filled layer by layer, then in a stack, holds what it held before, also
    after it has grown, rows have left, and a path of a tree was moved."""
    both = list[list[Tensor]]()
    for lean in (False, True):
        target = target_of("llama")
        needs, cache = HiddenStateSpec(), target.new_cache()
        ids = torch.randint(3, V, (3, 400), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            target.lean_allowed = False
            target.hidden_states(ids[:, :9], needs, cache=cache)
            cache.commit([9, 7, 8])
            target.lean_allowed = lean
            target.step(ids[:, 9:13], needs, cache, torch.tensor(3 * [[-1, 0, 0, 2]]))
            cache.commit([3, 2, 3], torch.tensor([[0, 2, 3], [0, 1, 1], [0, 2, 3]]))
            assert (cache.stack is not None) is lean
            cache.select([2, 0])
            target.hidden_states(ids[:2, 13:300], needs, cache=cache)  # it grows
            cache.commit([287, 280])
            other = target.new_cache()
            target.hidden_states(ids[2:, :20], needs, cache=other)
            other.commit([20])
            cache.replace([1], other)
        layers = cache.slot_layers
        assert all(x.keys.is_contiguous() and x.values.is_contiguous() for x in layers)
        lengths = cache.lengths
        assert lengths == [298, 20]
        buffers = [x for layer in layers for x in layer.buffers()]
        both.append([x[b, :, : lengths[b]] for x in buffers for b in range(2)])
    for theirs, ours in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

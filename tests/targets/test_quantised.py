"""Checkpoints that are stored quantised: all readers get the numbers that the model computes with.

Run alone: python -m pytest tests/targets/test_quantised.py (about 30 s)
"""

import gc
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, GptOssConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specdec.context import HiddenStateSpec
from specdec.decoding.decode import generate
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.lm import LMConfig
from specdec.drafters.pretrained import LoraOptions
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.lab.drafters.early_exit import EarlyExitConfig
from specdec.runtime import quantised
from specdec.runtime.cpu import packed_linear
from specdec.runtime.cpu.packed_linear import PackedLinear, is_packed, pack
from specdec.runtime.quantised import dense_linear, is_plain, plain_state
from specdec.targets import transformers_model
from specdec.targets.fingerprint import digest_of_weights
from specdec.targets.loading import TargetLoader, load_parts, load_target, opening
from specdec.targets.output_head import flat
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.tiny import Tiny, conversations, make_tokenizer, write_jsonl

TOKENIZER = make_tokenizer()
BLOCK = 32


def dense_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data = (
            weight.data.bfloat16().float()
        )  # so that saving them in bfloat16 loses nothing
    return model


def config_of(folder: Path, dtype: str = "float32") -> TargetConfig:
    where = str(folder / "model"), dtype, "cpu"
    return TargetConfig(*where, packed=False, cache=str(folder / "cache"))


def fp8(folder: Path, model: Any = None) -> dict[str, Tensor]:
    """A checkpoint with blocks of 32 by 32 in float8 and their scales, as DeepSeek's are; returns
    the weights that were rounded to it."""
    path = folder / "model"
    (model or dense_model()).to(torch.bfloat16).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    before, stored = load_file(path / "model.safetensors"), {}
    for name, x in before.items():
        stored[name] = x
        if "_proj." in name:
            rows, columns = (n // BLOCK for n in x.shape)
            blocks = x.float().view(rows, BLOCK, columns, BLOCK)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448  # the largest number of e4m3
            stored[name] = (blocks / scale).view(x.shape).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    with_key(path, quant_method="fp8", weight_block_size=[BLOCK, BLOCK])
    return before


def with_key(path: Path, **keys: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": keys}))


def test_every_reader_of_float8_applies_the_scales(tmp_path: Path) -> None:
    """e4m3 has 4 significant bits, so a weight is off by at most 1 / 16 of itself, or of the
    smallest normal number of its block. Without scales it would be off by hundreds of times."""
    before = fp8(tmp_path)
    cfg = config_of(tmp_path)
    target = TargetLoader(cfg)
    whole, parts = target.whole(), load_parts(cfg)
    assert parts.stored is not None and parts.fingerprint() == whole.fingerprint()
    assert "quantised: fp8" in opening(whole, cfg)
    for reader in (whole, parts):
        for k in (0, 3):
            found = reader.layer(k)
            for name, x in found.items():
                theirs = before[f"model.layers.{k}.{name}"].float()
                limit = theirs.abs() / 16 + theirs.abs().max() / 448 / 16
                assert ((x - theirs).abs() <= limit).all(), name
    for ours, theirs in ((parts.layer(-1), whole.layer(-1)), (parts.cut([1]), whole.cut([1]))):
        assert ours.keys() == theirs.keys() and len(ours) > 8
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "config", [Eagle3Config(layers=[1, 2, 3], draft_vocab=48, initialisation="target"), LMConfig()]
)
def test_a_draft_starts_alike_in_the_first_run_and_the_second(tmp_path: Path, config: Any) -> None:
    fp8(tmp_path)
    starts = []
    for _ in range(2):  # the second time, the layers stay on disk
        torch.manual_seed(0)
        target = TargetLoader(config_of(tmp_path))
        drafter = DRAFTERS[config.name].build(config, target.parts, torch.arange(48))
        starts.append(drafter.state_dict())
        draft_checkpoint.write_draft(tmp_path / "draft", drafter, target.parts)
        assert "quantization_config" not in (tmp_path / "draft" / "drafter.json").read_text()
        target.whole()
    assert TargetLoader(config_of(tmp_path)).parts.stored is not None
    assert all(torch.equal(starts[0][name], x) for name, x in starts[1].items())


@pytest.mark.parametrize("more", [0, 5])
def test_a_draft_starts_from_what_a_quantised_model_computes_with(
    tmp_path: Path, more: int
) -> None:
    """The quantised checkpoint is the draft's source, not the target; `more` rows are added."""
    fp8(tmp_path)
    theirs = load_target(config_of(tmp_path))
    bigger = LlamaConfig(**{**dense_model().config.to_dict(), "vocab_size": len(TOKENIZER) + more})
    target = Target(AutoModelForCausalLM.from_config(bigger), TOKENIZER, "plain")
    config = LMConfig(source=str(tmp_path / "model"))
    drafter = DRAFTERS["lm"].build(config, target).float().eval()
    for k in range(4):
        for name, x in theirs.layer(k).items():
            assert torch.equal(drafter.state_dict()[f"model.model.layers.{k}.{name}"], x), name
    draft_checkpoint.write_draft(tmp_path / "draft", drafter, target)
    assert "quantization_config" not in (tmp_path / "draft" / "drafter.json").read_text()
    ids = torch.arange(3, 20)[None]
    states = drafter.model.base_model(ids).last_hidden_state
    torch.testing.assert_close(states, theirs.hidden_states(ids, HiddenStateSpec())[1])


def test_a_quantised_source_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8(tmp_path)

    def of_integers(*_: Any) -> Any:
        model = dense_model()
        whole = torch.zeros(len(TOKENIZER), 64, dtype=torch.int8)
        model.model.embed_tokens.weight = nn.Parameter(whole, requires_grad=False)
        return model

    monkeypatch.setattr(transformers_model, "load_model", of_integers)
    target = Target(dense_model(), TOKENIZER, "plain")
    with pytest.raises(UserError, match=r"stores its weights quantised \(fp8\).*embed_tokens"):
        DRAFTERS["lm"].build(LMConfig(source=str(tmp_path / "model")), target)


def test_a_source_that_cannot_be_loaded_is_told_by_its_setting(tmp_path: Path) -> None:
    path = tmp_path / "model"
    dense_model().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    target = Target(dense_model(), TOKENIZER, "plain")
    with pytest.raises(UserError, match=r"drafter\.source=.*could not be loaded"):
        DRAFTERS["lm"].build(LMConfig(source=str(path)), target)


def test_modules_beyond_the_layers_are_refused_if_quantised(tmp_path: Path) -> None:
    fp8(tmp_path)
    path = tmp_path / "model" / "model.safetensors"
    stored = load_file(path)
    for name in ("self_attn.q_proj.weight", "self_attn.q_proj.weight_scale_inv"):
        stored[f"model.layers.4.{name}"] = stored[f"model.layers.3.{name}"].clone()
    save_file(stored, path, metadata={"format": "pt"})
    target = load_target(config_of(tmp_path))
    with pytest.raises(UserError, match=r"multi-token prediction quantised \(.*float8_e4m3fn\)"):
        target.beyond(0)


# --- Formats that a CPU does not compute with, dequantised when they are loaded -----------------


def mxfp4(folder: Path) -> dict[str, Tensor]:
    """A gpt-oss whose experts are stored as blocks of 32 numbers of 4 bits with a power of two;
    returns the experts' weights as they were, [experts, in, out]."""
    shape = dense_model().config.to_dict()
    keys = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    same = {key: shape[key] for key in f"{keys} num_key_value_heads initializer_range".split()}
    experts = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8, head_dim=16)
    torch.manual_seed(0)
    config = GptOssConfig(**same, **experts, eos_token_id=TOKENIZER.eos_token_id)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    path, before = folder / "model", dict[str, Tensor]()
    model.save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    stored = load_file(path / "model.safetensors")
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([half, -half])
    for name in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
        before[name] = stored.pop(name).float()
        blocks = before[name].transpose(1, 2).unflatten(-1, (-1, 32))
        power = blocks.abs().amax(-1).log2().floor() - 2
        distance = (blocks / 2 ** power[..., None])[..., None] - numbers
        four = distance.abs().argmin(-1).to(torch.uint8)
        stored[f"{name}_blocks"] = (four[..., ::2] | four[..., 1::2] << 4).contiguous()
        stored[f"{name}_scales"] = (power + 127).to(torch.uint8)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    with_key(path, quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    return before


def fp8_experts(folder: Path) -> None:
    shape = dense_model().config.to_dict() | {"model_type": "qwen3_moe"}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = AutoConfig.for_model(**{**shape, **experts, "architectures": None})
    fp8(folder, AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("stored", [fp8, fp8_experts, mxfp4])
def test_what_is_dequantised_decodes_as_transformers_does(tmp_path: Path, stored: Any) -> None:
    """In float32, chains of a draft and vanilla decoding give the tokens of `generate`."""
    stored(tmp_path)
    cfg = config_of(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(cfg.path, dtype=torch.float32)
    ids = torch.arange(4, 20)[None]
    theirs.generation_config.eos_token_id = None
    mask = torch.ones_like(ids)
    told = theirs.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    response = told[0, 16:].tolist()
    on_demand = TargetLoader(cfg)
    whole, parts = on_demand.whole(), load_parts(cfg)
    assert ", dequantised on cpu" in opening(whole, cfg)
    assert parts is not None and parts.fingerprint() == whole.fingerprint()
    assert ", dequantised on" not in opening(parts, cfg), "the layers were not loaded"
    for name, config in (("lm", LMConfig()), ("eagle3", Eagle3Config([1, 2, 3], draft_vocab=None))):
        drafter = DRAFTERS[name].build(config, parts).eval()
        assert (
            generate(whole, ids[0].tolist(), Way(drafter), max_new_tokens=16, eos=()).ids
            == response
        )
    assert generate(whole, ids[0].tolist(), max_new_tokens=16, eos=()).ids == response


@pytest.mark.parametrize("stored", [fp8, fp8_experts, mxfp4])
def test_what_is_dequantised_is_spread_over_memory_and_disk(tmp_path: Path, stored: Any) -> None:
    """Room for the parts and a layer or two, counted as the plain weights that they become."""
    stored(tmp_path)
    cfg = config_of(tmp_path)
    whole, ids = load_target(cfg), [*range(4, 20)]
    sizes = [sum(x.nbytes for x in layer.parameters()) for layer in whole.layers]
    own = sum(x.nbytes for x in whole.model.parameters()) - sum(sizes)
    room = {"cpu": str(own + 5 * max(sizes) // 2)}
    target = load_target(replace(cfg, device_map="auto", max_memory=room))
    assert [target.model.hf_device_map[f"model.layers.{k}"] for k in (0, 3)] == ["cpu", "disk"]
    assert target.fingerprint() == whole.fingerprint()
    responses = (generate(each, ids, max_new_tokens=16, eos=()).ids for each in (target, whole))
    assert next(responses) == next(responses)
    assert [*Path(cfg.cache).glob("offloaded-*")]
    del target, responses
    gc.collect()
    assert not [*Path(cfg.cache).glob("offloaded-*")]


def test_experts_of_four_bits_are_read_as_numbers(tmp_path: Path) -> None:
    """The largest number of a block is at least 4 and less than 8 times its scale, and the largest
    gap between the numbers of 4 bits is 2: a weight is off by at most a quarter, or by 2 scales
    where it is above 6 of them."""
    before = mxfp4(tmp_path)
    target = load_target(config_of(tmp_path))
    for name, theirs in before.items():
        found = target.model.state_dict()[name]
        scale = theirs.transpose(1, 2).unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 4
        limit = scale.expand(*scale.shape[:-1], 32).flatten(-2).transpose(1, 2) * 2
        assert ((found - theirs).abs() <= limit).all(), name
        assert (found - theirs).norm() < 0.2 * theirs.norm(), name


def test_a_dequantised_target_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8(tmp_path)
    monkeypatch.setattr(packed_linear, "LEAST", 1)
    monkeypatch.setattr(packed_linear, "obstacle", lambda dtype: None)
    target = load_target(replace(config_of(tmp_path), packed=True))
    assert is_packed(target.model) and packed_linear.all_plain(target.model)
    assert load_target(config_of(tmp_path)).fingerprint() == target.fingerprint()


@pytest.mark.parametrize(
    ("method", "packages"),
    [("gptq", "optimum gptqmodel"), ("torchao", "torchao"), ("awq", "gptqmodel")],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, packages: str
) -> None:
    fp8(tmp_path)
    with_key(tmp_path / "model", quant_method=method, bits=4)
    monkeypatch.setattr(quantised, "find_spec", lambda module: None)
    told = rf"is stored quantised \({method}\).*: pip install {packages}$"
    with pytest.raises(UserError, match=told):
        load_target(config_of(tmp_path))


def test_layers_that_compute_in_one_type_alone_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8(tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("expected m1 and m2 to have the same dtype")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)
    with pytest.raises(UserError, match=r"do not compute in float32.*: give target.dtype=bfloat16"):
        load_target(config_of(tmp_path))


def test_a_job_on_a_quantised_target(tmp_path: Path) -> None:
    """Its hidden states are filled, a draft is trained and measured, and the second run holds
    parts."""
    fp8(tmp_path)
    data = write_jsonl(tmp_path / "chats.jsonl", conversations(29))
    tiny = Tiny(tmp_path, tmp_path / "model", data)
    assert tiny.job(tmp_path / "run", "eagle3", "drafter.initialisation=target") > 1
    assert (tmp_path / "run" / "report" / "report.md").exists()


# --- Layers of libraries, imitated: bitsandbytes', torchao's, compressed-tensors' ---------------


class Int8Linear(nn.Module):
    """Holds int8 and a scale for each row, as bitsandbytes' and GPTQ's layers do."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        whole = (layer.weight / scale).round().to(torch.int8)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.register_buffer("SCB", scale.detach())
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.SCB.to(x.dtype), self.bias)


class Int8Tensor(Tensor):
    """A weight that computes as floating-point numbers and is none, as torchao's are."""

    @staticmethod
    def __new__(cls, x: Tensor) -> "Int8Tensor":
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)  # type: ignore

    def __init__(self, x: Tensor) -> None:
        self.scale = x.abs().amax(1, keepdim=True) / 127
        self.whole = (x / self.scale).round().to(torch.int8)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        given = [x.whole * x.scale if isinstance(x, Int8Tensor) else x for x in args]
        return func(*given, **(kwargs or {}))


def by_modules(model: Any) -> None:
    for path, layer in list(model.named_modules()):
        if path.endswith("_proj"):
            model.set_submodule(path, Int8Linear(layer))


def by_tensors(model: Any) -> None:
    for path, layer in model.named_modules():
        if path.endswith("_proj"):
            layer.weight = nn.Parameter(Int8Tensor(layer.weight.detach()), requires_grad=False)


def by_methods(model: Any) -> None:
    """Plain weights, but another forward pass, which a copy of the layer would not have."""
    for path, layer in model.named_modules():
        if path.endswith("_proj"):
            plain = layer.forward
            layer.forward = lambda x, plain=plain: plain(x.clone())


@pytest.mark.parametrize("quantise", [by_modules, by_tensors, by_methods])
def test_a_target_of_quantised_layers_drafts_and_is_drafted_for(quantise: Any) -> None:
    """Eight bits: every weight is within half of 1 / 127 of its row's largest."""
    model, plain = dense_model(), dense_model()
    quantise(model)
    target = Target(model, TOKENIZER, "tiny", quantisation="int8")
    pack(target.model)
    assert not any(isinstance(m, PackedLinear) for m in target.layers.modules())
    before = target.checksum()
    state = target.layer(2)
    for name, x in plain.model.layers[2].state_dict().items():
        assert ((state[name] - x).abs() <= x.abs().amax(-1, keepdim=True) / 253).all(), name
    assert state.keys() == plain.model.layers[2].state_dict().keys()
    ids = torch.arange(3, 20)[None]
    drafter = DRAFTERS["lm"].build(LMConfig(depth=3, layers=[0, 1, 2, 3]), target).eval()
    theirs, ours = (
        target.hidden_states(ids, HiddenStateSpec())[1],
        drafter.model.base_model(ids).last_hidden_state,
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    eagle = DRAFTERS["eagle3"].build(Eagle3Config([1, 2, 3], draft_vocab=None), target)
    response = generate(target, ids[0].tolist(), max_new_tokens=12, eos=())
    for draft in (drafter, eagle):
        drafted = generate(target, ids[0].tolist(), Way(draft), max_new_tokens=12, eos=())
        assert drafted.ids == response.ids
        assert draft is eagle or all(r.accepted == r.drafted for r in drafted.steps)
    assert target.checksum() == before
    with torch.no_grad():
        parameter = next(p for n, p in model.named_parameters() if "q_proj.weight" in n)
        if isinstance(parameter.data, Int8Tensor):
            parameter.data.whole[0, 0] += 1
        else:
            parameter[0, 0] += 1
    assert target.checksum() != before


def test_the_adapters_of_a_quantised_target_and_odd_parts_are_refused() -> None:
    model = dense_model()
    by_modules(model)
    target = Target(model, TOKENIZER, "tiny", quantisation="int8")
    config = EarlyExitConfig(lora=LoraOptions(rank=4))
    with pytest.raises(UserError, match="adapters cannot be added"):
        DRAFTERS["early_exit"].build(config, target)
    odd = nn.Module()
    odd.experts = nn.Parameter(torch.zeros(2, 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UserError, match="keeps experts as int8 in a Module"):
        plain_state(odd, torch.float32)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_gives_its_weight_to_the_rows_of_an_identity(bias: bool) -> None:
    layer = nn.Linear(1500, 7, bias=bias)  # more than are read at a time
    given, found = Int8Linear(layer), dense_linear(Int8Linear(layer), torch.float32)
    torch.testing.assert_close(found.weight, given.weight * given.SCB)
    assert is_plain(found) and not is_plain(given)
    assert (found.bias is None) != bias
    x = torch.randn(3, 1500)
    torch.testing.assert_close(found(x), given(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_bias_leaves_a_quantised_weight_its_digits(dtype: torch.dtype) -> None:
    """In bfloat16, numbers about 30 are .125 apart: a weight of .01 would be lost in the sum."""
    layer = nn.Linear(24, 7)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.constant_(layer.bias, 30.0)
    given = Int8Linear(layer)
    bias, weight = given.bias, given.weight * given.SCB
    found = dense_linear(given.to(dtype), dtype)
    torch.testing.assert_close(found.weight.float(), weight, rtol=2**-7, atol=1e-6)
    assert given.bias is bias and torch.equal(found.bias, bias)


def test_a_bias_that_cannot_be_taken_out_is_told() -> None:
    class Sealed(Int8Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 30

    with pytest.raises(UserError, match="a Sealed of the target adds a bias"):
        dense_linear(Sealed(nn.Linear(8, 4)), torch.float32)


def test_a_head_of_another_kind_with_a_large_bias_keeps_its_digits() -> None:
    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, 2 * self.weight, self.bias)

    head = Head(8, 5)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.constant_(head.bias, 30.0)
    weight = 2 * head.to(torch.bfloat16).weight
    assert torch.equal(flat(head).weight, weight)


def test_what_is_read_of_plain_weights_is_their_state_dict() -> None:
    model = dense_model()
    state = plain_state(model, torch.float32)
    assert state.keys() == model.state_dict().keys()
    theirs = model.state_dict().items()
    assert digest_of_weights(state.items()) == digest_of_weights(theirs)


# --- The libraries themselves, where they are installed -----------------------------------------


def quantised_by(library: str, folder: Path) -> None:
    path = folder / "model"
    dense_model().to(torch.bfloat16).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    if library == "compressed_tensors":
        stored = load_file(path / "model.safetensors")
        for name, x in list(stored.items()):
            if "_proj." in name:
                scale = x.float().abs().max().reshape(1) / 448
                stored[name] = (x.float() / scale).to(torch.float8_e4m3fn)
                stored[f"{name}_scale"] = scale.to(torch.bfloat16)
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
        form = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
        group = {"targets": ["Linear"], "weights": form | {"strategy": "tensor"}}
        with_key(
            path,
            quant_method="compressed-tensors",
            format="float-quantized",
            quantization_status="compressed",
            config_groups={"group_0": group},
            ignore=["lm_head"],
        )
        return
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        how: Any = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        how = BitsAndBytesConfig(**{f"load_in_{library[-1]}bit": True})
    options = {"quantization_config": how, "device_map": {"": "cpu"}, "dtype": torch.bfloat16}
    AutoModelForCausalLM.from_pretrained(path, **options).save_pretrained(path)


@pytest.mark.parametrize(
    "library", ["compressed_tensors", "torchao", "bitsandbytes8", "bitsandbytes4"]
)
def test_checkpoints_of_other_libraries(tmp_path: Path, library: str) -> None:
    """Four bits are off by up to a fifth of the block's largest number; eight by far less."""
    if importlib.util.find_spec(library.rstrip("48")) is None:
        pytest.skip(f"pip install {library.rstrip('48')}: the project itself does not need it")
    quantised_by(library, tmp_path)
    cfg = config_of(tmp_path, "bfloat16")
    whole, parts, plain = TargetLoader(cfg).whole(), load_parts(cfg), dense_model()
    assert parts is not None and parts.fingerprint() == whole.fingerprint()
    whole.checksum()
    for name, x in plain.model.layers[1].state_dict().items():
        found = parts.layer(1)[name]
        assert torch.equal(found, whole.layer(1)[name])
        off = (found - x).float().norm() / x.float().norm()
        assert off < (0.2 if library.endswith("4") else 0.05), name
    ids = list(range(3, 12))
    response = generate(whole, ids, max_new_tokens=8, eos=()).ids
    drafter = DRAFTERS["lm"].build(LMConfig(), parts).to(torch.bfloat16).eval()
    assert generate(whole, ids, Way(drafter), max_new_tokens=8, eos=()).ids == response

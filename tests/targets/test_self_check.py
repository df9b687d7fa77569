"""The self-check of a target separates wrong reading from rounding, in any precision.

Run alone: python -m pytest tests/targets/test_self_check.py (about 15 s)
"""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specdec.errors import UserError
from specdec.targets import self_check, transformers_model
from specdec.targets.loading import load_target, opening
from specdec.targets.self_check import check_causal, few_layers
from specdec.targets.shrunken_twin import SHARP
from specdec.targets.target import Reading, Target
from specdec.targets.target_config import TargetConfig
from tests.targets.test_architectures import EXPERTS, LONGROPE, SHARED, SMALL, V
from tests.tiny import save_target

MPT = {"d_model": 32, "n_layers": 4, "n_heads": 4}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4}
MLA = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
RIGHT: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": {**SMALL, "head_dim": 8},
    "gemma2": {**SMALL, "head_dim": 8},
    "gemma4_text": SHARED,
    "mistral": {**SMALL, "sliding_window": 8},
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": SMALL,
    "falcon": SMALL,
    "phi3": {**SMALL, "max_position_embeddings": 128, **LONGROPE},
    "smollm3": SMALL,
    "olmo3": SMALL,
    "cohere2": SMALL,
    "mixtral": {**SMALL, "num_local_experts": 4},
    "deepseek_v3": {**SMALL, **MLA},
    "gpt_oss": {**SMALL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def model_of(kind: str, options: dict[str, Any], size: float, dtype: torch.dtype) -> Any:
    """A random model whose matrices have entries of this size, small, or very large."""
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{"vocab_size": V} | ids | options)
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=size)
    # not `model.to`, which would round rotary frequencies too
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model.eval()


@pytest.mark.parametrize("size", [0.02, 2.0])
@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_read_rightly_is_accepted_in_bfloat16(kind: str, size: float) -> None:
    """The sharp part of the check has two orders of magnitude to spare, and changes nothing."""
    model = model_of(kind, RIGHT[kind], size, torch.bfloat16)
    before = json.dumps(model.config.to_dict(), default=str)
    target = Target(model, None, kind)
    checksum = target.checksum()
    few = few_layers(target)
    assert few is not None and few.dtype is torch.float32
    assert len(few.layers) == 2 < len(target.layers)
    assert few.vocab_size <= self_check.FEW
    with torch.no_grad():
        assert self_check._cache_error(few) < SHARP / 100
    assert (target.checksum(), json.dumps(model.config.to_dict(), default=str)) == (
        checksum,
        before,
    )
    shared = {id(x) for x in few.model.parameters()} & {id(x) for x in model.parameters()}
    assert not shared


@pytest.mark.parametrize("size", [0.02, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_positions_by_slots_are_seen_in_every_precision(dtype: torch.dtype, size: float) -> None:
    if dtype is torch.float32 and size > 1:
        return  # attention sees one token whatever its bias: this is read as the model reads it
    target = Target(model_of("mpt", MPT, size, dtype), None, "mpt")
    assert target.reading is Reading.ROWS and not target.reads_trees


class Halves(nn.Module):
    """A linear layer of 16 bits that is quantised in memory."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.scale = nn.Parameter(layer.weight.abs().amax() / 127, requires_grad=False)
        whole = (layer.weight / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(whole, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


@pytest.mark.parametrize("kind", ["llama", "mpt"])
def test_quantised_layers_are_checked_as_sharply(kind: str) -> None:
    model = model_of(kind, MPT if kind == "mpt" else SMALL, 0.1, torch.float32)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and "head" not in path:
            model.set_submodule(path, Halves(layer))
    if kind == "llama":
        few = few_layers(Target(model, None, kind, quantisation="int8"))
        assert few is not None and self_check._cache_error(few) < SHARP / 100
    else:
        target = Target(model, None, kind, quantisation="int8")
        assert target.reading is Reading.ROWS


@pytest.mark.parametrize(("rounding", "accepted"), [(0.01, False), (0.15, True)])
def test_much_of_little(monkeypatch: pytest.MonkeyPatch, rounding: float, accepted: bool) -> None:
    """In 16 bits, logits may be off by more than a fifth if as much comes of rounding the input."""
    target = Target(model_of("llama", SMALL, 0.1, torch.bfloat16), None, "tiny")
    sharp = self_check._cache_error
    monkeypatch.setattr(self_check, "_cache_error", lambda x: 0.5 if x is target else sharp(x))
    monkeypatch.setattr(self_check, "_rounding_error", lambda _: rounding)
    if accepted:
        check_causal(target)
        return
    with pytest.raises(UserError, match="is not causal or depends on the length"):
        check_causal(target)


def test_rounding_the_input_is_seen_in_the_logits() -> None:
    """By about 2^-8 in bfloat16 and 2^-23 in float32, times what the layers make of it."""
    for dtype, eps in ((torch.bfloat16, 2**-7), (torch.float32, 2**-23)):
        target = Target(model_of("llama", SMALL, 0.1, dtype), None, "tiny")
        with torch.no_grad():
            assert eps / 8 < self_check._rounding_error(target) < 8 * eps
        assert not target.embedding._forward_hooks


# --- What a checkpoint's precision becomes ------------------------------------------------------


def stored_in(folder: Path, dtype: torch.dtype) -> TargetConfig:
    path = save_target(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.save_pretrained(path)
    return TargetConfig(str(path), "float16", "cpu", cache=str(folder / "cache"))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_a_target_in_float16_is_never_held_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype
) -> None:
    """Its fingerprint is that of every other precision, and comes of the files."""
    cfg = stored_in(tmp_path, stored)
    expected = load_target(TargetConfig(cfg.path, "bfloat16", "cpu")).fingerprint()
    plain, held, loads = transformers_model.load_model, 0, []

    def counted(given: TargetConfig, *rest: Any) -> Any:
        nonlocal held
        loads.append((given.dtype, given.device, held))
        model, held = plain(given, *rest), held + 1

        def given_up(_: Any = None) -> None:
            nonlocal held
            held -= 1

        weakref.finalize(model, given_up)
        return model

    monkeypatch.setattr(transformers_model, "load_model", counted)
    target = load_target(cfg)
    assert target.fingerprint() == expected
    assert loads == [("float16", "cpu", 0)]


@pytest.mark.parametrize(
    ("stored", "dtype", "said"),
    [
        (torch.float16, "bfloat16", "rounded from the checkpoint's float16"),
        (torch.float32, "bfloat16", "rounded from the checkpoint's float32"),
        (torch.float32, "float16", "rounded from the checkpoint's float32"),
        (torch.float16, "float16", ""),
        (torch.float16, "float32", ""),
        (torch.bfloat16, "float32", ""),
        (torch.bfloat16, "bfloat16", ""),
    ],
)
def test_what_loading_rounds_away_is_said(
    tmp_path: Path, stored: torch.dtype, dtype: str, said: str
) -> None:
    cfg = stored_in(tmp_path, stored)
    cfg.dtype = dtype
    line = opening(load_target(cfg), cfg)
    assert said in line and ("rounded" in line) == bool(said)

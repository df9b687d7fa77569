"""A fingerprint covers all that changes a logit, and nothing else.

Run alone: python -m pytest tests/targets/test_fingerprint.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from specdec.targets.checkpoint_files import SafetensorsFiles
from specdec.targets.fingerprint import computing_keys, digest_of
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WEIGHTS = "model.safetensors"


def checkpoint(folder: Path, kind: str = "mistral", **options: Any) -> TargetConfig:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=len(TOKENIZER), **BASE | options)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    where = str(folder / "model"), "float32", "cpu"
    return TargetConfig(*where, packed=False, cache=str(folder / "cache"))


def fingerprint(cfg: TargetConfig) -> str:
    return load_target(cfg).fingerprint()


def edit_config(cfg: TargetConfig, **keys: Any) -> None:
    file = Path(cfg.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def edit(cfg: TargetConfig, change: Any) -> None:
    file = Path(cfg.path) / WEIGHTS
    tensors = load_file(file)
    save_file(change(tensors) or tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rms_norm_eps": 1e-2},
        {"sliding_window": 4},
        {"hidden_act": "gelu"},
    ],
    ids=str,
)
def test_another_config_is_another_target(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Each of these changes the logits of the same weights."""
    cfg = checkpoint(tmp_path, sliding_window=None)
    ids = torch.arange(3, 23)[None]
    before = load_target(cfg)
    edit_config(cfg, **keys)
    after = load_target(cfg)
    with torch.no_grad():
        assert not torch.allclose(before.model(ids).logits, after.model(ids).logits)
    assert after.fingerprint() != before.fingerprint()


def test_what_changes_no_logit_is_the_same_target(tmp_path: Path) -> None:
    cfg = checkpoint(tmp_path)
    first = fingerprint(cfg)
    edit_config(
        cfg, transformers_version="9.9", use_cache=False, eos_token_id=[1, 2], dtype="bfloat16"
    )
    edit_config(cfg, _name_or_path="elsewhere", attention_dropout=0.1, initializer_range=0.5)
    edit_config(cfg, pad_token_id=0, hidden_act="silu", head_dim=8, architectures=["Other"])
    assert fingerprint(cfg) == first
    again = AutoModelForCausalLM.from_pretrained(cfg.path, dtype=torch.float32)
    again.save_pretrained(cfg.path, max_shard_size="10KB")
    (Path(cfg.path) / WEIGHTS).unlink()
    assert fingerprint(cfg) == first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wider_type_of_the_same_numbers_is_the_same_target(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    cfg = checkpoint(tmp_path)
    edit(cfg, lambda tensors: {n: x.to(dtype) for n, x in tensors.items()})
    first = fingerprint(cfg)
    edit(cfg, lambda tensors: {n: x.float() for n, x in tensors.items()})
    assert fingerprint(cfg) == first
    edit(cfg, lambda tensors: {n: x.double() for n, x in tensors.items()})
    assert fingerprint(cfg) == first


def _swap_rows(tensors: dict[str, Tensor]) -> None:
    rows = tensors["model.embed_tokens.weight"]
    rows[[5, 9]] = rows[[9, 5]]


def _swap_layers(tensors: dict[str, Tensor]) -> None:
    names = [f"model.layers.{k}.mlp.up_proj.weight" for k in (0, 1)]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


def _lowest_bit(tensors: dict[str, Tensor]) -> None:
    """Far below what bfloat16 keeps, in the middle of a tensor."""
    bits = tensors["model.layers.1.mlp.down_proj.weight"].view(torch.int32)
    bits[7, 11] ^= 1


@pytest.mark.parametrize("change", [_swap_rows, _swap_layers, _lowest_bit])
def test_other_weights_are_another_target(tmp_path: Path, change: Any) -> None:
    cfg = checkpoint(tmp_path)
    first, of_memory = fingerprint(cfg), in_memory(cfg)
    edit(cfg, change)
    assert fingerprint(cfg) != first and in_memory(cfg) != of_memory


def in_memory(cfg: TargetConfig) -> str:
    return Target(AutoModelForCausalLM.from_pretrained(cfg.path), None, "x").fingerprint()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_memory_has_the_fingerprint_of_its_files(tmp_path: Path, tied: bool) -> None:
    cfg = checkpoint(tmp_path, tie_word_embeddings=tied)
    assert in_memory(cfg) == fingerprint(cfg)


def test_pytorchs_own_files_are_hashed_as_they_are(tmp_path: Path) -> None:
    cfg = checkpoint(tmp_path)
    first, file = fingerprint(cfg), Path(cfg.path) / WEIGHTS
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    for dtype in ("float32", "bfloat16"):
        assert fingerprint(TargetConfig(cfg.path, dtype, "cpu", cache=cfg.cache)) == first


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of 60 GB takes a minute to read. After a change, it is read again."""
    cfg = checkpoint(tmp_path)
    first, reads = fingerprint(cfg), list[str]()
    read = SafetensorsFiles.tensor

    def counted(self: Any, name: str) -> Tensor:
        reads.append(name)
        return read(self, name)

    monkeypatch.setattr(SafetensorsFiles, "tensor", counted)
    assert fingerprint(cfg) == first and not reads
    edit_config(cfg, rms_norm_eps=1e-2)
    assert fingerprint(cfg) != first and not reads
    edit(cfg, lambda tensors: None)
    edit_config(cfg, rms_norm_eps=1e-6)
    assert fingerprint(cfg) == first and reads


def test_it_does_not_depend_on_when_it_is_computed() -> None:
    """RWKV rescales its weights at its first forward pass, in place."""
    config = AutoConfig.for_model(
        "rwkv", vocab_size=61, hidden_size=32, num_hidden_layers=8, rescale_every=2
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    fresh = AutoModelForCausalLM.from_config(config).eval()
    fresh.load_state_dict(model.state_dict())
    target = Target(model, None, "rwkv")
    model(torch.arange(4)[None])
    assert target.fingerprint() == Target(fresh, None, "rwkv").fingerprint()


def test_a_digest_by_hand() -> None:
    """The type counts only where the values need it; shapes, order and the sign of 0 count."""
    x = torch.tensor([[1.0, -2.5], [0.0, float("inf")]])
    same = [x.bfloat16(), x.half(), x.double(), x.clone().t().contiguous().t()]
    assert {digest_of(y) for y in same} == {digest_of(x)}
    third = torch.tensor(1 / 3)
    others = [x.flatten(), -x, x[[1, 0]], third, third.bfloat16(), third.double() + 1e-12]
    digests = [digest_of(y) for y in (x, *others, torch.tensor([1], dtype=torch.uint8))]
    assert len(set(digests)) == len(digests)


def test_a_newer_class_with_more_keys_describes_a_config_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an update of transformers adds them: with a default, or derived from others."""
    config = LlamaConfig(**BASE)
    before = computing_keys(config)
    assert json.loads(before)[0] == {**BASE, "model_type": "llama"}

    class Newer(LlamaConfig):
        def __init__(self, qk_scale: float = 1.0, **options: Any) -> None:
            super().__init__(**options)
            self.qk_scale = qk_scale
            self.kinds = ["full"] * self.num_hidden_layers

    assert computing_keys(Newer(**BASE)) == before
    assert computing_keys(Newer(**BASE, qk_scale=2.0)) != before

"""Checkpoints whose files name their tensors otherwise than the model: what is read from the files,
fingerprint and layers, is what the loaded model has.

Run alone: python -m pytest tests/targets/test_conversions.py (about 15 s)
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from specdec.drafters import DRAFTERS
from specdec.drafters.lm import LMConfig
from specdec.errors import UserError
from specdec.targets import loading
from specdec.targets.checkpoint_files import converted_tensors
from specdec.targets.loading import TargetLoader, load_parts
from specdec.targets.target_config import TargetConfig
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
SHAPE: dict[str, Any] = dict(
    vocab_size=len(TOKENIZER),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2)
QWEN_TOWER = dict(
    depth=3, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4
)
SPLIT = dict(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]})
# 12 experts: sorted as text, the 11th would come before the third
EXPERTS = dict(num_experts=12, num_experts_per_tok=2, moe_intermediate_size=16)
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {**SHAPE, "num_local_experts": 12, "num_experts_per_tok": 2},
    "qwen3_moe": {**SHAPE, **EXPERTS, "mlp_only_layers": [1]},
    "qwen2_moe": {**SHAPE, **EXPERTS, "shared_expert_intermediate_size": 16},
    "gemma3": {"text_config": SHAPE, "vision_config": TOWER},
    "llava": {
        "text_config": {**SHAPE, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "clip_vision_model"},
    },
    "qwen2_5_vl": {"text_config": {**SHAPE, **SPLIT}, "vision_config": QWEN_TOWER},
}


def saved(folder: Path, kind: str, shard: str = "1GB") -> TargetConfig:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS[kind])
    auto = AutoModelForImageTextToText if "text_config" in KINDS[kind] else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder / "model", max_shard_size=shard)
    TOKENIZER.save_pretrained(folder / "model")
    where = str(folder / "model"), "float32", "cpu"
    return TargetConfig(*where, packed=False, cache=str(folder / "cache"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_of_the_files_is_what_the_loaded_model_has(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = saved(tmp_path, kind, "30KB")
    whole = loading.load_target(cfg)
    state = whole.model.state_dict()
    assert set(whole.weights.files) - set(state), "the files name every tensor as the model does"
    read: dict[str, torch.Tensor] = {}
    for part in converted_tensors(whole.model, whole.weights.files):
        read |= part.tensors(whole.model, whole.weights.tensor)
    tied = {name for name in state if name not in read}
    assert tied <= {"lm_head.weight"} and all(torch.equal(read[name], state[name]) for name in read)

    def loaded(*_: Any) -> Any:
        raise AssertionError("the layers were loaded")

    monkeypatch.setattr(loading, "load_target", loaded)
    alone = TargetLoader(cfg, alone=True).parts
    assert alone.stored is not None and not len(alone.layers)
    assert alone.fingerprint() == whole.fingerprint()
    for ours, theirs in (
        (alone.layer(-1), whole.layer(-1)),
        (alone.cut([0, 2]), whole.cut([0, 2])),
    ):
        assert ours.keys() == theirs.keys() and len(ours) > 8
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_weight_of_one_expert_is_another_target(tmp_path: Path) -> None:
    cfg = saved(tmp_path, "qwen3_moe")
    first = TargetLoader(cfg, alone=True).parts.fingerprint()
    model = AutoModelForCausalLM.from_pretrained(cfg.path)
    with torch.no_grad():
        experts = model.model.layers[2].mlp.experts
        experts.down_proj[[1, 11]] = experts.down_proj[[11, 1]]
    model.save_pretrained(cfg.path)
    second = TargetLoader(cfg, alone=True)
    assert second.parts.fingerprint() != first
    assert second.whole().fingerprint() == second.parts.fingerprint()


def test_a_draft_of_experts_starts_from_parts_as_from_the_whole(tmp_path: Path) -> None:
    cfg = saved(tmp_path, "qwen3_moe")
    starts = []
    for _ in range(2):  # the second time, the layers stay on disk
        torch.manual_seed(0)
        target = TargetLoader(cfg)
        starts.append(DRAFTERS["lm"].build(LMConfig(layers=[0, 2]), target.parts).state_dict())
        target.whole()
    assert load_parts(cfg).stored is not None and starts[0].keys() == starts[1].keys()
    assert all(torch.equal(starts[0][name], x) for name, x in starts[1].items())


def test_files_that_lack_an_expert_are_refused(tmp_path: Path) -> None:
    cfg = saved(tmp_path, "qwen3_moe", "30KB")
    index = Path(cfg.path) / "model.safetensors.index.json"
    assert "2.mlp.experts.7.down_proj" in index.read_text()
    index.write_text(index.read_text().replace("experts.7.down_proj", "experts.77.down_proj"))
    with pytest.raises(UserError, match="no file holds"):
        TargetLoader(cfg, alone=True)

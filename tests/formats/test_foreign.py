"""Exports read by somebody else's code: transformers' classes, built from the exported config.

Run alone: pytest tests/formats/test_foreign.py
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    StableLmConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specdec.drafters import Drafter
from specdec.formats import export, foreign
from specdec.target.base import Target
from specdec.target.causal import CausalTarget
from tests.drafters.families import CONFIGS
from tests.tiny import random_drafter

V, KEPT = 61, torch.arange(2, 42)
EXPORTED = {
    name: config
    for name, config in CONFIGS.items()
    if export.layout_names(config.name) and "adapters" not in name and "a module a" not in name
}
BASE: dict[str, Any] = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.3,
)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1, 1.4]}
LONG |= {"long_factor": [2.0, 9.0], "partial_rotary_factor": 0.5}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(**{**BASE, **more})


TARGETS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "half of each head": lambda: llama(rope_parameters=dict(HALF)),
    "yarn": lambda: llama(
        rope_parameters=YARN | {"original_max_position_embeddings": 32, "beta_fast": None}
    ),
    "yarn, half": lambda: StableLmConfig(
        **BASE, rope_parameters=YARN | {"partial_rotary_factor": 0.5}
    ),
    "llama3": lambda: llama(rope_parameters=dict(LLAMA3)),
    "linear": lambda: llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 8}
    ),
    "dynamic": lambda: llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    ),
    "longrope, half": lambda: Phi3Config(
        **BASE, pad_token_id=None, rope_parameters=dict(LONG), original_max_position_embeddings=64
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        **{k: x for k, x in BASE.items() if k != "num_key_value_heads"}, rotary_pct=0.5
    ),
    "kinds of layers": lambda: Olmo3Config(**BASE, sliding_window=8),
    "gemma2": lambda: Gemma2Config(**BASE, head_dim=8, query_pre_attn_scalar=8, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(
        **BASE, head_dim=8, query_pre_attn_scalar=8, sliding_window=8
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **BASE,
        head_dim=8,
        sliding_window=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    ),
    "cohere": lambda: CohereConfig(**BASE),
    "granite": lambda: GraniteConfig(**BASE, logits_scaling=3.0, embedding_multiplier=5.0),
}


def target_of(name: str) -> Target:
    torch.manual_seed(0)
    config = TARGETS[name]()
    eager = config.model_type in ("gemma2",)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if eager else "sdpa"
    )
    model.generation_config.eos_token_id = None
    return CausalTarget(model.float(), None, f"tiny {name}")


def draft(config: Any, target: Target) -> Drafter:
    pruned = KEPT if getattr(config, "draft_vocab", None) else None
    return random_drafter(config, target, 0.1, pruned)


@pytest.fixture(scope="module")
def targets() -> Callable[[str], Target]:
    made: dict[str, Target] = {}

    def target(name: str) -> Target:
        return made[name] if name in made else made.setdefault(name, target_of(name))

    return target


ON_LLAMA = [(name, "llama") for name in EXPORTED]
ELSEWHERE = [
    (name, kind)
    for name in ("eagle3", "eagle", "dflash", "jetspec")
    for kind in TARGETS
    if kind != "llama"
]
ELSEWHERE += [("mtp", kind) for kind in ("half of each head", "cohere", "granite")]


@pytest.mark.parametrize(("name", "kind"), ON_LLAMA + ELSEWHERE)
def test_an_export_computes_the_same_elsewhere(
    targets: Callable[[str], Target], tmp_path: Path, name: str, kind: str
) -> None:
    target, config = targets(kind), EXPORTED[name]
    before = copy.deepcopy(target.model.config.to_dict())
    drafter = draft(config, target)
    for layout in export.layout_names(config.name):
        export.write(tmp_path / layout, drafter, target, layout)
        assert foreign.gap(tmp_path / layout, drafter, target) < 1e-4
    assert target.model.config.to_dict() == before

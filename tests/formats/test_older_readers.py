"""Exports and targets that transformers 4.57 reads as they are, and with it the tools built on it.

Run alone: python -m pytest tests/formats/test_older_readers.py -m "" (makes an environment)
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from specdec.drafters.eagle import EagleConfig
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.lm import LMConfig
from specdec.errors import UserError
from specdec.formats import draft_export
from specdec.targets.saved import with_older_rope_keys
from specdec.targets.target import Target
from tests.tiny import REPOSITORY, make_tokenizer, random_drafter

Reader = subprocess.Popen[str]
TOKENIZER = make_tokenizer()
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
HALF = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "yarn": ("llama", {"rope_parameters": YARN | {"rope_theta": 2e4}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    "tied": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": HALF | {
        "partial_rotary_factor": 1.0}}),
    "half": ("stablelm", {"rope_parameters": HALF}),
    "half, GLM": ("glm", {"rope_parameters": HALF, "head_dim": 8}),
    "half, GPT-NeoX": ("gpt_neox", {"rope_parameters": HALF}),
    "by kind of layer": ("gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 8,
        "sliding_window": 8, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}}),
}  # fmt: skip
READ = """
import json, sys
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
assert transformers.__version__.startswith("4.57")

def read(kind, folder, text):
    if kind == "layers":
        return LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = tokenizer("<|im_start|>user\\nblue fish<|im_end|>").input_ids
    with torch.no_grad():
        return [model(torch.load(text)).logits, said, type(tokenizer).__name__]

responses, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    kind, folder, text, out = json.loads(line)
    torch.save(read(kind, folder, text), out)
    print(out, file=responses, flush=True)
"""


@pytest.fixture(scope="session")
def older() -> Iterator[Reader]:
    """A process with transformers 4.57 that reads what it is given, for all tests: importing takes
    longer than reading."""
    folder = Path(os.environ.get("DRAFTSMITH_OLDER_READERS", REPOSITORY / ".venv-older-readers"))
    environment = os.environ | {"PYTHON": sys.executable, "DRAFTSMITH_OLDER_READERS": str(folder)}
    subprocess.run([REPOSITORY / "scripts" / "older-readers-env"], check=True, env=environment)
    path = {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with subprocess.Popen(
        [sys.executable, "-c", READ],
        env=os.environ | path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        yield reader
        reader.communicate()  # it ends with its input


def read_by(older: Reader, kind: str, folder: Path, scratch: Path) -> Any:
    """What the process reads of a folder; its errors are on this process's stderr."""
    assert older.stdin is not None and older.stdout is not None
    text, out = scratch / "text.pt", scratch / "out.pt"
    torch.save(some_ids(), text)
    print(json.dumps([kind, str(folder), str(text), str(out)]), file=older.stdin, flush=True)
    assert older.stdout.readline().strip() == str(out), "the reader ended"
    return torch.load(out)


def some_ids() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(3, len(TOKENIZER), (1, 150), generator=draw)


def target_of(name: str) -> Target:
    torch.manual_seed(0)
    kind, options = TARGETS[name]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SIZES | options), attn_implementation="eager"
    )
    return Target(model.float(), TOKENIZER, name)


@pytest.mark.serving
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_the_same_model(name: str, older: Reader, tmp_path: Path) -> None:
    """Its logits over 150 tokens, and the tokens of a text."""
    target = target_of(name)
    draft_export.write_target(tmp_path / "target", target)
    logits, said, kind = read_by(older, "model", tmp_path / "target", tmp_path)
    with torch.no_grad():
        ours = target.model(some_ids()).logits
    torch.testing.assert_close(logits, ours, atol=1e-3, rtol=1e-3)
    assert said == TOKENIZER("<|im_start|>user\nblue fish<|im_end|>").input_ids
    assert kind.endswith("TokenizerFast")


@pytest.mark.serving
@pytest.mark.parametrize("name", ["base", "yarn", "tied"])
def test_a_draft_lm_is_the_same_model(name: str, older: Reader, tmp_path: Path) -> None:
    target = target_of(name)
    drafter: Any = random_drafter(LMConfig(layers=[0, 3]), target, 0.0)
    draft_export.write_export(tmp_path / "draft", drafter, target)
    logits, _, _ = read_by(older, "model", tmp_path / "draft", tmp_path)
    with torch.no_grad():
        ours = drafter.model(some_ids()).logits
    torch.testing.assert_close(logits, ours, atol=1e-3, rtol=1e-3)


@pytest.mark.serving
@pytest.mark.parametrize("name", ["base", "yarn", "llama3"])
def test_the_layers_of_a_head_rotate_alike(name: str, older: Reader, tmp_path: Path) -> None:
    target = target_of(name)
    drafter: Any = random_drafter(EagleConfig(depth=2), target, 0.1)
    draft_export.write_export(tmp_path / "draft", drafter, target)
    theirs = read_by(older, "layers", tmp_path / "draft", tmp_path)
    ours = target.model.base_model.rotary_emb.inv_freq
    torch.testing.assert_close(theirs, ours)


def test_what_readers_would_draft_otherwise_is_said(tmp_path: Path) -> None:
    for name, partial in (("base", False), ("half", True)):
        target = target_of(name)
        for config in (EagleConfig(depth=2), Eagle3Config(depth=2, layers=[1, 2, 3])):
            drafter = random_drafter(config, target, 0.1)
            for layout in ("hf", "speculators")[: 2 if config.name == "eagle3" else 1]:
                said = draft_export.write_export(tmp_path / "draft", drafter, target, layout)
                assert ("only 0.5 of each head is rotated" in said) is partial


def test_both_forms_by_hand() -> None:
    rope = YARN | {"rope_theta": 2e4, "partial_rotary_factor": 0.5}
    config = {"text_config": {"model_type": "x", "rope_parameters": rope}, "a": 1}
    form = with_older_rope_keys(config)
    assert form == {
        "a": 1,
        "text_config": {
            "model_type": "x",
            "rope_parameters": rope,
            "rope_theta": 2e4,
            "rope_scaling": rope,
            "partial_rotary_factor": 0.5,
        },
    }
    assert "rope_theta" not in config["text_config"]


def test_a_target_whose_generation_config_contradicts_itself_is_written(tmp_path: Path) -> None:
    """transformers 5 reads a temperature without sampling, as hubs have it, and refuses to save
    it."""
    target = target_of("base")
    target.model.generation_config = GenerationConfig(do_sample=False, temperature=0.6, top_p=0.9)
    draft_export.write_target(tmp_path / "target", target)
    keys = json.loads((tmp_path / "target" / "generation_config.json").read_text())
    assert (keys["temperature"], keys["top_p"]) == (0.6, 0.9)
    assert target.model.generation_config.temperature == 0.6


@pytest.mark.parametrize("tied", [True, False])
def test_a_config_says_what_the_weights_are(tied: bool, tmp_path: Path) -> None:
    """Whatever the config said before: a checkpoint may hold a head beside `true`."""
    target = target_of("tied" if tied else "base")
    target.model.config.tie_word_embeddings = True
    if tied:
        target.model.config.tie_word_embeddings = False
    draft_export.write_target(tmp_path / "target", target)
    keys = json.loads((tmp_path / "target" / "config.json").read_text())
    assert keys["tie_word_embeddings"] is tied
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    head, table = again.get_output_embeddings().weight, again.get_input_embeddings().weight
    assert torch.equal(head, target.head.weight) and (head is table) is tied


def test_a_leftover_adapter_is_told(tmp_path: Path) -> None:
    """transformers loads it with the model, and would save it without the model."""
    target = target_of("base")
    target.model._hf_peft_config_loaded = True
    with pytest.raises(UserError, match="not written: an adapter was loaded with"):
        draft_export.write_target(tmp_path / "target", target)
    assert not (tmp_path / "target").exists()

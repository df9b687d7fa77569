"""Tokenizers and checkpoints that transformers warns about, or changes in silence.

Run alone: python -m pytest tests/targets/test_tokenizers.py (under 20 s)
"""

import json
import tomllib
from pathlib import Path

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from specdec.compat import quiet_libraries
from specdec.errors import UserError
from specdec.targets import loading, transformers_model
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.tiny import REPOSITORY, save_target


def config_of(folder: Path) -> TargetConfig:
    return TargetConfig(str(folder), "float32", "cpu", cache=str(folder / "cache"))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_model, "WARNED", set())
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)


@pytest.mark.parametrize("label", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_a_byte_level_tokenizer_that_is_labelled_llama_keeps_its_spaces(
    tmp_path: Path, label: str
) -> None:
    """transformers 5.21 read "a b" as "ab" here, which is why the lower bound is above it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": label}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("a b  c\n d", add_special_tokens=False)["input_ids"]
    assert ids == raw.encode("a b  c\n d").ids
    assert tokenizer.decode(ids) == "a b  c\n d"


def test_the_lower_bound_of_transformers_is_beyond_that() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    bounds = {(r := Requirement(text)).name: r.specifier for text in project["dependencies"]}
    assert not bounds["transformers"].contains("5.21.1")
    assert bounds["transformers"].contains("5.22.0")
    assert bounds["transformers"].contains(transformers.__version__)


def test_a_warning_about_what_is_computed_is_shown_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Here a tied config beside an lm_head.weight of its own, which is used."""
    folder = save_target(tmp_path / "model", layers=1)
    weights = load_file(folder / "model.safetensors")
    head = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    capfd.readouterr()
    with quiet_libraries():
        for _ in range(2):
            target = load_target(config_of(folder))
    shown = [line for line in capfd.readouterr().err.splitlines() if "warns" in line]
    assert len(shown) == 1 and "we will NOT tie them" in shown[0]
    assert shown[0].startswith(f"target.path={str(folder)!r}: transformers warns: ")
    assert torch.equal(target.head.weight, head)


def test_a_tokenizer_that_transformers_calls_incorrect_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is no matter of the result is not."""
    folder, warn = save_target(tmp_path / "model", layers=1), transformers.logging
    real = AutoTokenizer.from_pretrained

    def warned(*args: object, **options: object) -> object:
        logger = warn.get_logger("transformers.tokenization_utils_tokenizers")
        logger.warning("This will lead to incorrect tokenization.\nSet the flag.")
        logger.warning("`torch_dtype` is deprecated")
        return real(*args, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", warned)
    capfd.readouterr()
    with quiet_libraries():
        load_target(config_of(folder))
        warn.get_logger("transformers.generation").warning("not while loading")
    said = capfd.readouterr().err
    assert "transformers warns: This will lead to incorrect tokenization. Set the flag." in said
    assert "deprecated" not in said and "not while loading" not in said


def test_an_adapter_beside_the_model_is_rejected(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "model", layers=1)
    plain = load_target(config_of(folder)).fingerprint()
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora).save_pretrained(folder)
    for load in (load_target, loading.load_parts):
        with pytest.raises(UserError, match=r"adapter_config\.json beside the model names an ada"):
            load(config_of(folder))
    (folder / "adapter_config.json").unlink()
    assert load_target(config_of(folder)).fingerprint() == plain

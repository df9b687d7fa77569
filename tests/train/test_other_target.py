"""A fine-tuned or quantised target gets its head back: a draft that was trained for other weights
of the same model is measured as it is, trained further, and then belongs to the new target.

Run alone: python -m pytest tests/train/test_other_target.py
"""

from pathlib import Path

import pytest
import torch

from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.drafters.mtp import MTPConfig
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.sampling.trees import Chain
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.processes import process
from tests.tiny import Tiny, random_drafter, save_target
from train import pipeline


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Another target of the same sizes: all weights differ, embedding and head among them."""
    folder = save_target(tmp_path_factory.mktemp("other") / "tuned", seed=1)
    return load_target(TargetConfig(str(folder), "float32", device="cpu"))


@pytest.fixture(scope="module")
def head(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of the base; it reads the target's own embedding and LM head."""
    base = load_target(TargetConfig(str(tiny.target), "float32", device="cpu"))
    drafter = random_drafter(MTPConfig(depth=2, initialisation="target"), base, 0.1)
    folder = tmp_path_factory.mktemp("base") / "best"
    draft_checkpoint.write_draft(folder, drafter, base)
    return folder


def test_the_head_drafts_for_the_new_target_on_request_only(
    tuned: Target, head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"other weights.*scripts/evaluate --other-target"):
        draft_checkpoint.load_draft(head, tuned)
    drafter = draft_checkpoint.load_draft(head, tuned, other_weights=True)
    said = " ".join(capsys.readouterr().err.split())
    assert f"{head} was trained for" in said and "with other weights than those of" in said
    prompts = [[5, 9, 30], [7, 8]]
    plain = decode(tuned, prompts, None, max_new_tokens=6)
    drafted = decode(tuned, prompts, Way(drafter, Chain(2)), max_new_tokens=6)
    assert [x.ids for x in plain] == [x.ids for x in drafted]


def test_what_the_head_shares_comes_from_the_new_target(
    tiny: Tiny, tuned: Target, head: Path
) -> None:
    drafter = draft_checkpoint.load_draft(head, tuned, other_weights=True)
    ids, state = torch.tensor([[3, 5]]), torch.randn(1, 1, tuned.width)
    assert torch.equal(drafter.embed(ids), tuned.embed(ids))  # type: ignore[operator]
    theirs = tuned.logits(drafter.layer.before_head(state))  # type: ignore[union-attr, operator]
    assert torch.equal(drafter.unembed(state, 0), theirs)  # type: ignore[operator]
    base = load_target(TargetConfig(str(tiny.target), "float32", device="cpu"))
    assert not torch.equal(base.embed(ids), tuned.embed(ids))
    assert not torch.equal(base.logits(state), tuned.logits(state))


def test_a_head_trained_further_belongs_to_the_new_target(
    tiny: Tiny, tuned: Target, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [f"target.path={tuned.name}", f"drafter.from={head}", "loop.epochs=1"]
    more += ["drafter.depth=2", "drafter.initialisation=target"]
    with pytest.raises(UserError, match=r"initialisation.other_target=true starts from that draft"):
        tiny.job(tmp_path / "run", "mtp", *more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "finished", lambda *_: None)
        tiny.job(tmp_path / "run", "mtp", *more, "initialisation.other_target=true")
    said = " ".join(capsys.readouterr().out.split())
    assert "training starts from" in said and "with other weights than those of" in said
    card = draft_checkpoint.read_card(tmp_path / "run" / "best")
    assert card.target.fingerprint == tuned.fingerprint()
    draft_checkpoint.load_draft(tmp_path / "run" / "best", tuned)
    assert draft_checkpoint.note_of_other_weights(tmp_path / "run" / "best", tuned) == ""


def test_scripts_measure_the_head_on_the_new_target(
    tuned: Target, head: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("the cat\nwhy is the sky blue\n")
    how = ["scripts/evaluate", str(head), "--prompts", str(tmp_path / "prompts.txt")]
    how += ["--max-new-tokens", "6", "--timed", "1", "--temperatures", "0", "--dtype", "float32"]
    how += ["--out", str(tmp_path / "report"), "--other-target"]
    ended = process(how)
    assert ended.returncode == 2 and "--other-target is about --target" in ended.stderr
    ended = process([*how, "--target", tuned.name])
    assert ended.returncode == 0, ended.stderr
    assert "with other weights than those of" in " ".join(ended.stderr.split())
    assert (tmp_path / "report" / "report.md").exists()

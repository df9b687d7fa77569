"""A loss that compares with a draft trained before.

Run alone: python -m pytest tests/train/test_reference.py
"""

from pathlib import Path

import pytest

from tests.tiny import Tiny, losses
from tests.told import require_one_line, told

pytestmark = pytest.mark.usefixtures("one_thread", "training_alone")


@pytest.fixture(scope="module")
def reference(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("reference") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.pipeline.finished", lambda *_: None)
        tiny.job(run, "medusa", "loss=kl", "loop.epochs=1")
    return run / "best"


def test_a_run_keeps_the_tokens_that_its_reference_does_better(
    tiny: Tiny, tmp_path: Path, reference: Path
) -> None:
    """All tokens kept is kl. Of the mean KL, the part on 40 % of the tokens is less than all of
    it; a draft compared with another one keeps others."""
    more = ["loop.epochs=1", "loss.depth_decay=1"]
    adaspec = ["loss=adaspec", f"loss.reference={reference}", *more]
    tiny.job(tmp_path / "kl", "medusa", "loss=kl", *more)
    tiny.job(tmp_path / "all", "medusa", *adaspec, "loss.constants.adaspec.keep=1")
    tiny.job(tmp_path / "some", "medusa", *adaspec)
    other = [f"loss.reference={tmp_path / 'some' / 'best'}"]
    tiny.job(tmp_path / "other", "medusa", *adaspec, *other)
    assert losses(tmp_path / "all") == losses(tmp_path / "kl")
    loss = {name: losses(tmp_path / name)[0][1]["loss"][0] for name in ("kl", "some")}
    assert 0 < loss["some"] < loss["kl"]
    assert losses(tmp_path / "other") != losses(tmp_path / "some")


def test_a_reference_that_cannot_be_compared(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path, reference: Path
) -> None:
    adaspec = ["loss=adaspec", f"loss.reference={reference}"]
    tiny.job(tmp_path / "suffix", "suffix")
    copying = tmp_path / "suffix" / "best"
    for drafter, change, part in (
        ("medusa", ["drafter.draft_vocab=40"], "different vocabularies"),
        ("medusa", ["drafter.depth=3"], "fewer depths"),
        ("lm", [], "different hidden states"),
        ("medusa", ["loss.reference=/nowhere"], "/nowhere holds no draft"),
        ("lm", [f"loss.reference={copying}"], "copies tokens"),
    ):
        run = tmp_path / part
        require_one_line(told(capsys, tiny.overrides(drafter, *adaspec, *change), run), part)
        assert not (run / "checkpoints").exists()


def test_a_reference_that_changed_meanwhile_is_told(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path, reference: Path
) -> None:
    same = tmp_path / "reference"
    same.mkdir()
    for file in reference.iterdir():
        (same / file.name).write_bytes(file.read_bytes())
    adaspec = ["loss=adaspec", f"loss.reference={same}", "loop.epochs=1"]
    tiny.job(tmp_path / "run", "medusa", *adaspec)
    card = same / "drafter.json"
    card.write_text(card.read_text() + "\n")
    said = told(capsys, tiny.overrides("medusa", *adaspec), tmp_path / "run")
    require_one_line(said, "the reference draft changed")

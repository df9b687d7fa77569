"""What a run left, for tests that compare runs, and rows that one could read."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.formats import draft_checkpoint
from tests.tiny import Tiny, losses, records
from train.loop import SELECT_BY

CHECKSUMS = ("checksum", "weights", "tensors", "metrics")


def as_before(path: Path) -> dict[str, Any]:
    """What a JSON file holds, as it was written before there were checksums."""
    return {k: x for k, x in json.loads(path.read_text()).items() if k not in CHECKSUMS}


def draft(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "best" / "draft.safetensors")


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of the newest checkpoint."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / "training.safetensors")


def require_same_run(ours: Path, theirs: Path) -> None:
    """Bit for bit: every training record, every held-out figure, every weight."""
    assert losses(ours) == losses(theirs)
    held = [
        [(r["step"], r["held_out"]) for r in records(f) if "held_out" in r] for f in (ours, theirs)
    ]
    assert held[0] == held[1]
    newest = [max(p.name for p in (f / "checkpoints").glob("step-*")) for f in (ours, theirs)]
    assert newest[0] == newest[1]  # one older may be left where the last life ended in tidying
    for read in (final_state, draft):
        a, b = read(ours), read(theirs)
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name


ALPHA = {"sampled", "greedy_draft", "greedy"}


def require_equal(name: str, two: Path, one: Path) -> None:
    """Check that both runs of a family have the same steps, figures and weights, up to rounding."""
    pairs = list(zip(losses(two), losses(one), strict=True))
    assert len(pairs) == 12, name
    for (step, ours), (_, theirs) in pairs:
        alpha = {"text_probability"} if "text_probability" in theirs else ALPHA
        assert ours.keys() == theirs.keys() >= {"loss", *alpha}
        for key in ("loss", *sorted(alpha)):
            expected = pytest.approx(theirs[key], rel=1e-5, abs=1e-7)
            assert ours[key] == expected, (name, step, key)
        expected = pytest.approx(theirs["gradient_norm"], rel=1e-4)
        assert ours["gradient_norm"] == expected, (name, step)
        assert ours["lr"] == theirs["lr"]
    figures = [[r["held_out"] for r in records(f) if "held_out" in r] for f in (two, one)]
    assert len(figures[0]) == 3
    for a, b in zip(*figures, strict=True):
        assert a["positions"] == b["positions"], name  # no row is counted twice
        for key in SELECT_BY:
            assert a[key] == pytest.approx(b[key], rel=1e-4), (name, key)
    ours, theirs = draft(two), draft(one)
    assert ours.keys() == theirs.keys()
    for weight in ours:
        torch.testing.assert_close(ours[weight], theirs[weight], rtol=1e-4, atol=1e-5)


def require_learning(folder: Path, epochs: int = 2) -> None:
    """Check that the loss of every depth is lower over the last epoch than over the first. Both
    read the same rows, so no luck of which rows come first or last is in it: with other seeds, the
    difference varied by a tenth of itself or less."""
    curve = [record["loss"] for _, record in losses(folder)]
    steps, rest = divmod(len(curve), epochs)
    assert steps > 1 and rest == 0
    first, last = (
        [sum(depth) for depth in zip(*part, strict=True)]
        for part in (curve[:steps], curve[-steps:])
    )
    assert all(x > y for x, y in zip(first, last, strict=True)), (first, last)


def require_learning_that_resumes(tiny: Tiny, folder: Path, drafter: str, *more: str) -> None:
    """Check that a run in `folder`/whole learns, and that a run which is interrupted after the
    checkpoint of step 4 and continued ends the same."""
    tiny.job(folder / "whole", drafter, *more)
    require_learning(folder / "whole", tiny.config(drafter, *more).loop.epochs)

    save, saved = draft_checkpoint.write_draft, []

    def killed(*args: object, **more: object) -> None:
        saved.append(args)
        if len(saved) == 2:  # of the held-out pass after step 8
            raise KeyboardInterrupt
        save(*args, **more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_checkpoint, "write_draft", killed)
        with pytest.raises(KeyboardInterrupt):
            tiny.job(folder / "again", drafter, *more)
    tiny.job(folder / "again", drafter, *more)
    require_same_run(folder / "again", folder / "whole")


def rows_of(count: int) -> Any:
    """A source of so many rows of 100 tokens."""
    return SimpleNamespace(rows=[SimpleNamespace(ids=range(100))] * count)

"""What a run left, for tests that compare runs, and rows that one could read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tiny import losses, records


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


def rows_of(count: int) -> Any:
    """A source of so many rows of 100 tokens."""
    return SimpleNamespace(rows=[SimpleNamespace(ids=range(100))] * count)

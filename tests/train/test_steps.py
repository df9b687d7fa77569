"""The steps of training: when they stop, which draft is the best, and their arithmetic by hand.

Run alone: python -m pytest tests/train/test_steps.py
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdec.drafters.base import Sizes
from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing
from specdec.targets.loading import load_target
from tests.runs import require_learning_that_resumes
from tests.tiny import Tiny, batch_of, losses, records
from train import loop, optim
from train.loop import SELECT_BY, LoopConfig, steps_of
from train.optim import OptimConfig

pytestmark = pytest.mark.usefixtures("one_thread")


# When to stop, and what is best


@pytest.mark.parametrize("patience", [1, 3])
def test_patience_ends_a_run_that_does_not_get_better(
    tiny: Tiny, tmp_path: Path, training_alone: None, patience: int
) -> None:
    """The learning rate moves no float32, so that every evaluation is as good as the first and
    never better: evaluation 1 sets the best, `patience` more follow, and that is the end."""
    more = [f"loop.patience={patience}", "loop.eval_every=2", "loop.save_every=100"]
    more += ["optim.lr=1e-30"]
    tiny.job(tmp_path / "run", "medusa", *more)
    evaluated = [r["step"] for r in records(tmp_path / "run") if "held_out" in r]
    assert evaluated == [2 * (i + 1) for i in range(1 + patience)]
    card = json.loads((tmp_path / "run" / "best" / "drafter.json").read_text())
    assert card["notes"]["step"] == 2  # the first of equals
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    tiny.job(tmp_path / "run", "medusa", *more)  # it stays ended
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines


def test_a_run_that_took_all_its_steps_did_not_stop_early(
    tiny: Tiny, tmp_path: Path, training_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of 12 steps is the one at which patience ends."""
    found, trained = [], loop.trained
    monkeypatch.setattr(loop, "trained", lambda learner: found.append(trained(learner)) or found[0])
    more = ["loop.patience=1", "loop.eval_every=6", "optim.lr=1e-30"]
    tiny.job(tmp_path / "run", "medusa", *more)
    evaluated = [r["step"] for r in records(tmp_path / "run") if "held_out" in r]
    assert evaluated == [6, 12] and found[0].step == found[0].steps == 12
    assert not found[0].stopped_early


@pytest.mark.parametrize("objective", SELECT_BY)
def test_best_is_the_best_by_the_loss(
    tiny: Tiny, tmp_path: Path, training_alone: None, objective: str
) -> None:
    """A learning rate so high that quality goes up and down."""
    value = tiny.job(
        tmp_path / "run",
        "medusa",
        "optim.lr=0.2",
        "loop.eval_every=1",
        f"loop.select_by={objective}",
    )
    found = [
        (r["held_out"][objective], r["step"]) for r in records(tmp_path / "run") if "held_out" in r
    ]
    assert len(found) == 12
    best = max(v for v, _ in found)
    assert value == best
    card = json.loads((tmp_path / "run" / "best" / "drafter.json").read_text())
    assert card["notes"]["step"] == next(s for v, s in found if v == best)
    assert card["notes"]["held_out"][objective] == best


def test_the_held_out_figures_are_those_of_the_best_draft(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    """Read back from disk and measured anew, by another path: one row at a time, online."""
    from specdec.formats import draft_checkpoint
    from train.data.split import split_documents

    tiny.job(tmp_path / "run", "medusa", "optim.lr=0.05", "loop.eval_every=1")
    target = load_target(tiny.config().target)
    drafter = draft_checkpoint.load_draft(tmp_path / "run" / "best", target)
    cfg = tiny.config("medusa")
    split = split_documents(cfg.data, target.tokenizer)
    sums, count = torch.zeros(2), torch.zeros(2)
    for d in split.held_out:
        batch = batch_of(target, drafter.needs, cfg.sampler, [d.ids.tolist()], [d.mask.tolist()])
        with torch.no_grad():
            table = TeacherForcing(drafter, target, cfg.sampler)(batch, measure=True)
        sums += table.alpha.sampled.sum(0)
        count += table.anchors.valid_NK.sum(0)
    notes = json.loads((tmp_path / "run" / "best" / "drafter.json").read_text())["notes"]
    assert notes["held_out"]["positions"] == count.tolist()
    # rel 1e-5: the same sums in float32, in another order
    assert notes["held_out"]["by_depth"]["sampled"] == pytest.approx(
        (sums / count).tolist(), rel=1e-5
    )


# Arithmetic by hand


def test_learning_rate_by_hand() -> None:
    """10 steps, the first 2 warm: 1/2 and 2/2 of the peak, then a cosine over 8:
    step 2 cos 0 = 1; step 6 cos π/2 = 0: .02 + .98 · .5 = .51; step 9 cos 7π/8 = -.92388:
    .02 + .98 · .03806 = .05730."""
    cfg = OptimConfig(lr=2.0, warmup=0.2, final=0.02)
    rates = [optim.learning_rate(cfg, step, 10) for step in range(10)]
    assert rates[:3] == pytest.approx([1.0, 2.0, 2.0])
    assert rates[6] == pytest.approx(2 * 0.51)
    assert rates[9] == pytest.approx(2 * 0.0572989, rel=1e-5)
    assert all(a >= b for a, b in itertools.pairwise(rates[2:]))
    assert optim.learning_rate(cfg, 0, 1) == 2.0  # one step: the peak


def test_records_hold_the_rate_that_was_used(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    """12 steps, lr 5e-3, warm-up max(1, round(.05 · 12)) = 1; step index 6: done = 5/11,
    cos(5π/11) = .142315: 5e-3 · (.02 + .98 · .571157) = 2.898671e-3."""
    tiny.job(tmp_path / "run", "medusa")
    rates = [record["lr"] for _, record in losses(tmp_path / "run")]
    assert rates[:2] == [5e-3, 5e-3]
    assert rates[6] == pytest.approx(2.898671e-3, rel=1e-5)
    # the optimiser's own, in the last checkpoint, is the last record's
    state = json.loads(
        (tmp_path / "run" / "checkpoints" / "step-0000012" / "training.json").read_text()
    )
    used = set(re.findall(r'lr": ([-+.e\d]+)', json.dumps(state["optimizer"])))
    assert {float(x) for x in used} == {rates[-1]}


def test_adamw_by_hand() -> None:
    """w = 1, lr .1, β .9 and .95, decay .01 for the matrix alone.

    Step 1, g = .5: m̂ = .5, v̂ = .25: w = 1 · (1 - .001) - .1 · .5/.5 = .899.
    Step 2, g = -.25: m = .9 · .05 - .025 = .02, m̂ = .02/.19 = .105263;
    v = .95 · .0125 + .05 · .0625 = .015, v̂ = .015/.0975 = .153846, √v̂ = .392232;
    w = .899 · .999 - .1 · .105263/.392232 = .871264. The vector, without decay: .9, .873163.
    """
    matrix, vector = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1))
    model = nn.ParameterList([matrix, vector])
    cfg = OptimConfig(lr=0.1, betas=[0.9, 0.95], weight_decay=0.01)
    (adamw,) = optim.build(model, cfg, Sizes(target_vocab=50))
    for gradient, of_matrix, of_vector in ((0.5, 0.899, 0.9), (-0.25, 0.871264, 0.873163)):
        for weight in model:
            weight.grad = torch.full_like(weight, gradient)
        adamw.step()
        assert float(matrix) == pytest.approx(of_matrix, abs=1e-6)
        assert float(vector) == pytest.approx(of_vector, abs=1e-6)


def test_muon_moves_hidden_matrices_and_adamw_the_rest() -> None:
    """Here the gradient is 3 · U Vᵀ. Muon's step is .2 · lr · √max(rows, columns) · U Vᵀ, though
    its five iterations leave singular values of .7 to 1.2 instead of 1. The vector and the matrices
    over either vocabulary take AdamW's first step: lr times the gradient's sign, whatever its size.
    """
    torch.manual_seed(0)
    hidden = nn.Parameter(torch.zeros(8, 4))
    others = [nn.Parameter(torch.zeros(*shape)) for shape in ((4,), (50, 4), (4, 20))]
    cfg = OptimConfig(lr=0.1, hidden="muon", weight_decay=0.0)
    sizes = Sizes(target_vocab=50, draft_vocab=20)
    built = optim.build(nn.ParameterList([hidden, *others]), cfg, sizes)
    for p in (hidden, *others):
        p.grad = 3 * torch.linalg.qr(torch.randn(8, 4)).Q if p is hidden else torch.randn_like(p)
    for optimizer in built:
        optimizer.step()
    moved = torch.linalg.svdvals(hidden.detach()) / (0.2 * 0.1 * 8**0.5)
    assert moved.min() > 0.6 and moved.max() < 1.3
    assert hidden.grad is not None and torch.cosine_similarity(-hidden.grad, hidden, 0).min() > 0.95
    for p in others:
        assert p.grad is not None
        torch.testing.assert_close(p.detach(), -0.1 * p.grad.sign())


def test_rates_scale_the_learning_rate_of_what_they_match(
    tiny: Tiny, tmp_path: Path, training_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate is a tenth for the blocks' matrices, and 0 for their biases, which match both
    patterns."""
    used: list[list[float]] = []
    adamw = torch.optim.AdamW.step

    def look(self: torch.optim.AdamW, *args: Any) -> Any:
        used.append(sorted(g["lr"] for g in self.param_groups))
        return adamw(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", look)
    given = "optim.rates={blocks.*:0.1,blocks.*.bias:0}"
    tiny.job(tmp_path / "run", "medusa", given, "optim.lr=1e-3", "drafter.bias=true")
    assert used[0] == pytest.approx([0, 1e-4, 1e-3])
    with pytest.raises(UserError, match=r"no trained parameter matches 'heads\*'"):
        tiny.job(tmp_path / "none", "medusa", "optim.rates={heads*:4}")


def test_a_run_with_muon_learns_and_resumes(
    tiny: Tiny, tmp_path: Path, training_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints hold the state of both optimisers."""
    stepped = set()
    for one in (torch.optim.Muon, torch.optim.AdamW):

        def step(self: torch.optim.Optimizer, *args: Any, of: Any = one.step) -> Any:
            stepped.add(type(self))
            return of(self, *args)

        monkeypatch.setattr(one, "step", step)
    given = ["optim=muon", "optim.lr=5e-3", "drafter.initialisation=target"]
    require_learning_that_resumes(tiny, tmp_path, "eagle3", *given)
    assert stepped == {torch.optim.Muon, torch.optim.AdamW}


def test_the_gradient_is_clipped_to_its_bound(
    tiny: Tiny, tmp_path: Path, training_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record has the norm before clipping, the optimiser sees at most `clip`."""
    seen: list[float] = []
    adamw = torch.optim.AdamW.step

    def look(self: torch.optim.AdamW, *args: Any) -> Any:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        seen.append(float(torch.stack([g.pow(2).sum() for g in grads]).sum().sqrt()))
        return adamw(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", look)
    tiny.job(tmp_path / "run", "medusa", "optim.clip=1e-3")
    norms = [record["gradient_norm"] for _, record in losses(tmp_path / "run")]
    assert len(seen) == 12 and min(norms) > 1e-3
    assert seen == pytest.approx([1e-3] * 12, rel=1e-3)


def plan(cfg: LoopConfig, *counts: int) -> list[tuple[list[int], int]]:
    """Rows and planned length of every step of 2 rows; epoch e has `counts[e]` rows."""
    steps: list[tuple[list[int], int]] = []
    for epoch in range(cfg.epochs):
        lengths = [100] * counts[min(epoch, len(counts) - 1)]
        orders, planned = steps_of(cfg, lengths, epoch, len(steps), 2)
        steps += [(rows, planned) for rows in orders]
        if cfg.max_tokens is not None and len(steps) == planned:
            break
    return steps


def test_rows_of_a_run_by_hand() -> None:
    """7 rows in steps of 2: 3 steps an epoch, each row at most once in it, another order the
    next; 100 tokens a row and max_tokens=900: 900/200 = 4.5, rounded to 4 steps."""
    steps = plan(LoopConfig(epochs=3), 7)
    assert len(steps) == 9 and {planned for _, planned in steps} == {9}
    for epoch in range(3):
        rows = [i for step, _ in steps[3 * epoch : 3 * epoch + 3] for i in step]
        assert len(set(rows)) == 6 and set(rows) <= set(range(7))
    orders = [rows for rows, _ in steps]
    assert orders[:3] != orders[3:6]
    assert plan(LoopConfig(epochs=3), 7) == steps != plan(LoopConfig(epochs=3, seed=1), 7)
    # a shorter run is a prefix
    assert [rows for rows, _ in plan(LoopConfig(epochs=3, max_tokens=900), 7)] == orders[:4]
    assert len(plan(LoopConfig(epochs=1, max_tokens=900), 7)) == 3
    assert len(plan(LoopConfig(epochs=3, max_tokens=1), 7)) == 1


def test_an_epoch_may_bring_other_rows() -> None:
    """4 rows, then 8, then 6: 2 + 4 + 3 steps; each epoch plans the rest as if its own count
    stayed: 2 · 3 = 6, then 2 + 4 · 2 = 10, then 6 + 3 = 9."""
    steps = plan(LoopConfig(epochs=3), 4, 8, 6)
    assert [planned for _, planned in steps] == [6] * 2 + [10] * 4 + [9] * 3
    for part, count in ((steps[:2], 4), (steps[2:6], 8), (steps[6:], 6)):
        assert sorted(i for rows, _ in part for i in rows) == list(range(count))

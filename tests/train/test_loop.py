"""The whole job on a tiny target: its curve and its arithmetic. What interrupts it, and several
processes, are in test_resume.py.

Run alone: python -m pytest tests/train/test_loop.py            (-m "not slow": under half a minute)
"""

import itertools
import json
import math
import re
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from specdec.forcing.teacher import Batch, TeacherForcing
from specdec.measure.results import Results
from specdec.target import loading
from specdec.target.base import Target
from specdec.target.loading import load_target
from tests.runs import draft, final_state, require_same_run
from tests.tiny import (
    DRAFTER_OVERRIDES,
    Tiny,
    losses,
    process,
    records,
)
from train import optim, pipeline
from train.features.source import Online
from train.loop import OBJECTIVES, Diverged, LoopConfig, _plan
from train.optim import OptimConfig

TRAINABLE = [name for name in DRAFTER_OVERRIDES if DRAFTERS[name].trainable]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Target]:
    """The targets that a job loads, to look at afterwards."""
    found: list[Target] = []
    load = load_target

    def keep(cfg: Any) -> Target:
        found.append(load(cfg))
        return found[-1]

    monkeypatch.setattr(loading, "load_target", keep)
    return found


# The whole job


@pytest.mark.parametrize("answers", ["data", "target"])
@pytest.mark.parametrize("name", list(DRAFTER_OVERRIDES))
def test_whole_job(
    tiny: Tiny, tmp_path: Path, loaded: list[Target], name: str, answers: str
) -> None:
    objective = tiny.job(tmp_path / "run", name, f"data.answers={answers}")
    assert math.isfinite(objective) and objective >= 1  # τ counts the bonus token
    results = Results.read(tmp_path / "run" / "report")
    greedy, sampled = results.temperatures
    assert (greedy.temperature, sampled.temperature) == (0.0, 1.0)
    assert greedy.identical == results.prompts, "greedy speculation changed an answer"
    fresh = load_target(tiny.config().target)
    for target in loaded:
        for ours, theirs in zip(target.model.parameters(), fresh.model.parameters(), strict=True):
            assert torch.equal(ours, theirs), "the target was trained"
    if name in TRAINABLE:
        curve = [record["loss"] for _, record in losses(tmp_path / "run")]
        assert all(math.isfinite(x) for line in curve for x in line)
        steps = [step for step, _ in losses(tmp_path / "run")]
        assert steps == list(range(1, 1 + (12 if answers == "data" else len(steps))))
        first, last = (sum(line[0] for line in part) for part in (curve[:3], curve[-3:]))
        assert last < first, "12 steps of 100 answer tokens lower the loss of depth 0"


@pytest.mark.parametrize("name", TRAINABLE)
def test_features_from_disk_and_online_give_one_curve(
    tiny: Tiny, tmp_path: Path, training_alone: None, name: str
) -> None:
    """1e-4: rows go through the target one by one for the disk and in batches online, which
    differs by float32 rounding (about 1e-6), and 12 steps of AdamW carry that on."""
    for cache in ("disk", "online"):
        tiny.job(tmp_path / cache, name, f"features.cache={cache}", "loop.rows=2")
    pairs = list(zip(losses(tmp_path / "disk"), losses(tmp_path / "online"), strict=True))
    assert pairs
    for (step, disk), (_, online) in pairs:
        assert disk["loss"] == pytest.approx(online["loss"], rel=1e-4), step
        assert disk["sampled"] == pytest.approx(online["sampled"], rel=1e-4), step


def test_a_second_run_reads_the_cache_and_equals_the_first(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    root = f"features.root={tmp_path / 'cache'}"
    tiny.job(tmp_path / "a", "eagle3", root)
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.safetensors")}
    tiny.job(tmp_path / "b", "eagle3", root)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.safetensors")} == made
    require_same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "lm"])
def test_the_target_reads_its_own_answers_once(
    tiny: Tiny,
    tmp_path: Path,
    training_alone: None,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
) -> None:
    """What it computed while it answered, in batches of unequal prompts, is what it reads in the
    text: loss and α of a run on the one are those on the other up to float32 rounding."""
    read: list[int] = []
    batch = Online.batch

    def counted(source: Online, indices: Sequence[int]) -> Batch:
        read.extend(indices)
        return batch(source, indices)

    monkeypatch.setattr(Online, "batch", counted)
    more = ["data.answers=target", f"answers.root={tmp_path / 'answers'}", "answers.batch=7"]
    tiny.job(tmp_path / "kept", drafter, *more, f"features.root={tmp_path / 'kept-features'}")
    assert not read
    tiny.job(tmp_path / "again", drafter, *more, f"features.root={tmp_path / 'read-features'}")
    assert read, "the answers were known, and their features were not"
    pairs = list(zip(losses(tmp_path / "kept"), losses(tmp_path / "again"), strict=True))
    assert len(pairs) > 5
    for (step, kept), (_, again) in pairs:
        assert kept["loss"] == pytest.approx(again["loss"], rel=1e-4), step
        assert kept["sampled"] == pytest.approx(again["sampled"], rel=1e-4), step
        assert kept["greedy"] == again["greedy"], step


@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "lm"])
def test_training_from_a_cache_loads_no_layer_of_the_target(
    tiny: Tiny,
    tmp_path: Path,
    training_alone: None,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
) -> None:
    """A first run loads the target whole to answer, and gives its layers back before it trains. A
    second, for which all is there, loads it once, after the last step, to be measured."""
    more = ["data.answers=target", f"features.root={tmp_path / 'features'}"]
    more += [f"answers.root={tmp_path / 'answers'}", f"target.cache={tmp_path / 'targets'}"]
    events: list[str] = []
    loaded: list[weakref.ref[nn.Module]] = []
    whole, adamw = loading.load_target, torch.optim.AdamW.step

    def load(cfg: Any) -> Target:
        events.append("whole")
        target = whole(cfg)
        loaded.append(weakref.ref(target.layers[0]))
        return target

    def step(*args: Any) -> Any:
        events.append("step")
        assert not any(layer() for layer in loaded), "the target's layers are in memory"
        return adamw(*args)

    monkeypatch.setattr(loading, "load_target", load)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    tiny.job(tmp_path / "a", drafter, *more)
    steps = len(losses(tmp_path / "a"))
    assert events == ["whole"] + ["step"] * steps + ["whole"] and steps > 5
    tiny.job(tmp_path / "b", drafter, *more)
    assert events[steps + 2 :] == ["step"] * steps + ["whole"]
    require_same_run(tmp_path / "a", tmp_path / "b")


def test_a_feature_cache_at_a_path_of_ones_own(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    """`features.path` holds both sides: training and held-out rows."""
    tiny.job(tmp_path / "a", "eagle3", f"features.path={tmp_path / 'cache'}")
    tiny.job(tmp_path / "b", "eagle3")
    require_same_run(tmp_path / "a", tmp_path / "b")


def test_the_target_stays_as_it_is_when_the_draft_trains_embeddings_cut_from_it(
    tiny: Tiny, tmp_path: Path, loaded: list[Target], training_alone: None
) -> None:
    more = ["drafter.train_embeddings=true", "optim.lr=0.05", "features.cache=online"]
    tiny.job(tmp_path / "run", "lm", *more)
    (target,) = loaded
    fresh = load_target(tiny.config().target)
    for name, weight in fresh.model.state_dict().items():
        assert torch.equal(weight, target.model.state_dict()[name]), name
    theirs = fresh.embedding.weight
    assert any(
        x.shape == theirs.shape and not torch.equal(x, theirs)
        for x in draft(tmp_path / "run").values()
    ), "the draft's embedding was to be trained"


# Divergence


def snapshot(folder: Path) -> dict[str, bytes]:
    kept = [*(folder / "checkpoints").rglob("*"), *(folder / "best").rglob("*")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in kept if p.is_file()}


def test_a_row_that_is_not_finite_stops_before_the_update(
    tiny: Tiny, tmp_path: Path, training_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epoch 1, 6 steps over 12 rows, reads each row once. One row's features are NaN: the run
    ends at the step that reads it, names it, and leaves the checkpoint before it as it was."""
    root = tmp_path / "features"
    more = [f"features.root={root}", "loop.save_every=1", "loop.eval_every=1"]
    tiny.job(tmp_path / "whole", "medusa", *more)
    order = list(_plan(LoopConfig(), lambda _: rows_of(12), 2))
    bad, step = order[4].rows[1], 5  # the second row of the fifth step
    batch = pipeline.Disk.batch

    def spoiled(source: pipeline.Disk, indices: Sequence[int]) -> Batch:
        found = batch(source, indices)
        if len(source.rows) == 12 and bad in indices:  # the training side's
            found.final_BTD[list(indices).index(bad)] = math.nan
        return found

    monkeypatch.setattr(pipeline.Disk, "batch", spoiled)
    updates: list[int] = []
    adamw = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *a: (updates.append(1), adamw(self, *a))[1]
    )
    with pytest.raises(Diverged, match=rf"step {step} \(rows [\d, ]*\b{bad}\b") as error:
        tiny.job(tmp_path / "run", "medusa", *more)
    assert isinstance(error.value, UserError) and "\n" not in str(error.value)
    assert len(updates) == step - 1
    run = tmp_path / "run"
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == [
        "step-0000003",
        "step-0000004",
    ]
    assert losses(run) == losses(tmp_path / "whole")[: step - 1]
    for weight in (*final_state(run).values(), *draft(run).values()):
        assert weight.isfinite().all()
    before = snapshot(run)
    with pytest.raises(Diverged):  # again: it stops in the same place and touches nothing
        tiny.job(run, "medusa", *more)
    assert snapshot(run) == before
    monkeypatch.setattr(pipeline.Disk, "batch", batch)  # the cause is gone: it goes on to its end
    tiny.job(run, "medusa", *more)
    require_same_run(run, tmp_path / "whole")


def test_a_learning_rate_that_explodes_is_reported(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    with pytest.raises(Diverged, match=r"(loss|gradient) is not finite at step \d+ \(rows"):
        tiny.job(tmp_path / "run", "medusa", "optim.lr=1e30", "loop.save_every=1")
    for path in (tmp_path / "run").rglob("*.safetensors"):
        assert all(x.isfinite().all() for x in load_file(path).values()), path


@pytest.mark.slow
def test_divergence_of_the_command_is_one_line_and_code_2(tiny: Tiny, tmp_path: Path) -> None:
    done = process(tiny.command(tmp_path / "run", "medusa", "optim.lr=1e30"))
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: the ") and "not finite at step" in last
    assert "Traceback" not in done.stderr


# Another objective, other anchors, older runs


def cut_back(run: Path) -> None:
    """Leave a finished run of 12 steps as it was at step 8."""
    shutil.rmtree(run / "checkpoints" / "step-0000012")


@pytest.mark.parametrize("objective", ["expected_length", "eagle"])
def test_drawn_anchors_and_a_changing_objective_resume_exactly(
    tiny: Tiny,
    tmp_path: Path,
    training_alone: None,
    monkeypatch: pytest.MonkeyPatch,
    objective: str,
) -> None:
    """4 anchors a row, of some 24, drawn anew at each of 12 steps of 2 rows; terms over depths and
    features."""
    more = ["drafter.anchors.per_row=4", f"objective={objective}"]
    drawn: list[tuple[int, ...]] = []
    anchors = TeacherForcing.anchors

    def seen(self: TeacherForcing, *given: Any) -> Any:
        found = anchors(self, *given)
        drawn.append(tuple(found.position_N.tolist()))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(TeacherForcing, "anchors", seen)
        tiny.job(tmp_path / "whole", "eagle3", *more)
    assert len(drawn) == 24 and all(len(positions) == 4 for positions in drawn)
    assert len(set(drawn)) > 20
    curve = [record["loss"] for _, record in losses(tmp_path / "whole")]
    assert len(curve) == 12 and all(math.isfinite(x) for line in curve for x in line)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    cut_back(tmp_path / "run")
    tiny.job(tmp_path / "run", "eagle3", *more)
    require_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_run_from_before_objectives_is_continued(
    tiny: Tiny, tmp_path: Path, training_alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config.json has a `loss`, and no anchors; with another objective it is another run."""
    more = ["objective=jsd", "objective.constants.jsd.beta=0.1", "objective.depth_decay=0.9"]
    tiny.job(tmp_path / "whole", "eagle3", *more)
    run = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    cut_back(run)
    config = json.loads((run / "config.json").read_text())
    del config["objective"], config["drafter"]["anchors"]
    config["loss"] = dict(name="jsd", depth_decay=0.9, beta=0.1, eta=3.0, chunk=256)
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"objective\.terms={'jsd': 1\.0}, not {'nla': 1\.0}"):
        tiny.job(run, "eagle3")
    tiny.job(run, "eagle3", *more)
    require_same_run(run, tmp_path / "whole")


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


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_best_is_the_best_by_the_objective(
    tiny: Tiny, tmp_path: Path, training_alone: None, objective: str
) -> None:
    """A learning rate so high that quality goes up and down."""
    value = tiny.job(
        tmp_path / "run",
        "medusa",
        "optim.lr=0.2",
        "loop.eval_every=1",
        f"loop.objective={objective}",
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
    from specdec.forcing.teacher import batch_of
    from specdec.formats import draft as checkpoint
    from train.data.split import split_documents

    tiny.job(tmp_path / "run", "medusa", "optim.lr=0.05", "loop.eval_every=1")
    target = load_target(tiny.config().target)
    drafter = checkpoint.load(tmp_path / "run" / "best", target)
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
    adamw = optim.build(model, OptimConfig(lr=0.1, betas=[0.9, 0.95], weight_decay=0.01))
    for gradient, of_matrix, of_vector in ((0.5, 0.899, 0.9), (-0.25, 0.871264, 0.873163)):
        for weight in model:
            weight.grad = torch.full_like(weight, gradient)
        adamw.step()
        assert float(matrix) == pytest.approx(of_matrix, abs=1e-6)
        assert float(vector) == pytest.approx(of_vector, abs=1e-6)


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


def rows_of(count: int) -> Any:
    """A source of so many rows of 100 tokens."""
    return SimpleNamespace(rows=[SimpleNamespace(ids=range(100))] * count)


def plan(cfg: LoopConfig, *counts: int) -> list[tuple[list[int], int]]:
    """Rows and planned length of every step of 2 rows; epoch e has `counts[e]` rows."""
    steps = _plan(cfg, lambda epoch: rows_of(counts[min(epoch, len(counts) - 1)]), 2)
    return [(step.rows, step.steps) for step in steps]


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

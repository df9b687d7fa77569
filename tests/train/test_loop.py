"""The whole job on a tiny target: its curve, where it diverges, and other losses. Its
steps are in test_steps.py; what interrupts it, and several processes, are in test_resume.py.

Run alone: python -m pytest tests/train/test_loop.py            (-m "not slow": under half a minute)
"""

import math
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from specdec.forcing.batch import Batch
from specdec.forcing.teacher import TeacherForcing
from specdec.measure.results import Results
from specdec.targets import loading
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from tests.processes import process
from tests.runs import (
    draft,
    final_state,
    require_learning,
    require_same_run,
)
from tests.tiny import DRAFTER_OVERRIDES, Tiny, losses
from train.hidden_states.batches import OnlineBatches, StoredBatches
from train.loop import Diverged, LoopConfig, steps_of

TRAINABLE = [name for name in DRAFTER_OVERRIDES if (kind := DRAFTERS[name]).trains(kind.Config())]
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


@pytest.mark.parametrize(
    ("name", "responses"),
    [(name, "data") for name in DRAFTER_OVERRIDES]
    # of the target's layers, final state and neither; counts of its texts
    + [(name, "target") for name in ("eagle3", "medusa", "lm", "suffix")],
)
def test_whole_job(
    tiny: Tiny, tmp_path: Path, loaded: list[Target], name: str, responses: str
) -> None:
    objective = tiny.job(tmp_path / "run", name, f"data.responses={responses}")
    assert math.isfinite(objective) and objective >= 1  # τ counts the bonus token
    results = Results.load(tmp_path / "run" / "report")
    greedy, sampled = results.asked
    assert (greedy.way.temperature, sampled.way.temperature) == (0.0, 1.0)
    assert greedy.identical == results.prompts, "greedy speculation changed a response"
    fresh = load_target(tiny.config().target)
    for target in loaded:
        for ours, theirs in zip(target.model.parameters(), fresh.model.parameters(), strict=True):
            assert torch.equal(ours, theirs), "the target was trained"
    if name in TRAINABLE:
        curve = [record["loss"] for _, record in losses(tmp_path / "run")]
        assert all(math.isfinite(x) for line in curve for x in line)
        steps = [step for step, _ in losses(tmp_path / "run")]
        assert steps == list(range(1, 1 + (12 if responses == "data" else len(steps))))
        require_learning(tmp_path / "run")


@pytest.mark.parametrize("name", TRAINABLE)
def test_hidden_states_from_disk_and_online_give_one_curve(
    tiny: Tiny, tmp_path: Path, training_alone: None, name: str
) -> None:
    """1e-4: rows go through the target one by one for the disk and in batches online, which
    differs by float32 rounding (about 1e-6), and 12 steps of AdamW carry that on."""
    for mode in ("offline", "online"):
        tiny.job(tmp_path / mode, name, f"hidden_states.mode={mode}", "loop.rows=2")
    pairs = list(zip(losses(tmp_path / "offline"), losses(tmp_path / "online"), strict=True))
    assert pairs
    for (step, disk), (_, online) in pairs:
        assert disk["loss"] == pytest.approx(online["loss"], rel=1e-4), step
        assert disk["sampled"] == pytest.approx(online["sampled"], rel=1e-4), step


def test_a_second_run_reads_the_cache_and_equals_the_first(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    root = f"hidden_states.root={tmp_path / 'cache'}"
    tiny.job(tmp_path / "a", "eagle3", root)
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.safetensors")}
    tiny.job(tmp_path / "b", "eagle3", root)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.safetensors")} == made
    require_same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "lm"])
def test_the_target_reads_its_own_responses_once(
    tiny: Tiny,
    tmp_path: Path,
    training_alone: None,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
) -> None:
    """What it computed while it answered, in batches of unequal prompts, is what it reads in the
    text: loss and α of a run on the one are those on the other up to float32 rounding."""
    read: list[int] = []
    batch = OnlineBatches.batch

    def counted(source: OnlineBatches, indices: Sequence[int]) -> Batch:
        read.extend(indices)
        return batch(source, indices)

    monkeypatch.setattr(OnlineBatches, "batch", counted)
    more = [
        "data.responses=target",
        f"responses.root={tmp_path / 'responses'}",
        "responses.batch=7",
    ]
    tiny.job(tmp_path / "kept", drafter, *more, f"hidden_states.root={tmp_path / 'kept-features'}")
    assert not read
    tiny.job(tmp_path / "again", drafter, *more, f"hidden_states.root={tmp_path / 'read-features'}")
    assert read, "the responses were known, and their hidden states were not"
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
    second, for which all is there, does not load it before it is measured (which is left out here).
    """
    more = ["data.responses=target", f"hidden_states.root={tmp_path / 'hidden_states'}"]
    more += [f"responses.root={tmp_path / 'responses'}", f"target.cache={tmp_path / 'targets'}"]
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
    assert events == ["whole"] + ["step"] * steps and steps > 5
    tiny.job(tmp_path / "b", drafter, *more)
    assert events[steps + 1 :] == ["step"] * steps
    require_same_run(tmp_path / "a", tmp_path / "b")


def test_a_hidden_state_cache_at_a_path_of_ones_own(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    """`hidden_states.path` holds both sides: training and held-out rows."""
    tiny.job(tmp_path / "a", "eagle3", f"hidden_states.path={tmp_path / 'cache'}")
    tiny.job(tmp_path / "b", "eagle3")
    require_same_run(tmp_path / "a", tmp_path / "b")


def test_the_target_stays_as_it_is_when_the_draft_trains_embeddings_cut_from_it(
    tiny: Tiny, tmp_path: Path, loaded: list[Target], training_alone: None
) -> None:
    more = ["drafter.train_embeddings=true", "optim.lr=0.05", "hidden_states.mode=online"]
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
    """Epoch 1, 6 steps over 12 rows, reads each row once. One row's hidden states are NaN: the run
    ends at the step that reads it, names it, and leaves the checkpoint before it as it was."""
    root = tmp_path / "hidden_states"
    more = [f"hidden_states.root={root}", "loop.save_every=1", "loop.eval_every=1"]
    tiny.job(tmp_path / "whole", "medusa", *more)
    orders, _ = steps_of(LoopConfig(), [1] * 12, 0, 0, 2)
    bad, step = orders[4][1], 5  # the second row of the fifth step
    batch = StoredBatches.batch

    def spoiled(source: StoredBatches, indices: Sequence[int]) -> Batch:
        found = batch(source, indices)
        if len(source.rows) == 12 and bad in indices:  # the training side's
            found.final_BTD[list(indices).index(bad)] = math.nan
        return found

    monkeypatch.setattr(StoredBatches, "batch", spoiled)
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
    monkeypatch.setattr(StoredBatches, "batch", batch)  # the cause is gone: it goes on to its end
    tiny.job(run, "medusa", *more)
    require_same_run(run, tmp_path / "whole")


@pytest.mark.parametrize(
    ("family", "log_every"), [("medusa", 1), ("medusa", 5), ("dspark", 5)], ids=str
)
def test_a_learning_rate_that_explodes_is_reported(
    tiny: Tiny, tmp_path: Path, training_alone: None, family: str, log_every: int
) -> None:
    """Also where a few steps pass before their losses are read."""
    more = "optim.lr=1e30", f"loop.save_every={log_every}", f"loop.log_every={log_every}"
    with pytest.raises(Diverged, match=r"(loss|gradient) is not finite at step \d+ \(rows"):
        tiny.job(tmp_path / "run", family, *more)
    for path in (tmp_path / "run").rglob("*.safetensors"):
        assert all(x.isfinite().all() for x in load_file(path).values()), path


@pytest.mark.slow
def test_divergence_of_the_command_is_one_line_and_code_2(tiny: Tiny, tmp_path: Path) -> None:
    done = process(tiny.command(tmp_path / "run", "medusa", "optim.lr=1e30"))
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: the ") and "not finite at step" in last
    assert "Traceback" not in done.stderr


# Another loss, other anchors, older runs


def cut_back(run: Path) -> None:
    """Leave a finished run of 12 steps as it was at step 8."""
    shutil.rmtree(run / "checkpoints" / "step-0000012")


@pytest.mark.parametrize("loss", ["expected_length", "eagle"])
def test_drawn_anchors_and_a_changing_loss_resume_exactly(
    tiny: Tiny,
    tmp_path: Path,
    training_alone: None,
    monkeypatch: pytest.MonkeyPatch,
    loss: str,
) -> None:
    """In each row, 4 of some 24 anchors are drawn anew at each of 12 steps of 2 rows; the terms are
    over depths and hidden states."""
    more = ["drafter.anchors.per_row=4", f"loss={loss}"]
    drawn: list[tuple[int, ...]] = []
    anchors = TeacherForcing.anchors

    def seen(self: TeacherForcing, *given: Any, **named: Any) -> Any:
        found = anchors(self, *given, **named)
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

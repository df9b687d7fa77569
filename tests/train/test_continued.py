"""Runs on several processes that are killed, continued, spread otherwise, and measured again.

Run alone: python -m pytest tests/train/test_continued.py
"""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import UserError
from tests.lives import Kill, Life, Lives
from tests.runs import as_before, require_equal, require_same_run
from tests.tiny import Tiny, losses, records
from train.continued import RowsPerStep
from train.folder import data_of_run
from train.loop import LoopConfig

pytestmark = pytest.mark.usefixtures("one_thread")
OFTEN = ("loop.save_every=2", "loop.eval_every=3")
TWO = "loop.accumulate=1"  # on two processes, a step then reads 2 rows, as elsewhere
KILLED = signal.SIGKILL


@pytest.fixture(scope="module")
def lives(tiny: Tiny) -> Lives:
    return Lives(tiny)


DEATHS: dict[str, list[dict[int, Kill]]] = {
    "replicated": [
        {1: ("response", 2, True)},
        {0: ("response_file", 1, False), 1: ("response_file", 1, True)},
        {1: ("lr", 4, False)},
        {0: ("half", 2, False)},
    ],
    "sharded": [
        {0: ("hidden_state_row", 3, True), 1: ("hidden_state_file", 1, False)},
        {1: ("evaluation", 1, False)},
        {0: ("half", 1, True)},
        {1: ("checkpoint", 1, True)},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEATHS)
def test_a_run_on_two_processes_that_is_killed_is_continued_and_measured_again(
    lives: Lives, tmp_path: Path, kind: str
) -> None:
    """One rank or both are killed while they answer or store hidden states, in a step, in an
    evaluation and in a checkpoint; the continued run equals an uninterrupted one bit for bit. The
    command is then repeated, which measures and trains no further."""
    sharded = kind == "sharded"
    more = (*OFTEN, TWO, "responses.batch=4", f"data.responses={'data' if sharded else 'target'}")

    def lived(name: str, all_lives: list[Life]) -> list[list[int]]:
        caches = [
            f"{cache}.root={tmp_path / name}-{cache}" for cache in ("responses", "hidden_states")
        ]
        return lives.run(tmp_path / name, "eagle3", all_lives, *more, *caches)[0]

    assert lived("whole", [Life(2, sharded)]) == [[0, 0]]
    cut = [Life(2, sharded, kills) for kills in DEATHS[kind]]
    *ends, last, again = lived("run", [*cut, *[Life(2, sharded)] * 2])
    assert last == again == [0, 0]
    for end, kills in zip(ends, DEATHS[kind], strict=True):
        assert KILLED in (end[rank] for rank in kills)
    require_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("precision", ["target.dtype=bfloat16", "loop.precision=bf16"])
def test_a_sharded_job_in_bfloat16_is_the_replicated_one(
    lives: Lives, tmp_path: Path, precision: str
) -> None:
    """The first step, whose weights are equal, has the same loss and α bit for bit. After it,
    weights may differ in their last float32 bit, which may move a number to its neighbour in
    bfloat16, 2^-8 away."""
    more, records_of = (precision, TWO, "loop.max_tokens=600", "loop.eval_every=1"), []
    for sharded in (False, True):
        folder = tmp_path / str(sharded)
        assert lives.run(folder, "eagle3", [Life(2, sharded)], *more)[0] == [[0, 0]]
        records_of.append(records(folder))
    trained = [[r["train"] for r in of_run if "train" in r] for of_run in records_of]
    held_out = [[r["held_out"] for r in of_run if "held_out" in r] for of_run in records_of]
    for name in ("loss", "sampled", "greedy_draft", "greedy"):
        assert trained[1][0][name] == trained[0][0][name]
    for ours, theirs in zip(trained[1], trained[0], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2**-8)
    for ours, theirs in zip(held_out[1], held_out[0], strict=True):
        assert ours["alpha_sampled"] == pytest.approx(theirs["alpha_sampled"], rel=2**-8)


# Another number of processes

RATES = ("drafter.lora.rank=4", "drafter.lora.dropout=0.2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "sharded", "more"),
    [("eagle3", False, ()), ("lm", False, RATES), ("lm", True, RATES)],
    ids=["replicated", "replicated-dropout", "sharded-dropout"],
)
def test_two_processes_then_one_then_two_are_one(
    lives: Lives, tiny: Tiny, tmp_path: Path, drafter: str, sharded: bool, more: tuple[str, ...]
) -> None:
    """Begun on two processes, killed after the checkpoints of steps 4 and 8, and continued by the
    same command on one and on two: the same 12 steps as on one process that accumulates twice,
    dropout included. Tolerances as in test_resume.py: float32 sums in another order."""
    kills: list[dict[int, Kill]] = [{0: ("checkpoint", 1, 1)}, {0: ("checkpoint", 1, 1)}]
    spread = [Life(2, sharded, kills[0]), Life(1, kills=kills[1]), Life(2, sharded)]
    ends, printed = lives.run(tmp_path / "run", drafter, spread, TWO, *more)
    assert ends[0][0] == KILLED and ends[1:] == [[KILLED], [0, 0]]
    assert printed.count("each step of this run reads 2 packed rows") == 1
    assert "goes on with loop.rows=1 loop.accumulate=2 on 1 process\n" in printed
    lives.run(tmp_path / "one", drafter, [Life()], *more)
    require_equal(drafter, tmp_path / "run", tmp_path / "one")


def test_the_rows_of_a_step_are_those_with_which_the_run_began(tmp_path: Path) -> None:
    """Enumerated by hand: 2 processes · 2 rows · 3 micro-batches = 12 rows in each step."""
    portion = RowsPerStep(2, 3, 2)
    for processes, expected in {1: (2, 6), 2: (2, 3), 3: (2, 2), 4: (1, 3), 6: (2, 1)}.items():
        shared, said = portion.for_processes(LoopConfig(rows=2, accumulate=3), processes)
        assert (shared.rows, shared.accumulate) == expected
        assert bool(said) == (processes != 2)
    with pytest.raises(UserError, match=r"12 packed rows, which 5 .*: 1, 2, 3, 4, 6, 12;"):
        portion.for_processes(LoopConfig(rows=2, accumulate=3), 5)
    by_hand = LoopConfig(rows=3, accumulate=4)
    assert portion.for_processes(by_hand, 1) == (by_hand, "")
    with pytest.raises(UserError, match=r"loop\.rows=3 loop\.accumulate=4 on 2 .* would read 24"):
        portion.for_processes(by_hand, 2)


def cut_back(run: Path) -> Path:
    """Leave a finished run of 12 steps as it was at step 8."""
    shutil.rmtree(run / "checkpoints" / "step-0000012")
    return run / "checkpoints" / "step-0000008"


def test_a_step_may_be_cut_otherwise_by_hand_but_not_made_larger(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    run = tmp_path / "run"
    tiny.job(run, "medusa", "loop.rows=1", "loop.accumulate=2")
    first = losses(run)
    cut_back(run)
    with pytest.raises(UserError, match=r"reads 2 packed rows, but .*accumulate=2 on 1 .* read 4"):
        tiny.job(run, "medusa", "loop.rows=2", "loop.accumulate=2")
    tiny.job(run, "medusa", "loop.rows=2", "loop.accumulate=1")
    assert [step for step, _ in losses(run)] == [step for step, _ in first]
    for (_, ours), (_, theirs) in zip(losses(run), first, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)  # float32 rounding
        assert ours["lr"] == theirs["lr"]
    noted = json.loads((run / "config.json").read_text())
    assert [noted["loop"]["rows"], noted["loop"]["accumulate"], noted["processes"]] == [1, 2, 1]


def test_a_run_that_noted_no_processes_goes_on_in_its_own_steps_only(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    """As runs before November 2026 were: no count of processes or rows, and a generator's state."""
    tiny.job(tmp_path / "whole", "medusa")
    run = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    newest = cut_back(run)
    for path, key in ((run / "config.json", "processes"), (newest / "training.json", "rows")):
        described = as_before(path)
        del described[key]
        path.write_text(json.dumps(described))
    tensors = load_file(newest / "training.safetensors")
    save_file(tensors | {"generator": torch.get_rng_state()}, newest / "training.safetensors")
    for other in ("loop.accumulate=1", "loop.accumulate=3"):  # 24 and 8 steps of the same 24 rows
        with pytest.raises(UserError, match=r"8 steps .* as many processes as it began with"):
            tiny.job(run, "medusa", other)
    tiny.job(run, "medusa")
    require_same_run(run, tmp_path / "whole")


def test_places_and_portions_of_memory_are_not_part_of_a_run(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    """Everything that a message about a full disk or memory suggests; the seed is another run."""
    answered = ("data.responses=target", "loop.epochs=1")
    run = tmp_path / "run"
    tiny.job(run, "medusa", *answered)
    elsewhere = [f"{name}={tmp_path / name}" for name in ("responses.root", "hidden_states.root")]
    elsewhere += [f"target.cache={tmp_path / 'targets'}", "responses.batch=8", "loss.chunk=64"]
    tiny.job(run, "medusa", *answered, *elsewhere)
    assert (tmp_path / "responses.root").exists() and (tmp_path / "hidden_states.root").exists()
    with pytest.raises(UserError, match=r"responses\.seed=0, not 1"):
        tiny.job(run, "medusa", *answered, "responses.seed=1")


def test_a_run_keeps_the_share_that_it_holds_out(
    tiny: Tiny, tmp_path: Path, training_alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was chosen for it, and one that was given, as all were in older versions."""
    run, given = tmp_path / "run", tmp_path / "given"
    tiny.job(run, "medusa", "data.held_out=null")
    assert "held out, to measure on: 5 of 29 conversations" in capsys.readouterr().out
    share = data_of_run(run).held_out
    assert share is not None and share > 0.05
    tiny.job(given, "medusa")
    for folder, kept in ((run, share), (given, 0.2)):
        tiny.job(folder, "medusa", "data.held_out=null")
        assert data_of_run(folder).held_out == kept
        tiny.job(folder, "medusa", f"data.held_out={kept}")
        with pytest.raises(UserError, match=r"data\.held_out=.*, not 0\.1"):
            tiny.job(folder, "medusa", "data.held_out=0.1")


@pytest.mark.parametrize("responses", ["data", "target"])
def test_an_error_in_the_data_is_told_once_and_ends_all(
    lives: Lives, tmp_path: Path, responses: str
) -> None:
    """Only the first process reads the data, so that only it can tell; the other does not wait. Of
    the conversations in this file none is held out, which shows after all of them are read."""
    more = ("data.held_out=0.0001", f"data.responses={responses}")
    ends, printed = lives.run(tmp_path / "run", "medusa", [Life(2)], *more, fails=True)
    assert ends[0][0] == -2, printed
    assert printed.count("error: ") == printed.count("no held-out conversation") == 1

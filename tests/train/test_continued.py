"""Runs on several processes that are killed, continued, spread otherwise, and measured again.

Run alone: python -m pytest tests/train/test_continued.py
"""

import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lives import Life, Lives
from tests.runs import require_same_run
from tests.tiny import Tiny, records

OFTEN = ("loop.save_every=2", "loop.eval_every=3")
TWO = "loop.accumulate=1"  # on two processes, a step then reads 2 rows, as elsewhere
KILLED = signal.SIGKILL


@pytest.fixture(scope="module")
def lives(tiny: Tiny) -> Iterator[Lives]:
    driver = Lives(tiny)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def whole(tiny: Tiny, lives: Lives) -> Callable[[str, bool], Path]:
    """The folder of an uninterrupted run on two processes."""

    @functools.cache
    def run(drafter: str, sharded: bool) -> Path:
        folder = tiny.root / f"whole-{drafter}-{sharded}"
        assert lives.run(folder, drafter, [Life(2, sharded)], *OFTEN, TWO)[0] == [[0, 0]]
        return folder

    return run


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_a_run_on_two_processes_is_continued_and_measured_again(
    lives: Lives, whole: Callable[[str, bool], Path], tmp_path: Path, sharded: bool
) -> None:
    """One rank is killed in a step, the other before a checkpoint; the continued run equals the
    uninterrupted one. The command is then repeated, which measures and trains no further."""
    deaths: list[dict[int, tuple[str, int, int]]] = [{1: ("lr", 4, 0)}, {0: ("half", 2, 0)}]
    cut = [Life(2, sharded, kills) for kills in deaths]
    ends, _ = lives.run(tmp_path / "run", "eagle3", [*cut, *[Life(2, sharded)] * 2], *OFTEN, TWO)
    assert ends[0][1] == ends[1][0] == KILLED
    assert ends[2:] == [[0, 0], [0, 0]]
    require_same_run(tmp_path / "run", whole("eagle3", sharded))


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

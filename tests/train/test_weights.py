"""Weights of responses: how much each counts in the loss, in whole runs.

Run alone: python -m pytest tests/train/test_weights.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.errors import UserError
from tests.processes import together
from tests.runs import final_state, require_equal, require_same_run
from tests.tiny import Tiny, conversations, losses, write_jsonl
from tests.train.test_resume import SEVERAL
from tests.train.test_training_rounds import ON_POLICY
from train import folder, optim
from train.data.sequences import Document

pytestmark = pytest.mark.usefixtures("one_thread", "training_alone")
Weigh = Callable[[int], Any]


def half(_: int) -> float:
    return 0.5


def mixed(n: int) -> float:
    """1, .25, 3, 1, …"""
    return (1, 0.25, 3)[n % 3]


def weighted(path: Path, weigh: Weigh) -> str:
    """The conversations of `Tiny`, each with a weight; as a setting."""
    chats = conversations(29)
    for n, chat in enumerate(chats):
        chat["messages"][1]["weight"] = weigh(n)
    return f"data.path={write_jsonl(path, chats)}"


def digest(run: Path) -> str:
    return str(json.loads((run / "config.json").read_text())["of"]["training data"])


def test_runs_without_weights_are_known_as_before() -> None:
    """The digest is one that was made before there were weights."""
    texts = [Document("", np.arange(n, dtype=np.int32), np.arange(n) >= n - 2) for n in (5, 3)]
    before = folder.digest(texts)
    assert before == "fc41e91126604dd204d114ef"
    found = {before}
    for weight in (0.5, 2.0):
        texts[1].weight = np.full(3, weight, np.float32)
        found.add(folder.digest(texts))
    assert len(found) == 3


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_weights_are_relative(tiny: Tiny, tmp_path: Path, per: str) -> None:
    """Half of everything, over half of the total, is the same: bit for bit, since halves are exact.
    The figures too, since they count every response once."""
    halves, more = weighted(tmp_path / "half.jsonl", half), f"loss.per={per}"
    tiny.job(tmp_path / "plain", "eagle3", more)
    tiny.job(tmp_path / "halves", "eagle3", more, halves)
    require_same_run(tmp_path / "halves", tmp_path / "plain")
    assert digest(tmp_path / "halves") != digest(tmp_path / "plain")
    other = weighted(tmp_path / "mixed.jsonl", mixed)
    tiny.job(tmp_path / "mixed", "eagle3", more, other)
    ours, theirs = final_state(tmp_path / "mixed"), final_state(tmp_path / "plain")
    assert any(not ours[name].equal(theirs[name]) for name in ours)


def test_a_run_with_weights_resumes_and_reads_no_others(tiny: Tiny, tmp_path: Path) -> None:
    path, steps, rate = tmp_path / "x.jsonl", iter(range(7)), optim.learning_rate

    def interrupted(*given: Any) -> float:
        if next(steps) == 6:  # the checkpoint is that of step 4
            raise KeyboardInterrupt
        return rate(*given)

    data = weighted(path, mixed)
    tiny.job(tmp_path / "whole", "medusa", data)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optim, "learning_rate", interrupted)
        tiny.job(tmp_path / "again", "medusa", data)
    tiny.job(tmp_path / "again", "medusa", data)
    require_same_run(tmp_path / "again", tmp_path / "whole")
    tiny.job(tmp_path / "online", "medusa", data, "hidden_states.mode=online")
    for ours, theirs in zip(losses(tmp_path / "online"), losses(tmp_path / "whole"), strict=True):
        assert ours[1]["loss"] == pytest.approx(theirs[1]["loss"], rel=1e-4)
    weighted(path, lambda n: mixed(n + 1))
    with pytest.raises(UserError, match="the training data changed since this run began"):
        tiny.job(tmp_path / "whole", "medusa", data)


@pytest.mark.parametrize("rounds", [["loop.epochs=1"], ON_POLICY], ids=["target", "on-policy"])
def test_the_target_s_own_answer_counts_as_that_of_the_data(
    tiny: Tiny, tmp_path: Path, rounds: list[str]
) -> None:
    """But where that is not trained on, which says nothing of another one."""
    more = [*rounds, "data.responses=target"]
    tiny.job(tmp_path / "plain", "eagle3", *more)
    for name, weigh in (("halves", half), ("nothing", lambda _: 0)):
        tiny.job(tmp_path / name, "eagle3", *more, weighted(tmp_path / f"{name}.jsonl", weigh))
        require_same_run(tmp_path / name, tmp_path / "plain")
    assert digest(tmp_path / "nothing") == digest(tmp_path / "plain")
    tiny.job(tmp_path / "mixed", "eagle3", *more, weighted(tmp_path / "mixed.jsonl", mixed))
    assert losses(tmp_path / "mixed") != losses(tmp_path / "plain")
    found = {digest(tmp_path / name) for name in ("plain", "halves", "mixed")}
    assert len(found) == 3


@pytest.mark.slow
def test_two_processes_weigh_as_one(tiny: Tiny, tmp_path: Path) -> None:

    data = weighted(tmp_path / "x.jsonl", mixed)
    tail = f"hidden_states.root={tmp_path / 'hidden_states'}"
    two = (tiny.overrides("eagle3", tail, data, "loop.accumulate=1"), str(tmp_path / "two"))
    tiny.job(tmp_path / "one", "eagle3", tail, data)
    (tmp_path / "driver.py").write_text(SEVERAL)
    command = [str(tmp_path / "driver.py"), json.dumps([two])]
    together(command, 2, tmp_path / "said", ACCELERATE_USE_CPU="true")
    require_equal("eagle3", tmp_path / "two", tmp_path / "one")

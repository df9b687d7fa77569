"""Rounds: a run whose later text is written by its own draft and the target together.

Run alone: python -m pytest tests/train/test_rounds.py
"""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.errors import UserError
from specdec.files import read_lines
from tests.runs import require_same_run
from tests.tiny import Tiny, losses
from train import optim
from train.rounds import RoundsConfig

# 24 prompts with answers of 12 tokens fill 8 rows: 4 steps of 2 rows a round
ROUNDS = ["data.answers=target", "rounds.count=3", "loop.epochs=1", "loop.save_every=3"]
pytestmark = pytest.mark.usefixtures("one_thread")


def written(run: Path, number: int) -> dict[str, list[int]]:
    """The answers of a round, by prompt."""
    files = sorted((run / "rounds" / str(number) / "answers").glob("*.jsonl"))
    return {r["prompt"]: r["ids"] for path in files for r in read_lines(path, ("prompt", "ids"))}


def of_target(tiny: Tiny) -> dict[str, list[int]]:
    files = sorted((tiny.root / "answers").rglob("*.jsonl"))
    return {r["prompt"]: r["ids"] for path in files for r in read_lines(path, ("prompt", "ids"))}


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds, the later two of which draft and target write together."""
    run = tmp_path_factory.mktemp("rounds") / "whole"
    tiny.job(run, "medusa", *ROUNDS, "rounds.data=draft")
    return run


def test_a_round_reads_what_its_draft_wrote(tiny: Tiny, whole: Path) -> None:
    steps = [step for step, _ in losses(whole)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) % 3 == 0
    alone = of_target(tiny)
    first, second = written(whole, 1), written(whole, 2)
    assert len(first) == len(second) == 24 and first.keys() <= alone.keys()
    assert first != second  # another draft wrote it
    assert any(first[name] != alone[name] for name in first)
    drafts = [load_file(whole / "rounds" / n / "draft" / "draft.safetensors") for n in "12"]
    assert any(not torch.equal(drafts[0][name], drafts[1][name]) for name in drafts[0])


@pytest.mark.parametrize("steps", [2, 5, 7, 10])
def test_interrupted_rounds_equal_whole_ones(
    tiny: Tiny, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Before, at and after the steps at which a round begins; checkpoints lie elsewhere."""
    rate, calls = optim.learning_rate, 0

    def interrupted(*given: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == steps:
            raise KeyboardInterrupt
        return rate(*given)

    monkeypatch.setattr(optim, "learning_rate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.job(tmp_path / "run", "medusa", *ROUNDS, "rounds.data=draft")
    tiny.job(tmp_path / "run", "medusa", *ROUNDS, "rounds.data=draft")
    require_same_run(tmp_path / "run", whole)
    for number in (1, 2):
        assert written(tmp_path / "run", number) == written(whole, number)


def test_by_a_lossless_rule_the_text_is_the_target_s(tiny: Tiny, tmp_path: Path) -> None:
    """At temperature 0 that is the very same text, token for token."""
    more = [*ROUNDS, "rounds.count=2", "rounds.data=draft", "rounds.rule=rejection"]
    tiny.job(tmp_path / "run", "medusa", *more)
    alone = of_target(tiny)
    found = written(tmp_path / "run", 1)
    assert len(found) == 24 and all(ids == alone[name] for name, ids in found.items())


def test_mixed_rounds_ask_both_for_every_second_prompt(
    tiny: Tiny, tmp_path: Path, whole: Path
) -> None:
    """What was written is what is trained on: the first round, of 4 steps, is that of any run, and
    the second is neither the target's alone nor the draft's."""
    curves = [losses(whole)]
    for data in ("mixed", "target"):
        tiny.job(tmp_path / data, "medusa", *ROUNDS, f"rounds.data={data}")
        curves.append(losses(tmp_path / data))
    assert len(written(tmp_path / "mixed", 1)) == 12
    for ours, theirs in itertools.combinations(curves, 2):
        assert ours[:4] == theirs[:4] and ours[4] != theirs[4]


@pytest.mark.parametrize(("temperature", "texts"), [(0.0, 1), (1.0, 2)])
def test_rounds_of_the_target_s_own_text(
    tiny: Tiny, tmp_path: Path, temperature: float, texts: int
) -> None:
    """Drawn anew in every round, unless they are greedy and so the same."""
    root = tmp_path / "answers"
    more = [f"answers.root={root}", f"answers.temperature={temperature}"]
    tiny.job(tmp_path / "run", "medusa", *ROUNDS, "rounds.count=2", *more)
    assert len(list(root.iterdir())) == texts
    assert not (tmp_path / "run" / "rounds").exists()


def test_a_round_s_draft_that_was_deleted_is_told(tiny: Tiny, tmp_path: Path, whole: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "rounds" / "1")
    with pytest.raises(UserError, match="rounds/1/draft is missing"):
        tiny.job(run, "medusa", *ROUNDS, "rounds.data=draft")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RoundsConfig(count=0), r"rounds\.count=0"),
        (lambda: RoundsConfig(data="drafts"), "did you mean 'draft'"),
        (lambda: RoundsConfig(gamma=0), r"rounds\.gamma=0"),
        (lambda: RoundsConfig(rule="leniense"), "leniense"),
    ],
)
def test_mistakes(make: Callable[[], RoundsConfig], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


def test_the_draft_needs_prompts_to_answer(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"give data\.answers=target"):
        tiny.job(tmp_path / "run", "medusa", "rounds.count=2", "rounds.data=draft")

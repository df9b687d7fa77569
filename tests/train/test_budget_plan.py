"""How much of the data fits a budget of minutes.

Run alone: python -m pytest tests/train/test_budget_plan.py
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec.decoding.decode import decode
from specdec.decoding.generation import Generation
from specdec.errors import UserError
from specdec.files import read_record
from specdec.targets.target import Target
from tests.runs import as_before
from tests.tiny import Tiny, architectures, compose, random_target
from train import budget_timing
from train.budget_plan import (
    AFTER,
    ALONG,
    BESIDE,
    COUNTED,
    COUNTING,
    FEWEST,
    FORWARD,
    IN_TURN,
    KEEPING,
    SAID,
    BudgetConfig,
    Plan,
    Speeds,
    Work,
    fitted,
)
from train.budget_timing import timed
from train.data.split import split_documents, split_prompts

SPEEDS = Speeds(read=0.001, generated=0.01, step=0.05, trained=0.002)
WORK = Work(
    epochs=3,
    new=100,
    kept=False,
    prompts=FEWEST,
    timed=FEWEST,
    decoded=15,
    learned=20,
    watched=0.001,
)
DECODED = 0.05 * IN_TURN  # seconds a token of the final evaluation takes
FIXED = (FEWEST * 15 + 20) * DECODED + AFTER  # of the final evaluation, whatever is trained on


def by_hand(n: int, tokens: int = 40, held: int = 5) -> float:
    """Seconds of a run over n conversations of `tokens` tokens, answered by the target."""
    texts = n + held
    generating = texts * 100 * 0.01 + texts * tokens * 0.001
    whole = tokens + 100 * SAID
    reading = texts * whole * 0.001
    evaluations = 1 + 0.001 * 3 * n * whole
    training = 3 * n * whole * 0.002 * BESIDE + evaluations * held * whole * 0.002 * FORWARD
    return generating + reading + training + FIXED


def plan(seconds: float, floor: int = 1, work: Work = WORK, available: int = 500) -> Plan:
    return fitted(seconds, floor, SPEEDS, work, [40] * available, [40] * 5)


def test_seconds_by_hand() -> None:
    assert plan(math.inf).conversations == 500
    assert plan(math.inf).seconds == pytest.approx(by_hand(500))


@pytest.mark.parametrize("n", [1, 77, 499])
def test_the_largest_number_that_fits(n: int) -> None:
    just = by_hand(n) + 1e-6
    assert plan(just).conversations == n
    assert plan(by_hand(n + 1) - 1e-6).conversations == n


def test_the_floor_is_used_however_slow_the_machine() -> None:
    assert plan(0.0, floor=120).conversations == 120
    assert plan(0.0, floor=120, available=50).conversations == 50, "no more than there are"
    assert plan(by_hand(200) + 1e-6, floor=120).conversations == 200


def test_a_slow_machine_measures_fewer_prompts() -> None:
    more = dataclasses.replace(WORK, prompts=30)
    each = 15 * 0.01 * COUNTING  # of a prompt that is not timed, but counted
    room = (20 - FEWEST) * each / COUNTED  # for counting on 20 prompts
    assert plan(math.inf, work=more).prompts == 30, "without a budget all are measured"
    assert plan(room + 1e-6, work=more).prompts == 20
    assert plan(room - 1e-6, work=more).prompts == 19
    assert plan(1.0, work=more).prompts == FEWEST
    fewer = dataclasses.replace(WORK, prompts=FEWEST - 1)
    assert plan(1.0, work=fewer).prompts == FEWEST - 1, "no more than there are"
    saved = plan(room - 1e-6, work=more).measuring - plan(room + 1e-6, work=more).measuring
    assert saved == pytest.approx(-each)


def test_what_measuring_reads_takes_time() -> None:
    """The prompts before each way of answering, and the texts along which α is measured."""
    reading = dataclasses.replace(WORK, prompts=30, read=100, read_once=7)
    plain = dataclasses.replace(WORK, prompts=30)
    more = plan(math.inf, work=reading).measuring - plan(math.inf, work=plain).measuring
    assert more == pytest.approx((30 * 100 + 7) * 0.001)


def test_longer_conversations_fill_a_budget_sooner() -> None:
    lengths = [10] * 100 + [400] * 100
    short_first = fitted(70, 1, SPEEDS, WORK, lengths, [40] * 5)
    long_first = fitted(70, 1, SPEEDS, WORK, lengths[::-1], [40] * 5)
    assert short_first.conversations > long_first.conversations > 1


def test_data_that_has_responses_is_only_read() -> None:
    theirs = plan(math.inf, work=dataclasses.replace(WORK, new=0))
    assert theirs.generating == 0
    assert theirs.reading == pytest.approx(505 * 40 * 0.001)


def test_hidden_states_that_are_kept_are_not_read_again() -> None:
    kept = plan(math.inf, work=dataclasses.replace(WORK, kept=True))
    assert kept.reading == 0
    more = (KEEPING - 1) * 505 * (100 * 0.01 + 40 * 0.001)
    assert kept.seconds == pytest.approx(by_hand(500) + more - 505 * (40 + 100 * SAID) * 0.001)


def test_a_start_that_is_solved_for_takes_time() -> None:
    """It reads all of 20,000 tokens, but of 260,000 only every third row."""
    solving = dataclasses.replace(WORK, closed_form_initialisation=True)
    for available, part in ((154, 1), (2000, 3)):
        lengths = [40] * available
        plain, solved = (
            fitted(math.inf, 1, SPEEDS, work, lengths, [40] * 5) for work in (WORK, solving)
        )
        tokens = available * (40 + 100 * SAID) / part
        assert solved.training - plain.training == pytest.approx(tokens * 0.002 * FORWARD)


def test_what_the_plan_says() -> None:
    said = str(plan(by_hand(77) + 1e-6))
    assert "77 of 500 training conversations" in said
    assert "writes 100 tokens/s" in said and "trains on 500 tokens/s" in said


def test_speeds_are_measured_on_the_work_at_hand() -> None:
    target, steps = random_target(architectures(64, layers=2)["llama"]), []

    def step() -> int:
        steps.append(1)
        return 10

    read: list[int] = []
    embedding = target.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    speeds = timed(target, [[3, 4, 5], [6, 7]], 2, step, context=60)
    assert max(read) >= 59, "texts as long as those that are answered"
    assert len(steps) > 2, "one step warms up, others are timed"
    assert all(seconds > 0 for seconds in dataclasses.astuple(speeds))


def test_a_moment_of_another_process_does_not_spoil_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch and the first single row take a hundred times as long as they did."""
    target, calls = random_target(architectures(64, layers=2)["llama"]), list[int]()

    def hindered(target: Target, rows: list[list[int]], **options: Any) -> list[Generation]:
        responses = decode(target, rows, **options)
        for response in responses:
            response.seconds = response.prefill_seconds = 1.0
            if calls.count(len(rows)) == 0:
                response.seconds = response.prefill_seconds = 100.0
        calls.append(len(rows))
        return responses

    monkeypatch.setattr(budget_timing, "decode", hindered)
    speeds = timed(target, [[3, 4, 5], [6, 7]], 2, lambda: 10, context=60)
    assert speeds.generated == pytest.approx(1 / 2 / 4) and speeds.step == pytest.approx(1 / 24)
    assert speeds.read == pytest.approx(1 / 2 / 60)


@pytest.mark.parametrize(
    ("field", "value"), [("minutes", 0), ("minutes", -1), ("floor", 0), ("spent", -1)]
)
def test_budgets_that_cannot_be(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"budget.{field}"):
        BudgetConfig(**{field: value})


@pytest.mark.parametrize("responses", ["data", "target"])
def test_a_run_keeps_to_its_budget_and_a_resumed_one_to_its_plan(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], responses: str
) -> None:
    folder, small = tmp_path / "run", ["budget.floor=5", f"data.responses={responses}"]
    tiny.job(folder, "eagle3", "budget.minutes=0.001", *small)
    said = capsys.readouterr().out
    assert "plan: 5 of " in said and "the figures will be poor" in said
    assert "train: 5 documents" in said
    assert "more than the 0 seconds left of budget.minutes=0.001, most of it for measuring" in said
    assert "measured on 5 held-out prompts, too few for any claim" in said
    plan = read_record(Plan, folder / "plan.json")
    # of 5 prompts 2 are measured in two ways, and 6 times a prompt is read for the oracle; the
    # other 3 are calibrated on, in one batch; 8 tokens at T = 0 and at T = 1 each time
    steps = (2 * 2 + 6 + 1) * 16
    data = compose(tiny.overrides("eagle3", *small)).data
    split = split_documents if responses == "data" else split_prompts
    texts = split(data, AutoTokenizer.from_pretrained(tiny.target)).prompts
    asked = min(sum(len(t.ids) for t in texts) / 5, data.max_prompt)
    along = (asked + 8) * ALONG
    read = 2 * (2 * 2 * asked + 3 * along) + 3 * 2 * (asked + along)
    decoding = steps * plan.speeds.step * IN_TURN
    assert plan.measuring == pytest.approx(decoding + read * plan.speeds.read + AFTER)
    assert plan.conversations == 5
    kept = dataclasses.asdict(plan)
    del kept["prompts"]  # as in plans from before it was there, and there were no checksums
    (folder / "plan.json").write_text(json.dumps(kept))
    described = as_before(folder / "config.json")
    del described["of"]["plan"]
    (folder / "config.json").write_text(json.dumps(described))
    assert (plan.generating > 0) == (responses == "target")
    metrics = (folder / "metrics.jsonl").read_text()
    tiny.job(folder, "eagle3", "budget.minutes=60", *small)
    assert "5 training conversations, as planned before" in capsys.readouterr().out
    assert (folder / "metrics.jsonl").read_text() == metrics, "a finished run was trained again"


@pytest.mark.parametrize(
    ("floor", "limit", "advice"),
    [
        (5, 60, "give a larger budget.minutes"),
        (1000, 28, "all of them are used already, so give more data, or raise data.limit=28,"),
        (1000, 60, "all of them are used already, so give more data"),
    ],
)
def test_a_poor_plan_advises_what_would_help(
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    floor: int,
    limit: int,
    advice: str,
) -> None:
    """Of 29 conversations."""
    options = ["budget.minutes=0.001", f"budget.floor={floor}", f"data.limit={limit}"]
    tiny.job(tmp_path / "run", "ngram", *options)
    said = " ".join(capsys.readouterr().out.split())
    assert f"the figures will be poor; {advice} for better ones" in said


def test_without_a_budget_nothing_is_timed(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.job(tmp_path / "run", "ngram")
    assert "plan" not in capsys.readouterr().out
    assert not (tmp_path / "run" / "plan.json").exists()

"""The clock of a run: each stage ends when its time is up, and a resumed run is the same run.

Run alone: python -m pytest tests/train/test_budget.py
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from rich.progress import Progress

from specdec.decoding.config import DecodeConfig
from specdec.engines.known_engines import ENGINES
from specdec.errors import UserError
from specdec.files import read_record
from specdec.measure import setup
from specdec.measure.decoded_prompts import FEWEST_PROMPTS, LEAST_TOKENS
from specdec.measure.evaluation import Subject, evaluate
from specdec.ranks import ALONE, Ranks
from specdec.targets.loading import TargetLoader
from specdec.targets.target_config import TargetConfig
from tests.engine import FakeEngine
from tests.ranks import together
from tests.runs import require_same_run
from tests.tiny import Tiny, architectures, lm, losses, make_tokenizer, random_target, responding
from tests.toy_engine import ENGINE
from train import measurement, pipeline
from train.budget import (
    BUDGET,
    LEAST_VALIDATION,
    MEASURING,
    TEXTS,
    TIMED_STEPS,
    TRAINING,
    Budget,
    BudgetConfig,
    BudgetRecord,
    StageTime,
    TrainingTime,
    in_ranges,
    places_in,
    shares_of_run,
    texts_of_run,
)
from train.data.responses import documents_with_responses
from train.data.sequences import Document, Prompt
from train.loop import Learner
from train.measurement import FinalSettings, finished
from train.optim import learning_rate
from train.training_rounds import written


class Clock:
    """A clock that stands still, unless something moves it on, and goes on by `tick` seconds
    whenever it is looked at."""

    def __init__(self, tick: float = 0.0) -> None:
        self.seconds, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.seconds += self.tick
        return self.seconds


PLAIN = shares_of_run(texts=True, rounds=[False], trains=True)


def budget_of(
    folder: Path,
    clock: Clock,
    minutes: float | None = 10,
    shares: dict[str, float] = PLAIN,
    ranks: Ranks = ALONE,
    begun: bool = False,
    settings: str = "these",
    **more: float,
) -> Budget:
    cfg = BudgetConfig(minutes, **more)  # type: ignore[arg-type]
    return Budget(cfg, folder, settings, begun, ranks, shares, clock, clock.seconds)


def seconds_of(budget: Budget, name: str) -> float:
    stage = budget.stage(name)
    assert stage is not None
    return stage.seconds


# ---- the shares


def test_shares_by_hand(tmp_path: Path) -> None:
    """Of 10 minutes, 100 seconds of which the installation took, 500 are left."""
    clock = Clock()
    budget = budget_of(tmp_path, clock, spent=100.0)
    assert TEXTS + TRAINING + MEASURING == 1 and TRAINING >= 0.4 and MEASURING <= 0.25
    assert seconds_of(budget, "texts") == pytest.approx(TEXTS * 500)
    clock.seconds += TEXTS * 500
    assert seconds_of(budget, "training") == pytest.approx(TRAINING * 500)
    clock.seconds += TRAINING * 500
    assert seconds_of(budget, "measuring") == pytest.approx(MEASURING * 500)


def test_a_stage_that_ends_early_passes_its_time_on(tmp_path: Path) -> None:
    """To training, since measuring has at most a quarter; and then to measuring."""
    clock = Clock()
    budget = budget_of(tmp_path, clock)
    budget.stage("texts")
    assert seconds_of(budget, "training") == pytest.approx((1 - MEASURING) * 600)
    assert seconds_of(budget, "measuring") == pytest.approx(600)


def test_a_stage_that_ends_late_takes_from_all_after_it(tmp_path: Path) -> None:
    clock = Clock()
    budget = budget_of(tmp_path, clock)
    budget.stage("texts")
    clock.seconds += TEXTS * 600 + 39
    left = (TRAINING + MEASURING) * 600 - 39
    assert seconds_of(budget, "training") == pytest.approx(left * TRAINING / (TRAINING + MEASURING))


def test_shares_of_runs() -> None:
    """Later rounds share the time; a run without training has the more for texts."""
    rounds = shares_of_run(texts=True, rounds=[False, True], trains=True)
    assert [*rounds] == [
        *("texts", "training of round 1"),
        *("texts of round 2", "training of round 2", "measuring"),
    ]
    assert rounds["texts"] == rounds["texts of round 2"] == TEXTS / 2
    assert sum(rounds.values()) == pytest.approx(1)
    assert [*shares_of_run(False, [False], True)] == ["training", "measuring"]
    assert [*shares_of_run(True, [False], False)] == ["texts", "measuring"]


def test_a_run_without_texts_trains_in_three_quarters(tmp_path: Path) -> None:
    budget = budget_of(tmp_path, Clock(), shares=shares_of_run(False, [False], True))
    assert seconds_of(budget, "training") == pytest.approx((1 - MEASURING) * 600)


def test_processes_go_by_the_first_one_s_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though their clocks show other times."""

    def times(ranks: Ranks) -> tuple[list[float], BudgetRecord | None]:
        clock = Clock()
        clock.seconds = 1000.0 * ranks.rank
        budget = budget_of(tmp_path, clock, ranks=ranks)
        seconds = [seconds_of(budget, "texts")]
        clock.seconds += 30 + 7 * ranks.rank
        return [*seconds, seconds_of(budget, "training")], budget.record

    monkeypatch.setattr(Ranks, "any", lambda self, here: here)
    one, two = together(monkeypatch, 2, times)
    assert one == two and not isinstance(one, Exception)


def test_a_process_that_measures_alone_goes_by_its_own_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process does not see the run's folder and takes no part in measuring."""
    monkeypatch.setattr(measurement, "_export_unmeasured_draft", lambda *_: None)
    monkeypatch.setattr(measurement.draft_checkpoint, "copy_trained_on", lambda *_: None)
    cfg = FinalSettings("run", "data", DecodeConfig(prompts=0), None, None, False, False)

    def be(ranks: Ranks) -> int | None:
        folder = tmp_path / str(ranks.rank)
        (folder / ("elsewhere" if ranks.rank else "best")).mkdir(parents=True)
        budget: Any = budget_of(folder, Clock(), ranks=ranks)
        finished(cfg, folder, None, None, None, ranks, None, None, budget)  # type: ignore[arg-type]
        if ranks.rank:
            return None
        budget.end_measuring(12, 6, 64)  # waits for nobody
        return budget.record.prompts

    assert together(monkeypatch, 2, be) == [12, None]


@pytest.mark.parametrize(
    ("field", "value"), [("minutes", 0), ("minutes", -1), ("floor", 0), ("spent", -1)]
)
def test_budgets_that_cannot_be(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"budget.{field}"):
        BudgetConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("places", [[], [0], [0, 1, 2], [3, 5, 6, 7, 9], [*range(0, 40, 2)]])
def test_places_read_back(places: list[int]) -> None:
    assert places_in(in_ranges(places)) == places
    assert in_ranges([3, 5, 6, 7, 9]) == "3,5-7,9"


# ---- texts


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> TargetLoader:
    cfg = TargetConfig(str(tiny.target), "float32", "cpu", cache=str(tiny.root / "targets"))
    loader = TargetLoader(cfg)
    loader.whole()
    return loader


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    draw = np.random.default_rng(0)
    return [
        Prompt(f"chat{n}", draw.integers(10, 60, 3 + n % 7).astype(np.int32), "?")
        for n in range(200)
    ]


NEW = 6
Moved = Callable[..., list[Document]]


@pytest.fixture
def responses(target: TargetLoader, prompts: list[Prompt], tmp_path: Path) -> Iterator[Moved]:
    """Responses to the prompts by a clock that each forward pass of the target moves on by a
    second; by ten seconds in the `slow` one."""
    clock, passes, slow = Clock(), 0, -1

    def move(*_: Any) -> None:
        nonlocal passes
        clock.seconds += 10.0 if passes == slow else 1.0
        passes += 1

    hook = target.whole().model.get_input_embeddings().register_forward_pre_hook(move)

    def documents(
        seconds: float | None, floor: int = 0, slow_pass: int = -1, root: str = "responses"
    ) -> list[Document]:
        nonlocal passes, slow
        passes, slow = 0, slow_pass
        cfg = responding(max_new_tokens=NEW, batch=16, root=str(tmp_path / root))
        time = None if seconds is None else StageTime("texts", seconds, clock, floor)
        with Progress(disable=True) as bar:
            found = documents_with_responses(
                target, prompts, cfg, Accelerator(cpu=True), bar, time=time
            )
        documents.passes, documents.time = passes, time  # type: ignore[attr-defined]
        return found

    yield documents
    hook.remove()


def test_responses_end_when_their_time_is_up(responses: Any, prompts: list[Prompt]) -> None:
    """Every response is whole, and the same as without a clock. Of 200 prompts, 16 are answered at
    once, in 6 passes: 60 seconds are enough for about 160."""
    some = responses(60.0)
    assert 120 <= len(some) <= 170
    assert responses.passes <= 60 + NEW / 2
    every = {d.id: d for d in responses(None, root="all")}
    assert len(every) == len(prompts)
    for document in some:
        assert document.ids.tolist() == every[document.id].ids.tolist()


def test_the_order_of_responses_is_random_but_fixed(responses: Any) -> None:
    first, again = responses(40.0), responses(40.0, root="elsewhere")
    assert [d.id for d in first] == [d.id for d in again]
    numbers = [int(d.id.removeprefix("chat")) for d in first]
    assert numbers != [*range(len(numbers))]
    assert np.mean(numbers) == pytest.approx(100, abs=20)  # a sample of 100 of 0 to 199
    lengths = [len(d.ids) - NEW for d in first]
    assert np.mean(lengths) == pytest.approx(6, abs=0.6), "short prompts do not come first"


def test_responses_of_earlier_runs_cost_nothing(responses: Any) -> None:
    before = len(responses(40.0))
    after = responses(20.0)
    assert len(after) > before + 20
    assert len(responses(0.0)) == len(after) and responses.passes <= 1  # a trial


def test_a_slow_machine_goes_on_to_the_floor(responses: Any) -> None:
    """A group of prompts is answered together, so up to so many more may have a response."""
    some = responses(5.0, floor=70)
    assert 70 <= len(some) <= 70 + 16
    assert responses.time.overdue
    assert len(responses(0.0, floor=70)) == len(some) and not responses.time.overdue


@pytest.mark.parametrize("slow_pass", [0, 7, 30, 50])
def test_one_slow_pass_changes_the_texts_by_at_most_a_fifth(responses: Any, slow_pass: int) -> None:
    """It takes 9 of 60 seconds, .15 of them; batches of 16 of 160 texts round that to a fifth."""
    usual = len(responses(60.0))
    assert len(responses(60.0, slow_pass=slow_pass, root="slow")) >= 0.8 * usual


def test_an_engine_responds_until_the_time_is_up(
    target: TargetLoader, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toy engine of tests; each of its responses takes a second."""
    monkeypatch.setitem(ENGINES, "toy", ENGINE)  # type: ignore[arg-type]
    clock = Clock()

    def passes(_: int, reply: dict[str, Any]) -> dict[str, Any]:
        clock.seconds += 1.0
        return reply

    def answered(seconds: float, floor: int) -> list[Document]:
        time = StageTime("texts", seconds, clock, floor)
        cfg = responding(
            max_new_tokens=NEW, batch=4, root=str(tmp_path / "responses"), engines=[server.url]
        )
        with Progress(disable=True) as bar:
            return documents_with_responses(
                target, prompts, cfg, Accelerator(cpu=True), bar, time=time
            )

    with FakeEngine(target.whole(), passes, toy=True).serving() as server:
        some = answered(40.0, 0)
        assert 28 <= len(some) <= 44  # 4 are under way at once
        assert len(server.asked) == len(some)
        assert len(answered(1.0, len(some) + 20)) >= len(some) + 20
        before = len(server.asked)
        assert len(answered(0.0, 1)) == before == len(server.asked)


# ---- training


def training_time(seconds: float, clock: Clock, rounds: int = 1) -> TrainingTime:
    return TrainingTime(StageTime("training", seconds, clock), rounds, None, lambda steps: None)


def steps_fixed(seconds: float, slow: int = -1, a_step: float = 1.0, rounds: int = 1) -> int:
    """The number of steps of a run of at most 1000, whose step `slow` takes ten times as long."""
    clock = Clock()
    time, step = training_time(seconds, clock, rounds), 0
    while not time.enough:
        time.begin_step()
        clock.seconds += a_step * (10 if step == slow else 1)
        time.end_step()
        step += 1
    return time.forecast(step, evaluation=2.0, every=50, most=1000)


def test_steps_by_hand() -> None:
    """After 10 of 200 seconds, of which three evaluations of two steps each take 6, and each of the
    other steps 1 + 2 / 50 of a step: 10 + 184 / 1.04."""
    assert steps_fixed(200.0) == 10 + math.floor(184 / 1.04)
    assert steps_fixed(200.0, rounds=2) == 10 + math.floor(384 / 1.04)
    assert training_time(9.0, Clock()).forecast(0, 2.0, 50, most=77) == 77, "nothing is timed yet"


@pytest.mark.parametrize("slow", [0, 1, 4, 8, 9])
def test_one_slow_step_changes_the_steps_by_less_than_a_fifth(slow: int) -> None:
    assert steps_fixed(200.0, slow) == pytest.approx(steps_fixed(200.0), rel=0.2)
    assert steps_fixed(200.0, slow) < steps_fixed(200.0)


def test_steps_are_timed_for_a_part_of_the_time() -> None:
    """So a short disturbance does not hold for all that are timed."""
    clock = Clock()
    time = training_time(2000.0, clock)
    for _ in range(99):
        time.begin_step()
        clock.seconds += 1.0
        time.end_step()
        assert not time.enough
    clock.seconds += 1.0
    assert time.enough


# ---- measuring


@pytest.mark.parametrize(("processes", "batch"), [(1, 1), (2, 2)])
def test_all_ways_are_measured_on_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch, processes: int, batch: int
) -> None:
    """Chains and the fastest shape, at two temperatures, on one process and on two whose
    clocks differ. A second passes with each look at the clock."""

    many = 30 * processes

    def measured(ranks: Ranks, seconds: float) -> Any:
        target, clock = random_target(architectures(61, 4)["llama"]), Clock(1.0)
        target.tokenizer = make_tokenizer()
        prompts = [[5 + n % 50, 7, 8 + n % 3] for n in range(many + 8)]
        cfg = DecodeConfig(prompts=many, max_new_tokens=6, batch=batch, fastest=True)
        drafter = lm(target)
        return evaluate(
            Subject("run", target, drafter, "prompts"),
            prompts,
            cfg,
            ranks=ranks,
            left=lambda: seconds - clock(),
        )

    bounds = [(1.0, FEWEST_PROMPTS, FEWEST_PROMPTS + processes)]
    for seconds, fewest, most in [*bounds, *[(1e9, many, many)] * (processes == 1)]:
        made = together(monkeypatch, processes, lambda ranks, s=seconds: measured(ranks, s))  # type: ignore[misc]
        for results in made:
            assert not isinstance(results, Exception), results
            assert fewest <= results.prompts <= most
            assert results.prompts == made[0].prompts and results.timed == made[0].timed
            for one in results.measured:
                assert one.timed_speedup.value > 0
                if one.prompts:
                    assert len(one.prompts) == results.prompts


@pytest.mark.parametrize(
    ("a_token", "tokens", "prompts"),
    [(0.001, {48}, {16}), (0.35, {*range(33, 48)}, {*range(12, 17)}), (30.0, {LEAST_TOKENS}, {6})],
)
def test_measuring_ends_within_its_time(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    a_token: float,
    tokens: set[int],
    prompts: set[int],
) -> None:
    """The clock runs by decoded tokens: so many seconds for each of one response, and four tenths
    of that for each of several together. A slow machine first shortens responses, then measures
    fewer prompts. Unless even the least takes longer, the time is not passed by more than the
    decoding of one prompt in all three ways."""
    clock, decoded, share = Clock(), setup.decode, 1000.0

    def slowly(target: Any, some: Sequence[Any], *args: Any, **options: Any) -> Any:
        responses = decoded(target, some, *args, **options)
        each = a_token * (1.0 if len(some) == 1 else 0.4)
        clock.seconds += sum(each * len(response.ids) for response in responses)
        return responses

    monkeypatch.setattr(setup, "decode", slowly)
    target = random_target(architectures(61, 4)["llama"])
    target.tokenizer = make_tokenizer()
    asked = [Prompt(str(n), np.array([5 + n % 50, 7, 8 + n % 3], np.int32)) for n in range(22)]
    results = measurement.measure_draft(
        Subject("run", target, lm(target), "prompts"),
        tmp_path,
        DecodeConfig(prompts=16, max_new_tokens=48, fastest=True),
        asked=asked[:16],
        others=asked[16:],
        progress=Progress(disable=True),
        left=lambda: share - clock(),
    )
    assert results.max_new_tokens in tokens and results.prompts in prompts
    if a_token < 30:
        assert clock() <= share + 3 * results.max_new_tokens * a_token
    else:
        least = results.max_new_tokens * a_token * (3 * results.prompts + 6 + 6)
        assert clock() <= 2 * least  # at two temperatures


def test_a_record_says_how_many_prompts_are_measured_again(tmp_path: Path) -> None:
    budget = budget_of(tmp_path, Clock())
    budget.end_measuring(40, 9, 64)
    again = budget_of(tmp_path, Clock(), begun=True).record
    assert again is not None and (again.prompts, again.timed, again.tokens) == (40, 9, 64)


# ---- whole runs


def job(tiny: Tiny, folder: Path, clock: Clock, *more: str) -> None:
    pipeline.run(tiny.config("eagle3", "budget.floor=5", *more), folder, clock)


def record_of(folder: Path) -> BudgetRecord:
    return read_record(BudgetRecord, folder / BUDGET)


LONG_RUN = ("loop.epochs=20", "data.responses=target", "responses.batch=2", "loop.eval_every=0")
LONG_RUN += ("budget.minutes=2",)


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two minutes; a second passes whenever something looks at the clock."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fresh = f"responses.root={folder.parent / 'responses'}"
    job(tiny, folder, Clock(1.0), *LONG_RUN, fresh)
    return folder


def test_a_run_trains_on_what_was_written_in_time(
    tiny: Tiny, tmp_path: Path, training_alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (*LONG_RUN, "budget.minutes=1", f"responses.root={tmp_path / 'responses'}")
    job(tiny, tmp_path / "run", Clock(1.0), *more)
    read, said = texts_of_run(tmp_path / "run" / BUDGET), capsys.readouterr().out
    assert read is not None and 5 <= len(read) < 24
    assert f"train: {len(read)} documents" in said
    assert f"budget: {len(read)} of 24 training conversations" in said


def test_a_run_takes_the_steps_that_fit_its_time(whole: Path) -> None:
    record = record_of(whole)
    assert record.steps is not None and record.prompts == 2
    assert [step for step, _ in losses(whole)] == [*range(1, record.steps + 1)]
    assert TIMED_STEPS < record.steps < 20 * 4  # epochs of 8 rows, two for a step


def test_the_learning_rate_follows_the_steps_that_were_fixed(whole: Path, tiny: Tiny) -> None:
    """After the first, which are timed, every step has the rate of the schedule of so many steps;
    and these first have rates of the schedule's rising side."""
    steps = record_of(whole).steps
    assert steps is not None
    optim = tiny.config("eagle3").optim
    rates = [record["lr"] for _, record in losses(whole)]
    assert rates[TIMED_STEPS + 1 :] == [
        learning_rate(optim, step, steps) for step in range(TIMED_STEPS + 1, steps)
    ]
    assert max(rates) <= optim.lr


@pytest.mark.parametrize("last", ["initial_drafter", "finished"])
def test_a_run_that_goes_on_after_a_stage_is_the_same_run(
    tiny: Tiny,
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
    last: str,
) -> None:
    """Interrupted after the texts, and after training; it goes on with a clock that goes ten times
    as fast, which changes nothing that is decided."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    more = (*LONG_RUN, f"responses.root={tmp_path / 'responses'}")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, last, interrupted)
        job(tiny, tmp_path / "run", Clock(1.0), *more)
    decided = record_of(tmp_path / "run")
    job(tiny, tmp_path / "run", Clock(10.0), *more)
    again = record_of(tmp_path / "run")
    assert again.texts == decided.texts == record_of(whole).texts
    if last == "finished":
        assert again.steps == decided.steps == record_of(whole).steps
        require_same_run(tmp_path / "run", whole)
    assert again.prompts == 2


def test_a_run_that_goes_on_in_training_takes_the_same_steps(
    tiny: Tiny, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Right after the number of steps is fixed."""
    fit, more = Learner.fit_steps, (*LONG_RUN, f"responses.root={tmp_path / 'responses'}")

    def until_fixed(self: Learner, *args: Any) -> bool:
        if self.time is not None and self.time.fixed is not None:
            raise KeyboardInterrupt
        return fit(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Learner, "fit_steps", until_fixed)
        job(tiny, tmp_path / "run", Clock(1.0), *more)
    job(tiny, tmp_path / "run", Clock(7.0), *more)
    assert record_of(tmp_path / "run").steps == record_of(whole).steps
    require_same_run(tmp_path / "run", whole)


def test_a_finished_run_is_neither_trained_nor_measured_again(
    tiny: Tiny, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = (whole / "metrics.jsonl").read_text()
    job(tiny, whole, Clock(1.0), *LONG_RUN, f"responses.root={whole.parent / 'responses'}")
    assert "measured with these settings before" in " ".join(capsys.readouterr().out.split())
    assert (whole / "metrics.jsonl").read_text() == metrics


@pytest.mark.parametrize(
    ("more", "stages"),
    [
        (("hidden_states.mode=online",), []),
        ((), ["validation hidden states", "hidden states"]),
        (("hidden_states.mode=online", "loop.max_tokens=600"), []),
    ],
    ids=["online", "stored", "max_tokens"],
)
def test_runs_on_the_data_s_own_responses(
    tiny: Tiny, tmp_path: Path, more: tuple[str, ...], stages: Sequence[str], training_alone: None
) -> None:
    """Where hidden states are stored, those of as many conversations as there is time for."""
    own = (
        f"hidden_states.root={tmp_path / 'hidden_states'}",
        "budget.minutes=0.5",
        "loop.epochs=9",
    )
    job(tiny, tmp_path / "run", Clock(1.0), *own, *more)
    record = record_of(tmp_path / "run")
    assert [*record.texts] == stages
    assert record.steps is not None
    assert [step for step, _ in losses(tmp_path / "run")] == [*range(1, record.steps + 1)]
    if "loop.max_tokens=600" in more:
        assert record.steps <= 3  # of 200 tokens
    if stages:
        assert len(places_in(record.texts["hidden states"])) >= 5


@pytest.mark.parametrize("data", ["on_policy", "mixed", "draft"])
def test_later_rounds_share_the_time(
    tiny: Tiny, tmp_path: Path, data: str, training_alone: None
) -> None:
    more = ("rounds.count=2", f"rounds.data={data}", "loop.epochs=9", "budget.minutes=2")
    more += (
        "data.responses=target",
        "responses.batch=2",
        f"responses.root={tmp_path / 'responses'}",
    )
    job(tiny, tmp_path / "run", Clock(1.0), *more)
    record = record_of(tmp_path / "run")
    assert "responses of round 2" in record.texts
    assert ("responses of round 1" in record.texts) == (data == "on_policy")
    assert record.steps is not None and record.steps > TIMED_STEPS
    assert len(losses(tmp_path / "run")) <= record.steps
    before = dict(record.texts)
    metrics = losses(tmp_path / "run")
    job(tiny, tmp_path / "run", Clock(5.0), *more)
    assert record_of(tmp_path / "run").texts == before and losses(tmp_path / "run") == metrics


@pytest.mark.parametrize("data", ["on_policy", "draft"])
def test_a_round_without_time_trains_on_the_floor(
    tiny: Tiny, tmp_path: Path, data: str, training_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden states of as many texts are stored, though the responses took all of the time."""
    clock = Clock(1.0)

    def slowly(**given: Any) -> list[Document]:
        documents = written(**given)
        clock.seconds += 10_000
        return documents

    monkeypatch.setattr(pipeline, "written", slowly)
    more = ("rounds.count=2", f"rounds.data={data}", "budget.minutes=0.001", "budget.floor=20")
    more += ("data.responses=target", "responses.batch=2", "loop.epochs=9")
    more += tuple(f"{x}.root={tmp_path / x}" for x in ("responses", "hidden_states"))
    job(tiny, tmp_path / "run", clock, *more)
    texts = record_of(tmp_path / "run").texts
    rounds = [1, 2] if data == "on_policy" else [2]
    assert [key for key in texts if key.startswith("texts")] == [
        f"texts of round {number}" for number in rounds
    ]
    for number in rounds:
        assert len(places_in(texts[f"texts of round {number}"])) >= 20


@pytest.mark.parametrize(
    ("floor", "limit", "advice"),
    [
        (LEAST_VALIDATION, 60, "give budget.minutes="),
        (5, 60, "give budget.minutes=5"),
        (1000, 28, "all of them are used already, so give more data, or raise data.limit=28,"),
        (1000, 60, "all of them are used already, so give more data"),
    ],
)
def test_a_poor_run_advises_what_would_help(
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    floor: int,
    limit: int,
    advice: str,
) -> None:
    """Of 29 conversations, in hardly any time."""
    options = ["budget.minutes=0.001", f"budget.floor={floor}", f"data.limit={limit}"]
    options += [
        "data.responses=target",
        "responses.batch=2",
        f"responses.root={tmp_path / 'responses'}",
    ]
    pipeline.run(tiny.config("ngram", *options), tmp_path / "run", Clock(0.01))
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"the figures will be poor; {advice}\d* for better ones", said)
    assert said.count("too slow for a useful draft in 0.001 minutes") == 1


def test_without_a_budget_there_is_no_clock(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.job(tmp_path / "run", "ngram")
    assert "budget:" not in capsys.readouterr().out
    assert not (tmp_path / "run" / BUDGET).exists()


def test_a_damaged_record_is_told(tiny: Tiny, tmp_path: Path) -> None:
    budget_of(tmp_path, Clock()).end_measuring(3, 2, 64)
    record = json.loads((tmp_path / BUDGET).read_text())
    (tmp_path / BUDGET).write_text(json.dumps(record | {"prompts": 4}))
    with pytest.raises(UserError, match="give another name="):
        budget_of(tmp_path, Clock(), begun=True)


def test_a_run_has_a_record_once_it_has_begun(tmp_path: Path) -> None:
    """Also one that writes no texts, whose first decision is the number of steps: without a record
    it would be told that it began without a budget."""
    budget_of(tmp_path, Clock(), shares=shares_of_run(False, [False], True)).say_texts(5, 5, 2, 9)
    assert budget_of(tmp_path, Clock(), None, begun=True).active


def test_replaced_settings_start_the_clock_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget_of(tmp_path, Clock()).end_measuring(3, 2, 64)
    assert not budget_of(tmp_path, Clock(), None, settings="others").active
    assert not budget_of(tmp_path, Clock(), None, settings="others", begun=True).active
    budget_of(tmp_path, Clock()).end_measuring(3, 2, 64)
    other = budget_of(tmp_path, Clock(), settings="others").record
    assert other is not None and other.prompts is None
    assert "by a run that never began" in " ".join(capsys.readouterr().out.split())
    assert replace(other, settings="these").prompts is None

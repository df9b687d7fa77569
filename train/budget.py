"""The clock of a run with `budget.minutes`.

The minutes that remain after installation and loading are divided among the stages of the run:
writing texts (responses, and hidden states unless they come with the responses), training,
measuring. A stage works until its time is up; a stage that ends early passes its time on to the
later ones. No forecast limits the work in advance: texts are written in a random but fixed order
until the time is up, the number of training steps follows from the first training steps, and as
many prompts are measured as the time allows. Forecasts are only displayed.

`BudgetRecord` holds the decisions. It is written to the run's folder at the end of each stage, with
the remaining time, so that a resumed run is the same run.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import require, require_within
from specdec.files import read_record, write_json
from specdec.progress import console
from specdec.ranks import Ranks

T = TypeVar("T")
BUDGET = "budget.json"  # in the run's folder
# Shares of the time that is left after installation and loading. In quickstarts, a draft gains more
# from further epochs than from as many seconds of new texts, and an interval of τ within ±.08 takes
# less than a quarter of 10 minutes.
TEXTS, TRAINING, MEASURING = 0.35, 0.40, 0.25
VALIDATION_KEY = "validation"  # prefix of the keys of texts that are not trained on
# maximum fraction of the texts' time for the validation part, which is written first
VALIDATION = 0.2
READING = 0.25  # fraction of the texts' time for hidden states that do not come with the responses
LEAST_VALIDATION = 12  # texts of the validation part, however slow the machine
POOR = 300  # with fewer training texts, a head has hardly begun to learn
TIMED_STEPS = 8  # minimum number of training steps before their number is fixed
TIMED = 0.05  # share of the training time that these take: as long as the default warm-up
FORWARD = 1 / 3  # time of a held-out evaluation of as many rows, in training steps


@dataclass
class BudgetConfig:
    """The wall-clock time of the whole run. Each stage of the run works until its share of the time
    is used up. Up to `data.limit` conversations are used, and up to `decode.prompts` prompts are
    measured, at least 6, with shorter responses where time is short."""

    minutes: float | None = None  # wall-clock time of the whole run; null: no limit
    floor: int = 150  # training conversations that are used at least, however slow the machine
    spent: float = 0.0  # seconds used before `train.py` began, for example by the installation

    def __post_init__(self) -> None:
        require_within("budget", self, floor=1, spent=0)
        require(
            self.minutes is None or self.minutes > 0,
            f"budget.minutes={self.minutes}: give a number above 0, or null for no limit",
        )


@dataclass
class BudgetRecord:
    """The decisions of the clock so far, for the run with these `settings`."""

    settings: str  # their digest
    minutes: float
    whole: float  # seconds that were left after loading
    left: float  # when the last stage ended
    texts: dict[str, str] = field(default_factory=dict)  # places in their order, such as 0-3,7
    steps: int | None = None  # number of training steps
    prompts: int | None = None  # number of measured prompts
    timed: int | None = None  # the first of them
    tokens: int | None = None  # the limit of their responses; null: decode.max_new_tokens


@dataclass
class StageTime:
    """The time of the current stage, by this process's own clock."""

    name: str
    seconds: float
    now: Callable[[], float]
    floor: int = 0  # texts that are written even after the time is up
    expect: Callable[["StageTime"], None] | None = None  # is told when the first work is done
    done: int = 0  # texts that this process has written
    overdue: bool = False  # whether the floor took longer than the time

    def __post_init__(self) -> None:
        self.began = self.now()

    @property
    def used(self) -> float:
        return self.now() - self.began

    def left(self, later: float = 0.0) -> float:
        """The remaining seconds, after reserving the fraction `later` of the stage."""
        return (1 - later) * self.seconds - self.used

    def earlier(self, used: float) -> bool:
        """Whether less than `used` seconds have passed."""
        return self.used < used

    def goes_on(self, ahead: float = 0.0, floor: int | None = None) -> bool:
        """Whether to begin more work, which would end in `ahead` seconds."""
        if self.used + ahead < self.seconds:
            return True
        short = self.done < (self.floor if floor is None else floor)
        self.overdue = self.overdue or short
        return short

    def finish(self, texts: int) -> None:
        """Add to the number of texts written."""
        self.done += texts
        if self.expect is not None and self.done:
            self.expect(self)
            self.expect = None


@dataclass
class TrainingTime:
    """The number of training steps that fit into the time of training. Until it is fixed,
    `forecast` estimates it from the steps so far, and the learning rate is still rising."""

    stage: StageTime
    rounds: int  # number of rounds of training, each with the time of the stage
    fixed: int | None
    record: Callable[[int], None]  # records the fixed number
    times: list[float] = field(default_factory=list)  # seconds of each step so far

    def begin_step(self) -> None:
        self._began = self.stage.now()

    def end_step(self) -> None:
        self.times.append(self.stage.now() - self._began)

    def fix(self, steps: int) -> None:
        self.fixed = steps
        self.record(steps)

    def forecast(self, step: int, evaluation: float, every: int, most: int) -> int:
        """The number of steps that would fit, estimated from the timed steps when `step` are taken;
        `most` before that. An evaluation takes as long as `evaluation` steps; there is one after
        every `every` steps, and up to three more. The estimate uses the median step without the
        first, so neither a warm-up nor a short disturbance changes it."""
        if not self.times[1:]:
            return most
        a_step = max(1e-9, statistics.median(self.times[1:]))
        left = self.rounds * self.stage.seconds - self.stage.used - 3 * evaluation * a_step
        return step + int(left / (a_step * (1 + (evaluation / every if every else 0))))

    @property
    def enough(self) -> bool:
        """Whether there are enough timed steps."""
        return len(self.times) > TIMED_STEPS and self.stage.used >= TIMED * self.stage.seconds


class Budget:
    """The clock of a run, and the record of its decisions. All processes follow the main one's
    decisions; within a stage, each has its own clock, started at the same time."""

    def __init__(
        self,
        cfg: BudgetConfig,
        folder: Path,
        settings: str,
        begun: bool,
        ranks: Ranks,
        shares: dict[str, float],
        now: Callable[[], float] = time.monotonic,
        started: float = 0.0,
    ) -> None:
        """`shares` are the stages in order. The run began at `started`; `begun` is true if its
        folder already records the texts to train on."""
        self.cfg, self.path, self.ranks, self.now = cfg, folder / BUDGET, ranks, now
        self.shares, self.current = dict(shares), ""
        self._began = self._until = 0.0  # times of this stage
        self.writing: StageTime | None = None  # the last stage that wrote texts
        known = ranks.first(lambda: self._known(settings, begun))
        self.record: BudgetRecord | None = known
        self._end = now()
        if known is None and (minutes := cfg.minutes) is not None:
            left = ranks.first(lambda: max(0.0, 60 * minutes - cfg.spent - now() + started))
            self.record = BudgetRecord(settings, minutes, left, left)
        if self.record is not None:
            self._end += self.record.left
            done = "" if known is None else f", after what is decided in {self.path}"
            console.print(
                f"budget: {in_minutes(self.record.left)} of {self.record.minutes:g} minutes are "
                f"left{done}; {self.forecast()}"
            )

    def _known(self, settings: str, begun: bool) -> BudgetRecord | None:
        if not self.path.exists():
            return None
        known = read_record(BudgetRecord, self.path, "give another name=, or delete that folder")
        if begun or known.settings == settings:
            return known
        console.print(
            f"{self.path} was made for other settings, by a run that never began: the clock starts "
            "anew"
        )
        self.path.unlink()  # else it would be this run's record once it has begun
        return None

    @property
    def active(self) -> bool:
        """Whether the run has a budget."""
        return self.record is not None

    @property
    def left(self) -> float:
        """Seconds until the end of the run."""
        return self._end - self.now()

    def _seconds(self, name: str, left: float) -> float:
        """The time of a stage when it begins: its share of the time `left`, after subtracting the
        maximum share of measuring."""
        assert self.record is not None
        after = [*self.shares][[*self.shares].index(name) :]
        of_all = left / sum(self.shares[x] for x in after)
        others = sum(self.shares[x] for x in after if x != "measuring")
        rest = left - MEASURING * self.record.whole
        of_others = rest / others if others and name != "measuring" else 0.0
        return max(0.0, of_all, of_others) * self.shares[name]

    def stage(self, name: str, part: float = 1.0, floor: int = 0) -> StageTime | None:
        """The time of a stage that begins now or is running: the fraction `part` of it. None
        without a budget. All processes call this."""
        if self.record is None:
            return None
        if self.current != name:
            self.current, self._began = name, self.now()
            self._until = self._began + self._seconds(name, self.left)
        seconds = self.ranks.first(lambda: part * max(0.0, self._until - self.now()))
        return StageTime(name, seconds, self.now, floor)

    def training(self, number: int, rounds: int) -> TrainingTime | None:
        """The time of training, when its round `number` of `rounds` begins: the first round decides
        the number of steps of all rounds. None for later rounds, and without a budget."""
        name = "training" if rounds == 1 else f"training of round {number + 1}"
        if (stage := self.stage(name)) is None or self.record is None or number:
            return None
        return TrainingTime(stage, rounds, self.record.steps, self._fix)

    def texts_in_time(
        self,
        name: str,
        key: str,
        items: Sequence[T],
        work: Callable[[Sequence[T], StageTime | None], list[Any]],
        part: float = 1.0,
        floor: int = 0,
    ) -> list[Any]:
        """The texts that `work` writes for the items within the fraction `part` of the stage's
        time, for at least `floor` items. Their indices are recorded under `key`. If they are
        recorded already, `work` gets exactly these items and unlimited time; without a budget, all
        items."""
        if self.record is not None and (known := self.record.texts.get(key)) is not None:
            return work([items[place] for place in places_in(known)], None)
        stage = self.stage(name, part, min(floor, len(items)))
        if stage is None or self.record is None:
            return work(items, None)
        if not key.startswith(VALIDATION_KEY):  # these are trained on
            stage.expect = self._expect
        texts = work(items, stage)
        self.record.texts[key] = in_ranges(places_of(texts, items))
        self.writing = stage if stage.done else self.writing
        # if even the floor took longer than the time, the stages after it get as much more
        if self.ranks.any(stage.overdue):
            names = [*self.shares]
            after = sum(self.shares[x] for x in names[names.index(name) + 1 :])
            wanted = (self.now() - self._began) * after / self.shares[name]
            self._end = self.now() + max(self.left, self.ranks.first(lambda: wanted))
        self._write()
        return texts

    def say_texts(self, written: int, available: int, held_out: int, limit: int | None) -> None:
        """Print the number of training conversations, advice if there are few, and the forecast
        ends of the remaining stages. The run begins after this, so the record is written now."""
        if self.record is None:
            return
        if not self.ranks.first(self.path.exists):
            self._write()
        console.print(
            f"budget: {written:,} of {available:,} training conversations; {self.forecast()}"
        )
        if written >= POOR:
            return
        if written < available:
            remedy = "give another name= and a larger budget.minutes"  # to a run that goes on
            if self.writing is not None:
                remedy = f"give budget.minutes={self._useful(self.writing)}"
        else:
            reached = limit is not None and available + held_out > 0.8 * limit
            raised = f", or raise data.limit={limit}," if reached else ""
            remedy = f"all of them are used already, so give more data{raised}"
        console.print(
            f"that is fewer than {POOR} conversations: the figures will be poor; {remedy} for "
            "better ones"
        )

    def _useful(self, stage: StageTime) -> int:
        """The approximate number of minutes with which a run trains on `POOR` conversations, at the
        stage's speed so far and the same fraction of the time after loading."""
        assert self.record is not None
        loading = 60 * self.record.minutes - self.record.whole
        texts = POOR * stage.used / max(1, stage.done * self.ranks.workers)
        share = self.shares[stage.name] / sum(self.shares.values())
        minutes = (max(0.0, loading) + texts / share) / 60
        return max(ceil(self.record.minutes) + 1, 5 * ceil(minutes / 5))

    def _expect(self, stage: StageTime) -> None:
        """When the first texts are written, print a warning if even the floor will exceed the
        time."""
        texts = stage.floor * stage.used / stage.done
        if stage.name != "texts" or texts <= 1.1 * stage.seconds or self.record is None:
            return
        longer = self.left + (texts - stage.seconds) * sum(self.shares.values()) / TEXTS
        console.print(
            f"this machine is too slow for a useful draft in {self.record.minutes:g} minutes: "
            f"{stage.floor} conversations, the least that it trains on, take about "
            f"{in_minutes(texts)}, and the rest of the run {in_minutes(longer)}; give "
            f"budget.minutes={self._useful(stage)} for {POOR} conversations"
        )

    def _fix(self, steps: int) -> None:
        assert self.record is not None
        self.record.steps = steps
        self._write()

    def end_training(self) -> None:
        """Record that training has ended, and the time that remains for measuring."""
        if self.record is not None:
            self.current = [*self.shares][-2]
            self._write()
            console.print(f"budget: {self.forecast()}")

    def end_measuring(self, prompts: int, timed: int, tokens: int | None) -> None:
        """Record how many prompts were measured, how many of them were timed, and the limit of
        their responses if the time shortened it."""
        if self.record is not None:
            self.record.prompts, self.record.timed, self.record.tokens = prompts, timed, tokens
            self._write()

    def _write(self) -> None:
        assert self.record is not None
        self.record.left = max(0.0, self.left)
        written = asdict(self.record)
        self.ranks.first(lambda: write_json(self.path, written))

    def forecast(self) -> str:
        """The forecast end of each remaining stage."""
        names, passed, said = [*self.shares], 0.0, list[str]()
        for name in names[names.index(self.current) + 1 if self.current in names else 0 :]:
            passed += self._seconds(name, self.left - passed)
            said.append(f"{name} until {datetime.now() + timedelta(seconds=passed):%H:%M}")
        return ", ".join(said)


def shares_of_run(texts: bool, rounds: Sequence[bool], trains: bool) -> dict[str, float]:
    """The stages of a run and their shares of its time. `texts` is whether it writes texts before
    training; `rounds` has a flag for each round of training that writes its own."""
    parts, count = int(texts) + sum(rounds), len(rounds)
    shares = {"texts": TEXTS / parts} if texts else {}
    for number, writes in enumerate(rounds if trains else ()):
        suffix = f" of round {number + 1}" if count > 1 else ""
        if writes:
            shares[f"texts of round {number + 1}"] = TEXTS / parts
        shares[f"training{suffix}"] = TRAINING / count
    return shares | {"measuring": MEASURING}


def in_minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def places_of(texts: Sequence[Any], items: Sequence[Any]) -> list[int]:
    """The indices of the prompts that these texts answer, or of the texts themselves."""
    answered = {ids.tobytes() for text in texts for ids in (text.ids, text.ids[~text.mask])}
    return [place for place, item in enumerate(items) if item.ids.tobytes() in answered]


def in_ranges(places: Sequence[int]) -> str:
    """Ascending numbers as compact ranges: 0-3,7."""
    firsts = [x for n, x in enumerate(places) if n == 0 or places[n - 1] != x - 1]
    lasts = [x for n, x in enumerate(places) if n + 1 == len(places) or places[n + 1] != x + 1]
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(firsts, lasts, strict=True))


def places_in(ranges: str) -> list[int]:
    """The numbers in a text written by `in_ranges`."""
    ends = [[*map(int, part.split("-"))] for part in ranges.split(",") if part]
    return [place for end in ends for place in range(end[0], end[-1] + 1)]


def texts_of_run(path: Path) -> list[int] | None:
    """The indices of the conversations that a run trains on, from its record; None: all."""
    texts = {key: places_in(x) for key, x in read_record(BudgetRecord, path).texts.items()}
    read = texts.get("responses")
    if (stored := texts.get("hidden states")) is None:
        return read
    return stored if read is None else [read[place] for place in stored]

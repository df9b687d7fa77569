"""How much of the data fits a budget of minutes on this machine.

`timed` times for some seconds what the run will do: the target's passes and the drafter's
training steps. `fitted` then takes as many training conversations as leave the whole run within
its budget, of which the final evaluation gets a share. The pipeline keeps the plan in the run's
folder, so that a resumed run keeps its size.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from specdec.decoding.decode import decode
from specdec.errors import require
from specdec.target.base import Target

TOKENS, NEW = 48, 5  # last tokens of a prompt, and new ones, that are timed
SINGLE = 25  # new tokens of a row by itself: the final evaluation is made of such steps
STEPS = 3  # training steps that are timed, after one that warms up
SAID = 0.9  # share of answers.max_new_tokens that an answer takes up, from quickstarts
FORWARD = 1 / 3  # of a training step's time is its forward pass
POOR = 300  # training conversations below which a head has hardly begun to learn
AFTER = 30.0  # seconds for imports, costs, checkpoints, report and export
MEASURED = 0.4  # share of a budget above which the final evaluation takes fewer prompts
FEWEST = 12  # prompts of the final evaluation, however slow the machine


@dataclass
class BudgetConfig:
    """How long the whole run may take. `minutes` null sets no limit: all conversations are used.

    However slow the machine, `floor` training conversations are used; `data.limit` is the
    ceiling. The final evaluation takes up to `decode.prompts`. `spent` are seconds used up before
    `train.py` began, such as those of installation.
    """

    minutes: float | None = None
    floor: int = 150
    spent: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.minutes is None or self.minutes > 0,
            f"budget.minutes={self.minutes}: give a number above 0, or null for no limit",
        )
        require(self.floor >= 1, f"budget.floor={self.floor}: give 1 or more conversations")
        require(self.spent >= 0, f"budget.spent={self.spent}: give seconds, 0 or more")


@dataclass(frozen=True)
class Speeds:
    """Seconds that one unit of work takes on this machine."""

    read: float  # the target reads one token of a text
    answered: float  # the target writes one token of one row of a batch
    step: float  # the target writes one token of a single row: a plain decoding step
    trained: float  # one token of a training step


@dataclass(frozen=True)
class Work:
    """What the run will do with each conversation, and whatever their number."""

    epochs: int
    new: int  # tokens of an answer that the target writes; 0: the data have answers
    kept: bool  # whether features are stored while the target answers, and not read again
    prompts: int  # of the final evaluation
    decoded: int  # tokens that it writes for each, plainly and speculatively together
    learned: int  # tokens that it writes for other prompts, whatever their number
    watched: float  # evaluations of the held-out side for each token trained on


@dataclass(frozen=True)
class Plan:
    """The size of a run and the seconds that each of its stages should take."""

    conversations: int  # of the training side
    available: int
    prompts: int  # of the final evaluation
    answering: float
    reading: float
    training: float
    measuring: float
    speeds: Speeds

    @property
    def seconds(self) -> float:
        return self.answering + self.reading + self.training + self.measuring

    def __str__(self) -> str:
        speeds = self.speeds
        stages = {
            "answers": self.answering,
            "features": self.reading,
            "training": self.training,
            "measuring": self.measuring,
        }
        parts = ", ".join(f"{name} {_minutes(s)}" for name, s in stages.items() if s >= 1)
        answers = f"writes {1 / speeds.answered:,.0f} tokens/s, " if self.answering else ""
        return (
            f"this machine {answers}reads {1 / speeds.read:,.0f} and trains on "
            f"{1 / speeds.trained:,.0f} tokens/s\n"
            f"plan: {self.conversations:,} of {self.available:,} training conversations, about "
            f"{_minutes(self.seconds)} ({parts}; {self.prompts} prompts are measured)"
        )


def fitted(
    seconds: float | None,
    floor: int,
    speeds: Speeds,
    work: Work,
    train: Sequence[int],
    held_out: Sequence[int],
) -> Plan:
    """The largest plan of at most `seconds` (None: no limit), with `floor` conversations at least.

    `train` and `held_out` are the tokens that each conversation has before the target answers it,
    in the order in which they are taken. The held-out side is always taken whole.
    """
    answer = SAID * work.new

    def answering(texts: int, tokens: int) -> float:
        return texts * work.new * speeds.answered + tokens * speeds.read if work.new else 0.0

    def reading(texts: int, tokens: int) -> float:
        return 0.0 if work.kept else (tokens + texts * answer) * speeds.read

    watching = (sum(held_out) + len(held_out) * answer) * speeds.trained * FORWARD

    def measuring(prompts: int) -> float:
        return (prompts * work.decoded + work.learned) * speeds.step + AFTER

    prompts = work.prompts
    while seconds is not None and prompts > FEWEST and measuring(prompts) > MEASURED * seconds:
        prompts -= 1

    def plan(n: int, tokens: int) -> Plan:
        texts, read = n + len(held_out), tokens + sum(held_out)
        trained = work.epochs * (tokens + n * answer)
        evaluations = 1 + trained * work.watched if work.epochs else 0
        return Plan(
            conversations=n,
            available=len(train),
            prompts=prompts,
            answering=answering(texts, read),
            reading=reading(texts, read),
            training=trained * speeds.trained + evaluations * watching,
            measuring=measuring(prompts),
            speeds=speeds,
        )

    plans = [plan(n, tokens) for n, tokens in enumerate(accumulate(train), 1)]
    least = plans[min(floor, len(plans)) - 1]
    fitting = [p for p in plans if seconds is None or p.seconds <= seconds]
    return max([least, *fitting], key=lambda p: p.conversations)


def timed(
    target: Target,
    prompts: Sequence[Sequence[int]],
    batch: int,
    train_step: Callable[[], int],
) -> Speeds:
    """Time the target on prompts such as it will answer, `batch` rows at a time, and `train_step`,
    which takes one training step and returns how many tokens it read."""
    rows = [list(p[-TOKENS:]) for p in prompts[:batch]]
    many = decode(target, rows, max_new_tokens=NEW, eos=())
    one = decode(target, rows[:1], max_new_tokens=SINGLE, eos=())[0]
    last = max(many, key=lambda g: g.seconds)
    times = []
    for turn in range(1 + STEPS):
        _synchronize(target.device)
        started = time.perf_counter()
        tokens = train_step()
        _synchronize(target.device)
        if turn:
            times.append((time.perf_counter() - started) / tokens)
    return Speeds(
        read=last.prefill_seconds / len(rows) / max(map(len, rows)),
        answered=last.seconds / (NEW - 1) / len(rows),
        step=one.seconds / (SINGLE - 1),
        trained=statistics.median(times),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"

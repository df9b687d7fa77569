"""How much of the data fits a budget of minutes: the arithmetic of a plan.

`fitted` sets time aside for the final evaluation and takes as many training conversations as fit
into the rest of the budget. `train.budget_timing` measures the speeds that it reckons with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdec.errors import require, require_within
from train.initialisation import stride

SAID = 0.9  # share of responses.max_new_tokens that answers took up in quickstarts
FORWARD = 1 / 3  # share of a training step that a forward pass takes, or solving for a start
KEEPING = 1.15  # answering takes this many times as long if hidden states are kept (docs/notebook)
BESIDE = 1.3  # a run's steps take this many times as long as the timed ones (1.0 to 1.35 seen)
IN_TURN = 1.15  # the same for the final evaluation, where plain and drafted decoding take turns
COUNTING = 2.8  # a token of a prompt not timed costs as many times one of a plain response
ALONG = 1.7  # reading a text and drafting at each token takes as many times only reading it
AFTER = 30.0  # seconds for imports, measuring costs, checkpoints, report and export
COUNTED = 0.2  # share of the time that counting may take before it drops prompts
MEASURED = 0.4  # share of the time that the final evaluation may take before it drops prompts
FEWEST = 12  # prompts of the final evaluation, however slow the machine


@dataclass
class BudgetConfig:
    """How long the whole run may take. `minutes` null: no limit. At least `floor` training
    conversations are used, however slow the machine, and at most `data.limit`; the final evaluation
    takes up to `decode.prompts` prompts. `spent` is the number of seconds used before `train.py`
    began, for example by the installation."""

    minutes: float | None = None
    floor: int = 150
    spent: float = 0.0

    def __post_init__(self) -> None:
        require_within("budget", self, floor=1, spent=0)
        require(
            self.minutes is None or self.minutes > 0,
            f"budget.minutes={self.minutes}: give a number above 0, or null for no limit",
        )


@dataclass(frozen=True)
class Speeds:
    """Seconds that one unit of work takes on this machine."""

    read: float  # the target reads one token of a text
    generated: float  # the target writes one token of one row of a batch
    step: float  # the target writes one token of a single row: a plain decoding step
    trained: float  # one token of a training step


@dataclass(frozen=True)
class Work:
    """The work of a run: for each conversation, and independently of their number."""

    epochs: int
    new: int  # the most tokens that the target writes per response; 0: the data has the responses
    kept: bool  # whether hidden states are stored while the target answers, without another pass
    prompts: int  # of the final evaluation
    timed: int  # how many of them are timed, one at a time
    decoded: int  # tokens written for each prompt, with and without drafts, in total
    learned: int  # single-row steps spent on other prompts, however many prompts are measured
    watched: float  # held-out evaluations per training token
    looks: int = 0  # further ones
    repeats: int = 1  # how often a prompt is timed
    read: float = 0.0  # tokens that the target reads for each prompt of the final evaluation
    read_once: float = 0.0  # tokens that it reads there for prompts of the calibration
    closed_form_initialisation: bool = False  # whether the start is solved for


@dataclass(frozen=True)
class Plan:
    """The size of a run and the seconds that each of its stages should take."""

    conversations: int  # of the training side
    available: int
    generating: float
    reading: float
    training: float
    measuring: float
    speeds: Speeds
    prompts: int | None = None  # of the final evaluation; None: all that are configured
    settings: str = ""  # a hash of those that it was made for; an earlier version wrote none

    @property
    def seconds(self) -> float:
        return self.generating + self.reading + self.training + self.measuring

    def __str__(self) -> str:
        stages = {"responses": self.generating, "hidden_states": self.reading}
        stages |= {"training": self.training, "measuring": self.measuring}
        parts = ", ".join(f"{name} {minutes(s)}" for name, s in stages.items() if s >= 1)
        writes = f"writes {1 / self.speeds.generated:,.0f} tokens/s, " if self.generating else ""
        return (
            f"this machine {writes}reads {1 / self.speeds.read:,.0f} and trains on "
            f"{1 / self.speeds.trained:,.0f} tokens/s\n"
            f"plan: {self.conversations:,} of {self.available:,} training conversations, about "
            f"{minutes(self.seconds)} ({parts}; "
            f"{self.prompts} {'prompt is' if self.prompts == 1 else 'prompts are'} measured)"
        )


def fitted(
    seconds: float,
    floor: int,
    speeds: Speeds,
    work: Work,
    train: Sequence[int],
    held_out: Sequence[int],
) -> Plan:
    """The largest plan that takes at most `seconds`, but never one of fewer than `floor`
    conversations. `train` and `held_out` count the tokens of each conversation before the target
    answers it, in the order in which they are taken. The held-out side is always taken whole."""
    prompts = work.prompts
    while prompts > max(FEWEST, work.timed) and counting(prompts, speeds, work) > COUNTED * seconds:
        prompts -= 1
    few = range(FEWEST + 1, work.timed + 1)
    while prompts in few and measuring(prompts, speeds, work) > MEASURED * seconds:
        prompts -= 1
    held = len(held_out), sum(held_out)
    plans = [
        of_size((n, tokens), held, speeds, work, prompts, len(train))
        for n, tokens in enumerate(accumulate(train), 1)
    ]
    least = plans[min(floor, len(plans)) - 1]
    fitting = [p for p in plans if p.seconds <= seconds]
    return max([least, *fitting], key=lambda p: p.conversations)


def of_size(
    train: tuple[int, int],
    held_out: tuple[int, int],
    speeds: Speeds,
    work: Work,
    prompts: int,
    available: int,
) -> Plan:
    """The plan for so many conversations of so many tokens, before the target answers them, on each
    side, of which `prompts` are measured. `available` is the number of training conversations."""
    (n, tokens), (held, of_held) = train, held_out
    response = SAID * work.new
    texts, read = n + held, tokens + of_held
    generating = texts * work.new * speeds.generated + read * speeds.read if work.new else 0.0
    generating *= KEEPING if work.kept else 1.0
    watching = (of_held + held * response) * speeds.trained * FORWARD
    length = tokens + n * response
    solved = length / stride(int(length)) if work.closed_form_initialisation else 0
    trained = work.epochs * length
    evaluations = 1 + work.looks + trained * work.watched if work.epochs else 0
    return Plan(
        conversations=n,
        available=available,
        prompts=prompts,
        generating=generating,
        reading=0.0 if work.kept else (read + texts * response) * speeds.read,
        training=(trained * BESIDE + solved * FORWARD) * speeds.trained + evaluations * watching,
        measuring=measuring(prompts, speeds, work),
        speeds=speeds,
    )


def measuring(prompts: int, speeds: Speeds, work: Work) -> float:
    """Seconds of the final evaluation: some prompts are timed, and the others counted."""
    timed = min(prompts, work.timed)
    tokens = work.learned + timed * work.decoded * work.repeats
    reading = (work.read_once + timed * work.read) * speeds.read
    return AFTER + reading + tokens * speeds.step * IN_TURN + counting(prompts, speeds, work)


def counting(prompts: int, speeds: Speeds, work: Work) -> float:
    """Seconds of the final evaluation for the prompts that are not timed."""
    each = work.decoded * speeds.generated * COUNTING + work.read * speeds.read
    return max(0, prompts - work.timed) * each


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"

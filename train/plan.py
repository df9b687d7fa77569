"""How much of the data fits a budget of minutes on this machine.

`timed` times the target's passes and the drafter's training steps for a few seconds. `fitted` sets
time aside for the final evaluation and takes as many training conversations as fit into the rest of
the budget. The plan is kept in the run's folder, so that a resumed run keeps its size.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from specdec.decoding.decode import decode
from specdec.drafters.capabilities import Solves
from specdec.drafters.trainable import Trainable
from specdec.errors import require, require_within
from specdec.files import read_record, write_json
from specdec.forcing.teacher import TeacherForcing
from specdec.measure import costs
from specdec.measure.confidence import AT_ONCE, CALIBRATING
from specdec.measure.strategy import LEARNING, steps_of_a_choice
from specdec.progress import console
from specdec.targets.base import Target
from train import optim
from train.data.packing import pack
from train.data.template import Document, Prompt
from train.features.source import Online
from train.stages import StageConfig, starting
from train.start import stride

if TYPE_CHECKING:
    from train.config import Config
    from train.job import Job

# tokens of each timed text if the target answers none, and new tokens timed after a batch of them
TOKENS, NEW = 48, 5
SINGLE = 25  # new tokens timed on a single row, as the final evaluation decodes
STEPS = 3  # training steps that are timed, after a warm-up step
SAID = 0.9  # share of answers.max_new_tokens that answers took up in quickstarts
FORWARD = 1 / 3  # share of a training step that a forward pass takes, or solving for a start
KEEPING = 1.15  # answering takes this many times as long if features are kept (docs/notebook)
BESIDE = 1.3  # a run's steps take this many times as long as the timed ones (1.0 to 1.35 seen)
IN_TURN = 1.15  # the same for the final evaluation, where plain and drafted decoding take turns
POOR = 300  # with fewer training conversations, a head has hardly begun to learn
AFTER = 30.0  # seconds for imports, measuring costs, checkpoints, report and export
PLANNED = 0.92  # share of the time left that is planned: stages overran their plan by up to 5 %
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
    answered: float  # the target writes one token of one row of a batch
    step: float  # the target writes one token of a single row: a plain decoding step
    trained: float  # one token of a training step


@dataclass(frozen=True)
class Work:
    """The work of a run: for each conversation, and independently of their number."""

    epochs: int
    new: int  # the most tokens that the target writes per answer; 0: the data has the answers
    kept: bool  # whether features are stored while the target answers, without another pass
    prompts: int  # of the final evaluation
    decoded: int  # tokens written for each of them, with and without drafts, in total
    learned: int  # single-row steps spent on other prompts, however many prompts are measured
    watched: float  # held-out evaluations per training token
    regresses: bool = False  # whether the start is solved for


@dataclass(frozen=True)
class Plan:
    """The size of a run and the seconds that each of its stages should take."""

    conversations: int  # of the training side
    available: int
    answering: float
    reading: float
    training: float
    measuring: float
    speeds: Speeds
    prompts: int | None = None  # of the final evaluation; None: all that are configured

    @property
    def seconds(self) -> float:
        return self.answering + self.reading + self.training + self.measuring

    def __str__(self) -> str:
        stages = {"answers": self.answering, "features": self.reading}
        stages |= {"training": self.training, "measuring": self.measuring}
        parts = ", ".join(f"{name} {_minutes(s)}" for name, s in stages.items() if s >= 1)
        writes = f"writes {1 / self.speeds.answered:,.0f} tokens/s, " if self.answering else ""
        return (
            f"this machine {writes}reads {1 / self.speeds.read:,.0f} and trains on "
            f"{1 / self.speeds.trained:,.0f} tokens/s\n"
            f"plan: {self.conversations:,} of {self.available:,} training conversations, about "
            f"{_minutes(self.seconds)} ({parts}; "
            f"{self.prompts} {'prompt is' if self.prompts == 1 else 'prompts are'} measured)"
        )


def planned(
    job: "Job", train: Sequence[Document | Prompt], held_out: Sequence[Document | Prompt]
) -> tuple[int, int]:
    """The numbers of training conversations and of final prompts that fit the budget (all, if there
    is no budget). Prints the numbers and the time that each stage should take. A resumed run keeps
    to the numbers in its plan.json."""
    cfg, path = job.cfg, job.folder / "plan.json"
    if path.exists():
        kept = read_record(Plan, path, "give another name=, or delete that folder")
        prompts = min(kept.prompts or cfg.decode.prompts, cfg.decode.prompts)
        console.print(
            f"{path}: {kept.conversations:,} training conversations, as planned before, and "
            f"{prompts} measured prompts"
        )
        return kept.conversations, prompts
    if cfg.budget.minutes is None:
        return len(train), cfg.decode.prompts
    console.print(f"budget: {cfg.budget.minutes:g} minutes; timing this machine for a few seconds")
    answering, target = cfg.data.answers == "target", job.target.whole()
    batch = cfg.answers.batch if answering else cfg.loop.rows
    rehearsed, regresses = rehearsal(cfg, target, train, job.accelerator)
    context = TOKENS  # a text that is being answered has on average half an answer so far
    if answering:
        asked = statistics.mean(len(t.ids) for t in train)
        context = round(asked + SAID * cfg.answers.max_new_tokens / 2)
    speeds = timed(target, [t.ids.tolist() for t in train], batch, rehearsed, context)
    drafted = cfg.decode.max_new_tokens * len(cfg.decode.temperatures)
    calibrating = min(CALIBRATING, max(0, len(held_out) - cfg.decode.prompts))
    gamma = cfg.decode.gamma or cfg.drafter.depth
    rows = cfg.loop.rows * cfg.loop.accumulate * job.accelerator.num_processes
    step = rows * cfg.data.max_length  # tokens, at most
    work = Work(
        epochs=cfg.loop.epochs * cfg.rounds.count if cfg.trains else 0,
        new=cfg.answers.max_new_tokens if answering else 0,
        kept=answering and cfg.stores_features,
        prompts=min(cfg.decode.prompts, len(held_out)),
        decoded=(2 + cfg.decode.fastest + (cfg.also is not None)) * drafted * cfg.decode.repeats,
        # for the oracle, the calibration and the choice of a shape
        learned=(LEARNING + -(-calibrating // AT_ONCE)) * drafted
        + cfg.decode.fastest * steps_of_a_choice(cfg.decode, gamma) * len(cfg.decode.temperatures),
        watched=1 / (cfg.loop.eval_every * step) if cfg.loop.eval_every else 0.0,
        regresses=regresses and cfg.stage.draft is None,
    )
    used = cfg.budget.spent + time.monotonic() - job.started
    left = PLANNED * (60 * cfg.budget.minutes - used)
    lengths = [[len(t.ids) for t in side] for side in (train, held_out)]
    plan = fitted(left, cfg.budget.floor, speeds, work, *lengths)
    plan = broadcast_object_list([plan])[0]  # every process uses the first one's plan
    console.print(str(plan))
    if plan.seconds > (room := max(0.0, left / PLANNED)):
        measuring = plan.measuring > plan.seconds / 2
        lower = "decode.max_new_tokens or decode.prompts" if measuring else "budget.floor"
        console.print(
            f"that is more than the {_minutes(room)} left of budget.minutes="
            f"{cfg.budget.minutes:g}{', most of it for measuring' * measuring}: give more minutes, "
            f"or lower {lower}"
        )
    if plan.conversations < POOR:
        console.print(
            f"that is fewer than {POOR} conversations: the figures will be poor; "
            f"{_for_more(plan, cfg.data.limit)} for better ones"
        )
    if job.main:
        write_json(path, asdict(plan))
    return plan.conversations, plan.prompts


def _for_more(plan: Plan, limit: int | None) -> str:
    """What to do to train on more conversations."""
    if plan.conversations < plan.available:
        return "give a larger budget.minutes"
    raised = f", or raise data.limit={limit}," if limit is not None else ""
    return f"all of them are used already, so give more data{raised}"


def rehearsal(
    cfg: "Config", target: Target, texts: Sequence[Document | Prompt], accelerator: Accelerator
) -> tuple[Callable[[], int], bool]:
    """A function that does a training step of a throwaway draft, on texts as long as the run's, and
    returns the number of tokens read; and whether such a draft `regresses`."""
    documents = []
    if not cfg.trains:
        return lambda: 1, False
    for text in texts[: 8 * cfg.loop.rows]:
        if isinstance(text, Prompt):  # its answer is not written yet: repeat the prompt instead
            ids = np.resize(text.ids, len(text.ids) + cfg.answers.max_new_tokens)
            text = Document(text.id, ids, np.arange(len(ids)) >= len(text.ids))
        documents.append(text)
    drafter = starting(StageConfig(), cfg.drafter, target, documents, 0)
    rows = pack(documents, cfg.data.max_length)[: cfg.loop.rows]
    batch = Online(target, drafter.needs, cfg.sampler, rows).batch(range(len(rows)))
    reference = None if cfg.objective.reference is None else drafter  # as costly as the real one
    forcing = TeacherForcing(drafter, target, cfg.sampler, cfg.objective, reference)
    assert isinstance(drafter, Trainable)
    optimizers = optim.build(forcing, cfg.optim, drafter.sizes, drafter.learning_rates)

    def step() -> int:
        anchors = [forcing.anchors(r.mask, r.document, r.position, 0) for r in rows]
        with accelerator.autocast():
            loss, _ = forcing(batch, anchors)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), cfg.optim.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return sum(len(r.ids) for r in rows)

    return step, isinstance(drafter, Solves) and drafter.regresses


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
    answer = SAID * work.new
    step = speeds.step * IN_TURN
    fixed, each = work.learned * step + AFTER, work.decoded * step
    prompts = work.prompts
    while prompts > FEWEST and fixed + prompts * each > MEASURED * seconds:
        prompts -= 1
    watching = (sum(held_out) + len(held_out) * answer) * speeds.trained * FORWARD

    def plan(n: int, tokens: int) -> Plan:
        texts, read = n + len(held_out), tokens + sum(held_out)
        answering = texts * work.new * speeds.answered + read * speeds.read if work.new else 0.0
        answering *= KEEPING if work.kept else 1.0
        length = tokens + n * answer
        solved = length / stride(int(length)) if work.regresses else 0
        trained = work.epochs * length
        evaluations = 1 + trained * work.watched if work.epochs else 0
        return Plan(
            conversations=n,
            available=len(train),
            prompts=prompts,
            answering=answering,
            reading=0.0 if work.kept else (read + texts * answer) * speeds.read,
            training=(trained * BESIDE + solved * FORWARD) * speeds.trained
            + evaluations * watching,
            measuring=fixed + prompts * each,
            speeds=speeds,
        )

    plans = [plan(n, tokens) for n, tokens in enumerate(accumulate(train), 1)]
    least = plans[min(floor, len(plans)) - 1]
    fitting = [p for p in plans if p.seconds <= seconds]
    return max([least, *fitting], key=lambda p: p.conversations)


def timed(
    target: Target,
    prompts: Sequence[Sequence[int]],
    batch: int,
    train_step: Callable[[], int],
    context: int = TOKENS,
) -> Speeds:
    """Time the target on prompts that are cut or repeated to `context` tokens, in one batch of
    `batch` rows and on a single row; and time `train_step`, which does one training step and
    returns how many tokens it read."""
    rows = [np.resize(p, context).tolist() for p in prompts[:batch]]
    many = decode(target, rows, max_new_tokens=NEW, eos=())
    one = decode(target, rows[:1], max_new_tokens=SINGLE, eos=())[0]
    last = max(many, key=lambda g: g.seconds)
    steps = [costs.timed(train_step, target.device) for _ in range(1 + STEPS)]
    times = [seconds / tokens for seconds, tokens in steps]
    return Speeds(
        read=last.prefill_seconds / len(rows) / max(map(len, rows)),
        answered=last.seconds / (NEW - 1) / len(rows),
        step=one.seconds / (SINGLE - 1),
        trained=statistics.median(times[1:]),
    )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"

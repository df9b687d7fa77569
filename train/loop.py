"""The training loop: one flat function, from top to bottom.

Rows are packed texts. A step reads `rows · accumulate · processes` of them; dividing them into
micro-batches and processes changes nothing but rounding.
"""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from specdec import signals
from specdec.context import TrainingMoment
from specdec.drafters.base import Trainable
from specdec.errors import Unreadable, UserError, require, require_known, require_within
from specdec.files import recover
from specdec.forcing.anchors import divisor
from specdec.forcing.teacher import TEXT_STATISTICS, TeacherForcing
from specdec.formats import draft_checkpoint
from specdec.measure.results import Training
from specdec.progress import tell
from specdec.ranks import Ranks
from specdec.signals import Terminated, checkpoint_first, no_checkpoint_first
from specdec.targets.parts import TargetParts
from train import optim, training_checkpoint
from train.accelerated import ranks_of
from train.budget import FORWARD, TrainingTime
from train.held_out import TerminatedTogether, evaluate, forecast, looks
from train.hidden_states.batches import BatchSource
from train.optim import OptimConfig
from train.tracking import Tracker
from train.training_checkpoint import Best, State

PRECISIONS = ("auto", "bf16", "no")
SELECT_BY = ("tau_greedy", "tau_sampled", "alpha_sampled", "alpha_greedy")


@dataclass
class LoopConfig:
    """The length of training, its batch sizes, and when to evaluate. If `eval_every` is more than a
    tenth of the steps, drafts are also evaluated after a tenth and a fifth of them, for an early
    forecast of τ."""

    epochs: int = 1  # passes over the training data, in every round of rounds.count
    # tokens after which training ends, even within an epoch; the learning rate decays to fit; null:
    # no limit
    max_tokens: int | None = None
    rows: int = 1  # packed rows of data.max_length tokens per micro-batch
    accumulate: int = 1  # micro-batches per step and process
    eval_every: int = 100  # steps between evaluations; 0: only at the end
    save_every: int = 100  # steps between checkpoints; 0: only at the end
    patience: int | None = None  # evaluations without a better draft that end training; null: never
    # held-out figure that selects the best draft: tau_greedy, tau_sampled, alpha_sampled or
    # alpha_greedy
    select_by: str = "tau_greedy"
    precision: str = "auto"  # bf16; no: float32; auto: bf16 if the target is
    log_every: int = 5  # steps between log lines
    seed: int = 0  # seed of the initialisation and of all random draws in training

    def __post_init__(self) -> None:
        ones = dict.fromkeys(("epochs", "rows", "accumulate", "log_every", "max_tokens"), 1)
        require_within("loop", self, **ones, patience=1, eval_every=0, save_every=0)
        require_within("loop", self, seed=(0, 2**32 - 1))
        require_known("loop", self, precision=PRECISIONS, select_by=SELECT_BY)


class Diverged(UserError):
    """A loss or gradient that is not finite, raised before anything is saved."""


@dataclass(kw_only=True)
class StepRecord:
    """Training figures. The lists, by depth, are means since the last record; `lr` and
    `gradient_norm` are those of the last step. The speed, and the share of time spent `waiting` for
    stored hidden states, are those of the whole run so far."""

    loss: list[float]
    lr: float
    gradient_norm: float
    tokens_per_second: float
    waiting: float

    @property
    def shown(self) -> str:
        """The figures by depth for the progress bar, besides the loss."""
        raise NotImplementedError

    def __str__(self) -> str:
        waiting = f"  waiting {self.waiting:.1%}" if self.waiting >= 0.001 else ""
        speed = f"{self.tokens_per_second:,.0f} tokens/s{waiting}"
        return f"loss {self.loss[0]:.2f}  {self.shown}  {speed}"


@dataclass(kw_only=True)
class TrainRecord(StepRecord):
    """Training figures, with α."""

    sampled: list[float]
    greedy_draft: list[float]
    greedy: list[float]

    @property
    def shown(self) -> str:
        return f"α {' '.join(f'{a:.3f}' for a in self.sampled)}"


@dataclass(kw_only=True)
class TextRecord(StepRecord):
    """Training figures on text that the target has not read: no α, but q of the text's tokens."""

    text_probability: list[float]

    @property
    def shown(self) -> str:
        return f"q(text) {' '.join(f'{q:.3f}' for q in self.text_probability)}"


@dataclass(frozen=True)
class UnreadStep:
    """A step whose loss and gradient are still on the device and were not read by the host."""

    number: int
    rows: Sequence[int]  # rows that all processes read together
    micro_batches: Sequence[Sequence[int]]  # the rows of each one of this process
    losses: Sequence[Tensor]  # their losses, scalars in float32
    norm: Tensor  # norm of the gradient, a scalar


@dataclass
class Learner:
    """A draft in training: the model as accelerate prepared it, its optimisers, and the progress of
    its run. A continued run skips the steps that its checkpoint has taken."""

    forcing: TeacherForcing
    model: nn.Module
    parameters: Sequence[nn.Parameter]  # trained ones
    optimizers: Sequence[torch.optim.Optimizer]
    cfg: LoopConfig  # its epochs are those of the whole run
    schedule: OptimConfig
    held_out: BatchSource
    accelerator: Accelerator
    ranks: Ranks  # the same processes
    tracker: Tracker
    state: State
    folder: Path  # the run's folder
    parts: TargetParts  # the target's parts
    portion: int  # rows that a step reads
    statistics: Tensor  # this process's sums over anchors since the last record, by depth
    unread: list[UnreadStep] = field(default_factory=list)
    stopped: bool = False  # training stopped early, because nothing got better
    step: int = 0  # steps taken or passed over
    steps: int = 0  # planned for the run, as known by now
    saved: int = 0  # the step of the newest checkpoint
    passed: int = 0  # tokens in the rows that were passed over
    outlook: str = ""  # the last held-out τ and the forecast for the end, in a few words
    time: TrainingTime | None = None  # time for the steps; None: their number is in the settings

    def look_ahead(self) -> float | None:
        """Forecast held-out τ at T = 0 at the end of training (None without a forecast), and set
        `outlook` to it."""
        evaluated = self.state.evaluated
        expected = forecast(evaluated, self.steps, self.state.gamma)
        self.outlook = f"  τ {evaluated[-1][1]:.2f}" if evaluated else ""
        self.outlook += f" → {expected:.2f}" if expected else ""
        return expected

    @property
    def ended(self) -> bool:
        """Whether training is over, though there may be further rounds."""
        return self.stopped or 0 < self.steps <= self.step

    def read_steps(self) -> tuple[Tensor, float]:
        """The sums [K, S] over the anchors of all processes since the last record, and the norm of
        the last step's gradient. All processes call this. Only here does the host wait for the
        results of steps. Raises `Diverged` if the loss or the gradient of an unread step is not
        finite: no draft or checkpoint is written before that."""
        unread, self.unread = self.unread, []
        sums_KS = self.accelerator.reduce(self.statistics, "sum")
        scalars = [x for step in unread for x in (*step.losses, step.norm)]
        read = torch.cat([torch.stack(scalars), sums_KS.flatten()]).cpu()
        values = iter(read.tolist())
        for step in unread:
            for rows in step.micro_batches:
                _require_finite(next(values), "loss", step.number, rows)
            _require_finite(norm := next(values), "gradient", step.number, step.rows)
        return read[len(scalars) :].view(sums_KS.shape), norm

    def round_ended(self, part: float) -> bool:
        """Whether training has taken the steps of its rounds so far, the fraction `part` of all
        steps that fit its time."""
        fixed = self.time is not None and self.time.fixed is not None
        return fixed and self.step >= math.ceil(part * self.steps)

    def fit_steps(self, most: int) -> bool:
        """Set `steps` to the number that fits into the time of training, at most `most`. Returns
        whether it has just been fixed; until then it is a forecast, during the warm-up of the
        learning rate. All processes call this before a step."""
        time = self.time
        assert time is not None
        if time.fixed is not None:
            self.steps = min(most, time.fixed)
            return False
        evaluation = FORWARD * len(self.held_out.rows) / self.portion

        def steps_by_now() -> tuple[int, bool]:
            fixed = time.enough or most == self.step + 1
            least = self.step + (1 if fixed else 2)  # a step is the last only when that is fixed
            fitting = time.forecast(self.step, evaluation, self.cfg.eval_every, most)
            return min(most, max(least, fitting)), fixed

        self.steps, fixed = self.ranks.first(steps_by_now)
        if fixed:
            time.fix(self.steps)
        return fixed

    def write_round_draft(self, folder: Path) -> None:
        """Write the current draft to a folder, unless it was written there before. All processes
        call this. Raises UserError if it was written before and is missing."""
        if self.ranks.first(folder.exists):
            return
        require(
            self.step >= self.state.step,
            f"{folder} is missing (this run wrote it earlier): delete {self.folder} and train "
            "again",
        )
        self.save_draft(folder)
        self.accelerator.wait_for_everyone()

    def save_checkpoint(self) -> None:
        """Write a checkpoint of this state. All processes call this."""
        if self.unread:
            self.read_steps()
        self.state.metrics = self.tracker.checksum()
        self.state.statistics = self.accelerator.reduce(self.statistics, "sum").tolist()
        main = self.accelerator.is_main_process
        training_checkpoint.save(
            self.folder / "checkpoints", self.model, self.optimizers, self.state, main
        )
        self.saved = self.state.step
        self.accelerator.wait_for_everyone()

    def save_draft(self, folder: Path, notes: dict[str, Any] | None = None) -> None:
        """Write the current draft to a folder. All processes call this."""
        if self.unread:
            self.read_steps()
        whole, prefix = training_checkpoint.weights(self.model), "drafter."
        if self.accelerator.is_main_process:
            weights = {n.removeprefix(prefix): x for n, x in whole.items() if n.startswith(prefix)}
            draft_checkpoint.write_draft(folder, self.forcing.drafter, self.parts, weights, notes)


def prepare_learner(
    forcing: TeacherForcing,
    parts: TargetParts,
    cfg: LoopConfig,
    schedule: OptimConfig,
    held_out: BatchSource,
    folder: Path,
    run: str,
    accelerator: Accelerator,
    tracker: Tracker,
    gamma: int,
) -> Learner:
    """A draft at the start of its training or, if the run's folder holds a checkpoint, in the state
    of the newest one: exact in float32 on the same number of processes, and up to rounding on
    another. `cfg.epochs` counts those of the whole run, over which the learning rate is scheduled;
    `run` is the run's identity. Held-out τ is for chains of `gamma` tokens or, in a continued run,
    of as many as when it began. Raises UserError if no checkpoint can be used, or if the best draft
    is lost."""
    drafter = forcing.drafter
    assert isinstance(drafter, Trainable)
    built = optim.build(forcing, schedule, drafter.sizes, drafter.learning_rates)
    model, *optimizers = accelerator.prepare(forcing, *built)
    ranks = ranks_of(accelerator)
    restored = training_checkpoint.load(folder / "checkpoints", model, optimizers, ranks, run)
    state = restored or State()
    state.run = run
    if state.evaluated:  # else the τ of two steps could not be compared
        state.gamma = state.gamma or drafter.depth
    else:
        state.gamma = gamma
    if state.gamma != gamma:
        tell(
            f"held-out τ is still that of chains of {state.gamma}, as when this run began, so that "
            f"drafts stay comparable; the measurement drafts chains of {gamma}"
        )
    portion = cfg.rows * cfg.accumulate * accelerator.num_processes
    state.rows = state.rows or state.step * portion  # older checkpoints count no rows
    ranks.first(lambda: _require_best(folder, state, ended=False))
    tracker.rewind(state.step, state.metrics)
    statistics = torch.zeros(forcing.depth, len(forcing.statistics), device=accelerator.device)
    if state.statistics and accelerator.is_main_process:
        statistics += torch.tensor(state.statistics, device=accelerator.device)
    stopped = cfg.patience is not None and state.waited >= cfg.patience
    return Learner(
        forcing=forcing,
        model=model,
        parameters=[p for p in model.parameters() if p.requires_grad],
        optimizers=optimizers,
        cfg=cfg,
        schedule=schedule,
        held_out=held_out,
        accelerator=accelerator,
        ranks=ranks,
        tracker=tracker,
        state=state,
        folder=folder,
        parts=parts,
        portion=portion,
        statistics=statistics,
        stopped=stopped,
        saved=state.step,
    )


@checkpoint_first()
def train(learner: Learner, source: BatchSource, epochs: range, progress: Progress) -> None:
    """Train for these of the run's epochs on the rows of a source, or for as many steps of them as
    fit the learner's time.

    The best draft goes to the run's `best`, checkpoints to its `checkpoints`. Raises `Diverged` if
    the loss or the gradient of a step is not finite, when the step's figures are read, and
    UserError if the rows do not fill a step, or if the checkpoint's steps read other rows; saved
    files are kept. On SIGTERM in any process, all write a checkpoint after the step and raise
    `Terminated`.

    The host reads results of the device only at steps that are logged, evaluated or saved
    (`Learner.read_steps`), once each; at other steps it does not wait.
    """
    cfg, state, tracker, portion = learner.cfg, learner.state, learner.tracker, learner.portion
    lengths = [len(row.ids) for row in source.rows]
    task = progress.add_task("training", completed=max(learner.step, state.step))
    for epoch in epochs:
        orders, most = steps_of(cfg, lengths, epoch, learner.step, portion)
        fixed = None if learner.time is None else learner.time.fixed
        learner.steps = most if fixed is None else min(most, fixed)
        progress.update(task, total=learner.steps)
        learner.look_ahead()
        source.expect(_unread(orders, learner))
        for chosen in orders:
            passed_over = learner.step * portion < state.rows  # the checkpoint has read these
            timing = just_fixed = False
            if learner.time is not None and not (passed_over and learner.time.fixed is None):
                just_fixed = learner.fit_steps(most)
                timing = learner.time.fixed is None
                progress.update(task, total=learner.steps)
            if learner.stopped or learner.round_ended(epochs.stop / cfg.epochs):
                break
            step, learner.step = learner.step, learner.step + 1
            if passed_over:
                learner.passed += sum(lengths[i] for i in chosen)
                _require_same_rows(learner)
                if state.owed and learner.step * portion >= state.rows:
                    _evaluate_draft(learner, progress)
                    learner.save_checkpoint()
                continue
            if timing and learner.time is not None:
                learner.time.begin_step()
            started, waited = time.perf_counter(), source.waited
            learner.unread.append(_forward_and_backward(learner, source, step, chosen))

            # the figures are read before the update where they are logged or the draft is looked at
            final = step + 1 == learner.steps
            every = cfg.eval_every and (step + 1) % cfg.eval_every == 0
            due = (
                final or every or (not timing and step + 1 in looks(learner.steps, cfg.eval_every))
            )
            saving = final or (cfg.save_every > 0 and (step + 1) % cfg.save_every == 0)
            saving = saving or just_fixed
            logging = saving or (step + 1) % cfg.log_every == 0
            figures = learner.read_steps() if logging or due or timing else None
            rate = optim.learning_rate(learner.schedule, step, learner.steps)
            for optimizer in learner.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * group["scale"]
                optimizer.step()
                optimizer.zero_grad()
            if timing and learner.time is not None:
                learner.time.end_step()

            state.step, state.rows = step + 1, (step + 1) * portion
            state.tokens += sum(lengths[i] for i in chosen)
            state.seconds += time.perf_counter() - started
            state.waiting += source.waited - waited
            progress.update(task, advance=1)

            # once in a while: log, evaluate, save
            if figures is not None:
                record = _record(learner.forcing.statistics, *figures, rate=rate, state=state)
                progress.update(task, description=f"training  {record}{learner.outlook}")
                if logging:
                    tracker.log(step + 1, {"train": asdict(record), "tokens": state.tokens})
                    learner.statistics.zero_()
            if learner.ranks.any(signals.terminated()):
                state.owed = bool(due)
                learner.save_checkpoint()
                raise Terminated
            if due:
                _evaluate_draft(learner, progress)
            if saving or learner.stopped:
                learner.save_checkpoint()
        if learner.stopped or (cfg.max_tokens is not None and learner.ended):
            break
        if learner.round_ended(epochs.stop / cfg.epochs):
            break
    source.expect([])
    progress.remove_task(task)


def _forward_and_backward(
    learner: Learner, source: BatchSource, step: int, chosen: Sequence[int]
) -> UnreadStep:
    """The gradients of a step that reads the `chosen` rows: forward and backward passes over this
    process's micro-batches. Nothing here waits for the device."""
    accelerator, forcing, world = learner.accelerator, learner.forcing, learner.ranks.world
    seed = learner.cfg.seed * 1_000_003 + step
    seeds = {i: (seed * 7_368_787 + i) % (1 << 63) for i in chosen}
    of_rows = {i: source.rows[i] for i in chosen}
    anchors = {
        i: forcing.anchors(
            mask_T=row.mask,
            document_T=row.document,
            position_T=row.position,
            seed=seeds[i],
            drafted_TK=row.drafted_TK,
            weight_T=row.weight,
        )
        for i, row in of_rows.items()
    }
    count = divisor([a.total for a in anchors.values()])
    micro_batches = _micro_batches(learner, chosen)
    losses: list[Tensor] = []
    for n, mine in enumerate(micro_batches, 1):
        batch = source.batch(mine)
        moment = TrainingMoment(step / learner.steps, [seeds[i] for i in mine])
        last = n == len(micro_batches)
        with nullcontext() if last else accelerator.no_sync(learner.model):
            _seed_dropout(moment.seeds)
            with accelerator.autocast():  # accelerate's DDP has its own, its FSDP2 none
                loss, seen = learner.model(batch, [anchors[i] for i in mine], moment)
            loss = loss / count * world  # DDP and FSDP average gradients
            losses.append(loss.detach().float())
            accelerator.backward(loss)
        learner.statistics += seen.detach()
    norm = accelerator.clip_grad_norm_(learner.parameters, learner.schedule.clip)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return UnreadStep(step, chosen, micro_batches, losses, norm.float())


def _record(
    statistics: Sequence[str], sums_KS: Tensor, norm: float, rate: float, state: State
) -> StepRecord:
    """The record of a step, from the sums of these `statistics` over anchors since the last
    record."""
    means_KS = sums_KS[:, 1:] / sums_KS[:, :1].clamp_min(1)
    kind = TextRecord if statistics == TEXT_STATISTICS else TrainRecord
    return kind(
        **dict(zip(statistics[1:], means_KS.T.tolist(), strict=True)),
        lr=rate,
        gradient_norm=norm,
        tokens_per_second=state.tokens / state.seconds,
        waiting=state.waiting / state.seconds,
    )


@checkpoint_first()
def finish(learner: Learner, progress: Progress) -> None:
    """Evaluate the draft after the last step, and write a checkpoint, if training ended at another
    step than planned: with loop.max_tokens, a later round with longer rows has fewer steps left."""
    state = learner.state
    if learner.step < state.step:  # a checkpoint of a run that stopped early
        return
    if not state.evaluated or state.evaluated[-1][0] != state.step:
        _evaluate_draft(learner, progress)
        learner.saved = 0
    if learner.saved != state.step:
        learner.save_checkpoint()


def trained(learner: Learner) -> Training:
    """The result of training. Raises UserError if the checkpoint's steps read other rows, or if the
    best draft is lost."""
    state = learner.state
    _require_same_rows(learner, ended=True)
    learner.ranks.first(lambda: _require_best(learner.folder, state, ended=True))
    assert state.best is not None
    early = learner.stopped and state.step < learner.steps
    forcing = learner.forcing
    alone = "; the target was not run in training" if forcing.text_alone else ""
    return Training(
        step=state.step,
        steps=learner.steps,
        tokens=state.tokens,
        seconds=state.seconds,
        objective=state.best.value,
        held_out=state.best.figures,
        stopped_early=early,
        trained_on=f"{forcing.loss_config}{alone}",
    )


def steps_of(
    cfg: LoopConfig, lengths: Sequence[int], epoch: int, step: int, portion: int
) -> tuple[list[list[int]], int]:
    """The `portion` rows of each step of an epoch, and the number of steps now planned for the run,
    which has taken `step` of them. A run lasts `cfg.epochs` complete epochs, or as many steps as
    `max_tokens` allows. `lengths` are those of the rows. Each epoch is a new permutation; rows that
    do not fill a step are skipped. Raises UserError if an epoch has fewer rows than a step."""
    per_epoch = len(lengths) // portion
    if per_epoch == 0:
        raise UserError(
            f"the training texts fill {len(lengths)} packed "
            f"{'row' if len(lengths) == 1 else 'rows'}, but one step reads {portion}: give "
            "loop.rows=1 loop.accumulate=1, a smaller data.max_length, or more data"
        )
    steps = step + per_epoch * (cfg.epochs - epoch)
    if cfg.max_tokens is not None:
        per_step = sum(lengths) / len(lengths) * portion
        steps = min(steps, max(1, step, round(cfg.max_tokens / per_step)))
    generator = torch.Generator().manual_seed(cfg.seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    taken = range(min(per_epoch, steps - step))
    return [order[n * portion : (n + 1) * portion] for n in taken], steps


def _evaluate_draft(learner: Learner, progress: Progress) -> None:
    """Evaluate the draft on held-out rows after the last step, and keep it if it is the best so
    far. SIGTERM ends this: at once in a single process, and after the same forward pass in several.
    They save a checkpoint first, from which a continued run evaluates. If a forward pass takes too
    long, `Terminated` ends one of several processes without the others; then nothing is saved,
    since they would have to save together."""
    state, accelerator, cfg = learner.state, learner.accelerator, learner.cfg
    alone = accelerator.num_processes == 1
    try:
        with no_checkpoint_first() if alone else nullcontext():
            chain = learner.forcing.drafter.depth, state.gamma

            def ended() -> bool:
                return learner.ranks.any(signals.terminated())

            figures = evaluate(
                learner.model, learner.held_out, cfg.rows, accelerator, chain, ended, progress
            )
    except Terminated as error:
        if alone or isinstance(error, TerminatedTogether):
            state.owed = True
            learner.save_checkpoint()
        raise
    state.owed = False
    state.evaluated.append((state.step, figures.tau_greedy))
    ahead = {"forecast": {"tau_greedy": x}} if (x := learner.look_ahead()) else {}
    learner.tracker.log(state.step, {"held_out": asdict(figures), **ahead})
    value = getattr(figures, cfg.select_by)
    state.waited += 1
    if state.best is None or value > state.best.value:
        state.best, state.waited = Best(value, state.step, figures), 0
        notes = {"step": state.step, "held_out": asdict(figures), "run": state.run}
        learner.save_draft(learner.folder / "best", notes)
    learner.stopped = cfg.patience is not None and state.waited >= cfg.patience


def _micro_batches(learner: Learner, chosen: Sequence[int]) -> list[Sequence[int]]:
    """The rows of a step that this process reads, in each of its micro-batches."""
    cfg, ranks = learner.cfg, learner.ranks
    each = range(cfg.accumulate)
    return [chosen[(n * ranks.world + ranks.rank) * cfg.rows :][: cfg.rows] for n in each]


def _unread(orders: Sequence[Sequence[int]], learner: Learner) -> list[Sequence[int]]:
    """The micro-batches that this process will read in an epoch, without the steps that a
    checkpoint has taken."""
    steps = enumerate(orders, learner.step)
    left = [chosen for step, chosen in steps if step * learner.portion >= learner.state.rows]
    return [mine for chosen in left for mine in _micro_batches(learner, chosen)]


def _require_same_rows(learner: Learner, ended: bool = False) -> None:
    """Raise UserError unless the steps that a continued run has skipped are those that its
    checkpoint has taken: as many tokens in as many rows."""
    state, portion = learner.state, learner.portion
    passed = learner.step * portion
    begun = learner.stopped or (passed >= state.rows if ended else True)
    same = ended or passed < state.rows or learner.passed == state.tokens
    require(
        begun and same,
        f"{learner.folder / 'checkpoints'}: {state.step} steps have read {state.tokens:,} tokens, "
        f"but not in steps of {portion} packed rows: continue this run on as many processes as it "
        "began with, or give the loop.accumulate with which a step reads as many rows as then",
    )


def _require_best(folder: Path, state: State, ended: bool) -> None:
    """Raise UserError unless the run's `best`, if there must be one, is complete and belongs to
    this run. When training has `ended`, print a line if it is not the draft of the best step, which
    can happen after a crash between saving a draft and its checkpoint."""
    if state.best is None:
        return
    best = folder / "best"
    recover(best)
    if not ended and not best.exists():  # killed between two renames; it is written again
        return
    try:
        notes = draft_checkpoint.require_undamaged_draft(best).notes
        theirs = notes.get("run", state.run)
        require(theirs == state.run, f"{best} is the draft of another run")
    except Unreadable:
        raise
    except UserError as error:
        raise UserError(
            f"{error}; the best draft of this run is lost: put it back, or delete {folder} and "
            "train again"
        ) from error
    step = notes.get("step", state.best.step)
    if ended and step != state.best.step:
        tell(f"{best} is the draft of step {step}, but that of step {state.best.step} was best")


def _seed_dropout(seeds: Sequence[int]) -> None:
    """Seed torch's own generators, on every device, from the seeds of a micro-batch's rows, so that
    dropout depends only on these and on which rows are read together. A checkpoint therefore needs
    no generator's state."""
    folded = 1
    for seed in seeds:
        folded = (folded * 1_000_003 + seed) % (1 << 63)
    torch.manual_seed(folded)


def _require_finite(value: float, what: str, step: int, rows: Sequence[int]) -> None:
    if not math.isfinite(value):
        raise Diverged(
            f"the {what} is not finite at step {step + 1} (rows {', '.join(map(str, rows))}): "
            "nothing was saved since; lower optim.lr, or look at these rows"
        )

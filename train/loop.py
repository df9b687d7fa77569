"""The training loop: one flat function, from top to bottom.

Rows are packed texts. A step reads `rows · accumulate · processes` of them; how they are cut
into micro-batches and spread over processes changes nothing but rounding.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.context import Moment
from specdec.drafters.trainable import Trainable
from specdec.errors import UserError, require, require_known, require_within
from specdec.files import recover
from specdec.forcing.teacher import STATISTICS, TeacherForcing
from specdec.formats import draft as drafts
from specdec.measure.results import Training
from specdec.progress import tell
from train import checkpoint, optim
from train.checkpoint import Best, State
from train.features.source import Source
from train.held_out import evaluate
from train.processes import from_main

if TYPE_CHECKING:
    from train.job import Job

PRECISIONS = ("auto", "bf16", "no")
OBJECTIVES = ("tau_greedy", "tau_sampled", "alpha_sampled", "alpha_greedy")


@dataclass
class LoopConfig:
    """How long and in what portions to train.

    `rows` is the number of packed rows per micro-batch, `accumulate` that of micro-batches per step
    and process. `max_tokens` ends training early, even within an epoch (the learning rate decays to
    fit). `eval_every` and `save_every` are in steps (0: only at the end). `objective` is the
    held-out figure by which drafts are compared; `patience` evaluations without a better one end
    training (null: never). `precision` is bf16 or no (float32); auto is bf16 if the target is.
    """

    epochs: int = 1
    max_tokens: int | None = None
    rows: int = 1
    accumulate: int = 1
    eval_every: int = 100
    save_every: int = 100
    patience: int | None = None
    objective: str = "tau_greedy"
    precision: str = "auto"
    log_every: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        ones = dict.fromkeys(("epochs", "rows", "accumulate", "log_every", "max_tokens"), 1)
        require_within("loop", self, **ones, patience=1, eval_every=0, save_every=0)
        require_within("loop", self, seed=(0, 2**32 - 1))
        require_known("loop", self, precision=PRECISIONS, objective=OBJECTIVES)


Keep = Callable[[Path], None]  # writes the draft as it is now to a folder, for all processes


class Diverged(UserError):
    """A loss or gradient that is not finite; raised before the weights are touched."""


@dataclass
class TrainRecord:
    """Training figures. The lists, by depth, are means since the last record; `lr` and
    `gradient_norm` are those of the last step, and the speed is that of the whole run so far."""

    loss: list[float]
    sampled: list[float]
    greedy_draft: list[float]
    greedy: list[float]
    lr: float
    gradient_norm: float
    tokens_per_second: float

    def __str__(self) -> str:
        alpha = " ".join(f"{a:.3f}" for a in self.sampled)
        return f"loss {self.loss[0]:.2f}  α {alpha}  {self.tokens_per_second:,.0f} tokens/s"


def train(
    job: "Job", forcing: TeacherForcing, data: Callable[[int, Keep], Source], held_out: Source
) -> Training:
    """Train a drafter. The best draft goes to the folder's `best`, checkpoints to `checkpoints`.

    `data(epoch, keep)` is called at the start of an epoch and gives its rows. They may differ from
    the last epoch's and depend on the current draft, which `keep(folder)` writes. Training
    continues from the newest checkpoint, in float32 bit for bit on as many processes as before, and
    on another number of them within rounding. Raises `Diverged` before the update if the loss or
    the gradient is not finite, and UserError if the rows do not fill a step, or if the checkpoint's
    steps read other rows; what was saved stays.
    """
    cfg = replace(job.cfg.loop, epochs=job.cfg.loop.epochs * job.cfg.rounds.count)
    accelerator, tracker, progress = job.accelerator, job.tracker, job.progress
    world, rank = accelerator.num_processes, accelerator.process_index
    drafter = forcing.drafter
    assert isinstance(drafter, Trainable)
    built = optim.build(forcing, job.cfg.optim, drafter.sizes, drafter.learning_rates)
    model, *optimizers = accelerator.prepare(forcing, *built)
    parameters = [p for p in model.parameters() if p.requires_grad]
    checkpoints = job.folder / "checkpoints"
    state = checkpoint.load(checkpoints, model, optimizers, accelerator, job.identity) or State()
    state.run = job.identity
    portion = cfg.rows * cfg.accumulate * world
    state.rows = state.rows or state.step * portion  # older checkpoints count no rows
    otherwise = (
        f"{checkpoints}: {state.step} steps have read {state.tokens:,} tokens, but not in steps of "
        f"{portion} packed rows: continue this run on as many processes as it began with, or give "
        "the loop.accumulate with which a step reads as many rows as then"
    )
    from_main(accelerator, partial(_require_best, job, state, ended=False))
    tracker.rewind(state.step, state.metrics)

    task = progress.add_task("training", completed=state.step)
    statistics = torch.zeros(forcing.depth, len(STATISTICS), device=accelerator.device)
    stopped = cfg.patience is not None and state.waited >= cfg.patience
    step, steps, tokens_before = -1, 0, 0

    def save_draft(folder: Path, notes: dict[str, Any] | None = None) -> None:
        whole, prefix = checkpoint.weights(model), "drafter."
        if job.main:
            weights = {n.removeprefix(prefix): x for n, x in whole.items() if n.startswith(prefix)}
            drafts.save(folder, forcing.drafter, job.target.parts, weights, notes)

    def keep(folder: Path) -> None:
        require(
            step + 1 >= state.step,
            f"{folder} is missing (this run wrote it earlier): delete {job.folder} and train again",
        )
        save_draft(folder)
        accelerator.wait_for_everyone()

    planned = _plan(cfg, lambda epoch: data(epoch, keep), portion)
    for step, (source, chosen, steps) in enumerate(planned):
        progress.update(task, total=steps)
        if stopped:
            break
        if step * portion < state.rows:  # the checkpoint has read these
            tokens_before += sum(len(source.rows[i].ids) for i in chosen)
            require((step + 1) * portion < state.rows or tokens_before == state.tokens, otherwise)
            continue
        started = time.perf_counter()

        # one step: forward and backward over this process's micro-batches
        seeds = {i: ((cfg.seed * 1_000_003 + step) * 7_368_787 + i) % (1 << 63) for i in chosen}
        of_rows = {i: source.rows[i] for i in chosen}
        anchors = {
            i: forcing.anchors(row.mask, row.document, row.position, seeds[i], row.drafted)
            for i, row in of_rows.items()
        }
        count = sum(a.total for a in anchors.values())
        losses: list[Tensor] = []
        for n in range(cfg.accumulate):
            mine = chosen[(n * world + rank) * cfg.rows :][: cfg.rows]
            batch = source.batch(mine)
            moment = Moment(step / steps, [seeds[i] for i in mine])
            last = n + 1 == cfg.accumulate
            with nullcontext() if last else accelerator.no_sync(model):
                _seed_dropout(moment.seeds)
                with accelerator.autocast():  # accelerate's DDP has its own, its FSDP2 has none
                    loss, seen = model(batch, [anchors[i] for i in mine], moment)
                loss = loss / max(count, 1) * world  # DDP and FSDP average gradients
                losses.append(loss.detach())
                accelerator.backward(loss)
            statistics += accelerator.reduce(seen.detach(), "sum")
        # only here does the host wait for what the step has computed
        norm = float(accelerator.clip_grad_norm_(parameters, job.cfg.optim.clip))
        for n, value in enumerate(torch.stack(losses).tolist()):
            mine = chosen[(n * world + rank) * cfg.rows :][: cfg.rows]
            _require_finite(value, "loss", step, mine)
        _require_finite(norm, "gradient", step, chosen)
        rate = optim.learning_rate(job.cfg.optim, step, steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            optimizer.step()
            optimizer.zero_grad()

        state.step, state.rows = step + 1, (step + 1) * portion
        state.tokens += sum(len(row.ids) for row in of_rows.values())
        state.seconds += time.perf_counter() - started
        sums = statistics.cpu()
        means = sums[:, 1:] / sums[:, :1].clamp_min(1)  # since the last record
        by_depth = dict(zip(STATISTICS[1:], means.T.tolist(), strict=True))
        speed = state.tokens / state.seconds
        record = TrainRecord(**by_depth, lr=rate, gradient_norm=norm, tokens_per_second=speed)
        progress.update(task, advance=1, description=f"training  {record}")
        final = step + 1 == steps

        # once in a while: log, evaluate, save
        saving = final or (cfg.save_every > 0 and (step + 1) % cfg.save_every == 0)
        if saving or (step + 1) % cfg.log_every == 0:
            tracker.log(step + 1, {"train": asdict(record), "tokens": state.tokens})
            statistics.zero_()
        if final or (cfg.eval_every and (step + 1) % cfg.eval_every == 0):
            figures = evaluate(model, held_out, cfg.rows, accelerator)
            tracker.log(step + 1, {"held_out": asdict(figures)})
            value = getattr(figures, cfg.objective)
            state.waited += 1
            if state.best is None or value > state.best.value:
                state.best, state.waited = Best(value, step + 1, figures), 0
                notes = {"step": step + 1, "held_out": asdict(figures), "run": job.identity}
                save_draft(job.folder / "best", notes)
            stopped = cfg.patience is not None and state.waited >= cfg.patience
        if saving or stopped:
            state.metrics = tracker.checksum()
            checkpoint.save(checkpoints, model, optimizers, state, job.main)
            accelerator.wait_for_everyone()
    require(stopped or (step + 1) * portion >= state.rows, otherwise)
    progress.remove_task(task)
    from_main(accelerator, partial(_require_best, job, state, ended=True))
    assert state.best is not None
    size, best = (state.step, steps, state.tokens, state.seconds), state.best
    return Training(*size, best.value, best.figures, stopped)


def _require_best(job: "Job", state: State, ended: bool) -> None:
    """Raise UserError unless the folder's `best` is whole and of this run, if there must be one.
    When training has `ended`, say so if it is not the draft of the best step, which can happen
    after a crash between saving a draft and its checkpoint."""
    if state.best is None:
        return
    best = job.folder / "best"
    recover(best)
    if not ended and not best.exists():  # killed between two renames; it is written again
        return
    try:
        notes = drafts.require_whole(best).notes
        theirs = notes.get("run", job.identity)
        require(theirs == job.identity, f"{best} is the draft of another run")
    except UserError as error:
        raise UserError(
            f"{error}; the best draft of this run is lost: put it back, or delete {job.folder} and "
            "train again"
        ) from error
    step = notes.get("step", state.best.step)
    if ended and step != state.best.step:
        tell(f"{best} is the draft of step {step}, but that of step {state.best.step} was best")


def _plan(
    cfg: LoopConfig, data: Callable[[int], Source], portion: int
) -> Iterator[tuple[Source, list[int], int]]:
    """For every step of a run: its source, the indices of the `portion` rows that it reads, and how
    many steps are now planned for the run. A run lasts whole epochs, or as many steps as
    `max_tokens` allows. Each epoch is a new permutation; rows that do not fill a step are left out.
    Raises UserError if an epoch has fewer rows than a step."""
    step = 0
    for epoch in range(cfg.epochs):
        source = data(epoch)
        lengths = [len(row.ids) for row in source.rows]
        per_epoch = len(lengths) // portion
        if per_epoch == 0:
            raise UserError(
                f"there are only {len(lengths)} packed rows, but one step reads {portion}: lower "
                "loop.rows or loop.accumulate, or give more data"
            )
        steps = step + per_epoch * (cfg.epochs - epoch)
        if cfg.max_tokens is not None:
            per_step = sum(lengths) / len(lengths) * portion
            steps = min(steps, max(1, step, round(cfg.max_tokens / per_step)))
        generator = torch.Generator().manual_seed(cfg.seed * 1_000_003 + epoch)
        order = torch.randperm(len(lengths), generator=generator).tolist()
        for n in range(min(per_epoch, steps - step)):
            yield source, order[n * portion : (n + 1) * portion], steps
            step += 1
        if cfg.max_tokens is not None and step == steps:
            return  # the sources of further epochs may be costly to make


def _seed_dropout(seeds: Sequence[int]) -> None:
    """Let everything that torch draws by itself at a micro-batch, such as dropout, follow from the
    seeds of its rows, on every device. So a checkpoint need not hold the state of any generator."""
    folded = 1
    for seed in seeds:
        folded = (folded * 1_000_003 + seed) % (1 << 63)
    torch.manual_seed(folded)


def _require_finite(value: float, what: str, step: int, rows: Sequence[int]) -> None:
    if not math.isfinite(value):
        raise Diverged(
            f"the {what} is not finite at step {step + 1} (rows {', '.join(map(str, rows))}): "
            "the weights were not touched; lower optim.lr, or look at these rows"
        )

"""The training loop: one flat function, from top to bottom.

Rows are packed texts. A step reads `rows · accumulate · processes` of them; how they are cut
into micro-batches and spread over processes changes nothing but rounding.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import Progress
from torch import Tensor

from specdec.errors import UserError, nearest, require, require_between
from specdec.forcing.teacher import (
    STATISTICS,
    TeacherForcing,
    answers,
    count_anchors,
    predicted_rounds,
)
from specdec.formats import draft as drafts
from specdec.target.base import Target
from train import checkpoint, optim
from train.features.store import Online
from train.optim import OptimConfig
from train.tracking import Tracker

PRECISIONS = ("auto", "bf16", "no")
OBJECTIVES = ("tau_greedy", "tau_sampled", "alpha_sampled", "alpha_greedy")


@dataclass
class LoopConfig:
    """How long and in what portions to train.

    `rows` packed rows a micro-batch, `accumulate` micro-batches a step and process.
    `max_tokens` ends training early, also within an epoch (the learning rate's decay fits).
    `eval_every` and `save_every` are in steps, 0 = at the end alone; `patience` evaluations
    without a better `objective` end the run (null: never). `precision` bf16 or no; auto takes
    bf16 where the target has it.
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
        for name in ("epochs", "rows", "accumulate", "log_every", "max_tokens", "patience"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"loop.{name}={value}: give 1 or more")
        for name in ("eval_every", "save_every"):
            require_between(f"loop.{name}", getattr(self, name), 0)
        require_between("loop.seed", self.seed, 0, 2**32 - 1)
        require(
            self.precision in PRECISIONS,
            f"loop.precision={self.precision!r} is unknown{nearest(self.precision, PRECISIONS)}",
        )
        require(
            self.objective in OBJECTIVES,
            f"loop.objective={self.objective!r} is unknown{nearest(self.objective, OBJECTIVES)}",
        )


@dataclass
class Outcome:
    """What training ended with."""

    objective: float  # best held-out value
    held_out: dict[str, Any]  # all held-out figures of the best checkpoint
    step: int
    steps: int
    tokens: int
    seconds: float
    stopped_early: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Diverged(UserError):
    """A loss or gradient that is not finite; raised before the weights are touched."""


def train(
    cfg: LoopConfig,
    optim_cfg: OptimConfig,
    accelerator: Accelerator,
    forcing: TeacherForcing,
    target: Target,
    data: Online,
    held_out: Online,
    folder: Path,
    tracker: Tracker,
    progress: Progress,
) -> Outcome:
    """Train a drafter; leaves the best draft in folder/best and checkpoints to resume from.

    Continues the newest checkpoint in `folder`, bit for bit in float32 on one process. Raises
    `Diverged` when the loss or gradient is not finite, before the update; what was saved stays.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    portions = cfg.accumulate * world
    plan = [len(row.ids) for row in data.rows]
    steps = _steps(cfg, plan, cfg.rows * portions)
    if steps == 0:
        raise UserError(
            f"{len(plan)} packed rows are fewer than one step of {cfg.rows * portions}: lower "
            "loop.rows or loop.accumulate, or give more data"
        )
    anchors = [count_anchors(row.mask, row.position) for row in data.rows]

    model, optimizer = accelerator.prepare(forcing, optim.build(forcing, optim_cfg))
    parameters = [p for p in model.parameters() if p.requires_grad]
    state: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "best": None, "waited": 0}
    state |= checkpoint.load(folder / "checkpoints", model, optimizer) or {}
    tracker.rewind(state["step"])

    task = progress.add_task("training", total=steps, completed=state["step"])
    statistics = torch.zeros(forcing.drafter.train_depth, len(STATISTICS))
    stopped = cfg.patience is not None and state["waited"] >= cfg.patience
    for step, chosen in enumerate(_order(cfg.seed, len(plan), cfg.rows * portions, steps)):
        if stopped:
            break
        if step < state["step"]:
            continue
        started = time.perf_counter()

        # one step: forward and backward over this process's micro-batches
        count = sum(anchors[i] for i in chosen)
        for n in range(cfg.accumulate):
            mine = chosen[(n * world + rank) * cfg.rows :][: cfg.rows]
            batch = data.batch(mine)
            last = n + 1 == cfg.accumulate
            with nullcontext() if last else accelerator.no_sync(model):
                loss, seen = model(batch)
                loss = loss / max(count, 1) * world  # DDP and FSDP average over processes
                _require_finite(loss, "loss", step, mine)
                accelerator.backward(loss)
            statistics += accelerator.reduce(seen.detach(), "sum").cpu()
        norm = accelerator.clip_grad_norm_(parameters, optim_cfg.clip)
        _require_finite(norm, "gradient", step, chosen)
        rate = optim.learning_rate(optim_cfg, step, steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()

        state["step"] = step + 1
        state["tokens"] += sum(plan[i] for i in chosen)
        state["seconds"] += time.perf_counter() - started
        record = _train_record(statistics, state, rate, float(norm))
        progress.update(task, advance=1, description=_line(record))
        final = step + 1 == steps

        # once in a while: log, evaluate, save
        saving = final or (cfg.save_every > 0 and (step + 1) % cfg.save_every == 0)
        if saving or (step + 1) % cfg.log_every == 0:
            tracker.log(step + 1, record)
            statistics.zero_()
        if final or (cfg.eval_every and (step + 1) % cfg.eval_every == 0):
            figures = evaluate(model, held_out, cfg.rows, accelerator)
            tracker.log(step + 1, {"held_out": figures})
            value = figures[cfg.objective]
            state["waited"] += 1
            if state["best"] is None or value > state["best"]["value"]:
                state["best"] = {"value": value, "step": step + 1, "figures": figures}
                state["waited"] = 0
                weights = _of_drafter(checkpoint.weights(model))
                if accelerator.is_main_process:
                    notes = {"step": step + 1, "held_out": figures}
                    drafts.save(folder / "best", forcing.drafter, target, weights, notes)
            stopped = cfg.patience is not None and state["waited"] >= cfg.patience
        if saving or stopped:
            where = folder / "checkpoints"
            checkpoint.save(where, model, optimizer, state, accelerator.is_main_process)
            accelerator.wait_for_everyone()
    progress.remove_task(task)
    assert state["best"] is not None
    return Outcome(
        objective=state["best"]["value"],
        held_out=state["best"]["figures"],
        step=state["step"],
        steps=steps,
        tokens=state["tokens"],
        seconds=state["seconds"],
        stopped_early=stopped,
    )


def evaluate(
    model: torch.nn.Module, held_out: Online, rows: int, accelerator: Accelerator
) -> dict[str, Any]:
    """Held-out figures by teacher forcing: α per depth in its three variants over all
    positions, and the τ that a decoder walking these texts would have, greedy and sampled.

    Rows are spread over the processes; sums are reduced before they are divided.
    """
    model.eval()
    world, rank = accelerator.num_processes, accelerator.process_index
    sums: Tensor | None = None
    walks = torch.zeros(4, dtype=torch.float64, device=accelerator.device)
    batches = -(-len(held_out.rows) // rows)
    with torch.no_grad():
        for n in range(-(-batches // world)):
            # every process runs the same number of forwards; surplus ones count for nothing
            index = n * world + rank
            real = index < batches
            index = index if real else 0
            batch = held_out.batch(range(index * rows, min((index + 1) * rows, len(held_out.rows))))
            table = model(batch, measure=True)
            valid = table.anchors.valid_NK
            columns = [valid.double(), *(x.double() for x in table.alpha)]
            new = torch.stack([c.sum(0) for c in columns]) * real
            sums = new if sums is None else sums + new
            for answer in answers(table, batch) if real else []:
                walks[:2] += torch.tensor(predicted_rounds(answer.alpha.greedy)).to(walks)
                walks[2:] += torch.tensor(predicted_rounds(answer.alpha.sampled)).to(walks)
    model.train()
    assert sums is not None
    sums, walks = accelerator.reduce(sums, "sum"), accelerator.reduce(walks, "sum")
    count_K, sampled_K, greedy_draft_K, greedy_K = sums.cpu()
    if not walks[1]:
        raise UserError("held-out answers are too short to measure τ: lower drafter.depth")
    return {
        "tau_greedy": float(walks[0] / walks[1]),
        "tau_sampled": float(walks[2] / walks[3]),
        "alpha_sampled": float(sampled_K[0] / count_K[0]),
        "alpha_greedy": float(greedy_K[0] / count_K[0]),
        "by_depth": {
            "sampled": (sampled_K / count_K.clamp_min(1)).tolist(),
            "greedy_draft": (greedy_draft_K / count_K.clamp_min(1)).tolist(),
            "greedy": (greedy_K / count_K.clamp_min(1)).tolist(),
        },
        "positions": count_K.long().tolist(),
    }


def _steps(cfg: LoopConfig, lengths: Sequence[int], rows: int) -> int:
    """How many steps the run has: whole epochs, or as many as `max_tokens` pays for."""
    steps = len(lengths) // rows * cfg.epochs
    if cfg.max_tokens is None:
        return steps
    per_step = sum(lengths) / max(1, len(lengths)) * rows
    return min(steps, max(1, round(cfg.max_tokens / per_step)))


def _order(seed: int, count: int, rows: int, steps: int) -> Iterator[list[int]]:
    """The rows of every step: each epoch a new permutation, what does not fill a step left out."""
    per_epoch = count // rows
    for step in range(steps):
        epoch, n = divmod(step, per_epoch)
        if n == 0:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = torch.randperm(count, generator=generator).tolist()
        yield order[n * rows : (n + 1) * rows]


def _require_finite(value: Tensor, what: str, step: int, rows: Sequence[int]) -> None:
    if not math.isfinite(float(value.detach())):
        raise Diverged(
            f"the {what} is not finite at step {step + 1} (rows {', '.join(map(str, rows))}): "
            "the weights were not touched; lower optim.lr, or look at these rows"
        )


def _train_record(
    statistics: Tensor, state: dict[str, Any], rate: float, norm: float
) -> dict[str, Any]:
    """Figures over the steps since the last log."""
    count = statistics[:, 0].clamp_min(1)
    columns = dict(
        zip(STATISTICS[1:], (statistics[:, 1:] / count[:, None]).T.tolist(), strict=True)
    )
    speed = state["tokens"] / state["seconds"]
    return {
        "train": {**columns, "lr": rate, "gradient_norm": norm, "tokens_per_second": speed},
        "tokens": state["tokens"],
    }


def _line(record: dict[str, Any]) -> str:
    figures = record["train"]
    alpha = " ".join(f"{a:.3f}" for a in figures["sampled"])
    return (
        f"training  loss {figures['loss'][0]:.2f}  α {alpha}  "
        f"{figures['tokens_per_second']:,.0f} tokens/s"
    )


def _of_drafter(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "drafter."
    return {n.removeprefix(prefix): x for n, x in weights.items() if n.startswith(prefix)}

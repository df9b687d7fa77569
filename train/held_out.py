"""Held-out figures by teacher forcing, which show a run's progress and select its best draft.
`forecast` extrapolates them to τ at the end of training."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from accelerate import Accelerator
from rich.progress import Progress
from torch import nn

from specdec.errors import require
from specdec.forcing.teacher import acceptance_by_response, predicted_steps
from specdec.measure.results import ByDepth, HeldOut
from specdec.progress import TOKENS, bars, console
from specdec.signals import Terminated
from train.hidden_states.batches import BatchSource

SHARES = (0.1, 0.2)  # fractions of the steps after which a run is evaluated for its forecast
FEWEST = 50  # steps of a run that is worth one
FROM = 0.05  # share of the steps before which the learning rate still rises
# What a factor e in steps adds to τ: so much, and a share of τ - 1; and its standard deviation,
# relative to that sum.
SLOPE, SHARE, SPREAD = 0.055, 0.04, 0.35
NOISE = 0.015  # standard deviation of a held-out τ about its curve


class TerminatedTogether(Terminated):
    """SIGTERM has reached one of the processes, and all have stopped after the same forward pass,
    so that they can still save together."""


def evaluate(
    model: nn.Module,
    held_out: BatchSource,
    rows: int,
    accelerator: Accelerator,
    chain: tuple[int, int] | None = None,
    ended: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> HeldOut:
    """The figures of a `TeacherForcing` on packed rows, `rows` of them at a time. `chain` is the
    trained depth, up to which α is measured, and the γ of the chains for τ; None: both are the
    trained depth. Rows are distributed over the processes; sums are reduced before division. Before
    each forward pass, all processes call `ended`, which returns the same in all of them;
    TerminatedTogether is raised if it is true. `progress` counts tokens. Raises UserError if no
    response is long enough to measure τ."""
    depth, gamma = chain or (None, None)
    model.eval()
    world, rank = accelerator.num_processes, accelerator.process_index
    sums = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    walks = torch.zeros(4, dtype=torch.float64, device=accelerator.device)
    starts: list[int | None] = [*range(0, len(held_out.rows), rows)]
    starts += [None] * (-len(starts) % world)  # all processes run the same number of forwards
    mine = starts[rank::world]
    of_starts = [range(start or 0, len(held_out.rows))[:rows] for start in mine]
    held_out.expect(of_starts)
    lengths = [len(row.ids) for row in held_out.rows]
    progress = progress or bars(console, shown=False)
    total = sum(lengths[i] for indices in of_starts for i in indices)
    task = progress.add_task("validation", total=total, unit=TOKENS)
    with torch.no_grad():
        for start, indices in zip(mine, of_starts, strict=True):
            if ended():
                raise TerminatedTogether
            batch = held_out.batch(indices)
            with accelerator.autocast():
                table = model(batch, measure=True, depth=max(chain) if chain else None)
            real = start is not None  # a surplus forward counts for nothing
            columns = [table.anchors.valid_NK.double(), *(x.double() for x in table.alpha)]
            sums = sums + real * torch.stack([c.sum(0) for c in columns])
            for response in acceptance_by_response(table, batch) if real else ():
                both = (response.greedy[:, :gamma], response.sampled[:, :gamma])
                walks += torch.tensor([predicted_steps(alpha) for alpha in both]).to(walks).view(4)
            progress.advance(task, sum(lengths[i] for i in indices))
    progress.remove_task(task)
    held_out.expect([])
    model.train()
    sums, walks = accelerator.reduce(sums, "sum"), accelerator.reduce(walks, "sum")
    count_K, sampled_K, greedy_draft_K, greedy_K = sums[:, :depth].cpu()
    require(
        bool(walks[1]),
        "no held-out response has two tokens, so τ cannot be measured: give more data",
    )
    shares = ((x / count_K.clamp_min(1)).tolist() for x in (sampled_K, greedy_draft_K, greedy_K))
    return HeldOut(
        tau_greedy=float(walks[0] / walks[1]),
        tau_sampled=float(walks[2] / walks[3]),
        alpha_sampled=float(sampled_K[0] / count_K[0]),
        alpha_greedy=float(greedy_K[0] / count_K[0]),
        by_depth=ByDepth(*shares),
        positions=count_K.long().tolist(),
        gamma=gamma or len(count_K),
    )


def looks(steps: int, every: int) -> list[int]:
    """The steps after which a run is evaluated for its forecast, in addition to those after every
    `every` steps. Empty for short runs, which do not need them, and if `every` is 0."""
    if steps < FEWEST or every == 0 or every <= SHARES[0] * steps:
        return []
    return [math.ceil(share * steps) for share in SHARES]


def forecast(
    points: Sequence[tuple[int, float]], steps: int, gamma: float = math.inf
) -> float | None:
    """τ of chains of γ tokens after `steps` steps, given held-out τ after some of them; None before
    there are two. It is between 1 and γ + 1, as any τ.

    The model is τ - 1 linear in the logarithm of the step, fitted by weighted least squares (later
    evaluations weigh more) with a normal prior on the slope. docs/notebook/measuring.md has the
    curves behind the prior and the tests of the forecast.
    """
    usable = [(step, tau - 1) for step, tau in points if FROM * steps <= step <= steps]
    if len(usable) < 2:
        return None
    step_P, y_P = np.array(usable, dtype=np.float64).T
    x_P, weight_P = np.log(step_P / steps), step_P / step_P.max()
    level = float(np.average(y_P, weights=weight_P))
    slope = SLOPE + SHARE * level
    rows = np.stack([np.ones_like(x_P), x_P], axis=1) * np.sqrt(weight_P)[:, None] / NOISE
    A = np.concatenate([rows, [[0.0, 1 / (SPREAD * slope)]]])  # the prior is one more observation
    b = np.concatenate([y_P * np.sqrt(weight_P) / NOISE, [1 / SPREAD]])
    (end, _), *_ = np.linalg.lstsq(A, b, rcond=None)
    return 1 + min(max(float(end), 0.0), float(gamma))

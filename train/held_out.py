"""Held-out figures by teacher forcing: they show how a run is doing and which draft is its best."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from specdec.errors import require
from specdec.forcing.teacher import acceptance_by_response, predicted_steps
from specdec.measure.results import ByDepth, HeldOut
from specdec.signals import Terminated
from train.hidden_states.batches import BatchSource


class TerminatedTogether(Terminated):
    """SIGTERM has reached one of the processes, and all have left after the same forward pass, so
    that they can still save together."""


def evaluate(
    model: nn.Module,
    held_out: BatchSource,
    rows: int,
    accelerator: Accelerator,
    chain: tuple[int, int] | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> HeldOut:
    """The figures of a `TeacherForcing` on packed rows, `rows` of them at a time. `chain` is the
    trained depth, up to which α is measured, and the γ of the chains that τ is of; None: both are
    the trained depth. Rows are spread over the processes; sums are reduced before they are divided.
    Before each forward pass, all processes call `ended`, which returns the same in all of them;
    TerminatedTogether is raised if it is true. Raises UserError if no response is long enough to
    measure τ."""
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
            for answer in acceptance_by_response(table, batch) if real else ():
                both = (answer.greedy[:, :gamma], answer.sampled[:, :gamma])
                walks += torch.tensor([predicted_steps(alpha) for alpha in both]).to(walks).view(4)
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

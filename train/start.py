"""The start in closed form (`Solves`), solved for on a part of the training texts."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from rich.progress import Progress

from specdec.context import Known
from specdec.drafters.capabilities import Solves
from specdec.drafters.proposer import Drafter
from specdec.forcing.anchors import anchors_of
from specdec.progress import console
from train.features.source import Online, Source

REMEMBERED = 2**30  # the most bytes of features kept in memory, so as not to compute them again
REGRESSED = 80_000  # a start reads about one to two times as many tokens, or all if there are fewer
AT_ONCE = 4096  # tokens that a start reads at a time, or one packed row if that is longer


def stride(tokens: int) -> int:
    """The n for which a start reads every n-th row of texts that have this many tokens in all."""
    return max(1, tokens // REGRESSED)


def regress(
    drafter: Drafter, data: Source, length: int, accelerator: Accelerator, progress: Progress
) -> None:
    """Solve for the drafter's first weights, on evenly spaced rows of up to `length` tokens (see
    `REGRESSED`). The weights stay as they are if no answer is long enough."""
    assert isinstance(drafter, Solves)
    rows = range(0, len(data.rows), stride(sum(len(row.ids) for row in data.rows)))
    at_once = max(1, AT_ONCE // length)
    task = progress.add_task("least squares", total=len(rows))
    count = 0

    def known() -> Iterator[Known]:
        nonlocal count
        progress.update(task, completed=0)
        count = 0
        for start in range(0, len(rows), at_once):
            batch = data.batch(rows[start : start + at_once])
            position_BT, document_BT = batch.ctx.documents()
            anchors = anchors_of(batch.mask_BT, document_BT, position_BT, drafter.regressed)
            followed = anchors.valid_NK.all(-1)
            where = anchors.row_N[followed], anchors.position_N[followed]
            count += len(where[0])
            if len(where[0]):
                yield Known(batch.ctx, batch.final_BTD, *where)
            progress.advance(task, len(batch.mask_BT))

    source: Callable[[], Iterator[Known]] = known
    if isinstance(data, Online) and data.bytes(rows) <= REMEMBERED:
        source = partial(iter, [*known()])  # so that the target reads these rows only once
    solvable = any(True for _ in source())
    if solvable:
        with torch.no_grad():
            drafter.regress(source)
    progress.remove_task(task)
    if accelerator.num_processes > 1:
        for weight in drafter.parameters():
            broadcast(weight.data)  # processes may round differently
    said = f"least squares at {count:,} anchors in {len(rows):,} of {len(data.rows):,} packed rows"
    none = f"no answer has as many as {drafter.regressed} tokens, so no weights are solved for"
    console.print(f"start: {said if solvable else none}")

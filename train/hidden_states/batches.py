"""Sources of the target's hidden states for training: `OnlineBatches` runs the target for each
request; `StoredBatches` (store.py) reads stored ones; `TextBatches` has stand-ins for them."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.context import Context, HiddenStateSpec
from specdec.errors import require
from specdec.forcing.batch import (
    Batch,
    OnTrajectory,
    batch_of,
    read_drafts,
    summarise,
    text_batch,
)
from specdec.integrity import Damaged
from specdec.progress import tell
from specdec.sampling.sampler import Sampler, Summary
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from train.data.sequences import Row
from train.hidden_states.store import (
    AFTER,
    PARTS,
    HiddenStateStore,
    HiddenStateTensors,
    documents,
    part_of,
    parts_of,
)

T = TypeVar("T")


class BatchSource(Protocol):
    """Packed rows, with the target's hidden states for them."""

    waited: float  # seconds spent so far on waiting for stored hidden states

    @property
    def rows(self) -> Sequence[Row]: ...

    def expect(self, requests: Sequence[Sequence[int]]) -> None:
        """Announce the batches that will be requested, in order, so that stored ones may be read
        ahead; empty: no more will be."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Ids, hidden states, final hidden states and the summary of p for the rows at these
        indices, padded to the longest of them. For rows with a decoder's speculation steps, also
        the states and the summary after the tokens that were drafted there."""


class OnlineBatches:
    """Rows that the target reads whenever they are requested."""

    def __init__(
        self, target: Target, needs: HiddenStateSpec, sampler: Sampler, rows: Sequence[Row]
    ) -> None:
        self.target, self.needs, self.sampler, self.rows = target, needs, sampler, rows
        self.waited = 0.0  # it computes instead

    def expect(self, requests: Sequence[Sequence[int]]) -> None:
        """Do nothing: nothing is read ahead."""

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = [self.rows[i] for i in indices]
        if rows[0].speculation_steps is not None:
            return assembled(rows, self.target.device, self.needs, self.document)
        return batch_of(self.target, self.needs, self.sampler, *texts(rows, self.target.device))

    def bytes(self, indices: Sequence[int]) -> int:
        """The size of the hidden states of the rows at these indices."""
        states = self.target.width * (1 + len(self.needs.layers)) * self.target.dtype.itemsize
        return sum(len(self.rows[i].ids) for i in indices) * states

    def document(self, row: Row, x: slice) -> HiddenStateTensors:
        """The hidden states of one document with speculation steps, and those after its drafted
        tokens."""
        assert row.speculation_steps is not None
        speculation_steps = row.speculation_steps[x]
        (anchors,) = (speculation_steps[:, 0] >= 0).nonzero()
        accepted, drafted = (
            speculation_steps[anchors, 0].tolist(),
            speculation_steps[anchors, 1:].tolist(),
        )
        ids = row.ids[x].tolist()
        ctx, final_1TD, after_NKD = read_drafts(
            self.target, self.needs, ids, anchors.tolist(), accepted, drafted
        )
        summary = summarise(self.target, final_1TD, self.sampler)
        of_text = parts_of(self.sampler, final_1TD, summary, ctx.layers_BTF)
        of_drafts = summarise(self.target, after_NKD, self.sampler)
        after = parts_of(self.sampler, after_NKD, of_drafts, None)
        hidden_states = {name: part[0] for name, part in of_text.items()}
        return hidden_states | {AFTER + name: part for name, part in after.items()}


class TextBatches:
    """Rows that the target never reads: see `text_batch`. Raises UserError if a drafter with these
    needs cannot read the target's embedding in place of a hidden state."""

    def __init__(self, target: TargetParts, needs: HiddenStateSpec, rows: Sequence[Row]) -> None:
        wide = target.embedding.weight.shape[1]
        require(
            wide == target.width or needs == HiddenStateSpec(),
            f"{target.title} has embeddings of width {wide}, which cannot stand in for hidden "
            f"states of width {target.width}: leave out hidden_states.mode=none, or give a drafter "
            "that reads no hidden states",
        )
        self.target, self.needs, self.rows = target, needs, rows
        self.waited = 0.0  # nothing is stored

    def expect(self, requests: Sequence[Sequence[int]]) -> None:
        """Do nothing: nothing is read ahead."""

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = [self.rows[i] for i in indices]
        return text_batch(self.target, self.needs, *texts(rows, self.target.device))


def assembled(
    rows: Sequence[Row],
    device: torch.device,
    needs: HiddenStateSpec,
    read: Callable[[Row, slice], HiddenStateTensors],
) -> Batch:
    """A batch made of the hidden states of single documents, which `read` returns."""
    ctx, mask_BT = texts(rows, device)
    by_row = [[read(row, x) for x in documents(row)] for row in rows]

    def of_text(name: str) -> Tensor:
        """A hidden state [B, T, …], 0 at padding."""
        whole = [torch.cat([hidden_states[name] for hidden_states in of_row]) for of_row in by_row]
        return pad_sequence(whole, batch_first=True).to(device)

    def after_drafts(name: str) -> Tensor:
        """A hidden state [N, K, …]."""
        parts = [hidden_states[AFTER + name] for of_row in by_row for hidden_states in of_row]
        return torch.cat(parts).to(device)

    def states(hidden_state: Callable[[str], Tensor]) -> tuple[Tensor, Summary]:
        final, log_z, threshold, argmax = map(hidden_state, PARTS[:4])
        whole_log_z = hidden_state(PARTS[4]) if PARTS[4] in by_row[0][0] else log_z
        return final, Summary(log_z, threshold, argmax.long(), whole_log_z)

    final, summary = states(of_text)
    ctx.layers_BTF = of_text("layers") if needs.layers else None
    ctx.final_BTD = final if needs.final_hidden else None
    speculation_steps = [
        torch.from_numpy(row.speculation_steps).long()
        for row in rows
        if row.speculation_steps is not None
    ]
    if not speculation_steps:
        return Batch(ctx, final, summary, mask_BT)
    by_position = (
        pad_sequence(speculation_steps, batch_first=True, padding_value=-1).to(device).flatten(0, 1)
    )
    place_N = (by_position[:, 0] >= 0).nonzero()[:, 0]
    drafted = by_position[place_N, 0], by_position[place_N, 1:]
    return Batch(
        ctx, final, summary, mask_BT, OnTrajectory(place_N, *drafted, *states(after_drafts))
    )


def texts(rows: Sequence[Row], device: torch.device) -> tuple[Context, Tensor]:
    """Rows as tensors [B, T] without hidden states, padded on the right to the longest, and their
    mask."""

    def padded(name: str, fill: int = 0) -> Tensor:
        parts = [torch.from_numpy(getattr(row, name)).long() for row in rows]
        return pad_sequence(parts, batch_first=True, padding_value=fill).to(device)

    ctx = Context(padded("ids"), document_BT=padded("document", -1), position_BT=padded("position"))
    return ctx, padded("mask").bool()


class BatchesReadAhead:
    """Reads up to `count` batches ahead of the current one, in the expected order, in one thread.
    The content of a batch does not depend on when it is read."""

    def __init__(self, read: Callable[[Sequence[int]], Batch], count: int) -> None:
        self._read, self._count = read, count
        self._expected = deque[Sequence[int]]()
        self._under_way = deque[tuple[Sequence[int], Future[Batch]]]()
        self._pool: ThreadPoolExecutor | None = None

    def expect(self, requests: Sequence[Sequence[int]]) -> None:
        """Expect these batches next, in this order. Formerly expected ones are dropped; if there
        are no new ones, the thread ends."""
        for _, future in self._under_way:
            future.cancel()
        self._under_way.clear()
        self._expected = deque(requests)
        if not self._count:
            return
        if requests and self._pool is None:
            self._pool = ThreadPoolExecutor(1, "hidden_states")
        elif not requests and self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._ask()

    def take(self, indices: Sequence[int]) -> Batch | None:
        """The batch of these rows; None if it is not the next expected one. Raises any error from
        reading it."""
        if not self._under_way or list(self._under_way[0][0]) != list(indices):
            return None
        _, future = self._under_way.popleft()
        self._ask()
        return future.result()

    def _ask(self) -> None:
        while self._pool is not None and self._expected and len(self._under_way) < self._count:
            indices = self._expected.popleft()
            self._under_way.append((indices, self._pool.submit(self._read, indices)))


class StoredBatches:
    """Rows whose documents are all stored. A document with damaged hidden states is passed to
    `again`, in a row of its own, to be stored again."""

    def __init__(
        self,
        store: HiddenStateStore,
        needs: HiddenStateSpec,
        rows: Sequence[Row],
        device: torch.device,
        again: Callable[[Row], None] | None = None,
        prefetch: int = 0,
    ) -> None:
        self.store, self.needs, self.rows, self.device = store, needs, rows, device
        self._again, self.waited = again, 0.0
        self._prefetch = BatchesReadAhead(self._on_host, prefetch)

    def expect(self, requests: Sequence[Sequence[int]]) -> None:
        self._prefetch.expect(requests)

    def batch(self, indices: Sequence[int]) -> Batch:
        start = time.perf_counter()
        try:
            batch = self._prefetch.take(indices)
        except Damaged:  # it is mended below: the thread must not run the target
            batch = None
        if batch is None:
            rows = [self.rows[i] for i in indices]
            batch = assembled(rows, self.device, self.needs, self._document)
        elif self.device.type != "cpu":
            batch = moved(batch, lambda x: x.to(self.device, non_blocking=True))
        self.waited += time.perf_counter() - start
        return batch

    def _on_host(self, indices: Sequence[int]) -> Batch:
        """The batch before it is moved to the device, in pinned memory for a GPU. Raises Damaged,
        without repairing anything."""
        rows, host = [self.rows[i] for i in indices], torch.device("cpu")
        batch = assembled(rows, host, self.needs, self.store.read_document)
        return moved(batch, Tensor.pin_memory) if self.device.type == "cuda" else batch

    def _document(self, row: Row, x: slice) -> HiddenStateTensors:
        try:
            return self.store.read_document(row, x)
        except Damaged as error:
            if self._again is None:
                raise
            tell(f"{error}: the damaged hidden states are computed again")
        with self.store.lock:
            self.store.discard(row, x)
            self._again(part_of(row, np.r_[x]))
            return self.store.read_document(row, x)


def moved(value: T, move: Callable[[Tensor], Tensor]) -> T:
    """A tensor, or a dataclass or tuple with tensors in it, with `move` applied to each of them."""
    if isinstance(value, Tensor):
        return move(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return type(value)(*(moved(x, move) for x in value))
    if is_dataclass(value) and not isinstance(value, type):
        inner = {f.name: moved(getattr(value, f.name), move) for f in fields(value)}
        return replace(value, **inner)
    return value

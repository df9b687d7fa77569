"""Where training gets the target's hidden states: `OnlineBatches` runs the target whenever rows are
requested; `StoredBatches` (store.py) reads stored ones."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.context import Context, FeatureSpec
from specdec.forcing.batch import Batch, OnTrajectory, batch_of, read_drafts, summarise
from specdec.sampling.sampler import Sampler, Summary
from specdec.targets.target import Target
from train.data.sequences import Row

# the names of tensors, see `parts_of`; the last but one is stored if the sampler has cutoffs, the
# last if the drafter reads layers
PARTS = ("final", "log_z", "threshold", "argmax", "whole_log_z", "layers")
AFTER = "after_"  # begins the names of the same parts after drafted tokens [Ro, K, …]
HiddenStateTensors = dict[str, Tensor]  # of the tokens of one document [T, …], or of rows [B, T, …]


class BatchSource(Protocol):
    """Packed rows, with the target's features for them."""

    waited: float  # seconds spent so far on waiting for stored features

    @property
    def rows(self) -> Sequence[Row]: ...

    def expect(self, requests: Sequence[Sequence[int]]) -> None:
        """Say which batches will be asked for, in order, so that stored ones may be read ahead;
        none: nothing more will be."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Ids, features, final hidden states and the summary of p for the rows at these indices,
        padded to the longest of them. For rows with a decoder's rounds, also the states and the
        summary after the tokens that were drafted there."""


class OnlineBatches:
    """Rows that the target reads whenever they are requested."""

    def __init__(
        self, target: Target, needs: FeatureSpec, sampler: Sampler, rows: Sequence[Row]
    ) -> None:
        self.target, self.needs, self.sampler, self.rows = target, needs, sampler, rows
        self.waited = 0.0  # it computes instead

    def expect(self, requests: Sequence[Sequence[int]]) -> None:
        """Nothing is read ahead."""

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = [self.rows[i] for i in indices]
        if rows[0].rounds is not None:
            return assembled(rows, self.target.device, self.needs, self.document)
        return batch_of(self.target, self.needs, self.sampler, *texts(rows, self.target.device))

    def bytes(self, indices: Sequence[int]) -> int:
        """The size of the features of the rows at these indices."""
        states = self.target.width * (1 + len(self.needs.layers)) * self.target.dtype.itemsize
        return sum(len(self.rows[i].ids) for i in indices) * states

    def document(self, row: Row, x: slice) -> HiddenStateTensors:
        """The features of one document with rounds, and those after its drafted tokens."""
        assert row.rounds is not None
        rounds = row.rounds[x]
        (anchors,) = (rounds[:, 0] >= 0).nonzero()
        accepted, drafted = rounds[anchors, 0].tolist(), rounds[anchors, 1:].tolist()
        ids = row.ids[x].tolist()
        ctx, final_1TD, after_RoKD = read_drafts(
            self.target, self.needs, ids, anchors.tolist(), accepted, drafted
        )
        summary = summarise(self.target, final_1TD, self.sampler)
        of_text = parts_of(self.sampler, final_1TD, summary, ctx.layers_BTF)
        of_drafts = summarise(self.target, after_RoKD, self.sampler)
        after = parts_of(self.sampler, after_RoKD, of_drafts, None)
        features = {name: part[0] for name, part in of_text.items()}
        return features | {AFTER + name: part for name, part in after.items()}


def parts_of(
    sampler: Sampler, final: Tensor, summary: Summary, layers: Tensor | None
) -> HiddenStateTensors:
    """The tensors to store: the final hidden state [..., D] and the layers that the drafter reads
    [..., F], if any, in the target's dtype, and the numbers of p's summary, each [...]. Without
    cutoffs, two of these are the same, and one is stored."""
    numbers = summary.log_z_N, summary.threshold_N, summary.argmax_N.int()
    whole_log_z = summary.whole_log_z_N if sampler.truncates else None
    parts = (final, *numbers, whole_log_z, layers)
    return {name: x for name, x in zip(PARTS, parts, strict=True) if x is not None}


def names_of_parts(sampler: Sampler, layers: bool) -> list[str]:
    """The names of what `parts_of` gives, with or without layers."""
    left_out = {"whole_log_z": not sampler.truncates, "layers": not layers}
    return [name for name in PARTS if not left_out.get(name, False)]


def assembled(
    rows: Sequence[Row],
    device: torch.device,
    needs: FeatureSpec,
    read: Callable[[Row, slice], HiddenStateTensors],
) -> Batch:
    """A batch put together from the features of single documents, which `read` gives."""
    ctx, mask_BT = texts(rows, device)
    by_row = [[read(row, x) for x in documents(row)] for row in rows]

    def of_text(name: str) -> Tensor:
        """A feature [B, T, …], 0 at padding."""
        whole = [torch.cat([features[name] for features in of_row]) for of_row in by_row]
        return pad_sequence(whole, batch_first=True).to(device)

    def after_drafts(name: str) -> Tensor:
        """A feature [Ro, K, …]."""
        parts = [features[AFTER + name] for of_row in by_row for features in of_row]
        return torch.cat(parts).to(device)

    def states(feature: Callable[[str], Tensor]) -> tuple[Tensor, Summary]:
        final, log_z, threshold, argmax = map(feature, PARTS[:4])
        whole_log_z = feature(PARTS[4]) if PARTS[4] in by_row[0][0] else log_z
        return final, Summary(log_z, threshold, argmax.long(), whole_log_z)

    final, summary = states(of_text)
    ctx.layers_BTF = of_text("layers") if needs.layers else None
    ctx.final_BTD = final if needs.final_hidden else None
    rounds = [torch.from_numpy(row.rounds).long() for row in rows if row.rounds is not None]
    if not rounds:
        return Batch(ctx, final, summary, mask_BT)
    by_position = pad_sequence(rounds, batch_first=True, padding_value=-1).to(device).flatten(0, 1)
    place_Ro = (by_position[:, 0] >= 0).nonzero()[:, 0]
    drafted = by_position[place_Ro, 0], by_position[place_Ro, 1:]
    return Batch(
        ctx, final, summary, mask_BT, OnTrajectory(place_Ro, *drafted, *states(after_drafts))
    )


def texts(rows: Sequence[Row], device: torch.device) -> tuple[Context, Tensor]:
    """Rows as tensors [B, T] padded on the right to the longest, without features; their mask."""

    def padded(name: str, fill: int = 0) -> Tensor:
        parts = [torch.from_numpy(getattr(row, name)).long() for row in rows]
        return pad_sequence(parts, batch_first=True, padding_value=fill).to(device)

    ctx = Context(padded("ids"), document_BT=padded("document", -1), position_BT=padded("position"))
    return ctx, padded("mask").bool()


def documents(row: Row) -> Iterator[slice]:
    """The place of each document in a row."""
    starts = np.flatnonzero(row.position == 0).tolist()
    yield from map(slice, starts, [*starts[1:], len(row.ids)])


def name_of(ids: NDArray[np.int32]) -> str:
    """The name that a document is stored under: a hash of its tokens."""
    return hashlib.blake2b(ids.astype(np.int32).tobytes(), digest_size=12).hexdigest()


def name_of_rounds(row: Row, x: slice) -> str:
    """The name under which the target's features after a document's drafted tokens are stored."""
    assert row.rounds is not None
    return name_of(np.column_stack([row.ids[x], row.rounds[x]]))

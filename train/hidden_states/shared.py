"""The target's features of texts that begin alike, such as those of one chat: what they share is
read once."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from torch import Tensor

from specdec.context import FeatureSpec
from specdec.targets.target import Target
from train.data.sequences import Document
from train.hidden_states.store import HiddenStateStore

WORTH = 0.25  # the least share of a chat's tokens that must be shared: one pass reads one text
AT_ONCE = 256 << 20  # bytes of features that are kept before they are written


def chats(documents: Sequence[Document], store: HiddenStateStore) -> list[list[Document]]:
    """The documents of each chat that has several, in order, of which some are not stored yet and
    enough is shared."""
    by_chat: dict[str, list[Document]] = {}
    for document in documents:
        if document.chat and document.rounds is None:
            by_chat.setdefault(document.chat, []).append(document)
    groups = [g for g in by_chat.values() if not all(store.has(d.ids) for d in g)]
    return [group for group in groups if saved(group) >= WORTH]


def saved(group: Sequence[Document]) -> float:
    """The share of a chat's tokens that need not be read again."""
    total = sum(len(document.ids) for document in group)
    return sum(_starts(group)) / total


def _starts(group: Sequence[Document]) -> Iterator[int]:
    """From which token on each document is read: up to there, it is like the one before. What has
    been taken as shared once cannot be taken back, so a document that differs within it is read
    anew."""
    known = 0
    yield known
    for one, two in pairwise(group):
        end = shared(one.ids, two.ids)
        known = end if end >= known else 0
        yield known


def shared(one: NDArray[np.int32], two: NDArray[np.int32]) -> int:
    """How many tokens two texts share at their beginning, at most all but the last of either."""
    most = min(len(one), len(two)) - 1
    differ = np.flatnonzero(one[:most] != two[:most])
    return int(differ[0]) if len(differ) else most


def fill(
    store: HiddenStateStore,
    target: Target,
    needs: FeatureSpec,
    groups: Sequence[Sequence[Document]],
    progress: Progress,
) -> int:
    """Store the features of chats; the number of tokens that the target has read. A text continues
    in the cache of the one before it, from where they differ."""
    total = sum(len(d.ids) for group in groups for d in group)
    store.prepare(total)
    task = progress.add_task("target features of chats", total=total)
    read = 0
    for group in groups:
        cache, committed = target.new_cache(), 0
        whole: tuple[Tensor, Tensor | None] | None = None
        for document, start in zip(group, _starts(group), strict=True):
            if start < committed:
                cache, committed, whole = target.new_cache(), 0, None
            elif whole is not None:
                cache.keep([start - committed])
                committed = start
            ids_1T = torch.from_numpy(document.ids[start:]).long()[None].to(target.device)
            ctx, final_1TD = target.features(ids_1T, needs, cache=cache)
            read += ids_1T.shape[1]
            layers_1TF = ctx.layers_BTF
            if whole is not None:
                final_1TD = torch.cat([whole[0][:, :start], final_1TD], 1)
                if layers_1TF is not None and whole[1] is not None:
                    layers_1TF = torch.cat([whole[1][:, :start], layers_1TF], 1)
            whole = final_1TD, layers_1TF
            store.keep(document.ids.tolist(), final_1TD, layers_1TF, target)
            progress.advance(task, len(document.ids))
        if store.unwritten > AT_ONCE:
            store.write()
    store.write()
    progress.remove_task(task)
    return read

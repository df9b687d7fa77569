"""The target's hidden states for the rows of a run: read from a store, which is filled first, or
computed for each request. Training does not depend on which.

The target in this process fills a store, either as it reads texts (with `OnlineBatches` as the
source) or while it answers prompts; or engines do (engine_hidden_states.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from rich.progress import Progress
from torch import Tensor

from specdec.context import HiddenStateSpec
from specdec.drafters import family
from specdec.drafters.base import Drafter
from specdec.errors import memory_for, require
from specdec.progress import TOKENS, bars, console
from specdec.ranks import Ranks
from specdec.sampling.sampler import Sampler
from specdec.targets.loading import TargetLoader
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from train.accelerated import ranks_of
from train.budget import Budget, StageTime
from train.data.sequences import Document, Row, pack_rows
from train.hidden_states import engine_hidden_states
from train.hidden_states.batches import BatchSource, OnlineBatches, StoredBatches, TextBatches
from train.hidden_states.store import (
    AFTER,
    SHARD,
    HiddenStatesConfig,
    HiddenStateStore,
    HiddenStateTensors,
    documents,
    name_of,
    name_of_steps,
    parts_of,
)
from train.shards import Shard

# the least share of a chat's tokens that must be shared: one forward pass reads one text
WORTH_SHARING = 0.25
UNWRITTEN = 256 << 20  # bytes of hidden states that are kept before they are written
# With a clock: texts whose hidden states one process computes before it looks at it, at first; and
# twice as many as long as that takes less than a part of the time.
PORTION, LONG = 8, 24


def needs_of(config: Any, parts: TargetParts) -> HiddenStateSpec:
    """The hidden states that a drafter of this configuration reads, known before it is built."""
    kind = family(config.name)
    sizes = kind.plan(config, parts)  # not on the meta device, since it may load the target
    with torch.device("meta"):
        return kind(config, sizes).needs


@dataclass
class RunHiddenStates:
    """The source of the target's hidden states for a run. `store` is None if they are computed for
    each request."""

    target: TargetLoader
    needs: HiddenStateSpec | None  # stored hidden states
    sampler: Sampler
    length: int  # maximum length of a packed row
    store: HiddenStateStore | None
    held_out_alone: bool  # whether it stores hidden states of held-out texts only
    keeps_layers: bool  # whether the target's layers are needed after the store is filled
    engines: Sequence[str]  # engines that fill the store; without them, the target does
    prefetch: int  # batches that are read before they are needed
    accelerator: Accelerator
    progress: Progress

    @classmethod
    def of_run(
        cls,
        stored: HiddenStatesConfig | None,
        drafter: Any,
        sampler: Sampler,
        length: int,
        keeps_layers: bool,
        target: TargetLoader,
        accelerator: Accelerator,
        progress: Progress,
        held_out_alone: bool = False,
    ) -> "RunHiddenStates":
        """The hidden states for a drafter of this configuration, kept as `stored` says (None: not
        stored); with `held_out_alone`, training reads none. Raises UserError if the store holds
        hidden states of another kind."""
        needs, store = None, None
        if stored is not None:
            needs = needs_of(drafter, target.parts)
            store = HiddenStateStore(stored, target.parts, needs, sampler)
        return cls(
            target=target,
            needs=needs,
            sampler=sampler,
            length=length,
            store=store,
            held_out_alone=held_out_alone,
            keeps_layers=keeps_layers,
            engines=stored.engines if stored is not None else [],
            prefetch=stored.prefetch if stored is not None else 0,
            accelerator=accelerator,
            progress=progress,
        )

    def sources(self, drafter: Drafter, texts: Sequence[Sequence[Document]]) -> list[BatchSource]:
        """A source of packed rows for each list of documents. If there is a store, the missing
        hidden states are computed first; then the target's layers are freed, unless they are
        needed."""
        needs = drafter.needs
        if self.needs not in (None, needs):
            raise RuntimeError("a drafter reads other hidden states than its plan says: a bug")
        sides = [pack_rows(side, self.length) for side in texts]
        if (store := self.store) is None:
            return [self._online(needs, rows) for rows in sides]
        store.refresh()
        self._fill_chats(needs, store, [document for side in texts for document in side])
        missing = store.missing([row for rows in sides for row in rows])
        if missing:
            console.print(store.announced(sum(len(row.ids) for row in missing)))
        self.accelerator.wait_for_everyone()  # until all have seen which rows are missing
        self._fill_parts(needs, missing)
        store.refresh()
        if not self.keeps_layers:
            self.target.release()
            drafter.attach(self.target.parts)
        device = self.target.parts.device
        again = partial(self._again, needs)
        return [StoredBatches(store, needs, rows, device, again, self.prefetch) for rows in sides]

    def text_source(self, drafter: Drafter, texts: Sequence[Document]) -> BatchSource:
        """A source of packed rows of documents that the target does not read. Raises UserError as
        `TextBatches` does."""
        return TextBatches(self.target.parts, drafter.needs, pack_rows(texts, self.length))

    def fill_in_time(
        self,
        texts: Sequence[Document],
        budget: Budget,
        stage: str,
        key: str,
        part: float = 1.0,
        floor: int = 0,
    ) -> list[Document]:
        """Store the hidden states of texts as long as the budget allows. Returns the texts with
        hidden states, in order; all texts if training reads no stored ones or there is no
        budget."""
        store, needs = self.store, self.needs
        if store is None or needs is None or self.held_out_alone or not budget.active:
            return list(texts)

        def filled(texts: Sequence[Document], time: StageTime | None) -> list[Document]:
            if time is None:  # `sources` fills what is missing
                return list(texts)
            store.refresh()
            missing = self._ranks.first(
                lambda: [place for place, text in enumerate(texts) if not _stored(store, text)]
            )
            workers = self._ranks.workers
            time.floor = -(-(time.floor - len(texts) + len(missing)) // workers)
            missing.sort(key=lambda place: name_of(texts[place].ids))  # in a random, fixed order
            count = PORTION * workers
            while missing:
                goes_on: bool = self._ranks.first(time.goes_on)
                if not goes_on:
                    break
                some, missing = [texts[i] for i in missing[:count]], missing[count:]
                until = time.used + time.seconds / LONG
                self._fill_chats(needs, store, some)
                rows = store.missing(pack_rows(some, self.length))
                self.accelerator.wait_for_everyone()  # until all have seen which rows are missing
                self._fill_parts(needs, rows)
                if self._ranks.world > 1:  # else the store knows all that it holds
                    store.refresh()
                time.finish(-(-len(some) // workers))
                if self._ranks.first(partial(time.earlier, until)):
                    count *= 2
            left = {*missing}
            return [text for place, text in enumerate(texts) if place not in left]

        return budget.texts_in_time(stage, key, texts, filled, part, floor)

    def fill_shard(self, shard: Shard, texts: Sequence[Sequence[Document]]) -> None:
        """Store the hidden states of a shard of the rows. Each process of a launch does a part of
        it."""
        store, needs = self.store, self.needs
        assert store is not None and needs is not None
        rows = [row for side in texts for row in pack_rows(side, self.length)]
        store.refresh()
        missing = store.missing(shard.part(rows))
        console.print(store.announced(sum(len(row.ids) for row in missing)))
        self.accelerator.wait_for_everyone()  # until all have seen which rows are missing
        self._fill_parts(needs, missing)

    def _fill_parts(self, needs: HiddenStateSpec, missing: Sequence[Row]) -> None:
        """Store the hidden states of rows, divided over the processes."""
        with (
            memory_for("computing the target's hidden states", "lower data.max_length"),
            self._ranks.part(missing) as mine,
        ):
            if mine:
                self._fill(needs, mine, self.progress)
        self.accelerator.wait_for_everyone()

    @property
    def _ranks(self) -> Ranks:
        return ranks_of(self.accelerator, self.target)

    def _online(self, needs: HiddenStateSpec, rows: Sequence[Row]) -> OnlineBatches:
        return OnlineBatches(self.target.whole(), needs, self.sampler, rows)

    def _fill_chats(
        self, needs: HiddenStateSpec, store: HiddenStateStore, documents: Sequence[Document]
    ) -> None:
        """Store the hidden states of chats with several texts, whose common prefixes are read once.
        Engines do this themselves."""
        if self.engines or not any(document.chat for document in documents):
            return
        groups = chats_to_read(documents, store)
        # another run may fill the store at this moment: all processes go by what the first has seen
        agreed = self._ranks.first(lambda: bool(groups))
        if not agreed or self.target.whole().new_cache().chains_only:
            return
        total = sum(len(d.ids) for group in groups for d in group)
        once = total - sum(shared_part(g) * sum(len(d.ids) for d in g) for g in groups)
        console.print(
            f"the {total:,} tokens of {len(groups):,} chats in several texts share their "
            f"beginnings: the target reads {once:,.0f} of them"
        )
        self.accelerator.wait_for_everyone()  # until all have seen which are missing
        with (
            memory_for("computing the target's hidden states", "lower data.max_length"),
            self._ranks.part(groups) as mine,
        ):
            if mine:
                fill_chats(store, self.target.whole(), needs, mine, self.progress)
        self.accelerator.wait_for_everyone()
        store.refresh()

    def _again(self, needs: HiddenStateSpec, row: Row) -> None:
        """Store the hidden states of a row that were found damaged. Raises UserError if one process
        alone cannot do it."""
        assert self.store is not None
        require(
            self.target.team is None,
            f"a document's hidden states in {self.store.folder} were damaged, and this process "
            "holds only a part of the target: run the same command again, which computes them anew",
        )
        with bars(console, False) as quiet:
            self._fill(needs, [row], quiet)
        if not self.keeps_layers:
            self.target.release()

    def _fill(self, needs: HiddenStateSpec, rows: Sequence[Row], progress: Progress) -> None:
        assert self.store is not None
        if self.engines:
            engine_hidden_states.fill_from_engines(
                self.store, rows, self.engines, self.target, progress
            )
        else:
            fill_from_batches(self.store, self._online(needs, rows), progress)


def _stored(store: HiddenStateStore, text: Document) -> bool:
    """Whether all the hidden states of a text are stored."""
    return not store.missing(pack_rows([text], len(text.ids)))


def fill_from_batches(store: HiddenStateStore, source: BatchSource, progress: Progress) -> None:
    """Store all documents of a source's rows. Raises UserError if the disk has no room."""
    tokens = sum(len(row.ids) for row in source.rows)
    speculation_steps = (
        row.speculation_steps for row in source.rows if row.speculation_steps is not None
    )
    drafted = sum((x[:, 0] >= 0).sum() * (x.shape[1] - 1) for x in speculation_steps)
    store.prepare(tokens + int(drafted))
    task = progress.add_task("target hidden states", total=tokens, unit=TOKENS)
    for start in range(0, len(source.rows), SHARD):
        by_name: dict[str, HiddenStateTensors] = {}
        for i in range(start, min(start + SHARD, len(source.rows))):
            row, batch = source.rows[i], source.batch([i])
            parts = parts_of(
                store.kind.sampler, batch.final_BTD, batch.summary, batch.ctx.layers_BTF
            )
            for x in documents(row):
                kept = {n: part[0, x].cpu().contiguous() for n, part in parts.items()}
                by_name[name_of(row.ids[x])] = store.in_bits(kept)
                if (visited := batch.visited) is not None:
                    place_N = visited.place_N
                    of_x = (place_N >= x.start) & (place_N < x.stop)
                    after = parts_of(store.kind.sampler, visited.final_NKD, visited.summary, None)
                    by_name[name_of_steps(row, x)] = {
                        AFTER + n: part[of_x].cpu().contiguous() for n, part in after.items()
                    }
            progress.advance(task, len(row.ids))
        store.add_documents(by_name)
    progress.remove_task(task)


def chats_to_read(documents: Sequence[Document], store: HiddenStateStore) -> list[list[Document]]:
    """The documents of each chat with several, in order, if some are not stored yet and a large
    enough part is common to them."""
    by_chat: dict[str, list[Document]] = {}
    for document in documents:
        if document.chat and document.speculation_steps is None:
            by_chat.setdefault(document.chat, []).append(document)
    groups = [g for g in by_chat.values() if not all(store.has(d.ids) for d in g)]
    return [group for group in groups if shared_part(group) >= WORTH_SHARING]


def shared_part(group: Sequence[Document]) -> float:
    """The share of a chat's tokens that need not be read again."""
    total = sum(len(document.ids) for document in group)
    return sum(first_unread(group)) / total


def first_unread(group: Sequence[Document]) -> Iterator[int]:
    """For each document, the token from which on it is read: before it, the document equals the
    previous one. The shared prefix can only grow, so a document that differs within it is read
    completely."""
    known = 0
    yield known
    for one, two in pairwise(group):
        end = shared_length(one.ids, two.ids)
        known = end if end >= known else 0
        yield known


def shared_length(one: NDArray[np.int32], two: NDArray[np.int32]) -> int:
    """The number of tokens in the common prefix of two texts, excluding the last token of
    either."""
    most = min(len(one), len(two)) - 1
    differ = np.flatnonzero(one[:most] != two[:most])
    return int(differ[0]) if len(differ) else most


def fill_chats(
    store: HiddenStateStore,
    target: Target,
    needs: HiddenStateSpec,
    groups: Sequence[Sequence[Document]],
    progress: Progress,
) -> int:
    """Store the hidden states of chats. Returns the number of tokens that the target has read. A
    text continues in the cache of the one before it, from the point where they differ."""
    total = sum(len(d.ids) for group in groups for d in group)
    store.prepare(total)
    task = progress.add_task("target hidden states of chats", total=total, unit=TOKENS)
    read = 0
    for group in groups:
        cache, committed = target.new_cache(), 0
        whole: tuple[Tensor, Tensor | None] | None = None
        for document, start in zip(group, first_unread(group), strict=True):
            if start < committed:
                cache, committed, whole = target.new_cache(), 0, None
            elif whole is not None:
                cache.commit([start - committed])
                committed = start
            ids_1T = torch.from_numpy(document.ids[start:]).long()[None].to(target.device)
            ctx, final_1TD = target.hidden_states(ids_1T, needs, cache=cache)
            read += ids_1T.shape[1]
            layers_1TF = ctx.layers_BTF
            if whole is not None:
                final_1TD = torch.cat([whole[0][:, :start], final_1TD], 1)
                if layers_1TF is not None and whole[1] is not None:
                    layers_1TF = torch.cat([whole[1][:, :start], layers_1TF], 1)
            whole = final_1TD, layers_1TF
            store.hold_document(document.ids.tolist(), final_1TD, layers_1TF, target)
            progress.advance(task, len(document.ids))
        if store.unwritten > UNWRITTEN:
            store.write()
    store.write()
    progress.remove_task(task)
    return read

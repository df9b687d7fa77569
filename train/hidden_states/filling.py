"""The target's features for the rows of a run: read from a store, which is filled first, or
computed whenever they are requested. Training does not know which.

The target in this process fills a store, either as it reads texts (with `OnlineBatches` as the
source) or while it answers prompts; or engines do (engine_features.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import Progress

from specdec.context import FeatureSpec
from specdec.drafters import family
from specdec.drafters.base import Drafter
from specdec.errors import memory_for, require
from specdec.progress import bars, console
from specdec.ranks import Ranks
from specdec.sampling.sampler import Sampler
from specdec.targets.on_demand import TargetLoader
from specdec.targets.parts import TargetParts
from train.accelerated import ranks_of
from train.data.sequences import Document, Row, pack
from train.hidden_states import engine_features, shared
from train.hidden_states.batches import BatchSource, OnlineBatches
from train.hidden_states.store import HiddenStateStore, StoredBatches
from train.run_config import Config
from train.shards import Shard


def needs_of(config: Any, parts: TargetParts) -> FeatureSpec:
    """What a drafter of this configuration reads of the target, known before it is built."""
    kind = family(config.name)
    sizes = kind.plan(config, parts)  # not on the meta device, since it may load the target
    with torch.device("meta"):
        return kind(config, sizes).needs


@dataclass
class RunHiddenStates:
    """Where the rows of a run get the target's features from. `store` is None if they are computed
    whenever they are requested."""

    target: TargetLoader
    needs: FeatureSpec | None  # what is stored
    sampler: Sampler
    length: int  # of a packed row, at most
    store: HiddenStateStore | None
    keeps_layers: bool  # whether the target's layers are needed after the store is filled
    engines: Sequence[str]  # that fill the store; if there are none, the target does
    ahead: int  # batches that are read before they are needed
    accelerator: Accelerator
    progress: Progress

    @classmethod
    def of(
        cls,
        cfg: Config,
        target: TargetLoader,
        accelerator: Accelerator,
        progress: Progress,
    ) -> "RunHiddenStates":
        """Raises UserError if the store holds features of another kind."""
        needs, store = None, None
        if cfg.stores_features:
            needs = needs_of(cfg.drafter, target.parts)
            store = HiddenStateStore(cfg.features, target.parts, needs, cfg.sampler)
        where = target, needs, cfg.sampler, cfg.data.max_length, store, cfg.needs_layers
        more = cfg.features.engines, cfg.features.ahead
        return cls(*where, *more, accelerator, progress)

    def sources(self, drafter: Drafter, texts: Sequence[Sequence[Document]]) -> list[BatchSource]:
        """A source of packed rows for each list of documents. If there is a store, the missing
        features are computed first; then the target's layers are freed, unless they are needed."""
        needs = drafter.needs
        if self.needs not in (None, needs):
            raise RuntimeError("a drafter reads other features than its plan says: a bug")
        sides = [pack(side, self.length) for side in texts]
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
        return [StoredBatches(store, needs, rows, device, again, self.ahead) for rows in sides]

    def fill_share(self, share: Shard, texts: Sequence[Sequence[Document]]) -> None:
        """Store the features of a share of the rows. Each process of a launch does a part of it."""
        store, needs = self.store, self.needs
        assert store is not None and needs is not None
        rows = [row for side in texts for row in pack(side, self.length)]
        store.refresh()
        missing = store.missing(share.part(rows))
        console.print(store.announced(sum(len(row.ids) for row in missing)))
        self.accelerator.wait_for_everyone()  # until all have seen which rows are missing
        self._fill_parts(needs, missing)

    def _fill_parts(self, needs: FeatureSpec, missing: Sequence[Row]) -> None:
        """Store the features of rows; each process does a part of them."""
        with (
            memory_for("computing the target's features", "lower data.max_length"),
            self._ranks.part(missing) as mine,
        ):
            if mine:
                self._fill(needs, mine, self.progress)
        self.accelerator.wait_for_everyone()

    @property
    def _ranks(self) -> Ranks:
        return ranks_of(self.accelerator, self.target)

    def _online(self, needs: FeatureSpec, rows: Sequence[Row]) -> OnlineBatches:
        return OnlineBatches(self.target.whole(), needs, self.sampler, rows)

    def _fill_chats(
        self, needs: FeatureSpec, store: HiddenStateStore, documents: Sequence[Document]
    ) -> None:
        """Store the features of chats whose several texts share their beginnings, which are read
        once; engines do this by themselves."""
        if self.engines or not any(document.chat for document in documents):
            return
        groups = shared.chats(documents, store)
        # another run may fill the store at this moment: all processes go by what the first has seen
        agreed = self._ranks.first(lambda: bool(groups))
        if not agreed or self.target.whole().new_cache().chains_only:
            return
        total = sum(len(d.ids) for group in groups for d in group)
        once = total - sum(shared.saved(g) * sum(len(d.ids) for d in g) for g in groups)
        console.print(
            f"the {total:,} tokens of {len(groups):,} chats in several texts share their "
            f"beginnings: the target reads {once:,.0f} of them"
        )
        self.accelerator.wait_for_everyone()  # until all have seen which are missing
        with (
            memory_for("computing the target's features", "lower data.max_length"),
            self._ranks.part(groups) as mine,
        ):
            if mine:
                shared.fill(store, self.target.whole(), needs, mine, self.progress)
        self.accelerator.wait_for_everyone()
        store.refresh()

    def _again(self, needs: FeatureSpec, row: Row) -> None:
        """Store the features of a row that turned out to be damaged. Raises UserError where one
        process alone cannot."""
        assert self.store is not None
        require(
            self.target.team is None,
            f"a document's features in {self.store.folder} were damaged, and this process holds "
            "only a part of the target: run the same command again, which computes them anew",
        )
        with bars(console, False) as quiet:
            self._fill(needs, [row], quiet)
        if not self.keeps_layers:
            self.target.release()

    def _fill(self, needs: FeatureSpec, rows: Sequence[Row], progress: Progress) -> None:
        assert self.store is not None
        if self.engines:
            engine_features.fill_from_engines(self.store, rows, self.engines, self.target, progress)
        else:
            self.store.fill(self._online(needs, rows), progress)

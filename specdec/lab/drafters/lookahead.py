"""Lookahead decoding (Fu et al. 2024): the target drafts for itself, by Jacobi iteration.

A window of W columns and N - 1 levels follows the anchor: level l of column j guesses the token l +
j + 1 places ahead, and was made one iteration before level l + 1. The target reads the window as
scouts in the verifying pass, which gives each column's next guess. The N tokens of a column go to a
pool, as the text's n-grams do. The pool keeps the latest G n-grams for each first token; those that
begin with the anchor are drafted.

Every pass is W (N - 1) tokens wider. Lookahead pays only if that costs little and if prompt lookup,
which is free, finds too few n-grams in the text. The window depends on the speculation steps so
far; teacher forcing uses only the text's n-grams, so its α is a lower bound on the decoder's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.context import Context, Proposal, Scouts
from specdec.drafters.base import DrafterConfig, Sizes
from specdec.drafters.copying import Copying, RowMemories, TextMemory
from specdec.sampling.choose import Choose
from specdec.sampling.trees import Shape
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target


@dataclass
class LookaheadConfig(DrafterConfig):
    """Lookahead decoding. An n-gram drafts `ngram` - 1 tokens, so a larger `depth` is never
    reached."""

    bounds: ClassVar = dict(window=1, ngram=2, pool=1)
    name: str = "lookahead"
    depth: int = 3
    window: int = 8  # W, columns of the window
    ngram: int = 4  # N, tokens of an n-gram
    pool: int = 8  # G, n-grams kept for each first token


class LookaheadMemory(TextMemory):
    """The latest n-grams by first token, and the levels of the row's window, oldest first."""

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__(config)
        self.levels: list[list[int]] = []
        self._after: dict[int, dict[tuple[int, ...], None]] = {}

    def push(self, token: int) -> None:
        self.ids.append(token)
        if len(self.ids) >= self.config.ngram:
            self.add(self.ids[-self.config.ngram :])

    def add(self, gram: Sequence[int]) -> None:
        known, rest = self._after.setdefault(gram[0], {}), tuple(gram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.config.pool:
            del known[next(iter(known))]

    def paths(self, count: int) -> list[list[int]]:
        """The paths that may follow the text's last token, latest first."""
        return [list(path[:count]) for path in reversed(self._after.get(self.ids[-1], {}))]

    def chain(self, count: int) -> list[int]:
        return next(iter(self.paths(count)), [])


class Lookahead(Copying):
    sends_scouts = runs_target = True
    Config = LookaheadConfig
    Memory = LookaheadMemory
    target: Target

    def __init__(self, config: LookaheadConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.limits.slots = config.window * (config.ngram - 1)

    def attach(self, target: TargetParts) -> None:
        assert isinstance(target, Target)
        self.target = target

    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        """Paths from the pools and, if there is a target cache, the windows as scouts."""
        memories = self.new_cache() if cache is None else cache
        proposal = super().draft(ctx, shape, choose, memories)
        if ctx.cache is not None:
            furthest = max(ctx.cache.lengths) + self.config.window + self.config.ngram
            if furthest <= self.target.room(min(ctx.cache.lengths)):
                proposal.scouts = self._scouts(memories.rows, ctx.ids_BT.device)
        return proposal

    def _scouts(self, pools: list[LookaheadMemory], device: torch.device) -> Scouts:
        """Level 0 is a chain after the anchor; other nodes follow the last one of their column."""
        columns = self.config.window
        for pool in pools:
            if not pool.levels:  # any guess will do: take tokens from all over the text
                pool.levels = [[pool.ids[j * len(pool.ids) // columns] for j in range(columns)]]
        tokens_BN = torch.tensor([list(chain(*pool.levels)) for pool in pools], device=device)
        parents = [*range(-1, columns - 1), *range(tokens_BN.shape[1] - columns)]
        return Scouts(tokens_BN, torch.tensor(parents, device=device).expand(len(pools), -1))

    def hear(self, logits_BNV: Tensor, cache: RowMemories) -> None:
        """One Jacobi iteration: the most likely tokens after the last level form the next level.
        Complete columns go to the pools, and the oldest level is dropped."""
        newest = logits_BNV[:, -self.config.window :].float().argmax(-1).tolist()
        for pool, level in zip(cache.rows, newest, strict=True):
            pool.levels.append(level)
            if len(pool.levels) == self.config.ngram:
                for gram in zip(*pool.levels, strict=True):
                    pool.add(gram)
                del pool.levels[0]

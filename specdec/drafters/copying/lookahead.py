"""Lookahead decoding (Fu et al. 2024): the target drafts for itself, by Jacobi iteration.

A window of W columns and N - 1 levels stands behind the anchor: level l of column j is a guess
at the token l + j + 1 places on, from the iteration before that of level l + 1. The target reads
the window in the pass that verifies, as scouts, and so gives each column's next guess. A column's
N tokens are then an n-gram that the target has said in this context; they go to a pool, as the
n-grams of the text do. The pool keeps the latest G of each first token, and drafts are what it
holds after the anchor.

The window makes every pass W (N - 1) tokens wider: it gains where a pass over so many tokens costs
little more than one over a few, and prompt lookup, which finds the text's own n-grams for nothing,
does not find enough. What is in the window depends on the rounds so far; teacher forcing sees the
n-grams of the text alone, so its α is a lower bound of the decoder's.

Letters: B batch, X scouts, W columns, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.context import Context, Proposal, Scouts
from specdec.drafters.base import Sizes
from specdec.drafters.copying.memory import Copying, Memories, TreeNode, merged
from specdec.errors import require
from specdec.sampling.choose import Choose
from specdec.sampling.trees import Shape, Stop
from specdec.target.base import Target
from specdec.target.parts import Parts


@dataclass
class LookaheadConfig:
    """`window`, `ngram` and `pool` are the paper's W, N and G. An n-gram drafts N - 1 tokens, so
    that a larger `depth` is never reached."""

    name: str = "lookahead"
    depth: int = 3
    window: int = 8
    ngram: int = 4
    pool: int = 8


class Pool:
    """The latest n-grams by their first token, those of the text among them."""

    def __init__(self, config: LookaheadConfig) -> None:
        self.config = config
        self.ids: list[int] = []
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

    def paths(self) -> list[tuple[int, ...]]:
        """What may follow the text's last token, the latest first."""
        return list(reversed(self._after.get(self.ids[-1], {})))

    def chain(self, count: int) -> list[int]:
        return [token for path in self.paths()[:1] for token in path[:count]]

    def tree(self, depth: int, nodes: int) -> list[TreeNode]:
        return merged(self.paths(), depth, nodes)


class Windows(Memories):
    """The pool of each row, and the levels of its window, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[Tensor] = []  # each [B, W]

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.levels = [level_BW[list(rows)] for level_BW in self.levels]


class Lookahead(Copying):
    Config = LookaheadConfig
    reads_body = True
    _target: tuple[Target]

    def __init__(self, config: LookaheadConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        require(config.window >= 1, f"drafter.window={config.window}: give 1 or more")
        require(config.ngram >= 2, f"drafter.ngram={config.ngram}: give 2 or more")
        require(config.pool >= 1, f"drafter.pool={config.pool}: give 1 or more")
        self.scratch = config.window * (config.ngram - 1)

    def attach(self, target: Parts) -> None:
        assert isinstance(target, Target)
        self._target = (target,)

    def memory(self) -> Pool:
        return Pool(self.config)

    def new_cache(self) -> Windows:
        return Windows()

    @torch.no_grad()
    def draft(
        self,
        ctx: Context,
        shape: Shape,
        choose: Choose,
        cache: Any = None,
        stop: Stop | None = None,
    ) -> Proposal:
        """What the pools hold, and where there is the target's cache, the windows as scouts."""
        windows = self.new_cache() if cache is None else cache
        proposal = super().draft(ctx, shape, choose, windows, stop)
        if ctx.cache is not None:
            furthest = max(ctx.cache.lengths) + self.config.window + self.config.ngram
            if furthest <= self._target[0].room(min(ctx.cache.lengths)):
                proposal.scouts = self._scouts(windows, ctx.ids_BT.device)
        return proposal

    def _scouts(self, windows: Windows, device: torch.device) -> Scouts:
        """Level 0 is a chain after the anchor; a later level's column follows the same column of
        the level before it."""
        columns, pools = self.config.window, windows.rows
        if not windows.levels:  # any guess will do: tokens from all over the text
            spread = [
                [pool.ids[j * len(pool.ids) // columns] for j in range(columns)] for pool in pools
            ]
            windows.levels = [torch.tensor(spread, device=device)]
        parents = [*range(-1, columns - 1), *range(columns * (len(windows.levels) - 1))]
        parents_BX = torch.tensor(parents, device=device).expand(len(pools), -1)
        return Scouts(torch.cat(windows.levels, 1), parents_BX)

    def hear(self, logits_BXV: Tensor, cache: Windows) -> None:
        """One Jacobi iteration: the likeliest tokens after the last level are the next one. Whole
        columns go to the pools, and the oldest level goes."""
        newest_BW = logits_BXV[:, -self.config.window :].float().argmax(-1)
        cache.levels = [*cache.levels, newest_BW]
        if len(cache.levels) == self.config.ngram:
            grams_BWN = torch.stack(cache.levels, -1).tolist()
            for pool, grams in zip(cache.rows, grams_BWN, strict=True):
                for gram in grams:
                    pool.add(gram)
            cache.levels = cache.levels[1:]

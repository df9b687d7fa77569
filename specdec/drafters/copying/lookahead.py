"""Lookahead decoding (Fu et al. 2024): the target drafts for itself, by Jacobi iteration.

A window of W columns and N - 1 levels stands behind the anchor: level l of column j is a guess
at the token l + j + 1 places on, from the iteration before that of level l + 1. One pass of the
target over the window gives each column's next guess; a column's N tokens are then an n-gram
that the target has said in this context, and go to the pool, as do those of the text. The pool
keeps the latest G of each first token. Drafts are what it holds after the target's next token.

The paper runs the window in the pass that verifies. Here the verdict's pass is the decoder's,
so the window has its own, over the target's cache: 1 + W (N - 1) tokens, c >= 1. It gives the
target's logits at the anchor too, whose likeliest token is drafted first and, greedily, always
kept: two passes emit two tokens or more. What is gained over plain decoding is what the pool
adds to that, at twice the passes: little where a pass costs as much as a step, as it does with
one stream and a large model. `ngram` costs nothing and finds the text's own n-grams.

What is in the window depends on the rounds so far. Teacher forcing sees the part that does not:
the target's next token and the n-grams of the text. Its α at depth 0 is the decoder's, deeper
it is a lower bound.

Letters: B batch, T tokens of a pass, W columns, A anchors, K depth, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.context import Context, Needs, Proposal
from specdec.drafters.base import Sizes, copied_chains
from specdec.drafters.copying.memory import Copying, Memories, copied_trees, merged, walked
from specdec.drafters.models.early_exit import decoder_layers
from specdec.errors import require
from specdec.runtime.cache import SlotCache
from specdec.sampling.choose import Choose
from specdec.sampling.trees import Chain, Shape, Stop
from specdec.target.base import Target
from specdec.target.parts import Parts

CHUNK = 128  # anchors whose logits exist at a time


@dataclass
class LookaheadConfig:
    """The paper's W, N and G. `depth`: N at most; the target's next token and an n-gram's rest."""

    name: str = "lookahead"
    depth: int = 4
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

    def paths(self, token: int) -> list[list[int]]:
        """This token and what may follow it, the latest first."""
        return [[token, *rest] for rest in reversed(self._after.get(token, {}))] or [[token]]


class Windows(Memories):
    """Of each row the pool, and the levels of its window, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[Tensor] = []  # each [B, W]

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.levels = [level_BW[list(rows)] for level_BW in self.levels]


class Lookahead(Copying):
    Config = LookaheadConfig
    _target: tuple[Target]

    def __init__(self, config: LookaheadConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        for name, least in (("window", 1), ("ngram", 2), ("pool", 1)):
            value = getattr(config, name)
            require(value >= least, f"drafter.{name}={value}: give {least} or more")
        self.scratch = 1 + config.window * (config.ngram - 1)

    @classmethod
    def plan(cls, config: LookaheadConfig, target: Parts) -> Sizes:
        decoder_layers(target, config.name)
        return super().plan(config, target)

    def attach(self, target: Parts) -> None:
        assert isinstance(target, Target)
        self._target = (target,)

    def memory(self) -> Pool:
        return Pool(self.config)

    def new_cache(self) -> Windows:
        return Windows()

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        """The drafted ids [B, A, K, 1], -1 where there is none; see the module."""
        depth = self.depth if drafted_BAk is None else drafted_BAk.shape[-1] + 1
        at = anchors_BA.tolist()
        said = [
            dict(zip(anchors, firsts, strict=True))
            for anchors, firsts in zip(at, self._next(ctx, anchors_BA).tolist(), strict=True)
        ]
        found = walked(self, ctx, anchors_BA, lambda pool, b, a: pool.paths(said[b][a])[0][:depth])
        rows = [[ids + [-1] * (depth - len(ids)) for ids in row] for row in found]
        return torch.tensor(rows, device=anchors_BA.device, dtype=torch.float32)[..., None]

    @torch.no_grad()
    def draft(
        self,
        ctx: Context,
        shape: Shape,
        choose: Choose,
        cache: Any = None,
        stop: Stop | None = None,
    ) -> Proposal:
        cache = Windows() if cache is None else cache
        pools = self.remembered(ctx, cache)
        if ctx.cache is None:
            anchors_B1 = torch.tensor(ctx.counts(), device=ctx.ids_BT.device)[:, None] - 1
            first_B = self._next(ctx, anchors_B1)[:, 0]
        else:
            first_B = self._iterate(ctx.cache, pools, cache)
        found = [pool.paths(token) for pool, token in zip(pools, first_B.tolist(), strict=True)]
        if isinstance(shape, Chain):
            return copied_chains([paths[0][: shape.depth] for paths in found], ctx)
        return copied_trees([merged(paths, shape.depth, shape.nodes) for paths in found], ctx)

    def _next(self, ctx: Context, anchors_BA: Tensor) -> Tensor:
        """The target's likeliest token after each anchor [B, A], from a pass over the whole."""
        target = self._target[0]
        final_BTD = target.features(
            ctx.ids_BT, Needs(), position_BT=ctx.position_BT, document_BT=ctx.document_BT
        )[1]
        index = anchors_BA[..., None].expand(-1, -1, final_BTD.shape[-1])
        anchor_ND = final_BTD.gather(1, index).flatten(0, 1)
        found = [target.logits(part).float().argmax(-1) for part in anchor_ND.split(CHUNK)]
        return torch.cat(found).view(anchors_BA.shape)

    def _iterate(self, cache: SlotCache, pools: list[Pool], windows: Windows) -> Tensor:
        """One Jacobi iteration: its n-grams go to the pools. Returns the target's likeliest token
        after each anchor [B]."""
        target, columns = self._target[0], self.config.window
        device, longest = target.device, max(len(pool.ids) for pool in pools)
        anchor_B1 = torch.tensor([pool.ids[-1:] for pool in pools], device=device)
        if not windows.levels:  # any guess will do: tokens from all over the text
            spread = [
                [pool.ids[j * len(pool.ids) // columns] for j in range(columns)] for pool in pools
            ]
            windows.levels = [torch.tensor(spread, device=device)]
        fits = longest + columns + self.config.ngram <= target.positions
        levels = windows.levels if fits else []
        parents = [-1, *range(columns)][: 1 + columns * len(levels)]
        parents += range(1, 1 + columns * (len(levels) - 1))
        ids_BT = torch.cat([anchor_B1, *levels], 1)
        parents_BT = torch.tensor(parents, device=device).expand(len(pools), -1)
        final_BTD = target.features(ids_BT, Needs(), cache=cache, parents_BT=parents_BT)[1]
        cache.drop()
        said_B = torch.cat([final_BTD[:, :1], final_BTD[:, 1:][:, -columns:]], 1)
        token_BT = target.logits(said_B).float().argmax(-1)
        if levels:
            windows.levels = [*levels, token_BT[:, 1:]]
        if len(windows.levels) == self.config.ngram:
            grams_BWN = torch.stack(windows.levels, -1).tolist()
            for pool, grams in zip(pools, grams_BWN, strict=True):
                for gram in grams:
                    pool.add(gram)
            windows.levels = windows.levels[1:]
        return token_BT[:, 0]

"""Drafters that copy: they look up what may follow in a memory of the text.

A family supplies a `Memory`, which is fed token by token. While decoding, each row has one that is
fed what was committed; in teacher forcing, one walks over each document and is asked at every
anchor. Neither the target nor earlier drafts are read.

Letters: B batch, T time, A anchors, K depth, V vocabulary, N drafted nodes.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from specdec.context import Context, Proposal
from specdec.drafters.base import Drafter, Sizes, copied_chains, one_hot
from specdec.sampling.choose import Choose
from specdec.sampling.trees import Chain, Shape, Stop
from specdec.target.parts import Parts

TreeNode = tuple[int, int]  # token and parent: the number of an earlier node, or -1, the anchor


class Memory(Protocol):
    """What a family remembers of one text."""

    def push(self, token: int) -> None: ...

    def chain(self, count: int) -> list[int]:
        """Up to `count` tokens to follow the text."""
        ...

    def tree(self, depth: int, nodes: int) -> list[TreeNode]:
        """Up to `nodes` tokens, on paths of up to `depth`."""
        ...


class Memories:
    """The memory of each row of a batch, and how many tokens of its text each was fed."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.fed: list[int] = []

    def select(self, rows: Sequence[int]) -> None:
        if self.rows:  # beam search asks `hidden` instead, and feeds no memory
            self.rows = [self.rows[b] for b in rows]
            self.fed = [self.fed[b] for b in rows]


class Copying(Drafter):
    trainable: ClassVar[bool] = False
    copies = True

    @classmethod
    def plan(cls, config: Any, target: Parts) -> Sizes:
        return cls.Sizes(target_vocab=target.vocab_size)

    @abstractmethod
    def memory(self) -> Any:
        """An empty `Memory`."""

    def new_cache(self) -> Memories:
        return Memories()

    def remembered(self, ctx: Context, cache: Memories | None) -> list[Any]:
        """The memory of each row, fed with the whole of its text."""
        texts, cache = ctx.rows(), cache or Memories()
        if not cache.rows:
            cache.rows = [self.memory() for _ in texts]
            cache.fed = [0] * len(texts)
        for b, ids in enumerate(texts):
            for token in ids[cache.fed[b] :]:
                cache.rows[b].push(token)
            cache.fed[b] = len(ids)
        return cache.rows

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        """The copied ids themselves [B, A, K, 1], -1 where nothing is copied."""
        depth = self.depth if drafted_BAk is None else drafted_BAk.shape[-1] + 1
        found = walked(self, ctx, anchors_BA, lambda memory: memory.chain(depth))
        rows = [[ids + [-1] * (depth - len(ids)) for ids in row] for row in found]
        return torch.tensor(rows, device=anchors_BA.device, dtype=torch.float32)[..., None]

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """0 at the copied token, -inf elsewhere; -inf throughout where nothing is drafted."""
        return one_hot(hidden, self.target_vocab)

    @torch.no_grad()
    def draft(
        self,
        ctx: Context,
        shape: Shape,
        choose: Choose,
        cache: Any = None,
        stop: Stop | None = None,
    ) -> Proposal:
        memories = self.remembered(ctx, cache)
        if isinstance(shape, Chain):
            return copied_chains([m.chain(shape.depth) for m in memories], ctx)
        return copied_trees([m.tree(shape.depth, shape.nodes) for m in memories], ctx)


def walked(
    drafter: Copying,
    ctx: Context,
    anchors_BA: Tensor,
    ask: Callable[[Any], list[int]],
) -> list[list[list[int]]]:
    """What `ask` says at each anchor, given a memory of the anchor's document up to there."""
    position = None if ctx.position_BT is None else ctx.position_BT.tolist()
    found = []
    for b, (ids, anchors) in enumerate(zip(ctx.ids_BT.tolist(), anchors_BA.tolist(), strict=True)):
        said: dict[int, list[int]] = {}
        wanted, memory = set(anchors), drafter.memory()
        for t in range(max(anchors, default=-1) + 1):
            if position is not None and position[b][t] == 0:
                memory = drafter.memory()
            memory.push(ids[t])
            if t in wanted:
                said[t] = ask(memory)
        found.append([said[a] for a in anchors])
    return found


def merged(paths: Sequence[Sequence[int]], depth: int, nodes: int) -> list[TreeNode]:
    """Paths, the best first, merged into one tree: a beginning that paths share is there once."""
    found: list[TreeNode] = []
    index: dict[TreeNode, int] = {}
    for path in paths:
        parent = -1
        for token in path[:depth]:
            if (token, parent) not in index:
                if len(found) == nodes:
                    return found
                index[token, parent] = len(found)
                found.append((token, parent))
            parent = index[token, parent]
    return found


def copied_trees(found: Sequence[Sequence[TreeNode]], ctx: Context) -> Proposal:
    """A proposal of the given nodes for each row, as wide as the widest."""
    widest = max(map(len, found))
    padded = [[*nodes, *[(-1, -1)] * (widest - len(nodes))] for nodes in found]
    both = torch.tensor(padded, dtype=torch.long, device=ctx.ids_BT.device)
    if widest == 0:
        return Proposal(both.view(len(found), 0))
    return Proposal(both[..., 0].contiguous(), None, both[..., 1].contiguous())

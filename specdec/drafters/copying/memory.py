"""Drafters that copy: they look up what may follow in a memory of the text.

A family supplies a `Memory`, which is fed token by token. While decoding, each row has a memory,
which is fed the committed tokens; in teacher forcing, one memory walks over each document and
drafts at every anchor. A memory reads neither the target nor earlier drafts.

Letters: B batch, A anchors, K depth, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.context import Context, Proposal
from specdec.drafters.base import Drafter, copied_chains, one_hot
from specdec.sampling.choose import Choose
from specdec.sampling.trees import Chain, Shape

TreeNode = tuple[int, int]  # token and parent: the number of an earlier node, or -1, the anchor


class Memory(ABC):
    """What a family remembers of one text, whose tokens so far are `ids`."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.ids: list[int] = []

    @abstractmethod
    def push(self, token: int) -> None:
        """Read the next token of the text."""

    @abstractmethod
    def chain(self, count: int) -> list[int]:
        """Up to `count` tokens that may follow the text."""

    def evidence(self) -> tuple[int, float]:
        """The evidence for the chain looked up last: the length of the match that it continues, in
        tokens, and the share of the match's occurrences that the chain's first token follows."""
        return 1, 1.0

    def last(self, least: int, most: int) -> list[tuple[int, ...]]:
        """The last n tokens of the text, for n from `least` to `most`."""
        return [tuple(self.ids[-n:]) for n in range(least, 1 + min(most, len(self.ids)))]

    def paths(self, count: int) -> list[list[int]]:
        """All known continuations, best first, for families that know more than one chain."""
        return [self.chain(count)]

    def tree(self, depth: int, nodes: int) -> list[TreeNode]:
        """Up to `nodes` tokens of the best paths; a prefix that paths share is stored once."""
        found: dict[TreeNode, int] = {}
        for path in self.paths(depth):
            parent = -1
            for token in path:
                if (token, parent) not in found and len(found) == nodes:
                    return list(found)
                parent = found.setdefault((token, parent), len(found))
        return list(found)


class Memories:
    """The memory of each row of a batch. (Beam search calls `hidden`, which makes its own.)"""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def read(self, texts: Sequence[list[int]], empty: Callable[[], Any]) -> list[Any]:
        """The memories of the rows, once they have read what is new in these texts."""
        self.rows = self.rows or [empty() for _ in texts]
        for memory, ids in zip(self.rows, texts, strict=True):
            for token in ids[len(memory.ids) :]:
                memory.push(token)
        return self.rows

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[b] for b in rows if self.rows]


class Copying(Drafter):
    Memory: ClassVar[type[Memory]]  # the family's own
    trainable: ClassVar[bool] = False
    copies = True

    def memory(self) -> Any:
        """The memory of an empty text."""
        return self.Memory(self.config)

    def new_cache(self, capacity: int | None = None) -> Memories:
        return Memories()

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        """The copied ids themselves [B, A, K, 1], -1 where nothing is copied."""
        depth = self.depth if drafted_BAk is None else drafted_BAk.shape[-1] + 1
        return self.walked(ctx, anchors_BA, depth, lambda memory: memory.chain(depth))

    def walked(
        self, ctx: Context, anchors_BA: Tensor, depth: int, found: Callable[[Any], list[int]]
    ) -> Tensor:
        """The numbers [B, A, K, 1] that `found` gives for the memory at each anchor, cut or padded
        with -1 to K = `depth`."""
        copied = []
        rows = (x.tolist() for x in (ctx.ids_BT, ctx.documents()[0], anchors_BA))
        for ids, position, anchors in zip(*rows, strict=True):
            chains, wanted, memory = {}, set(anchors), self.memory()
            for t in range(max(anchors, default=-1) + 1):
                if position[t] == 0:
                    memory = self.memory()
                memory.push(ids[t])
                if t in wanted:
                    chain = found(memory)[:depth]
                    chains[t] = chain + [-1] * (depth - len(chain))
            copied.append([chains[a] for a in anchors])
        return torch.tensor(copied, device=anchors_BA.device, dtype=torch.float32)[..., None]

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """0 at the copied token, -inf elsewhere; -inf throughout where nothing is drafted."""
        return one_hot(hidden, self.target_vocab)

    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        memories = self.new_cache() if cache is None else cache
        rows = memories.read(ctx.rows(), self.memory)
        if isinstance(shape, Chain):
            return copied_chains([m.chain(shape.depth) for m in rows], ctx)
        trees = [m.tree(shape.depth, shape.nodes) for m in rows]
        return copied_trees(trees, ctx.ids_BT.device)


def copied_trees(trees: list[list[TreeNode]], device: torch.device) -> Proposal:
    """A proposal of the tree found for each row, padded to the largest."""
    most = max(map(len, trees))
    padded = [[*tree, *[(-1, -1)] * (most - len(tree))] for tree in trees]
    padded_BN2 = torch.tensor(padded, dtype=torch.long, device=device).view(len(trees), most, 2)
    tokens_BN, parents_BN = padded_BN2.unbind(-1)
    return Proposal(tokens_BN, None, parents_BN if most else None)

"""Drafters that copy: they search the text for tokens that may follow.

A method implements a `TextMemory`, which reads a text token by token. While decoding, each row has
a memory of its committed tokens; in teacher forcing, one memory reads each document and drafts at
every anchor. A memory reads neither the target nor earlier drafts. The functions at the top turn
copied tokens into a proposal, logits, and the growth that beam search reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.context import Context, Proposal
from specdec.drafters.base import NOTHING, Drafter, Predictor, rereading
from specdec.sampling.choose import Choose
from specdec.sampling.trees import Chain, Growth, Shape

TreeNode = tuple[int, int]  # token and parent: the number of an earlier node, or -1, the anchor


def copied_chains(chains: list[list[int]], ctx: Context) -> Proposal:
    """A proposal with the chain of each row, padded to the longest."""
    longest = max(map(len, chains))
    padded = [ids + [-1] * (longest - len(ids)) for ids in chains]
    return Proposal(torch.tensor(padded, dtype=torch.long, device=ctx.ids_BT.device))


def copied_trees(trees: list[list[TreeNode]], device: torch.device) -> Proposal:
    """A proposal with the tree of each row, padded to the largest."""
    most = max(map(len, trees))
    padded = [[*tree, *[(-1, -1)] * (most - len(tree))] for tree in trees]
    padded_BG2 = torch.tensor(padded, dtype=torch.long, device=device).view(len(trees), most, 2)
    tokens_BG, parents_BG = padded_BG2.unbind(-1)
    return Proposal(tokens_BG, None, parents_BG if most else None)


def point_mass(ids: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V] for copied ids [...]: 0 at the id, -inf elsewhere; -inf throughout for a
    negative id."""
    logits = torch.full((*ids.shape, vocab_size), -torch.inf, device=ids.device)
    value = torch.zeros(ids.shape, device=ids.device).masked_fill(ids < 0, -torch.inf)
    return logits.scatter(-1, ids.clamp_min(0)[..., None], value[..., None])


def whole(drafter: Predictor, logits: Tensor) -> Tensor:
    """A draft's logits [..., S], expanded to the target's vocabulary as float32: -inf outside its
    own."""
    vocab_S, size = drafter.vocab_S, drafter.sizes.target_vocab
    wide = torch.full((*logits.shape[:-1], size), -torch.inf, device=logits.device)
    wide[..., slice(None) if vocab_S is None else vocab_S] = logits.float()
    return wide


def copied_growth(
    ctx: Context, copied: Callable[[Context, Tensor, int], Tensor], vocab_size: int
) -> Growth:
    """The growth of a drafter that copies, independent of drafted tokens (see `Drafter.copied`)."""

    def logits(anchor_BT: Tensor, drafted_BTK: Tensor) -> Tensor:
        k = drafted_BTK.shape[2]
        return point_mass(copied(ctx, anchor_BT, k + 1)[..., k], vocab_size)

    return rereading(ctx, logits)


class TextMemory(ABC):
    """A method's memory of one text, whose tokens so far are `ids`."""

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
        """The evidence for the last chain: the length in tokens of the match that it continues, and
        the fraction of the match's occurrences that its first token follows."""
        return 1, 1.0

    def last(self, least: int, most: int) -> list[tuple[int, ...]]:
        """The last n tokens of the text, for n from `least` to `most`."""
        return [tuple(self.ids[-n:]) for n in range(least, 1 + min(most, len(self.ids)))]

    def paths(self, count: int) -> list[list[int]]:
        """All known continuations, best first, for methods that know more than one chain."""
        return [self.chain(count)]

    def tree(self, depth: int, nodes: int) -> list[TreeNode]:
        """Up to `nodes` tokens of the best paths; a prefix that paths share is stored once."""
        numbers: dict[TreeNode, int] = {}
        for path in self.paths(depth):
            parent = -1
            for token in path:
                if (token, parent) not in numbers and len(numbers) == nodes:
                    return list(numbers)
                parent = numbers.setdefault((token, parent), len(numbers))
        return list(numbers)


class RowMemories:
    """The memory of each row of a batch. Beam search, with `draft_growth`, makes its own."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def read_new(self, texts: Sequence[list[int]], empty: Callable[[], Any]) -> list[Any]:
        """The memories of the rows, after reading the new tokens of these texts."""
        self.rows = self.rows or [empty() for _ in texts]
        for memory, ids in zip(self.rows, texts, strict=True):
            for token in ids[len(memory.ids) :]:
                memory.push(token)
        return self.rows

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[b] for b in rows if self.rows]


class Copying(Drafter):
    copies = True
    Memory: ClassVar[type[TextMemory]]  # the family's own

    def memory(self) -> Any:
        """The memory of an empty text."""
        return self.Memory(self.config)

    def new_cache(self, capacity: int | None = None) -> RowMemories:
        return RowMemories()

    def copied(self, ctx: Context, anchors_BA: Tensor, depth: int) -> Tensor:
        return self.walked(ctx, anchors_BA, depth, lambda memory: memory.chain(depth))

    def walked(
        self, ctx: Context, anchors_BA: Tensor, depth: int, chain_of: Callable[[Any], list[int]]
    ) -> Tensor:
        """The ids [B, A, K] that `chain_of` returns for the memory at each anchor, cut or padded
        with `NOTHING` to K = `depth`."""
        copied = []
        rows = (x.tolist() for x in (ctx.ids_BT, ctx.documents()[0], anchors_BA))
        for ids, position, anchors in zip(*rows, strict=True):
            chains, wanted, memory = {}, set(anchors), self.memory()
            for t in range(max(anchors, default=-1) + 1):
                if position[t] == 0:
                    memory = self.memory()
                memory.push(ids[t])
                if t in wanted:
                    chain = chain_of(memory)[:depth]
                    chains[t] = chain + [NOTHING] * (depth - len(chain))
            copied.append([chains[a] for a in anchors])
        return torch.tensor(copied, dtype=torch.long, device=anchors_BA.device)

    def draft_growth(self, ctx: Context, cache: Any = None) -> Growth:
        return copied_growth(ctx, self.copied, self.sizes.target_vocab)

    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        memories = self.new_cache() if cache is None else cache
        rows = memories.read_new(ctx.rows(), self.memory)
        if isinstance(shape, Chain):
            return copied_chains([m.chain(shape.depth) for m in rows], ctx)
        trees = [m.tree(shape.depth, shape.nodes) for m in rows]
        return copied_trees(trees, ctx.ids_BT.device)

"""The shapes of a draft: chain, static tree, dynamic tree, best-first tree.

A shape drives a drafter's `Growth` and says which tokens are proposed. Which rule may judge a
sampled tree depends on how its siblings were drawn: those of a static tree can be drawn as any
rule wants them, while nodes that were picked by their likelihood are fixed children (see
`specdec.decoding.rules`).

Letters: B batch, N nodes, W nodes grown at once, C children, S draft vocabulary.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.errors import UserError, require
from specdec.sampling.choose import Choose

DEEPEST = 128  # tokens in a row, or children of a node: a draft far longer could not gain
LARGEST = 1024  # nodes of a tree: one pass reads them all

Stop = Callable[[int, Tensor, Tensor], Tensor]  # (depth, q [B, S], index [B]) -> [B] bool


class Growth(Protocol):
    """A drafter at work on one round. Nodes are numbered in the order in which they grow."""

    logits_BS: Tensor  # of the first drafted token

    def grow(self, tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
        """Logits [B, W, S] after each new node. `parents_BW` are nodes, -1 the anchor; None
        continues the node that grew last (W = 1). Nodes of one call are of one depth."""
        ...

    def marginals(self, depth: int) -> Tensor | None:
        """Logits [B, depth, S] of a drafter whose depths do not read each other; else None."""
        ...


class Shape(Protocol):
    """What a round drafts."""

    @property
    def depth(self) -> int:
        """Drafted tokens on the longest path."""
        ...

    @property
    def nodes(self) -> int:
        """Drafted tokens in all, at most."""
        ...

    @property
    def grown(self) -> int:
        """The most nodes that a drafter grows in order to find them."""
        ...

    @property
    def fixed(self) -> bool:
        """Whether its nodes are picked by likelihood, so that siblings cannot be drawn."""
        ...

    def draft(self, growth: Growth, choose: Choose, stop: Stop | None = None) -> Proposal: ...


@dataclass
class Chain:
    """γ tokens, each after the one before: the tree with one branch."""

    depth: int
    fixed: bool = False

    def __post_init__(self) -> None:
        require(self.depth <= DEEPEST, f"a chain of {self.depth} tokens: give {DEEPEST} at most")

    @property
    def nodes(self) -> int:
        return self.depth

    @property
    def grown(self) -> int:
        return self.depth - 1

    def draft(self, growth: Growth, choose: Choose, stop: Stop | None = None) -> Proposal:
        logits_BWS = growth.logits_BS[:, None]
        tokens: list[Tensor] = []
        qs: list[Tensor] = []
        going: Tensor | None = None  # rows that still draft; None: all

        def paths() -> list[list[list[int]]]:
            if not tokens:
                return [[[]]] * len(logits_BWS)
            so_far = torch.stack(tokens, 1).clamp_min(0).tolist()  # of absent nodes any token
            return [[path] for path in so_far]

        for k in range(self.depth):
            chosen = choose(logits_BWS, 1, paths, going)
            token_B = chosen.tokens_BWC[:, 0, 0]
            if going is not None:
                token_B = torch.where(going, token_B, -1)
            ends_B = token_B < 0
            if ends_B.any():
                going = ~ends_B
                if not going.any():
                    break
            tokens.append(token_B)
            if chosen.q_BWS is not None:
                qs.append(chosen.q_BWS[:, 0])
            if stop is not None:
                q_BS = qs[-1] if qs else chosen.logits_BWS[:, 0].float().softmax(-1)
                keep_B = ~stop(k, q_BS, chosen.index_BWC[:, 0, 0])
                going = keep_B if going is None else going & keep_B
                if not going.any():
                    break
            if k + 1 == self.depth:
                break
            logits_BWS = growth.grow(token_B.clamp_min(0)[:, None], None)
        if not tokens:
            return Proposal(growth.logits_BS.new_zeros(len(growth.logits_BS), 0).long())
        q_BNS = torch.stack(qs, 1) if qs else None
        return Proposal(torch.stack(tokens, 1), q_BNS)


@dataclass
class Static:
    """A tree that is the same in every round: `paths` of ranks, as in Medusa's choices.

    [[0], [1], [0, 0]]: the two likeliest (or first drawn) tokens, and one after the likelier.
    """

    paths: Sequence[Sequence[int]]
    fixed: bool = False
    _levels: list[list[int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ordered = sorted((tuple(p) for p in self.paths), key=lambda p: (len(p), p))
        index = {path: i for i, path in enumerate(ordered)}
        for path in ordered:
            require(
                len(path) > 0 and min(path) >= 0 and (len(path) == 1 or path[:-1] in index),
                f"tree: the path {list(path)} has no parent among the paths: add {list(path[:-1])}",
            )
            before = (*path[:-1], path[-1] - 1)  # a rule judges siblings as drawn one by one
            require(
                path[-1] == 0 or before in index,
                f"tree: the path {list(path)} has no sibling before it: add {list(before)}",
            )
        require(len(index) == len(self.paths) > 0, "tree: give at least one path, each once")
        require(
            len(index) <= LARGEST and len(ordered[-1]) <= DEEPEST,
            f"tree: {len(index)} paths of up to {len(ordered[-1])} tokens: at most {LARGEST}, of "
            f"at most {DEEPEST} tokens",
        )
        self._order = ordered
        self._parents = [index.get(path[:-1], -1) for path in ordered]
        self._levels = [
            [i for i, p in enumerate(ordered) if len(p) == d + 1] for d in range(len(ordered[-1]))
        ]

    @property
    def depth(self) -> int:
        return len(self._levels)

    @property
    def nodes(self) -> int:
        return len(self._order)

    @property
    def grown(self) -> int:
        return len(set(self._parents) - {-1})

    def draft(self, growth: Growth, choose: Choose, stop: Stop | None = None) -> Proposal:
        B, device = len(growth.logits_BS), growth.logits_BS.device
        logits_BWS, parents = growth.logits_BS[:, None], [-1]
        tokens: list[Tensor] = []
        qs: list[Tensor] = []
        grown: dict[int, int] = {-1: -1}

        def paths() -> list[list[list[int]]]:
            rows = [t.clamp_min(0).tolist() for t in tokens]  # of absent nodes any token
            return [[[rows[i][b] for i in self._line(w)] for w in parents] for b in range(B)]

        for level in self._levels:
            ranks = [self._order[i][-1] for i in level]
            chosen = choose(logits_BWS, max(ranks) + 1, paths)
            for i, rank in zip(level, ranks, strict=True):
                w = parents.index(self._parents[i])
                there = rank < chosen.tokens_BWC.shape[2]
                token_B = chosen.tokens_BWC[:, w, rank if there else 0]
                if not there:
                    token_B = torch.full_like(token_B, -1)
                if self._parents[i] >= 0:
                    token_B = torch.where(tokens[self._parents[i]] < 0, -1, token_B)
                tokens.append(token_B)
                if chosen.q_BWS is not None:
                    qs.append(chosen.q_BWS[:, w])
            inner = [i for i in level if i in self._parents]
            if inner:
                at = torch.tensor([grown[self._parents[i]] for i in inner], device=device)
                new_BW = torch.stack([tokens[i].clamp_min(0) for i in inner], 1)
                logits_BWS = growth.grow(new_BW, at.expand(B, -1))
                start = len(grown) - 1
                grown |= {i: start + n for n, i in enumerate(inner)}
                parents = inner
        parents_BN = torch.tensor(self._parents, device=device).expand(B, -1)
        return Proposal(torch.stack(tokens, 1), torch.stack(qs, 1) if qs else None, parents_BN)

    def _line(self, node: int) -> list[int]:
        line: list[int] = []
        while node >= 0:
            line.insert(0, node)
            node = self._parents[node]
        return line


@dataclass
class Dynamic:
    """EAGLE-2 (Li et al. 2024): at each depth the `top_k` likeliest nodes grow `top_k` children
    each; of all, the `nodes` with the largest cumulative log-probability are proposed."""

    depth: int = 5
    nodes: int = 24
    top_k: int = 8
    fixed: bool = True

    def __post_init__(self) -> None:
        _require_size(self, depth=DEEPEST, nodes=LARGEST, top_k=DEEPEST)

    @property
    def grown(self) -> int:
        return (self.depth - 1) * self.top_k

    def draft(self, growth: Growth, choose: Choose, stop: Stop | None = None) -> Proposal:
        B = len(growth.logits_BS)
        rows = torch.arange(B, device=growth.logits_BS.device)[:, None]
        logits_BWS = growth.logits_BS[:, None]
        front_BW = torch.full((B, 1), -1, device=rows.device)  # candidates that grow
        score_BW = torch.zeros(B, 1, device=rows.device)
        grown_BW: Tensor | None = None  # their numbers in the growth; None: the anchor
        tokens_BN = front_BW[:, :0]
        parents_BN, scores_BN = tokens_BN, score_BW[:, :0]
        count = 0  # nodes grown so far

        def paths() -> list[list[list[int]]]:
            drafted = Proposal(tokens_BN, None, parents_BN).drafted_to()
            places = (front_BW + 1).tolist()
            return [[row[at] for at in front] for row, front in zip(drafted, places, strict=True)]

        for d in range(self.depth):
            logits = choose.drafted(logits_BWS, paths).float()
            width = min(self.top_k, logits.shape[-1])
            best_BWC, index_BWC = (logits - logits.logsumexp(-1, keepdim=True)).topk(width, -1)
            found_BC = index_BWC.flatten(1)
            if choose.vocab_S is not None and logits.shape[-1] == len(choose.vocab_S):
                found_BC = choose.vocab_S[found_BC]
            total_BC = (score_BW[..., None] + best_BWC - 1e-5).flatten(1)  # a parent comes first
            first = tokens_BN.shape[1]
            tokens_BN = torch.cat([tokens_BN, found_BC], 1)
            parents_BN = torch.cat([parents_BN, front_BW.repeat_interleave(width, 1)], 1)
            scores_BN = torch.cat([scores_BN, total_BC], 1)
            if d + 1 == self.depth:
                break
            score_BW, kept_BW = total_BC.topk(min(self.top_k, total_BC.shape[1]), -1)
            at_BW = torch.full_like(kept_BW, -1)
            if grown_BW is not None:
                at_BW = grown_BW.gather(1, kept_BW // width)
            front_BW = first + kept_BW
            logits_BWS = growth.grow(tokens_BN[rows, front_BW], at_BW)
            grown_BW = (count + torch.arange(at_BW.shape[1], device=rows.device)).expand(B, -1)
            count += at_BW.shape[1]
        return pruned(tokens_BN, parents_BN, scores_BN, self.nodes)


@dataclass
class BestFirst:
    """The `nodes` likeliest paths under the marginals of parallel heads, which do not read each
    other's tokens: a path's probability is the product of its tokens'."""

    depth: int = 4
    nodes: int = 24
    fixed: bool = True
    grown: int = 0  # heads do not read each other's tokens

    def __post_init__(self) -> None:
        _require_size(self, depth=DEEPEST, nodes=LARGEST)

    def draft(self, growth: Growth, choose: Choose, stop: Stop | None = None) -> Proposal:
        marginals_BKS = growth.marginals(self.depth)
        if marginals_BKS is None or choose.processors:
            raise UserError(
                "decode.tree=best_first needs parallel heads and no logits processors: give static "
                "or dynamic"
            )
        log_BKC, index_BKC = (
            marginals_BKS.float().log_softmax(-1).topk(min(self.nodes, marginals_BKS.shape[-1]), -1)
        )
        ids_BKC = index_BKC if choose.vocab_S is None else choose.vocab_S[index_BKC]
        tokens, parents = [], []
        for ids, log_KC in zip(ids_BKC.tolist(), log_BKC.tolist(), strict=True):
            chosen = best_paths(log_KC, self.nodes)
            index = {path: i for i, path in enumerate(chosen)}
            tokens.append([ids[len(p) - 1][p[-1]] for p in chosen])
            parents.append([index.get(p[:-1], -1) for p in chosen])
        device = marginals_BKS.device
        return Proposal(
            torch.tensor(tokens, device=device), None, torch.tensor(parents, device=device)
        )


def best_paths(scores_DR: Sequence[Sequence[float]], nodes: int) -> list[tuple[int, ...]]:
    """The `nodes` paths of ranks with the largest sums of `scores_DR`, the log-scores by depth and
    rank, ordered by depth. Scores must be at most 0 and fall with the rank, so that each path's
    parent and earlier siblings are among them."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-scores_DR[0][0], (0,))]
    found: list[tuple[int, ...]] = []
    while heap and len(found) < nodes:
        cost, path = heapq.heappop(heap)
        found.append(path)
        depth, rank = len(path) - 1, path[-1]
        if rank + 1 < len(scores_DR[depth]):
            beside = cost + scores_DR[depth][rank] - scores_DR[depth][rank + 1]
            heapq.heappush(heap, (beside, (*path[:-1], rank + 1)))
        if depth + 1 < len(scores_DR):
            heapq.heappush(heap, (cost - scores_DR[depth + 1][0], (*path, 0)))
    return sorted(found, key=lambda p: (len(p), p))


def pruned(tokens_BN: Tensor, parents_BN: Tensor, scores_BN: Tensor, nodes: int) -> Proposal:
    """The proposal of the `nodes` nodes with the largest scores, where a parent's score always
    exceeds its children's."""
    kept_BN = scores_BN.topk(min(nodes, scores_BN.shape[1]), -1).indices.sort(-1).values
    number_BN = torch.full_like(tokens_BN, -1)
    new = torch.arange(kept_BN.shape[1], device=kept_BN.device).expand_as(kept_BN)
    number_BN.scatter_(1, kept_BN, new)
    old_BN = parents_BN.gather(1, kept_BN)
    parents = torch.where(old_BN < 0, -1, number_BN.gather(1, old_BN.clamp_min(0)))
    return Proposal(tokens_BN.gather(1, kept_BN), None, parents)


def _require_size(shape: Any, **most: int) -> None:
    for name, limit in most.items():
        value = getattr(shape, name)
        require(1 <= value <= limit, f"tree: {name}={value}: give 1 to {limit}")

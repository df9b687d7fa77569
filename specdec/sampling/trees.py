"""Draft topologies: chain, static tree, dynamic tree, best-first tree.

A topology drives a drafter's `Growth` and decides which tokens are proposed. A static tree draws
siblings as the verification method requires; the other trees pick the most likely nodes.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.context import Proposal
from specdec.errors import UserError, require, require_within
from specdec.runtime.device import perhaps_any
from specdec.sampling.choose import Choose
from specdec.sampling.confidence import Calibration

DEEPEST = 128  # tokens in a row, or children of a node: a much longer draft could not pay off
LARGEST = 1024  # nodes of a tree: one pass reads them all

# (depth, q [B, S], index [B], confidence [B]) -> [B] bool
Stop = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class Growth:
    """A drafter's state in one speculation step. Nodes are numbered in the order in which they
    grow.

    `grow(tokens_BT, parents_BT)` returns the logits [B, T, S] after each new node. The parents are
    node numbers, -1 for the anchor; None continues the last node (T = 1). All nodes of a call have
    the same depth. `marginals(depth)` returns the logits [B, depth, S] of a drafter whose depths do
    not read each other; for other drafters it is None. `own_BT` is the drafter's own estimate of
    acceptance after the last nodes, if it makes one.
    """

    logits_BS: Tensor  # logits of the first drafted token
    grow: Callable[[Tensor, Tensor | None], Tensor]
    marginals: Callable[[int], Tensor] | None = None
    own_BT: Tensor | None = None
    calibration: Calibration | None = None

    def log_confidence(self, depth: int, log_q_BTC: Tensor) -> Tensor:
        """The logarithm of the confidence in children of the last nodes, from their log q. Children
        are ordered by likelihood. The drafter's own estimate, if there is one, applies to the first
        child; the others get it multiplied by their q over the first child's q."""
        if self.own_BT is not None:
            log_q_BTC = log_q_BTC - log_q_BTC[..., :1] + self.own_BT.log()[..., None]
        return log_q_BTC if (c := self.calibration) is None else c.log(log_q_BTC, depth)


class Shape(ABC):
    """The draft topology of a speculation step."""

    depth: int  # drafted tokens on the longest path
    nodes: int  # the most drafted tokens
    grown: int  # the most nodes that a drafter grows in order to find them
    fixed: bool = False  # nodes are picked by likelihood, so siblings cannot be drawn

    @abstractmethod
    def draft(self, growth: Growth, choose: Choose) -> Proposal: ...


@dataclass
class Chain(Shape):
    """A chain of γ tokens. `stop` can end it early."""

    depth: int
    stop: Stop | None = None

    def __post_init__(self) -> None:
        require(self.depth <= DEEPEST, f"a chain of {self.depth} tokens: give at most {DEEPEST}")
        self.nodes, self.grown = self.depth, self.depth - 1

    def draft(self, growth: Growth, choose: Choose) -> Proposal:
        logits_BTS, tokens_BG = growth.logits_BS[:, None], growth.logits_BS[:, :0].long()
        qs: list[Tensor] = []
        going_B = logits_BTS.new_ones(len(logits_BTS), dtype=torch.bool)  # rows that still draft
        for k in range(self.depth):
            if k > 0:
                logits_BTS = growth.grow(tokens_BG[:, -1:].clamp_min(0), None)
            place_B1 = tokens_BG.new_full((len(tokens_BG), 1), k)
            chosen = choose(logits_BTS, 1, Proposal(tokens_BG), place_B1, going_B)
            token_B = torch.where(going_B, chosen.tokens_BTC[:, 0, 0], -1)
            going_B = token_B >= 0
            if not perhaps_any(going_B):
                break
            tokens_BG = torch.cat([tokens_BG, token_B[:, None]], 1)
            if chosen.q_BTS is not None:
                qs.append(chosen.q_BTS)
            if self.stop is not None:
                q_BTS = qs[-1] if qs else chosen.logits_BTS.float().softmax(-1)
                log_q_BTC = q_BTS.gather(-1, chosen.index_BTC).log()
                confidence_B = growth.log_confidence(k, log_q_BTC)[:, 0, 0].exp()
                stop_B = self.stop(k, q_BTS[:, 0], chosen.index_BTC[:, 0, 0], confidence_B)
                going_B = going_B & ~stop_B
                if not going_B.any():
                    break
        return Proposal(tokens_BG, torch.cat(qs, 1) if qs else None)


@dataclass
class Static(Shape):
    """A tree that is the same in every speculation step: `paths` of ranks, as in Medusa's
    choices. [[0], [1], [0, 0]] are the two most likely (or first drawn) tokens, and one child of
    the first."""

    paths: Sequence[Sequence[int]]
    fixed: bool = False

    def __post_init__(self) -> None:
        self._ordered = ordered = sorted(map(tuple, self.paths), key=by_depth)
        known = set(ordered)
        for path in ordered:
            sound = len(path) > 0 and min(path) >= 0
            require(sound, f"tree: the path {list(path)} is empty or has a rank below 0")
            require(
                len(path) == 1 or path[:-1] in known,
                f"tree: the path {list(path)} has no parent among the paths: add {list(path[:-1])}",
            )
            before = (*path[:-1], path[-1] - 1)  # methods judge siblings in the order of drawing
            require(
                path[-1] == 0 or before in known,
                f"tree: the path {list(path)} has no sibling before it: add {list(before)}",
            )
        require(len(known) == len(ordered) > 0, "tree: give at least one path, and each only once")
        self.nodes, self.depth = len(ordered), len(ordered[-1])
        require(
            self.nodes <= LARGEST and self.depth <= DEEPEST,
            f"tree: {self.nodes} paths of up to {self.depth} tokens: give at most {LARGEST} paths "
            f"of at most {DEEPEST} tokens",
        )
        self._ranks, self._parents = [path[-1] for path in ordered], parents_of(ordered)
        self._grown = sorted(set(self._parents))  # the anchor, and the nodes with children
        self.grown = len(self._grown) - 1

    @property
    def levels(self) -> list[list[tuple[int, int]]]:
        """For each depth, its nodes as (index of the parent in the level above, rank)."""
        levels: list[list[tuple[int, ...]]] = [[()]]
        levels += [list(paths) for _, paths in groupby(self._ordered, len)]
        return [
            [(above.index(path[:-1]), path[-1]) for path in level]
            for above, level in pairwise(levels)
        ]

    def draft(self, growth: Growth, choose: Choose) -> Proposal:
        logits_BTS, tokens_BG = growth.logits_BS[:, None], growth.logits_BS[:, :0].long()
        parents_BG = tokens_BG.new_tensor(self._parents).expand(len(tokens_BG), -1)
        qs: list[Tensor] = []
        front, last = [-1], -1  # the nodes that grew last; the last one's number among those grown
        while front:
            level = [i for i, parent in enumerate(self._parents) if parent in front]
            above, ranks = [self._parents[i] for i in level], [self._ranks[i] for i in level]
            draft = Proposal(tokens_BG, None, parents_BG[:, : tokens_BG.shape[1]])
            place_BT = tokens_BG.new_tensor([i + 1 for i in front]).expand(len(tokens_BG), -1)
            chosen = choose(logits_BTS, max(ranks) + 1, draft, place_BT)
            at = [front.index(parent) for parent in above]
            missing = max(ranks) + 1 - chosen.tokens_BTC.shape[2]  # in a very small vocabulary
            drafted = pad(chosen.tokens_BTC, (0, missing), value=-1)[:, at, ranks]
            if front != [-1]:
                drafted = torch.where(tokens_BG[:, above] < 0, -1, drafted)
            tokens_BG = torch.cat([tokens_BG, drafted], 1)
            if chosen.q_BTS is not None:
                qs.append(chosen.q_BTS[:, at])
            front = [i for i in level if i in self._grown]
            if front:
                numbers = [self._grown.index(self._parents[i]) - 1 for i in front]
                at_BT = None  # None: a single node below the one that grew last
                if numbers != [last]:
                    at_BT = tokens_BG.new_tensor(numbers).expand(len(tokens_BG), -1)
                logits_BTS = growth.grow(tokens_BG[:, front].clamp_min(0), at_BT)
                last += len(front)
        return Proposal(tokens_BG, torch.cat(qs, 1) if qs else None, parents_BG)


@dataclass
class Dynamic(Shape):
    """EAGLE-2 (Li et al. 2024): a node's score is the product of the confidences along its path. At
    each depth, the `top_k` best nodes get `top_k` children each. The `nodes` nodes with the highest
    scores are proposed."""

    depth: int = 5
    nodes: int = 24
    top_k: int = 8
    fixed = True

    def __post_init__(self) -> None:
        require_within("tree", self, depth=(1, DEEPEST), nodes=(1, LARGEST), top_k=(1, DEEPEST))
        self.grown = (self.depth - 1) * self.top_k

    def draft(self, growth: Growth, choose: Choose) -> Proposal:
        logits_BTS, tokens_BG = growth.logits_BS[:, None], growth.logits_BS[:, :0].long()
        parents_BG, scores_BG = tokens_BG, tokens_BG.float()
        front_BT = tokens_BG.new_full((len(tokens_BG), 1), -1)  # the nodes that grew last
        numbers_BT, score_BT = front_BT, torch.zeros_like(front_BT, dtype=torch.float32)
        count = 0  # nodes grown so far
        for d in range(self.depth):
            draft = Proposal(tokens_BG, None, parents_BG)
            logits = choose.draft_logits(logits_BTS, draft, front_BT + 1).float()
            width = min(self.top_k, logits.shape[-1])
            best_BTC, index_BTC = (logits - logits.logsumexp(-1, keepdim=True)).topk(width, -1)
            best_BTC = growth.log_confidence(d, best_BTC)
            # less 1e-5, so that a parent outranks even a child of confidence 1
            total_BC = (score_BT[..., None] + best_BTC - 1e-5).flatten(1)
            first = tokens_BG.shape[1]
            tokens_BG = torch.cat([tokens_BG, choose.ids(index_BTC).flatten(1)], 1)
            parents_BG = torch.cat([parents_BG, front_BT.repeat_interleave(width, 1)], 1)
            scores_BG = torch.cat([scores_BG, total_BC], 1)
            if d + 1 == self.depth:
                break
            score_BT, kept_BT = total_BC.topk(min(self.top_k, total_BC.shape[1]), -1)
            front_BT, above_BT = first + kept_BT, numbers_BT.gather(1, kept_BT // width)
            logits_BTS = growth.grow(tokens_BG.gather(1, front_BT), above_BT)
            numbers_BT = count + torch.arange(front_BT.shape[1], device=front_BT.device)
            numbers_BT = numbers_BT.expand_as(front_BT)
            count += front_BT.shape[1]
        kept_BG = scores_BG.topk(min(self.nodes, scores_BG.shape[1]), -1).indices.sort(-1).values
        new_BG = torch.arange(kept_BG.shape[1], device=kept_BG.device).expand_as(kept_BG)
        new_BG = torch.full_like(tokens_BG, -1).scatter_(1, kept_BG, new_BG)
        above_BG = parents_BG.gather(1, kept_BG)
        above_BG = torch.where(above_BG < 0, -1, new_BG.gather(1, above_BG.clamp_min(0)))
        return Proposal(tokens_BG.gather(1, kept_BG), None, above_BG)


@dataclass
class BestFirst(Shape):
    """The `nodes` most confident paths under the marginals of parallel heads. The heads do not read
    each other's tokens, so a path's confidence is the product of its tokens' confidences. On a
    block such as DFlash's it is the tree of DDTree (Ringel and Romano 2026, arXiv 2604.12989)."""

    depth: int = 4
    nodes: int = 24
    fixed = True
    grown = 0  # heads do not read each other's tokens

    def __post_init__(self) -> None:
        require_within("tree", self, depth=(1, DEEPEST), nodes=(1, LARGEST))

    def draft(self, growth: Growth, choose: Choose) -> Proposal:
        if growth.marginals is None or choose.processors:
            raise UserError(
                "decode.tree=best_first needs parallel heads and no logits processors: give static "
                "or dynamic"
            )
        marginals_BKS = growth.marginals(self.depth)
        width = min(self.nodes, marginals_BKS.shape[-1])
        log_BKC, index_BKC = marginals_BKS.float().log_softmax(-1).topk(width, -1)
        by_depth = [growth.log_confidence(k, x) for k, x in enumerate(log_BKC.split(1, 1))]
        log_BKC = torch.cat(by_depth, 1)
        tokens, parents = [], []
        for ids, log_KC in zip(choose.ids(index_BKC).tolist(), log_BKC.tolist(), strict=True):
            paths = best_paths(log_KC, self.nodes)
            tokens.append([ids[len(path) - 1][path[-1]] for path in paths])
            parents.append(parents_of(paths))
        tokens_BG, parents_BG = index_BKC.new_tensor(tokens), index_BKC.new_tensor(parents)
        return Proposal(tokens_BG, None, parents_BG)


def parents_of(paths: Sequence[tuple[int, ...]]) -> list[int]:
    """The index of each path's parent among the paths, -1 for the anchor."""
    index = {path: i for i, path in enumerate(paths)}
    return [index.get(path[:-1], -1) for path in paths]


def best_paths(scores_KC: Sequence[Sequence[float]], nodes: int) -> list[tuple[int, ...]]:
    """The `nodes` paths of ranks with the largest sums of `scores_KC`, the log-scores by depth and
    rank, ordered by depth. Scores must be at most 0 and fall with the rank, so that each path's
    parent and earlier siblings are among the paths."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-scores_KC[0][0], (0,))]
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < nodes:
        cost, path = heapq.heappop(heap)
        paths.append(path)
        depth, rank = len(path) - 1, path[-1]
        if rank + 1 < len(scores_KC[depth]):
            beside = cost + scores_KC[depth][rank] - scores_KC[depth][rank + 1]
            heapq.heappush(heap, (beside, (*path[:-1], rank + 1)))
        if depth + 1 < len(scores_KC):
            heapq.heappush(heap, (cost - scores_KC[depth + 1][0], (*path, 0)))
    return sorted(paths, key=by_depth)


def by_depth(path: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """A sort key for a tree's nodes: parents before children, siblings by rank."""
    return len(path), tuple(path)

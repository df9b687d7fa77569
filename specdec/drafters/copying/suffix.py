"""Suffix decoding (Oliaro et al. 2024): follow what came after the same words before.

Two indices are searched for the end of the text: one of a corpus (the answers seen in training),
one of the text itself. Where the last n tokens occur, the draft follows the tree of what came
after them and weighs each path by its frequencies, D(path) = Π count(child) / count(parent)
(their Equation 1), up to `factor` · n tokens and while D >= `threshold`. Of the drafts for every
n and both indices, the one with the largest Σ D, its expected accepted length, is proposed.

The corpus is held as a suffix array, the compact form of a suffix tree, with two integers for
each token, in buffers of the module. The index of the text itself is a list of positions for each
token, from which the matches of every length follow as tokens come. A node of either tree is
represented by the places at which its path occurs.

Letters: N tokens of the corpus, R of them sampled.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.drafters.base import Sizes
from specdec.drafters.copying.memory import Copying, TreeNode
from specdec.errors import require

SEPARATOR = -1  # between texts of the corpus: equal to no token
SORTED = 256  # tokens by which suffixes are ordered: more than a match and a draft have
SAMPLED = 512  # occurrences that are examined to find the likeliest next tokens


@dataclass
class SuffixConfig:
    """`factor` and `threshold` are explained at the top of this file; the paper takes factors of 1
    to 4, and its engine the threshold 0.1.

    `max_match` is the longest suffix that is matched, `recent` how many of a token's latest
    occurrences in the text itself are followed, and `max_tokens` how many tokens of the corpus, the
    last ones, are indexed.
    """

    name: str = "suffix"
    depth: int = 16
    factor: float = 2.0
    threshold: float = 0.1
    max_match: int = 32
    recent: int = 256
    max_tokens: int = 1_000_000


class Places(Protocol):
    """The places at which a path of tokens occurs: a node of a suffix tree."""

    count: int

    def children(self, width: int) -> "list[tuple[int, Places]]":
        """The `width` most frequent next tokens, each with its node, the most frequent first."""
        ...


class TextPlaces:
    """Places in the text itself: the positions of what follows the path."""

    def __init__(self, ids: list[int], after: list[int]) -> None:
        self.ids, self.after, self.count = ids, after, len(after)

    def children(self, width: int) -> list[tuple[int, Places]]:
        found: dict[int, list[int]] = {}
        for p in self.after:
            if p < len(self.ids):
                found.setdefault(self.ids[p], []).append(p + 1)
        ranked = sorted(found.items(), key=lambda x: (-len(x[1]), -x[1][-1]))[:width]
        return [(token, TextPlaces(self.ids, after)) for token, after in ranked]


class SuffixArray:
    """The corpus and the order of its suffixes."""

    def __init__(self, text_N: NDArray[np.int32], order_N: NDArray[np.int32]) -> None:
        self.text_N, self.order_N = text_N, order_N

    def column(self, row: int, offset: int) -> int:
        """The token `offset` places after the beginning of the row-th suffix."""
        at = int(self.order_N[row]) + offset
        return int(self.text_N[at]) if at < len(self.text_N) else SEPARATOR


class CorpusPlaces:
    """Places in the corpus: suffixes `low` to `high` begin with the path of `length` tokens."""

    def __init__(self, index: SuffixArray, low: int, high: int, length: int) -> None:
        self.index, self.low, self.high, self.length = index, low, high, length
        self.count = high - low

    def narrowed(self, token: int) -> "CorpusPlaces":
        """The places at which this token follows."""

        def key(row: int) -> int:
            return self.index.column(row, self.length)

        rows = range(self.low, self.high)
        low = self.low + bisect_left(rows, token, key=key)
        high = self.low + bisect_right(rows, token, lo=low - self.low, key=key)
        return CorpusPlaces(self.index, low, high, self.length + 1)

    def children(self, width: int) -> list[tuple[int, Places]]:
        step = -(-self.count // SAMPLED)
        at_R = self.index.order_N[self.low : self.high : step] + self.length
        at_R = at_R[at_R < len(self.index.text_N)]
        ranked = Counter(self.index.text_N[at_R].tolist()).most_common(width + 1)
        found = [(t, self.narrowed(t)) for t, _ in ranked if t != SEPARATOR]
        return [(t, path) for t, path in sorted(found, key=lambda x: -x[1].count)[:width]]


class Suffixes:
    """The text read so far, and all places at which one of its suffixes occurred before."""

    def __init__(self, config: SuffixConfig, index: SuffixArray) -> None:
        self.config, self.index = config, index
        self.ids: list[int] = []
        self._where: dict[int, list[int]] = {}  # positions of each token
        self._lengths: dict[int, int] = {}  # how much matches before each place
        self._in_corpus: list[CorpusPlaces] = []  # matches in the corpus, the longest first
        self._matched = 0  # tokens that these have read

    def push(self, token: int) -> None:
        where = self._where.setdefault(token, [])
        known, longest = self._lengths, self.config.max_match
        self._lengths = {
            p + 1: min(known.get(p, 0) + 1, longest) for p in where[-self.config.recent :]
        }
        where.append(len(self.ids))
        self.ids.append(token)

    def matches(self) -> list[tuple[int, Places]]:
        """Match lengths with their nodes; where two nodes have equal places, the longer match."""
        found: list[tuple[int, Places]] = []
        for match in self._known():
            if not found or found[-1][1].count != match.count:
                found.append((match.length, match))
        by_length: dict[int, list[int]] = {}
        for p, n in self._lengths.items():
            by_length.setdefault(n, []).append(p)
        after: list[int] = []
        for n in sorted(by_length, reverse=True):
            after = sorted(after + by_length[n])
            found.append((n, TextPlaces(self.ids, after)))
        return found

    def _known(self) -> list[CorpusPlaces]:
        """Matches in the corpus; of a long prompt only the end is matched."""
        if len(self.ids) - self._matched > self.config.max_match:
            self._in_corpus, self._matched = [], len(self.ids) - self.config.max_match
        for token in self.ids[self._matched :]:
            whole = CorpusPlaces(self.index, 0, len(self.index.order_N), 0)
            shorter = (m for m in [*self._in_corpus, whole] if m.length < self.config.max_match)
            self._in_corpus = [m for m in (m.narrowed(token) for m in shorter) if m.count]
        self._matched = len(self.ids)
        return self._in_corpus

    def chain(self, count: int) -> list[int]:
        found = [self._followed(n, path, count) for n, path in self.matches()]
        return max(found, key=lambda x: x[0], default=(0.0, []))[1]

    def tree(self, depth: int, nodes: int) -> list[TreeNode]:
        """The `nodes` nodes of one match's tree with the largest D, the likeliest first."""
        found = [self._spread(n, path, depth, nodes) for n, path in self.matches()]
        return max(found, key=lambda x: x[0], default=(0.0, []))[1]

    def _followed(self, match: int, path: Places, count: int) -> tuple[float, list[int]]:
        """Σ D and the tokens of the draft along the most frequent children."""
        tokens: list[int] = []
        weight, score = 1.0, 0.0
        for _ in range(self._most(match, count)):
            child = next(iter(path.children(1)), None)
            if child is None or weight * child[1].count / path.count < self.config.threshold:
                break
            weight *= child[1].count / path.count
            token, path = child
            tokens.append(token)
            score += weight
        return score, tokens

    def _spread(
        self, match: int, root: Places, depth: int, nodes: int
    ) -> tuple[float, list[TreeNode]]:
        """Σ D and the nodes of the tree that grows where D is largest."""
        found: list[TreeNode] = []
        heap: list[tuple[float, int, int, int, int, Places]] = []
        score, order = 0.0, 0  # `order` settles ties: the earlier first
        at, weight, parent, level = root, 1.0, -1, 1
        while True:
            if level <= self._most(match, depth):
                for token, child in at.children(nodes):
                    share = weight * child.count / at.count
                    if share >= self.config.threshold:
                        heapq.heappush(heap, (-share, order, token, parent, level + 1, child))
                        order += 1
            if not heap or len(found) == nodes:
                return score, found
            less, _, token, above, level, at = heapq.heappop(heap)
            weight, parent = -less, len(found)
            found.append((token, above))
            score += weight

    def _most(self, match: int, depth: int) -> int:
        return min(depth, max(1, int(self.config.factor * match)), SORTED - match)


@dataclass(kw_only=True)
class SuffixSizes(Sizes):
    """`tokens` counts those of the corpus; before there is one, a separator, so that no tensor is
    empty."""

    tokens: int = 1


class Suffix(Copying):
    Config = SuffixConfig
    Sizes = SuffixSizes
    sizes: SuffixSizes
    text_N: Tensor
    order_N: Tensor

    def __init__(self, config: SuffixConfig, sizes: SuffixSizes) -> None:
        super().__init__(config, sizes)
        require(config.factor > 0, f"drafter.factor={config.factor}: give a number above 0")
        require(
            0 < config.threshold <= 1,
            f"drafter.threshold={config.threshold}: give a number in (0, 1]",
        )
        require(
            1 <= config.max_match < SORTED,
            f"drafter.max_match={config.max_match}: give 1 to {SORTED - 1}",
        )
        require(config.recent >= 1, f"drafter.recent={config.recent}: give 1 or more")
        N = sizes.tokens
        self.register_buffer("text_N", torch.full((N,), SEPARATOR, dtype=torch.int32))
        self.register_buffer("order_N", torch.zeros(N, dtype=torch.int32))
        self._index: tuple[Tensor, SuffixArray] | None = None

    def fit(
        self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]] | None = None
    ) -> None:
        """Index these texts as the corpus; of each, the stretches that its mask marks."""
        joined = [SEPARATOR]
        for ids, mask in zip(texts, masks or texts, strict=True):
            for token, said in zip(ids, mask, strict=True):
                if masks is None or said:
                    joined.append(token)
                elif joined[-1] != SEPARATOR:
                    joined.append(SEPARATOR)
            if joined[-1] != SEPARATOR:
                joined.append(SEPARATOR)
        text_N = np.array(joined[-self.config.max_tokens :], dtype=np.int32)
        device = self.text_N.device
        self.text_N = torch.from_numpy(text_N).to(device)
        self.order_N = torch.from_numpy(suffix_order(text_N)).to(device)
        self.sizes.tokens = len(text_N)

    def require_sound(self) -> None:
        super().require_sound()
        ids_N, order_N = self.text_N, self.order_N
        inside = bool(((ids_N >= SEPARATOR) & (ids_N < self.target_vocab)).all())
        require(inside, f"tensor 'text_N' has ids outside 0 to {self.target_vocab - 1}")
        inside = bool(((order_N >= 0) & (order_N < len(ids_N))).all())
        require(inside, "tensor 'order_N' points outside of the texts")

    def memory(self) -> Suffixes:
        if self._index is None or self._index[0] is not self.text_N:  # fitted, loaded or moved
            index = SuffixArray(self.text_N.cpu().numpy(), self.order_N.cpu().numpy())
            self._index = (self.text_N, index)
        return Suffixes(self.config, self._index[1])


def suffix_order(text_N: NDArray[np.int32]) -> NDArray[np.int32]:
    """The starts of all suffixes, ordered by at least their first SORTED tokens.

    By doubling (Manber and Myers 1990): the order by the first w tokens, and the ranks of the
    suffixes that start w later, give the order by 2 w.
    """
    size, width = len(text_N), 1
    rank_N = np.unique(text_N, return_inverse=True)[1].astype(np.int64)
    order_N = np.argsort(rank_N, kind="stable")
    while width < SORTED and rank_N.max() < size - 1:
        later_N = np.zeros_like(rank_N)
        later_N[: max(0, size - width)] = rank_N[width:] + 1
        both_N = rank_N * (size + 1) + later_N
        order_N = np.argsort(both_N, kind="stable")
        ordered_N = both_N[order_N]
        rank_N[order_N] = np.cumsum(np.r_[0, ordered_N[1:] != ordered_N[:-1]])
        width *= 2
    return order_N.astype(np.int32)

"""Suffix decoding (Oliaro et al. 2024): draft the tokens that followed the same words earlier.

Two indices are searched for the end of the text: one of a corpus (the responses in training), one
of the text itself. Where the last n tokens occur, the draft follows the tree of their
continuations. Each path is weighted by its frequencies, D(path) = Π count(child) / count(parent)
(their Equation 1), up to `factor` · n tokens and while D >= `threshold`. Of the drafts for every n
and both indices, the one with the largest Σ D, its expected accepted length, is proposed.

The corpus is a suffix array in buffers of the module. The index of the text lists the positions of
each token; matches of every length are updated from it with each new token. A node of either tree
holds the places at which its path occurs.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.drafters.base import DrafterConfig, Sizes
from specdec.drafters.copying import Copying, TextMemory, TreeNode
from specdec.errors import require

SEPARATOR = -1  # between texts of the corpus: not the id of any token
SORTED = 256  # tokens by which suffixes are ordered: at least a match and a draft together
SAMPLED = 512  # occurrences examined to find the likeliest next tokens


@dataclass
class SuffixConfig(DrafterConfig):
    """Suffix decoding."""

    bounds: ClassVar = {"max_match": (1, SORTED - 1), "recent": 1, "max_tokens": 1}
    name: str = "suffix"
    depth: int = 16
    factor: float = 2.0  # draft length per matched token (the paper: 1 to 4)
    # least estimated probability of a drafted path (the paper's engine: 0.1)
    threshold: float = 0.1
    max_match: int = 32  # longest suffix matched, in tokens
    recent: int = 256  # latest occurrences of a token in the text that are followed
    max_tokens: int = 1_000_000  # tokens of the corpus that are indexed, from its end


@dataclass
class TextPlaces:
    """Places in the text itself: the positions right after each occurrence of the path."""

    ids: list[int]
    after: list[int]

    @property
    def count(self) -> int:
        return len(self.after)

    def children(self, width: int) -> "list[tuple[int, Places]]":
        """The `width` most frequent next tokens, each with its node, the most frequent first."""
        places_of: dict[int, list[int]] = {}
        for p in self.after:
            if p < len(self.ids):
                places_of.setdefault(self.ids[p], []).append(p + 1)
        ranked = sorted(places_of.items(), key=lambda x: (-len(x[1]), -x[1][-1]))[:width]
        return [(token, TextPlaces(self.ids, after)) for token, after in ranked]


class SuffixArray(NamedTuple):
    """The corpus, and the order of its suffixes."""

    text_N: NDArray[np.int32]
    order_N: NDArray[np.int32]


@dataclass
class CorpusPlaces:
    """Places in the corpus: suffixes `low` to `high` begin with the path's `length` tokens."""

    index: SuffixArray
    low: int
    high: int
    length: int

    @property
    def count(self) -> int:
        return self.high - self.low

    def narrowed(self, token: int) -> "CorpusPlaces":
        """The places that this token follows."""
        text_N, order_N = self.index

        def following(row: int) -> int:
            at = int(order_N[row]) + self.length
            return int(text_N[at]) if at < len(text_N) else SEPARATOR

        low = bisect_left(range(self.high), token, lo=self.low, key=following)
        high = bisect_right(range(self.high), token, lo=low, key=following)
        return CorpusPlaces(self.index, low, high, self.length + 1)

    def children(self, width: int) -> "list[tuple[int, Places]]":
        """Like `TextPlaces.children`; of many places, only a sample is searched for candidates."""
        text_N, order_N = self.index
        step = -(-self.count // SAMPLED)
        at_N = order_N[self.low : self.high : step] + self.length
        ranked = Counter(text_N[at_N[at_N < len(text_N)]].tolist()).most_common(width + 1)
        children = [(t, self.narrowed(t)) for t, _ in ranked if t != SEPARATOR]
        return [(t, path) for t, path in sorted(children, key=lambda x: -x[1].count)[:width]]


Places = TextPlaces | CorpusPlaces  # where a path of tokens occurs: a node of a suffix tree


class SuffixMemory(TextMemory):
    """The text so far, and all places at which one of its suffixes occurred before."""

    def __init__(self, config: SuffixConfig, index: SuffixArray) -> None:
        super().__init__(config)
        self.index = index
        self._where: dict[int, list[int]] = {}  # positions of each token
        self._lengths: dict[int, int] = {}  # match length before each place; places rise
        self._in_corpus: list[CorpusPlaces] = []  # matches in the corpus, the longest first
        self._best: tuple[int, Places] | None = None  # the match of the last chain
        self._matched = 0  # tokens of the text that `_in_corpus` has read

    def push(self, token: int) -> None:
        where = self._where.setdefault(token, [])
        known, longest = self._lengths, self.config.max_match
        self._lengths = {
            p + 1: min(known.get(p, 0) + 1, longest) for p in where[-self.config.recent :]
        }
        where.append(len(self.ids))
        self.ids.append(token)

    def matches(self) -> list[tuple[int, Places]]:
        """Match lengths and their nodes; of two corpus matches with the same places, the longer
        one."""
        matches: list[tuple[int, Places]] = []
        for match in self._known():
            if not matches or matches[-1][1].count != match.count:
                matches.append((match.length, match))
        for n in sorted(set(self._lengths.values()), reverse=True):
            after = [p for p, length in self._lengths.items() if length >= n]
            matches.append((n, TextPlaces(self.ids, after)))
        return matches

    def _known(self) -> list[CorpusPlaces]:
        """Matches in the corpus; of a long prompt, only the end is matched."""
        if len(self.ids) - self._matched > self.config.max_match:
            self._in_corpus, self._matched = [], len(self.ids) - self.config.max_match
        for token in self.ids[self._matched :]:
            whole = CorpusPlaces(self.index, 0, len(self.index.order_N), 0)
            shorter = (m for m in [*self._in_corpus, whole] if m.length < self.config.max_match)
            self._in_corpus = [m for m in (m.narrowed(token) for m in shorter) if m.count]
        self._matched = len(self.ids)
        return self._in_corpus

    def chain(self, count: int) -> list[int]:
        chains = [(*self._spread(n, at, count, count, 1), (n, at)) for n, at in self.matches()]
        _, nodes, self._best = max(chains, key=lambda x: x[0], default=(0.0, [], None))
        return [token for token, _ in nodes]

    def evidence(self) -> tuple[int, float]:
        if self._best is None:
            return super().evidence()
        length, path = self._best
        return length, max((child.count for _, child in path.children(1)), default=0) / path.count

    def tree(self, depth: int, nodes: int) -> list[TreeNode]:
        """The `nodes` nodes of one match's tree with the largest D, the most likely first."""
        trees = [self._spread(n, at, depth, nodes, nodes) for n, at in self.matches()]
        return max(trees, key=lambda x: x[0], default=(0.0, []))[1]

    def _spread(
        self, match: int, at: Places, depth: int, nodes: int, width: int
    ) -> tuple[float, list[TreeNode]]:
        """Σ D and the nodes of a tree that grows where D is largest, among the `width` most
        frequent children of each node."""
        deepest = min(depth, max(1, int(self.config.factor * match)), SORTED - match)
        tree: list[TreeNode] = []
        heap: list[tuple[float, int, int, int, int, Places]] = []
        score, order = 0.0, 0  # `order` settles ties: the earlier first
        weight, parent, level = 1.0, -1, 1
        while True:
            if level <= deepest:
                for token, child in at.children(width):
                    share = weight * (child.count / at.count)
                    if share >= self.config.threshold:
                        heapq.heappush(heap, (-share, order, token, parent, level + 1, child))
                        order += 1
            if not heap or len(tree) == nodes:
                return score, tree
            less, _, token, above, level, at = heapq.heappop(heap)
            weight, parent = -less, len(tree)
            tree.append((token, above))
            score += weight


@dataclass(kw_only=True)
class SuffixSizes(Sizes):
    """`tokens` is the number of tokens in the corpus; without a corpus it is 1, for a separator."""

    tokens: int = 1


class Suffix(Copying):
    fits_texts = True
    Config = SuffixConfig
    Sizes = SuffixSizes
    sizes: SuffixSizes
    text_N: Tensor
    order_N: Tensor

    def __init__(self, config: SuffixConfig, sizes: SuffixSizes) -> None:
        super().__init__(config, sizes)
        factor, threshold = config.factor, config.threshold
        require(factor > 0, f"drafter.factor={factor}: give a number above 0")
        require(0 < threshold <= 1, f"drafter.threshold={threshold}: give a number in (0, 1]")
        N = sizes.tokens
        self.register_buffer("text_N", torch.full((N,), SEPARATOR, dtype=torch.int32))
        self.register_buffer("order_N", torch.zeros(N, dtype=torch.int32))
        self._index: tuple[Tensor, SuffixArray] | None = None

    def fit(self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> None:
        """Index the parts of these texts that the masks mark, as the corpus."""
        joined = [SEPARATOR]
        for ids, mask in zip(texts, masks, strict=True):
            for token, said in zip([*ids, SEPARATOR], [*mask, False], strict=True):
                if said:
                    joined.append(token)
                elif joined[-1] != SEPARATOR:
                    joined.append(SEPARATOR)
        text_N = np.array(joined[-self.config.max_tokens :], dtype=np.int32)
        device = self.text_N.device
        self.text_N = torch.from_numpy(text_N).to(device)
        self.order_N = torch.from_numpy(suffix_order(text_N)).to(device)
        self.sizes.tokens = len(text_N)

    def require_sound(self) -> None:
        ids_N, order_N = self.text_N, self.order_N
        inside = bool(((ids_N >= SEPARATOR) & (ids_N < self.sizes.target_vocab)).all())
        require(inside, f"tensor 'text_N' has ids outside 0 to {self.sizes.target_vocab - 1}")
        inside = bool(((order_N >= 0) & (order_N < len(ids_N))).all())
        require(inside, "tensor 'order_N' points outside the texts")

    def memory(self) -> SuffixMemory:
        if self._index is None or self._index[0] is not self.text_N:  # fitted, loaded or moved
            index = SuffixArray(self.text_N.cpu().numpy(), self.order_N.cpu().numpy())
            self._index = (self.text_N, index)
        return SuffixMemory(self.config, self._index[1])


def suffix_order(text_N: NDArray[np.int32]) -> NDArray[np.int32]:
    """The starts of all suffixes, ordered by at least their first SORTED tokens.

    By doubling (Manber and Myers 1990): the order by the first w tokens and the ranks of the
    suffixes that start w tokens later give the order by 2 w tokens.
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

"""Prompt lookup (Saxena 2023): copy the tokens that followed an earlier occurrence of the last
n-gram.

The draft follows the longest n-gram, up to `max_ngram`, that ends at the anchor and also occurs
earlier; if there is none, nothing is drafted. Of its occurrences, the latest with enough tokens
after it is used; if none has enough, the first, which has the most tokens after it. (The original
takes the first complete occurrence, transformers the first of all; docs/notebook/families.md
compares them.)
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import takewhile

from specdec.drafters.base import DrafterConfig, Sizes
from specdec.drafters.copying import Copying, TextMemory
from specdec.errors import require

LONGEST = 32  # a match of more tokens is no better evidence


@dataclass
class NgramConfig(DrafterConfig):
    """Prompt lookup."""

    name: str = "ngram"
    depth: int = 10
    max_ngram: int = 3  # longest n-gram matched, in tokens
    min_ngram: int = 1  # shortest n-gram matched, in tokens


class NgramMemory(TextMemory):
    """The text so far, and the end position of each of its n-grams, except those at its very
    end."""

    def __init__(self, config: NgramConfig) -> None:
        super().__init__(config)
        self.ends: dict[tuple[int, ...], list[int]] = {}
        self._found: tuple[list[int], int] = [0], 0  # the n-gram's ends; the one followed

    def push(self, token: int) -> None:
        for gram in self.last(self.config.min_ngram, self.config.max_ngram):
            self.ends.setdefault(gram, []).append(len(self.ids))
        self.ids.append(token)

    def chain(self, count: int) -> list[int]:
        for gram in reversed(self.last(self.config.min_ngram, self.config.max_ngram)):
            if ends := self.ends.get(gram):
                complete = bisect_right(ends, len(self.ids) - count)
                end = ends[max(0, complete - 1)]
                self._found = ends, end
                return self.ids[end : end + count]
        return []

    def evidence(self) -> tuple[int, float]:
        ends, end = self._found
        before = zip(self.ids[max(0, end - LONGEST) : end][::-1], self.ids[-LONGEST:][::-1])
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], before))
        return length, sum(self.ids[e] == self.ids[end] for e in ends) / len(ends)


class Ngram(Copying):
    Config = NgramConfig
    Memory = NgramMemory
    in_transformers = "prompt lookup"

    def __init__(self, config: NgramConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        least, most = config.min_ngram, config.max_ngram
        require(
            1 <= least <= most,
            f"drafter.min_ngram={least} and max_ngram={most}: give 1 <= min_ngram <= max_ngram",
        )

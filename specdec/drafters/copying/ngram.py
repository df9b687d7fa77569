"""Prompt lookup (Saxena 2023): copy what followed the last n tokens when they stood here before.

Nothing to train, nothing read of the target. The longest n-gram up to `max_ngram` that ends at
the anchor and occurs earlier wins, the latest occurrence of it; where there is none, nothing is
drafted.
"""

from dataclasses import dataclass

from specdec.drafters.base import Sizes
from specdec.drafters.copying.memory import Copying, Node, merged
from specdec.errors import require


@dataclass
class NgramConfig:
    name: str = "ngram"
    depth: int = 10
    max_ngram: int = 3
    min_ngram: int = 1


class Text:
    """The text read so far, and where each n-gram in it, but for the last ones, ended last."""

    def __init__(self, config: NgramConfig) -> None:
        self.sizes = range(config.max_ngram, config.min_ngram - 1, -1)
        self.ids: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}

    def push(self, token: int) -> None:
        for n in self.sizes:
            if n <= len(self.ids):
                self.ends[tuple(self.ids[-n:])] = len(self.ids)
        self.ids.append(token)

    def chain(self, count: int) -> list[int]:
        for n in self.sizes:
            end = self.ends.get(tuple(self.ids[-n:]))
            if end is not None and n <= len(self.ids):
                return self.ids[end : end + count]
        return []

    def tree(self, depth: int, nodes: int) -> list[Node]:
        return merged([self.chain(depth)], depth, nodes)


class Ngram(Copying):
    Config = NgramConfig

    def __init__(self, config: NgramConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        least, most = config.min_ngram, config.max_ngram
        require(
            1 <= least <= most,
            f"drafter.min_ngram={least} and max_ngram={most}: give 1 or more, the first no larger",
        )

    def memory(self) -> Text:
        return Text(self.config)

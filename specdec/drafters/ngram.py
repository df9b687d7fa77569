"""Prompt lookup (Saxena 2023): copy what followed the last n tokens when they stood here before.

Nothing to train, nothing read of the target. The longest n-gram up to `max_ngram` that ends at
the anchor and occurs earlier wins, the latest occurrence of it; where there is none, nothing is
drafted.
"""

from dataclasses import dataclass

from specdec.drafters.memory import Copying, Node, merged


@dataclass
class NgramConfig:
    name: str = "ngram"
    depth: int = 10
    max_ngram: int = 3
    min_ngram: int = 1


class Text:
    """The text read so far."""

    def __init__(self, config: NgramConfig) -> None:
        self.config = config
        self.ids: list[int] = []

    def push(self, token: int) -> None:
        self.ids.append(token)

    def chain(self, count: int) -> list[int]:
        ids, longest = self.ids, min(self.config.max_ngram, len(self.ids) - 1)
        for n in range(longest, self.config.min_ngram - 1, -1):
            tail = ids[-n:]
            for end in range(len(ids) - 1, n - 1, -1):
                if ids[end - n : end] == tail:
                    return ids[end : end + count]
        return []

    def tree(self, depth: int, nodes: int) -> list[Node]:
        return merged([self.chain(depth)], depth, nodes)


class Ngram(Copying):
    Config = NgramConfig

    def memory(self) -> Text:
        return Text(self.config)

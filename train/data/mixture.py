"""Conversations of several sources as one stream, and in random order."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from train.data.conversations import Conversation

T = TypeVar("T")


class Mixture:
    """Conversations of several sources, each with the number of its source: one source after
    another or, if they have weights, always the next of the source that is furthest behind its
    share of what was `taken`, until one of them has no more (`ended`). Whoever uses a conversation
    counts it in `taken`, so that the shares are those of usable conversations."""

    def __init__(
        self, sources: Sequence[Iterator[Conversation]], weights: Sequence[float | None]
    ) -> None:
        self.sources, self.weights = sources, weights
        self.taken = [0] * len(sources)
        self.ended: int | None = None

    def __iter__(self) -> Iterator[tuple[int, Conversation]]:
        if None in self.weights:
            for n, source in enumerate(self.sources):
                yield from ((n, conversation) for conversation in source)
            return
        while True:
            n = min(range(len(self.sources)), key=self._share)
            if (conversation := next(self.sources[n], None)) is None:
                self.ended = n
                return
            yield n, conversation

    def _share(self, n: int) -> float:
        """How far a source is, in units of its weight."""
        return self.taken[n] / (self.weights[n] or 1.0)


def shuffled(items: Iterator[T], window: int, seed: int) -> Iterator[T]:
    """Items, each drawn at random from the next `window` of them; in order if this is 0."""
    draw, held = random.Random(seed), list(islice(items, window))
    for item in items:
        if not held:
            yield item
            continue
        at = draw.randrange(len(held))
        yield held[at]
        held[at] = item
    draw.shuffle(held)
    yield from held

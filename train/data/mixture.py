"""Conversations of several sources as one stream, in random order, and read ahead."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

from train.data.conversations import Conversation, Journal, Noted, Tally, Unusable

T = TypeVar("T")


class Ahead(Generic[T]):
    """The conversations of a source, each with what `use` makes of it, or the reason why it is
    unusable. `room` says how many conversations are read and used in one go. Each is counted in
    `tally` only when the caller reaches it, and an error is raised only then, so the caller does
    not notice the reading ahead. `source` makes the stream, which counts in the tally
    that it is passed."""

    def __init__(
        self,
        source: Callable[[Tally], Iterator[Conversation]],
        tally: Tally,
        use: Callable[[Sequence[Conversation]], list[T | Unusable]],
        room: Callable[[], int],
    ) -> None:
        self._journal = Journal()
        self._stream, self._tally = source(self._journal), tally
        self._use, self._room = use, room
        self._held: deque[tuple[Conversation, T | Unusable, Noted]] = deque()
        self._end: tuple[Exception, Noted] | None = None

    def __iter__(self) -> Iterator[tuple[Conversation, T | Unusable]]:
        return self

    def __next__(self) -> tuple[Conversation, T | Unusable]:
        if not self._held and self._end is None:
            self._fill()
        if self._held:
            conversation, item, noted = self._held.popleft()
            noted.add_to(self._tally)
            return conversation, item
        assert self._end is not None
        error, noted = self._end
        self._end = error, Noted(0, ())
        noted.add_to(self._tally)
        raise error

    def _fill(self) -> None:
        self._journal.begin(self._tally.read)
        read: list[tuple[Conversation, Noted]] = []
        for _ in range(self._room()):
            try:
                conversation = next(self._stream)
            except Exception as error:  # the end of the stream, too
                self._end = error, self._journal.noted()
                break
            read.append((conversation, self._journal.noted()))
        items = self._use([conversation for conversation, _ in read]) if read else []
        self._held += [(c, item, noted) for (c, noted), item in zip(read, items, strict=True)]


class Mixture(Generic[T]):
    """Items of several sources, each with the number of its source: one source after another or, if
    they have weights, always the next of the source that is furthest behind its share of what was
    `taken`, until one of them has no more (`ended`). Whoever uses an item counts it in `taken`, so
    that the shares are those of usable ones."""

    def __init__(self, sources: Sequence[Iterator[T]], weights: Sequence[float | None]) -> None:
        self.sources, self.weights = sources, weights
        self.taken = [0] * len(sources)
        self.ended: int | None = None

    def __iter__(self) -> Iterator[tuple[int, T]]:
        if None in self.weights:
            for n, source in enumerate(self.sources):
                yield from ((n, item) for item in source)
            return
        while True:
            n = min(range(len(self.sources)), key=self._share)
            if (item := next(self.sources[n], None)) is None:
                self.ended = n
                return
            yield n, item

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

"""Batches that a thread reads before they are asked for, so that training need not wait."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from specdec.forcing.batch import Batch


class Ahead:
    """Reads up to `count` batches ahead of the one that is taken, in the order in which they are
    expected, in one thread. What a batch holds does not depend on when it is read."""

    def __init__(self, read: Callable[[Sequence[int]], Batch], count: int) -> None:
        self._read, self._count = read, count
        self._expected = deque[Sequence[int]]()
        self._under_way = deque[tuple[Sequence[int], Future[Batch]]]()
        self._pool: ThreadPoolExecutor | None = None

    def expect(self, requests: Sequence[Sequence[int]]) -> None:
        """From now on, these batches will be taken, in this order. Those that were expected before
        are dropped; if there are none, the thread ends."""
        for _, future in self._under_way:
            future.cancel()
        self._under_way.clear()
        self._expected = deque(requests)
        if not self._count:
            return
        if requests and self._pool is None:
            self._pool = ThreadPoolExecutor(1, "features")
        elif not requests and self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._ask()

    def take(self, indices: Sequence[int]) -> Batch | None:
        """The batch of these rows; None if it is not the next that was expected. Raises what
        reading it raised."""
        if not self._under_way or list(self._under_way[0][0]) != list(indices):
            return None
        _, future = self._under_way.popleft()
        self._ask()
        return future.result()

    def _ask(self) -> None:
        while self._pool is not None and self._expected and len(self._under_way) < self._count:
            indices = self._expected.popleft()
            self._under_way.append((indices, self._pool.submit(self._read, indices)))

"""Several processes in one: each is a thread, and what they exchange passes through a barrier."""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from specdec import ranks
from specdec.ranks import Ranks

T = TypeVar("T")


class Exchange:
    """In place of `torch.distributed`: collectives of threads, each with its rank."""

    def __init__(self, world: int) -> None:
        self.rank = threading.local()
        self._barrier = threading.Barrier(world, timeout=60)
        self._given = [b""] * world

    def all_gather_object(self, held: list[Any], given: Any) -> None:
        self._given[self.rank.number] = pickle.dumps(given)
        self._barrier.wait()
        held[:] = [pickle.loads(each) for each in self._given]
        self._barrier.wait()

    def broadcast_object_list(self, held: list[Any]) -> None:
        every: list[Any] = [None] * len(self._given)
        self.all_gather_object(every, held[0])
        held[:] = every[:1]


def together(
    patch: pytest.MonkeyPatch, world: int, work: Callable[[Ranks], T]
) -> list[T | Exception]:
    """What `work` returns or raises in each of `world` processes. One that waits for another which
    does not come fails after a minute."""
    exchange = Exchange(world)
    patch.setattr(ranks, "dist", exchange)

    def be(rank: int) -> T | Exception:
        exchange.rank.number = rank
        try:
            return work(Ranks(rank, world))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(be, range(world)))

"""Processes that work together, and how they share work.

All processes run the same code and continue with the same results. Work whose result does not
depend on the process (responses, acceptance, texts) is distributed, and every process gets all
results in order. Times do depend on the process: processes on one machine slow each other down.
Therefore only the first process measures times, by its own clock, while the others wait idle.

If the processes hold one target together (specdec/targets/tensor_parallel.py), they are a team: the
first process then does all work that would be distributed, and the others compute their parts of
its forward passes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from specdec.errors import ReportedByAnotherProcess, first_line

S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")
AT_ONCE = 4096  # items that are handed over at a time
WORKING = ContextVar("WORKING", default=False)  # whether others wait for what this process does now


class Team(Protocol):
    """Processes that hold one target together. They are `broken` after a forward pass has failed in
    the middle, and can then no longer communicate."""

    @property
    def broken(self) -> bool: ...

    def lead(self) -> AbstractContextManager[None]:
        """Make the other processes help with the first one's work inside the block."""

    def help(self) -> str | None:
        """Help the first process until it has finished leading. Returns the error that ended it, or
        None."""


@dataclass(frozen=True)
class _Failed:
    """The message of a process that failed to the others."""

    line: str


@dataclass(eq=False)
class Ranks:
    """This process's number among all processes; by default it is the only one. An error in one
    process ends all of them: it is raised where it occurred, and as `ReportedByAnotherProcess` in
    the others. Within work that one process does, it must not wait for the others, so it counts as
    the only one there."""

    rank: int = 0
    world: int = 1
    team: Team | None = None

    @property
    def alone(self) -> bool:
        return self.world == 1 or WORKING.get()

    @property
    def workers(self) -> int:
        """The number of processes among which work is distributed: all, or one of a team."""
        return 1 if self.team is not None else self.world

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` in the first process while the others wait, and return its result in all of
        them."""
        if self.alone:
            return work()
        error: Exception | None = None
        outcome: Any = None
        if self.rank == 0:
            error, outcome = self._tried(work, self.team)
            if error is not None and self.team is not None and self.team.broken:
                raise error  # the launcher ends the others
        elif self.team is not None:
            self.team.help()
        held: list[Any] = [outcome]
        dist.broadcast_object_list(held)
        _require_done(error, held)
        result: T = outcome if self.rank == 0 else held[0]
        return result

    def map(self, items: Sequence[S], work: Callable[[S], T]) -> list[T]:
        """The result of `work` for each item, in order, in every process. Process r of N computes
        items r, r + N, …; a process without an item waits for the others."""
        if self.alone or self.team is not None:
            return self.first(lambda: [work(item) for item in items])
        return self._map(items, work)

    def led(
        self, lead: Callable[[Callable[[Sequence[S]], list[T]]], U], work: Callable[[S], T]
    ) -> U | None:
        """Run `lead` in the first process and return its result there, None in the others. `lead`
        gets a function that computes `work` for a list of items, distributed over all processes.
        Neither may need a target that a team holds."""
        if self.alone:
            return lead(lambda items: [work(item) for item in items])
        if self.rank > 0:
            while (items := self._told(None)) is not None:
                self._map(items, work)
            return None
        waiting = True  # whether the others do, for what comes next

        def share(items: Sequence[S]) -> list[T]:
            nonlocal waiting
            self._told(items)
            waiting = False
            results = self._map(items, work)
            waiting = True
            return results

        try:
            with self._working():
                outcome = lead(share)
        except Exception as error:
            if waiting:
                self._told(_Failed(first_line(error)))
            raise
        self._told(None)
        return outcome

    def _told(self, said: Any) -> Any:
        """Send a value from the first process to all. Raises `ReportedByAnotherProcess` in the
        others if the first one failed."""
        held = [said]
        dist.broadcast_object_list(held)
        if self.rank > 0:
            _require_done(None, held)
        return held[0]

    def _map(self, items: Sequence[S], work: Callable[[S], T]) -> list[T]:
        error, outcome = self._tried(
            lambda: [work(x) for x in items[self.rank :: self.world]], None
        )
        held: list[Any] = [None] * self.world
        dist.all_gather_object(held, outcome)
        _require_done(error, held)
        held[self.rank] = outcome
        return [held[i % self.world][i // self.world] for i in range(len(items))]

    @contextmanager
    def part(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """This process's part of the items: every n-th item. In a team, all items for the first
        process and none for the others, which help it before they continue."""
        if self.alone or self.team is None:
            yield items[self.rank :: self.world]
        elif self.rank != 0:
            if (failure := self.team.help()) is not None:
                raise ReportedByAnotherProcess(failure)
            yield []
        else:
            with self._working(), self.team.lead():
                yield items

    def handed(self, make: Callable[[], Sequence[T]]) -> list[T]:
        """Make a list of items in the first process and return it in every process. Items are sent
        in groups of limited size, since between GPUs they pass through a GPU's memory."""
        items: Sequence[T] = []

        def count_of_items() -> int:
            nonlocal items
            items = make()
            return len(items)

        count, parts = self.first(count_of_items), list[T]()
        for start in range(0, 0 if self.alone else count, AT_ONCE):
            parts += self.first(lambda at=start: items[at : at + AT_ONCE])  # type: ignore[misc]
        return list(items) if self.rank == 0 or self.alone else parts

    def any(self, here: bool) -> bool:
        """Whether `here` is true in any process. All processes must call this together. They
        compare on their CPUs, so that none waits for a device."""
        if self.alone:
            return here
        count = torch.tensor(int(here))
        dist.all_reduce(count, group=_group_of_hosts(dist.group.WORLD))
        return bool(count > 0)

    def _tried(self, work: Callable[[], Any], team: Team | None) -> tuple[Exception | None, Any]:
        """The error that `work` raises, if any, and the value for the other processes. The
        processes of `team` help meanwhile."""
        try:
            with self._working(), nullcontext() if team is None else team.lead():
                return None, work()
        except Exception as error:
            return error, _Failed(first_line(error))

    @contextmanager
    def _working(self) -> Iterator[None]:
        before = WORKING.set(True)
        try:
            yield
        finally:
            WORKING.reset(before)


@cache
def _group_of_hosts(world: Any) -> Any:
    """A process group for tensors on CPUs, if that of `world` can compare tensors on devices
    only."""
    return world if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo")


def _require_done(error: Exception | None, outcomes: Sequence[Any]) -> None:
    """Raise this process's own error, or `ReportedByAnotherProcess` for that of another one."""
    if error is not None:
        raise error
    for outcome in outcomes:
        if isinstance(outcome, _Failed):
            raise ReportedByAnotherProcess(outcome.line)


ALONE = Ranks()

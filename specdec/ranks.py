"""Processes that work together: what the first does alone, and what they share out.

All of them run the same code and go on with the same results. What does not depend on who makes it
(responses, acceptance, texts) is shared out, and all get the union, in order. Times do depend on
it: processes of one machine that compute at the same time slow each other down. So the first
process alone measures time, by its own clock, while the others wait, idle.

If the processes hold one target together (specdec/targets/tensor_parallel.py), they are a team: the
first then does all work that is shared out otherwise, and the others compute their parts of its
passes.
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
    """Processes that hold one target together. They are `broken` if a pass has failed in the
    middle, so that they cannot exchange anything any more."""

    @property
    def broken(self) -> bool: ...

    def lead(self) -> AbstractContextManager[None]:
        """Have the others help with what the first does inside."""

    def help(self) -> str | None:
        """Help the first until it has led; returns the error in which that ended, if any."""


@dataclass(frozen=True)
class _Failed:
    """What a process that failed gives to the others."""

    line: str


@dataclass(eq=False)
class Ranks:
    """This process's number among all; by default, it is alone. An error in one process ends all:
    it is raised where it occurred, and as `ReportedByAnotherProcess` in the others. Work that one
    process does must not wait for the others, so within it, this process counts as alone."""

    rank: int = 0
    world: int = 1
    team: Team | None = None

    @property
    def alone(self) -> bool:
        return self.world == 1 or WORKING.get()

    @property
    def workers(self) -> int:
        """How many processes do a part of what is shared out: all, or one of a team."""
        return 1 if self.team is not None else self.world

    def first(self, work: Callable[[], T]) -> T:
        """What `work` returns in the first process, which alone does it while the others wait."""
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

    def shared(self, items: Sequence[S], work: Callable[[S], T]) -> list[T]:
        """What `work` makes of each item, in their order. The processes take turns at the items; a
        process for which none is left waits for the others."""
        if self.alone or self.team is not None:
            return self.first(lambda: [work(item) for item in items])
        return self._shared(items, work)

    def led(
        self, lead: Callable[[Callable[[Sequence[S]], list[T]]], U], work: Callable[[S], T]
    ) -> U | None:
        """What `lead` returns in the first process, which alone runs it; None in the others. It is
        passed a function that returns what `work` makes of items, which all processes share. None
        of this may need a target that a team holds."""
        if self.alone:
            return lead(lambda items: [work(item) for item in items])
        if self.rank > 0:
            while (items := self._told(None)) is not None:
                self._shared(items, work)
            return None
        waiting = True  # whether the others do, for what comes next

        def share(items: Sequence[S]) -> list[T]:
            nonlocal waiting
            self._told(items)
            waiting = False
            results = self._shared(items, work)
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
        """What the first process says to all. Raises `ReportedByAnotherProcess` in the others if it
        failed."""
        held = [said]
        dist.broadcast_object_list(held)
        if self.rank > 0:
            _require_done(None, held)
        return held[0]

    def _shared(self, items: Sequence[S], work: Callable[[S], T]) -> list[T]:
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
        """This process's part of the items: every n-th of them or, in a team, all for the first and
        none for the others, which help it before they go on."""
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
        """The items that the first process makes, returned in every process. A limited number is
        handed over at a time, since between GPUs they pass through a GPU's memory."""
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
        """Whether this holds in any process. All processes call it in the same step. They compare
        on their CPUs, so that nobody waits for a device."""
        if self.alone:
            return here
        count = torch.tensor(int(here))
        dist.all_reduce(count, group=_group_of_hosts(dist.group.WORLD))
        return bool(count > 0)

    def _tried(self, work: Callable[[], Any], team: Team | None) -> tuple[Exception | None, Any]:
        """The error that `work` raises, if any, and what is given to the others. With a `team`,
        these help meanwhile."""
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
    """The processes of `world`, which may compare tensors on devices alone, for tensors on CPUs."""
    return world if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo")


def _require_done(error: Exception | None, outcomes: Sequence[Any]) -> None:
    """Raise this process's own error, or `ReportedByAnotherProcess` for that of another one."""
    if error is not None:
        raise error
    for outcome in outcomes:
        if isinstance(outcome, _Failed):
            raise ReportedByAnotherProcess(outcome.line)


ALONE = Ranks()

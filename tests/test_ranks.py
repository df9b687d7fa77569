"""Processes that share work out: what each does, what all have afterwards, and how errors end all.

Run alone: python -m pytest tests/test_ranks.py
"""

from typing import Any

import pytest

from specdec import errors, ranks
from specdec.errors import ReportedByAnotherProcess, UserError
from specdec.ranks import ALONE, Ranks
from tests.ranks import together


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_all_get_the_union_in_order_and_each_does_its_turn(
    monkeypatch: pytest.MonkeyPatch, world: int, count: int
) -> None:
    """Also those for which no item is left."""
    done: list[tuple[int, int]] = []

    def work(us: Ranks) -> list[int]:
        return us.map(range(count), lambda n: (done.append((us.rank, n)), n * n)[1])

    assert together(monkeypatch, world, work) == [[n * n for n in range(count)]] * world
    assert sorted(done) == sorted((n % world, n) for n in range(count))


def test_the_first_alone_works_and_hands_over_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "AT_ONCE", 3)
    done: list[int] = []

    def work(us: Ranks) -> tuple[str, list[int], list[int]]:
        word = us.first(lambda: (done.append(us.rank), f"by {us.rank}")[1])
        many = us.handed(lambda: (done.append(us.rank), list(range(7)))[1])
        return word, many, us.handed(lambda: [])

    expected = ("by 0", list(range(7)), list[int]())
    assert together(monkeypatch, 2, work) == [expected] * 2
    assert done == [0, 0]
    assert ALONE.handed(lambda: [1, 2]) == [1, 2]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", [UserError, ValueError])
def test_an_error_in_one_process_ends_all(
    monkeypatch: pytest.MonkeyPatch, failing: int, kind: type[Exception]
) -> None:
    """It is raised as it is where it occurred, and the others do not wait."""

    def work(us: Ranks) -> list[int]:
        def fail(n: int) -> int:
            if us.rank == failing:
                raise kind("no such file")
            return n

        return us.map(range(2), fail)

    ends = together(monkeypatch, 2, work)
    own, other = ends[failing], ends[1 - failing]
    assert type(own) is kind and type(other) is ReportedByAnotherProcess
    assert str(own) == str(other) == "no such file"


def test_an_error_of_the_first_ends_all_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(us: Ranks) -> float:
        return us.first(lambda: 1 / 0)

    assert [*map(type, together(monkeypatch, 2, work))] == [
        ZeroDivisionError,
        ReportedByAnotherProcess,
    ]


def test_work_that_others_wait_for_does_not_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within it, a process counts as alone; afterwards it shares again."""

    def work(us: Ranks) -> list[int]:
        inner = us.first(lambda: us.map(range(3), lambda n: us.first(lambda: n)))
        return inner + us.map(range(2), lambda n: us.rank)

    assert together(monkeypatch, 2, work) == [[0, 1, 2, 0, 1]] * 2


def test_one_process_alone_prints_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others say nothing, and wait before they end: a launcher ends all at the first exit."""
    waited: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)

    def end(error: UserError) -> int:
        def main() -> None:
            raise error

        with pytest.raises(SystemExit) as exit:
            errors.command(main)
        return int(exit.value.code or 0)

    assert [end(UserError("bad data")), end(ReportedByAnotherProcess("bad data"))] == [2, 2]
    assert capsys.readouterr().err == "error: bad data\n"
    assert waited == [errors.GRACE]
    monkeypatch.setenv("RANK", "1")  # it may be the only one with this error, so it tells at last
    assert end(UserError("bad data")) == 2
    assert capsys.readouterr().err == "error: bad data\n"
    assert waited == [errors.GRACE, errors.PATIENCE]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_first_leads_and_all_share(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """As often as it likes; within it a process counts as alone, and afterwards it shares again."""
    done: list[tuple[int, int]] = []

    def work(us: Ranks) -> tuple[int | None, list[int]]:
        def lead(share: Any) -> int:
            some = share([1, 2, 3, 4])
            return int(sum(share(some)) + us.first(lambda: 100) + sum(share([])))

        led = us.led(lead, lambda n: (done.append((us.rank, n)), n * n)[1])
        return led, us.map(range(world), lambda n: n)

    every = list(range(world))
    others = [(None, every)] * (world - 1)
    assert together(monkeypatch, world, work) == [(1 + 16 + 81 + 256 + 100, every), *others]
    items = ([1, 2, 3, 4], [1, 4, 9, 16])
    assert sorted(done) == sorted((i % world, n) for part in items for i, n in enumerate(part))


@pytest.mark.parametrize("failing", ["before", "between", "item 0", "item 1", "after"])
def test_an_error_while_the_first_leads_ends_all(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def work(us: Ranks) -> int | None:
        def at(place: str) -> int:
            if place == failing:
                raise UserError("no such file")
            return 1

        def lead(share: Any) -> int:
            at("before")
            share(["item 2", "item 3"])
            at("between")
            share(["item 0", "item 1"])
            return at("after")

        return us.led(lead, at)

    ends = together(monkeypatch, 2, work)
    own = 1 if failing == "item 1" else 0
    assert [type(end) for end in ends][own] is UserError
    assert (
        type(ends[1 - own]) is ReportedByAnotherProcess
        and str(ends[0]) == str(ends[1]) == "no such file"
    )

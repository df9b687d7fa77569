"""Markdown tables of a report."""

from collections.abc import Callable, Iterable, Sequence

from specdec.measure.results import AtTemperature

Cell = Callable[[AtTemperature], str]


def table(corner: str, columns: Sequence[str], rows: Iterable[tuple[str, list[str]]]) -> list[str]:
    """The lines of a table; rows that are shorter than `columns` end in dashes."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    filled = ([name, *cells, *["—"] * (len(columns) - len(cells))] for name, cells in rows)
    return [line([corner, *columns]), line(["---"] * (1 + len(columns))), *map(line, filled)]


def by_temperature(ats: Sequence[AtTemperature], rows: Iterable[tuple[str, Cell]]) -> list[str]:
    """A table with a column a temperature."""
    filled = ((name, [cell(at) for at in ats]) for name, cell in rows)
    return table("", [f"T = {at.temperature:g}" for at in ats], filled)

"""Markdown tables of a report."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from specdec.measure.results import AtTemperature

Cell = Callable[[AtTemperature], str]


def table(corner: str, columns: Sequence[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    """A table; rows that are shorter than `columns` end in dashes."""
    filled = [[name, *cells, *["—"] * (len(columns) - len(cells))] for name, cells in rows]
    lines = [[corner, *columns], ["---"] * (1 + len(columns)), *filled]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_temperature(ats: Sequence[AtTemperature], rows: Mapping[str, Cell]) -> str:
    """A table with a column a temperature."""
    filled = [(name, [cell(at) for at in ats]) for name, cell in rows.items()]
    return table("", [f"T = {at.temperature:g}" for at in ats], filled)

"""Markdown tables of a report."""

from collections.abc import Callable, Mapping, Sequence

from specdec.measure.results import AtTemperature


def table(corner: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table; dashes fill the cells that a row lacks at its end."""
    filled = [[name, *cells, *["—"] * (len(columns) - len(cells))] for name, cells in rows.items()]
    lines = [[corner, *columns], ["---"] * (1 + len(columns)), *filled]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_temperature(
    ats: Sequence[AtTemperature], column: Callable[[AtTemperature], dict[str, str]]
) -> str:
    """A table with one column per temperature; `column` gives its cells by the names of rows."""
    columns = [column(at) for at in ats]
    names = dict.fromkeys(name for cells in columns for name in cells)
    rows = {name: [cells.get(name, "—") for cells in columns] for name in names}
    return table("", [f"T = {at.temperature:g}" for at in ats], rows)

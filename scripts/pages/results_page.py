"""docs/results.md and notebook/figures.md: a table for each claim, from the files in docs/results.

A file has the claim, a summary, the table's columns (with the digits of their figures) and the runs
that gave its rows: each with the measured commit, the date, the machine and the command. A cell is
a text, a number, or a number with its 95 % interval.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import require
from specdec.files import record
from train.run_config import CONF

FOLDER = CONF.parent / "docs" / "results"
PATH = FOLDER.with_suffix(".md")
DEVELOPERS_PATH = FOLDER.parent / "notebook" / "figures.md"
# the tables that show how the code behaves rather than what a draft gains
DEVELOPERS = (
    *("02-shapes", "03-time", "12-on-policy", "13-sizes", "14-unchanged", "15-kills"),
    *("17-processes", "18-forecast", "19-long-texts", "20-engine-kills", "21-coverage"),
    "22-speed-avx2",
)
INTRODUCTION = """# Results

*`scripts/docs` makes this page from the files in `docs/results`; a test compares them.*

One table for each claim. The target is SmolLM2-135M-Instruct and the prompts are held-out ones of
ShareGPT, answered one at a time, unless a table says otherwise. Brackets are 95 % intervals over
prompts; before 26 November 2026 they are percentile bootstraps, and τ is slightly higher than
today's. [Concepts](concepts.md) explains α, τ and c. No GPU has run this project yet. The
[notebook](notebook/index.md) has what did not work, and
[figures for developers](notebook/figures.md): coverage of the intervals, kills, memory, forecasts.
"""
DEVELOPERS_INTRODUCTION = """# Figures for developers

*`scripts/docs` makes this page from the files in `docs/results`; a test compares them.*

How the code behaves (kills, memory, forecasts, speed of training steps, coverage of intervals), and
earlier measurements. The introduction of [Results](results.md) is valid for all tables.
"""

Number = int | float
Cell = str | Number | list[Number] | None


@dataclass
class Column:
    """`digits` after the point of its figures; None: a column of texts."""

    name: str
    digits: int | None


@dataclass
class TableRun:
    """The run that gave some rows of a table."""

    commit: str
    date: str
    machine: str
    command: str
    rows: list[list[Cell]]


@dataclass
class ResultsTable:
    """A claim with its figures, as read from a file."""

    claim: str
    summary: str
    columns: list[Column]
    runs: list[TableRun]
    note: str = ""

    def __post_init__(self) -> None:
        for row in [row for run in self.runs for row in run.rows]:
            fits = len(row) == len(self.columns)
            require(fits, f"the row of {row[0]!r} does not fit the columns of {self.claim!r}")


def tables() -> dict[str, ResultsTable]:
    """All tables in the order of their files' names."""
    return {path.stem: read_results_table(path) for path in sorted(FOLDER.glob("*.json"))}


def read_results_table(path: Path) -> ResultsTable:
    """A table from its file. Raises UserError for unknown content."""
    return record(ResultsTable, json.loads(path.read_text(encoding="utf-8")), path.name)


def page() -> str:
    """The page of results in Markdown."""
    return page_of_tables(INTRODUCTION, [name for name in tables() if name not in DEVELOPERS])


def developers_page() -> str:
    """The page of the notebook in Markdown, with links relative to its folder."""
    text = page_of_tables(DEVELOPERS_INTRODUCTION, DEVELOPERS)
    return re.sub(r"\]\((?!https?:)", "](../", text).replace("](../notebook/", "](")


def page_of_tables(introduction: str, names_of_tables: Sequence[str]) -> str:
    """A page with some of the tables."""
    parts, found = [introduction], tables()
    for name in names_of_tables:
        table = found[name]
        names = [column.name for column in table.columns]
        parts += [f"## {table.claim}\n", f"{table.summary}\n"]
        parts += [line(names), line(["---"] * len(names))]
        for run in table.runs:
            for row in run.rows:
                cells = zip(table.columns, row, strict=True)
                parts.append(line([shown(cell, column.digits) for column, cell in cells]))
        parts += ["", *([f"{table.note}\n"] if table.note else [])]
        for run in table.runs:
            rows = f", {rows_of(table, run)}" if len(table.runs) > 1 else ""
            parts.append(f"Commit {run.commit}, {run.date}, {run.machine}{rows}:\n")
            parts.append(f"```\n{run.command}\n```\n")
        parts.append(f"`docs/results/{name}.json`\n")
    return "\n".join(parts)


def rows_of(table: ResultsTable, run: TableRun) -> str:
    """A phrase for the rows of the table that a run gave, as in "rows 1 to 3"."""
    before = sum(len(other.rows) for other in table.runs[: table.runs.index(run)])
    first, last = before + 1, before + len(run.rows)
    return f"row {first}" if first == last else f"rows {first} to {last}"


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(cell: Cell, digits: int | None) -> str:
    """A cell as text, with the digits of its column."""
    if cell is None or isinstance(cell, str):
        return cell or "–"
    value, *interval = cell if isinstance(cell, list) else [cell]
    texts = [f"{x:,.{digits or 0}f}".replace("-", "−") for x in (value, *interval)]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]" if interval else texts[0]

"""Tables in Markdown, and pages of Markdown that are also written as HTML."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from specdec.measure.results import AtTemperature

STYLE = (
    "body{max-width:64rem;margin:2rem auto;padding:0 1rem;font:16px/1.5 sans-serif;color:#1f2937}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;font-size:14px}"
    "th,td{border-bottom:1px solid #e5e7eb;padding:.3rem .7rem .3rem 0;text-align:left}"
    "img{max-width:100%}blockquote{margin-left:0;padding-left:1rem;border-left:3px solid #e5e7eb}"
)


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


def write(path: Path, page: str) -> None:
    """Write a page as Markdown to `path`, and beside it as HTML. Samples never become markup."""
    path.write_text(page)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(page)
    title = escape(page.partition("\n")[0].removeprefix("# "))
    head = f"<meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
    path.with_suffix(".html").write_text(f"<!doctype html>{head}\n{body}")

"""Tables in Markdown, and pages of Markdown that are also written as HTML.

Names, paths and what models wrote are not markup: `text` writes one of them as Markdown that shows
it as it is, and `escaped` does so for every text in a dataclass.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from markdown_it import MarkdownIt

from specdec.measure.results import Measured
from specdec.terminal import one_line

T = TypeVar("T")
MARKUP = re.compile(
    r"""[\\`*\[\]<>|~\#!&@$^{}]  # markup wherever it stands
    | (?<![^\W_])_ | _(?![^\W_])  # but not within a word
    | :(?=//) | (?<=www)\.  # what some readers make a link without any markup
    | ^[-+=]  # a list or an underline, at the start of a line
    """,
    re.VERBOSE | re.IGNORECASE,
)

NBSP = "\N{NO-BREAK SPACE}"
STYLE = (
    "body{max-width:64rem;margin:2rem auto;padding:0 1rem;font:16px/1.5 sans-serif;color:#1f2937}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;font-size:14px}"
    "th,td{border-bottom:1px solid #e5e7eb;padding:.3rem .7rem .3rem 0;text-align:left}"
    "img{max-width:100%}blockquote{margin-left:0;padding-left:1rem;border-left:3px solid #e5e7eb}"
)


def text(value: str) -> str:
    """Markdown, in one line, that shows a text as it is, with control characters as escapes."""
    line = MARKUP.sub(r"\\\g<0>", one_line(value))
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", line)  # the start of a numbered list


def lines(value: str) -> str:
    """Markdown that shows a text of several lines, such as code, as it is, with its indentation. It
    is part of one paragraph, whatever is in the text: line breaks are hard ones, and blank lines,
    white space at the start of a line and several spaces in a row are of spaces that do not
    break."""
    return "\\\n".join(map(_line, value.replace("\r\n", "\n").strip("\n").split("\n")))


def _line(value: str) -> str:
    words = [part for part in re.split(r"(\s+)", value.expandtabs(4)) if part]
    shown = "".join(
        text(part) if not part.isspace() else " " if n > 0 and len(part) == 1 else NBSP * len(part)
        for n, part in enumerate(words)
    )
    return shown or NBSP


def escaped(value: T) -> T:
    """A dataclass, list, tuple or dict with every text in it, keys included, as `text` writes
    it."""
    found: Any = value
    if isinstance(value, str):
        found = text(value)
    elif isinstance(value, list | tuple):
        parts = map(escaped, value)
        found = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif isinstance(value, dict):
        found = {escaped(key): escaped(x) for key, x in value.items()}
    elif is_dataclass(value):
        named = {f.name: escaped(getattr(value, f.name)) for f in fields(value) if f.init}
        found = replace(value, **named)  # type: ignore[type-var]
    return found


def table(corner: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table; dashes fill the cells that a row lacks at its end."""
    filled = [[name, *cells, *["—"] * (len(columns) - len(cells))] for name, cells in rows.items()]
    lines = [[corner, *columns], ["---"] * (1 + len(columns)), *filled]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def remarked(figure: str, why_no_interval: str) -> str:
    """A figure, with the reason why it has no interval, if there is one."""
    return f"{figure} ({why_no_interval})" if why_no_interval else figure


def claimed(figure: str, why_no_interval: str) -> str:
    """A figure in bold or, since nothing can be claimed without an interval, `remarked`."""
    return remarked(figure, why_no_interval) if why_no_interval else f"**{figure}**"


def by_temperature(ats: Sequence[Measured], column: Callable[[Measured], dict[str, str]]) -> str:
    """A table with one column per temperature; `column` gives its cells by the names of rows."""
    columns = [column(at) for at in ats]
    names = dict.fromkeys(name for cells in columns for name in cells)
    rows = {name: [cells.get(name, "—") for cells in columns] for name in names}
    return table("", [f"T = {at.way.temperature:g}" for at in ats], rows)


def write(path: Path, page: str) -> None:
    """Write a page as Markdown to `path`, and beside it as HTML. Foreign text is `escaped`."""
    path.write_text(page)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(page)
    first = page.partition("\n")[0].removeprefix("# ")
    title = escape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", first))
    head = f"<meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
    path.with_suffix(".html").write_text(f"<!doctype html>{head}\n{body}")

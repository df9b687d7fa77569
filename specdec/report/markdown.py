"""Tables in Markdown, and pages of Markdown that are also written as HTML.

Names, paths and model output are not markup: `text` escapes one of them, and `escaped` every text
in a dataclass.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

from specdec.measure.results import Measured
from specdec.terminal import one_line, plain

T = TypeVar("T")
MARKUP = re.compile(
    r"""[\\`*\[\]<>|~\#!&@$^{}]  # markup wherever it stands
    | (?<![^\W_])_ | _(?![^\W_])  # but not within a word
    | :(?=//) | (?<=www)\.  # texts that some readers turn into links
    | ^[-+=]  # a list or an underline, at the start of a line
    """,
    re.VERBOSE | re.IGNORECASE,
)

NBSP, BREAK = "\N{NO-BREAK SPACE}", "\\\n"  # a hard line break
STYLE = """
:root{color-scheme:light dark;--text:#1f2937;--page:#fff;--soft:#f3f4f6;--line:#d1d5db;
--accepted:#15803d;--rejected:#b91c1c;--corrected:#92400e;--bonus:#1d4ed8}
@media(prefers-color-scheme:dark){
:root{--text:#e5e7eb;--page:#111827;--soft:#1f2937;--line:#4b5563;
--accepted:#4ade80;--rejected:#fca5a5;--corrected:#fbbf24;--bonus:#93c5fd}}
*{box-sizing:border-box}
body{max-width:60rem;margin:0 auto;padding:1rem;font:16px/1.5 system-ui,sans-serif;
color:var(--text);background:var(--page);overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.2rem;margin:2rem 0 .5rem}
h3,h4{font-size:1rem;margin:1rem 0 .5rem}
h1+p{font-size:1.1rem}
pre,blockquote{margin:.5rem 0;padding:.6rem .8rem;background:var(--soft);border-radius:6px}
pre{font-size:.875rem;overflow-x:auto;overflow-wrap:normal}
blockquote{border-left:4px solid var(--line)}blockquote p{margin:.2rem 0}
img{max-width:100%;max-height:21rem;background:#fff;padding:.3rem;border-radius:6px}
table{display:block;overflow-x:auto;border-collapse:collapse;font-size:.875rem;margin:.5rem 0;
overflow-wrap:normal}
th,td{border-bottom:1px solid var(--line);padding:.3rem .9rem .3rem 0;text-align:left;
vertical-align:top;white-space:nowrap}
th:first-child,td:first-child{white-space:normal;min-width:8rem}
samp,var{font:inherit}samp{color:var(--accepted)}var{color:var(--bonus)}
del{color:var(--rejected)}ins{color:var(--corrected)}
details{border-top:1px solid var(--line);padding:.5rem 0}
summary{cursor:pointer}summary h3{display:inline}
details img{max-height:24rem}details p{overflow-x:auto}
@media(max-width:40rem){h1{font-size:1.25rem}h1+p{font-size:1rem}
details img{max-width:none;max-height:15rem}}
@media print{
:root{--text:#000;--page:#fff;--soft:#f3f4f6;--line:#9ca3af;
--accepted:#15803d;--rejected:#b91c1c;--corrected:#92400e;--bonus:#1d4ed8}
@page{margin:1.5cm}
body{max-width:none;padding:0;font-size:10pt}
details::details-content{content-visibility:visible;display:block;height:auto}
summary{list-style:none}
pre{white-space:pre-wrap;font-size:9pt}h1{font-size:16pt}table{display:table;font-size:8pt}th,td{white-space:normal}
img,details img{max-width:100%;max-height:9cm}
pre,blockquote,tr,img{break-inside:avoid}h2,h3,h4,summary{break-after:avoid}}
"""
FOLDED = "h3"  # the level of the headings whose sections HTML folds
# the tags that mark what became of the tokens of a response; no other HTML is written or read
TAGS = {"accepted": "samp", "rejected": "del", "corrected": "ins", "bonus": "var"}
TAG = re.compile(rf"</?(?:{'|'.join(TAGS.values())})>")


def text(value: str) -> str:
    """Markdown, in one line, that shows a text verbatim, with control characters escaped."""
    line = MARKUP.sub(r"\\\g<0>", one_line(value))
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", line)  # the start of a numbered list


def lines(value: str) -> str:
    """Markdown that shows a text of several lines, such as code, verbatim, with its indentation. It
    is part of one paragraph, whatever the text contains: line breaks are hard ones, and blank
    lines, white space at the start of a line and several spaces in a row become non-breaking
    spaces."""
    return marked([("", value)])


def marked(pieces: Iterable[tuple[str, str]]) -> str:
    """The pieces of a response, each with its kind, rendered together as `lines` does. The words of
    a piece are within the tags of its kind, if it has any."""
    shown = ""
    for kind, value in pieces:
        value = value.replace("\r\n", "\n").expandtabs(4)
        words = value.strip()
        before, after = value.split(words, 1) if words else (value, "")
        opening, closing = (f"<{TAGS[kind]}>", f"</{TAGS[kind]}>") if kind in TAGS else ("", "")
        shown = _with(shown, before)
        shown = _with(shown + opening, words) + closing if words else shown
        shown = _with(shown, after)

    def blank(row: str) -> bool:
        return not row.replace(NBSP, " ").strip()

    rows = shown.split(BREAK)
    while len(rows) > 1 and blank(rows[-1]):  # a reader would take off a last line without words,
        rows.pop()  # and show the break before it as a backslash
    while len(rows) > 1 and blank(rows[0]):
        rows.pop(0)
    return BREAK.join(row or NBSP for row in rows)


def _with(shown: str, value: str) -> str:
    """Markdown followed by a further text, with white space as in `lines`."""
    for part in filter(None, re.split(r"(\n|[^\S\n]+)", value)):
        if part == "\n":
            shown += BREAK
        elif part.isspace():
            begins = not shown or shown.endswith("\n")
            shown += NBSP * len(part) if begins or len(part) > 1 else " "
        else:
            shown += text(part)
    return shown


def code(lines: Sequence[str]) -> str:
    """Lines of code, verbatim, with control characters escaped."""
    return "\n".join("    " + plain(line).replace("\n", "\\n") for line in lines)


def escaped(value: T) -> T:
    """A dataclass, list, tuple or dict with every text in it, keys included, passed through
    `text`."""
    read: Any = value
    if isinstance(value, str):
        read = text(value)
    elif isinstance(value, list | tuple):
        parts = map(escaped, value)
        read = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif isinstance(value, dict):
        read = {escaped(key): escaped(x) for key, x in value.items()}
    elif is_dataclass(value):
        named = {f.name: escaped(getattr(value, f.name)) for f in fields(value) if f.init}
        read = replace(value, **named)  # type: ignore[type-var]
    copy: T = read
    return copy


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
    path.write_text(page, encoding="utf-8")
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.inline.ruler.before("autolink", "marks", _tag)
    body = parser.renderer.render([*_folded(parser.parse(page))], parser.options, {})
    first = page.partition("\n")[0].removeprefix("# ")
    title = escape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", first))
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
    head += f"<title>{title}</title><style>{STYLE}</style>"
    path.with_suffix(".html").write_text(
        f"<!doctype html><html lang=en>{head}\n{body}", encoding="utf-8"
    )


def _tag(state: StateInline, silent: bool) -> bool:
    """A rule of the parser: keeps one of the `TAGS` unchanged."""
    if (tag := TAG.match(state.src, state.pos)) is None:
        return False
    if not silent:
        state.push("html_inline", "", 0).content = tag[0]
    state.pos = tag.end()
    return True


def _folded(tokens: Sequence[Token]) -> Iterator[Token]:
    """The parsed page, with each section below a heading of level `FOLDED` made foldable."""
    within = False
    for token in tokens:
        if token.type == "heading_open" and token.tag <= FOLDED:
            if within:
                yield _html("</details>\n")
            if within := token.tag == FOLDED:
                yield _html("<details><summary>")
        yield token
        if token.type == "heading_close" and token.tag == FOLDED:
            yield _html("</summary>\n")
    if within:
        yield _html("</details>\n")


def _html(markup: str) -> Token:
    return Token("html_block", "", 0, content=markup)

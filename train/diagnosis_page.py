"""A diagnosis of data in a terminal, and as a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from specdec.report import markdown
from specdec.terminal import plain
from train.diagnosis import PLAIN, QUANTILES, STOP, TRAINED, Diagnosis, ShownSequence

IN_TERMINAL, ON_PAGE = 700, 6_000  # the most characters of a piece, the middle of which is left out
STYLES = {TRAINED: "green", STOP: "bold blue", PLAIN: "dim"}
KINDS = {TRAINED: "accepted", STOP: "bonus", PLAIN: ""}  # the kinds of `markdown.TAGS`
LEGEND = [
    (TRAINED, "tokens that are trained on"),
    (STOP, "the token that ends an answer"),
    (PLAIN, "what comes before"),
]


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis, samples first, so that the figures are what one sees at the end."""
    legend = Text.assemble(*((f"  {word}  ", STYLES[kind]) for kind, word in LEGEND))
    for sample in diagnosis.samples:
        console.print(Text(f"\n{plain(_title(sample))}", style="bold"))
        pieces = ((plain(_short(text, IN_TERMINAL)), STYLES[kind]) for kind, text in sample.pieces)
        console.print(Text.assemble(*pieces))
        if sample.edges:
            console.print(f"edges of the first answer: {sample.edges}")
    if diagnosis.samples:
        console.print(legend)
    notes = _notes(diagnosis)
    console.print(f"\n{diagnosis.data}, as {diagnosis.target} reads it\n{diagnosis.tally}")
    for heading, rows in _tables(diagnosis).items():
        console.print(f"\n{heading}{f': {notes[heading]}' if heading in notes else ''}")
        width = max(len(name) for name in rows)
        for name, cells in rows.items():
            console.print(f"  {name:<{width}}  {'  '.join(f'{cell:>9}' for cell in cells)}")
    if diagnosis.cut is not None:
        console.print(Text(f"\n{diagnosis.cut}", style="bold yellow" * diagnosis.cut.warns))
    for fault in diagnosis.faults:
        console.print(Text(f"\nfault: {plain(fault)}", style="bold red"))


def write(diagnosis: Diagnosis, path: Path) -> None:
    """Write a diagnosis as Markdown and, beside it, as HTML."""
    text, notes = markdown.text, _notes(diagnosis)
    page = [f"# {text(diagnosis.data)}, as {text(diagnosis.target)} reads it"]
    page += [f"**Fault**: {text(fault)}" for fault in diagnosis.faults]
    if not diagnosis.faults:
        page += ["No fault was found."]
    if diagnosis.cut is not None:
        page += [text(str(diagnosis.cut))]
    page += ["## What was read", markdown.code(diagnosis.tally.splitlines())]
    for heading, rows in _tables(diagnosis).items():
        corner, *columns = rows.get("", [""] * max(map(len, rows.values())))
        cells = {text(name): [text(x) for x in row] for name, row in rows.items() if name}
        page += [f"## {text(heading)}"]
        page += [text(f"{notes[heading]}.")] if heading in notes else []
        page += [markdown.table("", [corner, *columns], cells)]
    page += ["## Samples"]
    legend = [(KINDS[kind], word) for kind, word in LEGEND]
    page += [", ".join(markdown.marked([piece]) for piece in legend) + "."]
    for sample in diagnosis.samples:
        pieces = [(KINDS[kind], _short(said, ON_PAGE)) for kind, said in sample.pieces]
        page += [f"#### {text(_title(sample))}"]
        if sample.edges:
            page += ["Edges of the first answer:", markdown.code([sample.edges])]
        page += ["\n".join(f"> {line}" for line in markdown.marked(pieces).split("\n"))]
    markdown.write(path, "\n\n".join(page) + "\n")


def _title(sample: ShownSequence) -> str:
    trained = f", {sample.trained:,} of them trained on" if sample.trained else ""
    return f"{sample.id}: {sample.tokens:,} tokens{trained}"


def _notes(diagnosis: Diagnosis) -> dict[str, str]:
    """What the tables under some headings say, in words."""
    return {"Too long": diagnosis.too_long}


def _tables(diagnosis: Diagnosis) -> dict[str, Mapping[str, Sequence[str]]]:
    """Rows of cells by their headings, those that have any; a row without a name heads the
    columns."""

    def percent(share: float) -> list[str]:
        return [f"{100 * share:.1f} %"]

    lengths = {name: [f"{n:,}" for n in row] for name, row in diagnosis.lengths.items()}
    tables: dict[str, Mapping[str, Sequence[str]]] = {
        "Texts": {name: [f"{n:,}"] for name, n in diagnosis.texts.items()},
        "Lengths in tokens": {"": [*QUANTILES], **lengths},
        "Too long": {f"longer than {limit:,}": [f"{n:,}"] for limit, n in diagnosis.longer.items()},
        "Weights of the answers in the loss": {
            f"weight {weight:g}": [f"{n:,}"] for weight, n in diagnosis.weights.items()
        },
        "What the answers end in": {name: [f"{n:,}"] for name, n in diagnosis.stops.items()},
        "Coverage of the held-out answers by a draft vocabulary": {
            f"a draft vocabulary of {size:,}": percent(share)
            for size, share in diagnosis.coverage.items()
        },
        "Letters by script": {name: percent(x) for name, x in diagnosis.scripts.items()},
        "Repeated": {"texts that another one equals": [f"{diagnosis.repeated:,}"]},
    }
    return {heading: rows for heading, rows in tables.items() if rows}


def _short(text: str, most: int) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} […] {text[-half:]}"

"""A report's folder: results.json, report.md and .html, plots, and measured stop classifiers and
cost tables."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from specdec.files import write_whole
from specdec.measure.results import Results
from specdec.report import markdown, plots, report_page, verdict


def write(folder: Path, results: Results) -> dict[str, Path]:
    """Write the complete report into `folder`. Returns the pictures. Measured stop classifiers and
    cost tables are saved there too, for `--draft-length disco --draft-length-settings path=…` and
    `--draft-length goodput --draft-length-settings table=…`."""
    folder.mkdir(parents=True, exist_ok=True)
    results.write(folder)
    pictures = plots.write_pictures(folder, results)
    for at in results.asked:
        if (figures := at.learned.figures) is not None:
            file = folder / f"{figures.stem}-T{at.way.temperature:g}.json"
            write_whole(file, figures.contents)
    markdown.write(folder / "report.md", report_page.page(results, pictures))
    return pictures


def show(results: Results, console: Console) -> None:
    """Print the summary in a terminal: τ, the speedup and tokens/s of each decoding configuration,
    then the recommendation and its command. Everything else is in the report."""
    plain = ", ".join(
        f"{one.plain_tokens_per_second.value:.0f} tokens/s at T = {one.way.temperature:g}"
        for one in results.asked
    )
    rows = Table("", "T", "τ", "speedup", "tokens/s", box=box.SIMPLE_HEAD)
    served = [choice.served for choice in verdict.choices(results)]
    for one in sorted(results.measured, key=lambda one: one.way.temperature):
        figures = one.tau.text(2), one.speedup.text(2), f"{one.tokens_per_second.value:.0f}"
        cells = verdict.named(one.way, results), f"{one.way.temperature:g}", *figures
        rows.add_row(*cells, style="bold" if one in served else "")
    if (gain := results.in_engine) is not None:
        figures = gain.tau.text(2), gain.speedup.text(2), f"{gain.tokens_per_second.value:.0f}"
        way = f"chains of {gain.gamma} tokens in {gain.engine}, {gain.weights}"
        rows.add_row(way, "0", *figures, style="bold" if gain.speedup.low > 1 else "")
    console.print(rows, soft_wrap=False)
    console.print(f"vanilla decoding: {plain}", verdict.sentence(results), sep="\n")
    if exceptions := verdict.exceptions(results):
        console.print(exceptions)
    for command in verdict.commands(results) if any(served) else ():
        console.print(command.does, *command.lines, sep="\n  ")
    if (gain := results.in_engine) is not None:
        alone = f"{gain.plain_tokens_per_second.value:.0f} tokens/s without the draft"
        said = f"{verdict.sentence_in_engine(gain)} {verdict.costs_in_engine(gain)}"
        console.print(f"{gain.engine}: {alone}. {said}", *gain.commands, sep="\n  ")

"""A report's folder: results.json, report.md and .html, plots, and any stop classifiers and
cost tables that were measured."""

from pathlib import Path

from specdec.measure.results import Measured, Results
from specdec.report import markdown, plots, sections


def write(folder: Path, results: Results) -> dict[str, Path]:
    """Write the whole report into `folder`; returns the pictures. Measured stop classifiers and
    cost tables are saved there too, for `--length disco --settings path=…` and
    `--length goodput --settings table=…`."""
    folder.mkdir(parents=True, exist_ok=True)
    results.write(folder)
    pictures = {name: folder / f"{name}.png" for name in ("alpha", "accepted")}
    plots.alpha_by_depth(pictures["alpha"], results)
    plots.accepted_lengths(pictures["accepted"], results)
    if any(depth.bins for at in results.asked for depth in at.confidence):
        pictures["reliability"] = folder / "reliability.png"
        plots.reliability(pictures["reliability"], results)
    if results.training is not None and results.training.curve is not None:
        pictures["training"] = folder / "training.png"
        plots.training(pictures["training"], results.training.curve)
    for at in results.asked:
        if at.learned.classifier is not None:
            at.learned.classifier.save(folder / f"stop-classifier-T{at.way.temperature:g}.json")
        if at.learned.table is not None:
            at.learned.table.save(folder / f"cost-table-T{at.way.temperature:g}.json")
    markdown.write(folder / "report.md", sections.page(results, pictures))
    return pictures


def summary(results: Results) -> str:
    """A few lines for the terminal."""
    lines = [f"measured on {results.machine}"]
    for at in results.asked:
        variant = "greedy" if at.way.temperature == 0 else "sampled"
        alpha = at.alpha.all.of(at.way.temperature)[0]
        lines.append(
            f"T={at.way.temperature:g}: α ({variant}, depth 0) {alpha}   τ {at.tau}   "
            f"{_speedup(at, results)}   {at.tokens_per_second.value:.0f} tokens/s "
            f"against {at.plain_tokens_per_second.value:.0f} plain"
        )
    if results.shift is not None:
        lines.append(sections.shifted(results))
    for name, ats in results.others.items():
        for at in ats:
            said = at.way.shape if at.way.drafter == results.drafter else name
            lines.append(
                f"T={at.way.temperature:g}, {said}: τ {at.tau}   "
                f"{_speedup(at, results)}   {at.tokens_per_second.value:.0f} tokens/s; "
                f"repeated 4-grams {at.repetition.text(2)}"
            )
    return "\n".join(lines)


def _speedup(at: Measured, results: Results) -> str:
    return markdown.remarked(f"speedup {at.speedup.text(2)}×", results.times_without_interval)

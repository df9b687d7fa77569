"""The plots of a report, as PNG files. Legends stand below the axes, where they cover nothing."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specdec.measure.results import Curve, Results

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea580c", "#16a34a", "#9ca3af"
LABELLED = 10  # bars, at most, that have room for their figures


def alpha_by_depth(folder: Path, results: Results) -> Path:
    """α over all positions and at visited anchors, beside the decoder's counts."""
    ats = results.temperatures
    figure, axes = _axes(4.8, len(ats), 4.1)
    for ax, at in zip(axes, ats, strict=True):
        for forced, colour, label in (
            (at.alpha.all, BLUE, "all positions, each depth alone"),
            (at.alpha.visited, ORANGE, "visited anchors, all depths up to this one"),
        ):
            points = forced.of(at.temperature)
            x = range(len(points))
            ax.plot(x, [p.value for p in points], "o-", color=colour, label=label)
            low, high = [p.low for p in points], [p.high for p in points]
            ax.fill_between(x, low, high, color=colour, alpha=0.15)
        counted = [p.value for p in at.reached]
        ax.plot(range(len(counted)), counted, "x", color="black", label="decoder's own count")
        variant = "greedy" if at.temperature == 0 else "sampled"
        _named(ax, f"α by depth, T = {at.temperature:g} ({variant})", "depth k")
        ax.set_ylim(0, None)
    return _save(figure, axes[0], 3 if len(ats) > 1 else 1, folder / "alpha.png")


def accepted_lengths(folder: Path, results: Results) -> Path:
    """How many drafted tokens a round accepts."""
    ats = results.temperatures
    longest = max(len(at.accepted_lengths) for at in ats)
    figure, (ax,) = _axes(max(6.4, 0.35 * longest * len(ats)), 1, 4.0)
    width = 0.8 / len(ats)
    for i, at in enumerate(ats):
        shares = [n / max(1, at.rounds) for n in at.accepted_lengths]
        x = [n + (i - (len(ats) - 1) / 2) * width for n in range(len(shares))]
        label = f"T = {at.temperature:g}: τ {at.tau.value:.2f}, {at.rounds:,} rounds"
        colour = (BLUE, ORANGE, GREEN, GREY)[i % 4]
        bars = ax.bar(x, shares, width, color=colour, label=label)
        if longest * len(ats) <= LABELLED:
            ax.bar_label(bars, [f"{s:.0%}" for s in shares], fontsize=8, padding=2)
    ax.margins(y=0.12)
    _named(ax, "Drafted tokens accepted in a round", "accepted")
    ax.set_ylabel("share of rounds")
    return _save(figure, ax, min(2, len(ats)), folder / "accepted.png")


def training(folder: Path, curve: Curve) -> Path:
    """Loss, and α by depth on training and held-out text, over steps."""
    figure, (left, right) = _axes(5.2, 2, 4.1)
    left.plot(curve.steps, curve.loss, color=GREY, linewidth=0.8, alpha=0.6)
    left.plot(curve.steps, _smooth(curve.loss), color=BLUE)
    _named(left, "Loss at depth 0", "step")
    shades = plt.get_cmap("viridis")
    depths = len(curve.sampled[0])
    for k in range(depths):
        colour = shades(0.1 + 0.8 * k / max(1, depths - 1))
        smooth = _smooth([alpha[k] for alpha in curve.sampled])
        right.plot(curve.steps, smooth, color=colour, alpha=0.7, label=f"depth {k}")
        held_out = [alpha[k] for alpha in curve.held_out_sampled]
        right.plot(curve.held_out_steps, held_out, "o", color=colour, markersize=5)
    _named(right, "Sampled α: training (lines), held out (dots)", "step")
    right.set_ylim(0, None)
    return _save(figure, right, min(depths, 8), folder / "training.png")


def _axes(width: float, count: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """A figure of `count` axes side by side, each `width` inches wide."""
    figure, grid = plt.subplots(
        1, count, figsize=(width * count, height), layout="constrained", squeeze=False
    )
    axes: list[Axes] = list(grid[0])
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def _named(ax: Axes, title: str, below: str) -> None:
    ax.set_title(title, loc="left", fontsize=11)
    ax.set_xlabel(below)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _save(figure: Figure, ax: Axes, columns: int, path: Path) -> Path:
    """Write the figure, with the legend of `ax` below it in so many columns."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path


def _smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    out, mean = [], values[0]
    for value in values:
        mean = weight * mean + (1 - weight) * value
        out.append(mean)
    return out

"""The plots of a report, as PNG files. Legends are below the axes, so that they cover nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import AutoLocator, MaxNLocator

from specdec.measure.results import Curve, Results
from specdec.report import verdict

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea580c", "#16a34a", "#9ca3af"
PALETTE = (BLUE, ORANGE, GREEN, "#9333ea", "#0891b2", "#dc2626", "#ca8a04", "#be185d", GREY)
LABELLED = 10  # the most bars that have room for their figures
SHOWN, FEWEST = 4, 5  # the most depths, and the fewest tokens of a bin, in a reliability plot
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 140,
    "text.parse_math": False,  # a name with dollars is no formula
}


def write_pictures(folder: Path, results: Results) -> dict[str, Path]:
    """Write the plots of a report that these results allow, as NAME.png. Returns their files."""
    drawn: dict[str, Callable[[Path], None]] = {
        "speedup": lambda file: speedups(file, results),
        "alpha": lambda file: alpha_by_depth(file, results),
        "accepted": lambda file: accepted_lengths(file, results),
    }
    if any(depth.bins for at in results.asked for depth in at.confidence):
        drawn["reliability"] = lambda file: reliability(file, results)
    if results.training is not None and (curve := results.training.curve) is not None:
        drawn["training"] = lambda file: training(file, curve)
    pictures = {name: folder / f"{name}.png" for name in drawn}
    for name, draw in drawn.items():
        draw(pictures[name])
    return pictures


def speedups(path: Path, results: Results) -> None:
    """The speedup of each decoding configuration over vanilla decoding, with its interval. The
    recommended one at a temperature is green. The picture is narrow, so that it is legible on a
    phone."""
    served = [choice.served for choice in verdict.choices(results)]
    by_temperature = [
        [one for one in results.measured if one.way.temperature == first.way.temperature]
        for first in results.asked
    ]
    rows = [row for group in by_temperature for row in (None, *group)]  # None: a heading
    names: list[str] = []
    with _axes(path, (4.4, 0.9 + 0.36 * len(rows)), 1, 1) as (ax,):
        for y, (one, after) in enumerate(pairwise([*rows, None])):
            if one is None:
                names.append(f"T = {after.way.temperature:g}" if after else "")
                continue
            names.append(verdict.named(one.way, results))
            x, (colour, weight) = (
                one.speedup,
                (GREEN, "bold") if one in served else (BLUE, "normal"),
            )
            ax.plot([x.low, x.high], [y, y], color=colour, linewidth=3, alpha=0.45)
            ax.plot(x.value, y, "o", color=colour, markersize=7)
            ax.annotate(
                f"{x.value:.2f}",
                (x.value, y),
                (0, 8),
                textcoords="offset points",
                ha="center",
                color=colour,
                weight=weight,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
        ax.axvline(1, color="black", linewidth=1, zorder=1)
        ax.set_yticks(range(len(rows)), names)
        for row, label in zip(rows, ax.get_yticklabels(), strict=True):
            label.set_fontweight("bold" if row is None else "normal")
        ax.set(ylim=(len(rows) - 0.5, -0.6), xlabel="times as fast as vanilla decoding")
        ax.tick_params("y", length=0)
        ax.xaxis.set_major_locator(AutoLocator())
        ax.grid(axis="x")
        ax.grid(visible=False, axis="y")
        ax.margins(x=0.08)


def alpha_by_depth(path: Path, results: Results) -> None:
    """α over all positions and at visited anchors, with the decoder's counts."""
    ats = results.asked
    with _axes(path, (4.8, 4.1), len(ats), 3 if len(ats) > 1 else 1) as axes:
        for ax, at in zip(axes, ats, strict=True):
            for forced, colour, label in (
                (at.alpha.all, BLUE, "all positions, each depth alone"),
                (at.alpha.visited, ORANGE, "visited anchors, all depths up to this one"),
            ):
                points = forced.at_temperature(at.way.temperature)
                x = range(len(points))
                ax.plot(x, [p.value for p in points], "o-", color=colour, label=label)
                low, high = [p.low for p in points], [p.high for p in points]
                ax.fill_between(x, low, high, color=colour, alpha=0.15)
            counted = [p.value for p in at.reached]
            ax.plot(range(len(counted)), counted, "x", color="black", label="decoder's own count")
            variant = "greedy" if at.way.temperature == 0 else "sampled"
            ax.set(title=f"α by depth, T = {at.way.temperature:g} ({variant})", xlabel="depth k")
            ax.set_ylim(0, None)


def accepted_lengths(path: Path, results: Results) -> None:
    """The number of drafted tokens that a speculation step accepts."""
    ats = results.asked
    count = max(len(at.accepted_lengths) for at in ats) * len(ats)
    width = 0.8 / len(ats)
    with _axes(path, (max(6.4, 0.35 * count), 4.0), 1, min(2, len(ats))) as (ax,):
        for i, at in enumerate(ats):
            steps = at.speculation_steps
            shares = [n / max(1, steps) for n in at.accepted_lengths]
            x = [n + (i - (len(ats) - 1) / 2) * width for n in range(len(shares))]
            label = f"T = {at.way.temperature:g}: τ {at.tau.value:.2f}, {steps:,} steps"
            colour = (BLUE, ORANGE, GREEN, GREY)[i % 4]
            bars = ax.bar(x, shares, width, color=colour, label=label)
            if count <= LABELLED:
                ax.bar_label(bars, [f"{s:.0%}" for s in shares], fontsize=8, padding=2)
        ax.margins(y=0.12)
        title = "Drafted tokens accepted in a speculation step"
        ax.set(title=title, xlabel="accepted", ylabel="share of speculation steps")


def reliability(path: Path, results: Results) -> None:
    """Acceptance over confidence by depth, raw and calibrated, at each temperature. A point is a
    bin of at least `FEWEST` tokens, larger for more tokens; bars are intervals."""
    panels = [
        (f"T = {at.way.temperature:g}, {words}", depths[:SHOWN])
        for at in results.asked
        for words, depths in (("as drafted", at.confidence), ("calibrated", at.calibrated))
        if depths
    ]
    shades, deepest = plt.get_cmap("viridis"), max(len(depths) for _, depths in panels)
    with _axes(path, (4.1, 4.3), len(panels), deepest) as axes:
        for ax, (title, depths) in zip(axes, panels, strict=True):
            ax.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1)
            most = max((b.weight for depth in depths for b in depth.bins), default=1.0)
            for k, depth in enumerate(depths):
                colour = shades(0.1 + 0.8 * k / max(1, deepest - 1))
                ax.plot([], [], "o", color=colour, label=f"depth {k}")
                for b in (b for b in depth.bins if b.weight >= FEWEST):
                    x, (low, high) = b.predicted, (b.observed.low, b.observed.high)
                    ax.plot([x, x], [low, high], color=colour, linewidth=1, alpha=0.5)
                    size = 12 + 150 * b.weight / most
                    ax.scatter(x, b.observed.value, size, color=colour, alpha=0.85, linewidth=0)
            ax.xaxis.set_major_locator(AutoLocator())
            ax.set(title=title, xlabel="confidence: predicted acceptance", ylabel="accepted")
            ax.set_xlim(-0.03, 1.03)
            ax.set_ylim(-0.03, 1.03)


class Line(NamedTuple):
    """A curve of a panel or, with the format "o", points. Those with a label are in the legend."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    label: str = ""
    format: str = "-"


class Panel(NamedTuple):
    title: str
    x_label: str
    lines: Sequence[Line]


def curves(path: Path, panels: Sequence[Panel], columns: int = 4) -> None:
    """Panels side by side, with a legend of the last one's labels in `columns` columns."""
    with _axes(path, (4.8, 4.2), len(panels), columns) as axes:
        for ax, panel in zip(axes, panels, strict=True):
            for line in panel.lines:
                faint = {"alpha": 0.4, "linewidth": 1} if line.format == ":" else {}
                above = {"zorder": 3, "markeredgecolor": "white"} if line.format == "o" else {}
                style: dict[str, Any] = {"color": line.colour, "label": line.label} | faint | above
                ax.plot(line.x, line.y, line.format, **style)
            ax.xaxis.set_major_locator(AutoLocator())
            ax.set(title=panel.title, xlabel=panel.x_label)


def training(path: Path, curve: Curve) -> None:
    """Loss, and α by depth on training and held-out text, over steps. Training on text alone has no
    α, and then a plot without held-out text has the loss alone."""
    shades, trained = plt.get_cmap("viridis"), len(curve.sampled[0])
    depths = trained or len(curve.held_out_sampled[0] if curve.held_out_sampled else [])
    with _axes(path, (5.2, 4.1), 2 if depths else 1, min(depths, 8)) as (left, *others):
        left.plot(curve.steps, curve.loss, color=GREY, linewidth=0.8, alpha=0.6)
        left.plot(curve.steps, smoothed(curve.loss), color=BLUE)
        left.set(title="Loss at depth 0", xlabel="step")
        for right in others:
            for k in range(depths):
                style: dict[str, Any] = {"color": shades(0.1 + 0.8 * k / max(1, depths - 1))}
                if trained:
                    smooth = smoothed([alpha[k] for alpha in curve.sampled])
                    right.plot(curve.steps, smooth, alpha=0.7, label=f"depth {k}", **style)
                held_out = [alpha[k] for alpha in curve.held_out_sampled]
                if not trained:
                    style["label"] = f"depth {k}"
                right.plot(curve.held_out_steps, held_out, "o", markersize=5, **style)
            both = "Sampled α: training (lines), held out (dots)"
            right.set(title=both if trained else "Sampled α of held-out text", xlabel="step")
            right.set_ylim(0, 1.05 * max(right.dataLim.y1, 0.01))
            steps = [*curve.steps, *curve.held_out_steps]
            margin = max(0.05 * (max(steps) - min(steps)), 0.5)
            for ax in (left, right):  # held-out steps may lie outside the logged ones
                ax.set_xlim(min(steps) - margin, max(steps) + margin)


def write_filled_devices(
    path: Path, filled: Mapping[str, Mapping[str, float]], room: float, apart: str
) -> None:
    """The bytes on a device by stage and purpose, in stacked bars with a line at the available
    `room`. The stage named `apart`, the disk, has its own axis."""
    gib, names = 2**30, dict.fromkeys(name for held in filled.values() for name in held)
    colours = dict(zip(names, PALETTE, strict=False))
    panels = [{k: x for k, x in filled.items() if (k == apart) is alone} for alone in (False, True)]
    with _axes(path, (5.6, 4.4), 2, 3) as axes:
        for ax, stages in zip(axes, panels, strict=True):
            tops = [0.0] * len(stages)
            for name, colour in colours.items():
                sizes = [held.get(name, 0.0) / gib for held in stages.values()]
                ax.bar(list(stages), sizes, 0.6, bottom=tops, color=colour, label=name)
                tops = [top + size for top, size in zip(tops, sizes, strict=True)]
            for x, top in enumerate(tops):
                over = ax is axes[0] and top * gib > room
                text = f"{top:,.1f}" + " (too much)" * over
                ax.annotate(text, (x, top), (0, 3), textcoords="offset points", ha="center")
            highest = max(*tops, room / gib if ax is axes[0] else 0.0)
            ax.set(ylim=(0, 1.12 * highest), xticks=range(len(stages)))
            ax.yaxis.set_major_locator(AutoLocator())
        axes[0].axhline(room / gib, color="black", linewidth=1, linestyle="--")
        axes[0].set(title="GiB on each device (dashed: planned for)")
        axes[1].set(title="GiB on disk", xlim=(-1.5, 1.5))


@contextmanager
def _axes(
    path: Path, size: tuple[float, float], count: int, columns: int
) -> Iterator[Sequence[Axes]]:
    """`count` axes side by side, each of `size` in inches. After the block they are written to
    `path`, with the legend of the last one below them in `columns` columns."""
    with plt.rc_context(STYLE):
        whole = (size[0] * count, size[1])
        figure, grid = plt.subplots(1, count, figsize=whole, layout="constrained", squeeze=False)
        for ax in grid[0]:
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        yield grid[0]
        handles, labels = grid[0, -1].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        figure.savefig(path)
        plt.close(figure)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean over a window around each value, a thirtieth of the values on either side, smaller
    near the ends, where it stays symmetric. The curve therefore has no lag and no bias towards its
    first value."""
    widest, last = max(1, len(values) // 30), len(values) - 1
    halves = [min(widest, i, last - i) for i in range(len(values))]
    return [fmean(values[i - half : i + half + 1]) for i, half in enumerate(halves)]

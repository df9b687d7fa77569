"""Measured figures with their intervals: 95 % percentile bootstraps of whole prompts (or timings),
never of single positions, because the positions of one prompt are not independent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL, RESAMPLES = 0.95, 2000


@dataclass(frozen=True)
class Interval:
    """A figure with its interval, and the number `n` of observations behind it."""

    value: float
    low: float
    high: float
    n: int

    def text(self, digits: int = 3) -> str:
        """`0.403 [0.338, 0.467]`; only the figure if the interval has no width."""
        value = f"{self.value:.{digits}f}"
        if self.low == self.high:
            return value
        return f"{value} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def without_interval(self) -> "Interval":
        """The figure without its interval."""
        return Interval(self.value, self.value, self.value, self.n)

    def __str__(self) -> str:
        return self.text()


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0
) -> Interval:
    """The pooled ratio Σ numerators / Σ denominators, with one entry per prompt; `n` is Σ
    denominators, rounded. Prompts whose denominator is 0 are left out; without others all is 0."""
    num, den = np.asarray(numerators, float), np.asarray(denominators, float)
    num, den = num[den > 0], den[den > 0]
    return _bootstrap(
        lambda at: num[at].sum(-1) / den[at].sum(-1), len(den), round(den.sum()), seed
    )


def product_interval(*groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
    """The product of pooled ratios Σ numerators / Σ denominators. The ratios of a group belong to
    the same observations, which are resampled together, and groups are resampled on their own: so
    counts of many prompts can be combined with timings of few. Observations of a group in which a
    denominator is 0 are left out; `n` counts those of the first group. Without any, all is 0."""
    sides = []
    for group in groups:
        columns = np.array([[np.asarray(x, float) for x in ratio] for ratio in group])  # [R, 2, n]
        sides.append(columns[:, :, (columns[:, 1] > 0).all(0)])
    sizes = [columns.shape[-1] for columns in sides]
    if 0 in sizes:
        return Interval(0.0, 0.0, 0.0, 0)

    def figure(columns: np.ndarray, at: np.ndarray) -> np.ndarray:
        sums = columns[..., at].sum(-1)
        products: np.ndarray = (sums[:, 0] / sums[:, 1]).prod(0)
        return products

    random = np.random.default_rng(0)
    resampled = np.ones(RESAMPLES)
    for columns, size in zip(sides, sizes, strict=True):
        resampled = resampled * figure(columns, random.integers(0, size, (RESAMPLES, size)))
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value = np.prod([figure(columns, np.arange(size)) for columns, size in zip(sides, sizes)])
    return Interval(float(value), float(low), float(high), sizes[0])


def difference_interval(
    ours: tuple[Sequence[float], Sequence[float]],
    theirs: tuple[Sequence[float], Sequence[float]],
) -> Interval:
    """Σ / Σ of ours minus Σ / Σ of theirs, both (numerators, denominators) of the same prompts in
    the same order; `n` counts the prompts. Pairing removes the variation that both share."""
    columns = [np.asarray(x, float) for x in (*ours, *theirs)]
    kept = (columns[1] > 0) & (columns[3] > 0)
    a, b, c, d = (x[kept] for x in columns)

    def figure(at: np.ndarray) -> np.ndarray:
        differences: np.ndarray = a[at].sum(-1) / b[at].sum(-1) - c[at].sum(-1) / d[at].sum(-1)
        return differences

    return _bootstrap(figure, len(a), len(a))


def median_interval(values: Sequence[float], per: Sequence[float] | None = None) -> Interval:
    """The median of `values`, divided by the median of `per` if given. Entries i of the two were
    timed in the same repetition; `n` counts the repetitions."""
    over = np.asarray(values, float)
    under = np.ones_like(over) if per is None else np.asarray(per, float)
    n = len(over)
    return _bootstrap(lambda at: np.median(over[at], -1) / np.median(under[at], -1), n, n)


def _bootstrap(
    figure: Callable[[np.ndarray], np.ndarray], count: int, n: int, seed: int = 0
) -> Interval:
    """The figure of all `count` observations, with quantiles of its resamples as the interval.
    `figure` gets the indices [..., count] of the observations to use."""
    if count == 0:
        return Interval(0.0, 0.0, 0.0, 0)
    index = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    low, high = np.quantile(figure(index), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(figure(np.arange(count))), float(low), float(high), n)

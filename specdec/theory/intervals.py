"""Measured figures with their intervals: 95 % percentile bootstraps.

Whole prompts (or turns of a clock) are resampled, never single positions, because the positions
of one prompt are not independent of each other.
"""

from collections.abc import Sequence
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
        """`0.403 [0.338, 0.467]`; the figure alone where there was nothing to resample."""
        value = f"{self.value:.{digits}f}"
        if self.low == self.high:
            return value
        return f"{value} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def __str__(self) -> str:
        return self.text()


def ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Σ numerators / Σ denominators, an entry a prompt; `n` is Σ denominators, rounded.

    It is the pooled ratio (all tokens / all passes), never a mean of the ratios of prompts.
    Prompts whose denominator is 0 are left out; without any other, the figure is 0 and n is 0.
    """
    num, den = np.asarray(numerators, float), np.asarray(denominators, float)
    num, den = num[den > 0], den[den > 0]
    if len(den) == 0:
        return Interval(0.0, 0.0, 0.0, 0)
    index = _resampled(len(num), seed, resamples)
    low, high = _quantiles(num[index].sum(1) / den[index].sum(1), level)
    return Interval(float(num.sum() / den.sum()), low, high, round(den.sum()))


def difference_interval(
    ours: tuple[Sequence[float], Sequence[float]],
    theirs: tuple[Sequence[float], Sequence[float]],
    *,
    seed: int = 0,
) -> Interval:
    """Σ / Σ of ours less Σ / Σ of theirs, both (numerators, denominators) of the same prompts in
    the same order; `n` counts the prompts. Pairing takes out what prompts have in common."""
    columns = [np.asarray(x, float) for x in (*ours, *theirs)]
    kept = (columns[1] > 0) & (columns[3] > 0)
    a, b, c, d = (x[kept] for x in columns)
    if len(a) == 0:
        return Interval(0.0, 0.0, 0.0, 0)
    index = _resampled(len(a), seed)
    draws = a[index].sum(1) / b[index].sum(1) - c[index].sum(1) / d[index].sum(1)
    low, high = _quantiles(draws)
    return Interval(float(a.sum() / b.sum() - c.sum() / d.sum()), low, high, len(a))


def median_interval(
    values: Sequence[float], per: Sequence[float] | None = None, *, seed: int = 0
) -> Interval:
    """The median of `values`, over the median of `per` where given, whose entries were measured
    in the same turns; `n` counts the turns."""
    found = np.asarray(values, float)
    under = np.ones(len(found)) if per is None else np.asarray(per, float)
    index = _resampled(len(found), seed)
    low, high = _quantiles(np.median(found[index], 1) / np.median(under[index], 1))
    return Interval(float(np.median(found) / np.median(under)), low, high, len(found))


def _resampled(count: int, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """Indices [resamples, count], drawn with replacement."""
    return np.random.default_rng(seed).integers(0, count, (resamples, count))


def _quantiles(draws: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)

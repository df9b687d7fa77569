"""Measured figures with their 95 % intervals. Observations are whole prompts (or timed batches),
never single positions, because the positions of one prompt are not independent.

The intervals hold at small n and for skewed data (`scripts/bench coverage` simulates this). A ratio
of totals R = Σy / Σx is studentised on a scale g that suits it: the logarithm for ratios of
positive totals, the logit for shares, and R itself for differences. With
the influence of an observation, e_i = g'(R) n (y_i - R x_i) / Σx, and its leverage h_i = x_i / Σx,
the interval is

    g(R) ± t s,    s² = Σ (e_i / (1 - h_i))² / n²

where the leverage correction is that of HC3 (MacKinnon and White 1985, Journal of Econometrics 29)
and t is Student's quantile with 1 / Σ h_i² - 1 degrees of freedom, since a few long prompts count
for most of a total. On the side to which the data are skewed, the interval is longer by the first
term of the Edgeworth expansion of a studentised mean, skewness (2 z² + 1) s / (6 √n) (Hall 1992,
The Bootstrap and Edgeworth Expansion, Section 2.6). Fewer than `FEWEST` observations have no
interval, and nothing is claimed from them.

Prompts of one conversation are not independent, so their numerators and denominators are summed
first (`summed_by`), and the conversation is the observation: the ratio estimator for clusters of
unequal sizes (Cochran 1977, Sampling Techniques, Section 9A.1).
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
FEWEST = 3  # observations behind an interval
FEWEST_TIMINGS = 6  # behind that of a median: of 5, all lie on one side of it in 6 % of cases


@dataclass(frozen=True)
class Interval:
    """A figure with its interval, and the number `n` of observations or positions behind it. The
    interval has zero width, and supports no claim, if there are too few observations or all are
    alike."""

    value: float
    low: float
    high: float
    n: int

    @property
    def claims(self) -> bool:
        """Whether the interval supports a claim."""
        return self.low < self.high

    def text(self, digits: int = 3) -> str:
        """`0.403 [0.338, 0.467]`; only the figure if the interval has no width."""
        value = f"{self.value:.{digits}f}"
        if not self.claims:
            return value
        return f"{value} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def within(self, least: float, most: float) -> "Interval":
        """The interval, clipped to the figure's possible values."""
        if not self.claims:
            return self
        low, high = max(self.low, min(least, self.value)), min(self.high, max(most, self.value))
        return replace(self, low=low, high=high)

    def without_interval(self) -> "Interval":
        """The figure alone."""
        return Interval(self.value, self.value, self.value, self.n)

    def __str__(self) -> str:
        return self.text()


# (numerators, denominators) of a ratio, and groups of ratios of the same observations each
Counts = tuple[Sequence[float], Sequence[float]]
Groups = Sequence[Sequence[Counts]]


class Scale(NamedTuple):
    """A scale g on which a ratio is studentised. Figures outside `lowest` … `highest` have no
    interval."""

    g: Callable[[float], float]
    slope: Callable[[float], float]
    inverse: Callable[[float], float]
    lowest: float
    highest: float


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))


LOG = Scale(math.log, lambda r: 1 / r, _exp, 0.0, math.inf)
LOGIT = Scale(
    g=lambda r: math.log(r / (1 - r)),
    slope=lambda r: 1 / (r * (1 - r)),
    inverse=lambda x: 1 / (1 + _exp(-x)),
    lowest=0.0,
    highest=1.0,
)
PLAIN = Scale(lambda r: r, lambda r: 1.0, lambda x: x, -math.inf, math.inf)


class Spread(NamedTuple):
    """The uncertainty of an estimate: its variance, its third cumulant (whose sign is the direction
    of the skew), and the degrees of freedom of the variance."""

    variance: float
    cumulant: float
    freedom: float


def summed_by(groups: Sequence[Hashable], values: Sequence[float]) -> list[float]:
    """The sum of the values of each group, in the order in which the groups first occur. Both have
    one entry per prompt."""
    sums: dict[Hashable, float] = {}
    for group, value in zip(groups, values, strict=True):
        sums[group] = sums.get(group, 0) + value
    return list(sums.values())


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The pooled ratio Σ numerators / Σ denominators of positive totals, with one entry per prompt;
    `n` is Σ denominators, rounded. Prompts with denominator 0 are skipped; without any others,
    everything is 0."""
    return _pooled(numerators, denominators, LOG)


def share_interval(counted: Sequence[float], of: Sequence[float]) -> Interval:
    """The pooled share Σ counted / Σ of, between 0 and 1; arguments as in `ratio_interval`."""
    return _pooled(counted, of, LOGIT)


def product_interval(
    *groups: Sequence[tuple[Sequence[float], Sequence[float]]], level: float = LEVEL
) -> Interval:
    """The product of pooled ratios Σ numerators / Σ denominators. Ratios of one group belong to the
    same observations, and groups to different ones: counts of many prompts can be combined with
    timings of few. Observations of a group with a denominator of 0 are skipped; `n` counts those of
    the first group. Without any, everything is 0. `level` is that of the interval."""
    sides = []
    for group in groups:
        columns = np.array([[np.asarray(x, float) for x in ratio] for ratio in group])  # [N, 2, n]
        sides.append(columns[:, :, (columns[:, 1] > 0).all(0)])
    sizes = [columns.shape[-1] for columns in sides]
    if 0 in sizes:
        return Interval(0.0, 0.0, 0.0, 0)
    value, spreads = 1.0, []
    for columns in sides:
        ratios = columns[:, 0].sum(-1) / columns[:, 1].sum(-1)
        value *= float(ratios.prod())
        if value <= 0:
            return Interval(value, value, value, sizes[0])
        spreads.append(_spread(columns, [1 / r for r in ratios]))
    return _interval(value, spreads, min(sizes), sizes[0], LOG, level)


def difference_interval(ours: Counts, theirs: Counts) -> Interval:
    """The pooled ratio of ours minus that of theirs, both (numerators, denominators) of the same
    prompts in the same order; `n` counts the prompts. Pairing removes the variation that both
    share."""
    return paired_difference([[ours]], [[theirs]])


def paired_difference(ours: Groups, theirs: Groups) -> Interval:
    """Our product of pooled ratios minus theirs. Both have the same groups as in
    `product_interval`, of the same observations in the same order."""
    sides = _paired(ours, theirs)
    if not sides:
        return Interval(0.0, 0.0, 0.0, 0)
    (our_value, our_rest), (their_value, their_rest) = map(_product, zip(*sides, strict=True))
    spreads = [
        _spread(np.concatenate([mine, yours]), [*plus, *(-x for x in minus)])
        for (mine, yours), plus, minus in zip(sides, our_rest, their_rest, strict=True)
    ]
    sizes = [mine.shape[-1] for mine, _ in sides]
    return _interval(our_value - their_value, spreads, min(sizes), sizes[0], PLAIN)


def paired_quotient(ours: Groups, theirs: Groups) -> Interval:
    """Our product of pooled ratios divided by theirs; arguments as in `paired_difference`. No
    interval if one of the two is 0."""
    sides = _paired(ours, theirs)
    if not sides:
        return Interval(0.0, 0.0, 0.0, 0)
    (our_value, _), (their_value, _) = map(_product, zip(*sides, strict=True))
    sizes = [mine.shape[-1] for mine, _ in sides]
    if our_value <= 0 or their_value <= 0:
        value = our_value / their_value if their_value > 0 else 0.0
        return Interval(value, value, value, sizes[0])
    spreads = []
    for mine, yours in sides:
        both = np.concatenate([mine, yours])
        slopes = both[:, 1].sum(-1) / both[:, 0].sum(-1)
        slopes[len(mine) :] *= -1
        spreads.append(_spread(both, slopes.tolist()))
    return _interval(our_value / their_value, spreads, min(sizes), sizes[0], LOG)


def paired_products(ours: Groups, theirs: Groups) -> tuple[float, float]:
    """The two products that `paired_difference` and `paired_quotient` compare."""
    sides = _paired(ours, theirs)
    if not sides:
        return 0.0, 0.0
    mine, yours = zip(*sides, strict=True)
    return _product(mine)[0], _product(yours)[0]


def _paired(ours: Groups, theirs: Groups) -> list[tuple[np.ndarray, np.ndarray]]:
    """The groups of two sides as arrays of ratios: a row of numerators and a row of denominators
    for each. Observations in which a denominator of either side is 0 are removed. Empty if a group
    has no others."""

    def rows(group: Sequence[Counts]) -> np.ndarray:
        return np.array([[np.asarray(x, float) for x in ratio] for ratio in group])

    sides = []
    for mine, yours in zip(map(rows, ours), map(rows, theirs), strict=True):
        kept = (np.concatenate([mine, yours])[:, 1] > 0).all(0)
        sides.append((mine[:, :, kept], yours[:, :, kept]))
    return sides if all(mine.shape[-1] for mine, _ in sides) else []


def _product(groups: Sequence[np.ndarray]) -> tuple[float, list[list[float]]]:
    """The product of the pooled ratios in all groups, and for each group the product of the other
    groups, which is its slope."""
    ratios = [(g[:, 0].sum(-1) / g[:, 1].sum(-1)).tolist() for g in groups]
    flat = [r for of_group in ratios for r in of_group]
    slopes = iter([math.prod(flat[:i] + flat[i + 1 :]) for i in range(len(flat))])
    return math.prod(flat), [[next(slopes) for _ in of_group] for of_group in ratios]


def median_interval(values: Sequence[float], per: Sequence[float] | None = None) -> Interval:
    """The median of positive `values`, divided by the median of `per` if given. Entries i of both
    were timed in the same repetition; `n` counts the repetitions.

    The interval of a median lies between two order statistics (binomial, exact for any
    distribution); fewer than `FEWEST_TIMINGS` timings have none. Those of two medians are combined
    on their logarithms (Zou and Donner 2008, Statistics in Medicine 27), as if they were
    independent: a correlation within repetitions makes the interval too wide, never too narrow.
    """
    over = np.sort(np.asarray(values, float))
    n = len(over)
    if n == 0:
        return Interval(0.0, 0.0, 0.0, 0)
    value = float(np.median(over))
    if per is not None:
        under = np.sort(np.asarray(per, float))
        value /= float(np.median(under))
    if n < FEWEST_TIMINGS or value <= 0 or over[0] <= 0:
        return Interval(value, value, value, n)
    cut = _order(n)
    below, above = np.log(np.median(over) / over[cut]), np.log(over[-1 - cut] / np.median(over))
    if per is not None:
        middle = np.median(under)
        down, up = np.log(middle / under[cut]), np.log(under[-1 - cut] / middle)
        below, above = np.hypot(below, up), np.hypot(above, down)
    return Interval(value, value * math.exp(-below), value * math.exp(above), n)


def _pooled(numerators: Sequence[float], denominators: Sequence[float], scale: Scale) -> Interval:
    columns = np.array([np.asarray(numerators, float), np.asarray(denominators, float)])
    columns = columns[:, columns[1] > 0]
    count = columns.shape[-1]
    if count == 0:
        return Interval(0.0, 0.0, 0.0, 0)
    total = float(columns[1].sum())
    value = float(columns[0].sum()) / total
    if not scale.lowest < value < scale.highest:
        return Interval(value, value, value, round(total))
    spread = _spread(columns[None], [scale.slope(value)])
    return _interval(value, [spread], count, round(total), scale)


def _spread(ratios: np.ndarray, slopes: Sequence[float]) -> Spread:
    """The spread of Σ slope · ratio over ratios of the same n observations: each is a row of
    numerators and a row of denominators."""
    n = ratios.shape[-1]
    if n < 2:
        return Spread(0.0, 0.0, 1.0)
    influence, leverage, freedom = np.zeros(n), np.zeros(n), math.inf
    for (y, x), slope in zip(ratios, slopes, strict=True):
        share = x / x.sum()
        influence += slope * n * (y - y.sum() / x.sum() * x) / x.sum()
        leverage = np.maximum(leverage, share)
        freedom = min(freedom, 1 / float((share**2).sum()) - 1)
    if np.abs(influence).max() < 1e-12 * sum(map(abs, slopes)) * n:
        influence[:] = 0  # all alike but for rounding
    influence /= np.maximum(1 - leverage, 1e-9)
    skewed = n * float((influence**3).sum()) / ((n - 1) * (n - 2)) if n > 2 else 0.0
    return Spread(float((influence**2).sum()) / n**2, skewed / n**2, max(1.0, freedom))


def _interval(
    value: float,
    spreads: Sequence[Spread],
    fewest: int,
    n: int,
    scale: Scale,
    level: float = LEVEL,
) -> Interval:
    """The interval of a figure that depends on independent groups; `fewest` is the size of the
    smallest, and `n` is reported. Degrees of freedom are Welch's."""
    variance = sum(s.variance for s in spreads)
    if fewest < FEWEST or variance <= 0:
        return Interval(value, value, value, n)
    freedom = variance**2 / sum(s.variance**2 / s.freedom for s in spreads)
    reach = _student(round(min(freedom, 1000.0), 2), level) * math.sqrt(variance)
    cumulant = sum(s.cumulant for s in spreads)
    longer = cumulant * (1 + 2 * _normal(level) ** 2) / (6 * variance)
    low = scale.g(value) - reach + min(0.0, longer)
    high = scale.g(value) + reach + max(0.0, longer)
    return Interval(value, scale.inverse(low), scale.inverse(high), n)


def _normal(level: float) -> float:
    """The two-sided quantile z of the normal distribution."""
    return NormalDist().inv_cdf((1 + level) / 2)


@cache
def _student(freedom: float, level: float = LEVEL) -> float:
    """Student's quantile, two-sided, for any number of degrees of freedom from 1. With
    t = √ν tan θ, its density is proportional to cos^(ν - 1) θ."""
    angle = np.linspace(0, math.pi / 2, 40_001)
    density = np.cos(angle) ** (freedom - 1)
    below = np.concatenate([[0], ((density[1:] + density[:-1]) / 2).cumsum()])
    at = np.interp(level * below[-1], below, angle)
    return math.sqrt(freedom) * math.tan(at)


@cache
def _order(n: int) -> int:
    """The largest k for which the median lies between the order statistics k and n - 1 - k (from 0)
    with a probability of `LEVEL`, from 0 up (n = 6: 96.9 %)."""
    tail, k = 1, 0  # in units of 2^-n, whole numbers
    for j in range(1, n // 2):
        tail += math.comb(n, j)
        if 2 * tail / 2**n > 1 - LEVEL:
            break
        k = j
    return k

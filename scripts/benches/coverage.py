"""Simulates how often the intervals of the reports contain the true figure."""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from benches.turns import show

from specdec.progress import console
from specdec.theory.intervals import (
    LEVEL,
    Interval,
    difference_interval,
    median_interval,
    product_interval,
    ratio_interval,
    share_interval,
)

SIZES = (2, 3, 4, 5, 7, 10, 20, 50, 100)
COUNTED = 70  # prompts whose speculation steps are counted, beside the n that are timed
DEPTH = 3  # depth of the chains
EVEN, SKEWED = 0.5, 1.0  # standard deviation of the logarithm of a response's length

Draw = Callable[[np.random.Generator, int], Interval]


class Scene(NamedTuple):
    """A figure, its data, its true value, and an interval from n observations."""

    figure: str
    data: str
    truth: float
    draw: Draw


def coverage(
    *,
    draws: Annotated[int, "experiments for each figure and n"] = 4000,
    sizes: Annotated[Sequence[int], "numbers n of prompts or timed batches"] = SIZES,
    seed: Annotated[int, "of the simulation"] = 1,
) -> None:
    """Coverage of the 95 % intervals of τ, α, speedups, differences and medians, by simulation.

    Prompts differ in length (log-normal; skewed: the longest of a hundred is a hundred times as
    long as the shortest) and in acceptance (Beta), long responses are accepted more often, and the
    positions of a prompt are clustered. Timings have noise, prompts have speedups of their own, and
    in skewed data one timing in ten is stalled to 1.6 times. The last rows are the share of
    experiments in which the verdict is "gains" although the true speedup is 1: for one decoding
    configuration, and for the best of three. A figure without an interval (fewer than 3
    observations, 6 timings of a median) claims nothing.
    """
    console.print(f"{draws:,} experiments for each cell; intervals of {LEVEL:.0%}")
    rows = []
    for number, scene in enumerate(scenes()):
        cells = []
        for n in sizes:
            random = np.random.default_rng([seed, number, n])
            found = [scene.draw(random, n) for _ in range(draws)]
            claiming = [x for x in found if x.claims]
            held = sum(x.low <= scene.truth <= x.high for x in claiming)
            cells.append(f"{held / len(claiming):.3f}" if claiming else "–")
        rows.append([scene.figure, scene.data, *cells])
    for ways in (1, 3):
        cells = []
        for n in sizes:
            random = np.random.default_rng([seed, 1000 + ways, n])
            gains = sum(_gains(random, n, ways) for _ in range(draws))
            cells.append(f"{gains / draws:.3f}")
        named = '"gains" at a true speedup of 1'
        rows.append([named, "skewed timings" if ways == 1 else "best of three ways", *cells])
    show(["figure", "data", *(f"n = {n}" for n in sizes)], rows)


def scenes() -> Iterator[Scene]:
    """The simulated figures."""
    for name, spread in (("even lengths", EVEN), ("skewed lengths", SKEWED)):
        yield Scene("τ", name, tau((2, 3)), tau_of(spread, (2, 3)))
        yield Scene("τ near γ + 1", name, tau((8, 1)), tau_of(spread, (8, 1)))
        yield Scene("α", name, weighted((2, 3), 1), alpha_of(spread, (2, 3)))
        yield Scene("α near 1", name, weighted((8, 1), 1), alpha_of(spread, (8, 1)))
    yield Scene("speedup, all prompts timed", "even timings", 1.0, lambda r, n: timed(r, n, EVEN))
    yield Scene(
        "speedup, all prompts timed", "skewed timings", 1.0, lambda r, n: timed(r, n, SKEWED)
    )
    yield Scene(f"speedup, {COUNTED} prompts counted", "skewed timings", tau((2, 3)), combined)
    more = tau((2, 3)) - tau((2, 3), 0.9)
    yield Scene("τ of one draft less that of another", "skewed lengths", more, difference)
    yield Scene("median of timings", "log-normal", 1.0, lambda r, n: median_interval(_noise(r, n)))
    yield Scene("c: ratio of medians", "log-normal", 1.0, medians)


def moment(beta: tuple[float, float], k: int) -> float:
    """E[a^k] of a Beta distribution."""
    a, b = beta
    return float(np.prod([(a + i) / (a + b + i) for i in range(k)]))


def weighted(beta: tuple[float, float], k: int) -> float:
    """E[a^k] over positions, of which a prompt of acceptance a has about 1 + a times as many."""
    return (moment(beta, k) + moment(beta, k + 1)) / (1 + moment(beta, 1))


def tau(beta: tuple[float, float], factor: float = 1.0) -> float:
    """τ of chains: 1 + Σ_k E[(factor · a)^k] over speculation steps."""
    return 1 + sum(factor**k * weighted(beta, k) for k in range(1, DEPTH + 1))


def _prompts(
    random: np.random.Generator, n: int, spread: float, beta: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The acceptance [n] of prompts, and their numbers of speculation steps or positions [n]."""
    alpha = random.beta(*beta, n)
    mean = np.exp(random.normal(3, spread, n)) * (1 + alpha)
    return alpha, np.floor(mean + random.random(n)).astype(int)


def _accepted(
    random: np.random.Generator, alpha: np.ndarray, speculation_steps: np.ndarray
) -> np.ndarray:
    """Tokens [n] that the speculation steps accept: each depth of a step is reached if those before
    are."""
    left, total = speculation_steps, np.zeros_like(speculation_steps)
    for _ in range(DEPTH):
        left = random.binomial(left, alpha)
        total = total + left
    return total


def tau_of(spread: float, beta: tuple[float, float]) -> Draw:
    def draw(random: np.random.Generator, n: int) -> Interval:
        alpha, speculation_steps = _prompts(random, n, spread, beta)
        tokens = speculation_steps + _accepted(random, alpha, speculation_steps)
        return ratio_interval(tokens, speculation_steps)  # type: ignore[arg-type]

    return draw


def alpha_of(spread: float, beta: tuple[float, float]) -> Draw:
    def draw(random: np.random.Generator, n: int) -> Interval:
        alpha, positions = _prompts(random, n, spread, beta)
        return share_interval(random.binomial(positions, alpha), positions)  # type: ignore[arg-type]

    return draw


def _noise(random: np.random.Generator, n: int, spread: float = EVEN) -> np.ndarray:
    """Factors [n] with a median of 1."""
    return np.exp(random.normal(0, spread / 5, n))


def _seconds(random: np.random.Generator, work: np.ndarray, spread: float) -> np.ndarray:
    """The seconds of timings whose expectation is proportional to `work` [n]."""
    stalled = random.random(len(work)) < 0.1 * (spread == SKEWED)
    return work * _noise(random, len(work), 0.25) * np.where(stalled, 1.6, 1.0)


def timed(random: np.random.Generator, n: int, spread: float) -> Interval:
    """A speedup of 1, with each prompt timed both ways; it varies from prompt to prompt by 15 %."""
    tokens = np.exp(random.normal(4, spread, n))
    own = np.exp(random.normal(-(0.15**2) / 2, 0.15, n))  # mean 1
    plain, drafted = _seconds(random, tokens, spread), _seconds(random, tokens * own, spread)
    return ratio_interval(plain, drafted)  # type: ignore[arg-type]


def combined(random: np.random.Generator, n: int) -> Interval:
    """τ from many prompts, times the ratio of the seconds of a vanilla step to those of a
    speculation step, here 1."""
    alpha, speculation_steps = _prompts(random, COUNTED, SKEWED, (2, 3))
    kept = speculation_steps + _accepted(random, alpha, speculation_steps)
    steps, passes = (np.exp(random.normal(4, SKEWED, n)) for _ in range(2))
    plain, drafted = _seconds(random, steps, SKEWED), _seconds(random, passes, SKEWED)
    return product_interval([(kept, speculation_steps)], [(plain, steps), (passes, drafted)])  # type: ignore[list-item]


def difference(random: np.random.Generator, n: int) -> Interval:
    """Two drafts on the same prompts; nine tokens of the second are accepted for ten of the
    first."""
    alpha, speculation_steps = _prompts(random, n, SKEWED, (2, 3))
    first, second = (
        speculation_steps + _accepted(random, a, speculation_steps) for a in (alpha, 0.9 * alpha)
    )
    return difference_interval((first, speculation_steps), (second, speculation_steps))  # type: ignore[arg-type]


def medians(random: np.random.Generator, n: int) -> Interval:
    """Two parts of a speculation step, timed in turn on a machine with a drifting speed."""
    drift = np.exp(random.normal(0, 0.05, n))
    return median_interval(drift * _noise(random, n), drift * _noise(random, n))


def _gains(random: np.random.Generator, n: int, ways: int) -> bool:
    """Whether the interval of any of `ways` ways lies above 1, although all their speedups are
    1."""
    found = [timed(random, n, SKEWED) for _ in range(ways)]
    return any(x.claims and x.low > 1 for x in found)

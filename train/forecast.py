"""A forecast of τ at the end of training, from the held-out evaluations so far."""

import math
from collections.abc import Sequence

import numpy as np

SHARES = (0.1, 0.2)  # of the steps, after which a run is evaluated so that there is a forecast
FEWEST = 50  # steps of a run that is worth one
FROM = 0.05  # share of the steps before which the learning rate still rises
# What a factor e in steps adds to τ: so much, and a share of τ - 1; and its standard deviation,
# relative to that sum.
SLOPE, SHARE, SPREAD = 0.055, 0.04, 0.35
NOISE = 0.015  # standard deviation of a held-out τ about its curve


def looks(steps: int, every: int) -> list[int]:
    """The steps, of so many, after which a run is evaluated for its forecast, besides those after
    every `every` steps. None for short runs, where these are enough, or where `every` is 0."""
    if steps < FEWEST or every == 0 or every <= SHARES[0] * steps:
        return []
    return [math.ceil(share * steps) for share in SHARES]


def forecast(
    points: Sequence[tuple[int, float]], steps: int, gamma: float = math.inf
) -> float | None:
    """τ of chains of γ tokens after `steps` steps, given held-out τ after some of them; None before
    there are two. It is between 1 and γ + 1, as any τ.

    τ - 1 is taken to be linear in the logarithm of the step, fitted by least squares in which later
    evaluations weigh more, with a normal prior on the slope. docs/notebook/measuring.md has the
    curves from which the prior comes and on which the forecast was tried.
    """
    usable = [(step, tau - 1) for step, tau in points if FROM * steps <= step <= steps]
    if len(usable) < 2:
        return None
    step_P, y_P = np.array(usable, dtype=np.float64).T
    x_P, weight_P = np.log(step_P / steps), step_P / step_P.max()
    level = float(np.average(y_P, weights=weight_P))
    slope = SLOPE + SHARE * level
    rows = np.stack([np.ones_like(x_P), x_P], axis=1) * np.sqrt(weight_P)[:, None] / NOISE
    A = np.concatenate([rows, [[0.0, 1 / (SPREAD * slope)]]])  # the prior is one more observation
    b = np.concatenate([y_P * np.sqrt(weight_P) / NOISE, [1 / SPREAD]])
    (end, _), *_ = np.linalg.lstsq(A, b, rcond=None)
    return 1 + min(max(float(end), 0.0), float(gamma))

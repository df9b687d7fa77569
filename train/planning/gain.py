"""What must be accepted for a speedup: break-even α and the best γ from the costs of a round."""

from collections.abc import Callable
from dataclasses import dataclass

from specdec.theory.leviathan import best_gamma, walltime_by_gamma

MOST = 8  # tokens of the longest chain that is considered
PRECISION = 0.001  # of the break-even α


@dataclass(frozen=True)
class RoundCosts:
    """The costs of a round at a batch size, in plain steps: `c` of one draft step, and `v` by γ of
    a pass over γ + 1 tokens. A `parallel` draft takes one step for all of its tokens."""

    batch: int
    c: float
    v: Callable[[int], float]
    parallel: bool = False

    def cost(self, gamma: int) -> float:
        """Of everything but the draft steps that Theorem 3.8 counts (none for a parallel draft)."""
        return self.v(gamma) + (self.c if self.parallel else 0.0)

    @property
    def per_token(self) -> float:
        return 0.0 if self.parallel else self.c


@dataclass(frozen=True)
class Gain:
    """At a batch size: the α from which some chain gains (None: none does, however much is
    accepted), and the γ and speedup that are best at the expected α."""

    batch: int
    break_even: float | None
    gamma: int
    speedup: float

    @property
    def pays(self) -> bool:
        return self.gamma > 0


def gain(costs: RoundCosts, alpha: float, most: int = MOST) -> Gain:
    """What a draft gains at these costs if a share `alpha` of its tokens is accepted."""
    factors = walltime_by_gamma(alpha, costs.per_token, most, costs.cost)
    gamma = best_gamma(alpha, costs.per_token, most, costs.cost)
    return Gain(costs.batch, break_even(costs, most), gamma, factors[gamma])


def break_even(costs: RoundCosts, most: int = MOST) -> float | None:
    """The least α at which some chain of up to `most` tokens is faster than plain decoding, to a
    thousandth; None if there is none. More acceptance is never slower, so halving finds it."""

    def gains(alpha: float) -> bool:
        return best_gamma(alpha, costs.per_token, most, costs.cost) > 0

    if not gains(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high

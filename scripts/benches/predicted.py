"""Compares α and speed of runs with the predictions of Leviathan et al. 2023."""

import statistics
from collections.abc import Iterable, Mapping

from specdec.measure.results import Measured, Results
from specdec.report.theory import FURTHEST, foreseen_speedup, through
from specdec.theory import leviathan

Rows = Iterable[tuple[str, list[str]]]
ALPHAS = ("α at T = 0", "α at T = 1", "positions")
SPEEDS = ("γ", "α", "c", "v", "τ", "Theorem 3.8", "τ / (γc + v)", "measured", "best γ")


def alpha_of(at: Measured) -> float:
    """α at depth 0 over all positions, the one number that the closed forms take."""
    return at.alpha.all.at_temperature(at.way.temperature)[0].value


def cost_of_a_pass(
    found: Mapping[str, Results], more: Iterable[Measured] = ()
) -> leviathan.PassCost:
    """v by γ: at each γ, the median of v over all drafts and `more`."""
    points: dict[int, list[float]] = {}
    ats = [at for made in found.values() for at in made.asked]
    for at in (*ats, *more):
        points.setdefault(at.way.gamma, []).append(at.costs.v.value)
    return leviathan.pass_cost({gamma: statistics.median(of) for gamma, of in points.items()})


def alphas(found: Mapping[str, Results]) -> Rows:
    for name, made in found.items():
        zero, one = (at.alpha.all.at_temperature(at.way.temperature)[0] for at in made.asked)
        yield name, [str(zero), str(one), f"{one.n:,}"]


def speeds(found: Mapping[str, Results], v: leviathan.PassCost) -> Rows:
    for name, made in found.items():
        for at in made.asked:
            alpha, c = at.alpha.all.at_temperature(at.way.temperature)[0], at.costs.c.value
            expected = through(alpha, lambda a: leviathan.walltime_factor(a, at.way.gamma, c))  # noqa: B023
            figures = [f"{alpha.value:.3f}", f"{c:.3f}", at.costs.v.text(2), str(at.tau)]
            figures += [x.text(2) for x in (expected, foreseen_speedup(at), at.speedup)]
            fastest = leviathan.best_gamma(alpha.value, c, FURTHEST, v)
            yield f"{name}, T = {at.way.temperature:g}", [str(at.way.gamma), *figures, str(fastest)]

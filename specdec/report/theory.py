"""The section on theory: the papers' formulas, applied to the measured figures of a run."""

from collections.abc import Callable
from dataclasses import replace
from math import exp, hypot, log

from specdec.measure.results import Measured, Results
from specdec.report.markdown import by_temperature, claimed, table
from specdec.theory import leviathan
from specdec.theory.intervals import Interval

PASS = ("tokens", "ms", "MB of weights", "GFLOP", "FLOP a byte", "GB/s", "GFLOP/s")
FURTHEST = 16  # the largest γ tried in the search for the best


def through(x: Interval, formula: Callable[[float], float]) -> Interval:
    """The value and interval of a monotone formula of a measured figure."""
    low, high = sorted((formula(x.low), formula(x.high)))
    return Interval(formula(x.value), low, high, x.n)


def milliseconds(seconds: Interval) -> str:
    return through(seconds, lambda s: 1e3 * s).text(1)


def foreseen_speedup(at: Measured) -> Interval:
    """τ / (γc + v): the measured τ over the expected cost of a speculation step. The interval has
    the errors of both, which are independent (the delta method on logarithms); c and v are taken to
    err together, as both are divided by the seconds of a vanilla step. No interval if τ or v has
    none."""
    c, v = at.costs.c, at.costs.v
    share = at.drafted_per_step.value / at.way.gamma if at.way.chain else 1.0

    def cost(c: float, v: float) -> float:
        return leviathan.step_cost(at.way.gamma, c, v, share)

    costs = Interval(cost(c.value, v.value), cost(c.low, v.low), cost(c.high, v.high), v.n)
    foreseen = through(at.tau, lambda tau: tau / costs.value)
    if not (at.tau.claims and v.claims):
        return foreseen.without_interval()
    below = hypot(log(at.tau.value / at.tau.low), log(costs.high / costs.value))
    above = hypot(log(at.tau.high / at.tau.value), log(costs.value / costs.low))
    return replace(foreseen, low=foreseen.value * exp(-below), high=foreseen.value * exp(above))


def of_pass(results: Results, tokens: int, seconds: Interval) -> list[str]:
    """A row for a forward pass of the target over `tokens` tokens of each row, in the columns of
    `PASS`."""
    size, tokens = results.weight_bytes, tokens * results.batch
    work = tokens * results.target_operations
    rates = (through(seconds, lambda s: amount / s / 1e9) for amount in (size, work))  # noqa: B023
    cells = [str(tokens), milliseconds(seconds), f"{size / 1e6:,.0f}"]
    cells += [f"{work / 1e9:.2f}", f"{work / size:.2f}", *(rate.text(1) for rate in rates)]
    return cells if work else [*cells[:3], "—", "—", cells[5], "—"]


def section(results: Results) -> list[str]:
    """The section of the report, in blocks of Markdown."""
    chains = [at for at in results.asked if at.way.chain and at.way.draft_length == "fixed"]
    c_hat = results.asked[0].operations
    blocks = []
    if chains:
        note = (
            "Closed forms of Leviathan et al. (2023), with one α for all depths; their intervals "
            "are those of α."
        )
        if c_hat is not None:
            note += f" ĉ = {c_hat:.3f} (Definition 3.10), counted in matrix products."
        if any(at.way.temperature > 0 for at in chains):
            note += " At T > 0 they describe the verification method `rejection`."
        blocks += [by_temperature(chains, lambda at: _closed_forms(at, results)), note]
    else:
        blocks.append(
            "The closed forms of Leviathan et al. (2023) describe chains of a fixed length, and "
            "this run drafted other shapes, so they are left out."
        )
    for at in results.asked:
        blocks += _measured_law(at)
    return blocks + _reads(results)


def _closed_forms(at: Measured, results: Results) -> dict[str, str]:
    """Predictions of Leviathan et al. 2023 for one α at all positions, with the measured values."""
    c_hat = at.operations
    by_depth, gamma, c = (
        at.alpha.all.at_temperature(at.way.temperature),
        at.way.gamma,
        at.costs.c.value,
    )
    alpha, known = by_depth[0], [a.value for a in by_depth]
    best = leviathan.best_gamma(
        alpha.value, c, FURTHEST, leviathan.pass_cost({gamma: at.costs.v.value})
    )

    def text_of(formula: Callable[..., float], *others: float, digits: int = 2) -> str:
        return through(alpha, lambda a: formula(a, *others)).text(digits)

    operations = "—" if c_hat is None else text_of(leviathan.operations_factor, gamma, c_hat)
    return {
        "α at depth 0, all positions": alpha.text(),
        "tokens per pass, one α for all depths (Equation 1)": text_of(
            leviathan.expected_tokens, gamma, digits=3
        ),
        "tokens per pass, α of each depth": (
            f"{leviathan.expected_tokens(known, gamma):.3f}" if len(known) >= gamma else "—"
        ),
        "**tokens per pass, measured (τ)**": claimed(at.tau.text(), results.without_interval),
        "speedup (Theorem 3.8, v = 1)": text_of(leviathan.walltime_factor, gamma, c),
        "**speedup, measured**": claimed(at.speedup.text(2), results.times_without_interval),
        "guaranteed speedup with the best γ (Corollary 3.9)": text_of(
            leviathan.guaranteed_factor, c
        ),
        "best γ, with the measured v": f"{best} (measured with {gamma})",
        "speedup if rejections were known beforehand, v = 1 (Section 3.5)": text_of(
            leviathan.oracle_factor, c
        ),
        "reads of the target's weights shrink by (Section 3.4)": text_of(
            leviathan.expected_tokens, gamma
        ),
        "arithmetic operations grow by (Theorem 3.11)": operations,
    }


def _measured_law(at: Measured) -> list[str]:
    """Predictions from p and q at every position of the text at T > 0, without a closed form."""
    if (foreseen := at.foreseen) is None:
        return []
    blocks = [f"#### p and q along the text, T = {at.way.temperature:g}"]
    if at.way.chain:
        rows = {
            "verification method `rejection`, expected": [foreseen.rejection_tokens.text()],
            "verification method `block`, expected (never less)": [foreseen.block_tokens.text()],
            f"verification method `{at.way.verification}`, measured (τ)": [at.tau.text()],
        }
        blocks.append(table("tokens per pass at the visited anchors", [""], rows))
    divergence = ", ".join(d.text() for d in foreseen.divergence[: at.way.gamma])
    lenience = ", ".join(f"{x.alpha.text()} at l = {x.factor:g}" for x in foreseen.lenience)
    plain = ""
    if foreseen.non_iterative is not None:
        plain = f"; by non-iterative rejection (Appendix A.2), {foreseen.non_iterative.text()}"
    return [
        *blocks,
        f"D_LK by depth, {foreseen.divergence[0].n:,} positions: {divergence}; by Corollary 3.6 it "
        "is 1 − α of the sampled variant.",
        f"With lenience l (Appendix A.5, lossy), α at depth 0 would be {lenience}{plain}.",
    ]


def _reads(results: Results) -> list[str]:
    """The bytes that a forward pass of the target reads."""
    at = results.asked[0]
    if not results.weight_bytes:
        return []
    rows = {
        "plain step": of_pass(results, 1, at.costs.step_seconds),
        "verification": of_pass(results, at.way.nodes + 1, at.costs.verify_seconds),
    }
    return [table("a pass of the target", PASS, rows), "The cache is left out (Section 3.4)."]

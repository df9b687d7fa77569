"""What the theory says of a run: the papers' formulas, given what was measured."""

from collections.abc import Callable

from specdec.measure.results import AtTemperature, Results
from specdec.theory.intervals import Interval
from specdec.theory.leviathan import (
    beam_passes,
    best_gamma,
    expected_tokens,
    guaranteed_factor,
    memory_factor,
    operations_factor,
    oracle_factor,
    pass_cost,
    round_cost,
    walltime_factor,
)

BEAMS = 4
FURTHEST = 16  # γ up to which the best one is looked for


def through(x: Interval, formula: Callable[[float], float]) -> Interval:
    """A formula that rises or falls with a measured figure, with that figure's interval."""
    low, high = sorted((formula(x.low), formula(x.high)))
    return Interval(formula(x.value), low, high, x.n)


def foreseen_speedup(at: AtTemperature) -> Interval:
    """τ / (γc + v): the measured τ over what a round should cost, so that what is missing from
    the measured speedup is the decoder's own."""
    share = at.drafted_per_round.value / at.gamma if at.chain else 1.0
    cost = round_cost(at.gamma, at.cost.c.value, at.cost.v.value, share)
    return through(at.tau, lambda tau: tau / cost)


def is_chain(results: Results, at: AtTemperature) -> bool:
    """Whether rounds draft chains of γ whatever happens, which the closed forms are about."""
    return at.chain and results.length == "fixed"


def section(results: Results) -> list[str]:
    """The section of the report, in lines."""
    chains = [at for at in results.temperatures if is_chain(results, at)]
    lines = ["", "## What theory says", ""]
    if not chains:
        lines += [
            "The closed forms of Leviathan et al. (2023) describe chains of a fixed length, and "
            "this run drafted others: they are left out."
        ]
    else:
        lines += _closed_forms(results, chains)
    for at in results.temperatures:
        if at.foreseen is not None:
            lines += _measured_law(at)
    lines += _reads(results)
    return lines


def _closed_forms(results: Results, chains: list[AtTemperature]) -> list[str]:
    """Leviathan et al. 2023 for one α at all positions, beside what was measured."""
    by_depth = {id(at): [a.value for a in at.alpha.all.of(at.temperature)] for at in chains}
    c_hat = results.operations

    def alpha(at: AtTemperature) -> Interval:
        return at.alpha.all.of(at.temperature)[0]

    def speedup(at: AtTemperature) -> str:
        c = at.cost.c.value
        return through(alpha(at), lambda a: walltime_factor(a, at.gamma, c)).text(2)

    def least(at: AtTemperature) -> str:
        c = at.cost.c.value
        return through(alpha(at), lambda a: guaranteed_factor(a, c)).text(2)

    def oracle(at: AtTemperature) -> str:
        c = at.cost.c.value
        return through(alpha(at), lambda a: oracle_factor(a, c)).text(2)

    def fitting(at: AtTemperature) -> str:
        v = pass_cost({at.gamma: at.cost.v.value})
        best = best_gamma(alpha(at).value, at.cost.c.value, FURTHEST, v)
        return f"{best} (measured with {at.gamma})"

    def operations(at: AtTemperature) -> str:
        if c_hat is None:
            return "—"
        return through(alpha(at), lambda a: operations_factor(a, at.gamma, c_hat)).text(2)

    def depths(at: AtTemperature) -> str:
        known = by_depth[id(at)]
        return f"{expected_tokens(known, at.gamma):.3f}" if len(known) >= at.gamma else "—"

    rows: list[tuple[str, Callable[[AtTemperature], str]]] = [
        ("α at depth 0, all positions", lambda at: alpha(at).text()),
        (
            "tokens a pass, one α for all depths (Equation 1)",
            lambda at: through(alpha(at), lambda a: expected_tokens(a, at.gamma)).text(),
        ),
        ("tokens a pass, α of each depth", depths),
        ("**tokens a pass, measured (τ)**", lambda at: f"**{at.tau.text()}**"),
        ("speedup (Theorem 3.8, v = 1)", speedup),
        ("**speedup, measured**", lambda at: f"**{at.speedup.text(2)}**"),
        ("speedup that the best γ gains at least (Corollary 3.9)", least),
        ("best γ, with the measured v", fitting),
        ("speedup if rejections were known beforehand, v = 1 (Section 3.5)", oracle),
        ("reads of the target's weights shrink by (Section 3.4)", _memory),
        ("arithmetic operations grow by (Theorem 3.11)", operations),
    ]
    lines = ["| | " + " | ".join(f"T = {at.temperature:g}" for at in chains) + " |"]
    lines += ["| --- |" + " --- |" * len(chains)]
    lines += [f"| {name} | " + " | ".join(cell(at) for at in chains) + " |" for name, cell in rows]
    counted = "" if c_hat is None else f" ĉ = {c_hat:.3f}, counted in products of matrices."
    lines += [
        "",
        "The closed forms (Leviathan et al. 2023) take every position to accept with the α of "
        "depth 0, independently of the others, and Theorem 3.8 takes a verification to cost one "
        "plain step. In truth acceptance falls with depth, and rounds start where the last one "
        "failed. Their intervals are those of α." + counted,
    ]
    if any(at.temperature > 0 for at in chains):
        lines[-1] += (
            " At T > 0 they describe the rule `rejection`, whose acceptance at one position is α; "
            "the decoder's own rule is named above."
        )
    return lines


def _memory(at: AtTemperature) -> str:
    alpha = at.alpha.all.of(at.temperature)[0]
    return through(alpha, lambda a: memory_factor(a, at.gamma)).text(2)


def _measured_law(at: AtTemperature) -> list[str]:
    """What p and q at every position of the text give at T > 0, without a closed form."""
    found = at.foreseen
    assert found is not None
    divergence = ", ".join(d.text() for d in found.divergence[: at.gamma])
    lines = ["", f"### p and q along the text, T = {at.temperature:g}", ""]
    if at.chain:
        lines += [
            "| tokens a pass at the visited anchors | |",
            "| --- | --- |",
            f"| rule `rejection`, expected | {found.rejection_tokens.text()} |",
            f"| rule `block`, expected (never less) | {found.block_tokens.text()} |",
            f"| rule `{at.rule}`, measured (τ) | {at.tau.text()} |",
            "",
        ]
    lenience = ", ".join(f"{x.alpha.text()} at l = {x.factor:g}" for x in found.lenience)
    one = at.alpha.all.sampled[0].text()
    return [
        *lines,
        f"D_LK by depth, {found.divergence[0].n:,} positions: {divergence}; it is 1 − α of the "
        "sampled variant (Corollary 3.6), computed apart from it.",
        "",
        f"With lenience l (Appendix A.5, lossy) α at depth 0 would be {lenience}, where it is "
        f"{one} at l = 1.",
    ]


def _reads(results: Results) -> list[str]:
    """What a pass reads, and what beam search would add to it."""
    at = results.temperatures[0]
    lines = []
    if results.weight_bytes:
        size, step = results.weight_bytes, at.cost.step_seconds
        rate = through(step, lambda seconds: size / seconds / 1e9)
        lines += [
            "",
            f"A plain step reads the target's weights, {size / 1e6:,.0f} MB, in "
            f"{through(step, lambda s: 1e3 * s).text(1)} ms: {rate.text(1)} GB/s. A round reads "
            "them once however many tokens it commits.",
        ]
    return [
        *lines,
        "",
        f"A beam search of width {BEAMS} behind a draft beam of the same width would have the "
        f"target judge {beam_passes(BEAMS, BEAMS, at.gamma)} positions a pass at γ = {at.gamma} "
        "(Appendix A.4).",
    ]

"""Compares head sizes: what more layers, width, draft vocabulary or depth add to τ, and what they
cost."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from benches import recipe
from benches.families import ALIKE, parameters
from benches.turns import show

from specdec.measure.results import Measured, Results
from specdec.progress import console
from specdec.theory.leviathan import pass_cost, walltime_by_gamma

ARMS = (
    *("default", "num_layers=2", "intermediate_size=384", "intermediate_size=3072"),
    *("draft_vocab=2048", "draft_vocab=32000", "depth=1", "depth=5"),
)


def capacity(
    overrides: Annotated[Sequence[str], "of train.py for all heads, e.g. drafter=NAME"] = (),
    *,
    folder: Annotated[Path, "of the runs, inside runs/; one per drafter"] = Path("capacity"),
    tokens: Annotated[int, "to train each head on"] = 60_000,
    arms: Annotated[Sequence[str], "settings of drafter; those of one head in quotes"] = ARMS,
) -> None:
    """Heads of several sizes at equal training tokens: the frontier of τ against c.

    A head is on the frontier unless another one has at least its τ at its c or less, and is better
    in one of the two. Which head on the frontier is best depends on the machine. The predicted
    speedup is the largest τ / (γc + v) over all γ up to the measured one: τ follows from the head's
    measured acceptance by depth, c is the head's, and v is the median over all runs, since it is a
    cost of the target alone. Makes the runs that `folder` lacks, and continues after an
    interruption, as recipe does.
    """
    names = {arm: f"{folder}/{'_'.join(arm.split()).replace('=', '-')}" for arm in arms}
    made: dict[str, Results] = {}
    for n, (arm, name) in enumerate(names.items(), 1):
        settings = [] if arm == "default" else arm.split()
        own = [f"loop.max_tokens={tokens}", *(f"drafter.{x}" for x in settings)]
        said = f"head {n} of {len(names)}"
        made[arm] = recipe.report_of(name, [*ALIKE, *overrides], own, said)
    tokens = recipe.tokens_of_each(made.values(), folder)
    first = next(iter(made.values()))
    console.print(
        f"{first.drafter}, {tokens:,} training tokens a head, {first.prompts} held-out "
        f"prompts of up to {first.max_new_tokens} new tokens, γ at most "
        f"{max(x.asked[0].way.gamma for x in made.values())}; {first.machine}. Intervals are "
        "95 % intervals over prompts; for c, over timings."
    )
    rows = []
    for arm, one in made.items():
        size = parameters(recipe.ROOT / "runs" / names[arm] / "best")
        cells = [arm, f"{size:,}", str(one.asked[0].costs.c)]
        for i, at in enumerate(one.asked):
            others = [x.asked[i] for x in made.values()]
            v = statistics.median(x.costs.v.value for x in others)
            speedup, gamma = _best(at, v)
            beaten = any(_dominates(x, at) for x in others)
            cells += [str(at.tau), "" if beaten else "yes", f"{speedup:.2f} (γ = {gamma})"]
        rows.append(cells)
    columns = ["drafter.", "parameters", "c"]
    for at in first.asked:
        columns += [
            f"{what}, T = {at.way.temperature:g}" for what in ("τ", "frontier", "predicted")
        ]
    show(columns, rows)


def _best(at: Measured, v: float) -> tuple[float, int]:
    """The highest predicted speedup, and its γ. `v` is the cost of a forward pass over γ + 1
    tokens."""
    alpha = [x.value for x in at.conditional_acceptance]
    factors = walltime_by_gamma(alpha, at.costs.c.value, len(alpha), pass_cost({at.way.gamma: v}))
    best = max(factors[1:])
    return best, factors.index(best, 1)


def _dominates(a: Measured, b: Measured) -> bool:
    """Whether `a` is at least as good as `b` in τ and in c, and better in one of them."""
    better = a.tau.value - b.tau.value, b.costs.c.value - a.costs.c.value
    return min(better) >= 0 and max(better) > 0

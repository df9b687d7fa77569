"""Compares all drafting methods on one target at equal training tokens: size, α, τ, cost and
speed."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from benches import recipe
from benches.again import again
from benches.turns import show
from safetensors import safe_open

from specdec.drafters import DRAFTERS, family
from specdec.errors import UserError, require
from specdec.files import read_lines
from specdec.formats import draft_checkpoint
from specdec.measure.results import Results
from specdec.progress import console
from specdec.report.theory import foreseen_speedup
from specdec.theory.intervals import median_interval

ALIKE = ("budget.minutes=null", "decode.gamma=3")
TREE = "tree"  # the folder, inside a run's, of its results with trees
NONE = "—"


def families(
    overrides: Annotated[Sequence[str], "of train.py for all families, e.g. data.limit=200"] = (),
    *,
    folder: Annotated[Path, "of the runs, inside runs/"] = Path("families"),
    tokens: Annotated[int, "to train on; the default takes under 10 minutes a family"] = 60_000,
    families: Annotated[Sequence[str], "default: all"] = tuple(DRAFTERS),
) -> None:
    """Every drafting method, trained and untrained, at equal training tokens, in one table.

    Makes the runs that `folder` lacks, and continues after an interruption, as recipe does. Trees
    are dynamic, with 12 nodes; methods that copy are measured with chains only. Training reads the
    target's hidden states from a cache, so training tokens/s do not include the target's passes.
    The predicted speedup is τ / (γc + v). A method whose run is rejected, for example because it
    needs another kind of target, is listed with the reason. A method may have its own overrides, as
    in "hybrid drafter.head=runs/families/NAME/best drafter.copying=suffix".
    """
    found, refused = dict[str, tuple[Results, Results | None]](), dict[str, str]()
    named = {given.split()[0]: given.split()[1:] for given in families}
    for name in named:
        family(name)
    for n, (name, more) in enumerate(named.items(), 1):
        own = [f"drafter={name}", f"loop.max_tokens={tokens}", *more]
        said = f"family {n} of {len(named)}"
        try:
            made = recipe.report_of(f"{folder}/{name}", [*ALIKE, *overrides], own, said)
        except recipe.Refused as error:
            refused[name] = str(error)
        else:
            found[name] = made, tree_of(recipe.ROOT / "runs" / folder / name, made)
    require(bool(found), f"no family could be measured: {next(iter(refused.values()), '')}")
    alike = {made.training.tokens for made, _ in found.values() if made.training}
    require(
        len(alike) <= 1,
        f"the runs in runs/{folder} are of different lengths ({', '.join(map(str, alike))} "
        "tokens): give another --folder",
    )
    runs = recipe.ROOT / "runs" / folder
    rows = [row(name, *measured, runs / name) for name, measured in found.items()]
    first, _ = next(iter(found.values()))
    console.print(
        f"{', '.join(f'{n:,}' for n in alike) or 'no'} training tokens a family, {first.prompts} "
        f"held-out prompts of up to {first.max_new_tokens} new tokens; {first.machine}. Intervals "
        "are 95 % intervals over prompts; for training tokens/s and c, over timings."
    )
    alpha = [f"α {v}, depth {k}" for v in ("sampled", "greedy") for k in range(recipe.DEPTHS)]
    tau = [f"τ of {shape}, T = {t}" for shape in ("a chain", "a tree") for t in (0, 1)]
    speedup = [f"speedup {how}, T = {t}" for how in ("predicted", "measured") for t in (0, 1)]
    columns = ["", "parameters", "training tokens/s", "γ", *alpha, *tau, "c", *speedup]
    show(columns, [*rows, *([name, "not measured: see below"] for name in refused)])
    for reason in refused.values():
        console.print(reason)


def row(name: str, made: Results, tree: Results | None, run: Path) -> list[str]:
    """The table's row for a drafting method."""
    zero, one = made.asked  # `recipe.FIXED`
    rates = NONE
    if made.training:
        lines = read_lines(run / "metrics.jsonl", ["train"])
        rates = median_interval([line["train"]["tokens_per_second"] for line in lines]).text(0)
    by_depth = [alpha[: recipe.DEPTHS] for alpha in (one.alpha.all.sampled, zero.alpha.all.greedy)]
    alphas = [str(x) for of in by_depth for x in of + [NONE] * (recipe.DEPTHS - len(of))]
    trees = [str(at.tau) for at in tree.asked] if tree else [NONE, NONE]
    speedups = [foreseen_speedup(zero), foreseen_speedup(one), zero.speedup, one.speedup]
    return [
        name,
        f"{parameters(run / 'best'):,}",
        rates,
        str(zero.way.gamma),
        *alphas,
        *(str(zero.tau), str(one.tau), *trees, str(zero.costs.c)),
        *(x.text(2) for x in speedups),
    ]


def parameters(draft: Path) -> int:
    """The number of floating-point values in a saved draft's weights, without ids and counts."""
    with safe_open(draft / draft_checkpoint.WEIGHTS, framework="pt") as file:
        parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
        floats = (x for x in parts if x.get_dtype() in draft_checkpoint.FLOATS)
        return sum(math.prod(x.get_shape()) for x in floats)


def tree_of(run: Path, chain: Results) -> Results | None:
    """Measure a run's draft again with dynamic trees, or read these results if they exist. None if
    the drafter copies or does not support trees."""
    if family(chain.drafter).copies:
        return None
    try:
        return again(run, TREE, chain, tree="dynamic")
    except UserError as error:
        console.print(f"{chain.drafter} drafts no trees: {error}")
        return None

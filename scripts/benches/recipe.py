"""How much a recipe gains from its start and how much from its objective: four arms, equal tokens.

Every arm is trained with every seed at every learning rate, each in its own process, and is judged
at its best rate. All drafts are measured on the same text: the target's plain answers, which do
not depend on the draft, so that arms are compared prompt by prompt and seed by seed.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple

from benches.turns import show

from specdec.errors import UserError
from specdec.measure.results import FILE, AtTemperature, PromptCounts, Results
from specdec.progress import console
from specdec.theory.intervals import difference_interval, ratio_interval

STARTS, OBJECTIVES = ("target", "random"), ("nla", "kl")
SIZE = ("experiment=quickstart", "data.limit=760", "loop.epochs=2", "decode.prompts=30")
FIXED = ("decode.temperatures=[0,1]", "track=none", "export=null")
ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ("random", "kl")


class Counts(NamedTuple):
    """Sums over an arm's seeds for each prompt, in the order of the prompts."""

    sampled: tuple[list[float], list[float]]  # α at depth 0, T = 1: accepted, positions
    tau: tuple[list[float], list[float]]  # T = 0: tokens, passes

    @property
    def alpha(self) -> float:
        return ratio_interval(*self.sampled).value


def recipe(
    overrides: Annotated[Sequence[str], "of train.py for all arms, as data.limit=200"] = (),
    *,
    folder: Annotated[Path, "of the runs, inside runs/"] = Path("recipe"),
    seeds: int = 3,
    rates: Annotated[Sequence[str], "learning rates"] = ("1e-3", "2e-3"),
) -> None:
    """Four arms of start and objective, by seeds, each at the better of two learning rates.

    Trains the arms that `folder` lacks. After an interruption, the same command continues: finished
    runs are not trained again, the others are resumed.
    """
    arms = list(product(STARTS, OBJECTIVES))
    runs: dict[tuple[str, str, str], list[Results]] = {}
    todo = list(product(range(seeds), STARTS, OBJECTIVES, rates))
    for n, (seed, start, objective, rate) in enumerate(todo, 1):
        name = f"{folder}/{start}-{objective}-lr{rate}-seed{seed}"
        report = ROOT / "runs" / name / "report"
        if not (report / FILE).exists():
            console.print(f"run {n} of {len(todo)}: {name}")
            command = [sys.executable, "train.py", *SIZE, *FIXED, *overrides, f"name={name}"]
            command += [f"drafter.start={start}", f"objective={objective}"]
            command += [f"optim.lr={rate}", f"loop.seed={seed}"]
            if subprocess.run(command, cwd=ROOT).returncode:
                raise UserError(f"{name} failed: see above; the same command tries it again")
        runs.setdefault((start, objective, rate), []).append(Results.read(report))
    counts = {key: counted(found) for key, found in runs.items()}
    rate_of = {arm: max(rates, key=lambda rate: counts[*arm, rate].alpha) for arm in arms}
    best = {arm: counts[*arm, rate_of[arm]] for arm in arms}
    one = next(iter(runs.values()))[0]
    assert one.training is not None
    console.print(
        f"{one.training.tokens:,} tokens a run, {seeds} seeds, {one.prompts} held-out prompts of "
        f"up to {one.max_new_tokens} new tokens, γ = {one.temperatures[0].gamma}; {one.machine}. "
        "Intervals are 95 % bootstraps over prompts, whose counts are added over the seeds."
    )
    rows = []
    for (start, objective, rate), of in counts.items():
        arm, alpha = (start, objective), ratio_interval(*of.sampled)
        alone = " ".join(f"{counted([r]).alpha:.3f}" for r in runs[start, objective, rate])
        chosen = rate == rate_of[arm]
        above = ""
        if chosen and arm != PUBLISHED:
            above = str(difference_interval(of.sampled, best[PUBLISHED].sampled))
        rows.append(
            [*arm, f"{rate}{' (best)' * chosen}", str(alpha), alone, f"{alpha.n:,}"]
            + [str(ratio_interval(*of.tau)), above]
        )
    columns = ["start", "objective", "lr", "α sampled, depth 0", "of each seed", "n", "τ, T = 0"]
    show([*columns, "α above random and kl"], rows)
    pairs = [
        *(("random → target", f"objective {x}", ("target", x), ("random", x)) for x in OBJECTIVES),
        *(("kl → nla", f"start {x}", (x, "nla"), (x, "kl")) for x in STARTS),
        ("both", "", ("target", "nla"), PUBLISHED),
    ]
    brought = []  # what each part brings while the other stays, at the best rates
    for what, same, ours, theirs in pairs:
        both = zip(best[ours], best[theirs], strict=True)
        brought.append([what, same, *(str(difference_interval(a, b)) for a, b in both)])
    show(["what changes", "with", "α sampled, depth 0", "τ, T = 0"], brought)


def counted(seeds: Sequence[Results]) -> Counts:
    """The counts of the same prompts, added over the seeds of one arm."""

    def added(ats: Sequence[AtTemperature], count: Callable[[PromptCounts], float]) -> list[float]:
        columns = zip(*(at.prompts for at in ats), strict=True)
        return [sum(map(count, prompts)) for prompts in columns]

    greedy, sampled = zip(*(r.temperatures for r in seeds), strict=True)
    return Counts(
        (added(sampled, lambda p: p.sampled[0]), added(sampled, lambda p: p.positions[0])),
        (added(greedy, lambda p: p.emitted), added(greedy, lambda p: p.rounds)),
    )

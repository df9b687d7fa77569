"""What a recipe owes to where it starts and what to its objective: four arms at equal tokens.

Every arm is trained with every seed at every learning rate, a process each, and is then judged at
its own best rate. All drafts are measured on the same text: the target's plain answers, which do
not depend on the draft, so that arms are compared prompt by prompt and seed by seed.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benches.subject import console
from rich.table import Table

from specdec.errors import UserError
from specdec.measure.results import FILE, AtTemperature, PromptCounts, Results
from specdec.theory.intervals import Interval, difference_interval, ratio_interval

STARTS, OBJECTIVES = ("target", "random"), ("nla", "kl")
SIZE = ("experiment=quickstart", "data.limit=760", "loop.epochs=2", "decode.prompts=30")
FIXED = ("decode.temperatures=[0,1]", "track=none", "export=null")
ROOT = Path(__file__).resolve().parents[2]


class Arm(NamedTuple):
    start: str
    objective: str


class Counts(NamedTuple):
    """Sums over an arm's seeds for each prompt, in the order of the prompts."""

    sampled: tuple[list[float], list[float]]  # α at depth 0, T = 1: accepted, positions
    tau: tuple[list[float], list[float]]  # T = 0: tokens, passes


ARMS = [Arm(start, objective) for start in STARTS for objective in OBJECTIVES]
PUBLISHED = Arm("random", "kl")


def recipe(folder: Path, seeds: int, rates: Sequence[str], overrides: Sequence[str]) -> None:
    """Train what `folder` lacks of the arms, in runs/, and print the table. Interrupted, the same
    command goes on: a run that has its results is not trained again, another is resumed."""
    found: dict[tuple[Arm, str], list[Results]] = {}
    todo = list(product(range(seeds), ARMS, rates))
    for n, (seed, arm, rate) in enumerate(todo, 1):
        name = f"{folder}/{arm.start}-{arm.objective}-lr{rate}-seed{seed}"
        report = ROOT / "runs" / name / "report"
        if not (report / FILE).exists():
            console.print(f"run {n} of {len(todo)}: {name}")
            command = [sys.executable, "train.py", *SIZE, *FIXED, *overrides, f"name={name}"]
            command += [f"drafter.start={arm.start}", f"objective={arm.objective}"]
            command += [f"optim.lr={rate}", f"loop.seed={seed}"]
            if subprocess.run(command, cwd=ROOT).returncode:
                raise UserError(f"{name} failed: see above; the same command goes on after it")
        found.setdefault((arm, rate), []).append(Results.read(report))
    best = {
        arm: max(rates, key=lambda rate: _alpha(counted(found[arm, rate])).value) for arm in ARMS
    }
    console.print(_setting(next(iter(found.values()))[0], seeds))
    console.print(_table(found, rates, best))
    console.print(_parts({arm: counted(found[arm, best[arm]]) for arm in ARMS}))


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


def _alpha(counts: Counts) -> Interval:
    return ratio_interval(*counts.sampled)


def _setting(one: Results, seeds: int) -> str:
    assert one.training is not None
    return (
        f"{one.training.tokens:,} tokens a run, {seeds} seeds, {one.prompts} held-out prompts of "
        f"up to {one.max_new_tokens} new tokens, γ = {one.temperatures[0].gamma}; {one.machine}. "
        "Intervals are 95 % bootstraps over prompts, whose counts are added over the seeds."
    )


def _table(
    found: dict[tuple[Arm, str], list[Results]], rates: Sequence[str], best: dict[Arm, str]
) -> Table:
    """Every arm at every rate; the differences are to the published arm at its best rate."""
    table = Table(
        *("start", "objective", "lr", "α sampled, depth 0", "of each seed", "n", "τ, T = 0"),
        "α above random and kl",
    )
    published = counted(found[PUBLISHED, best[PUBLISHED]])
    for arm, rate in product(ARMS, rates):
        counts, chosen = counted(found[arm, rate]), rate == best[arm]
        alpha = _alpha(counts)
        alone = [f"{_alpha(counted([r])).value:.3f}" for r in found[arm, rate]]
        above = ""
        if chosen and arm != PUBLISHED:
            above = str(difference_interval(counts.sampled, published.sampled))
        table.add_row(
            *arm,
            f"{rate}{' (best)' * chosen}",
            str(alpha),
            " ".join(alone),
            f"{alpha.n:,}",
            str(ratio_interval(*counts.tau)),
            above,
        )
    return table


def _parts(best: dict[Arm, Counts]) -> Table:
    """What each part brings while the other stays, every arm at its best rate."""
    table = Table("what changes", "with", "α sampled, depth 0", "τ, T = 0")
    pairs = [
        ("random → target", Arm("target", x), Arm("random", x), f"objective {x}")
        for x in OBJECTIVES
    ]
    pairs += [("kl → nla", Arm(x, "nla"), Arm(x, "kl"), f"start {x}") for x in STARTS]
    pairs.append(("both", Arm("target", "nla"), PUBLISHED, ""))
    for what, ours, theirs, same in pairs:
        alpha = difference_interval(best[ours].sampled, best[theirs].sampled)
        tau = difference_interval(best[ours].tau, best[theirs].tau)
        table.add_row(what, same, str(alpha), str(tau))
    return table

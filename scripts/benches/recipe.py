"""Compares recipes at equal tokens: what initialisation and loss add, and which loss is best.

Every arm is trained with every seed at every learning rate, each time in its own process, and is
judged at its best rate. α is measured on the same text for all drafts, the target's vanilla
responses, which do not depend on the draft. Arms are compared prompt by prompt, with the counts of
each prompt added over the seeds.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

from benches.turns import show

from specdec.errors import UserError, require
from specdec.measure.results import FILE, PromptCounts, Results
from specdec.progress import console
from specdec.terminal import plain
from specdec.theory.intervals import Interval, difference_interval, ratio_interval, share_interval

INITIALISATIONS, LOSSES = ("closed_form", "target", "random"), ("nla", "kl")
SIZE = ("experiment=quickstart", "data.limit=760", "loop.epochs=2", "decode.prompts=30")
FIXED = ("decode.temperatures=[0,1]", "decode.fastest=false", "combine_with=null")
FIXED += ("track=none", "export=null")
# Which products use packed weights is found by timing, so in bfloat16 the target's responses could
# be others in each process.
FIXED += ("target.packed=false",)
ROOT = Path(__file__).resolve().parents[2]
DEPTHS = 3  # number of depths for which α is shown
Counts = tuple[list[float], list[float]]  # numerators and denominators, one of each per prompt


@dataclass
class Arm:
    """The runs of one arm at one learning rate, one for each seed. Figures are counts per prompt,
    added over the seeds; index `at` is 0 for T = 0 and 1 for T = 1."""

    name: str
    rate: str
    runs: list[Results]

    def counts(
        self, at: int, of: Callable[[PromptCounts], float], per: Callable[[PromptCounts], float]
    ) -> Counts:
        columns = [*zip(*(r.asked[at].prompts for r in self.runs), strict=True)]
        return [sum(map(of, x)) for x in columns], [sum(map(per, x)) for x in columns]

    def sampled(self, depth: int = 0) -> Counts:
        return self.counts(1, lambda p: p.sampled[depth], lambda p: p.positions[depth])

    def greedy(self, depth: int = 0) -> Counts:
        return self.counts(0, lambda p: p.greedy[depth], lambda p: p.positions[depth])

    def tau(self) -> Counts:
        """τ of the decoder at T = 0."""
        return self.counts(0, lambda p: p.emitted, lambda p: p.speculation_steps)

    def walked(self, at: int) -> Counts:
        """Simulated τ: that of a decoder replayed over the vanilla responses."""
        return self.counts(at, lambda p: p.walked[0], lambda p: p.walked[1])

    @property
    def alpha(self) -> Interval:
        return share_interval(*self.sampled())

    @property
    def of_each_seed(self) -> str:
        each = (Arm(self.name, self.rate, [run]).alpha.value for run in self.runs)
        return " ".join(f"{alpha:.3f}" for alpha in each)


class Refused(UserError):
    """Raised for a run with a wrong configuration, such as a drafter for another target."""


def report_of(name: str, overrides: Sequence[str], own: Sequence[str], said: str) -> Results:
    """The report of runs/NAME. If that run is not finished, print `said` and train it, at size
    `SIZE`, with the `overrides` of all runs and its `own` ones. Raises UserError if that fails."""
    report = ROOT / "runs" / name / "report"
    if not (report / FILE).exists():
        console.print(f"{said}: {name}")
        command = [sys.executable, "train.py", *SIZE, *FIXED, *overrides, f"name={name}", *own]
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        lines = (done.stderr or "").splitlines()
        if done.returncode == 2 and lines and lines[-1].startswith("error: "):
            raise Refused(f"runs/{name}: {lines[-1].removeprefix('error: ')}")
        print(plain(done.stderr or ""), end="", file=sys.stderr)
        if done.returncode:
            raise UserError(f"runs/{name} failed: see above; the same command tries it again")
    return Results.load(report)


def tokens_of_each(runs: Iterable[Results], folder: Path) -> int:
    """The number of tokens on which each of the runs in `folder` was trained. Raises UserError
    unless they trained the same drafter on equally many tokens."""
    alike = {(run.drafter, run.training.tokens) for run in runs if run.training}
    require(
        len(alike) == 1,
        f"the runs in runs/{folder} did not all train the same drafter on equally many tokens: "
        "give another --folder",
    )
    return alike.pop()[1]


def trained(
    arms: Mapping[str, Sequence[str]],
    overrides: Sequence[str],
    folder: Path,
    seeds: int,
    rates: Sequence[str],
) -> tuple[list[Arm], dict[str, Arm]]:
    """Train the runs that `folder` lacks, and print the common settings of all runs. `arms` has the
    overrides of each arm. Returns every arm at every rate, and each arm at its best rate: the one
    with the highest sampled α at depth 0."""
    runs: dict[tuple[str, str], list[Results]] = {}
    todo = list(product(range(seeds), arms, rates))
    for n, (seed, arm, rate) in enumerate(todo, 1):
        name = f"{folder}/{arm}-lr{rate}-seed{seed}"
        own = [*arms[arm], f"optim.lr={rate}", f"loop.seed={seed}"]
        made = report_of(name, overrides, own, f"run {n} of {len(todo)}")
        runs.setdefault((arm, rate), []).append(made)
    found = [Arm(arm, rate, of) for (arm, rate), of in runs.items()]
    first = found[0].runs[0]
    # the seed orders the rows, whose lengths differ: only runs of one seed read equally many tokens
    tokens = [tokens_of_each([arm.runs[seed] for arm in found], folder) for seed in range(seeds)]
    counts = ", ".join(f"{n:,}" for n in dict.fromkeys(tokens))
    console.print(
        f"{first.drafter}, {counts} tokens a run, {seeds} seeds, {first.prompts} "
        f"held-out prompts of up to {first.max_new_tokens} new tokens, γ = "
        f"{first.asked[0].way.gamma}; {first.machine}. Intervals are 95 % intervals over "
        "prompts, whose counts are added over the seeds."
    )
    best = {
        name: max((arm for arm in found if arm.name == name), key=lambda arm: arm.alpha.value)
        for name in arms
    }
    return found, best


def recipe(
    overrides: Annotated[Sequence[str], "of train.py for all arms, e.g. data.limit=200"] = (),
    *,
    folder: Annotated[Path, "of the runs, inside runs/"] = Path("recipe"),
    seeds: int = 3,
    rates: Annotated[Sequence[str], "learning rates"] = ("3e-4", "1e-3", "2e-3"),
) -> None:
    """Six arms of initialisation and loss, over several seeds, each at its best learning rate.

    Trains the runs that `folder` lacks. After an interruption, the same command continues: finished
    runs are not trained again, and the others are resumed.
    """
    arms = {
        f"{initialisation}-{loss}": [f"drafter.initialisation={initialisation}", f"loss={loss}"]
        for initialisation, loss in product(INITIALISATIONS, LOSSES)
    }
    found, best = trained(arms, overrides, folder, seeds, rates)
    published, rows = best["random-kl"], []
    for arm in found:
        chosen, above = arm is best[arm.name], ""
        if chosen and arm is not published:
            above = str(difference_interval(arm.sampled(), published.sampled()))
        rows.append(
            [*arm.name.split("-"), f"{arm.rate}{' (best)' * chosen}", str(arm.alpha)]
            + [arm.of_each_seed, f"{arm.alpha.n:,}", str(ratio_interval(*arm.tau())), above]
        )
    columns = [
        "initialisation",
        "loss",
        "lr",
        "α sampled, depth 0",
        "of each seed",
        "n",
        "τ, T = 0",
    ]
    show([*columns, "α above random and kl"], rows)
    pairs = [
        *(
            (f"random → {to}", f"loss {x}", f"{to}-{x}", f"random-{x}")
            for to in INITIALISATIONS[:2]
            for x in LOSSES
        ),
        *(("kl → nla", f"start {x}", f"{x}-nla", f"{x}-kl") for x in INITIALISATIONS),
        *((f"random → {to}, kl → nla", "", f"{to}-nla", "random-kl") for to in INITIALISATIONS[:2]),
    ]
    brought = []  # the gain from changing one part, or both; every arm is at its best rate
    for what, same, ours, theirs in pairs:
        a, b = best[ours], best[theirs]
        more = difference_interval(a.sampled(), b.sampled()), difference_interval(a.tau(), b.tau())
        brought.append([what, same, *map(str, more)])
    show(["what changes", "with", "α sampled, depth 0", "τ, T = 0"], brought)


def bits(
    overrides: Annotated[Sequence[str], "of train.py for all arms, e.g. data.limit=200"] = (),
    *,
    folder: Annotated[Path, "of the runs, inside runs/"] = Path("bits"),
    seeds: int = 3,
) -> None:
    """The loss of quality from hidden states stored in 8 bits, at equal tokens, over several seeds.

    Trains the runs that `folder` lacks, and continues after an interruption, as recipe does.
    """
    arms = {"plain": ["hidden_states.bits=null"], "eight": ["hidden_states.bits=8"]}
    _, best = trained(arms, overrides, folder, seeds, ("null",))
    plain_arm, eight = best["plain"], best["eight"]
    rows = []
    for name, of in {"α sampled, depth 0": Arm.sampled, "τ, T = 0": Arm.tau}.items():
        each = [str(ratio_interval(*of(arm))) for arm in (plain_arm, eight)]
        rows.append([name, *each, str(difference_interval(of(eight), of(plain_arm)))])
    show(["figure", "plain", "8 bits", "8 bits above plain"], rows)


def losses(
    overrides: Annotated[Sequence[str], "of train.py for all arms, e.g. drafter=NAME"] = (),
    *,
    folder: Annotated[Path, "of the runs, inside runs/; one per drafter"] = Path("losses"),
    arms: Annotated[Sequence[str], "losses; the others are compared with the first"] = (
        *("kl", "nla", "lk_hybrid", "tv", "reverse_kl", "jsd", "ce", "top_k"),
        *("d_pace", "expected_length"),
    ),
    seeds: int = 3,
    rates: Annotated[Sequence[str], "learning rates; null is the family's own"] = ("null",),
) -> None:
    """Losses for one drafter at equal tokens, over several seeds, each at its best rate.

    Trains the runs that `folder` lacks, and continues after an interruption, as recipe does.
    Simulated τ replays a decoder over the vanilla responses: its actual τ at T = 0, and its
    expected τ at T = 1. An arm may have its own overrides, as in "adaspec
    loss.reference=runs/NAME/best".
    """
    named = {arm.split()[0]: f"loss={arm}".split() for arm in arms}
    _, best = trained(named, overrides, folder, seeds, rates)
    first = next(iter(best.values()))
    deep = range(min(DEPTHS, len(first.runs[0].asked[0].prompts[0].positions)))
    figures: dict[str, Callable[[Arm], Counts]] = {}
    figures |= {f"α sampled, depth {k}": partial(Arm.sampled, depth=k) for k in deep}
    figures |= {f"α greedy, depth {k}": partial(Arm.greedy, depth=k) for k in deep}
    figures |= {f"τ walked, T = {at}": partial(Arm.walked, at=at) for at in (0, 1)}
    rows, above = [], []
    for arm in best.values():
        rows.append([arm.name, arm.rate, *(str(ratio_interval(*f(arm))) for f in figures.values())])
        rows[-1].append(arm.of_each_seed)
        if arm is not first:
            more = (str(difference_interval(f(arm), f(first))) for f in figures.values())
            above.append([arm.name, arm.rate, *more])
    show(["loss", "lr", *figures, "α sampled, depth 0, of each seed"], rows)
    show([f"above {first.name}", "lr", *figures], above)

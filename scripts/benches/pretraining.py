"""Pretraining on text without the target: does it help the run that continues?

Compares at equal seconds of training steps. Two short runs measure tokens/s with and without the
target, and these rates set each run's loop.max_tokens. The short run with the target computes the
hidden states in its steps (hidden_states.mode=online); later runs with the target read the same
states from a store, which all seeds share.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from benches import recipe
from benches.recipe import Arm, Counts
from benches.turns import show

from specdec.errors import require
from specdec.integrity import of_value
from specdec.measure.results import Results, Training
from specdec.progress import console
from specdec.theory.intervals import difference_interval, ratio_interval

ALIKE = ("budget.minutes=null", "decode.gamma=3", "serve_in=null")
ALIKE += ("loop.epochs=1000", "loop.eval_every=0", "loop.save_every=0")
ALONE = ("data.responses=data", "data.too_long=truncate", "hidden_states.mode=none")
UNMEASURED = ("decode.prompts=2",)  # such a run shows a speed or a held-out τ, not a served one
TIMED = 6_000  # tokens of a run that measures tokens/s


def pretraining(
    overrides: Annotated[Sequence[str], "of train.py for all runs, e.g. drafter=NAME"] = (),
    *,
    folder: Annotated[Path, "of the runs, inside runs/; one per drafter"] = Path("pretraining"),
    seconds: Annotated[int, "of training steps for each arm and seed"] = 120,
    percent: Annotated[int, "of these seconds for pretraining"] = 50,
    seeds: int = 3,
    text: Annotated[Sequence[str], "overrides of pretraining alone, such as its loss"] = (
        "loss=ce",
    ),
    start: Annotated[
        Sequence[str], "overrides of both stages with pretraining: drafter.initialisation=random"
    ] = (),
) -> None:
    """Pretraining on text without the target, then the default, against the default alone.

    At equal seconds of training steps, over several seeds. Pretraining reads the data's own
    responses (hidden_states.mode=none); the default trains on the target's, and the target's
    forward pass over a token counts whenever that token is trained on, so give enough data that no
    run reads a text twice. Writing the responses and least squares do not count. Trains the runs
    that `folder` lacks, and continues after an interruption, as recipe does. Simulated τ replays a
    decoder over the vanilla responses.
    """
    require(
        0 < percent < 100, f"--percent {percent}: give 1 to 99, so that both kinds of training run"
    )
    require(seeds >= 1 and seconds >= 1, f"--seeds {seeds} --seconds {seconds}: give 1 or more")
    alone, asked = [*ALONE, *start, *text], [*ALIKE, *overrides]
    # runs of other settings are not reused
    folder = folder / of_value([alone, asked, [*start]])[:8]

    def made(name: str, own: Sequence[str]) -> Results:
        return recipe.report_of(f"{folder}/{name}", asked, own, "pretraining against the default")

    def speed(name: str, own: Sequence[str]) -> float:
        short = [*own, f"loop.max_tokens={TIMED}", *UNMEASURED]
        return training_of(made(f"speed-{name}", short)).tokens_per_second

    of_text, of_target = speed("text", alone), speed("target", ["hidden_states.mode=online"])
    rest = seconds * (1 - percent / 100)
    first_part = f"loop.max_tokens={round(of_text * (seconds - rest))}"
    whole, second_part = (f"loop.max_tokens={round(of_target * x)}" for x in (seconds, rest))
    before, default, after = list[Results](), list[Results](), list[Results]()
    for seed in range(seeds):
        of_seed = f"loop.seed={seed}"
        default.append(made(f"default-{seconds}s-seed{seed}", [whole, of_seed]))
        name = f"text-{percent}of{seconds}s-seed{seed}"
        before.append(made(name, [*alone, first_part, of_seed, *UNMEASURED]))
        best = recipe.ROOT / "runs" / folder / name / "best"
        after.append(made(f"after-{name}", [*start, f"drafter.from={best}", second_part, of_seed]))

    # Compared by the positions in their vanilla responses. A run leaves out held-out prompts that
    # nearly repeat a text of the draft that it starts from.
    measured = {str([p.positions for p in run.asked[0].prompts]) for run in (*default, *after)}
    require(
        len(measured) == 1,
        f"the runs in runs/{folder} did not all measure the same prompts, since some nearly repeat "
        "texts of pretraining: give another data.limit, and another --folder",
    )
    first = default[0]
    tau = ", ".join(f"{training_of(run).held_out.tau_greedy:.2f}" for run in before)
    console.print(
        f"{first.drafter}, {seconds} seconds of training steps at {of_text:,.0f} tokens/s without "
        f"the target and {of_target:,.0f} with it; {seeds} seeds, {first.prompts} held-out prompts "
        f"of up to {first.max_new_tokens} new tokens, γ = {first.asked[0].way.gamma}; "
        f"{first.machine}. Intervals are 95 % intervals over prompts, whose counts are added over "
        f"the seeds. After pretraining alone, held-out τ at T = 0 is {tau}."
    )
    base, ours = Arm("default", "", default), Arm("pretrained", "", after)
    figures: dict[str, Callable[[Arm], Counts]] = {"τ, T = 0": Arm.tau}
    figures |= {f"τ simulated, T = {at}": partial(Arm.walked, at=at) for at in (0, 1)}
    figures |= {"α sampled, depth 0": Arm.sampled}
    rows = []
    for arm, stages in ((base, [default]), (ours, [before, after])):
        read = [sum(training_of(run).tokens for run in runs) / seeds for runs in stages]
        each = [ratio_interval(*Arm(arm.name, "", [run]).tau()).value for run in arm.runs]
        cells = [str(ratio_interval(*of(arm))) for of in figures.values()]
        rows.append([arm.name, " + ".join(f"{tokens:,.0f}" for tokens in read), *cells])
        rows[-1].append(" ".join(f"{value:.3f}" for value in each))
    show(["", "tokens a run", *figures, "τ, T = 0, of each seed"], rows)
    above = [str(difference_interval(of(ours), of(base))) for of in figures.values()]
    show(["", *figures], [["pretrained above default", *above]])


def training_of(run: Results) -> Training:
    """The training of a run that trained."""
    assert run.training is not None
    return run.training

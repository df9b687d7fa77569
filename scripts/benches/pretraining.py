"""Pretraining on text without the target, at equal minutes: does it help the run that continues?

Minutes are those of training steps, and the target's forward passes for hidden states count as a
part of them. A short run of each kind measures its tokens/s, from which follow the tokens that each
run trains on: the machine's load during one run does not decide how long that run is. The seconds
that the runs took are shown beside the figures.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from benches import recipe
from benches.recipe import Arm, Counts
from benches.turns import show

from specdec.errors import require
from specdec.measure.results import Results, Training
from specdec.progress import console
from specdec.theory.intervals import difference_interval, ratio_interval

# No store: else the target's forward passes would not be among the training steps.
ALIKE = ("budget.minutes=null", "hidden_states.mode=online", "decode.gamma=3", "serve_in=null")
ALIKE += ("loop.epochs=1000", "loop.eval_every=0", "loop.save_every=0")
ALONE = ("data.responses=data", "data.too_long=truncate", "hidden_states.mode=none")
UNMEASURED = ("decode.prompts=2",)  # such a run shows a speed or a held-out τ, not a served one
TIMED = 12_000  # tokens of a run that measures tokens/s


def pretraining(
    overrides: Annotated[Sequence[str], "of train.py for all runs, e.g. drafter=NAME"] = (),
    *,
    folder: Annotated[Path, "of the runs, inside runs/; one per drafter"] = Path("pretraining"),
    seconds: Annotated[int, "of training steps for each arm and seed"] = 120,
    percent: Annotated[int, "of these seconds for pretraining"] = 50,
    seeds: int = 3,
    loss: Annotated[str, "of pretraining, which reads only the text's own tokens"] = "ce",
    start: Annotated[
        Sequence[str], "overrides of both stages with pretraining: drafter.initialisation=random"
    ] = (),
) -> None:
    """Pretraining on text without the target, then the default, against the default alone.

    At equal seconds of training steps, over several seeds. Pretraining reads the data's own
    responses (hidden_states.mode=none); the default trains on the target's, and the target reads
    them in its steps. Writing these responses is not counted. Trains the runs that `folder` lacks,
    and continues after an interruption, as recipe does. Simulated τ replays a decoder over the
    vanilla responses.
    """
    require(percent < 100, f"--percent {percent}: give 99 or less, so that the default trains too")
    alone, asked = [*ALONE, f"loss={loss}", *start], [*ALIKE, *overrides]

    def made(name: str, own: Sequence[str]) -> Results:
        return recipe.report_of(f"{folder}/{name}", asked, own, "pretraining against the default")

    def speed(name: str, own: Sequence[str]) -> float:
        short = [*own, f"loop.max_tokens={TIMED}", *UNMEASURED]
        return training_of(made(f"speed-{name}", short)).tokens_per_second

    of_text, of_target = speed("text", alone), speed("target", [])
    rest = seconds * (1 - percent / 100)
    text = f"loop.max_tokens={round(of_text * (seconds - rest))}"
    whole, part = (f"loop.max_tokens={round(of_target * x)}" for x in (seconds, rest))
    before, default, after = list[Results](), list[Results](), list[Results]()
    for seed in range(seeds):
        of_seed = f"loop.seed={seed}"
        default.append(made(f"default-{seconds}s-seed{seed}", [whole, of_seed]))
        name = f"text-{percent}of{seconds}s-seed{seed}"
        before.append(made(name, [*alone, text, of_seed, *UNMEASURED]))
        best = recipe.ROOT / "runs" / folder / name / "best"
        own = [*start, f"drafter.from={best}", part, of_seed]
        after.append(made(f"after-{name}", own))

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
        tokens, took = (
            " + ".join(
                f"{sum(of(training_of(run)) for run in runs) / seeds:,.0f}" for runs in stages
            )
            for of in (lambda x: x.tokens, lambda x: x.seconds)
        )
        each = [Arm(arm.name, "", [run]).tau() for run in arm.runs]
        of_each = " ".join(f"{ratio_interval(*counts).value:.3f}" for counts in each)
        cells = [str(ratio_interval(*of(arm))) for of in figures.values()]
        rows.append([arm.name, tokens, took, *cells, of_each])
    columns = ["", "tokens a run", "seconds a run", *figures, "τ, T = 0, of each seed"]
    show(columns, rows)
    above = [str(difference_interval(of(ours), of(base))) for of in figures.values()]
    show(["", *figures], [["pretrained above default", *above]])


def training_of(run: Results) -> Training:
    """The training of a run that trained."""
    assert run.training is not None
    return run.training

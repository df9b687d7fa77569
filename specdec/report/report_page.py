"""The tables of a report, for experts, after its first screen. Headings of the third level are
folded in HTML."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from specdec.measure.results import Measured, Results, Slice, Training
from specdec.measure.slices import ENOUGH
from specdec.plugins import Plugins
from specdec.report import first, theory, verdict
from specdec.report.markdown import by_temperature, claimed, escaped, remarked, table
from specdec.theory.intervals import FEWEST

FASTEST = ", also the topology expected to be fastest"
VARIANTS = {
    "sampled": "sampled, Σ min(p, q)",
    "greedy_draft": "greedy-draft, p(argmax q)",
    "greedy": "greedy, argmax p = argmax q",
}
# Blocks of Markdown about the results, in the section on theory
FIGURES: Plugins[Callable[[Results], list[str]]] = Plugins(
    "draftsmith.report_figures", "figure of the report", {"theory": theory.section}
)


def page(results: Results, pictures: Mapping[str, Path]) -> str:
    """The complete report. Texts in the results are shown verbatim, never as markup."""
    blocks = first.screen(results, pictures.get("speedup"))
    results = escaped(results)
    FIGURES.add_installed()
    sections = {
        "Speed and τ": [*_speed(results), *_picture("accepted", pictures)],
        "Acceptance by depth": [*_picture("alpha", pictures), *_acceptance(results)],
        "Where drafting pays": _slices(results),
        "The other ways": [
            block for name, ats in results.others.items() for block in _other(name, ats, results)
        ],
        "Costs": _costs(results),
        "Confidence": [*_picture("reliability", pictures), *_confidence(results)],
        "Training": [*_picture("training", pictures), *_training(results)],
        "What theory says": [block for name in FIGURES for block in FIGURES[name](results)],
        "Setting and machine": [_setting(results), f"Machine: {results.machine}."],
    }
    blocks += [
        "## All figures",
        "“Reading a report” (docs/report.md in Draftsmith's repository) explains them.",
    ]
    for heading, section in sections.items():
        if section:
            blocks += [f"### {heading}", *section]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _picture(name: str, pictures: Mapping[str, Path]) -> list[str]:
    return [f"![{name}]({pictures[name].name})"] if name in pictures else []


def _setting(results: Results) -> str:
    """A paragraph on the conditions of the measurement."""
    shapes = [one.way.shape for one in results.asked]
    drafted = shapes[0]
    if len(set(shapes)) > 1:
        ats = zip(shapes, results.asked, strict=True)
        drafted = ", ".join(f"{shape} at T = {one.way.temperature:g}" for shape, one in ats)
    batches = ", or over batches for times" * (results.batch > 1)
    over = f"{len({*results.conversations})} conversations" if results.conversations else "prompts"
    intervals = f"Brackets are 95 % intervals over {over}{batches}."
    prompts = results.origin
    if results.prompts == 1:
        prompts = prompts.replace("prompts", "prompt", 1)
    if results.prompts < FEWEST:
        intervals = f"With fewer than {FEWEST} prompts there are no intervals."
    rendered = "" if results.rendering.is_default else f", rendered with {results.rendering}"
    return (
        f"{results.prompts} {prompts} ({results.data}{rendered}), "
        f"up to {results.max_new_tokens} new tokens, batch {results.batch}, "
        f"drafting {drafted}{', compiled' * results.asked[0].way.compiled}. {intervals} "
        "Timed prompts are decoded plainly and speculatively in turn, in one process; times cover "
        "the tokens after the first, which prefill emits, and the draft's own prefill."
        f"{_timed(results)}{_processes_note(results)}"
    )


def _timed(results: Results) -> str:
    """A sentence on the prompts that were timed, if not all were."""
    if results.timed_prompts == results.prompts:
        return ""
    return (
        f" Seconds come from the first {results.timed_prompts} prompts; "
        f"the others were decoded up to {results.counting} together, and add "
        "to τ and to all counts."
    )


def _processes_note(results: Results) -> str:
    """A sentence on the processes that measured, if there were several."""
    if results.processes == 1:
        return ""
    return (
        f" {results.processes} processes shared the prompts out; times are those of the first "
        f"process on the first {results.timed_prompts} prompts, while the others waited."
    )


def _shifted(results: Results) -> str:
    """A paragraph on the distance of the target from the original, if it was trained too."""
    if (shift := results.shift) is None:
        return ""
    return (
        f"The target was trained along with the draft: decoding is lossless with respect to the "
        f"adapted target, not to {shift.original}. Over the original's greedy responses to these "
        f"prompts, KL(original ‖ adapted) is {shift.kl.text(4)} nats a token. The "
        f"share of responses that stay the same is {shift.same.text(2)}."
    )


def _speed(results: Results) -> list[str]:
    """The section on the requested decoding configuration."""
    return [
        _shifted(results),
        by_temperature(results.asked, lambda one: _headline(one, results)),
        *(line for one in results.asked for line in _learned(one, results.learned_on)),
    ]


def _headline(one: Measured, results: Results) -> dict[str, str]:
    rows = _counted(one, results)
    rows["speedup predicted by τ / (γc + v)"] = theory.foreseen_speedup(one).text(2)
    if (known := one.oracle) is not None:
        rows["speedup of an oracle length, with the same c and v"] = f"{known.speedup:.2f}"
        rows["the same with the best fixed γ"] = (
            f"{known.fixed_speedup:.2f} with γ = {known.fixed_gamma}"
        )
        rows[f"speculation steps of up to {known.drafted} tokens behind the oracle"] = (
            f"{known.speculation_steps:,}, {known.censored:.0%} in full"
        )
    return rows


def _counted(one: Measured, results: Results) -> dict[str, str]:
    way = one.way
    if one.identical is None:
        same = (
            "the same distribution"
            if way.lossless
            else f"another distribution ({way.verification})"
        )
    else:
        why = "" if results.machine.dtype == "float32" else " (near-ties flip outside float32)"
        why = why if way.lossless else f" ({way.verification} is lossy)"
        same = f"{one.identical} of {results.prompts}{why}"
    at_most = way.drafter != results.drafter and way.draft_length == "fixed"
    rows = {
        "drafts": way.shape + " at most" * at_most + FASTEST * one.fastest,
        "**speedup over vanilla decoding**": claimed(
            one.speedup.text(2), results.times_without_interval
        ),
    }
    if results.timed_prompts < results.prompts:
        rows["speedup on the timed prompts alone"] = one.timed_speedup.text(2)
    return rows | {
        "τ (tokens per target pass, pooled)": remarked(one.tau.text(), results.without_interval),
        "tokens/s, speculative": one.tokens_per_second.text(1),
        "tokens/s, plain": one.plain_tokens_per_second.text(1),
        "speculation steps": f"{one.speculation_steps:,}",
        "verification": f"{way.verification} ({'lossless' if way.lossless else '**LOSSY**'})",
        "same tokens as vanilla decoding": same,
        "repeated 4-grams in the responses": one.repetition.text(2),
    }


def _learned(one: Measured, learned_on: str) -> list[str]:
    """The choices made by measurements, at each temperature, and their prompts."""
    where = f"for T = {one.way.temperature:g} on {learned_on}, at that temperature"
    learned, lines = one.learned, []
    if learned.paths:
        kind = "chain" if one.way.chain else "tree"
        lines.append(f"The {kind} was chosen {where}: {learned.paths}.")
    if learned.acceptance_by_rank:
        shares = "; ".join(
            f"depth {d}: " + " ".join(f"{a:.2f}" for a in ranks)
            for d, ranks in enumerate(learned.acceptance_by_rank)
        )
        lines.append(f"The choice rests on this acceptance by rank: {shares}.")
    if learned.c is not None and learned.v is not None:
        costs = f"c = {learned.c.text()} and v = {learned.v.text(2)}"
        lines.append(f"The length `optimal` was told {costs}, measured {where}.")
    if (figures := learned.figures) is not None:
        summary = figures.summary.replace("{where}", where).removesuffix(".")
        lines.append(f"{summary}: see {figures.stem}-T{one.way.temperature:g}.json.")
    return lines


def _other(name: str, ats: Sequence[Measured], results: Results) -> list[str]:
    """The section on another decoding configuration that took turns with the first on the same
    prompts."""
    if ats[0].way.drafter != results.drafter:
        return [
            f"#### {name.capitalize()}",
            by_temperature(ats, lambda one: _counted(one, results)),
        ]
    return [
        "#### In the shape expected to be fastest",
        by_temperature(ats, lambda one: _headline(one, results)),
        *(line for one in ats for line in _learned(one, results.learned_on)),
    ]


def _acceptance(results: Results) -> list[str]:
    parts = ((f"#### T = {o.way.temperature:g}", _by_depth(o), _compare(o)) for o in results.asked)
    return [block for part in parts for block in part]


def _slices(results: Results) -> list[str]:
    """τ, break-even and verdict of each slice, in the configuration served at each temperature."""
    columns = ["prompts", "τ", "break-even τ", "speedup", "by the clock", "verdict"]
    if results.conversations:
        columns.insert(1, "conversations")
    blocks = []
    for one in verdict.shown_ways(results):
        if not one.slices:
            continue
        name = verdict.named(one.way, results)
        blocks.append(f"#### {name[0].upper()}{name[1:]}, T = {one.way.temperature:g}")
        several = bool(results.conversations)
        rows = {name: _slice_cells(x, several) for name, x in one.slices.items()}
        blocks.append(table("", columns, rows))
        blocks.append(_slices_read([*one.slices.values()], results))
    return blocks


def _slice_cells(one: Slice, conversations: bool) -> list[str]:
    said = one.verdict or ("too few" if one.conversations < ENOUGH else "no interval")
    timed = "—" if one.timed_speedup is None else one.timed_speedup.text(2)
    figures = one.tau.text(2), one.break_even.text(2), one.speedup.text(2), timed
    counted = [f"{one.prompts}", *[f"{one.conversations}"] * conversations]
    return [*counted, *figures, f"**{said}**" if one.corrected else said]


def _slices_read(slices: Sequence[Slice], results: Results) -> str:
    """How to read the table, and what the clock says about it."""
    timed = [(x.speedup, x.timed_speedup) for x in slices if x.timed_speedup is not None]
    agree = sum(a.low <= b.high and b.low <= a.high for a, b in timed)
    clock = (
        f" In {agree} of the {len(timed)} slices with timed prompts, the interval by their own "
        "clock overlaps that of the speedup."
    )
    judged = sum(bool(x.verdict) for x in slices)
    chance = (
        f" Of the verdicts on {judged} slices, about one in twenty is wrong by chance; those in "
        "bold also hold after Bonferroni's correction."
    )
    known = (
        f"Slices of fewer than {ENOUGH} conversations have no verdict."
        if all(x.verdict or x.conversations < ENOUGH for x in slices)
        else "There is no verdict: so few timed prompts give the speedup no interval. Time prompts "
        f"of at least {FEWEST} conversations (`--timed`, or `decode.timed`)."
    )
    return (
        "Drafting pays where τ is above the break-even: the seconds of a speculation step over "
        f"those of a vanilla step, from {results.timed_prompts} timed prompts at batch "
        f"{results.batch}. The speedup is τ over the break-even. {known}"
        f"{chance if judged else ''}{clock if timed else ''}"
    )


def _by_depth(one: Measured) -> str:
    depths = range(one.way.gamma)
    shown = VARIANTS if one.way.temperature > 0 else {"greedy": VARIANTS["greedy"]}
    sides = {"all positions, given the text": one.alpha.all, "visited anchors": one.alpha.visited}
    figures = {
        f"{words}; {where}": getattr(alpha, variant)[: one.way.gamma]
        for where, alpha in sides.items()
        for variant, words in shown.items()
    }
    figures["**decoder's own count**"] = one.reached
    figures["decoder, given that all before were accepted"] = one.conditional_acceptance
    rows = {name: [x.text() for x in by_depth] for name, by_depth in figures.items()}
    rows["all positions, n"] = [f"{x.n:,}" for x in one.alpha.all.greedy[: one.way.gamma]]
    rows["visited anchors, n"] = [f"{x.n:,}" for x in one.alpha.visited.greedy[: one.way.gamma]]
    rows["speculation steps"] = [f"{one.speculation_steps:,}" for _ in depths]
    return table("", [f"depth {k}" for k in depths], rows)


def _compare(one: Measured) -> str:
    """A sentence on how to compare the rows at visited anchors with the decoder's own count."""
    if not one.way.lossless:
        return f"Verification by {one.way.verification} is lossy, and accepts more than α says."
    if not one.way.chain:
        return "α describes a chain at those anchors; the tree accepts more, thanks to siblings."
    if one.way.temperature == 0:
        return "In float32, the row at visited anchors and the decoder's own count are equal."
    if one.way.verification == "rejection":
        return "`rejection` should accept as often as the row at visited anchors says."
    return f"α describes `rejection`, and the decoder verifies by `{one.way.verification}`."


def _costs(results: Results) -> list[str]:
    """The costs of a speculation step for each draft topology. The costs of a second draft, such as
    a hybrid, change from step to step."""
    shapes: dict[tuple[int, int], Measured] = {}
    for one in results.measured:
        if one.way.drafter == results.drafter:
            shapes.setdefault((one.way.gamma, one.way.nodes), one)
    rows = {}
    for one in shapes.values():
        costs = one.costs
        step, verify, draft = map(
            theory.milliseconds, (costs.step_seconds, costs.verify_seconds, costs.draft_seconds)
        )
        cells = [step, verify, draft, costs.v.text(2), costs.c.text(), str(costs.c.n)]
        rows[f"{one.way.shape}"] = cells
    columns = ["plain step, ms", "verification, ms", "drafting, ms", "v", "c", "timings"]
    return [table("medians", columns, rows)]


def _confidence(results: Results) -> list[str]:
    """The section on confidence and acceptance, for drafts with confidence."""
    ats = [one for one in results.asked if one.confidence]
    if not ats:
        return []
    blocks = []
    if results.calibrated_on:
        blocks.append(f"The calibration was fitted to {results.calibrated_on} other prompts.")
    for one in ats:
        rows = {"accepted": [x.whole.observed.text() for x in one.confidence]}
        sides = {"as drafted": one.confidence, "calibrated": one.calibrated}
        for name, by_depth in sides.items():
            if by_depth:
                rows[f"confidence, {name}"] = [f"{x.whole.predicted:.3f}" for x in by_depth]
                rows[f"calibration error, {name}"] = [f"{x.error:.3f}" for x in by_depth]
        rows["tokens tested"] = [f"{x.whole.weight:,.0f}" for x in one.confidence]
        depths = [f"depth {k}" for k in range(len(one.confidence))]
        blocks.append(table(f"T = {one.way.temperature:g}", depths, rows))
    return blocks


def _training(results: Results) -> list[str]:
    cut = [] if results.cut is None else [str(results.cut)]
    if results.cut is not None and results.cut.sampling:
        cut.insert(0, f"The target's responses are {results.cut.sampling}.")
    if (training := results.training) is None:
        return cut
    held_out = training.held_out
    return [
        *cut,
        f"Loss: {training.trained_on}." if training.trained_on else "",
        f"{training.step:,} of {training.steps:,} steps, {training.tokens:,} tokens at "
        f"{training.tokens_per_second:,.0f} tokens/s. On held-out texts, the best checkpoint has a "
        f"simulated τ of {held_out.tau_greedy:.3f} (greedy) and "
        f"{held_out.tau_sampled:.3f} (sampled){_of_chains(held_out.gamma)}, over "
        f"{held_out.positions[0]:,} positions.",
        selection(training),
    ]


def selection(training: Training) -> str:
    """A sentence on the conversations on which the best checkpoint was selected."""
    if training.validation:
        return (
            f"The best checkpoint was selected on {training.validation:,} validation documents. "
            "None of them is among the prompts that are measured above."
        )
    return (
        "The best checkpoint was selected on the held-out conversations that are measured above, "
        "so their figures are slightly too high: fewer than 24 conversations are held out, or "
        "data.validation=0."
    )


def _of_chains(gamma: int) -> str:
    """The kind of chains behind a held-out τ, if it is known."""
    return f" in chains of γ = {gamma}" if gamma else ""

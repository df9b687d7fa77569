"""The sections of the report for people: its paragraphs, and the rows of its tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from specdec.measure.results import Measured, Results
from specdec.report import theory
from specdec.report.markdown import by_temperature, claimed, escaped, lines, remarked, table, text

VARIANTS = {
    "sampled": "sampled, Σ min(p, q)",
    "greedy_draft": "greedy-draft, p(argmax q)",
    "greedy": "greedy, argmax p = argmax q",
}
SAMPLES = 3


def page(results: Results, pictures: Mapping[str, Path]) -> str:
    """The whole report. It shows every text in the results as it is, never as markup."""
    samples = _samples(results.asked[0])
    results = escaped(results)
    blocks = [
        f"# {results.name}: {results.drafter} for {results.target}",
        _setting(results),
        f"Machine: {results.machine}.",
        shifted(results),
        by_temperature(results.asked, lambda at: _headline(at, results)),
        *_costs(results, results.asked),
        *(block for name, ats in results.others.items() for block in _other(name, ats, results)),
        *(line for at in results.asked for line in _learned(at, results.learned_on)),
        *_acceptance(results),
        *_confidence(results),
        "\n".join(f"![{name}]({path.name})" for name, path in pictures.items()),
        *theory.section(results),
        *_training(results),
        *samples,
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _setting(results: Results) -> str:
    """What was measured, in a paragraph."""
    shapes = [at.way.shape for at in results.asked]
    said = shapes[0]
    if len(set(shapes)) > 1:
        ats = zip(shapes, results.asked, strict=True)
        said = ", ".join(f"{shape} at T = {at.way.temperature:g}" for shape, at in ats)
    batches = ", or over batches for times" * (results.batch > 1)
    intervals = f"Intervals are 95 % bootstraps over prompts{batches}. "
    prompts = results.origin
    if results.prompts == 1:
        prompts = prompts.replace("prompts", "prompt", 1)
        intervals = "A single prompt shows no variation, so there are no intervals over prompts. "
    return (
        f"{results.prompts} {prompts} ({results.data}), "
        f"up to {results.max_new_tokens} new tokens, batch {results.batch}, "
        f"drafting {said}{', compiled' * results.asked[0].way.compiled}. {intervals}"
        "Plain and speculative decoding take turns in one process; times cover the tokens after "
        "the first, which the target's prefill emits, and include the draft's own prefill."
        f"{_shared(results)}"
    )


def _shared(results: Results) -> str:
    """Who measured what, if several processes did."""
    if results.processes == 1:
        return ""
    return (
        f" {results.processes} processes shared the prompts out; times are those of the first "
        f"process on the first {results.timed} prompts, while the others waited."
    )


def shifted(results: Results) -> str:
    """How far the target has moved, if it was trained too, in a paragraph."""
    if (shift := results.shift) is None:
        return ""
    return (
        f"The target was trained along with the draft: decoding is lossless with respect to the "
        f"adapted target, not to {shift.original}. Over the original's greedy answers to these "
        f"prompts, KL(original ‖ adapted) is {shift.kl.text(4)} nats a token. The "
        f"share of answers that stay the same is {shift.same.text(2)}."
    )


def _headline(at: Measured, results: Results) -> dict[str, str]:
    rows = _counted(at, results)
    rows["speedup predicted by τ / (γc + v)"] = theory.foreseen_speedup(at).text(2)
    if (known := at.oracle) is not None:
        rows["speedup of an oracle length, with the same c and v"] = (
            f"{known.speedup:.2f}, against {known.fixed_speedup:.2f} with the best fixed γ "
            f"({known.fixed_gamma}); {known.rounds:,} rounds of up to {known.drafted} tokens, "
            f"{known.censored:.0%} accepted in full"
        )
    return rows


def _counted(at: Measured, results: Results) -> dict[str, str]:
    if at.identical is None:
        same = (
            "the same distribution" if at.way.lossless else f"another distribution ({at.way.rule})"
        )
    else:
        why = "" if results.machine.dtype == "float32" else " (near-ties flip outside float32)"
        why = why if at.way.lossless else f" ({at.way.rule} is lossy)"
        same = f"{at.identical} of {results.prompts}{why}"
    return {
        "**speedup over plain decoding**": claimed(
            at.speedup.text(2), results.times_without_interval
        ),
        "τ (tokens per target pass, pooled)": remarked(at.tau.text(), results.without_interval),
        "tokens/s, speculative": at.tokens_per_second.text(1),
        "tokens/s, plain": at.plain_tokens_per_second.text(1),
        "rounds": f"{at.rounds:,}",
        "verification": f"{at.way.rule} ({'lossless' if at.way.lossless else '**LOSSY**'})",
        "same tokens as plain decoding": same,
        "repeated 4-grams in the answers": at.repetition.text(2),
    }


def _costs(results: Results, ats: Sequence[Measured]) -> list[str]:
    """A line for each shape of a way."""
    shapes: dict[tuple[int, int], Measured] = {}
    for at in ats:
        shapes.setdefault((at.way.gamma, at.way.nodes), at)
    lines = []
    for at in shapes.values():
        costs = at.costs
        step, verify, draft = map(
            theory.milliseconds, (costs.step_seconds, costs.verify_seconds, costs.draft_seconds)
        )
        lines.append(
            f"Costs ({at.way.shape}; medians of {costs.c.n} timings): a plain step {step} "
            f"ms, a verification of {at.way.nodes + 1} tokens {verify} ms (v = {costs.v.text(2)}), "
            f"drafting {at.way.nodes} tokens {draft} ms (c = {costs.c.text()})."
        )
    slowest = " and the wait for a batch's slowest row" * (results.batch > 1)
    own = f"The measured speedup falls short of τ / (γc + v) by the decoder's own time{slowest}."
    return [*lines, own]


def _other(name: str, ats: Sequence[Measured], results: Results) -> list[str]:
    """Another way of decoding that took turns with the first on the same prompts."""
    changes = ats[0].way.drafter != results.drafter  # from round to round
    said = "; ".join(
        f"{at.way.shape}{' at most' * (changes and at.way.length == 'fixed')} at T = "
        f"{at.way.temperature:g}, {at.speedup.value:.2f} times as fast as plain decoding, against "
        f"{first.speedup.value:.2f} for the {first.way.title} above"
        for at, first in zip(ats, results.asked, strict=True)
    )
    if changes:
        return [
            f"## {name.capitalize()}",
            f"This draft took turns with the one above on the same prompts: {said}. Its costs "
            "change from round to round, so no speedup is predicted.",
            by_temperature(ats, lambda at: _counted(at, results)),
        ]
    return [
        "## In the shape expected to be fastest",
        f"The same draft was also measured, in turn, in that shape: {said}. What an engine that "
        "drafts chains accepts is in the tables for chains.",
        by_temperature(ats, lambda at: _headline(at, results)),
        *_costs(results, ats),
        *(line for at in ats for line in _learned(at, results.learned_on)),
    ]


def _learned(at: Measured, learned_on: str) -> list[str]:
    """What was chosen by measuring first, at which temperature, and on what."""
    where = f"for T = {at.way.temperature:g} on {learned_on}, at that temperature"
    learned, lines = at.learned, []
    if learned.paths:
        kind = "chain" if at.way.chain else "tree"
        lines.append(f"The {kind} was chosen {where}: {learned.paths}.")
    if learned.acceptance_by_rank:
        shares = "; ".join(
            f"depth {d}: " + " ".join(f"{a:.2f}" for a in ranks)
            for d, ranks in enumerate(learned.acceptance_by_rank)
        )
        lines.append(f"The choice rests on this acceptance by rank: {shares}.")
    if learned.c is not None and learned.v is not None:
        given = f"c = {learned.c.text()} and v = {learned.v.text(2)}"
        lines.append(f"The length `optimal` was given {given}, measured {where}.")
    if learned.table is not None:
        lines.append(f"Rounds were timed {where}: see cost-table-T{at.way.temperature:g}.json.")
    if learned.classifier is not None:
        lines.append(
            f"The stop classifier was fitted {where}, to {learned.classifier.records:,} "
            f"drafted tokens: see stop-classifier-T{at.way.temperature:g}.json."
        )
    return lines


def _acceptance(results: Results) -> list[str]:
    blocks = [
        "## Acceptance",
        "α *over all positions* of the target's own text is not what a decoder sees: each round "
        "starts where the last one failed, and those anchors are harder. α *at visited anchors* is "
        "measured by teacher forcing at the anchors where this decoder's rounds started: the share "
        "of rounds that would accept depth k and all depths before it, as engines count it.",
    ]
    for at in results.asked:
        blocks += [f"### T = {at.way.temperature:g}", _by_depth(at), _compare(at)]
    return blocks


def _by_depth(at: Measured) -> str:
    depths = range(at.way.gamma)
    shown = VARIANTS if at.way.temperature > 0 else {"greedy": VARIANTS["greedy"]}
    sides = {"all positions, given the text": at.alpha.all, "visited anchors": at.alpha.visited}
    figures = {
        f"{words}; {where}": getattr(alpha, variant)[: at.way.gamma]
        for where, alpha in sides.items()
        for variant, words in shown.items()
    }
    figures["**decoder's own count**"] = at.reached
    figures["decoder, given that all before were accepted"] = at.conditional_acceptance
    rows = {name: [x.text() for x in found] for name, found in figures.items()}
    rows["all positions, n"] = [f"{x.n:,}" for x in at.alpha.all.greedy[: at.way.gamma]]
    rows["visited anchors, n"] = [f"{x.n:,}" for x in at.alpha.visited.greedy[: at.way.gamma]]
    rows["rounds"] = [f"{at.rounds:,}" for _ in depths]
    return table("", [f"depth {k}" for k in depths], rows)


def _compare(at: Measured) -> str:
    """How the rows at visited anchors and the decoder's own count should compare."""
    if not at.way.lossless:
        return f"The rule {at.way.rule} is lossy, and accepts more than α says."
    if not at.way.chain:
        return "α describes a chain at those anchors; the tree accepts more, thanks to siblings."
    if at.way.temperature == 0:
        return (
            "In float32 the row at visited anchors and the decoder's own count are equal, since "
            "they count the same rounds; in bfloat16 a near-tie may flip between the two passes."
        )
    if at.way.rule == "rejection":
        return "The rule `rejection` should accept as often as the row at visited anchors says."
    return (
        f"α describes the rule `rejection`; the decoder judges by `{at.way.rule}`, whose "
        "acceptance differs (that of `block` is never lower): see “What theory says”."
    )


def _confidence(results: Results) -> list[str]:
    """How far the draft's confidence is from acceptance, where it has confidence."""
    ats = [at for at in results.asked if at.confidence]
    if not ats:
        return []
    blocks = [
        "## Confidence",
        "Confidence is how likely the draft expects a drafted token to be accepted: its q, or the "
        "family's own estimate. "
        "It is compared with acceptance at visited anchors, at each depth given that all tokens "
        "before were accepted. The calibration error is the distance between the two in each of "
        "ten bins, averaged over tokens.",
    ]
    if results.calibrated_on:
        blocks.append(
            f"The calibration was fitted to {results.calibrated_on} other prompts. Lengths that "
            "stop by confidence, dynamic and best-first trees, and hybrids use it."
        )
    for at in ats:
        rows = {"accepted": [x.whole.observed.text() for x in at.confidence]}
        sides = {"as drafted": at.confidence, "calibrated": at.calibrated}
        for name, found in sides.items():
            if found:
                rows[f"confidence, {name}"] = [f"{x.whole.predicted:.3f}" for x in found]
                rows[f"calibration error, {name}"] = [f"{x.error:.3f}" for x in found]
        rows["tokens tested"] = [f"{x.whole.weight:,.0f}" for x in at.confidence]
        depths = [f"depth {k}" for k in range(len(at.confidence))]
        blocks.append(table(f"T = {at.way.temperature:g}", depths, rows))
    return blocks


def _training(results: Results) -> list[str]:
    if (training := results.training) is None:
        return []
    held_out = training.held_out
    return [
        "## Training",
        f"Objective: {training.trained_on}." if training.trained_on else "",
        f"{training.step:,} of {training.steps:,} steps, {training.tokens:,} tokens at "
        f"{training.tokens_per_second:,.0f} tokens/s. Measured by walking the anchors of held-out "
        f"texts, the best checkpoint has τ {held_out.tau_greedy:.3f} (greedy) and "
        f"{held_out.tau_sampled:.3f} (sampled), over {held_out.positions[0]:,} positions.",
    ]


def _samples(at: Measured) -> list[str]:
    """What the user said last, the turns before it, and the answer, at the first temperature."""
    blocks = [f"## Samples, T = {at.way.temperature:g}"]
    for sample in at.samples[:SAMPLES]:
        said = [lines(sample.prompt)]
        if sample.earlier:
            turns = [*sample.earlier, ("user", sample.prompt)]
            said = [f"**{text(role)}:** {lines(words)}" for role, words in turns]
        blocks.append("\n>\n".join(f"> {turn}".replace("\n", "\n> ") for turn in said))
        blocks.append(f"{lines(sample.answer)} *(τ {sample.tau:.2f})*")
    return blocks

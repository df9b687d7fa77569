"""The report for people, as Markdown with the plots beside it."""

from collections.abc import Mapping
from pathlib import Path

from specdec.measure.results import AtTemperature, Results
from specdec.report import theory
from specdec.report.tables import Cell, by_temperature, table

VARIANTS = {
    "sampled": "sampled, Σ min(p, q)",
    "greedy_draft": "greedy-draft, p(argmax q)",
    "greedy": "greedy, argmax p = argmax q",
}
SAMPLES = 3


def page(results: Results, pictures: Mapping[str, Path]) -> str:
    """The whole report."""
    lines = [
        f"# {results.name}: {results.drafter} for {results.target}",
        "",
        _setting(results),
        "",
        f"Machine: {results.machine}.",
        "",
        *_headline(results),
        "",
        *_costs(results),
        *_learned(results),
        *_acceptance(results),
        "",
        *(f"![{name}]({path.name})" for name, path in pictures.items()),
        *theory.section(results),
        *_training(results),
        *_samples(results),
    ]
    return "\n".join(lines) + "\n"


def drafted(results: Results, at: AtTemperature) -> str:
    """What a round drafts, in words."""
    shape = f"chains of γ = {at.gamma}"
    if not at.chain:
        shape = f"a {results.tree} tree of {at.nodes} nodes, depth {at.gamma}"
    return shape if results.length == "fixed" else f"{shape} at most, length {results.length}"


def _setting(results: Results) -> str:
    """What was measured, in a paragraph."""
    words = [drafted(results, at) for at in results.temperatures]
    same = len(set(words)) == 1
    shapes = [
        word if same else f"{word} at T = {at.temperature:g}"
        for word, at in zip(words[:1] if same else words, results.temperatures, strict=False)
    ]
    batches = ", those of seconds over batches" * (results.batch > 1)
    return (
        f"{results.prompts} held-out prompts ({results.data}), up to {results.max_new_tokens} new "
        f"tokens, batch {results.batch}, drafting {', '.join(shapes)}"
        f"{', compiled' * results.compiled}. Intervals are 95 % bootstraps over prompts{batches}. "
        "Plain and speculative decoding take turns in one process; seconds are those of the tokens "
        "after the first, which the target's prefill gives, and include the draft's own prefill."
    )


def _headline(results: Results) -> list[str]:
    rows: list[tuple[str, Cell]] = [
        ("**speedup over plain decoding**", lambda at: f"**{at.speedup.text(2)}**"),
        ("τ (tokens a target pass, pooled)", lambda at: at.tau.text()),
        ("tokens/s, speculative", lambda at: at.tokens_per_second.text(1)),
        ("tokens/s, plain", lambda at: at.plain_tokens_per_second.text(1)),
        ("rounds", lambda at: f"{at.rounds:,}"),
        ("verification", _rule),
        ("same tokens as plain decoding", lambda at: _identical(at, results)),
        ("repeated 4-grams in the answers", lambda at: at.repetition.text(2)),
        ("speedup that τ / (γc + v) foresees", lambda at: theory.foreseen_speedup(at).text(2)),
    ]
    if any(at.oracle for at in results.temperatures):
        rows.append(("speedup of an oracle length, with the same c and v", _oracle))
    return by_temperature(results.temperatures, rows)


def _rule(at: AtTemperature) -> str:
    return f"{at.rule} ({'lossless' if at.lossless else '**LOSSY**'})"


def _identical(at: AtTemperature, results: Results) -> str:
    if at.identical is None:
        return "the same distribution" if at.lossless else f"another distribution ({at.rule})"
    why = "" if results.machine.dtype == "float32" else " (near-ties flip outside float32)"
    if not at.lossless:
        why = f" ({at.rule} is lossy)"
    return f"{at.identical} of {results.prompts}{why}"


def _oracle(at: AtTemperature) -> str:
    """What knowing each first rejection would give, and from which rounds that is known."""
    found = at.oracle
    if found is None:
        return "—"
    return (
        f"{found.speedup:.2f}, the best fixed γ ({found.fixed_gamma}) {found.fixed_speedup:.2f}; "
        f"{found.rounds:,} rounds of {found.drafted}, {found.censored:.0%} accepted whole"
    )


def _costs(results: Results) -> list[str]:
    """A line for each shape that was measured."""
    lines, seen = [], set()
    for at in results.temperatures:
        if (at.gamma, at.nodes) in seen:
            continue
        seen.add((at.gamma, at.nodes))
        step, verify, draft = (
            theory.through(x, lambda s: 1e3 * s).text(1)
            for x in (at.cost.step_seconds, at.cost.verify_seconds, at.cost.draft_seconds)
        )
        lines.append(
            f"Costs ({drafted(results, at)}; medians of {at.cost.c.n} turns): a plain step {step} "
            f"ms, a verification of {at.nodes + 1} tokens {verify} ms (v = {at.cost.v.text(2)}), "
            f"drafting {at.nodes} tokens {draft} ms (c = {at.cost.c.text()})."
        )
    lines.append(
        "What the measured speedup lacks of τ / (γc + v) is the decoder's own"
        f"{', and that a batch waits for its slowest row' * (results.batch > 1)}."
    )
    return ["\n\n".join(lines)]


def _learned(results: Results) -> list[str]:
    """What was chosen by measuring first, at which temperature, and on what."""
    lines = []
    for at in results.temperatures:
        where = f"for T = {at.temperature:g} on {results.learned_on}, at that temperature"
        learned = at.learned
        if learned.paths:
            kind = "chain" if at.chain else "tree"
            lines.append(f"The {kind} was chosen {where}: {learned.paths}.")
        if learned.acceptance_by_rank:
            shares = "; ".join(
                f"depth {d}: " + " ".join(f"{a:.2f}" for a in ranks)
                for d, ranks in enumerate(learned.acceptance_by_rank)
            )
            lines.append(f"Acceptance by rank that it was chosen by: {shares}.")
        if learned.c is not None and learned.v is not None:
            lines.append(
                f"Length optimal was given c = {learned.c.text()} and v = {learned.v.text(2)}, "
                f"measured {where}."
            )
        if learned.table is not None:
            lines.append(f"Rounds were timed {where}: see cost-table-T{at.temperature:g}.json.")
        if learned.classifier is not None:
            lines.append(
                f"The stop classifier was fitted {where}, to {learned.classifier.records:,} "
                f"drafted tokens: see stop-classifier-T{at.temperature:g}.json."
            )
    return ["", "\n\n".join(lines)] if lines else []


def _acceptance(results: Results) -> list[str]:
    lines = [
        "",
        "## Acceptance",
        "",
        "α *over all positions* of the target's own text is not what a decoder sees: its rounds "
        "start where the last one failed, and those anchors are harder. *At visited anchors* is "
        "taken by teacher forcing at the anchors where this decoder's rounds started: the share of "
        "rounds that would accept depth k and all before it, as engines count it.",
    ]
    for at in results.temperatures:
        lines += ["", f"### T = {at.temperature:g}", "", *_by_depth(at), "", _compare(at)]
    return lines


def _compare(at: AtTemperature) -> str:
    """How the rows at visited anchors and the decoder's own count should compare."""
    if not at.lossless:
        return f"The rule {at.rule} is lossy, and accepts more than α says."
    if not at.chain:
        return "α is that of a chain at those anchors; the tree accepts more, by its siblings."
    if at.temperature == 0:
        return (
            "In float32 the row at visited anchors and the decoder's own count are equal, as they "
            "are the same rounds; in bfloat16 a near-tie may flip between the two passes."
        )
    if at.rule == "rejection":
        return "Acceptance at visited anchors is what the rule `rejection` should accept there."
    return (
        f"α describes the rule `rejection`; the decoder judges by `{at.rule}`, which accepts the "
        "same or more: its own expected length stands under “What theory says”."
    )


def _by_depth(at: AtTemperature) -> list[str]:
    gamma = at.gamma
    shown = VARIANTS if at.temperature > 0 else {"greedy": VARIANTS["greedy"]}
    sides = {"all positions, given the text": at.alpha.all, "visited anchors": at.alpha.visited}
    rows = [
        (f"{words}; {where}", [x.text() for x in getattr(alpha, variant)[:gamma]])
        for where, alpha in sides.items()
        for variant, words in shown.items()
    ]
    conditional = [x.text() for x in at.conditional_acceptance]
    rows += [
        ("**decoder's own count**", [x.text() for x in at.reached]),
        ("decoder, given that all before were accepted", conditional),
        ("all positions, n", [f"{x.n:,}" for x in at.alpha.all.greedy[:gamma]]),
        ("visited anchors, n", [f"{x.n:,}" for x in at.alpha.visited.greedy[:gamma]]),
        ("rounds", [f"{at.rounds:,}"] * gamma),
    ]
    return table("", [f"depth {k}" for k in range(gamma)], rows)


def _training(results: Results) -> list[str]:
    training = results.training
    if training is None:
        return []
    return [
        "",
        "## Training",
        "",
        f"{training.step:,} of {training.steps:,} steps, {training.tokens:,} tokens at "
        f"{training.tokens_per_second:,.0f} tokens/s. By walking the anchors of the held-out "
        f"texts, the best checkpoint has τ {training.held_out.tau_greedy:.3f} (greedy) and "
        f"{training.held_out.tau_sampled:.3f} (sampled), over "
        f"{training.held_out.positions[0]:,} positions.",
    ]


def _samples(results: Results) -> list[str]:
    """What the user said last, and the answer, at the first temperature."""
    at = results.temperatures[0]
    lines = ["", f"## Samples, T = {at.temperature:g}"]
    for sample in at.samples[:SAMPLES]:
        prompt, answer = (" ".join(text.split()) for text in (sample.prompt, sample.answer))
        lines += ["", f"> {prompt}", "", f"{answer} *(τ {sample.tau:.2f})*"]
    return lines

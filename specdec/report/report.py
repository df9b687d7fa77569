"""The report: results.json, report.md and plots, from what `evaluate` measured."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from specdec.theory.leviathan import expected_tokens as tokens
from specdec.theory.leviathan import round_cost, walltime_factor

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea580c", "#16a34a", "#9ca3af"
VARIANTS = {
    "sampled": "sampled, Σ min(p, q)",
    "greedy_draft": "greedy-draft, p(argmax q)",
    "greedy": "greedy, argmax p = argmax q",
}


def write(folder: Path, results: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Path]:
    """Write results.json, report.md and the plots into `folder`; returns the pictures.

    `records` are those of metrics.jsonl, empty where nothing was trained.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    pictures = {"alpha": _alpha(folder, results), "accepted": _accepted(folder, results)}
    if any("train" in r for r in records):
        pictures["training"] = _training(folder, records)
    (folder / "report.md").write_text(markdown(results, pictures))
    return pictures


def headline(results: dict[str, Any]) -> dict[str, Any]:
    """The figures that one compares runs by, flat, by temperature."""
    out: dict[str, Any] = {"c": results["costs"]["c"], "v": results["costs"]["v"]}
    for at in results["temperatures"]:
        prefix = f"T{at['temperature']:g}/"
        for name in ("tau", "speedup", "tokens_per_second", "plain_tokens_per_second"):
            out[prefix + name] = at[name]["value"]
        for variant in VARIANTS:
            by_depth = [x["value"] for x in at["alpha"]["all"][variant]]
            out |= {f"{prefix}alpha_{variant}/{k}": a for k, a in enumerate(by_depth)}
    return out


def drafted(results: dict[str, Any]) -> str:
    """What a round drafts, in words."""
    shape = f"γ = {results['gamma']}"
    if results["tree"]:
        shape = f"{results['tree']} tree of {results['nodes']} nodes, depth {results['gamma']}"
    return shape if results["length"] == "fixed" else f"{shape} at most, length {results['length']}"


def predictions(results: dict[str, Any], at: dict[str, Any]) -> dict[str, float]:
    """Predicted speedups. `measured τ`: τ / (γ c + v), which leaves only what the decoder adds.
    `closed form`: Leviathan et al. 2023, Theorem 3.8, from α at depth 0 over all positions."""
    costs, gamma = results["costs"], results["gamma"]
    variant = "greedy" if at["temperature"] == 0 else "sampled"
    alpha = at["alpha"]["all"][variant][0]["value"]
    # a tree always drafts all of its depth
    share = 1.0 if results["tree"] else at["drafted_per_round"] / gamma
    return {
        "measured τ": at["tau"]["value"] / round_cost(gamma, costs["c"], costs["v"], share),
        "closed form": walltime_factor(alpha, gamma, costs["c"]),
        "closed form τ": tokens(alpha, gamma),
    }


def summary(results: dict[str, Any]) -> str:
    """A few lines for the terminal."""
    lines = []
    for at in results["temperatures"]:
        variant = "greedy" if at["temperature"] == 0 else "sampled"
        alpha = at["alpha"]["all"][variant][0]
        lines.append(
            f"T={at['temperature']:g}: α ({variant}, depth 0) {_pm(alpha)}   τ {_pm(at['tau'])}   "
            f"speedup {_pm(at['speedup'], 2)}×   {at['tokens_per_second']['value']:.0f} tokens/s "
            f"against {at['plain_tokens_per_second']['value']:.0f} plain"
        )
    return "\n".join(lines)


def markdown(results: dict[str, Any], pictures: dict[str, Path]) -> str:
    """The report for people, with the pictures beside it."""
    costs, gamma = results["costs"], results["gamma"]
    lines = [
        f"# {results['name']}: {results['drafter']['name']} for {results['target']}",
        "",
        f"{results['prompts']} held-out prompts, up to {results['max_new_tokens']} new tokens, "
        f"batch {results['batch']}, {drafted(results)}, {results['dtype']}, "
        f"{results['threads']} threads{', compiled' if results['compiled'] else ''}. Intervals are "
        f"95 % bootstraps over prompts{', of seconds over batches' * (results['batch'] > 1)}; "
        "plain and speculative decoding take turns in one process. Seconds are of the tokens after "
        "the first, which the target's prefill gives; the draft's own prefill is in them.",
        "",
        "| | " + " | ".join(f"T = {at['temperature']:g}" for at in results["temperatures"]) + " |",
        "| --- |" + " --- |" * len(results["temperatures"]),
    ]
    rows: list[tuple[str, Any]] = [
        ("**speedup over plain decoding**", lambda at: f"**{_pm(at['speedup'], 2)}**"),
        ("τ (tokens a target pass, pooled)", lambda at: _pm(at["tau"])),
        ("tokens/s, speculative", lambda at: _pm(at["tokens_per_second"], 1)),
        ("tokens/s, plain", lambda at: _pm(at["plain_tokens_per_second"], 1)),
        ("rounds", lambda at: f"{at['rounds']:,}"),
        ("same tokens as plain decoding", lambda at: _identical(at, results)),
        ("repeated 4-grams in the answers", lambda at: f"{at['repetition']:.0%}"),
        (
            "speedup predicted, τ/(γc + v)",
            lambda at: f"{predictions(results, at)['measured τ']:.2f}",
        ),
        (
            "speedup predicted, Theorem 3.8 from α",
            lambda at: (
                f"{predictions(results, at)['closed form']:.2f} "
                f"(τ {predictions(results, at)['closed form τ']:.2f})"
            ),
        ),
    ]
    if any(at["oracle"] for at in results["temperatures"]):
        rows.append(("speedup of an oracle length, at most", _bound))
    for name, cell in rows:
        lines.append(f"| {name} | " + " | ".join(cell(at) for at in results["temperatures"]) + " |")
    rules = ", ".join(
        f"{at['rule']} at T = {at['temperature']:g} "
        f"({'lossless' if at['lossless'] else '**LOSSY**'})"
        for at in results["temperatures"]
    )
    followed = "; at T = 0 it is what the decoder counts"
    lossy = any(not at["lossless"] for at in results["temperatures"] if at["temperature"] == 0)
    if results["tree"] or results["length"] != "fixed" or lossy:
        followed = f", of a lossless decoder whose every round drafts a chain of {gamma}"
    lines += [
        "",
        "Costs: a plain step "
        f"{costs['step_seconds'] * 1e3:.1f} ms, a verification of {results['nodes'] + 1} "
        f"tokens {costs['verify_seconds'] * 1e3:.1f} ms (v = {costs['v']:.2f}), "
        f"drafting {results['nodes']} tokens {costs['draft_seconds'] * 1e3:.1f} ms "
        f"(c = {costs['c']:.3f}). "
        f"Verification: {rules}.",
        *_learned(results),
        "",
        "The two predictions differ because Theorem 3.8 takes every position to accept with the "
        "same α, independently; in truth acceptance falls with depth, and rounds start where the "
        "last one failed. The first uses the measured τ, so what it misses is the decoder itself"
        f"{', and that a batch waits for its slowest row' * (results['batch'] > 1)}.",
        "",
        "## Acceptance",
        "",
        "α *over all positions* of the target's own text is not what a decoder sees: its rounds "
        "start where the last one failed, and those anchors are harder. *At visited anchors* is "
        "the share of rounds that accept depth k (and all before it), from teacher forcing"
        f"{followed}. Engines report this one.",
    ]
    for at in results["temperatures"]:
        lines += ["", f"### T = {at['temperature']:g}", ""]
        lines += ["| | " + " | ".join(f"depth {k}" for k in range(gamma)) + " |"]
        lines += ["| --- |" + " --- |" * gamma]
        shown = VARIANTS if at["temperature"] > 0 else {"greedy": VARIANTS["greedy"]}
        for scope in ("all", "visited"):
            for variant, words in shown.items():
                cells = [_pm(x) for x in at["alpha"][scope][variant][:gamma]]
                cells += ["—"] * (gamma - len(cells))
                where = "all positions, given the text" if scope == "all" else "visited anchors"
                lines.append(f"| {words}; {where} | " + " | ".join(cells) + " |")
        rounds = max(1, at["rounds"])
        counted = " | ".join(f"{a / rounds:.3f}" for a in at["accepted"])
        lines.append(f"| **decoder's own count**, {at['rounds']:,} rounds | {counted} |")
        conditional = " | ".join(f"{a:.3f}" for a in at["conditional_acceptance"])
        lines.append(f"| decoder, given that all before were accepted | {conditional} |")
        n = [f"{x['n']:,}" for x in at["alpha"]["all"]["greedy"][:gamma]]
        lines.append(f"| positions | {' | '.join(n + ['—'] * (gamma - len(n)))} |")
    lines += ["", *(f"![{name}]({path.name})" for name, path in pictures.items())]
    if results.get("training"):
        training = results["training"]
        lines += [
            "",
            "## Training",
            "",
            f"{training['step']:,} of {training['steps']:,} steps, {training['tokens']:,} tokens "
            f"at {training['tokens_per_second']:,.0f} tokens/s; best held-out τ by walking the "
            f"anchors {training['held_out']['tau_greedy']:.3f} (greedy), "
            f"{training['held_out']['tau_sampled']:.3f} (sampled).",
        ]
    lines += ["", "## Samples"]
    for sample in results["temperatures"][0]["samples"][:3]:
        prompt, answer = (" ".join(sample[k].split()) for k in ("prompt", "answer"))
        lines += ["", f"> …{prompt}", "", f"{answer} *(τ {sample['tau']:.2f})*"]
    return "\n".join(lines) + "\n"


def _learned(results: dict[str, Any]) -> list[str]:
    """What was chosen by measuring first, and on what."""
    if paths := results["notes"].get("paths"):
        return ["", f"The tree was chosen on {results['learned_on']}: {paths}."]
    if results["length"] == "disco":
        return ["", f"The stop classifier was fitted on {results['learned_on']}."]
    return []


def _pm(x: dict[str, Any], digits: int = 3) -> str:
    value = f"{x['value']:.{digits}f}"
    if x["low"] == x["high"]:  # of a single prompt or batch there is no interval
        return value
    return f"{value} [{x['low']:.{digits}f}, {x['high']:.{digits}f}]"


def _identical(at: dict[str, Any], results: dict[str, Any]) -> str:
    if at["identical"] is None:
        return "by distribution"
    why = "" if results["dtype"] == "float32" else " (near-ties flip outside float32)"
    if not at["lossless"]:
        why = f" ({at['rule']} is lossy)"
    return f"{at['identical']} of {results['prompts']}{why}"


def _bound(at: dict[str, Any]) -> str:
    """What knowing each first rejection would give, and how many rounds ended too early to say."""
    found = at["oracle"]
    return f"{found['speedup']:.2f} ({found['censored']:.0%} of rounds cut)" if found else "—"


def _axes(width: float = 6.4, count: int = 1) -> tuple[Any, Any]:
    figure, axes = plt.subplots(1, count, figsize=(width, 3.6), layout="constrained")
    for ax in [axes] if count == 1 else axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path


def _alpha(folder: Path, results: dict[str, Any]) -> Path:
    """α by depth, over all positions and at visited anchors, for each temperature."""
    ats = results["temperatures"]
    figure, axes = _axes(5.2 * len(ats), len(ats))
    for ax, at in zip([axes] if len(ats) == 1 else axes, ats, strict=True):
        variant = "greedy" if at["temperature"] == 0 else "sampled"
        for scope, colour, label in (
            ("all", BLUE, "all positions, at each depth"),
            ("visited", ORANGE, "visited anchors, up to this depth"),
        ):
            points = at["alpha"][scope][variant]
            x = range(len(points))
            y = [p["value"] for p in points]
            ax.plot(x, y, "o-", color=colour, label=label)
            ax.fill_between(
                x, [p["low"] for p in points], [p["high"] for p in points], color=colour, alpha=0.15
            )
        rounds = max(1, at["rounds"])
        counted = [a / rounds for a in at["accepted"]]
        ax.plot(range(len(counted)), counted, "x", color="black", label="decoder's own count")
        ax.set_title(f"α by depth, T = {at['temperature']:g} ({variant})", loc="left", fontsize=11)
        ax.set_xlabel("depth k")
        ax.set_ylim(0, None)
        ax.set_xticks(range(max(len(counted), len(at["alpha"]["all"][variant]))))
        ax.legend(frameon=False, fontsize=8)
    return _save(figure, folder / "alpha.png")


def _accepted(folder: Path, results: dict[str, Any]) -> Path:
    """How many drafted tokens a round accepts."""
    figure, ax = _axes()
    ats = results["temperatures"]
    width = 0.8 / len(ats)
    for i, (at, colour) in enumerate(zip(ats, (BLUE, ORANGE, GREEN, GREY), strict=False)):
        shares = [n / max(1, at["rounds"]) for n in at["accepted_lengths"]]
        x = [n + (i - (len(ats) - 1) / 2) * width for n in range(len(shares))]
        label = f"T = {at['temperature']:g}, τ = {at['tau']['value']:.2f}"
        bars = ax.bar(x, shares, width, color=colour, label=label)
        ax.bar_label(bars, [f"{s:.0%}" for s in shares], fontsize=7, padding=1)
    ax.set_title("Drafted tokens accepted in a round", loc="left", fontsize=11)
    ax.set_xlabel("accepted")
    ax.set_ylabel("share of rounds")
    ax.set_xticks(range(results["gamma"] + 1))
    ax.legend(frameon=False)
    return _save(figure, folder / "accepted.png")


def _training(folder: Path, records: list[dict[str, Any]]) -> Path:
    """Loss, and α per depth on training and held-out text, over steps."""
    figure, (left, right) = _axes(10.4, 2)
    steps = [r["step"] for r in records if "train" in r]
    losses = [r["train"]["loss"][0] for r in records if "train" in r]
    left.plot(steps, losses, color=GREY, linewidth=0.8, alpha=0.6)
    left.plot(steps, _smooth(losses), color=BLUE)
    left.set_title("Loss at depth 0", loc="left", fontsize=11)
    left.set_xlabel("step")
    alphas = [r["train"]["sampled"] for r in records if "train" in r]
    held = [(r["step"], r["held_out"]["by_depth"]["sampled"]) for r in records if "held_out" in r]
    shades = plt.cm.viridis([0.15, 0.4, 0.6, 0.75, 0.85, 0.9, 0.95])  # type: ignore[attr-defined]
    for k in range(len(alphas[0])):
        colour = shades[min(k, len(shades) - 1)]
        right.plot(steps, _smooth([a[k] for a in alphas]), color=colour, alpha=0.6)
        right.plot([s for s, _ in held], [a[k] for _, a in held], "o", color=colour, markersize=5)
        right.annotate(f"depth {k}", (steps[-1], _smooth([a[k] for a in alphas])[-1]), fontsize=8)
    right.set_title("Sampled α: training (lines), held out (dots)", loc="left", fontsize=11)
    right.set_xlabel("step")
    right.set_ylim(0, None)
    return _save(figure, folder / "training.png")


def _smooth(values: list[float], weight: float = 0.85) -> list[float]:
    out, mean = [], values[0]
    for value in values:
        mean = weight * mean + (1 - weight) * value
        out.append(mean)
    return out

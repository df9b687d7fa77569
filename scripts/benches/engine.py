"""The same exported head in vLLM on the CPU and in our decoder, on the same greedy prompts."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benches.subject import console, drafts_of, held_out, target_of, timed, warm_ups
from rich.table import Table

from specdec import checkpoint, export
from specdec.decode import Generation, generate
from specdec.errors import UserError, require
from specdec.progress import bars

METHODS = {"eagle3": "eagle3", "medusa": "medusa", "lm": "draft_model"}
HERE = Path(__file__).parent.parent


def engine(folder: Path, count: int, new: int, dtype: str, gamma: int | None, ours: bool) -> None:
    """τ, accepted counts and tokens/s of both; `ours` compiled as well as eager."""
    family = checkpoint.read_card(folder)["family"]
    known = ", ".join(sorted(METHODS))
    require(family in METHODS, f"{folder}: {family} has no counterpart in vLLM, only {known} have")
    venv = Path(os.environ.get("DRAFTSMITH_SERVING_VENV", HERE.parent / ".venv-serving"))
    if not (venv / "bin" / "python").exists():
        raise UserError(f"{venv} holds no serving environment: run scripts/serving-env first")
    target = target_of(folder, dtype)
    drafter = next(iter(drafts_of([folder], target).values()))
    gamma = gamma or drafter.depth
    asked = held_out(folder, target, count)
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "speculative": {"drafter": drafter, "gamma": gamma},
    }
    if ours:
        variants |= {f"{k}, compiled": v | {"compiled": True} for k, v in variants.items()}
    made: dict[str, list[Generation]] = {k: [] for k in variants}
    spent = dict.fromkeys(variants, 0.0)
    for options in variants.values():  # compiles, and warms up
        for prompt in warm_ups(asked, options.get("compiled", False)):
            generate(target, prompt, max_new_tokens=new, **options)
    with bars(console) as progress:
        task = progress.add_task("our decoder", total=len(asked))
        for prompt in asked:
            for name, options in variants.items():  # they take turns
                seconds, result = timed(
                    lambda: generate(target, prompt, max_new_tokens=new, **options)  # noqa: B023
                )
                made[name].append(result)
                spent[name] += seconds
            progress.advance(task)
    with tempfile.TemporaryDirectory() as where:
        root = Path(where)
        export.write(root / "draft", drafter, target)
        target.save(root / "target")
        (root / "prompts.json").write_text(json.dumps(asked))
        (root / "ours.json").write_text(json.dumps([g.ids for g in made["speculative"]]))
        theirs = {
            "speculative": _serve(venv, root, METHODS[family], gamma, new, dtype),
            "plain": _serve(venv, root, "none", gamma, new, dtype),
        }
    both = theirs["speculative"]
    alike = both["alike"]
    shared = [
        generate(target, prompt, max_new_tokens=n, drafter=drafter, gamma=gamma)
        for prompt, n in zip(asked, alike, strict=True)
        if n > 0
    ]
    table = Table("", "τ", "accepted by position", "rounds", "same ids", "tokens/s")
    for name, counts in theirs.items():
        drafts, speed = counts["drafts"], f"{counts['tokens_per_second']:.1f}"
        by_position = " ".join(f"{a / drafts:.3f}" for a in counts["accepted_per_pos"] if drafts)
        table.add_row(f"vLLM, {name}", _tau(counts), by_position, str(drafts), "", speed)
    for name, results in made.items():
        rounds = [r for g in results for r in g.rounds]
        by_position = [sum(r.accepted > k for r in rounds) / len(rounds) for k in range(gamma)]
        engines = theirs["speculative" if "spec" in name else "plain"]["ids"]
        same = sum(g.ids == ids for g, ids in zip(results, engines, strict=True))
        table.add_row(
            f"ours, {name}",
            _pooled(results) if "spec" in name else "",
            " ".join(f"{a:.3f}" for a in by_position) if "spec" in name else "",
            str(len(rounds)),
            f"{same} of {len(asked)}",
            f"{sum(len(g.ids) for g in results) / spent[name]:.1f}",
        )
    console.print(
        f"{len(asked)} held-out prompts, up to {new} new tokens, greedy, γ = {gamma}, {dtype}, one "
        "stream; tokens/s of whole calls, with prefill, after warming up on whole prompts; vLLM "
        "runs eagerly (enforce_eager), as scripts/engine.py starts its CPU engine"
    )
    console.print(table)
    console.print(
        f"over the {sum(alike)} of {sum(map(len, both['ids']))} tokens up to where the eager "
        f"answers part: τ {_tau(both['shared'])} in vLLM, {_pooled(shared)} here"
    )


def _tau(counts: dict[str, Any]) -> str:
    return f"{1 + counts['accepted'] / counts['drafts']:.3f}" if counts["drafts"] else ""


def _pooled(made: list[Generation]) -> str:
    return f"{sum(g.emitted for g in made) / max(1, sum(len(g.rounds) for g in made)):.3f}"


def _serve(venv: Path, root: Path, method: str, gamma: int, new: int, dtype: str) -> dict[str, Any]:
    arguments = ["--target", root / "target", "--draft", root / "draft", "--method", method]
    arguments += ["--gamma", gamma, "--dtype", dtype, "--prompts", root / "prompts.json"]
    arguments += ["--max-new-tokens", new, "--out", root / "counts.json"]
    if method != "none":
        arguments += ["--ours", root / "ours.json"]
    command = [venv / "bin" / "python", HERE / "engine.py", *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"vLLM ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return json.loads((root / "counts.json").read_text())

"""The same exported head in vLLM on the CPU and in our decoder, on the same greedy prompts."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benches.subject import apart, console, drafts_of, held_out, target_of, timed, warm_ups
from rich.table import Table

from specdec import checkpoint, export
from specdec.decode import Generation, generate
from specdec.drafters import Drafter
from specdec.errors import UserError, require
from specdec.progress import bars
from specdec.strategy import LEARNING, fastest_tree
from specdec.target import Target

METHODS = {"eagle3": "eagle3", "medusa": "medusa", "lm": "draft_model"}
HERE = Path(__file__).parent.parent
VENV = Path(os.environ.get("DRAFTSMITH_SERVING_VENV", HERE.parent / ".venv-serving"))


def engine(
    folder: Path, count: int, new: int, dtype: str, gamma: int | None, compiled: bool
) -> None:
    """τ, accepted counts and tokens/s of both; `compiled`: through torch.compile too. Our decoder
    also drafts the static tree that it finds fastest, which the engine's CPU backend has not."""
    family = checkpoint.read_card(folder)["family"]
    known = ", ".join(sorted(METHODS))
    require(family in METHODS, f"{folder}: {family} has no counterpart in vLLM, only {known} have")
    if not (VENV / "bin" / "python").exists():
        raise UserError(f"{VENV} holds no serving environment: run scripts/serving-env first")
    target = target_of(folder, dtype)
    drafter = next(iter(drafts_of([folder], target).values()))
    gamma = gamma or drafter.depth
    asked, learning = apart(held_out(folder, target, count + LEARNING), count)
    chain = {"drafter": drafter, "gamma": gamma}
    variants: dict[str, dict[str, Any]] = {}
    modes = {"": False} | ({", compiled": True} if compiled else {})
    for mode, through in modes.items():
        tree = fastest_tree(target, drafter, learning, drafter.depth, through, new=new)
        variants[f"plain{mode}"] = {"compiled": through}
        variants[f"speculative{mode}"] = chain | {"compiled": through}
        variants[f"tree of {tree.nodes}{mode}"] = chain | {"shape": tree, "compiled": through}
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
        theirs = {
            name: serve(
                root,
                METHODS[family] if options.get("drafter") else "none",
                made[name],
                gamma,
                new,
                dtype,
                compiled=options.get("compiled", False),
            )
            for name, options in variants.items()
            if "tree" not in name
        }
    table = Table("", "τ", "accepted by position", "rounds", "same ids", "tokens/s")
    for name, counts in theirs.items():
        drafts, speed = counts["drafts"], f"{counts['tokens_per_second']:.1f}"
        by_position = " ".join(f"{a / drafts:.3f}" for a in counts["accepted_per_pos"] if drafts)
        table.add_row(f"vLLM, {name}", tau_of(counts), by_position, str(drafts), "", speed)
    for name, results in made.items():
        rounds = [r for g in results for r in g.rounds]
        deep = 0 if "plain" in name else max(r.drafted for r in rounds)
        by_position = [sum(r.accepted > k for r in rounds) / len(rounds) for k in range(deep)]
        same = ""
        if name in theirs:
            alike = [g.ids == ids for g, ids in zip(results, theirs[name]["ids"], strict=True)]
            same = f"{sum(alike)} of {len(asked)}"
        table.add_row(
            f"ours, {name}",
            pooled(results) if deep else "",
            " ".join(f"{a:.3f}" for a in by_position),
            str(len(rounds)),
            same,
            f"{sum(len(g.ids) for g in results) / spent[name]:.1f}",
        )
    console.print(
        f"{len(asked)} held-out prompts, up to {new} new tokens, greedy, γ = {gamma}, {dtype}, one "
        "stream; tokens/s of whole calls, with prefill, after warming up on whole prompts"
    )
    console.print(table)
    if dtype == "float32":  # the texts are the same
        return
    texts = made["speculative"]
    shared, pieces = on_shared_text(target, drafter, gamma, texts, theirs["speculative"]["pieces"])
    console.print(
        f"over {sum(len(g.ids) for g in shared)} of {sum(len(g.ids) for g in texts)} tokens, those "
        f"that both write after the same text: τ {tau_of(summed(pieces))} in vLLM, "
        f"{pooled(shared)} here (eager)"
    )


def on_shared_text(
    target: Target,
    drafter: Drafter,
    gamma: int,
    texts: list[Generation],
    pieces: list[list[dict[str, Any]]],
) -> tuple[list[Generation], list[dict[str, Any]]]:
    """Our decoding of the engine's pieces of our texts (see scripts/engine.py), and its counts of
    those pieces, where both write the same tokens: near-ties flip outside float32."""
    ours, theirs = [], []
    for text, found in zip(texts, pieces, strict=True):
        for piece in found:
            before, ids = text.prompt + text.ids[: piece["start"]], piece["ids"][0]
            again = generate(target, before, max_new_tokens=len(ids), drafter=drafter, gamma=gamma)
            if again.ids == ids:
                ours.append(again)
                theirs.append(piece)
    return ours, theirs


def summed(pieces: list[dict[str, Any]]) -> dict[str, int]:
    return {key: sum(p[key] for p in pieces) for key in ("drafts", "accepted")}


def tau_of(counts: dict[str, Any]) -> str:
    return f"{1 + counts['accepted'] / counts['drafts']:.3f}" if counts["drafts"] else ""


def pooled(made: list[Generation]) -> str:
    return f"{sum(g.emitted for g in made) / max(1, sum(len(g.rounds) for g in made)):.3f}"


def serve(
    root: Path,
    method: str,
    ours: list[Generation],
    gamma: int,
    new: int,
    dtype: str,
    compiled: bool = False,
) -> dict[str, Any]:
    """What scripts/engine.py writes of our prompts, by the target and draft in `root`. Raises
    UserError where the engine fails."""
    (root / "prompts.json").write_text(json.dumps([g.prompt for g in ours]))
    arguments = ["--target", root / "target", "--draft", root / "draft", "--method", method]
    arguments += ["--gamma", gamma, "--dtype", dtype, "--prompts", root / "prompts.json"]
    arguments += ["--max-new-tokens", new, "--out", root / "counts.json"]
    if compiled:
        arguments += ["--compiled"]
    elif method != "none" and dtype != "float32":
        (root / "ours.json").write_text(json.dumps([g.ids for g in ours]))
        arguments += ["--ours", root / "ours.json"]
    command = [VENV / "bin" / "python", HERE / "engine.py", *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"vLLM ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return json.loads((root / "counts.json").read_text())

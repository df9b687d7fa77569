"""Losslessness on real prompts: greedy identity in float32, and a two-sample test at T = 1."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar, cast
from uuid import uuid4

import torch
from benches.subject import console, drafts_of, held_out, target_of
from rich.table import Table

from specdec.context import Proposal
from specdec.decoding.config import DecodeConfig, require_fitting
from specdec.decoding.decode import decode
from specdec.decoding.rules import RULES, Law, Rule
from specdec.drafters import Drafter
from specdec.errors import require
from specdec.files import read_lines
from specdec.formats import draft as checkpoint
from specdec.progress import bars
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape
from specdec.target.base import Target

T = TypeVar("T")


def lossless(
    folders: list[Path],
    count: int,
    new: int,
    trees: bool,
    batches: list[int],
    keep: Path | None,
    gamma: int | None = None,
) -> None:
    """Every draft × chain and tree × batch: the same ids as plain greedy decoding, in float32.
    Chains draft `gamma` tokens (None: the trained depth, 5 at most), trees as deep, 4 at most.

    All of them are many hours. Each line is printed as soon as it is known; with `keep`, what was
    decoded is kept in that folder, and an interrupted run goes on where it stopped.
    """
    target = target_of(folders[0], "float32")
    asked = held_out(folders[0], target, count)
    drafts = drafts_of(folders, target)
    for drafter in drafts.values():
        require_fitting(DecodeConfig(gamma=gamma), drafter)
    kept = Kept(keep, [target.fingerprint(), new, asked])
    console.print(f"{len(asked)} held-out prompts, {new} new tokens, greedy, float32")
    console.print(f"{'draft':16}{'shape':9}{'batch':>5}  {'identical':12}τ")
    with bars(console) as progress:
        task = progress.add_task("plain", total=len(asked))
        plain: list[list[int]] = []
        for start in range(0, len(asked), 8):
            part = asked[start : start + 8]
            plain += kept.get(["plain", start], partial(_plain, target, part, new))["ids"]
            progress.advance(task, len(part))
        for folder, (name, drafter) in zip(folders, drafts.items(), strict=True):
            weights = _checksum(folder)
            depth = gamma or min(drafter.depth, 5)
            shapes: list[Shape] = [Chain(depth)]
            if trees:
                shapes.append(Dynamic(min(depth, 4), 12, 4))
            for shape, batch in product(shapes, batches):
                totals: Counter[str] = Counter()
                label = f"{name} {type(shape).__name__} batch {batch}"
                task = progress.add_task(label, total=len(asked))
                for start in range(0, len(asked), batch):
                    rows = slice(start, start + batch)
                    measure = partial(
                        _drafted, target, asked[rows], plain[rows], new, drafter, shape
                    )
                    totals.update(kept.get([label, repr(shape), weights, start], measure))
                    so_far = f"{label}: {totals['same']} the same"
                    progress.update(task, advance=len(asked[rows]), description=so_far)
                progress.remove_task(task)
                same = f"{totals['same']} of {len(asked)}"
                console.print(
                    f"{name:16}{type(shape).__name__:9}{batch:5}  {same:12}"
                    f"{totals['emitted'] / totals['rounds']:.3f}"
                )


def _plain(target: Target, prompts: list[list[int]], new: int) -> dict[str, list[list[int]]]:
    return {"ids": [g.ids for g in decode(target, prompts, max_new_tokens=new)]}


def _drafted(
    target: Target,
    prompts: list[list[int]],
    plain: list[list[int]],
    new: int,
    drafter: Drafter,
    shape: Shape,
) -> dict[str, int]:
    """How many of the answers are the plain ones, and the counts that τ is of."""
    made = decode(target, prompts, max_new_tokens=new, drafter=drafter, shape=shape)
    return {
        "same": sum(g.ids == ids for g, ids in zip(made, plain, strict=True)),
        "rounds": sum(len(g.rounds) for g in made),
        "emitted": sum(g.emitted for g in made),
    }


class Kept:
    """What was measured, in a folder of JSON lines; several processes may share it. Measures
    anew where `folder` is None, and what was measured `of` something else."""

    def __init__(self, folder: Path | None, of: list[object]) -> None:
        self.of = hashlib.blake2b(json.dumps(of).encode(), digest_size=12).hexdigest()
        self.path = folder and folder / f"{uuid4().hex}.jsonl"  # no two processes write one file
        self.known: dict[str, object] = {}  # by `what`, as JSON
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.glob("*.jsonl")):
                for record in read_lines(path, ("of", "what", "found")):
                    if record["of"] == self.of:
                        self.known[json.dumps(record["what"])] = record["found"]

    def get(self, what: list[object], measure: Callable[[], T]) -> T:
        """What is known of `what`, or is measured now."""
        key = json.dumps(what)
        if key not in self.known:
            self.known[key] = measure()
            if self.path is not None:
                line = json.dumps({"of": self.of, "what": what, "found": self.known[key]})
                with self.path.open("a") as file:
                    file.write(line + "\n")
        return cast(T, self.known[key])


def _checksum(draft: Path) -> str:
    """A checksum of a draft's weights; empty for a family that has none."""
    path = draft / checkpoint.WEIGHTS
    if not path.exists():
        return ""
    return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()


def two_samples(folder: Path, count: int, samples: int, rule: str) -> None:
    """At T = 1, are the first tokens of speculative continuations those of plain ones?

    For each prompt, `samples` continuations of 3 tokens plainly and speculatively; a chi-square
    test of homogeneity over the joint cells (rare ones pooled), summed over prompts. The same
    test is then made of a rule broken on purpose, which keeps every drafted token.
    """
    target = target_of(folder, "float32")
    drafter = next(iter(drafts_of([folder], target).values()))
    asked = held_out(folder, target, count)
    sampler = Sampler(1.0)
    broken = Rule(whole=_keeps_all, siblings="none", lossless=False)
    table = Table("rule", "χ²", "degrees of freedom", "p-value", "verdict")
    with bars(console) as progress:
        task = progress.add_task("continuations", total=3 * samples * len(asked))

        def drawn(i: int, side: int, judged: Rule | None) -> Counter[tuple[int, ...]]:
            cells: Counter[tuple[int, ...]] = Counter()
            for start in range(0, samples, 50):
                size = min(50, samples - start)
                seeds = [10**6 * (3 * i + side) + start + b for b in range(size)]
                made = _continued(target, asked[i], seeds, drafter, judged, sampler)
                cells.update(tuple(ids) for ids in made)
                progress.advance(task, size)
            return cells

        plain = [drawn(i, 0, None) for i in range(len(asked))]
        for side, (name, judged) in enumerate(
            ((rule, RULES[rule]), ("broken on purpose", broken)), start=1
        ):
            statistic = freedom = 0.0
            for i in range(len(asked)):
                chi, df = homogeneity(plain[i], drawn(i, side, judged))
                statistic, freedom = statistic + chi, freedom + df
            require(freedom > 0, "no continuation came often enough: give more --samples")
            p_value = float(
                torch.special.gammaincc(
                    torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()
                )
            )
            verdict = "not rejected" if p_value > 0.001 else "rejected"
            table.add_row(name, f"{statistic:.0f}", f"{freedom:.0f}", f"{p_value:.3g}", verdict)
    console.print(
        f"{2 * samples * len(asked):,} continuations a rule, of {len(asked)} held-out prompts, "
        "T = 1, 3 tokens each"
    )
    console.print(table)


def homogeneity(one: Counter, two: Counter, least: int = 10) -> tuple[float, int]:
    """χ² of two samples being of one law, and its degrees of freedom; cells of fewer than `least`
    draws in both together are pooled."""
    pairs = [(one[cell], two[cell]) for cell in set(one) | set(two)]
    cells = [pair for pair in pairs if sum(pair) >= least]
    rare = [pair for pair in pairs if sum(pair) < least]
    if rare:
        cells.append((sum(a for a, _ in rare), sum(b for _, b in rare)))
    totals = [sum(c[j] for c in cells) for j in (0, 1)]
    chi = 0.0
    for pair in cells:
        for j in (0, 1):
            expected = sum(pair) * totals[j] / sum(totals)
            chi += (pair[j] - expected) ** 2 / expected
    return chi, max(0, len(cells) - 1)


def _continued(
    target: Target,
    prompt: list[int],
    seeds: list[int],
    drafter: Drafter,
    rule: Rule | None,
    sampler: Sampler,
) -> list[list[int]]:
    """Three sampled tokens a seed: plain where there is no rule."""
    prompts = [prompt] * len(seeds)
    plain = partial(decode, target, prompts, max_new_tokens=3, sampler=sampler, seeds=seeds, eos=())
    made = plain(drafter=drafter, shape=Chain(2), rule=rule) if rule else plain()
    return [g.ids for g in made]


def _keeps_all(proposal: Proposal, p_BMV: torch.Tensor) -> Law:
    """Every drafted token is kept: what a decoder without verification would do."""
    stop = torch.zeros_like(p_BMV[..., 0])
    stop[:, -1] = 1
    return Law(stop, p_BMV)

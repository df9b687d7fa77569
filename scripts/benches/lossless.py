"""Losslessness on real prompts: greedy identity in float32, and a two-sample test at T = 1."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
from benches.setting import Timing, setting
from benches.turns import line, show

from specdec.context import Proposal
from specdec.decoding.config import DecodeConfig, require_fitting
from specdec.decoding.decode import decode
from specdec.decoding.generation import Generation
from specdec.decoding.verification_methods import VERIFICATION_METHODS, Law, VerificationMethod
from specdec.decoding.way import Way
from specdec.errors import nearest, require
from specdec.files import make_folder, read_json, write_whole
from specdec.formats import draft_checkpoint
from specdec.progress import bars, console
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape

WIDTHS = (16, 7, 5, 10, 5)
PART = 50  # continuations sampled together


def lossless(
    drafts: Sequence[Path],
    *,
    prompts: int = 50,
    new: Annotated[int, "new tokens per response"] = 128,
    trees: Annotated[bool, "dynamic trees as well as chains"] = False,
    batches: Sequence[int] = (1,),
    gamma: Annotated[int | None, "default: as trained, but at most 5; trees: at most 4"] = None,
    keep: Annotated[Path | None, "folder for results, to resume from"] = None,
) -> None:
    """Greedy identity with vanilla decoding in float32: every draft × shape × batch.

    Many combinations take many hours. Each line is printed as soon as it is known. With `keep`,
    results are kept in that folder, and an interrupted run continues where it stopped.
    """
    at_hand = setting(drafts, Timing(prompts, new, "float32"))
    target, asked = at_hand.target, at_hand.prompts
    for drafter in at_hand.drafters.values():
        require_fitting(DecodeConfig(gamma=gamma), drafter, target)
    of = [target.fingerprint(), new, asked]
    answer = partial(decode, target, max_new_tokens=new)
    console.print(line(["draft", "shape", "batch", "identical", "τ"], WIDTHS))
    console.print(line(["-" * width for width in WIDTHS], WIDTHS))
    with bars(console) as progress:
        task = progress.add_task("plain", total=len(asked))
        plain: list[list[int]] = []
        for start in range(0, len(asked), 8):
            part = asked[start : start + 8]
            plain += kept(keep, [*of, "plain", start], partial(_plain, answer, part))
            progress.advance(task, len(part))
        for draft, (name, drafter) in zip(drafts, at_hand.drafters.items(), strict=True):
            weights = draft_checkpoint.digest_of_draft(draft) if draft.exists() else ""
            depth = gamma or min(drafter.depth, 5)
            shapes: list[Shape] = [Chain(depth), Dynamic(min(depth, 4), 12, 4)]
            for shape, batch in product(shapes[: 1 + trees], batches):
                totals: Counter[str] = Counter()
                label = f"{name} {type(shape).__name__} batch {batch}"
                task = progress.add_task(label, total=len(asked))
                for start in range(0, len(asked), batch):
                    rows = slice(start, start + batch)
                    made = partial(answer, asked[rows], Way(drafter, shape))
                    key = [*of, label, repr(shape), weights, start]
                    totals.update(kept(keep, key, partial(_counts, made, plain[rows])))
                    so_far = f"{label}: {totals['same']} identical"
                    progress.update(task, advance=len(asked[rows]), description=so_far)
                progress.remove_task(task)
                same = f"{totals['same']} of {len(asked)}"
                tau = f"{totals['emitted'] / totals['speculation_steps']:.3f}"
                console.print(line([name, type(shape).__name__, str(batch), same, tau], WIDTHS))


def kept(folder: Path | None, key: list[object], measure: Callable[[], Any]) -> Any:
    """The result of `measure`, or the stored one for the same `key` in `folder`. Several processes
    may share the folder."""
    if folder is None:
        return measure()
    name = hashlib.blake2b(json.dumps(key).encode(), digest_size=12).hexdigest()
    path = make_folder(folder) / f"{name}.json"
    if not path.exists():
        write_whole(path, json.dumps(measure()))
    return read_json(path)


def _plain(answer: Callable[..., list[Generation]], prompts: list[list[int]]) -> list[list[int]]:
    return [g.ids for g in answer(prompts)]


def _counts(answer: Callable[[], list[Generation]], plain: list[list[int]]) -> dict[str, int]:
    """The number of responses that equal the vanilla ones, and the two counts whose ratio is τ."""
    made = answer()
    return {
        "same": sum(g.ids == ids for g, ids in zip(made, plain, strict=True)),
        "speculation_steps": sum(len(g.steps) for g in made),
        "emitted": sum(g.emitted for g in made),
    }


def samples(
    draft: Path,
    *,
    prompts: int = 20,
    samples: Annotated[int, "per prompt and side"] = 500,
    verification: str = "block",
) -> None:
    """A two-sample test at T = 1: are plain and speculative continuations distributed alike?

    For each prompt, `samples` continuations of 3 tokens are drawn with vanilla decoding, and as
    many by speculation. Their χ² of homogeneity, with a cell for each continuation and rare ones
    pooled, is summed over prompts. As a control, the speculative side is repeated with a broken
    verification method that keeps every drafted token.
    """
    require(
        verification in VERIFICATION_METHODS,
        f"--verification {verification} is unknown{nearest(verification, VERIFICATION_METHODS)}",
    )
    at_hand = setting([draft], Timing(prompts, 3, "float32"))
    asked, sampler = at_hand.prompts, Sampler(1.0)
    drafted = Way(at_hand.drafter, Chain(2), sampler)
    broken = VerificationMethod(whole=_keeps_all, siblings="none", lossless=False)
    rows = []
    with bars(console) as progress:
        task = progress.add_task("continuations", total=3 * samples * len(asked))

        def drawn(side: int, way: Way) -> list[Counter]:
            """The counts of the continuations drawn for each prompt."""
            answer = partial(decode, at_hand.target, way=way, max_new_tokens=3, eos=())
            cells: list[Counter] = [Counter() for _ in asked]
            for i, prompt in enumerate(asked):
                first = 10**6 * (3 * i + side)
                seeds = range(first, first + samples)
                for start in range(0, samples, PART):
                    part = seeds[start : start + PART]
                    made = answer([prompt] * len(part), seeds=part)
                    cells[i].update(tuple(g.ids) for g in made)
                    progress.advance(task, len(part))
            return cells

        plain = drawn(0, drafted.plain)
        for side, (name, judge) in enumerate(
            [(verification, VERIFICATION_METHODS[verification]), ("broken on purpose", broken)], 1
        ):
            found = map(homogeneity, plain, drawn(side, replace(drafted, verification=judge)))
            chi, freedom = map(sum, zip(*found, strict=True))
            require(freedom > 0, "no continuation occurred often enough: raise --samples")
            half = torch.tensor([freedom / 2, chi / 2]).double()
            p_value = float(torch.special.gammaincc(*half))
            verdict = "not rejected" if p_value > 0.001 else "rejected"
            rows.append([name, f"{chi:.0f}", str(freedom), f"{p_value:.3g}", verdict])
    console.print(
        f"{2 * samples * len(asked):,} continuations per method, {len(asked)} held-out prompts, "
        "T = 1, 3 tokens each"
    )
    show(["verification", "χ²", "degrees of freedom", "p-value", "verdict"], rows)


def homogeneity(one: Counter, two: Counter, least: int = 10) -> tuple[float, int]:
    """χ² of two samples if both have the same distribution, and its degrees of freedom. Cells with
    fewer than `least` draws in both samples together are pooled."""
    pairs = [(one[cell], two[cell]) for cell in set(one) | set(two)]
    cells = [pair for pair in pairs if sum(pair) >= least]
    if rare := [pair for pair in pairs if sum(pair) < least]:
        cells.append((sum(a for a, _ in rare), sum(b for _, b in rare)))
    totals = [sum(c[j] for c in cells) for j in (0, 1)]
    chi = 0.0
    for pair in cells:
        for j in (0, 1):
            expected = sum(pair) * totals[j] / sum(totals)
            chi += (pair[j] - expected) ** 2 / expected
    return chi, max(0, len(cells) - 1)


def _keeps_all(proposal: Proposal, p_BMV: torch.Tensor) -> Law:
    """The law that keeps every drafted token, as a decoder without verification would."""
    stop = torch.zeros_like(p_BMV[..., 0])
    stop[:, -1] = 1
    return Law(stop, p_BMV)

"""Several ways of answering the same prompts, which take turns so that a change in the machine's
speed affects all of them, and the table that compares them."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from specdec.decoding.decode import generate
from specdec.decoding.way import Way
from specdec.measure.costs import timed
from specdec.progress import bars, console
from specdec.targets.target import Target


class TimedGeneration(NamedTuple):
    """New tokens and their seconds; with drafts, also the number of speculation steps and how many
    of them accepted each position."""

    ids: list[int]
    seconds: float
    speculation_steps: int = 0
    accepted: Sequence[int] = ()


class ResponseWriter(NamedTuple):
    """A function that answers a prompt, the draft of a speculation step, and the names of the
    rivals to compare it with. `compiled` is whether forward passes go through torch.compile."""

    answer: Callable[[list[int]], TimedGeneration]
    drafted: str = ""
    rivals: Sequence[str] = ()
    compiled: bool = False


def ours(
    target: Target,
    new: int,
    way: Way | None = None,
    drafted: str = "",
    rivals: Sequence[str] = (),
    prefill: bool = True,
    **options: Any,
) -> ResponseWriter:
    """Our decoder with this configuration (None: vanilla), timed with or without its prefill."""
    way = way or Way()

    def answer(prompt: list[int]) -> TimedGeneration:
        call = partial(generate, target, prompt, way, max_new_tokens=new, **options)
        seconds, made = timed(call, target.device)
        deepest = max((r.drafted for r in made.steps), default=0)
        accepted = [sum(r.accepted > k for r in made.steps) for k in range(deepest)]
        spent = seconds if prefill else made.seconds
        return TimedGeneration(made.ids, spent, len(made.steps), accepted)

    return ResponseWriter(answer, drafted, rivals, way.compiled)


def in_turn(
    writers: dict[str, ResponseWriter],
    prompts: list[list[int]],
    first: list[list[int]] | None = None,
) -> dict[str, list[TimedGeneration]]:
    """The responses of each writer to every prompt. Each first warms up: if its forward passes are
    compiled, on all prompts, so that no graph is built during timing; otherwise on `first` (by
    default the first prompt and the longest)."""
    few = first or [prompts[0], max(prompts, key=len)]
    made: dict[str, list[TimedGeneration]] = {name: [] for name in writers}
    with bars(console) as progress:
        task = progress.add_task("warming up", total=len(writers))
        for one in writers.values():
            for prompt in prompts if one.compiled else few:
                one.answer(prompt)
            progress.advance(task)
        task = progress.add_task("decoding", total=len(prompts))
        for prompt in prompts:
            for name, one in writers.items():
                made[name].append(one.answer(prompt))
            progress.advance(task)
    return made


def compare(writers: dict[str, ResponseWriter], made: dict[str, list[TimedGeneration]]) -> None:
    """Print a table of the results of `in_turn`, each compared with the fastest of its rivals."""
    seconds = {name: [a.seconds / len(a.ids) for a in of] for name, of in made.items()}
    middle = {name: statistics.median(of) for name, of in seconds.items()}  # per token
    rows = []
    for name, responses in made.items():
        shares = accepted(responses)
        row = [name, writers[name].drafted, tau(responses), " ".join(f"{s:.3f}" for s in shares)]
        row += [str(sum(a.speculation_steps for a in responses) or ""), f"{1 / middle[name]:.1f}"]
        if rivals := writers[name].rivals:
            best = min(rivals, key=middle.__getitem__)
            same = sum(a.ids == b.ids for a, b in zip(responses, made[best], strict=True))
            row += [ratio(seconds[best], seconds[name]), best, f"{same} of {len(responses)}"]
        rows.append(row)
    columns = ["", "drafted", "τ", "accepted by position", "speculation steps", "tokens/s, median"]
    show([*columns, "times faster than", "", "same ids"], rows)


def accepted(responses: Sequence[TimedGeneration]) -> list[float]:
    """The share of all speculation steps that accepted each position."""
    counts = zip_longest(*(a.accepted for a in responses), fillvalue=0)
    return [sum(count) / sum(a.speculation_steps for a in responses) for count in counts]


def tau(responses: Sequence[TimedGeneration]) -> str:
    """τ over all the responses; empty if nothing was drafted."""
    shares = accepted(responses)
    return f"{1 + sum(shares):.3f}" if shares else ""


def ratio(slow: Sequence[float], fast: Sequence[float]) -> str:
    """The factor by which `fast` is faster: its median over prompts, and its quartiles."""
    ratios = [s / f for s, f in zip(slow, fast, strict=True)]
    if len(ratios) == 1:
        return f"{ratios[0]:.2f} (one prompt)"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(map(str.ljust, cells, widths)) + " |"


def show(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, as docs/results.md has it. Empty cells are added to short rows."""
    filled = [[*row, *[""] * (len(columns) - len(row))] for row in (columns, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*filled, strict=True)]
    filled.insert(1, ["-" * width for width in widths])
    for row in filled:
        console.print(line(row, widths))

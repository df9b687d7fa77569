"""Ways of answering the same prompts, which take turns so that a change in the machine's speed
affects all of them, and the table that compares them."""

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


class TimedAnswer(NamedTuple):
    """New tokens and the seconds that they took; if drafts were verified, also the number of rounds
    and how many of them accepted each position."""

    ids: list[int]
    seconds: float
    rounds: int = 0
    accepted: Sequence[int] = ()


class Answerer(NamedTuple):
    """How a prompt is answered, how much a round drafts, and the names of the rivals to compare
    this one with. `compiled` says whether passes go through torch.compile."""

    answer: Callable[[list[int]], TimedAnswer]
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
) -> Answerer:
    """Our decoder in this way (None: plainly), timed with its prefill or without it."""
    way = way or Way()

    def answer(prompt: list[int]) -> TimedAnswer:
        call = partial(generate, target, prompt, way, max_new_tokens=new, **options)
        seconds, made = timed(call, target.device)
        deepest = max((r.drafted for r in made.rounds), default=0)
        accepted = [sum(r.accepted > k for r in made.rounds) for k in range(deepest)]
        spent = seconds if prefill else made.seconds
        return TimedAnswer(made.ids, spent, len(made.rounds), accepted)

    return Answerer(answer, drafted, rivals, way.compiled)


def in_turn(
    answerers: dict[str, Answerer], prompts: list[list[int]], first: list[list[int]] | None = None
) -> dict[str, list[TimedAnswer]]:
    """The answers of each to every prompt. Each first warms up: if its passes are compiled, on all
    prompts, so that no graph is built while the clock runs; otherwise on `first` (by default the
    first prompt and the longest)."""
    few = first or [prompts[0], max(prompts, key=len)]
    made: dict[str, list[TimedAnswer]] = {name: [] for name in answerers}
    with bars(console) as progress:
        task = progress.add_task("warming up", total=len(answerers))
        for one in answerers.values():
            for prompt in prompts if one.compiled else few:
                one.answer(prompt)
            progress.advance(task)
        task = progress.add_task("decoding", total=len(prompts))
        for prompt in prompts:
            for name, one in answerers.items():
                made[name].append(one.answer(prompt))
            progress.advance(task)
    return made


def compare(answerers: dict[str, Answerer], made: dict[str, list[TimedAnswer]]) -> None:
    """Print a table of what `in_turn` made: each beside the fastest of its rivals."""
    seconds = {name: [a.seconds / len(a.ids) for a in of] for name, of in made.items()}
    middle = {name: statistics.median(of) for name, of in seconds.items()}  # per token
    rows = []
    for name, answers in made.items():
        shares = accepted(answers)
        row = [name, answerers[name].drafted, tau(answers), " ".join(f"{s:.3f}" for s in shares)]
        row += [str(sum(a.rounds for a in answers) or ""), f"{1 / middle[name]:.1f}"]
        if rivals := answerers[name].rivals:
            best = min(rivals, key=middle.__getitem__)
            same = sum(a.ids == b.ids for a, b in zip(answers, made[best], strict=True))
            row += [ratio(seconds[best], seconds[name]), best, f"{same} of {len(answers)}"]
        rows.append(row)
    columns = ["", "drafted", "τ", "accepted by position", "rounds", "tokens/s, median"]
    show([*columns, "times faster than", "", "same ids"], rows)


def accepted(answers: Sequence[TimedAnswer]) -> list[float]:
    """The share of all rounds that accepted each position."""
    counts = zip_longest(*(a.accepted for a in answers), fillvalue=0)
    return [sum(count) / sum(a.rounds for a in answers) for count in counts]


def tau(answers: Sequence[TimedAnswer]) -> str:
    """τ over all the answers; empty if nothing was drafted."""
    shares = accepted(answers)
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

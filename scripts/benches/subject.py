"""What the benchmarks measure: a target, drafts of it, and held-out prompts."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec import checkpoint
from specdec.drafters import DRAFTERS, Drafter
from specdec.errors import UserError
from specdec.target import Target, TargetConfig
from train.config import data_of_run
from train.data import load, prompts

console = Console(highlight=False, soft_wrap=True)


def target_of(draft: Path, dtype: str) -> Target:
    """The target that a draft was trained for."""
    theirs = checkpoint.read_card(draft)["target"]
    return Target.load(TargetConfig(path=theirs["name"], revision=theirs["revision"], dtype=dtype))


def drafts_of(drafts: list[Path], target: Target) -> dict[str, Drafter]:
    """Drafts by the name of their run, or of their family where they need no training."""
    found = {}
    for draft in drafts:
        if draft.exists() or str(draft) not in DRAFTERS:
            found[draft.absolute().parent.name] = checkpoint.load(draft, target)
            continue
        kind = DRAFTERS[str(draft)]
        if kind.trainable:
            raise UserError(f"{draft} is trained: give the folder of a run, such as runs/NAME/best")
        found[str(draft)] = kind.build(kind.Config(), target)
    return found


def held_out(draft: Path, target: Target, count: int) -> list[list[int]]:
    """Prompts from the held-out side of a draft's run."""
    data = data_of_run(draft.parent)
    data.limit = max(data.limit or 0, 30 * count)  # the held-out side of more data holds this one
    conversations = load(data, target.tokenizer).held_out
    return [p.ids for p in prompts(conversations, target.tokenizer, data)][:count]


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def median(run: Callable[[], Any], times: int = 15, warm: int = 3) -> float:
    """Median seconds of a call."""
    for _ in range(warm):
        run()
    return statistics.median(timed(run)[0] for _ in range(times))

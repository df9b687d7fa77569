"""Compares the training throughput of several processes with that of one."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import psutil
from benches.launching import launched, require_done
from benches.turns import show

from specdec.errors import require
from specdec.progress import console

FIXED = ("loop.eval_every=0", "loop.save_every=0", "decode.prompts=0", "track=none", "export=null")
WORK = ("data.limit=200", "loop.epochs=100", "loop.max_tokens=40000")


def processes(
    overrides: Annotated[Sequence[str], "of train.py, e.g. loop.rows=8"] = (),
    *,
    count: Annotated[int, "processes that are compared with one"] = 2,
    turns: int = 3,
) -> None:
    """Training tokens/s of several processes of one core each, beside one process of one core.

    A run in one process first stores the responses and the hidden states. Then runs of one process
    and of several take turns; all train on equally many tokens. Each process reads `loop.rows` rows
    a step. The ratio of each turn is printed with the share of the time spent waiting for hidden
    states.
    """
    require(hasattr(psutil.Process, "cpu_affinity"), "this system cannot pin processes to cores")
    cores = len(psutil.Process().cpu_affinity())
    require(1 < count <= cores, f"--count {count}: give 2 or more, up to the {cores} cores here")
    with TemporaryDirectory() as temporary:
        place = Path(temporary)
        roots = [
            f"responses.root={place / 'responses'}",
            f"hidden_states.root={place / 'hidden_states'}",
        ]
        command = ["train.py", *WORK, *overrides, *FIXED, *roots]

        def trained(name: str, size: int, *more: str) -> tuple[float, float]:
            """Tokens/s, and the share of the time that was spent waiting."""
            folder = place / name
            done = launched([*command, *more, f"hydra.run.dir={folder}"], size, pinned=True)
            require_done(done, f"training on {size} processes" if size > 1 else "training")
            records = map(
                json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            )
            last = [record["train"] for record in records if "train" in record][-1]
            return last["tokens_per_second"], last["waiting"]

        console.print("storing responses and hidden states")
        trained("first", 1, "loop.max_tokens=1")
        rows, ratios = list[list[str]](), list[float]()
        for turn in range(turns):
            sizes = (1, count) if turn % 2 else (count, 1)
            speeds = {size: trained(f"{turn}-{size}", size) for size in sizes}
            ratios.append(speeds[count][0] / speeds[1][0])
            cells = [f"{speeds[n][0]:,.0f} (waiting {speeds[n][1]:.2%})" for n in (1, count)]
            rows.append([str(turn + 1), *cells, f"{ratios[-1]:.2f}"])
            console.print(f"turn {turn + 1} of {turns}: {ratios[-1]:.2f}")
        show(["turn", "1 process, tokens/s", f"{count} processes, tokens/s", "ratio"], rows)
        low, middle, high = np.quantile(ratios, (0, 0.5, 1))
        console.print(
            f"{count} processes train {middle:.2f} times as fast ({low:.2f} to {high:.2f})"
        )

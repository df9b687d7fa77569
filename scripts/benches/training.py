"""Training: memory and time of the loss, and tokens/s of a step."""

import json
import math
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from benches.turns import ratio, show

from specdec.errors import require
from specdec.losses.chunked import at_once, chunked
from specdec.losses.loss_config import LossConfig
from specdec.losses.loss_terms import LossInputs, nla
from specdec.measure.costs import timed
from specdec.progress import console
from specdec.targets.loading import load_target
from specdec.targets.target_config import resolved
from specdec.theory.alpha import acceptance
from train.accelerated import accelerator_of
from train.data.run_data import read_run_data
from train.machine_timing import training_step
from train.run_config import composed, register
from train.target_defaults import with_target_defaults

ROOT = Path(__file__).resolve().parents[2]
WIDTH, VOCAB = 576, 8192  # SmolLM2's width, and the size of the default draft vocabulary


def loss_cost(way: str, positions: int, vocab: int) -> tuple[float, float]:
    """The memory (MB) that a loss, all α and the gradients add at their peak, and the seconds that
    they take. Each call needs a fresh process, since the recorded peak of a process never falls."""
    torch.manual_seed(0)
    hidden = torch.randn(positions, 1, WIDTH, requires_grad=True)
    final, nothing = torch.randn(positions, WIDTH), torch.full((positions, 1), -1)
    head = torch.nn.Parameter(torch.randn(vocab, WIDTH).div_(WIDTH**0.5))
    log_z = math.log(vocab) + 0.5  # about that of logits drawn from a standard normal distribution

    def part(rows: slice, some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, of_target = (some[:, 0] @ head.T)[:, None], (final[rows] @ head.detach().T)[:, None]

        def few(at: slice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids = nothing[rows][at]
            unread = {"hidden": logits, "target_hidden": logits}
            log_p, log_q = of_target[at] - log_z, logits.log_softmax(-1)
            piece = LossInputs(log_p, log_q, ids, ids, valid=ids < 0, logits=logits, **unread)
            return nla(piece).sum(), torch.stack(acceptance(piece)).sum((1, 2))

        if way != "fused":
            return few(slice(None), logits)
        return chunked(few, [logits], [], at_once(logits))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chunk = positions if way == "plain" else LossConfig().chunk
    seconds, _ = timed(lambda: chunked(part, [hidden], [head], chunk)[0].backward(), hidden.device)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds


def loss(
    *,
    positions: Annotated[Sequence[int], "in a step"] = (1024, 2048, 4096, 8192),
    vocab: Annotated[int, "of target and draft"] = VOCAB,
    ways: Annotated[Sequence[str], "some of plain, chunks, fused"] = ("plain", "chunks", "fused"),
    runs: Annotated[int, "of each way, in turn"] = 3,
) -> None:
    """Peak memory and time of a loss, all α and the gradients: medians over fresh processes.

    plain computes everything at once; chunks computes one chunk of anchors after another; fused, as
    in training, also computes the loss of a chunk a few rows at a time.
    """
    require(
        set(ways) <= {"plain", "chunks", "fused"},
        f"--ways {' '.join(ways)}: give some of plain, chunks and fused",
    )
    rows = []
    fresh = get_context("spawn")
    with ProcessPoolExecutor(1, fresh, max_tasks_per_child=1) as processes:
        for count in positions:
            calls = [*ways] * runs
            sizes = [count] * len(calls), [vocab] * len(calls)
            made = list(processes.map(loss_cost, calls, *sizes))
            cells = []
            for i in range(len(ways)):
                mb, seconds = (statistics.median(x) for x in zip(*made[i :: len(ways)]))
                cells += [f"{mb:,.0f}", f"{seconds:.2f}"]
            rows.append([f"{count:,}", *cells])
    show(["positions", *(f"{way}, {unit}" for way in ways for unit in ("MB", "s"))], rows)


def throughput(
    overrides: Annotated[Sequence[str], "of train.py, such as data.limit=200"] = (),
    *,
    rows: Annotated[Sequence[int], "per step"] = (1, 2, 4),
) -> None:
    """Training tokens/s, and memory on a GPU, by the number of rows in a step.

    A step is forward, loss, backward, clipping and AdamW; the target's hidden states are read
    before it. Shows medians over steps, and the peak of GPU memory, which includes the target.
    """
    register()
    given = ["data.responses=data", "data.limit=60", "data.too_long=truncate", "drafter.depth=3"]
    cfg, _ = with_target_defaults(composed([*given, f"drafter.draft_vocab={VOCAB}", *overrides]))
    target = load_target(cfg.target)
    documents = read_run_data(cfg.data, target).train
    on_gpu = target.device.type == "cuda"
    cfg = replace(cfg, target=resolved(cfg.target))
    accelerator = accelerator_of(cfg.target, cfg.loop.precision)
    found = []
    for size in rows:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        of_size = replace(cfg, loop=replace(cfg.loop, rows=size))
        step = training_step(of_size, target, documents, accelerator)
        steps = [timed(step, target.device) for _ in range(max(4, 24 // size))][1:]
        speed = statistics.median(tokens / seconds for seconds, tokens in steps)
        peak = f"{torch.cuda.max_memory_allocated() / 2**20:,.0f}" if on_gpu else "none used"
        found.append([str(size), f"{speed:,.0f}", peak])
    share = sum(int(d.mask.sum()) for d in documents) / sum(len(d.ids) for d in documents)
    console.print(f"{target.dtype}; share of tokens with a loss: {share:.2f}")
    show(
        [f"rows of {cfg.data.longest_document} per step", "tokens/s", "peak GPU memory, MB"], found
    )


def training(
    overrides: Annotated[Sequence[str], "of train.py; by default, the quickstart's recipe"] = (),
    *,
    against: Annotated[Path | None, "another checkout of Draftsmith, timed in turn"] = None,
    turns: Annotated[int, "steps of each checkout"] = 15,
) -> None:
    """Training tokens/s, also of another checkout, and the share of a step that is products.

    A step is forward, loss, backward, clipping and AdamW; the target's hidden states are read
    before it. The share is the time of the step's matrix products, each timed separately, divided
    by the step's. Each checkout has its own process, and their steps take turns. Shows medians and
    quartiles.
    """
    roots = {"this checkout": ROOT} | ({str(against): against.resolve()} if against else {})
    for name, root in roots.items():
        there = (
            root / "specdec" / "__init__.py"
        ).is_file()  # else the installed one would be timed
        require(there, f"--against {name} is no checkout of Draftsmith")
    given = [
        "experiment=quickstart",
        "data.responses=data",
        "data.limit=60",
        "data.too_long=truncate",
    ]
    with ExitStack() as ending:
        steps = {
            name: ending.enter_context(TimedSteps(name, root, [*given, *overrides]))
            for name, root in roots.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(turns):
            for name, of in steps.items():
                seconds[name].append(of.ask("step")["seconds"])
        products = {name: of.ask("products") for name, of in steps.items()}
    rows, (first, *_) = [], seconds
    for name, times in seconds.items():
        middle, alone = statistics.median(times), products[name]
        cells = [name, f"{steps[name].tokens / middle:,.0f}", f"{1000 * middle:,.0f}"]
        cells += [f"{alone['seconds'] / middle:.2f}", f"{alone['operations'] / 1e9:,.1f}"]
        cells += [f"{alone['operations'] / 1e9 / alone['seconds']:,.0f}"]
        rows.append([*cells, "" if name == first else ratio(times, seconds[first])])
    columns = ["", "tokens/s", "ms per step", "share of the products", "GFLOP per step"]
    show([*columns, "GFLOP/s of the products", f"{first} is faster by"], rows)


class TimedSteps:
    """A process that does the training steps of a checkout on request (see steps.py)."""

    def __init__(self, name: str, root: Path, overrides: Sequence[str]) -> None:
        self.name, scripts = name, Path(__file__).resolve().parent
        command = [sys.executable, str(scripts / "steps.py"), *overrides]
        paths = os.pathsep.join([str(root), str(scripts.parent)])
        self.process = subprocess.Popen(
            command,
            cwd=root,
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        self.tokens = self.answer()["tokens"]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, request: str) -> dict[str, Any]:
        """The reply to a request. Raises UserError if the process has ended."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `answer` then raises the error
            self.process.stdin.write(f"{request}\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        require(bool(line), f"{self.name} cannot be measured: its process ended, as it says above")
        found: dict[str, Any] = json.loads(line)
        return found

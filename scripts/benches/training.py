"""Training: peak memory of the loss, and tokens/s of a step."""

import resource
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
from benches.turns import show
from hydra import compose, initialize_config_dir

from specdec.measure.costs import timed
from specdec.objectives.chunked import chunked
from specdec.objectives.losses import nla
from specdec.objectives.objective import ObjectiveConfig
from specdec.objectives.piece import Piece
from specdec.progress import console
from specdec.target.loading import load_target, resolved
from train.config import register, resolve
from train.data.split import split_documents
from train.plan import rehearsal
from train.processes import accelerator_of

CONF = Path(__file__).resolve().parents[2] / "conf"
WIDTH, VOCAB = 576, 8192  # of SmolLM2 and the default draft vocabulary
RUNS = 3


def loss_memory(kind: str, positions: int) -> float:
    """The memory (MB) that one loss and its gradients add at their peak, in a fresh process."""
    torch.manual_seed(0)
    hidden = torch.randn(positions, 1, WIDTH, requires_grad=True)
    final = torch.randn(positions, WIDTH)
    head = torch.nn.Parameter(torch.randn(VOCAB, WIDTH) / 24)
    nothing = torch.full((positions,), -1)

    def part(piece: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = (final[rows] @ head.detach().T).log_softmax(-1)
        log_q = (piece[:, 0] @ head.T).log_softmax(-1)
        ids, valid = nothing[rows], nothing[rows] < 0
        loss = nla(Piece(log_p, log_q, ids, ids, valid, piece[:, 0], final[rows])).sum()
        return loss, loss.detach()[None]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "plain":
        loss, _ = part(hidden, slice(0, positions))
    else:
        loss, _ = chunked(part, hidden, [head], ObjectiveConfig().chunk)
    loss.backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def loss() -> None:
    """Peak memory of the chunked loss and its plain twin."""
    rows = []
    fresh = get_context("spawn")
    with ProcessPoolExecutor(1, fresh, max_tasks_per_child=1) as processes:
        for positions in (1024, 2048, 4096, 8192):
            medians = [
                statistics.median(processes.map(loss_memory, [kind] * RUNS, [positions] * RUNS))
                for kind in ("chunked", "plain")
            ]
            rows.append([f"{positions:,}", *(f"{mb:.0f}" for mb in medians)])
    show(["positions", "chunked, MB", "plain twin, MB"], rows)


def throughput(
    overrides: Annotated[Sequence[str], "of train.py, such as data.limit=200"] = (),
    *,
    rows: Annotated[Sequence[int], "per step"] = (1, 2, 4),
) -> None:
    """Training tokens/s, and memory on a GPU, by rows of at most data.max_length.

    A step is forward, loss, backward, clipping and AdamW; its features are read beforehand. Shows
    medians over steps, and the most memory that any step used.
    """
    register()
    given = ["data.answers=data", "data.limit=60", "data.too_long=truncate", "drafter.depth=3"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = resolve(compose("config", [*given, f"drafter.draft_vocab={VOCAB}", *overrides]))
    target = load_target(cfg.target)
    documents = split_documents(cfg.data, target.tokenizer).train
    on_gpu = target.device.type == "cuda"
    cfg = replace(cfg, target=resolved(cfg.target))
    accelerator = accelerator_of(cfg)
    found = []
    for size in rows:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        of_size = replace(cfg, loop=replace(cfg.loop, rows=size))
        step = rehearsal(of_size, target, documents, accelerator)
        steps = [timed(step) for _ in range(max(4, 24 // size))][1:]
        speed = statistics.median(tokens / seconds for seconds, tokens in steps)
        peak = f"{torch.cuda.max_memory_allocated() / 2**20:,.0f}" if on_gpu else "none used"
        found.append([str(size), f"{speed:,.0f}", peak])
    share = sum(int(d.mask.sum()) for d in documents) / sum(len(d.ids) for d in documents)
    console.print(f"{target.dtype}; share of tokens with a loss: {share:.2f}")
    show([f"rows of {cfg.data.max_length} a step", "tokens/s", "peak GPU memory, MB"], found)

"""Training: peak memory of the loss, and tokens/s of a step with cached features."""

import resource
import statistics
import subprocess
import sys
import tempfile
from functools import partial

import torch
from benches.subject import configured, console
from rich.progress import Progress
from rich.table import Table

from specdec.drafters import family, frequent_tokens
from specdec.errors import require
from specdec.forcing.teacher import TeacherForcing
from specdec.measure.costs import timed
from specdec.objectives.chunked import chunked
from specdec.objectives.losses import nla
from specdec.objectives.objective import ObjectiveConfig
from specdec.objectives.piece import Piece
from specdec.sampling.sampler import Sampler
from specdec.target.loading import load_target
from train import optim
from train.data.packing import pack
from train.data.split import split_documents
from train.features.source import Online
from train.features.store import Disk, FeaturesConfig, Kind, Store

WIDTH, VOCAB = 576, 8192  # of SmolLM2 and the default draft vocabulary


def loss_memory(kind: str, positions: int) -> None:
    """Print the memory (MB) that one loss and its gradients add at their peak."""
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
    whole = slice(0, positions)
    if kind == "plain":
        loss, _ = part(hidden, whole)
    else:
        loss, _ = chunked(part, hidden, [head], ObjectiveConfig().chunk)
    loss.backward()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def loss() -> None:
    """Peak memory of both, each in a process of its own."""
    table = Table("positions", "chunked, MB", "plain twin, MB")
    for positions in (1024, 2048, 4096, 8192):
        cells = []
        for kind in ("chunked", "plain"):
            runs = [
                float(
                    subprocess.run(
                        [sys.executable, sys.argv[0], "loss-memory", kind, str(positions)],
                        capture_output=True,
                        text=True,
                        check=True,
                    ).stdout
                )
                for _ in range(3)
            ]
            cells.append(f"{statistics.median(runs):.0f}")
        table.add_row(f"{positions:,}", *cells)
    console.print(table)


def throughput(overrides: list[str], rows: list[int]) -> None:
    """Tokens/s of a step (forward, loss, backward, clipping, AdamW), its median over steps, and on
    a GPU the most memory that it took; for each number of rows of at most data.max_length."""
    given = ["data.answers=data", "data.limit=60", "data.too_long=truncate", "drafter.depth=3"]
    cfg = configured(*given, f"drafter.draft_vocab={VOCAB}", *overrides)
    target, longest = load_target(cfg.target), cfg.data.max_length
    documents = split_documents(cfg.data, target.tokenizer).train
    packed = [r for r in pack(documents, longest) if len(r.ids) > 0.7 * longest]
    require(bool(packed), f"no row is 70 % full at data.max_length={longest}: give a smaller one")
    sampler = Sampler(1.0)
    vocab = frequent_tokens((d.ids.tolist() for d in documents), cfg.drafter.draft_vocab)
    drafter = family(cfg.drafter.name).build(cfg.drafter, target, vocab).float()
    forcing = TeacherForcing(drafter.to(target.device), target, sampler)
    table = Table(f"rows of {longest} a step", "tokens/s", "peak GPU memory, MB")
    with tempfile.TemporaryDirectory() as root, Progress(disable=True) as progress:
        store = Store(FeaturesConfig(root=root), Kind.of(target, drafter.needs, sampler))
        store.fill(Online(target, drafter.needs, sampler, packed), progress)
        source = Disk(store, drafter.needs, packed, target.device)

        def step(optimizer: torch.optim.Optimizer, indices: list[int]) -> None:
            half = target.dtype == torch.bfloat16
            with torch.autocast(target.device.type, torch.bfloat16, enabled=half):
                total, seen = forcing(source.batch(indices))
            (total / seen[0, 0]).backward()
            torch.nn.utils.clip_grad_norm_(forcing.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        for size in rows:
            optimizer = optim.build(forcing, optim.OptimConfig())
            if target.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            speeds = []
            for n in range(max(4, 24 // size)):
                indices = [i % len(packed) for i in range(n * size, (n + 1) * size)]
                seconds, _ = timed(partial(step, optimizer, indices))
                speeds.append(sum(len(packed[i].ids) for i in indices) / seconds)
            peak = "none used"
            if target.device.type == "cuda":
                peak = f"{torch.cuda.max_memory_allocated() / 2**20:,.0f}"
            table.add_row(str(size), f"{statistics.median(speeds[1:]):,.0f}", peak)
    anchors = sum(sum(r.mask) for r in packed) / sum(len(r.ids) for r in packed)
    console.print(f"{target.dtype}; share of tokens with a loss: {anchors:.2f}")
    console.print(table)

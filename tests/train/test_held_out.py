"""Held-out figures where several processes share the rows.

Run alone: python -m pytest tests/train/test_held_out.py
"""

import io
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from rich.progress import Progress, TaskID
from torch import Tensor

from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.forcing.teacher import TeacherForcing
from specdec.progress import Terminal, bars
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from tests.drafters.families import make_drafter, make_target, text
from tests.tiny import lm
from train.data.sequences import Document, pack_rows
from train.held_out import evaluate
from train.hidden_states.batches import OnlineBatches


@dataclass
class Process:
    """One process of several, in place of accelerate's. What it gives to a reduction is kept, and
    what the others gave is added."""

    process_index: int
    num_processes: int
    others: list[Tensor] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self, x: Tensor, how: str) -> Tensor:
        assert how == "sum"
        self.given.append(x)
        if self.others:
            other = self.others[len(self.given) - 1]
            assert x.shape == other.shape, "a collective of unequal shapes hangs"
            return x + other
        return x


def test_a_process_without_rows_adds_nothing_and_all_reduce_alike() -> None:
    target = make_target()
    drafter = make_drafter("medusa", target)
    ids = text(0)[0].numpy().astype(np.int32)
    rows = pack_rows([Document("d", ids, np.arange(len(ids)) > 2)], len(ids))
    source = OnlineBatches(target, drafter.needs, Sampler(1.0), rows)
    forcing = TeacherForcing(drafter, target, Sampler(1.0))
    alone, first = Process(0, 1), Process(0, 2)
    whole = evaluate(forcing, source, 1, alone)  # type: ignore[arg-type]
    evaluate(forcing, source, 1, first)  # type: ignore[arg-type]
    second = Process(1, 2, others=first.given)  # for which no row is left
    assert evaluate(forcing, source, 1, second) == whole  # type: ignore[arg-type]
    assert all(not x.any() for x in second.given)


def test_validation_advances_a_bar_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents of 24 tokens in rows of their own. Without a terminal, lines say how fast it
    is: 24 tokens in 2 seconds."""
    target, seconds, out = make_target(), [0.0], io.StringIO()
    drafter = make_drafter("medusa", target)
    documents = []
    for seed in range(2):
        ids = text(seed)[0].numpy().astype(np.int32)
        documents.append(Document(str(seed), ids, np.arange(len(ids)) > 2))
    rows = pack_rows(documents, len(ids))
    source = OnlineBatches(target, drafter.needs, Sampler(1.0), rows)
    monkeypatch.setattr("specdec.progress.SECONDS", 0.0)
    shown = bars(Terminal(file=out))
    shown.get_time = lambda: seconds[0]
    advanced = list[float]()

    def advance(task: TaskID, count: float) -> None:
        seconds[0] += 2.0
        advanced.append(count)
        Progress.advance(shown, task, count)
        shown._print(task)  # type: ignore[attr-defined]

    monkeypatch.setattr(shown, "advance", advance)
    forcing: Any = TeacherForcing(drafter, target, Sampler(1.0))
    evaluate(forcing, source, 1, Process(0, 1), progress=shown)  # type: ignore[arg-type]
    assert advanced == [len(ids)] * 2 and not shown.tasks
    assert out.getvalue().splitlines()[-1] == f"  100%  validation  {len(ids) / 2:,.0f} tokens/s"


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["eagle3", "lm"])
def test_promised_tau_is_that_of_the_decoder_on_the_target_s_own_responses(
    family: str, gamma: int
) -> None:
    """Greedy, in float64, at the γ that is decoded, below and beyond the trained depth of 3: each
    speculation step of the decoder starts where the walk along its response says, and tokens beyond
    the end of a response count on neither side. The responses end at their limit or at an end
    token."""
    target = make_target()
    drafter = lm(target, 0.02) if family == "lm" else make_drafter(family, target)
    drafter = drafter.double().eval()
    assert drafter.limits.depth is None or gamma <= drafter.limits.depth
    prompts = [text(seed)[0, :6].tolist() for seed in range(6)]
    way = Way(drafter, Chain(gamma))
    made = decode(target, prompts, way, max_new_tokens=24, eos=(3, 7, 11))
    assert 1 < min(len(g.ids) for g in made) < 24
    rows = [
        row
        for g in made
        for ids in [np.array(g.prompt + g.ids, dtype=np.int32)]
        for row in pack_rows([Document("d", ids, np.arange(len(ids)) >= len(g.prompt))], 64)
    ]
    source = OnlineBatches(target, drafter.needs, Sampler(1.0), rows)
    forcing = TeacherForcing(drafter, target, Sampler(1.0))
    chain = drafter.depth, gamma
    found = evaluate(forcing, source, 2, Process(0, 1), chain)  # type: ignore[arg-type]
    steps, emitted = sum(len(g.steps) for g in made), sum(len(g.ids) - 1 for g in made)
    assert found.tau_greedy == pytest.approx(emitted / steps, abs=1e-9)
    assert family != "lm" or emitted > 1.1 * steps
    assert found.gamma == gamma and len(found.positions) == drafter.depth

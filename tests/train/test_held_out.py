"""Held-out figures where several processes share the rows.

Run alone: python -m pytest tests/train/test_held_out.py
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.forcing.teacher import TeacherForcing
from specdec.sampling.sampler import Sampler
from tests.drafters.families import make_drafter, make_target, text
from train.data.packing import pack
from train.data.template import Document
from train.features.source import Online
from train.held_out import evaluate


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
    rows = pack([Document("d", ids, np.arange(len(ids)) > 2)], len(ids))
    source = Online(target, drafter.needs, Sampler(1.0), rows)
    forcing = TeacherForcing(drafter, target, Sampler(1.0))
    alone, first = Process(0, 1), Process(0, 2)
    whole = evaluate(forcing, source, 1, alone)  # type: ignore[arg-type]
    evaluate(forcing, source, 1, first)  # type: ignore[arg-type]
    second = Process(1, 2, others=first.given)  # for which no row is left
    assert evaluate(forcing, source, 1, second) == whole  # type: ignore[arg-type]
    assert all(not x.any() for x in second.given)

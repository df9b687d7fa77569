"""What the tests of drafters without training share: targets, drafts and contexts."""

from collections.abc import Iterator
from typing import Any

import torch

from specdec.context import Context, HiddenStateSpec, Proposal
from specdec.drafters import DRAFTERS, Drafter
from specdec.drafters.attention import pieces
from specdec.forcing.teacher import TeacherForcing
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Shape, Static
from specdec.targets.target import Target
from tests.tiny import architectures, batch_of, random_target

V, L = 40, 4
TARGETS = architectures(V, L)
TREE = Static([[0], [1], [0, 0], [1, 0], [0, 1], [0, 0, 0]])


def make(kind: str) -> Target:
    return random_target(TARGETS[kind])


def build(config: Any, target: Target) -> Drafter:
    return DRAFTERS[config.name].build(config, target)


def text(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, V, (length,), generator=generator).tolist()


def drafted(
    drafter: Drafter,
    ctx: Context,
    shape: Shape,
    sampler: Sampler | None = None,
    cache: Any = None,
) -> Proposal:
    draws = RowDraws(range(len(ctx.ids_BT)))
    choose = Choose(sampler or Sampler(0.0), "without", draws, None, V)
    return drafter.draft(ctx, shape, choose, cache)


def decoding(target: Target, rows: list[list[int]], steps: list[list[int]]) -> Iterator[Context]:
    """Contexts as a decoder has them: each step's lengths by row, and the target's cache of all
    but the anchors."""
    ids, cache = torch.tensor(rows), target.new_cache()
    for ends in steps:
        done = cache.lengths if any(cache.lengths) else [0] * len(rows)
        new = [end - 1 - n for end, n in zip(ends, done, strict=True)]
        target.hidden_states(pieces(ids, done, max(new)), HiddenStateSpec(), cache=cache)
        cache.commit(new)
        yield Context(ids[:, : max(ends)], lengths=list(ends), cache=cache)


def forced(drafter: Drafter, target: Target, ids: list[int]) -> Any:
    mask = [[False] * 4 + [True] * (len(ids) - 4)]
    batch = batch_of(target, drafter.needs, Sampler(1.0), [ids], mask)
    table = TeacherForcing(drafter, target, Sampler(1.0))(batch, measure=True)
    whole = table.anchors.valid_NK.all(-1)
    return type(table.alpha)(*(x[whole] for x in table.alpha))

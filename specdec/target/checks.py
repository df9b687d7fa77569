"""Self-checks of a target when it is made: a model that would be read wrongly is refused.

Heads, masks and caches of models differ more than their classes show. If ours did not match the
model's own, α would be measured against a different p from the one that is served.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specdec.context import Needs
from specdec.errors import UserError, first_line, require
from specdec.target.base import Target
from specdec.target.parts import Parts

SAME = 1e-2  # the largest distance of logits that differ only by the order of operations


@contextmanager
def understood(target: Parts) -> Iterator[None]:
    """Turn any error that a model of an unknown kind raises into a UserError."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{target.title} cannot be read ({first_line(error)}): give a causal LM with attention "
            "in every layer, or a T5 or BART"
        ) from error


def check_causal(target: Target) -> None:
    """Raise UserError unless the logits are right, even over a cache with ragged rows and a
    tree."""
    with understood(target), torch.no_grad():
        check_head(target)
        error = _cache_error(target)
    require(
        error <= _limit(target),
        f"{target.title} makes its own masks or positions, or keeps a state other than keys and "
        "values, so it cannot read trees or rows of unequal length: give another target",
    )


@torch.no_grad()
def check_head(target: Parts) -> None:
    """Raise UserError unless `logits(final)` equals what the model itself returns."""
    ids = torch.arange(1, 5, device=target.device)[None] % target.vocab_size
    final = target.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    theirs = target.model(input_ids=ids, use_cache=False).logits
    require(
        _distance(target.logits(final), theirs) <= SAME,
        f"{target.title} turns hidden states into logits in a way that is not supported: give "
        "another target (or add its scaling to head_scaling in specdec/target/parts.py)",
    )


def check_encoder_decoder(target: Target, start: int, twice: bool) -> None:
    """Raise UserError unless `logits(final)` equals what the model itself returns. `start` is the
    decoder's start token; a text holds it `twice` if it also ends the encoder's tokens."""
    some = [i for i in range(target.vocab_size) if i != start][:4]
    encoder = some + [start] * twice
    text, asked, answer = (
        torch.tensor([x], device=target.device)
        for x in (encoder + [start] + some, encoder, [start] + some)
    )
    with understood(target), torch.no_grad():
        _, final = target.features(text, Needs())
        ours = target.logits(final[:, len(encoder) :])
        theirs = target.model(input_ids=asked, decoder_input_ids=answer).logits
    require(
        _distance(ours, theirs) <= _limit(target),
        f"{target.title} decodes in a way that is not supported: give a T5, T5-v1.1, mT5 or BART",
    )


def _cache_error(target: Target) -> float:
    """The distance of a small tree's logits (its second node follows the first), after rows of
    unequal length, from the logits of passes over whole texts."""
    lengths = [9, 5]
    ids = (7 * torch.arange(2 * 12, device=target.device).view(2, 12) + 3) % target.vocab_size
    cache = target.new_cache()
    target.features(ids[:, :9], Needs(), cache=cache)
    cache.keep(lengths)
    parents_BT = torch.tensor(2 * [[-1, 0, -1]], device=target.device)
    _, final = target.features(ids[:, 9:], Needs(), cache=cache, parents_BT=parents_BT)
    found, worst = target.logits(final), 0.0
    for b, n in enumerate(lengths):
        for path in ([0, 1], [2]):
            text = torch.cat([ids[b, :n], ids[b, 9:][path]])[None]
            whole = target.model(input_ids=text).logits[0, n:]
            worst = max(worst, _distance(found[b, path], whole))
    return worst


def _limit(target: Parts) -> float:
    """The distance up to which logits of different passes count as equal."""
    return SAME if target.dtype in (torch.float32, torch.float64) else 0.2


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """The distance of logits [..., V], relative to their spread; infinite if shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = (x.double() - x.double().mean(-1, keepdim=True) for x in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-9))

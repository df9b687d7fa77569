"""What a draft-length policy is: `Length`, what the decoder calls, and what policies share.

The decoder asks `gamma` before a round, `stop` after each drafted token, and tells `observe`
what came of it. Which lengths are lossless: the length must be a *stopping time* of the draft.
Whether a chain ends after its i-th token may depend on past rounds and on what was drafted up
to and including that token, and the token stays in the chain. A length that looks at a token
and then leaves it out, or that looks past it, changes what is committed, whatever it looks at:
q or p. Under that rule both `rejection` and `block` give p exactly (see
tests/decoding/test_length_laws.py).

The policies are in length.py, the one that learns when to stop in disco.py.

Letters: B rows of the batch, S draft vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from specdec.errors import UserError, require

T = TypeVar("T")


class Length(Protocol):
    """What the decoder calls, and nothing else.

    `reads_q`: `stop` reads q, so that the decoder computes it also where it drafts greedily, at
    temperature 1; where it does not, `stop` is never asked. Rows keep their order through a
    round; of a row that has stopped, what comes in is arbitrary and what goes out unused.
    """

    reads_q: bool

    def gamma(self, batch: int) -> int:
        """The most tokens to draft in the coming round of `batch` rows; 0 is a plain step."""
        ...

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        """Rows that draft no further [B] bool, after `token_B`, an index into S, was drawn at
        `depth` from q. The token stays in the chain. Asked after the last one, too: what is
        learned from rounds of one token needs its answer."""
        ...

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """After a round: tokens drafted and accepted, one entry a row."""
        ...


class Whole:
    """A length that is settled before the round: it never stops within one."""

    reads_q = False

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        return torch.zeros_like(token_B, dtype=torch.bool)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        pass


def from_json(kind: type[T], path: Path, what: str, remedy: str) -> T:
    """A dataclass from its JSON file; each fault is a UserError that names the file."""
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or sorted(found) != sorted(names):
            raise TypeError
        return kind(**found)
    except FileNotFoundError:
        raise UserError(f"{path}: no {what} there; {remedy}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the {what} cannot be read ({error}); {remedy}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}; {remedy}") from None
    except TypeError:
        held = ", ".join(names)
        raise UserError(f"{path}: not a {what}, which holds {held}; {remedy}") from None


def check_limit(limit: int) -> None:
    require(limit >= 0, f"length.limit={limit}: give 0 or more tokens to draft")


def check_threshold(threshold: float) -> None:
    require(0 <= threshold <= 1, f"length.threshold={threshold}: give a probability, 0 to 1")

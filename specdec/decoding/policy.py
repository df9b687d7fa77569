"""What a draft-length policy is, and what the policies share.

The decoder calls `gamma` before a round, `stop` after each drafted token, and `observe` with what
became of the round. A policy is lossless where the length is a *stopping time* of the draft:
whether a chain ends after its i-th token may depend on past rounds and on what was drafted up to
and including that token, and the token stays in the chain. A policy that looks at a token and
then leaves it out, or that looks past it, changes what is committed, whether it looks at q or at
p. With a stopping time both `rejection` and `block` give p exactly (see
tests/decoding/test_length_laws.py).

The policies are in length.py, the one that learns when to stop in disco.py.

Letters: B rows of the batch, S draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from specdec.errors import require
from specdec.sampling.trees import DEEPEST

T = TypeVar("T")


class Length(ABC):
    """How many tokens a round drafts. Rows keep their order through a round.

    `reads_q` says that `stop` reads q: the decoder then computes q even where it drafts greedily,
    at temperature 1. Where it is false, `stop` is never called.
    """

    reads_q: bool = False

    @abstractmethod
    def gamma(self, batch: int) -> int:
        """The most tokens to draft in the coming round of `batch` rows; 0 is a plain step."""

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        """Which rows draft no further [B] bool, after `token_B`, indices into S, were drawn at
        `depth` from q. The token stays in the chain. Called after the last token, too, since a
        policy that learns from rounds of one token needs to see it. For a row that has stopped
        the inputs are arbitrary and the answer is ignored."""
        return torch.zeros_like(token_B, dtype=torch.bool)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take what became of a round: tokens drafted and accepted, one entry for each row."""
        return


def check_limit(limit: int) -> None:
    require(0 <= limit <= DEEPEST, f"length.limit={limit}: give 0 to {DEEPEST} tokens to draft")


def check_threshold(threshold: float) -> None:
    require(0 <= threshold <= 1, f"length.threshold={threshold}: give a probability, 0 to 1")

"""Unigram and bigram, counted on the training data: drafters with almost no cost.

unigram: u(y) = (c(y) + a) / (n + a V), where c counts the assistant's tokens in the training texts,
n is their total and a is the pseudo-count `add` (Lidstone). bigram: q(y | x) = (c(x, y) + s u(y)) /
(c(x) + s), the unigram as a Dirichlet prior of s tokens (MacKay and Peto 1995). Leviathan et al.
2023 (Section 4.1) try a bigram as the cheapest draft.

Both are complete distributions, used to draw drafts and to verify them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.context import Context
from specdec.drafters.attention import tokens_from
from specdec.drafters.base import DrafterConfig, Predictor, Sizes
from specdec.errors import require


@dataclass
class UnigramConfig(DrafterConfig):
    """Token counts of the training texts."""

    name: str = "unigram"
    depth: int = 4
    add: float = 0.01  # pseudo-count of every token of the vocabulary, above 0


@dataclass
class BigramConfig(UnigramConfig):
    """Counts of token pairs, with the unigram as prior."""

    name: str = "bigram"
    prior: float = 1.0  # weight of the unigram, in counted tokens, above 0


class Unigram(Predictor):
    fits_texts = True
    """`times_V` counts how often the assistant says each token; before `fit`, u is uniform."""

    Config: ClassVar[type] = UnigramConfig
    times_V: Tensor

    def __init__(self, config: Any, sizes: Any) -> None:
        super().__init__(config, sizes)
        require(config.add > 0, f"drafter.add={config.add}: give a number above 0")
        self.register_buffer("times_V", torch.zeros(self.sizes.target_vocab, dtype=torch.long))

    def fit(self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> None:
        said = [y for ids, mask in zip(texts, masks, strict=True) for y in compress(ids, mask)]
        ids_N = torch.tensor(said, dtype=torch.long, device=self.times_V.device)
        self.times_V = torch.bincount(ids_N, minlength=self.sizes.target_vocab)

    def require_sound(self) -> None:
        super().require_sound()
        require(bool((self.times_V >= 0).all()), "tensor 'times_V' has a count below 0")

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        """The state of a Markov chain [B, A, K, 1]: the token before each drafted one."""
        return tokens_from(ctx, anchors_BA, drafted_BAK, self.depth)[..., None]

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """log q [..., V] itself."""
        return self._unigram().log().expand(*hidden.shape[:-1], -1)

    def _unigram(self) -> Tensor:
        counts_V = self.times_V.float() + self.config.add
        shares_V: Tensor = counts_V / counts_V.sum()
        return shares_V


@dataclass(kw_only=True)
class BigramSizes(Sizes):
    """`pairs`: the number of pairs that occur; 1 before any is counted, so that no tensor is
    empty."""

    pairs: int = 1


class Bigram(Unigram):
    """The pairs (x, y) that occur, ordered by x; those of x are at indices start[x] to start[x +
    1]."""

    Config = BigramConfig
    Sizes = BigramSizes
    sizes: BigramSizes
    start_V1: Tensor
    next_N: Tensor
    pairs_N: Tensor

    def __init__(self, config: BigramConfig, sizes: BigramSizes) -> None:
        super().__init__(config, sizes)
        require(config.prior > 0, f"drafter.prior={config.prior}: give a number above 0")
        self.register_buffer("start_V1", torch.zeros(self.sizes.target_vocab + 1, dtype=torch.long))
        self.register_buffer("next_N", torch.zeros(sizes.pairs, dtype=torch.long))
        self.register_buffer("pairs_N", torch.zeros(sizes.pairs, dtype=torch.long))

    def fit(self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> None:
        super().fit(texts, masks)
        responses = zip(texts, masks, strict=True)
        said = [pair for ids, mask in responses for pair in compress(pairwise(ids), mask[1:])]
        if said:
            both = torch.tensor(said, device=self.next_N.device)
            pairs_N2, self.pairs_N = both.unique(dim=0, return_counts=True)
            after_V = torch.bincount(pairs_N2[:, 0], minlength=self.sizes.target_vocab)
            self.start_V1[1:] = after_V.cumsum(0)
            self.next_N = pairs_N2[:, 1].contiguous()
            self.sizes.pairs = len(pairs_N2)

    def require_sound(self) -> None:
        super().require_sound()
        start, after = self.start_V1, self.next_N
        rising = bool((start[1:] >= start[:-1]).all() and start[0] == 0)
        require(
            rising and int(start[-1]) <= len(after) and bool((self.pairs_N >= 0).all()),
            "tensors 'start_V1' and 'pairs_N' hold impossible counts",
        )
        inside = bool(((after >= 0) & (after < self.sizes.target_vocab)).all())
        require(inside, f"tensor 'next_N' has ids outside 0 to {self.sizes.target_vocab - 1}")

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        x_N = hidden.flatten()
        start_N, count_N = self.start_V1[x_N], self.start_V1[x_N + 1] - self.start_V1[x_N]
        row_N = torch.repeat_interleave(torch.arange(len(x_N), device=x_N.device), count_N)
        first_N = count_N.cumsum(0) - count_N
        at_N = torch.arange(len(row_N), device=x_N.device) + (start_N - first_N)[row_N]
        q_NV = (self.config.prior * self._unigram()).repeat(len(x_N), 1)
        q_NV[row_N, self.next_N[at_N]] += self.pairs_N[at_N].to(q_NV.dtype)
        log_q = (q_NV / q_NV.sum(-1, keepdim=True)).log()
        logits: Tensor = log_q.view(*hidden.shape[:-1], -1)
        return logits

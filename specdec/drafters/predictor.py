"""Drafters with a distribution q of their own at every depth."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.context import Context, Proposal
from specdec.drafters.growth import rereading
from specdec.drafters.proposer import Drafter
from specdec.errors import require
from specdec.sampling.choose import Choose
from specdec.sampling.confidence import variant_of
from specdec.sampling.trees import Growth, Shape


class Predictor(Drafter):
    """A family gives `hidden` and `unembed`; the rest has defaults."""

    # It estimates its own acceptance (`confidence`). The estimate is trained along with the draft,
    # whatever the draft's own loss (see `ObjectiveConfig.loss`).
    estimates_acceptance: ClassVar[bool] = False

    vocab_S: Tensor | None  # target ids of the draft vocabulary, ascending; None = all

    def __init__(self, config: Any, sizes: Any) -> None:
        super().__init__(config, sizes)
        self.register_buffer("vocab_S", None)
        if sizes.draft_vocab:
            self.vocab_S = torch.arange(sizes.draft_vocab)

    @abstractmethod
    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        """Hidden states [B, A, K, D] of every depth at every anchor.

        `drafted_BAk` holds the k = K - 1 tokens drafted so far after each anchor. None means the
        text's own next tokens (teacher forcing), with K = `depth`.
        """

    @abstractmethod
    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """Draft logits [..., S] of depth k from hidden states [..., D]."""

    def confidence(self, hidden_NKD: Tensor) -> Tensor:
        """The α [N, K] that a drafter with `estimates_acceptance` expects at each depth, from
        hidden states. Decoding reads it as the draft's confidence."""
        raise NotImplementedError

    @torch.no_grad()
    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        growth = self.begin(ctx, cache)
        variant = variant_of(choose.sampler.greedy, choose.siblings == "fixed")
        growth.calibration = self.calibrations.of(variant)
        proposal = shape.draft(growth, choose)
        if ctx.cache is not None:
            ctx.cache.drop()  # drafts in the target's own slots, which its pass will overwrite
        q_BGS, V = proposal.q_BGV, self.sizes.target_vocab
        if q_BGS is not None and q_BGS.shape[-1] < V:
            assert self.vocab_S is not None
            q_BGV = q_BGS.new_zeros(*q_BGS.shape[:2], V)
            proposal.q_BGV = q_BGV.index_copy_(-1, self.vocab_S, q_BGS)
        return proposal

    def begin(self, ctx: Context, cache: Any = None) -> Growth:
        """This default reads every node's path again from the start. Families that use a cache
        replace it, and must give the same logits."""

        def logits(anchor_BW: Tensor, drafted_BWk: Tensor) -> Tensor:
            k = drafted_BWk.shape[2]
            return self.unembed(self.hidden(ctx, anchor_BW, drafted_BWk)[:, :, k], k)

        return rereading(ctx, logits)

    def require_sound(self) -> None:
        if (ids_S := self.vocab_S) is not None:
            V, rising = self.sizes.target_vocab, bool((ids_S[1:] > ids_S[:-1]).all())
            require(
                rising and int(ids_S[0]) >= 0 and int(ids_S[-1]) < V,
                f"the ids of the draft vocabulary must rise within 0 to {V - 1}",
            )


def vocabulary(drafter: Drafter | None) -> Tensor | None:
    """The target ids of a drafter's own vocabulary, ascending; None: all, as of copied tokens."""
    return drafter.vocab_S if isinstance(drafter, Predictor) else None


def frequent_tokens(texts: Iterable[Iterable[int]], size: int) -> Tensor:
    """The `size` most frequent token ids, ascending [size]: a draft vocabulary.

    Ties go to the lower id. If too few ids occur, the lowest of the others fill the rest.
    """
    counts = Counter(chain.from_iterable(texts))
    ranked = sorted({*counts, *range(size)}, key=lambda i: (-counts[i], i))
    return torch.tensor(sorted(ranked[:size]))

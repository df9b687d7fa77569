"""Prompt lookup (Saxena 2023): copy what followed the last n tokens when they stood here before.

Nothing to train, nothing read of the target. The longest n-gram up to `max_ngram` that ends at
the anchor and occurs earlier wins, the latest occurrence of it; where there is none, nothing is
drafted. Letters: B batch, T time, A anchors, K depth, V vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.choose import Choose
from specdec.context import Context, Proposal
from specdec.drafters.base import Drafter, copied_chains
from specdec.trees import Shape, Stop

if TYPE_CHECKING:
    from specdec.target import Target

NOTHING = -1  # "no token drafted", in place of an id


@dataclass
class NgramConfig:
    name: str = "ngram"
    depth: int = 10
    max_ngram: int = 3
    min_ngram: int = 1


class Ngram(Drafter):
    Config = NgramConfig
    trainable = False

    @classmethod
    def plan(cls, config: NgramConfig, target: "Target") -> dict[str, Any]:
        return {"target_vocab": target.vocab_size, "draft_vocab": None}

    def copied(self, ids_T: list[int], count: int) -> list[int]:
        """Up to `count` tokens to follow `ids_T`, copied from within it."""
        for n in range(min(self.config.max_ngram, len(ids_T) - 1), self.config.min_ngram - 1, -1):
            tail = ids_T[-n:]
            for end in range(len(ids_T) - 1, n - 1, -1):
                if ids_T[end - n : end] == tail:
                    return ids_T[end : end + count]
        return []

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        """The copied ids themselves [B, A, K, 1], -1 where there is none."""
        depth = self.depth if drafted_BAk is None else drafted_BAk.shape[-1] + 1
        ids = ctx.ids_BT.tolist()
        rows = []
        for b, anchors in enumerate(anchors_BA.tolist()):
            first = [0] * len(ids[b])
            if ctx.position_BT is not None:
                first = [t - p for t, p in enumerate(ctx.position_BT[b].tolist())]
            found = [self.copied(ids[b][first[a] : a + 1], depth) for a in anchors]
            rows.append([f + [NOTHING] * (depth - len(f)) for f in found])
        return torch.tensor(rows, device=anchors_BA.device, dtype=torch.float32)[..., None]

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """0 at the copied token, -inf elsewhere; -inf throughout where nothing is drafted."""
        token = hidden.long()
        logits = hidden.new_full((*token.shape[:-1], self.target_vocab), -torch.inf)
        value = torch.zeros_like(hidden).masked_fill(token == NOTHING, -torch.inf)
        return logits.scatter(-1, token.clamp_min(0), value)

    @torch.no_grad()
    def draft(
        self,
        ctx: Context,
        shape: Shape,
        choose: Choose,
        cache: Any = None,
        stop: Stop | None = None,
    ) -> Proposal:
        return copied_chains([self.copied(ids, shape.depth) for ids in ctx.rows()], ctx)

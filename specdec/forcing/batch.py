"""Rows of text with the target's states for them, from which p is computed."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.context import Context, FeatureSpec
from specdec.forcing.anchors import Anchors, anchors_of
from specdec.forcing.visited import Visited
from specdec.sampling.sampler import Sampler, Summary
from specdec.targets.base import Target
from specdec.targets.parts import Parts


@dataclass
class Batch:
    """Rows of text with the target's states for them, padded to one length."""

    ctx: Context
    final_BTD: Tensor  # the target's final hidden state, from which p is computed
    summary: Summary  # each [B, T]
    mask_BT: Tensor  # the tokens that count for loss and α
    visited: Visited | None = None  # a decoder's rounds, whose anchors and drafts are then read

    def anchors(self, depth: int, per: str) -> Anchors:
        """All valid positions; if rounds were `visited`, only those where one started. See
        `anchors_of`."""
        position_BT, document_BT = self.ctx.documents()
        drafted = None if self.visited is None else self.visited.drafted_BTK(self.mask_BT)
        text = self.mask_BT, document_BT, position_BT
        return anchors_of(*text, depth, per=per, drafted_BTK=drafted)


def summarise(target: Parts, final_BTD: Tensor, sampler: Sampler, chunk: int = 128) -> Summary:
    """`Sampler.summarise` of the target's logits, chunk by chunk of positions; each [B, T].

    Results are written to tensors that are made first: small ones that outlive a chunk would lie
    where its logits lay, and the next chunk would take new memory.
    """
    final_ND, whole = final_BTD.flatten(0, 1), list[Tensor]()
    with exactly(final_BTD):
        for first in range(0, max(1, len(final_ND)), chunk):
            parts = sampler.summarise(target.logits(final_ND[first : first + chunk]))
            whole = whole or [part.new_empty(len(final_ND)) for part in parts]
            for x_N, part in zip(whole, parts, strict=True):
                x_N[first : first + chunk] = part
    return Summary(*(x_N.view(final_BTD.shape[:2]) for x_N in whole))


def exactly(states: Tensor) -> AbstractContextManager[None]:
    """A block in which the target's own head multiplies in the target's precision, even while the
    draft trains in bfloat16: all that p is made of, log Z too, must be rounded in the same way."""
    return torch.autocast(states.device.type, enabled=False)


@torch.no_grad()
def batch_of(
    target: Target, needs: FeatureSpec, sampler: Sampler, text: Context, mask_BT: Tensor
) -> Batch:
    """A batch of the texts in `text`, a context without features: the target reads them here."""
    position_BT, document_BT = text.documents()
    ctx, final = target.features(
        text.ids_BT, needs, position_BT=position_BT, document_BT=document_BT
    )
    return Batch(ctx, final, summarise(target, final, sampler), mask_BT)

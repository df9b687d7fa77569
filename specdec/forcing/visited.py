"""The rounds of a decoder as training data: the draft's own tokens, and the target's states after
them, even after the first one that it rejected.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.context import Context, FeatureSpec
from specdec.sampling.sampler import Summary
from specdec.targets.base import Target


@dataclass
class Visited:
    """The rounds that a decoder made along the rows of a batch, in the order of their anchors.
    Depth k is conditioned on the text up to the anchor and the first k tokens that were drafted
    there; `final_RoKD` is the target's final hidden state after them, from which p is computed."""

    place_Ro: Tensor  # of the anchor at position t of row b: b · T + t
    accepted_Ro: Tensor
    drafted_RoK: Tensor  # -1 where nothing was drafted
    final_RoKD: Tensor
    summary: Summary  # each [Ro, K]

    def drafted_BTK(self, like_BT: Tensor) -> Tensor:
        """The drafted tokens at each position of the batch; -1 where no round began."""
        table = self.drafted_RoK.new_full((like_BT.numel(), self.drafted_RoK.shape[1]), -1)
        drafted: Tensor = table.index_copy(0, self.place_Ro, self.drafted_RoK).unflatten(
            0, like_BT.shape
        )
        return drafted


@torch.no_grad()
def read_drafts(
    target: Target,
    needs: FeatureSpec,
    ids: Sequence[int],
    anchors: Sequence[int],
    accepted: Sequence[int],
    drafted_RoK: Sequence[Sequence[int]],
) -> tuple[Context, Tensor, Tensor]:
    """Run the target over one text and, as branches of it, over the rest of each draft: its tokens
    from the first rejected one to the last but one. Returns the text's context, its final hidden
    states [1, T, D], and those after the first k tokens of each draft [Ro, K, D], which are
    arbitrary at depths that were not drafted."""
    text_1T = torch.tensor([ids], device=target.device)
    cache = target.new_cache()
    ctx, final_1TD = target.features(text_1T, needs, cache=cache)
    shift = len(ids) - target.placed(ids)  # an encoder's tokens take no slot
    tokens: list[int] = []
    parents: list[int] = []
    places = []  # of each round and depth, in the text and then in the branches
    for anchor, count, draft in zip(anchors, accepted, drafted_RoK, strict=True):
        place = anchor
        places.append([place])
        for k, token in enumerate(draft[:-1]):
            if k < count and place + 1 < len(ids):
                place += 1
            elif token >= 0:
                parents.append(place - shift)
                tokens.append(token)
                place = len(ids) + len(tokens) - 1
            places[-1].append(place)
    states_TxD = final_1TD[0]
    if tokens:
        branches = (torch.tensor([x], device=target.device) for x in (tokens, parents))
        _, more = target.features(
            next(branches), FeatureSpec(), cache=cache, parents_BT=next(branches)
        )
        states_TxD = torch.cat([states_TxD, more[0]])
    return ctx, final_1TD, states_TxD[torch.tensor(places, device=target.device)]

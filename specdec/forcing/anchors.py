"""Anchors: the positions of known texts at which a drafter is trained or measured.

Letters: B rows, T time, N anchors of all rows, K depths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# What each depth at each position of a row weighs in the loss, given which are valid: [T, K]
Weigh = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Anchors:
    """Anchors of some rows, in order, and what a loss over them is divided by."""

    row_N: Tensor
    position_N: Tensor
    weight_NK: Tensor  # float32: what each depth weighs in a loss; 0 where it counts for nothing
    total: float  # the weight of depth 0 at all valid positions, drawn as anchors or not

    @property
    def valid_NK(self) -> Tensor:
        """Whether depth k's token is still of the same answer."""
        return self.weight_NK > 0

    def to(self, device: torch.device) -> "Anchors":
        row_N, position_N = self.row_N.to(device), self.position_N.to(device)
        return Anchors(row_N, position_N, self.weight_NK.to(device), self.total)


def together(rows: Sequence[Anchors]) -> Anchors:
    """Anchors of several rows, one given at a time, as those of one batch."""
    row_N = torch.cat([torch.full_like(a.row_N, b) for b, a in enumerate(rows)])
    return Anchors(
        row_N,
        torch.cat([a.position_N for a in rows]),
        torch.cat([a.weight_NK for a in rows]),
        sum(a.total for a in rows),
    )


def anchors_of(
    mask_BT: Tensor,
    document_BT: Tensor,
    position_BT: Tensor,
    depth: int,
    weigh: Weigh | None = None,
    per: str = "token",
) -> Anchors:
    """Anchors of some rows: positions a >= 1 of a document whose token a + 1 counts.

    `mask_BT` marks the tokens that count, `document_BT` the document that a token is of, and
    `position_BT` its place in it. `weigh(valid_TK, b)` gives what each depth at each position of
    row b weighs (see `Drafter.anchors`); None: 1 where valid. `per` "sequence" divides every
    weight by the number of valid positions of its document, "token" leaves them.
    """
    valid_BTK = _valid(mask_BT, document_BT, position_BT, depth)
    share_BT = valid_BTK[..., 0].float()
    if per == "sequence":
        for share_T, document_T in zip(share_BT, document_BT, strict=True):
            for document in document_T.unique():
                of_it = document_T == document
                share_T[of_it] /= share_T[of_it].sum().clamp_min(1)
    weight_BTK = valid_BTK.float()
    if weigh is not None:
        weight_BTK = torch.stack([weigh(valid_TK, b) for b, valid_TK in enumerate(valid_BTK)])
    row_N, position_N = (weight_BTK > 0).any(-1).nonzero(as_tuple=True)
    weight_NK = (weight_BTK * share_BT[..., None])[row_N, position_N]
    return Anchors(row_N, position_N, weight_NK, float(share_BT.sum()))


def _valid(mask_BT: Tensor, document_BT: Tensor, position_BT: Tensor, depth: int) -> Tensor:
    """Whether each depth at each position [B, T, K] predicts a token that counts, of the same
    document, with none before it that does not."""
    T = mask_BT.shape[1]
    mask = nn.functional.pad(mask_BT, (0, depth))
    document = nn.functional.pad(document_BT, (0, depth), value=-2)
    counts = [
        mask[:, k + 1 : k + 1 + T] & (document[:, k + 1 : k + 1 + T] == document_BT)
        for k in range(depth)
    ]
    valid_BTK = torch.stack(counts, -1).cumprod(-1).bool()
    return valid_BTK & (position_BT > 0)[..., None]

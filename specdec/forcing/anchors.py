"""Anchors: the positions of known texts at which a drafter is trained or measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIKE = 16  # sizes of products are rounded up to a multiple; see `rounded`
ROUNDING = 1e-5  # by which the total of a single text can miss 1 with per=sequence


@dataclass(frozen=True)
class Anchors:
    """The anchors of some rows, in order, and the divisor of a loss over them."""

    row_N: Tensor
    position_N: Tensor
    weight_NK: Tensor  # float32: the weight of each depth in a loss; 0 where it does not count
    total: float  # depth 0's weight summed over all valid positions, drawn as anchors or not
    host: "Anchors | None" = None  # the same on the CPU, where they were chosen there

    @property
    def valid_NK(self) -> Tensor:
        """Whether the token at depth k still belongs to the same response as the anchor."""
        return self.weight_NK > 0

    def to(self, device: torch.device) -> "Anchors":
        row_N, position_N, weight_NK = (
            x.to(device, non_blocking=True) for x in (self.row_N, self.position_N, self.weight_NK)
        )
        host = self if self.row_N.device.type == "cpu" else self.host
        return Anchors(row_N, position_N, weight_NK, self.total, host)

    @property
    def nearest(self) -> "Anchors":
        """A copy of the anchors on the CPU, if there is one, else the anchors themselves.
        Operations that depend on their values need no synchronisation there."""
        return self.host or self

    def rounded(self) -> "Anchors":
        """The same anchors, padded to a multiple of `ALIKE` with copies of the last one. The copies
        have weight 0, so they change neither a loss nor a statistic."""
        row_N, position_N = rounded(self.row_N), rounded(self.position_N)
        more = len(row_N) - len(self.row_N)
        return Anchors(
            row_N, position_N, nn.functional.pad(self.weight_NK, (0, 0, 0, more)), self.total
        )

    def grid(self, rows: int) -> tuple[Tensor, Tensor]:
        """The anchors as a padded table [B, A] of positions, and the column [N] of each anchor in
        it."""
        row_N, position_N = self.nearest.row_N, self.nearest.position_N
        counts_B = torch.bincount(row_N, minlength=rows)
        first_B = counts_B.cumsum(0) - counts_B
        column_N = torch.arange(len(row_N), device=first_B.device) - first_B[row_N]
        where_BA = row_N.new_ones(rows, int(counts_B.max()))
        where_BA[row_N, column_N] = position_N
        device = self.row_N.device
        return where_BA.to(device, non_blocking=True), column_N.to(device, non_blocking=True)


def rounded(x_N: Tensor) -> Tensor:
    """The entries, with the last one repeated until their number is a multiple of `ALIKE`. oneDNN
    prepares a product for every new size, and rows of text seldom have the same number of anchors:
    without padding, steps take a seventh longer (docs/notebook)."""
    return torch.cat([x_N, x_N[-1:].expand(-len(x_N) % ALIKE if len(x_N) else 0)])


def together(rows: Sequence[Anchors]) -> Anchors:
    """The anchors of single rows, joined into those of one batch."""
    return Anchors(
        torch.cat([torch.full_like(a.row_N, b) for b, a in enumerate(rows)]),
        torch.cat([a.position_N for a in rows]),
        torch.cat([a.weight_NK for a in rows]),
        sum(a.total for a in rows),
    )


def divisor(totals: Sequence[float]) -> float:
    """The divisor of the loss over the anchors of several rows: the sum of their totals, or 1 if
    they have no anchors."""
    total = sum(totals)
    return total if 0 < total <= 1 - ROUNDING else max(total, 1)


def anchors_of(
    mask_BT: Tensor,
    document_BT: Tensor,
    position_BT: Tensor,
    depth: int,
    weigh: Callable[[Tensor], Tensor] | None = None,
    per: str = "token",
    drafted_BTK: Tensor | None = None,
    weight_BT: Tensor | None = None,
) -> Anchors:
    """The anchors of some rows: positions a >= 1 of a document whose token a + 1 counts.

    `mask_BT` marks the tokens that count; `document_BT` and `position_BT` are those of `Context`.
    Depth k at an anchor is valid if its token and all before it count and belong to the anchor's
    document. With `drafted_BTK`, the tokens that a decoder's speculation steps drafted at their
    anchors and -1 elsewhere, depth k is valid if a token was drafted there. `weigh` maps the valid
    depths at the positions of a row to their weights [T, K] (see `Trainable.anchors`); None: 1
    where valid. `per` "sequence" divides every weight by the number of valid positions in its
    document. `weight_BT` is the relative weight of each token: an anchor has the weight of the
    token after it or, in a decoder's step, of its own token.
    """
    T = mask_BT.shape[1]
    mask = nn.functional.pad(mask_BT, (0, depth))
    document = nn.functional.pad(document_BT, (0, depth), value=-2)
    counts = [
        mask[:, k : k + T] & (document[:, k : k + T] == document_BT) for k in range(1, depth + 1)
    ]
    valid_BTK = torch.stack(counts, -1).cumprod(-1).bool() & (position_BT > 0)[..., None]
    if drafted_BTK is not None:
        valid_BTK = drafted_BTK >= 0
    share_BT = valid_BTK[..., 0].float()
    if per == "sequence":
        for share_T, document_T in zip(share_BT, document_BT, strict=True):
            for document in document_T.unique():
                of_it = document_T == document
                share_T[of_it] /= share_T[of_it].sum().clamp_min(1)
    if weight_BT is not None:
        after_BT = nn.functional.pad(weight_BT[:, 1:], (0, 1))
        share_BT = share_BT * (after_BT if drafted_BTK is None else weight_BT)
    weight_BTK = valid_BTK.float() if weigh is None else torch.stack([*map(weigh, valid_BTK)])
    row_N, position_N = (weight_BTK > 0).any(-1).nonzero(as_tuple=True)
    weight_NK = (weight_BTK * share_BT[..., None])[row_N, position_N]
    return Anchors(row_N, position_N, weight_NK, float(share_BT.sum()))

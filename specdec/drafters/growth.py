"""How a round's tree grows: the `Growth` of each kind of drafter."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.context import Context
from specdec.drafters.gather import pieces, unread
from specdec.runtime.cache import SlotCache
from specdec.sampling.trees import Growth


def with_depth(
    grow: Callable[[Tensor, Tensor | None, int], Tensor],
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """`Growth.grow` from a function that also takes the depth of the new nodes."""
    depths = [0]  # the depth of the anchor, then of every node

    def told(tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
        depth = 1 + depths[-1 if parents_BW is None else int(parents_BW[0, 0]) + 1]
        depths.extend([depth] * tokens_BW.shape[1])
        return grow(tokens_BW, parents_BW, depth)

    return told


def growth_over(
    cache: SlotCache, ctx: Context, read: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
) -> Growth:
    """The growth of a model with a cache of its own, which first reads the tokens committed since
    the last round. `read(ids, slots, last)` gives the logits [B, W, S] after ids [B, W]. Each id
    follows its slot in `slots` [B, W]; if that is None, the ids form a chain. With indices `last`
    [B, 1], only the logits there [B, 1, S] are given."""
    new = unread(cache, ctx.counts())
    ids_BT = pieces(ctx.ids_BT, cache.known(), max(new))
    first_B1S = read(ids_BT, None, torch.tensor(new, device=ids_BT.device)[:, None] - 1)
    cache.keep(new)
    return Growth(first_B1S[:, 0], lambda ids, above: read(ids, above, None))


def rereading(ctx: Context, logits: Callable[[Tensor, Tensor], Tensor]) -> Growth:
    """The growth of a drafter without a cache, which reads every node's path again from the start.
    `logits(anchor_BW, drafted_BWk)` gives those [B, W, S] after k tokens drafted at an anchor."""
    anchor_B1 = torch.tensor(ctx.counts(), device=ctx.ids_BT.device)[:, None] - 1
    paths: list[list[list[int]]] = [[[]] for _ in ctx.counts()]  # by place: the anchor's first

    def after(W: int) -> Tensor:
        last = [known[-W:] for known in paths]
        drafted_BWk = torch.tensor(last, dtype=torch.long, device=anchor_B1.device)
        return logits(anchor_B1.expand(-1, W), drafted_BWk)

    def grow(tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
        above = [[-1]] * len(paths) if parents_BW is None else (parents_BW + 1).tolist()
        for known, places, tokens in zip(paths, above, tokens_BW.tolist(), strict=True):
            known += [[*known[at], token] for at, token in zip(places, tokens, strict=True)]
        return after(tokens_BW.shape[1])

    return Growth(after(1)[:, 0], grow)


def reading_no_draft(logits: Callable[[int], Tensor]) -> Growth:
    """The growth of a drafter that reads no drafted tokens, given its logits [B, S] by depth."""

    def grow(tokens_BW: Tensor, parents_BW: Tensor | None, depth: int) -> Tensor:
        return logits(depth)[:, None].expand(-1, tokens_BW.shape[1], -1)

    return Growth(
        logits(0), with_depth(grow), lambda depth: torch.stack([*map(logits, range(depth))], 1)
    )

"""Tokens and states of a text, gathered at anchors and depths; and how much of a text is still
unread by a draft's cache.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.context import Context
from specdec.runtime.cache import SlotCache


def states(
    over_text: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    ctx: Context,
    anchors_BA: Tensor,
    drafted_BAk: Tensor | None,
    depth: int,
) -> Tensor:
    """`Predictor.hidden` of a model that reads only tokens, where depth k at anchor a is depth 0 at
    a + k. `over_text` gives its states [B, T, D] for ids, positions and documents [B, T]."""
    if drafted_BAk is None:
        return windows(over_text(ctx.ids_BT, ctx.position_BT, ctx.document_BT), anchors_BA, depth)
    each = truncated_contexts(ctx, anchors_BA, drafted_BAk)
    of_anchors = torch.stack([over_text(one.ids_BT, None, None)[0, a:] for a, one in each])
    return of_anchors.view(*drafted_BAk.shape[:2], drafted_BAk.shape[2] + 1, -1)


def truncated_contexts(
    ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor
) -> Iterator[tuple[int, Context]]:
    """For each anchor, its place in its document, and a context: the document up to the anchor,
    then the tokens drafted there, with the target's final states before the anchor."""
    for b, (anchors, firsts) in enumerate(zip(anchors_BA.tolist(), first_tokens(ctx, anchors_BA))):
        for a, first, drafted_k in zip(anchors, firsts, drafted_BAk[b], strict=True):
            ids_1T = torch.cat([ctx.ids_BT[b, first : a + 1], drafted_k])[None]
            one, lacking = Context(ids_1T), 1 + len(drafted_k)
            if ctx.final_BTD is not None:
                one.final_BTD = pad(ctx.final_BTD[b : b + 1, first:a], (0, 0, 0, lacking))
            yield a - first, one


def first_tokens(ctx: Context, anchors_BA: Tensor) -> list[list[int]]:
    """Where the document of each anchor [B, A] begins."""
    return (anchors_BA - ctx.documents()[0].gather(1, anchors_BA)).tolist()


def tokens_from(ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None, depth: int) -> Tensor:
    """The last token that each depth reads [B, A, K]: the anchor at depth 0, then the drafted
    tokens or, if they are None, the text's own, with K = `depth`."""
    if drafted_BAk is None:
        return text_after(ctx.ids_BT, anchors_BA - 1, depth)
    return torch.cat([ctx.ids_BT.gather(1, anchors_BA)[..., None], drafted_BAk], -1)


def text_after(ids_BT: Tensor, anchors_BA: Tensor, count: int) -> Tensor:
    """The text's own tokens [B, A, count] after each anchor (clamped at the text's end)."""
    return windows(ids_BT, anchors_BA + 1, count)


def windows(x_BT: Tensor, first_BA: Tensor, count: int) -> Tensor:
    """`count` entries [B, A, count, …] starting at each index (clamped at the text's end)."""
    steps = torch.arange(count, device=x_BT.device)
    index = (first_BA[..., None] + steps).clamp_max(x_BT.shape[1] - 1)
    chosen: Tensor = entries(x_BT, index.flatten(1)).unflatten(1, index.shape[1:])
    return chosen


def entries(x_BT: Tensor, index_BA: Tensor) -> Tensor:
    """The entries [B, A, …] of each row at that row's indices."""
    return x_BT.take_along_dim(index_BA.view(*index_BA.shape, *[1] * (x_BT.dim() - 2)), 1)


def pieces(x_BT: Tensor, starts: list[int], count: int) -> Tensor:
    """`count` entries of each row [B, count, …] from that row's start (clamped at the end)."""
    if len(set(starts)) == 1 and starts[0] + count <= x_BT.shape[1]:
        return x_BT[:, starts[0] : starts[0] + count]
    return windows(x_BT, torch.tensor(starts, device=x_BT.device)[:, None], count)[:, 0]


def last_of(x_BTD: Tensor, counts: list[int]) -> Tensor:
    """The last real entry [B, D] of each row; row b has `counts[b]` of them."""
    return pieces(x_BTD, [n - 1 for n in counts], 1)[:, 0]


def unread(cache: SlotCache, counts: list[int]) -> list[int]:
    """How many of each row's `counts[b]` entries a draft's cache has yet to read: at least 1, the
    last, which is read again if none is new. The cache forgets the last round's drafts."""
    cache.drop()
    if len(cache.lengths) != len(counts):
        cache.lengths = [0] * len(counts)
    known = cache.known()
    new = [max(1, count - n) for n, count in zip(known, counts, strict=True)]
    again = [n + more - count for n, more, count in zip(known, new, counts, strict=True)]
    cache.lengths = [length - n for length, n in zip(cache.lengths, again, strict=True)]
    return new

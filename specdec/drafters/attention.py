"""Attention of a draft: over a sequence (training) and over the slots of a cache (drafting).

Training: an anchor attends to the shared keys of its document up to its own pair and, for each
token drafted there, to one more key, which no other anchor sees. One forward pass thus reads all
anchors of a text. Drafting: a forward pass writes its keys into a cache and attends to the slots in
a mask.

The functions at the top gather tokens and states of a text at anchors and depths, and count the
tokens that a draft's cache has not read yet.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from specdec.context import Context
from specdec.drafters.layers import Attention, KeyValue
from specdec.runtime.cache import SlotCache
from specdec.runtime.cpu.machine_probes import ProbeResult, agreement
from specdec.runtime.sliding_cache import SlidingCache


def states(
    over_text: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    ctx: Context,
    anchors_BA: Tensor,
    drafted_BAK: Tensor | None,
    depth: int,
) -> Tensor:
    """`Predictor.hidden` of a model that reads only tokens, where depth k at anchor a is depth 0 at
    a + k. `over_text` returns its states [B, T, D] for ids, positions and documents [B, T]."""
    if drafted_BAK is None:
        return entries_from(
            over_text(ctx.ids_BT, ctx.position_BT, ctx.document_BT), anchors_BA, depth
        )
    each = truncated_contexts(ctx, anchors_BA, drafted_BAK)
    of_anchors = torch.stack([over_text(one.ids_BT, None, None)[0, a:] for a, one in each])
    return of_anchors.view(*drafted_BAK.shape[:2], drafted_BAK.shape[2] + 1, -1)


def truncated_contexts(
    ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor
) -> Iterator[tuple[int, Context]]:
    """For each anchor, its place in its document, and a context: the document up to the anchor,
    then the tokens drafted there, with the target's final states before the anchor."""
    for b, (anchors, firsts) in enumerate(zip(anchors_BA.tolist(), first_tokens(ctx, anchors_BA))):
        for a, first, drafted_k in zip(anchors, firsts, drafted_BAK[b], strict=True):
            ids_1T = torch.cat([ctx.ids_BT[b, first : a + 1], drafted_k])[None]
            one, lacking = Context(ids_1T), 1 + len(drafted_k)
            if ctx.final_BTD is not None:
                one.final_BTD = pad(ctx.final_BTD[b : b + 1, first:a], (0, 0, 0, lacking))
            yield a - first, one


def first_tokens(ctx: Context, anchors_BA: Tensor) -> list[list[int]]:
    """The index where the document of each anchor [B, A] begins."""
    return (anchors_BA - ctx.documents()[0].gather(1, anchors_BA)).tolist()


def tokens_from(ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None, depth: int) -> Tensor:
    """The last token that each depth reads [B, A, K]: the anchor at depth 0, then the drafted
    tokens; without drafted tokens, the text's own, with K = `depth`."""
    if drafted_BAK is None:
        return text_after(ctx.ids_BT, anchors_BA - 1, depth)
    return torch.cat([ctx.ids_BT.gather(1, anchors_BA)[..., None], drafted_BAK], -1)


def text_after(ids_BT: Tensor, anchors_BA: Tensor, count: int) -> Tensor:
    """The text's own tokens [B, A, count] after each anchor (clamped at the text's end)."""
    return entries_from(ids_BT, anchors_BA + 1, count)


def entries_from(x_BT: Tensor, first_BA: Tensor, count: int) -> Tensor:
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
    return entries_from(x_BT, torch.tensor(starts, device=x_BT.device)[:, None], count)[:, 0]


def last_of(x_BTD: Tensor, counts: list[int]) -> Tensor:
    """The last real entry [B, D] of each row; row b has `counts[b]` of them."""
    return pieces(x_BTD, [n - 1 for n in counts], 1)[:, 0]


def unread(cache: SlotCache, counts: list[int]) -> list[int]:
    """The number of each row's `counts[b]` entries that a draft's cache has not read yet, at least
    1: if none is new, the last is read again. The drafts of the last speculation step are removed
    from the cache."""
    cache.drop()
    if len(cache.lengths) != len(counts):
        cache.lengths = [0] * len(counts)
    known = cache.known()
    new = [max(1, count - n) for n, count in zip(known, counts, strict=True)]
    again = [n + more - count for n, more, count in zip(known, new, counts, strict=True)]
    cache.lengths = [length - n for length, n in zip(cache.lengths, again, strict=True)]
    return new


READ = 512  # the most entries that one pass reads into a cache with a window


def reading(cache: SlotCache, counts: list[int], layers: int = 1) -> Iterator[list[int]]:
    """How many of each row's `counts[b]` entries a draft's cache has yet to read, by pass. Each
    pass must be committed before the next. Every row reads its last entry in the last pass.

    A cache without a window has one pass. One with a window skips what no later token sees: the
    last of `layers` layers sees `window` - 1 entries before its own, each of which depends on as
    many before it in the layer below, so `layers` · (`window` - 1) + 1 entries matter, and the
    sinks."""
    if not isinstance(cache, SlidingCache):
        yield unread(cache, counts)
        return
    if len(cache.lengths) == len(counts):  # a text that was cut is read again
        pairs = zip(cache.lengths, counts, strict=True)
        cache.lengths = [n if n <= count else 0 for n, count in pairs]
    new = unread(cache, counts)
    ends = [n + more for n, more in zip(cache.lengths, new, strict=True)]
    if max(ends) <= cache.window:  # nothing is hidden yet
        yield new
        return

    def ahead_of(goals: list[int]) -> list[int]:
        return [max(0, goal - n) for n, goal in zip(cache.lengths, goals, strict=True)]

    sinks = ahead_of([min(cache.sink, end - 1) for end in ends])
    if any(sinks):
        yield sinks
    reach = 1 + layers * (cache.window - 1)
    cache.lengths = [max(n, end - reach) for n, end in zip(cache.lengths, ends, strict=True)]
    for left in range((max(ahead_of(ends)) - 1) // READ * READ, -1, -READ):
        yield ahead_of([end - left for end in ends])


WHOLE = 1 << 18  # the most anchors × keys of a batch for which all scores are held at once
BLOCK = 128  # anchors whose scores are held at once in larger batches, and keys of a tile

compiled = cache(torch.compile)  # each function once

Rotation = tuple[Tensor, Tensor]  # cos and sin [B, T, D], as `Rope` gives them


class Sight(NamedTuple):
    """The shared keys that each anchor attends to: those of its document from `first_BA` to
    `pair_BA`. With a `window`, only the first `sink` of these and, of the `window` positions that
    end with the query's, those that have keys. The query is `ahead` positions after the anchor's
    own key."""

    pair_BA: Tensor  # the anchor's own key, which it always sees
    first_BA: Tensor  # the first key of the anchor's document
    document_BA: Tensor
    document_BP: Tensor  # the key's document, -2 for none
    window: int | None = None
    sink: int = 0
    ahead: int = 0  # only with a window; then the reader has a key of its own

    @classmethod
    def of_anchors(cls, pair_BA: Tensor, position_BP: Tensor, document_BP: Tensor) -> Self:
        """The sight of anchors with these pairs, by each key's place in its document."""
        first_BA = (pair_BA - position_BP.gather(1, pair_BA)).clamp_min(0)
        return cls(pair_BA, first_BA, document_BP.gather(1, pair_BA), document_BP)

    @property
    def start_BA(self) -> Tensor:
        """The first key of each anchor's window, which may lie before its document."""
        if self.window is None:
            return torch.zeros_like(self.pair_BA)
        return self.pair_BA + 1 + self.ahead - self.window

    @property
    def itself_BA(self) -> Tensor:
        """The key that an anchor sees in any case, as a row without any key would be NaN; -1: none
        is needed."""
        return self.pair_BA if not self.ahead else torch.full_like(self.pair_BA, -1)

    def near(self, key: Tensor, pair: Tensor, start: Tensor, first: Tensor) -> Tensor:
        """Whether an anchor with this `pair`, window and document sees a key of its document."""
        inside = key >= start
        return (key <= pair) & (inside | (key < first + self.sink) if self.sink else inside)

    def mask(self, anchors: slice, key_P: Tensor) -> Tensor:
        """The mask [B, A, P] of these anchors and keys."""
        each = self.pair_BA, self.start_BA, self.first_BA, self.itself_BA, self.document_BA
        pair, start, first, itself, document = (x[:, anchors, None] for x in each)
        alike = document == self.document_BP[:, None, key_P]
        return self.near(key_P, pair, start, first) & alike | (key_P == itself)

    def tiles(self, anchors: slice) -> list[int]:
        """The tiles of `BLOCK` keys that contain all keys of these anchors."""
        first_BA, pair_BA = self.first_BA[:, anchors], self.pair_BA[:, anchors]
        start_BA, sinks = self.start_BA[:, anchors].maximum(first_BA), set[int]()
        for first in first_BA.unique().tolist() if self.sink else ():
            sinks.update(range(first // BLOCK, (first + self.sink - 1) // BLOCK + 1))
        last = int(pair_BA.max()) // BLOCK
        near = range(int(start_BA.minimum(pair_BA).min()) // BLOCK, last + 1)
        return sorted({*near, *(tile for tile in sinks if tile <= last)})

    def first(self, anchors: int) -> Self:
        """The sight of each row's first `anchors` anchors."""
        of_anchors = {name: getattr(self, name)[:, :anchors] for name in self._fields[:3]}
        return self._replace(**of_anchors)


class Keys:
    """The keys and values of the anchors of a text, layer by layer: `shared` ones and, for each
    token drafted at an anchor, its `own`. At each anchor a pass reads a block of `size` tokens. The
    slots of a block attend to each other or, if `causal`, only to the slots before them."""

    def __init__(self, sight: Sight, size: int = 1, causal: bool = False) -> None:
        self.sight, self.size, self.causal = sight, size, causal
        self.shared: list[KeyValue] = []
        self.own: list[tuple[KeyValue, ...]] = []

    def share(self, keys_values: KeyValue) -> None:
        """Add the shared keys and values of the next layer."""
        self.shared.append(keys_values)
        self.own.append(())

    def cut(self, anchors: int) -> None:
        """Keep only each row's first `anchors` anchors."""
        few = slice(None), slice(None), slice(anchors)
        self.own = [tuple((key[few], value[few]) for key, value in layer) for layer in self.own]
        self.sight = self.sight.first(anchors)

    def read_ahead(self, depth: int) -> None:
        """Let the next pass read tokens so many positions after the anchors' own keys."""
        if self.sight.window is not None:
            self.sight = self.sight._replace(ahead=depth)

    def heads(self, i: int, query: Tensor) -> Tensor:
        """The heads of layer i [B, H, H, N, D] for queries of all slots. With a window, each slot
        sees other shared keys, and of its anchor's own keys those of its window; a block's slots
        are never more than the window."""
        shared, own, size, sight = self.shared[i], self.own[i], self.size, self.sight
        if sight.window is not None and sight.ahead and size == 1:
            own = own[-sight.window :]
        if not self.causal and (size == 1 or sight.window is None):
            return over_blocks(query, size, shared, sight, own)
        queries, before = query.unflatten(3, (-1, size)).unbind(4), len(own) - size
        slots = [
            attended(
                queries[j],
                shared,
                sight if sight.window is None else sight._replace(ahead=sight.ahead + j),
                own[: before + j + 1] if self.causal else own,
            )
            for j in range(size)
        ]
        return torch.stack(slots, 4).flatten(3, 4)


class At(NamedTuple):
    """The positions [B, N] of blocks among the pairs of a text, and their rotary factors."""

    place_BN: Tensor
    rope: Rotation


class OverSequence:
    """The attention (`Attend`) of a training pass. `rope` holds cos and sin of its places.

    With a `mask`, the places are those of the sequence, and become the shared keys of each layer;
    `mask(i)` is the mask of layer i. The last of the layers, `last`, returns its output only at the
    blocks `at`, unless that is None.

    Without a `mask`, the places are the slots of one block at each anchor. They attend to the
    shared keys in `keys.sight`, and to their anchor's own keys. If no pass has read the sequence,
    `text(i)` returns the inputs from which layer i makes its shared keys, and their rotary factors.
    """

    def __init__(
        self,
        keys: Keys,
        rope: Rotation,
        mask: Callable[[int], Sight] | None = None,
        last: int = 0,
        at: At | None = None,
        text: Callable[[int], tuple[Tensor, Rotation]] | None = None,
    ) -> None:
        self.keys, self.rope, self.mask = keys, rope, mask
        self.last, self.at, self.text = last, at, text

    def asked(self, i: int, x: Tensor) -> Tensor:
        return x if self.at is None or i < self.last else entries(x, self.at.place_BN)

    def __call__(self, i: int, attention: Attention, read: Tensor) -> Tensor:
        keys = self.keys
        if self.mask is None:
            if self.text is not None:
                keys.share(attention.keys_values(*self.text(i)))
            own, query = attention.keys_values(read, self.rope), attention.query(read, self.rope)
            keys.own[i] = *keys.own[i], *by_slot(own, keys.size)
            return attention.joined(keys.heads(i, query))
        keys.share(attention.keys_values(read, self.rope))
        if self.at is None or i < self.last:
            query = attention.query(read, self.rope)
            return attention.joined(attended(query, keys.shared[i], self.mask(i), ()))
        return attention.joined(keys.heads(i, attention.query(self.asked(i, read), self.at.rope)))

    def replace_own(self, i: int, attention: Attention, read: Tensor) -> None:
        """Replace this pass's own keys and values, for later passes, by those of these inputs."""
        own = by_slot(attention.keys_values(read, self.rope), self.keys.size)
        self.keys.own[i] = *self.keys.own[i][: -len(own)], *own


def over_blocks(
    query: Tensor, size: int, shared: KeyValue, sight: Sight, own: tuple[KeyValue, ...]
) -> Tensor:
    """Attention [B, H, H, N, D] of the N = A · `size` slots of all anchors' blocks. A block's slots
    attend to the same keys, so they are treated as further query heads of their anchor."""
    # [B, H, H, size, A, D]: key heads, then their query heads
    query = query.unflatten(3, (-1, size)).transpose(3, 4)
    out = attended(query.flatten(2, 3), shared, sight, own).unflatten(2, (-1, size))
    heads: Tensor = out.transpose(3, 4).flatten(3, 4)
    return heads


def by_slot(keys_values: KeyValue, size: int) -> tuple[KeyValue, ...]:
    """A key and a value [B, H, A, D] for each slot of blocks, from those of all slots
    [B, H, A · size, D]."""
    keys, values = (x.unflatten(2, (-1, size)).unbind(3) for x in keys_values)
    return tuple(zip(keys, values, strict=True))


def attended(query: Tensor, shared: KeyValue, sight: Sight, own: tuple[KeyValue, ...]) -> Tensor:
    """Attention [B, H, H, A, D] of all anchors of a text, for training. `own` holds a key and a
    value [B, H, A, D] for each drafted token; anchor i attends to entry i. The scores of a long
    text are never held at once and are recomputed in the backward pass, so memory is linear in the
    text's length."""
    if len(query) * query.shape[3] * shared[0].shape[2] <= WHOLE:
        return _whole(query, shared, sight, own)
    return (_flex if flexible(query, len(own)).used else _blocks)(query, shared, sight, own)


def _whole(query: Tensor, shared: KeyValue, sight: Sight, own: tuple[KeyValue, ...]) -> Tensor:
    """`attended` with all scores at once."""
    (keys, values), (heads_per_key, A, head_dim) = shared, query.shape[2:]
    P = keys.shape[2]
    mask_BAP = sight.mask(slice(0, A), torch.arange(P, device=keys.device))
    if not own:
        return fused(query, keys, values, mask_BAP)
    scores = (query.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (heads_per_key, A))
    scores = scores.masked_fill(~mask_BAP[:, None, None], -torch.inf)
    diagonal = torch.stack([(query * k[:, :, None]).sum(-1) for k, _ in own], -1)
    precise = torch.promote_types(scores.dtype, torch.float32)
    scores = torch.cat([scores, diagonal], -1).to(precise) * head_dim**-0.5
    weights = scores.softmax(-1).to(values.dtype)
    out: Tensor = (weights[..., :P].flatten(2, 3) @ values).unflatten(2, (heads_per_key, A))
    for j, (_, v) in enumerate(own):
        out = out + weights[..., P + j, None] * v[:, :, None]
    return out


def _blocks(query: Tensor, shared: KeyValue, sight: Sight, own: tuple[KeyValue, ...]) -> Tensor:
    """`attended`, computed for `BLOCK` anchors at a time over the tiles that they see."""
    B, A, P = len(query), query.shape[3], shared[0].shape[2]
    tiles = [x.split(BLOCK, 2) for x in shared]
    numbers = torch.arange(P, device=query.device).split(BLOCK)

    def block(anchors: slice) -> Tensor:
        near = sight.tiles(anchors)
        keys, values = (
            torch.cat([*(tiles[j][n] for n in near), *(pair[j][:, :, anchors] for pair in own)], 2)
            for j in (0, 1)
        )
        mask = sight.mask(anchors, torch.cat([numbers[n] for n in near]))
        itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        mask = torch.cat([mask, *[itself.expand(B, -1, -1)] * len(own)], 2)
        return fused(query[..., anchors, :], keys, values, mask)

    blocks = [slice(start, min(start + BLOCK, A)) for start in range(0, A, BLOCK)]
    again: Any = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is drawn
    return torch.cat([checkpoint(block, anchors, **again) for anchors in blocks], 3)


def _flex(query: Tensor, shared: KeyValue, sight: Sight, own: tuple[KeyValue, ...]) -> Tensor:
    """`attended` by flex attention: one kernel, which skips tiles that no anchor sees. The anchors'
    own keys follow the shared ones, depth by depth."""
    B, A, P = len(query), query.shape[3], shared[0].shape[2]
    keys, values = (torch.cat([shared[j], *(pair[j] for pair in own)], 2) for j in (0, 1))
    pair_BA, first_BA, document_BA, document_BP = sight[:4]
    start_BA, itself_BA = sight.start_BA, sight.itself_BA  # tensors: one graph serves all depths

    def sees(b: Tensor, h: Tensor, anchor: Tensor, key: Tensor) -> Tensor:
        pair, place = pair_BA[b, anchor], key.clamp_max(P - 1)
        alike = document_BA[b, anchor] == document_BP[b, place]
        seen = sight.near(place, pair, start_BA[b, anchor], first_BA[b, anchor]) & alike
        seen = seen | (place == itself_BA[b, anchor])
        return (key < P) & seen | (key >= P) & ((key - P) % A == anchor)

    built: Callable[[Any], Any] = compiled if query.is_cuda else lambda function: function
    tiles = built(create_block_mask)(sees, B, None, A, keys.shape[2], device=query.device)
    out = built(flex_attention)(
        query.flatten(1, 2), keys, values, block_mask=tiles, enable_gqa=True
    )
    grouped: Tensor = out.unflatten(1, query.shape[1:3])
    return grouped


def flexible(query: Tensor, depths: int) -> ProbeResult:
    """Whether to use flex attention for such heads on their device: on a CPU it has no backward
    pass; elsewhere it must run and agree with `_blocks`."""
    if query.is_cpu:
        return ProbeResult(False, "flex attention has no backward pass on a CPU")
    return _probed(query.device, query.dtype, tuple(query.shape[1:3]), query.shape[4], depths)


@cache
def _probed(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], width: int, depths: int
) -> ProbeResult:
    """`flexible` by trial, on one text of 1,024 anchors."""
    generator, A = torch.Generator().manual_seed(0), 1024
    drawn = [
        torch.randn(1, *shape, A, width, generator=generator).to(device, dtype).requires_grad_()
        for shape in (heads, *[heads[:1]] * (2 * depths + 2))
    ]
    query, pairs = drawn[0], tuple(zip(drawn[1::2], drawn[2::2], strict=True))
    position_BA = torch.arange(A, device=device)[None]
    sight = Sight.of_anchors(position_BA, position_BA, torch.zeros_like(position_BA))

    def gradient(read: Callable[..., Tensor]) -> Tensor:
        out = read(query, pairs[0], sight, pairs[1:])
        gradients = torch.autograd.grad(out.square().sum(), drawn)
        return torch.cat([x.flatten() for x in gradients]).cpu()

    limit = 1e-3 if dtype is torch.float32 else 3e-2
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        return agreement(lambda: gradient(_flex), lambda: gradient(_blocks), limit)


class OverSlots:
    """The attention (`Attend`) of a forward pass of drafting, over the slots of a cache.

    `rope` holds cos and sin [B, T, D] of its places, and `mask(i)` [B, T, P] is the mask of slots
    in layer i; None: all. The last of the `layers` returns its output only at `last` [B, T], unless
    that is None.

    Keys other than those of the places can be written: with a `text` [B, T, D], its keys before
    theirs; with `written` [B, T, D], its keys in place of theirs. `rope` then begins with the
    factors of these T and ends with those of the places.
    """

    def __init__(
        self,
        cache: SlotCache,
        rope: Rotation,
        mask: Callable[[int], Tensor | None],
        layers: int = 1,
        last: Tensor | None = None,
        text: Tensor | None = None,
        written: Tensor | None = None,
    ) -> None:
        self.cache, self.rope, self.mask = cache, rope, mask
        self.layers, self.last = layers, last
        self.text, self.written = text, written

    def asked(self, i: int, x: Tensor) -> Tensor:
        return x if self.last is None or i < self.layers - 1 else entries(x, self.last)

    def __call__(self, i: int, attention: Attention, read: Tensor) -> Tensor:
        if self.written is not None:
            (cos, sin), T, num_read = self.rope, self.written.shape[1], read.shape[1]
            keys, values = attention.keys_values(self.written, (cos[:, :T], sin[:, :T]))
            query = attention.query(read, (cos[:, -num_read:], sin[:, -num_read:]))
        elif self.text is not None:
            both, T = torch.cat([self.text, read], 1), self.text.shape[1]
            query, keys, values = projected(attention, both, self.rope, lambda x: x[:, T:])
        else:
            query, keys, values = projected(attention, read, self.rope, partial(self.asked, i))
        keys, values = self.cache.update(keys, values, i)
        mask = self.mask(i)
        seen = None if mask is None else self.asked(i, mask)  # [B, T, P]
        return attention.joined(fused(query, keys, values, seen))


def projected(
    attention: Attention,
    read: Tensor,
    rope: tuple[Tensor, Tensor],
    asked: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, H, T, D] of the places that `asked` selects from a tensor [B, T, …], and keys
    and values [B, H, T, D] of all places [B, T, …] that attention reads."""
    if (all_three := attention.at_once(read, rope)) is None:
        keys, values = attention.keys_values(read, rope)
        cos, sin = map(asked, rope)
        return attention.query(asked(read), (cos, sin)), keys, values
    query, keys, values = all_three
    return asked(query.movedim(3, 1)).movedim(1, 3), keys, values


def fused(query: Tensor, keys: Tensor, values: Tensor, mask_BAP: Tensor | None) -> Tensor:
    """Attention [B, H, H, A, D]. The heads of a group become extra rows of the query, so keys
    and values are not copied."""
    heads_per_key, A = query.shape[2:4]
    mask = None if mask_BAP is None else mask_BAP[:, None].repeat(1, 1, heads_per_key, 1)
    out = nn.functional.scaled_dot_product_attention(
        query.flatten(2, 3), keys, values, attn_mask=mask
    )
    by_anchor: Tensor = out.unflatten(2, (heads_per_key, A))
    return by_anchor

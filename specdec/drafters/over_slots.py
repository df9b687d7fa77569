"""Attention for decoding, over the slots of a cache, into which a pass writes its keys."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specdec.drafters.attention import Attention, fused
from specdec.drafters.gather import entries
from specdec.runtime.cache import SlotCache


class OverSlots:
    """The attention (`Attend`) of a pass of decoding. `rope` holds cos and sin [B, W, Dr], and
    `mask` [B, W, P] says which slots each place sees; None: all.

    The last of the `layers` is asked for its output only at `last` [B, Wo], unless that is None.
    """

    def __init__(
        self,
        cache: SlotCache,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        layers: int = 1,
        last: Tensor | None = None,
    ) -> None:
        self.cache, self.rope, self.mask = cache, rope, mask
        self.layers, self.last = layers, last

    def asked(self, i: int, x: Tensor) -> Tensor:
        return x if self.last is None or i < self.layers - 1 else entries(x, self.last)

    def seen(self, i: int) -> Tensor | None:
        """The slots [B, Wo, P] that layer i sees where it is asked for its output."""
        return None if self.mask is None else self.asked(i, self.mask)

    def __call__(self, i: int, attention: Attention, read: Tensor) -> Tensor:
        query, keys, values = projected(attention, read, self.rope, partial(self.asked, i))
        keys, values = self.cache.update(keys, values, i)
        return attention.joined(fused(query, keys, values, self.seen(i)))


class AfterText(OverSlots):
    """The attention of a pass over one block in each row, which first writes keys of the `text`
    [B, T, D] that is new. `rope` covers that text and the block, and `mask` the block alone."""

    def __init__(
        self, cache: SlotCache, rope: tuple[Tensor, Tensor], mask: Tensor, text: Tensor
    ) -> None:
        super().__init__(cache, rope, mask)
        self.text = text

    def __call__(self, i: int, attention: Attention, read: Tensor) -> Tensor:
        both = torch.cat([self.text, read], 1)
        query, keys, values = projected(
            attention, both, self.rope, lambda x: x[:, self.text.shape[1] :]
        )
        keys, values = self.cache.update(keys, values, i)
        return attention.joined(fused(query, keys, values, self.mask))


def projected(
    attention: Attention,
    read: Tensor,
    rope: tuple[Tensor, Tensor],
    asked: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, Hkv, Hg, Wo, Dh] of the places that `asked` takes from a tensor [B, W, …], and
    keys and values [B, Hkv, W, Dh] of all places [B, W, …] that attention reads."""
    if (all_three := attention.at_once(read, rope)) is None:
        keys, values = attention.keys_values(read, rope)
        cos, sin = map(asked, rope)
        return attention.query(asked(read), (cos, sin)), keys, values
    query, keys, values = all_three
    return asked(query.movedim(3, 1)).movedim(1, 3), keys, values

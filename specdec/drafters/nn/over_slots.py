"""Attention for decoding, over the slots of a cache, into which a pass writes its keys."""

import torch
from torch import Tensor

from specdec.drafters.nn.attention import Attention, fused
from specdec.drafters.nn.gather import entries
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
        keys, values = self.cache.update(*attention.keys_values(read, self.rope), i)
        cos, sin = (self.asked(i, x) for x in self.rope)
        query = attention.query(self.asked(i, read), (cos, sin))
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
        keys, values = self.cache.update(*attention.keys_values(both, self.rope), i)
        cos, sin = (x[:, self.text.shape[1] :] for x in self.rope)
        return attention.joined(fused(attention.query(read, (cos, sin)), keys, values, self.mask))

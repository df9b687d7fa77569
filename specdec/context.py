"""What a drafter may read, and what it returns: the types that every module shares.

Letters: B batch, T time, F target features (layers · width), D width, V vocabulary, N drafted.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from specdec.runtime.cache import SlotCache


@dataclass(frozen=True)
class Needs:
    """What a drafter reads of the target.

    `layers`: residual stream after k layers, as in Hugging Face `hidden_states[k]`, 0 being the
    embeddings and L the stream before the final norm. `final_hidden`: the stream after the
    final norm, which the LM head reads.
    """

    layers: tuple[int, ...] = ()
    final_hidden: bool = False


@dataclass
class Context:
    """Tokens and the target's features of them. A reader at anchor a uses features < a only.

    While decoding, a row's `lengths[b]` tokens end with its anchor, and its features end one
    position earlier; what lies behind is padding. In training (`lengths` None) both have every
    position of a packed row.
    """

    ids_BT: Tensor
    layers_BTF: Tensor | None = None  # the layers of `Needs`, concatenated in their order
    final_BTD: Tensor | None = None
    document_BT: Tensor | None = None  # which document a token is of, -1 = padding; None = one
    position_BT: Tensor | None = None  # position in its document; None = 0, 1, 2, …
    lengths: list[int] | None = None
    texts: list[list[int]] | None = None  # the tokens of each row, where a caller has them
    cache: "SlotCache | None" = None  # the target's own, for drafters that are part of it

    def counts(self) -> list[int]:
        """How many tokens each row has."""
        return self.lengths or [self.ids_BT.shape[1]] * len(self.ids_BT)

    def rows(self) -> list[list[int]]:
        """The tokens of each row as lists."""
        if self.texts is not None:
            return self.texts
        return [ids[:n] for ids, n in zip(self.ids_BT.tolist(), self.counts(), strict=True)]


@dataclass
class Proposal:
    """Drafted tokens: a chain, or a tree where there are `parents_BN`.

    A token of -1 stands for nothing drafted: rows may draft less than their neighbours. A parent
    has a lower index than its children, -1 is the anchor. `q_BNV` is the distribution that each
    token was drawn from, before any sibling was taken out, over the target's vocabulary; None
    means that each token was certain (a copied or a greedily drafted token: q is one-hot).
    """

    tokens_BN: Tensor
    q_BNV: Tensor | None = None
    parents_BN: Tensor | None = None

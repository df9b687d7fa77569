"""What a drafter may read, and what it returns: the types that every module shares.

Letters: B batch, T time, F target features (layers · width), D width, V vocabulary, N drafted.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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

    While decoding, `ids_BT` ends with the anchor, and the features end one position earlier.
    In training both have every position of a packed row.
    """

    ids_BT: Tensor
    layers_BTF: Tensor | None = None  # the layers of `Needs`, concatenated in their order
    final_BTD: Tensor | None = None
    document_BT: Tensor | None = None  # which document a token is of, -1 = padding; None = one
    position_BT: Tensor | None = None  # position in its document; None = 0, 1, 2, …


@dataclass
class Proposal:
    """A chain of drafted tokens.

    `q_BNV` is the distribution each token was drawn from, over the target's vocabulary; None
    means that each token was certain (a copied or a greedily drafted token: q is one-hot).
    """

    tokens_BN: Tensor
    q_BNV: Tensor | None = None


class Pick(Protocol):
    """Turns draft logits [B, S] into tokens [B] and the q [B, S] they came from (None: one-hot)."""

    def __call__(self, logits_BS: Tensor) -> tuple[Tensor, Tensor | None]: ...

"""A piece of training: everything that an objective may look at, for a chunk of anchors.

Letters: N anchors, K depths, S draft vocabulary, D width.
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.theory.alpha import Pair


@dataclass
class Piece(Pair):
    """A chunk of anchors at all depths together.

    It is a `Pair` of log p and log q [N, K, S], with argmax p and the text's own token (`label`)
    [N, K] as indices into the draft vocabulary, -1 where it lacks them. p is normalised over the
    target's whole vocabulary and never again over the draft's: P = Σ_S p <= 1.
    """

    valid: Tensor  # [N, K] bool; an answer's end cuts off the depths behind it
    hidden: Tensor  # [N, K, D] the draft's hidden states, which `unembed` reads
    features: Tensor  # [N, K, D] the target's final hidden states, which p is read from
    progress: float = 0.0  # share of the run's steps that are done, from 0 to 1
    confidence: Tensor | None = None  # [N, K] the family's own guess of α, where it makes one
    reference_log_q: Tensor | None = None  # [N, K, S] of a frozen reference draft, if there is one

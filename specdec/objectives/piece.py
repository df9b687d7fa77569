"""What an objective may read."""

from dataclasses import dataclass

from torch import Tensor

from specdec.theory.alpha import Pair


@dataclass
class Piece(Pair):
    """A chunk of anchors at all depths together. It is a `Pair` of log p and log q [N, K, S], with
    argmax p and the text's own token (`label`) [N, K] as indices into the draft vocabulary, -1 for
    tokens outside it. p is normalised over the target's whole vocabulary and not renormalised over
    the draft's, so P = Σ_S p <= 1."""

    valid: Tensor  # [N, K] bool; depths after an answer's end are not valid
    logits: Tensor  # [N, K, S] the draft's, before the sampler
    hidden: Tensor  # [N, K, D] the draft's hidden states, which `unembed` reads
    features: Tensor  # [N, K, D] the target's final hidden states, from which p is computed
    progress: float = 0.0  # share of the run's steps that are done, from 0 to 1
    confidence: Tensor | None = None  # [N, K] the family's own estimate of α, if it makes one
    accepted: Tensor | None = None  # [N, K] bool, at a decoder's anchors: which drafts it accepted
    reference_log_q: Tensor | None = None  # [N, K, S] of a frozen reference draft, if there is one

"""What an objective may read."""

from dataclasses import dataclass

from torch import Tensor

from specdec.theory.alpha import Pair


@dataclass
class Piece(Pair):
    """A chunk of anchors at all depths together. It is a `Pair` of log p and log q [N, K, S], with
    argmax p and the text's own token (`label`) [N, K] as indices into the draft vocabulary, -1 for
    tokens outside it. p is normalised over the target's whole vocabulary and not renormalised over
    the draft's, so P = Σ_S p <= 1.

    In training, p and q are those before top-k and top-p: the tokens that cutoffs take from q would
    have no gradient, even those with mass in p; and a q that equals a p cut by top-p is cut once
    more when it is served. A q that equals p before the cutoffs equals it after them, too. `served`
    is the pair after them, without gradients; None where no cutoff is set."""

    # [N, K] bool; depths after a response's end, and those dropped by `Trainable.anchors`, are not
    # valid
    valid: Tensor
    logits: Tensor  # [N, K, S] the draft's, before the sampler
    hidden: Tensor  # [N, K, D] the draft's hidden states, which `unembed` reads
    features: Tensor  # [N, K, D] the target's final hidden states, from which p is computed
    progress: float = 0.0  # share of the run's steps that are done, from 0 to 1
    confidence: Tensor | None = None  # [N, K] the family's own estimate of α, if it makes one
    accepted: Tensor | None = None  # [N, K] bool, at a decoder's anchors: which drafts it accepted
    reference_log_q: Tensor | None = None  # [N, K, S] of a frozen reference draft, if there is one
    served: Pair | None = None
    # [N, K] how much a depth counts relative to the others of its anchor; None: as much, if valid.
    # Where depths are dropped at random, the others stand for them.
    weight: Tensor | None = None

    @property
    def as_served(self) -> Pair:
        """The pair of p and q as decoding has them: what α is measured on."""
        return self.served or self

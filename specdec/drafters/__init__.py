"""The drafter families, and the dict that finds them by name."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from specdec.drafters.base import Drafter
from specdec.drafters.copying.copy import Copy
from specdec.drafters.copying.counts import Bigram, Unigram
from specdec.drafters.copying.lookahead import Lookahead
from specdec.drafters.copying.ngram import Ngram
from specdec.drafters.copying.suffix import Suffix
from specdec.drafters.hybrid import Hybrid, HybridConfig
from specdec.drafters.models.early_exit import EarlyExit
from specdec.drafters.models.lm import LM
from specdec.drafters.models.seq2seq_lm import Seq2SeqLM
from specdec.drafters.models.sparse import Sparse
from specdec.drafters.models.translated import Translated
from specdec.drafters.parallel.dflash import DFlash
from specdec.drafters.parallel.dflash2 import DFlash2
from specdec.drafters.parallel.dspark import DSpark
from specdec.drafters.parallel.jetspec import JetSpec
from specdec.drafters.parallel.medusa import Medusa
from specdec.drafters.parallel.mtp_heads import MTPHeads
from specdec.drafters.parallel.peagle import PEagle
from specdec.drafters.recurrent.eagle import Eagle
from specdec.drafters.recurrent.eagle3 import Eagle3
from specdec.drafters.recurrent.falcon import Falcon
from specdec.drafters.recurrent.hydra import Hydra
from specdec.drafters.recurrent.mlp import Mlp
from specdec.drafters.recurrent.mtp import MTP
from specdec.drafters.recurrent.spire import Spire
from specdec.errors import UserError, nearest
from specdec.targets.parts import Parts

FAMILIES: tuple[type[Drafter], ...] = (
    *(Eagle3, Eagle, Falcon, MTP, MTPHeads, Medusa, Hydra, Mlp, PEagle, Spire),
    *(DFlash, DFlash2, DSpark, JetSpec),
    *(LM, Ngram, Seq2SeqLM, Translated, Unigram, Bigram, Suffix, Lookahead, Copy),
    *(EarlyExit, Sparse, Hybrid),
)
DRAFTERS = {kind.Config.name: kind for kind in FAMILIES}
Hybrid.families = DRAFTERS


def family(name: str) -> type[Drafter]:
    """The drafter class of this name. Raises UserError, with the nearest name, if none has it."""
    if name not in DRAFTERS:
        raise UserError(f"drafter {name!r} is unknown{nearest(name, DRAFTERS)}")
    return DRAFTERS[name]


def with_copying(head: Drafter, copying: str, target: Parts, gamma: int | None = None) -> Drafter:
    """The hybrid of the draft `head`, which drafts at most γ tokens, and the family `copying`."""
    return Hybrid.build(
        HybridConfig(copying=copying, gamma=gamma or head.depth), target, earlier=head
    )


def frequent_tokens(texts: Iterable[Iterable[int]], size: int) -> Tensor:
    """The `size` most frequent token ids, ascending [size]: a draft vocabulary.

    Ties go to the lower id. If too few ids occur, the lowest of the others fill the rest.
    """
    counts = Counter(chain.from_iterable(texts))
    ranked = sorted({*counts, *range(size)}, key=lambda i: (-counts[i], i))
    return torch.tensor(sorted(ranked[:size]))

"""LM heads over a pruned vocabulary, for engines that load only complete ones.

vLLM 0.32 rejects its own `token_map` for Medusa and has none for the MLP speculator. Tokens outside
a pruned vocabulary therefore get rows of zeros: their logit is 0, and the engine, which drafts
greedily, never takes one while the best logit is above 0 (`objection` checks this on a text).
"""

import torch
from torch import Tensor

from specdec.drafters.depth_heads import Heads
from specdec.errors import require
from specdec.formats.layout import Tensors

HEAD = "lm_heads."  # followed by the number of the head


def to_engine(drafter: Heads, tensors: Tensors) -> Tensors:
    """Heads over the target's whole vocabulary."""
    if (vocab_S := tensors.pop("vocab_S", None)) is not None:
        for name in [n for n in tensors if n.startswith(HEAD)]:
            pruned_SD = tensors[name]
            tensors[name] = pruned_SD.new_zeros(drafter.sizes.target_vocab, pruned_SD.shape[1])
            tensors[name][vocab_S] = pruned_SD
    return tensors


def from_engine(drafter: Heads, tensors: Tensors) -> Tensors:
    """Heads over the draft vocabulary of `drafter`: the file does not distinguish a token outside
    it from one with a row of zeros. Raises UserError for a head with other tokens."""
    if drafter.vocab_S is None or f"{HEAD}0.weight" not in tensors:
        return tensors
    vocab_S = drafter.vocab_S.cpu()
    outside_V = torch.ones(drafter.sizes.target_vocab, dtype=torch.bool)
    outside_V[vocab_S] = False
    heads = {n: x for n, x in tensors.items() if n.startswith(HEAD)}
    for name, whole_VD in heads.items():
        fits = len(whole_VD) == len(outside_V) and not whole_VD[outside_V].any()
        require(fits, f"tensor {name!r} has tokens outside the draft vocabulary")
    return tensors | {n: x[vocab_S] for n, x in heads.items()} | {"vocab_S": vocab_S}


def objection(drafter: Heads, logits_NS: Tensor) -> str | None:
    best = float(logits_NS.amax(-1).min())
    if drafter.vocab_S is None or best > 0:
        return None
    return (
        f"the draft's best logit at one place is {best:.2g}, and vLLM gives tokens outside its "
        "vocabulary a logit of 0: train it further, or train with drafter.draft_vocab=null"
    )

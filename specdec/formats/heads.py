"""LM heads over a pruned vocabulary for engines that load only whole ones.

vLLM 0.32 refuses its own `token_map` for Medusa and has none for the MLP speculator. So the tokens
outside a pruned vocabulary get rows of zeros: their logit is 0, and the engine, which drafts
greedily, never takes one while the best logit is above 0 (`objection` checks this on a text).
"""

from torch import Tensor

from specdec.drafters.heads import Heads
from specdec.formats.layout import Tensors

HEAD = "lm_heads."  # followed by the number of the head


def write(drafter: Heads, tensors: Tensors) -> Tensors:
    """Heads over the target's whole vocabulary."""
    if (vocab_S := tensors.pop("vocab_S", None)) is not None:
        for name in [n for n in tensors if n.startswith(HEAD)]:
            pruned_SD = tensors[name]
            tensors[name] = pruned_SD.new_zeros(drafter.target_vocab, pruned_SD.shape[1])
            tensors[name][vocab_S] = pruned_SD
    return tensors


def read(drafter: Heads, tensors: Tensors) -> Tensors:
    """Heads over the draft vocabulary: the rows that are not zero."""
    if drafter.vocab_S is None or f"{HEAD}0.weight" not in tensors:
        return tensors
    vocab_S = tensors[f"{HEAD}0.weight"].any(-1).nonzero()[:, 0]
    heads = {n: x[vocab_S] for n, x in tensors.items() if n.startswith(HEAD)}
    return tensors | heads | {"vocab_S": vocab_S}


def objection(drafter: Heads, logits_NS: Tensor) -> str | None:
    best = float(logits_NS.amax(-1).min())
    if drafter.vocab_S is None or best > 0:
        return None
    return (
        f"the draft's best logit at one place is {best:.2g}, and vLLM gives tokens outside its "
        "vocabulary a logit of 0: train it further, or train with drafter.draft_vocab=null"
    )

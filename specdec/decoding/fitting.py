"""The number of rows of a batch that fit into the free memory of the target's device."""

from collections.abc import Sequence

import torch

from specdec.context import HiddenStateSpec
from specdec.decoding.decode import prefill
from specdec.runtime.device import free_bytes
from specdec.targets.target import Target

SHARE = 0.8  # fraction of the free memory that a batch may take
GROWTH = 2  # a layer's cache that grows is copied, and may reserve up to as much again
LOGITS = 4  # float32 tensors over the vocabulary that a step holds for each row
ACTIVATIONS = 24  # tensors of the model's width that a layer holds for each token of a prompt


@torch.inference_mode()
def rows_that_fit(
    target: Target, prompt: Sequence[int], new: int, needs: HiddenStateSpec
) -> int | None:
    """The number of prompts as long as this one that can be continued at once with `new` tokens
    each, at least 1; None if the free memory is not known. The KV cache of the prompt is measured
    on the target itself; the rest is estimated. The hidden states in `needs` are kept for every
    token."""
    if (free := free_bytes(target.device)) is None:
        return None
    cache = target.new_cache()
    prefill(target, [prompt], HiddenStateSpec(), cache)
    states = cache.states.nbytes  # their size does not depend on the length
    by_token = (cache.nbytes - states) / max(1, cache.capacity)
    by_token += (len(needs.layers) + needs.final_hidden) * target.width * target.dtype.itemsize
    kept = (by_token * (len(prompt) + new) + states) * GROWTH
    logits = LOGITS * 4 * target.vocab_size
    read = ACTIVATIONS * target.width * target.dtype.itemsize * len(prompt)
    return max(1, int(SHARE * free / (kept + logits + read)))

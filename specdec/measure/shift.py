"""How far a target that was trained along with its draft has moved."""

from collections.abc import Sequence

import torch

from specdec.context import Needs
from specdec.decoding.decode import decode
from specdec.forcing.teacher import divergence
from specdec.measure.results import Shift
from specdec.target.base import Target
from specdec.theory.intervals import ratio_interval


@torch.inference_mode()
def shift(
    original: Target, adapted: Target, prompts: Sequence[Sequence[int]], tokens: int, batch: int
) -> Shift:
    """How far `adapted` has moved from `original`, over answers of up to `tokens` tokens."""
    kl, counts, same = [], [], []
    for start in range(0, len(prompts), batch):
        asked = prompts[start : start + batch]
        told = (decode(t, asked, max_new_tokens=tokens) for t in (original, adapted))
        for before, after in zip(*told, strict=True):
            ids, first = torch.tensor([[*before.prompt, *before.ids]]), len(before.prompt) - 1
            logits = (
                t.logits(t.features(ids.to(t.device), Needs())[1][0, first:-1])
                for t in (original, adapted)
            )
            kl.append(float(divergence(*logits).sum()))
            counts.append(len(before.ids))
            same.append(before.ids == after.ids)
    return Shift(original.name, ratio_interval(kl, counts), ratio_interval(same, [1] * len(same)))

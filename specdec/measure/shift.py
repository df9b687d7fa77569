"""How far a target that was trained along with its draft has moved from the original."""

from collections.abc import Sequence

import torch

from specdec.context import HiddenStateSpec
from specdec.decoding.decode import decode
from specdec.losses.loss_terms import kl_divergence
from specdec.measure.results import Shift
from specdec.ranks import ALONE, Ranks
from specdec.targets.target import Target
from specdec.theory.intervals import ratio_interval, share_interval


def shift(
    original: Target,
    adapted: Target,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    batch: int,
    ranks: Ranks = ALONE,
) -> Shift:
    """How far `adapted`, which was trained with its draft, has moved from `original`, over
    responses of up to `tokens` tokens. The prompts are shared out."""

    @torch.inference_mode()
    def moved(start: int) -> list[tuple[float, int, bool]]:
        """The summed KL of each response in a batch, its tokens, and whether it stayed the same."""
        asked, shifts = prompts[start : start + batch], []
        told = (decode(t, asked, max_new_tokens=tokens) for t in (original, adapted))
        for before, after in zip(*told, strict=True):
            ids, first = torch.tensor([[*before.prompt, *before.ids]]), len(before.prompt) - 1
            logits = (
                t.logits(t.hidden_states(ids.to(t.device), HiddenStateSpec())[1][0, first:-1])
                for t in (original, adapted)
            )
            kl = float(kl_divergence(*logits).sum())
            shifts.append((kl, len(before.ids), before.ids == after.ids))
        return shifts

    batches = ranks.shared(range(0, len(prompts), batch), moved)
    kl, counts, same = map(list, zip(*(response for of in batches for response in of), strict=True))
    return Shift(original.name, ratio_interval(kl, counts), share_interval(same, [1] * len(same)))

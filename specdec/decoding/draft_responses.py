"""Responses that a draft model writes without the target."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from specdec.context import Context, HiddenStateSpec
from specdec.drafters.base import Drafter, vocabulary
from specdec.errors import require
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain

AT_ONCE = 8  # tokens per draft call: few, because the q of each over the whole vocabulary is kept


def require_writes_alone(drafter: Drafter) -> None:
    """Raise UserError unless a draft can write any number of tokens without the target."""
    require(
        drafter.needs == HiddenStateSpec()
        and drafter.limits.depth is None
        and not drafter.runs_target,
        f"rounds.data: {drafter.config.name} cannot write text without the target: give "
        "drafter=lm, or rounds.data=draft, mixed or on_policy",
    )


@torch.inference_mode()
def draft_responses(
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    seeds: Sequence[int],
    max_new_tokens: int,
    eos: Sequence[int],
) -> list[list[int]]:
    """The draft's own responses, sampled from q; each ends with an eos or after
    `max_new_tokens`."""
    device = next(drafter.parameters()).device
    draws = RowDraws(seeds, device)
    choose = Choose(sampler, "with", draws, vocabulary(drafter), drafter.sizes.target_vocab)
    responses: list[list[int]] = [[] for _ in prompts]
    cache, going = drafter.new_cache(), list(range(len(prompts)))
    while going:
        texts = [[*prompts[i], *responses[i]] for i in going]
        ids_BT = pad_sequence([torch.tensor(x, device=device) for x in texts], batch_first=True)
        ctx = Context(ids_BT, lengths=[len(x) for x in texts])
        new = drafter.draft(ctx, Chain(AT_ONCE), choose, cache).tokens_BG.tolist()
        left = []
        for b, i in enumerate(going):
            more = [*responses[i], *new[b]][:max_new_tokens]
            end = next((n for n, token in enumerate(more) if token in eos), len(more) - 1)
            responses[i] = more[: end + 1]
            if end + 1 == len(more) < max_new_tokens and more[end] not in eos:
                left.append(b)
        if len(left) < len(going):
            going = [going[b] for b in left]
            choose.select(left)
            if left:
                cache.select(left)
    return responses

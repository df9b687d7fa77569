"""Turns logits into tokens: the sampler, the caller's logits processors, and random numbers by row.

One object serves target and draft during a whole decoding, so that p and q are warped alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.runtime.device import perhaps_any
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler, draws, sample

Processor = Callable[[Tensor, Tensor], Tensor]  # transformers' (input_ids, scores) -> scores


class Chosen(NamedTuple):
    """The children of T nodes: `tokens_BTC` are ids in the target's vocabulary, -1 where q has no
    mass left; `index_BTC` indexes `logits_BTS`, the logits after the processors; `q_BTS` is None
    for tokens chosen deterministically. S is V if there are processors."""

    tokens_BTC: Tensor
    index_BTC: Tensor
    q_BTS: Tensor | None
    logits_BTS: Tensor


@dataclass
class Choose:
    """Warps logits and picks tokens. `siblings` is how a node's children are drawn: "without"
    replacement, "with", or "fixed" (the most likely ones; q is then one-hot). `draws` has the
    random numbers of each row, and `texts` is the caller's list of texts, which changes with the
    batch."""

    sampler: Sampler
    siblings: str
    draws: RowDraws
    vocab_S: Tensor | None = None
    vocab_size: int = 0
    processors: Sequence[Processor] = ()
    texts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.sampler.greedy:
            self.siblings = "fixed"

    def __call__(
        self,
        logits_BTS: Tensor,
        count: int,
        draft: Proposal,
        place_BT: Tensor,
        going_B: Tensor | None = None,
    ) -> Chosen:
        """Choose `count` children at each of these places of a draft, given the draft's logits
        there. Rows outside `going_B` get no children and use no random numbers."""
        logits, q = self.draft_logits(logits_BTS, draft, place_BT), None
        if self.siblings != "fixed":
            q = self.sampler.probs(logits)
            index, none = self._draw(q, count, going_B)
        else:
            logits, count = logits.float(), min(count, logits.shape[-1])
            best, index = logits.max(-1, keepdim=True) if count == 1 else logits.topk(count, -1)
            none = best.isneginf()
        return Chosen(self.ids(index).masked_fill(none, -1), index, q, logits)

    def ids(self, index: Tensor) -> Tensor:
        """Target token ids for indices into the draft's processed logits."""
        return index if self.vocab_S is None or self.processors else self.vocab_S[index]

    def draft_logits(self, logits_BTS: Tensor, draft: Proposal, place_BT: Tensor) -> Tensor:
        """The draft's logits after the processors, expanded to the target's whole vocabulary if
        there are any."""
        if self.processors and self.vocab_S is not None:
            whole = logits_BTS.new_full((*logits_BTS.shape[:2], self.vocab_size), -torch.inf)
            logits_BTS = whole.index_copy_(-1, self.vocab_S, logits_BTS)
        return self.processed(logits_BTS, draft, place_BT)

    def processed(
        self, logits_BTV: Tensor, draft: Proposal, place_BT: Tensor | None = None
    ) -> Tensor:
        """The logits at these places of a draft (None: every place) after the processors. Each
        processor receives the row's text and the path to the place."""
        if not self.processors:
            return logits_BTV
        out = logits_BTV.float().clone()
        for b, paths in enumerate(draft.drafted_to()):
            text_T = torch.tensor(self.texts[b], device=out.device)
            places = range(len(paths)) if place_BT is None else place_BT[b].tolist()
            for w, place in enumerate(places):
                ids = torch.cat([text_T, text_T.new_tensor(paths[place])])[None]
                for processor in self.processors:
                    if out[b, w].isneginf().all():  # nothing to choose from; some would raise
                        break
                    out[b, w] = processor(ids, out[b, w][None])[0]
        return out

    def token(self, logits_BV: Tensor) -> Tensor:
        """The target's next token of each row [B], from processed logits."""
        if self.sampler.greedy:
            return logits_BV.float().argmax(-1)  # bfloat16 argmax is slow on a CPU
        return sample(self.sampler.probs(logits_BV), self.draws.uniform(1)[:, 0])

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        self.draws.select(rows)

    def replace(self, rows: Sequence[int], other: "Choose") -> None:
        """Give these rows the random numbers of the rows of `other`, in order."""
        self.draws.replace(rows, other.draws)

    def _draw(self, q_BTS: Tensor, count: int, going_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Indices [B, T, count] drawn from q, and a mask of those that do not exist. Draws without
        replacement are sequential: each is from the remaining mass of q."""
        (B, num_read), again = q_BTS.shape[:2], self.siblings == "with"
        count = count if again else min(count, q_BTS.shape[-1])
        used_B = None if going_B is None else going_B * (num_read * count)
        uniform_BTC = self.draws.uniform(num_read * count, used_B).view(B, num_read, count)
        indices, missing = list[Tensor](), list[Tensor]()
        for at in [uniform_BTC] if again else uniform_BTC.split(1, -1):
            if indices:
                q_BTS = q_BTS.scatter(-1, indices[-1], 0.0)
            empty_BT1 = q_BTS.sum(-1, keepdim=True) <= 0
            some_BTS = q_BTS.masked_fill(empty_BT1, 1) if perhaps_any(empty_BT1) else q_BTS
            indices.append(draws(some_BTS, at))
            missing.append(q_BTS.gather(-1, indices[-1]) <= 0)
        none_BTC = torch.cat(missing, -1)
        if going_B is not None:
            none_BTC = none_BTC | ~going_B[:, None, None]
        return torch.cat(indices, -1), none_BTC

"""Rows of text with the target's hidden states, from which p is computed.

Training data may also be a decoder's speculation steps: the draft's own tokens, and the target's
states after them, including those after the first rejected token.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.context import Context, HiddenStateSpec
from specdec.forcing.anchors import Anchors, anchors_of
from specdec.runtime.cache import SlotCache
from specdec.sampling.sampler import Sampler, Summary
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target


@dataclass
class OnTrajectory:
    """The speculation steps that a decoder made along the rows of a batch, ordered by anchor. Depth
    k is conditioned on the text up to the anchor and the first k drafted tokens; `final_NKD` is the
    target's final hidden state after them, from which p is computed."""

    place_N: Tensor  # place of the anchor at position t of row b: b · T + t
    accepted_N: Tensor
    drafted_NK: Tensor  # -1 where nothing was drafted
    final_NKD: Tensor
    summary: Summary  # each [N, K]


@dataclass
class Batch:
    """Rows of text with the target's hidden states, padded to one length."""

    ctx: Context
    # the target's final hidden state, from which p is computed; of width 0 in a batch for which the
    # target was not run (`text_batch`)
    final_BTD: Tensor
    summary: Summary  # each [B, T]
    mask_BT: Tensor  # the tokens that count for loss and α
    visited: OnTrajectory | None = (
        None  # a decoder's speculation steps, whose anchors and drafts are then read
    )

    @property
    def drafted_BTK(self) -> Tensor | None:
        """The tokens drafted at each position, -1 where no speculation step began; None if
        `visited` is None."""
        if (visited := self.visited) is None:
            return None
        table = visited.drafted_NK.new_full((self.mask_BT.numel(), visited.drafted_NK.shape[1]), -1)
        table = table.index_copy(0, visited.place_N, visited.drafted_NK)
        drafted: Tensor = table.unflatten(0, self.mask_BT.shape)
        return drafted

    def anchors(self, depth: int, per: str) -> Anchors:
        """All valid positions or, if `visited` is given, only those where a speculation step
        started. See `anchors_of`."""
        position_BT, document_BT = self.ctx.documents()
        text = self.mask_BT, document_BT, position_BT
        return anchors_of(*text, depth, per=per, drafted_BTK=self.drafted_BTK)


def summarise(
    target: TargetParts, final_BTD: Tensor, sampler: Sampler, chunk: int = 128
) -> Summary:
    """The sampler's `summarise` of the target's logits, over chunks of positions; each result has
    the shape [B, T].

    Results are written to preallocated tensors: small tensors that outlive a chunk would occupy the
    memory of its logits, and the next chunk would take new memory.
    """
    final_ND, whole = final_BTD.flatten(0, 1), list[Tensor]()
    with exactly(final_BTD):
        for first in range(0, max(1, len(final_ND)), chunk):
            parts = sampler.summarise(target.logits(final_ND[first : first + chunk]))
            whole = whole or [part.new_empty(len(final_ND)) for part in parts]
            for x_N, part in zip(whole, parts, strict=True):
                x_N[first : first + chunk] = part
    return Summary(*(x_N.view(final_BTD.shape[:2]) for x_N in whole))


def exactly(states: Tensor) -> AbstractContextManager[None]:
    """A block in which the target's head multiplies in the target's precision, even if the draft
    trains in bfloat16: everything that p consists of, including log Z, must be rounded in the same
    way."""
    return torch.autocast(states.device.type, enabled=False)


@torch.no_grad()
def text_batch(
    target: TargetParts, needs: HiddenStateSpec, text: Context, mask_BT: Tensor
) -> Batch:
    """A batch of the texts in `text` for which the target is not run. Each hidden state that a
    drafter with these needs reads is the target's embedding of the token in its place. The batch
    has no p: its final hidden states have width 0."""
    layers_BTF, final_BTD = None, None
    if needs.layers or needs.final_hidden:
        embedded_BTD = target.embed(text.ids_BT)
        layers_BTF = embedded_BTD.repeat(1, 1, len(needs.layers)) if needs.layers else None
        final_BTD = embedded_BTD if needs.final_hidden else None
    ctx = replace(text, layers_BTF=layers_BTF, final_BTD=final_BTD)
    nothing_BT0 = torch.empty(*mask_BT.shape, 0, device=mask_BT.device, dtype=target.dtype)
    return Batch(ctx, nothing_BT0, Summary(*[nothing_BT0] * len(Summary._fields)), mask_BT)


@torch.no_grad()
def batch_of(
    target: Target, needs: HiddenStateSpec, sampler: Sampler, text: Context, mask_BT: Tensor
) -> Batch:
    """A batch of the texts in `text`, a context without hidden states. This function runs the
    target on them."""
    position_BT, document_BT = text.documents()
    ctx, final = target.hidden_states(
        text.ids_BT, needs, position_BT=position_BT, document_BT=document_BT
    )
    return Batch(ctx, final, summarise(target, final, sampler), mask_BT)


@torch.no_grad()
def read_drafts(
    target: Target,
    needs: HiddenStateSpec,
    ids: Sequence[int],
    anchors: Sequence[int],
    accepted: Sequence[int],
    drafted_NK: Sequence[Sequence[int]],
) -> tuple[Context, Tensor, Tensor]:
    """Run the target over one text and, as branches of it, over the rest of each draft: its tokens
    from the first rejected one to the last but one. Returns the text's context, its final hidden
    states [1, T, D], and those after the first k tokens of each draft [N, K, D]; depths that were
    not drafted are arbitrary."""
    text_1T = torch.tensor([ids], device=target.device)
    cache = target.new_cache()
    shift = len(ids) - target.placed(ids)  # an encoder's tokens take no slot
    tokens: list[int] = []
    parents: list[int] = []
    places = []  # for each speculation step and depth, in the text, then in the branches
    for anchor, count, draft in zip(anchors, accepted, drafted_NK, strict=True):
        place = anchor
        places.append([place])
        for k, token in enumerate(draft[:-1]):
            if k < count and place + 1 < len(ids):
                place += 1
            elif token >= 0:
                parents.append(place - shift)
                tokens.append(token)
                place = len(ids) + len(tokens) - 1
            places[-1].append(place)
    if not target.reads_trees:
        ctx, final_1TD = target.hidden_states(text_1T, needs)
        states_TD = torch.cat([final_1TD[0], *_after_branches(target, ids, tokens, parents)])
        return ctx, final_1TD, states_TD[torch.tensor(places, device=target.device)]
    ctx, final_1TD = target.hidden_states(text_1T, needs, cache=cache)
    states_TD = final_1TD[0]
    if tokens:
        branches = (torch.tensor([x], device=target.device) for x in (tokens, parents))
        _, more = target.hidden_states(
            next(branches), HiddenStateSpec(), cache=cache, parents_BT=next(branches)
        )
        states_TD = torch.cat([states_TD, more[0]])
    return ctx, final_1TD, states_TD[torch.tensor(places, device=target.device)]


def _after_branches(
    target: Target, ids: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> Iterator[Tensor]:
    """The final hidden states [t, D] after the tokens of each branch in turn, for a target that
    reads chains only: each branch is read from the point where it leaves the text, and then
    dropped. A token whose parent is in the text begins a branch."""
    cache, T, read = target.new_cache(), len(ids), 0
    begins = [i for i, parent in enumerate(parents) if parent < T]
    for i, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
        if more := ids[read : parents[i] + 1]:
            _read(target, more, cache)
            cache.commit([len(more)])
            read += len(more)
        yield _read(target, tokens[i:end], cache)
        cache.drop()


def _read(target: Target, ids: Sequence[int], cache: SlotCache) -> Tensor:
    """The final hidden states [T, D] of tokens that continue the text in a cache."""
    ids_1T = torch.tensor([ids], device=target.device)
    return target.hidden_states(ids_1T, HiddenStateSpec(), cache=cache)[1][0]

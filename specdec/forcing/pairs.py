"""The pairs of p and q at every anchor and depth, of which the loss and every teacher-forced α are
made.

Only one chunk's logits exist at a time: p over the draft vocabulary, normalised over the full one,
is computed from the target's hidden state and three numbers per position (`sampler.Summary`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.drafters.predictor import Predictor, vocabulary
from specdec.drafters.proposed import point_mass, whole
from specdec.drafters.proposer import OWN, Drafter
from specdec.forcing.anchors import Anchors, rounded
from specdec.forcing.batch import Batch, exactly
from specdec.objectives.piece import Piece
from specdec.sampling.sampler import Sampler, Summary
from specdec.targets.parts import Parts
from specdec.theory.alpha import Pair


class Pairs:
    """Makes the pairs of a drafter and its target under a sampler. With `apart`, the gradient of
    the family's own estimate of its acceptance reaches nothing but that estimate."""

    def __init__(self, drafter: Drafter, target: Parts, sampler: Sampler, apart: bool) -> None:
        self.drafter, self.sampler, self._apart = drafter, sampler, apart
        vocab_S = vocabulary(drafter)
        self._head = target.unembedding(vocab_S)
        self._index_V: Tensor | None = None
        if vocab_S is not None:
            self._index_V = torch.full((target.vocab_size,), -1, device=vocab_S.device)
            self._index_V[vocab_S] = torch.arange(len(vocab_S), device=vocab_S.device)

    def of(
        self,
        batch: Batch,
        anchors: Anchors,
        rows: slice,
        training: bool = False,
    ) -> Callable[..., Piece]:
        """A function that makes the pieces of one chunk, the anchors of `rows`: p, q and the other
        tensors that an objective may read. It takes a slice of the chunk's anchors, a slice of the
        depths, and what `read` returns for them. The target's logits are computed here, once
        for all depths of the chunk. In `training`, p and q are those before cutoffs, as
        `Piece` says."""
        cuts = training and self.sampler.truncates
        T = batch.mask_BT.shape[1]
        depths = torch.arange(anchors.weight_NK.shape[1], device=batch.mask_BT.device)
        row_N1 = anchors.row_N[rows, None]
        at_NK = (anchors.position_N[rows, None] + depths).clamp_max(T - 1)
        states, accepted_NK = (batch.final_BTD, batch.summary), None
        if (visited := batch.visited) is not None:
            round_N = torch.searchsorted(visited.place_Ro, row_N1[:, 0] * T + at_NK[:, 0])
            accepted_NK = depths < visited.accepted_Ro[round_N, None]
            states = visited.final_RoKD, visited.summary
            where_NK = round_N[:, None] * len(depths) + depths
        else:
            near = anchors.nearest
            ahead = torch.arange(len(depths), device=near.row_N.device)
            column_NK = (near.position_N[rows, None] + ahead).clamp_max(T - 1)
            where_NK = near.row_N[rows, None] * T + column_NK
        # depth k at one anchor and k - 1 at the next share one p, whose logits are computed once
        where_U, index_NK = where_NK.unique(return_inverse=True)
        where_U = rounded(where_U).to(depths.device, non_blocking=True)
        index_NK = index_NK.to(depths.device, non_blocking=True)
        summary = Summary(*(x.flatten()[where_U] for x in states[1]))
        final_UD = states[0].flatten(0, 1)[where_U]
        with torch.no_grad(), exactly(final_UD):
            logits_US = self._head(final_UD)
            log_p_US = self.sampler.log_probs_of(logits_US, summary)
            served_log_p_US = log_p_US
            if cuts:
                log_p_US = self.sampler.uncut.log_probs_of(logits_US, summary.uncut)
        label_NK = batch.ctx.ids_BT[row_N1, (at_NK + 1).clamp_max(T - 1)]
        if visited is not None:  # the text does not continue what was drafted
            label_NK = summary.argmax_N[index_NK]
        valid_NK, weight_NK = anchors.valid_NK[rows], anchors.weight_NK[rows]
        of_anchor_N1 = weight_NK.amax(-1, keepdim=True)
        weight_NK = weight_NK / torch.where(of_anchor_N1 > 0, of_anchor_N1, 1)

        def piece(
            at: slice,
            k: slice,
            logits_NKS: Tensor,
            hidden_NKD: Tensor,
            confidence_NK: Tensor | None = None,
        ) -> Piece:
            log_p, served = log_p_US[index_NK[at, k]], None
            argmax_NK = self._draft_ids(summary.argmax_N[index_NK[at, k]])
            label = self._draft_ids(label_NK[at, k])
            if cuts:
                served_log_q = self.sampler.log_probs(logits_NKS.detach())
                served = Pair(served_log_p_US[index_NK[at, k]], served_log_q, argmax_NK, label)
            return Piece(
                log_p=log_p,
                log_q=(self.sampler.uncut if cuts else self.sampler).log_probs(logits_NKS),
                target_argmax=argmax_NK,
                label=label,
                valid=valid_NK[at, k],
                logits=logits_NKS,
                hidden=hidden_NKD,
                features=final_UD[index_NK[at, k]],
                confidence=confidence_NK,
                accepted=None if accepted_NK is None else accepted_NK[at, k],
                served=served,
                weight=weight_NK[at, k],
            )

        return piece

    def read(
        self, hidden_NKD: Tensor, copied_NK: Tensor | None = None, first: int = 0
    ) -> list[Tensor]:
        """What a piece needs of the draft, made from its hidden states at depths from `first` on:
        its logits, the hidden states, and its confidence if it estimates one. Gradients can flow
        through all of these."""
        own_NK = None
        if isinstance(self.drafter, Predictor) and self.drafter.estimates_acceptance:
            own_NK = self.drafter.confidence(hidden_NKD.detach() if self._apart else hidden_NKD)
        tensors = logits_of(self.drafter, hidden_NKD, copied_NK, first), hidden_NKD, own_NK
        return [x for x in tensors if x is not None]

    def _draft_ids(self, target_ids: Tensor) -> Tensor:
        """Indices in the draft vocabulary, -1 where it lacks the token."""
        return target_ids if self._index_V is None else self._index_V[target_ids]


def logits_of(
    drafter: Drafter, hidden_NKD: Tensor, copied_NK: Tensor | None = None, first: int = 0
) -> Tensor:
    """Draft logits [N, K, S] of K depths, from depth `first` on; those of copied tokens, over the
    target's vocabulary, are 0 at the token and -inf elsewhere."""
    depths = range(hidden_NKD.shape[1])
    if copied_NK is None:
        assert isinstance(drafter, Predictor)
        return torch.stack([drafter.unembed(hidden_NKD[:, k], first + k) for k in depths], 1)
    logits_NKV = point_mass(copied_NK, drafter.sizes.target_vocab)
    for k in depths:
        if (own_N := copied_NK[:, k] == OWN).any():
            assert drafter.copying_head is not None
            head, _ = drafter.copying_head
            assert isinstance(head, Predictor)
            logits_NKV[own_N, k] = whole(head, head.unembed(hidden_NKD[own_N, k], k))
    return logits_NKV


def kl_divergence(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p ‖ q) [...] in nats, of logits [..., V]."""
    log_p, log_q = (z.float().log_softmax(-1) for z in (logits_p, logits_q))
    return (log_p.exp() * (log_p - log_q)).sum(-1)

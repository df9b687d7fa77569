"""Teacher forcing: what a drafter would do at every anchor of a known text.

The loss and every teacher-forced α come from the same pairs of p and q (pairs.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from specdec.context import Moment
from specdec.drafters.gather import entries, text_after
from specdec.drafters.predictor import Predictor, vocabulary
from specdec.drafters.proposer import Drafter
from specdec.drafters.trainable import Trainable
from specdec.errors import require
from specdec.forcing.anchors import Anchors, anchors_of, together
from specdec.forcing.batch import Batch, exactly, summarise
from specdec.forcing.pairs import Pairs, kl_divergence, logits_of
from specdec.forcing.table import Table
from specdec.frozen import Frozen
from specdec.objectives.chunked import at_once, chunked, slices
from specdec.objectives.objective import ObjectiveConfig
from specdec.objectives.piece import Piece
from specdec.sampling.sampler import Sampler
from specdec.targets.parts import Parts
from specdec.theory.alpha import Acceptance, acceptance

Columns = Callable[[Piece], tuple[Tensor, ...]]
STATISTICS = ("positions", "loss", "sampled", "greedy_draft", "greedy")


class TeacherForcing(nn.Module):
    """Runs a drafter at all anchors of a batch, and computes its loss or its acceptance.

    `reference` is a frozen draft with the same vocabulary, for objectives that compare with one.
    With `visited`, the drafter is trained on a decoder's rounds: at their anchors, given the tokens
    that were drafted there, and at all depths, which `hidden` computes as it does in drafting.
    Raises UserError for a reference that cannot be compared with the draft.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Parts,
        sampler: Sampler,
        objective: ObjectiveConfig | None = None,
        reference: Drafter | None = None,
        visited: bool = False,
    ) -> None:
        super().__init__()
        require(
            not sampler.greedy,
            "sampler.temperature=0 cannot be used in training (α has no gradient there): train at "
            "1 and serve greedily; reports show both",
        )
        require(
            reference is None or not reference.copies,
            "the reference draft copies tokens, so it has no q to compare with: give one that was "
            "trained",
        )
        require(
            reference is None or reference.needs == drafter.needs,
            "the reference draft and the draft read different features of the target: give a "
            "reference of the same family and layers",
        )
        self.depth = drafter.depth
        if isinstance(drafter, Trainable) and not visited:
            self.depth = drafter.train_depth
        require(
            reference is None or reference.depth >= self.depth,
            "the reference draft has fewer depths than the draft: give one as deep",
        )
        ours_S, theirs_S = vocabulary(drafter), vocabulary(reference or drafter)
        same = ours_S is theirs_S  # true if neither vocabulary is pruned
        if ours_S is not None and theirs_S is not None:
            same = torch.equal(ours_S, theirs_S)
        require(
            same,
            "the reference draft and the draft have different vocabularies: train both on the same "
            "data, or start from the reference with drafter.from",
        )
        self.objective = objective or ObjectiveConfig()
        self.drafter = drafter
        self.sampler = sampler
        self._reference = Frozen(reference)
        self._pairs = Pairs(drafter, target, sampler, self.objective.trains_confidence_apart)
        adapts = drafter.adapts_target(drafter.config)
        self._whole = target if adapts else None  # unless needed, its layers may be released

    def anchors(
        self,
        mask_T: NDArray[np.bool_],
        document_T: NDArray[np.int32],
        position_T: NDArray[np.int32],
        seed: int,
        drafted_TK: NDArray[np.int32] | None = None,
        weight_T: NDArray[np.float32] | None = None,
    ) -> Anchors:
        """The anchors of one training row, chosen by the drafter, and the total that a loss over
        them is divided by. The same seed gives the same anchors. `drafted_TK` has the tokens that a
        decoder drafted at the anchors it visited, -1 elsewhere; `weight_T` is how much each token
        counts (None: 1)."""
        generator, drafter = torch.Generator().manual_seed(seed), self.drafter
        assert isinstance(drafter, Trainable)
        mask, document, position = (
            torch.as_tensor(x)[None] for x in (mask_T, document_T, position_T)
        )
        return anchors_of(
            *(mask, document, position, self.depth),
            lambda valid_TK: drafter.anchors(valid_TK, generator),
            self.objective.per,
            None if drafted_TK is None else torch.from_numpy(drafted_TK)[None],
            None if weight_T is None else torch.from_numpy(weight_T)[None],
        )

    def forward(
        self,
        batch: Batch,
        anchors: Sequence[Anchors] | None = None,
        moment: Moment | None = None,
        measure: bool = False,
        more: Columns | None = None,
        depth: int | None = None,
    ) -> tuple[Tensor, Tensor] | Table:
        """The summed loss and the sums [K, 5] that `STATISTICS` names; with `measure`, a `Table`
        with the columns that `more` computes, at `depth` depths (None: as many as were trained).
        Both are computed by `forward`, so that DDP and FSDP see every use of the weights.

        `anchors` has those of each row; None takes those of `Batch.anchors`, as `measure` always
        does. The loss is Σ_k decay^k Σ_anchors weight · loss, not yet divided by the anchors'
        total. The sums and the `Table` count every anchor once, whatever its weight. If the
        target's adapters are trained too, the loss is scaled by the draft's share, and the
        divergence of the adapted target from the original is added.
        """
        moment = moment or Moment(seeds=range(len(batch.mask_BT)))
        original, (batch, share) = batch, self._adapted(batch, moment.progress)
        if measure:
            return self._table(batch, more, depth)
        depth, drafter = self.depth, self.drafter
        assert isinstance(drafter, Trainable)
        chosen = batch.anchors(depth, self.objective.per) if anchors is None else together(anchors)
        chosen = chosen.rounded().to(batch.mask_BT.device)
        reference = self._reference.held
        hidden_NKD, compared_NKD = self._hidden(drafter, batch, chosen, moment), None
        if reference is not None:
            assert isinstance(reference, Predictor)
            with torch.no_grad():
                compared_NKD = self._hidden(reference, batch, chosen)
        decays = [self.objective.weight(k) for k in range(depth)]
        decay_K = torch.tensor(decays).to(hidden_NKD.device, non_blocking=True)
        in_turn = drafter.separate_heads and not drafter.estimates_acceptance
        in_turn = in_turn and not self.objective.couples

        def part(rows: slice, some_NKD: Tensor) -> tuple[Tensor, Tensor]:
            piece = self._pairs.of(batch, chosen, rows, training=True)
            weight_NK = chosen.weight_NK[rows]

            def at_depths(k: slice, some_KND: Tensor) -> tuple[Tensor, Tensor]:
                read_NKD = some_KND.transpose(0, 1)
                if drafter.separate_heads:
                    read_NKD = drafter.heads_of(read_NKD, k.start)
                tensors = self._pairs.read(read_NKD, first=k.start)
                other_NKS = None
                if reference is not None and compared_NKD is not None:
                    with torch.no_grad():
                        other_NKS = logits_of(reference, compared_NKD[rows, k], first=k.start)

                def few(at: slice, *tensors: Tensor) -> tuple[Tensor, Tensor]:
                    of = piece(at, k, *tensors)
                    of.progress = moment.progress
                    if other_NKS is not None:
                        of.reference_log_q = self.sampler.uncut.log_probs(other_NKS[at])
                    loss_NK = self.objective.loss(of)
                    if of.confidence is not None:  # a gradient of 0, not None, if its weight is 0
                        loss_NK = loss_NK + 0 * of.confidence
                    columns = [
                        torch.ones_like(loss_NK),
                        loss_NK.detach(),
                        *acceptance(of.as_served),
                    ]
                    counted_5NK = torch.stack(columns) * of.valid
                    counted_K5 = counted_5NK.permute(2, 0, 1).contiguous().sum(-1)
                    total = (loss_NK * weight_NK[at, k] * decay_K[k]).sum()
                    return total, pad(counted_K5, (0, 0, k.start, depth - k.start - len(some_KND)))

                # a loss that compares with a reference ranks a chunk's tokens, so it needs them all
                size = len(weight_NK) if reference is not None else at_once(tensors[0])
                whole = size >= len(weight_NK)
                return few(slice(None), *tensors) if whole else chunked(few, tensors, [], size)

            some_KND = some_NKD.expand(-1, depth, -1).transpose(0, 1)
            if in_turn:
                return chunked(at_depths, [some_KND], parameters, 1)
            return at_depths(slice(0, depth), some_KND)

        parameters = [p for p in drafter.parameters() if p.requires_grad]
        loss, seen = chunked(part, [hidden_NKD], parameters, self.objective.chunk)
        if batch is not original:
            loss = share * loss + self._kl_divergence(original, batch, chosen)
        return loss, seen

    def _adapted(self, batch: Batch, progress: float) -> tuple[Batch, float]:
        """The batch as the target reads it with the adapters that are trained along with the draft,
        and the weight of the draft's loss; the same batch if there are none. The draft's gradient
        reaches the adapters through the features that it reads; p is a constant, as ever."""
        if self._whole is None:
            return batch, 1.0
        assert isinstance(self.drafter, Trainable)
        adapted = self.drafter.adapted(batch.ctx, progress)
        assert adapted is not None
        final_BTD, share = adapted[0].to(self._whole.dtype), adapted[1]
        with torch.no_grad():
            summary = summarise(self._whole, final_BTD, self.sampler)
        ctx = replace(batch.ctx, final_BTD=final_BTD)
        return replace(batch, ctx=ctx, final_BTD=final_BTD.detach(), summary=summary), share

    def _kl_divergence(self, original: Batch, adapted: Batch, anchors: Anchors) -> Tensor:
        """KL(original ‖ adapted) of the target's distributions at T = 1, summed over the anchors
        with the weights of depth 0."""
        where_N = anchors.row_N * original.mask_BT.shape[1] + anchors.position_N
        weight_N, target, now_BTD = anchors.weight_NK[:, 0], self._whole, adapted.ctx.final_BTD
        assert target is not None and now_BTD is not None

        def part(rows: slice, now_ND: Tensor, before_ND: Tensor) -> tuple[Tensor, Tensor]:
            with exactly(now_ND):
                kl_N = kl_divergence(*(target.logits(x) for x in (before_ND, now_ND)))
            return (kl_N * weight_N[rows]).sum(), kl_N.detach().sum()

        cut = [x.flatten(0, 1)[where_N] for x in (now_BTD, original.final_BTD)]
        return chunked(part, cut, [], self.objective.chunk)[0]

    def _table(self, batch: Batch, more: Columns | None, depth: int | None) -> Table:
        anchors = batch.anchors(depth or self.drafter.depth, "token")
        chunk = self.objective.chunk
        copied_NK, hidden_NKD = self._copied(batch, anchors)
        if copied_NK is None:
            assert isinstance(self.drafter, Predictor)
            hidden_NKD = self._hidden(self.drafter, batch, anchors)
        measured = []
        for start in range(0, len(hidden_NKD), chunk):
            rows = slice(start, start + chunk)
            copied = None if copied_NK is None else copied_NK[rows]
            piece = self._pairs.of(batch, anchors, rows)
            tensors = self._pairs.read(hidden_NKD[rows], copied)
            for at in slices(tensors[0], at_once(tensors[0])):
                of = piece(at, slice(None), *(x[at] for x in tensors))
                measured.append((*acceptance(of), *(more(of) if more else ())))
        columns = [torch.cat(x) * anchors.valid_NK for x in zip(*measured, strict=True)]
        return Table(anchors, Acceptance(*columns[:3]), tuple(columns[3:]))

    def _hidden(
        self, drafter: Predictor, batch: Batch, anchors: Anchors, moment: Moment | None = None
    ) -> Tensor:
        """Hidden states [N, K, D] given the text's own tokens, by the pass of training if there is
        a `moment`; or, at visited anchors, given the tokens that were drafted there. In training, a
        drafter with `separate_heads` gives what these read in place of hidden states."""
        at_BA, column_N = anchors.grid(len(batch.mask_BT))
        if moment is not None and isinstance(drafter, Trainable) and drafter.separate_heads:
            hidden_BAKD = drafter.read_by_heads(batch.ctx, at_BA)
        elif batch.visited is not None:
            drafted_BTK = batch.visited.drafted_BTK(batch.mask_BT)[..., :-1].clamp_min(0)
            hidden_BAKD = drafter.hidden(batch.ctx, at_BA, entries(drafted_BTK, at_BA))
        elif moment is not None:
            counted_BAK = anchors.valid_NK.new_zeros(*at_BA.shape, anchors.valid_NK.shape[1])
            counted_BAK[anchors.row_N, column_N] = anchors.valid_NK
            moment = replace(moment, counted_BAK=counted_BAK)
            assert isinstance(drafter, Trainable)
            hidden_BAKD = drafter.training_hidden(batch.ctx, at_BA, moment)
        else:
            K = anchors.weight_NK.shape[1]
            deeper = text_after(batch.ctx.ids_BT, at_BA, K - 1) if drafter.depth < K else None
            hidden_BAKD = drafter.hidden(batch.ctx, at_BA, deeper)
        return hidden_BAKD[anchors.row_N, column_N][:, : anchors.weight_NK.shape[1]]

    def _copied(self, batch: Batch, anchors: Anchors) -> tuple[Tensor | None, Tensor]:
        """The ids [N, K] that the drafter copies, None if it does not copy, and the hidden states
        [N, K, D] of its head, if it has one, given the text's own tokens."""
        drafter, (N, K) = self.drafter, anchors.weight_NK.shape
        hidden_NKD = batch.final_BTD.new_zeros(N, K, 0)
        if not drafter.copies:
            return None, hidden_NKD
        at_BA, column_N = anchors.grid(len(batch.mask_BT))
        if (with_head := drafter.copying_head) is not None:
            head, depth = with_head[0], min(K, with_head[1])
            assert isinstance(head, Predictor)
            own_BAk = text_after(batch.ctx.ids_BT, at_BA, depth - 1)
            hidden_BAKD = head.hidden(batch.ctx, at_BA, own_BAk)
            hidden_NKD = pad(hidden_BAKD[anchors.row_N, column_N], (0, 0, 0, K - depth))
        return drafter.copied(batch.ctx, at_BA, K)[anchors.row_N, column_N], hidden_NKD

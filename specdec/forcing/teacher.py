"""Teacher forcing: the drafter's proposals at every anchor of a known text.

The loss and every teacher-forced α use the same p and q, at every anchor and depth. Only one
chunk's logits exist at a time: p over the draft vocabulary, normalised over the full one, is
computed from the target's hidden state and three numbers per position (`sampler.Summary`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from specdec.context import TrainingMoment
from specdec.drafters.attention import entries, text_after
from specdec.drafters.base import OWN, Drafter, Predictor, Trainable, vocabulary
from specdec.drafters.copying import point_mass, whole
from specdec.errors import require
from specdec.forcing.anchors import Anchors, anchors_of, rounded, together
from specdec.forcing.batch import Batch, exactly, summarise
from specdec.frozen import Frozen
from specdec.losses.chunked import at_once, chunked, slices
from specdec.losses.loss_config import LossConfig
from specdec.losses.loss_terms import LossInputs, TextInputs, kl_divergence
from specdec.sampling.sampler import Sampler, Summary
from specdec.targets.parts import TargetParts
from specdec.theory.alpha import Acceptance, DistributionPair, acceptance, visits

MoreColumns = Callable[[LossInputs], tuple[Tensor, ...]]
STATISTICS = ("positions", "loss", "sampled", "greedy_draft", "greedy")
# without p there is no α, but q of the text's own token
TEXT_STATISTICS = ("positions", "loss", "text_probability")


class AcceptanceTable(NamedTuple):
    """Acceptance at every anchor of a batch, and the anchors themselves."""

    anchors: Anchors
    alpha: Acceptance  # each [N, K]; 0 where not valid
    more: tuple[Tensor, ...] = ()  # extra columns [N, K] that the caller asked for


@dataclass(frozen=True, kw_only=True)
class AnchorColumns:
    """The text's side of the anchors of one chunk, at every depth."""

    rows: slice  # the chunk, among all anchors
    # the text's own token, as an index into the draft vocabulary, -1 for a token outside it
    label_NK: Tensor
    valid_NK: Tensor
    loss_weight_NK: Tensor  # weight of each depth in the loss
    weight_NK: Tensor  # weight of each depth relative to the others of its anchor


@dataclass(frozen=True, kw_only=True)
class TargetColumns(AnchorColumns):
    """The target's side too. Depth k at one anchor and depth k - 1 at the next share one p, whose
    logits are computed once; `index_NK` maps each depth to its entry."""

    index_NK: Tensor
    log_p_NS: Tensor  # over the draft vocabulary; in training before cutoffs (see `LossInputs`)
    served_log_p_NS: Tensor | None  # after cutoffs, if `log_p_NS` is before them
    final_ND: Tensor  # the target's final hidden states
    argmax_NK: Tensor  # argmax p, as `label_NK`
    accepted_NK: Tensor | None  # at a decoder's anchors: which drafts it accepted


@dataclass(frozen=True)
class TrainingPass:
    """The values that all chunks of one training forward pass share."""

    batch: Batch
    anchors: Anchors
    progress: float  # share of the run's steps that are done
    decay_K: Tensor  # the weight of each depth
    parameters: Sequence[nn.Parameter]  # trained ones
    reference_NKD: Tensor | None  # hidden states of the reference draft, if there is one


class TeacherForcing(nn.Module):
    """Runs a drafter at all anchors of a batch, and computes its loss or its acceptance.

    `reference` is a frozen draft with the same vocabulary, for losses that compare with one. If a
    batch has `visited`, the drafter is trained on a decoder's speculation steps: at their anchors,
    given the tokens that were drafted there, and at all depths, which `hidden` computes as in
    drafting. With `text_alone`, it is trained on batches of `text_batch`: the loss reads q and the
    text's own tokens, and p is never computed; measuring needs batches that the target has read.
    Raises UserError for a reference that is not comparable with the draft.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: TargetParts,
        sampler: Sampler,
        loss_config: LossConfig | None = None,
        reference: Drafter | None = None,
        visited: bool = False,
        text_alone: bool = False,
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
            "the reference draft and the draft read different hidden states of the target: give a "
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
        self.loss_config = loss_config or LossConfig()
        self.drafter = drafter
        self.sampler = sampler
        self.text_alone = text_alone
        self._reference = Frozen(reference)
        # p over the draft vocabulary, and the place of each token in it
        self._target_logits = target.unembedding(ours_S)
        self._index_V: Tensor | None = None
        if ours_S is not None:
            self._index_V = torch.full((target.vocab_size,), -1, device=ours_S.device)
            self._index_V[ours_S] = torch.arange(len(ours_S), device=ours_S.device)
        adapts = drafter.adapts_target(drafter.config)
        self._whole = target if adapts else None  # unless needed, its layers may be released

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the sums that training returns."""
        return TEXT_STATISTICS if self.text_alone else STATISTICS

    def anchors(
        self,
        mask_T: NDArray[np.bool_],
        document_T: NDArray[np.int32],
        position_T: NDArray[np.int32],
        seed: int,
        drafted_TK: NDArray[np.int32] | None = None,
        weight_T: NDArray[np.float32] | None = None,
    ) -> Anchors:
        """The anchors of one training row, chosen by the drafter, and the divisor of a loss over
        them. The same seed gives the same anchors. `drafted_TK` has the tokens that a decoder
        drafted at the anchors it visited, -1 elsewhere; `weight_T` is the relative weight of each
        token (None: 1)."""
        generator, drafter = torch.Generator().manual_seed(seed), self.drafter
        assert isinstance(drafter, Trainable)
        mask, document, position = (
            torch.as_tensor(x)[None] for x in (mask_T, document_T, position_T)
        )
        return anchors_of(
            mask,
            document,
            position,
            self.depth,
            lambda valid_TK: drafter.anchors(valid_TK, generator),
            self.loss_config.per,
            None if drafted_TK is None else torch.from_numpy(drafted_TK)[None],
            None if weight_T is None else torch.from_numpy(weight_T)[None],
        )

    def forward(
        self,
        batch: Batch,
        anchors: Sequence[Anchors] | None = None,
        moment: TrainingMoment | None = None,
        measure: bool = False,
        more: MoreColumns | None = None,
        depth: int | None = None,
    ) -> tuple[Tensor, Tensor] | AcceptanceTable:
        """The summed loss and the sums [K, S] that `statistics` names; with `measure`, an
        `AcceptanceTable` with the columns that `more` computes, at `depth` depths (None: as many as
        were trained). Both are outputs of `forward`, so that DDP and FSDP see every use of the
        weights.

        `anchors` holds the anchors of each row; None, and `measure`, take those of `Batch.anchors`.
        The loss is Σ_k decay^k Σ_anchors weight · loss, not yet divided by the anchors' total. The
        sums and the table count every anchor once, whatever its weight. If the target's adapters
        are trained too, the loss is scaled by the draft's share, and the divergence of the adapted
        target from the original is added.
        """
        moment = moment or TrainingMoment(seeds=range(len(batch.mask_BT)))
        original, (batch, share) = batch, self._adapted(batch, moment.progress)
        if measure:
            return self._measured(batch, more, depth)
        drafter, reference, depth = self.drafter, self._reference.held, self.depth
        assert isinstance(drafter, Trainable)

        # The draft runs at all anchors at once; the reference, if there is one, at the same ones.
        chosen = (
            batch.anchors(depth, self.loss_config.per) if anchors is None else together(anchors)
        )
        chosen = chosen.rounded().to(batch.mask_BT.device)
        grid = chosen.grid(len(batch.mask_BT))
        hidden_NKD, reference_NKD = self._hidden(drafter, batch, chosen, grid, moment), None
        if reference is not None:
            assert isinstance(reference, Predictor)
            with torch.no_grad():
                reference_NKD = self._hidden(reference, batch, chosen, grid)

        # Logits over the vocabulary, and the loss, are made chunk by chunk.
        decays = [self.loss_config.weight(k) for k in range(depth)]
        decay_K = torch.tensor(decays).to(hidden_NKD.device, non_blocking=True)
        trained = [p for p in drafter.parameters() if p.requires_grad]
        one = TrainingPass(batch, chosen, moment.progress, decay_K, trained, reference_NKD)
        chunk_loss = partial(self._chunk_loss, one)
        loss, seen = chunked(chunk_loss, [hidden_NKD], trained, self.loss_config.chunk)
        if batch is not original:
            loss = share * loss + self._kl_divergence(original, batch, chosen)
        return loss, seen

    def _chunk_loss(
        self, one: TrainingPass, rows: slice, hidden_NKD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of a chunk of anchors, and its statistics [K, S], from the draft's hidden
        states or, for separate heads, from their inputs. Heads are processed one at a time unless
        their losses depend on each other."""
        drafter, depth = self.drafter, self.depth
        assert isinstance(drafter, Trainable)
        columns: AnchorColumns
        if self.text_alone:
            columns = self.text_columns(one.batch, one.anchors, rows)
        else:
            columns = self.target_columns(one.batch, one.anchors, rows, training=True)
        hidden_KND = hidden_NKD.expand(-1, depth, -1).transpose(0, 1)
        loss_at = partial(self._loss_at_depths, one, columns)
        if not drafter.separate_heads or drafter.estimates_acceptance or self.loss_config.couples:
            return loss_at(slice(0, depth), hidden_KND)
        return chunked(loss_at, [hidden_KND], one.parameters, 1)

    def _loss_at_depths(
        self, one: TrainingPass, columns: AnchorColumns, k: slice, hidden_KND: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The part of `_chunk_loss` at some depths. It computes their logits, and the loss reads
        them a few anchors at a time."""
        drafter, reference = self.drafter, self._reference.held
        assert isinstance(drafter, Trainable)
        hidden_NKD, reference_NKS = hidden_KND.transpose(0, 1), None
        if drafter.separate_heads:
            hidden_NKD = drafter.heads_of(hidden_NKD, k.start)
        tensors = self.draft_tensors(hidden_NKD, first=k.start)
        if reference is not None and one.reference_NKD is not None:
            with torch.no_grad():
                compared_NKD = one.reference_NKD[columns.rows, k]
                reference_NKS = logits_of(reference, compared_NKD, first=k.start)

        few = partial(self._loss_of_few, one, columns, k, reference_NKS)
        # a loss that compares with a reference ranks a chunk's tokens, so it needs them all
        N = len(hidden_NKD)
        size = N if reference is not None else at_once(tensors[0])
        return few(slice(None), *tensors) if size >= N else chunked(few, tensors, [], size)

    def _loss_of_few(
        self,
        one: TrainingPass,
        columns: AnchorColumns,
        k: slice,
        reference_NKS: Tensor | None,
        at: slice,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The part of `_loss_at_depths` at some anchors, from their `draft_tensors`."""
        inputs = (
            self.loss_inputs(columns, at, k, *tensors)
            if isinstance(columns, TargetColumns)
            else self.text_inputs(columns, at, k, *tensors)
        )
        inputs.progress = one.progress
        if reference_NKS is not None:
            inputs.reference_log_q = self.sampler.uncut.log_probs(reference_NKS[at])
        loss_NK = self.loss_config.loss(inputs)
        if inputs.confidence is not None:  # a gradient of 0, not None, if its weight is 0
            loss_NK = loss_NK + 0 * inputs.confidence
        counts_NK = [torch.ones_like(loss_NK), loss_NK.detach()]
        counts_NK += (
            [inputs.probability] if isinstance(inputs, TextInputs) else acceptance(inputs.as_served)
        )
        counted_SNK = torch.stack(counts_NK) * inputs.valid
        counted_KS = counted_SNK.permute(2, 0, 1).contiguous().sum(-1)
        total = (loss_NK * columns.loss_weight_NK[at, k] * one.decay_K[k]).sum()
        return total, pad(counted_KS, (0, 0, k.start, self.depth - k.start - len(counted_KS)))

    def text_columns(self, batch: Batch, anchors: Anchors, rows: slice) -> AnchorColumns:
        """The text's side of one chunk, the anchors of `rows`."""
        T = batch.mask_BT.shape[1]
        depths = torch.arange(1, 1 + anchors.weight_NK.shape[1], device=batch.mask_BT.device)
        next_NK = (anchors.position_N[rows, None] + depths).clamp_max(T - 1)
        loss_weight_NK = anchors.weight_NK[rows]
        of_anchor_N1 = loss_weight_NK.amax(-1, keepdim=True)
        return AnchorColumns(
            rows=rows,
            label_NK=self._draft_ids(batch.ctx.ids_BT[anchors.row_N[rows, None], next_NK]),
            valid_NK=anchors.valid_NK[rows],
            loss_weight_NK=loss_weight_NK,
            weight_NK=loss_weight_NK / torch.where(of_anchor_N1 > 0, of_anchor_N1, 1),
        )

    def target_columns(
        self, batch: Batch, anchors: Anchors, rows: slice, training: bool = False
    ) -> TargetColumns:
        """The target's side of one chunk, the anchors of `rows`. Its logits are computed once for
        all depths. In `training`, p is taken before cutoffs; see `LossInputs`."""
        cuts = training and self.sampler.truncates
        T = batch.mask_BT.shape[1]
        depths = torch.arange(anchors.weight_NK.shape[1], device=batch.mask_BT.device)
        row_N1 = anchors.row_N[rows, None]
        at_NK = (anchors.position_N[rows, None] + depths).clamp_max(T - 1)
        states, accepted_NK = (batch.final_BTD, batch.summary), None
        if (visited := batch.visited) is not None:
            visit_N = torch.searchsorted(visited.place_N, row_N1[:, 0] * T + at_NK[:, 0])
            accepted_NK = depths < visited.accepted_N[visit_N, None]
            states = visited.final_NKD, visited.summary
            where_NK = visit_N[:, None] * len(depths) + depths
        else:
            near = anchors.nearest
            ahead = torch.arange(len(depths), device=near.row_N.device)
            column_NK = (near.position_N[rows, None] + ahead).clamp_max(T - 1)
            where_NK = near.row_N[rows, None] * T + column_NK
        where_N, index_NK = where_NK.unique(return_inverse=True)
        where_N = rounded(where_N).to(depths.device, non_blocking=True)
        index_NK = index_NK.to(depths.device, non_blocking=True)
        summary = Summary(*(x.flatten()[where_N] for x in states[1]))
        final_ND = states[0].flatten(0, 1)[where_N]
        with torch.no_grad(), exactly(final_ND):
            logits_NS = self._target_logits(final_ND)
            log_p_NS, served_log_p_NS = self.sampler.log_probs_of(logits_NS, summary), None
            if cuts:
                served_log_p_NS = log_p_NS
                log_p_NS = self.sampler.uncut.log_probs_of(logits_NS, summary.uncut)
        argmax_NK = self._draft_ids(summary.argmax_N[index_NK])
        text = self.text_columns(batch, anchors, rows)
        if visited is not None:  # the text does not continue what was drafted
            text = replace(text, label_NK=argmax_NK)
        return TargetColumns(
            **vars(text),
            index_NK=index_NK,
            log_p_NS=log_p_NS,
            served_log_p_NS=served_log_p_NS,
            final_ND=final_ND,
            argmax_NK=argmax_NK,
            accepted_NK=accepted_NK,
        )

    def draft_tensors(
        self, hidden_NKD: Tensor, copied_NK: Tensor | None = None, first: int = 0
    ) -> list[Tensor]:
        """The draft's tensors for `loss_inputs`, from its hidden states at depths from `first`
        on: logits, hidden states and, if it estimates one, its confidence. Gradients can flow
        through all of them. If no loss term trains the confidence, its gradient changes only
        that estimate."""
        drafter, tensors = self.drafter, [logits_of(self.drafter, hidden_NKD, copied_NK, first)]
        tensors.append(hidden_NKD)
        if isinstance(drafter, Predictor) and drafter.estimates_acceptance:
            apart = self.loss_config.trains_confidence_apart
            tensors.append(drafter.confidence(hidden_NKD.detach() if apart else hidden_NKD))
        return tensors

    def loss_inputs(
        self,
        columns: TargetColumns,
        at: slice,
        k: slice,
        logits_NKS: Tensor,
        hidden_NKD: Tensor,
        confidence_NK: Tensor | None = None,
    ) -> LossInputs:
        """p, q and the other inputs of a loss at the anchors `at` of a chunk and the depths `k`,
        from the output of `draft_tensors`."""
        index_NK, served = columns.index_NK[at, k], None
        argmax_NK, label_NK = columns.argmax_NK[at, k], columns.label_NK[at, k]
        if columns.served_log_p_NS is not None:
            served_log_q = self.sampler.log_probs(logits_NKS.detach())
            served_log_p = columns.served_log_p_NS[index_NK]
            served = DistributionPair(served_log_p, served_log_q, argmax_NK, label_NK)
        sampler = self.sampler if served is None else self.sampler.uncut
        accepted_NK = columns.accepted_NK
        return LossInputs(
            log_p=columns.log_p_NS[index_NK],
            log_q=sampler.log_probs(logits_NKS),
            target_argmax=argmax_NK,
            label=label_NK,
            valid=columns.valid_NK[at, k],
            logits=logits_NKS,
            hidden=hidden_NKD,
            target_hidden=columns.final_ND[index_NK],
            confidence=confidence_NK,
            accepted=None if accepted_NK is None else accepted_NK[at, k],
            served=served,
            weight=columns.weight_NK[at, k],
        )

    def text_inputs(
        self,
        columns: AnchorColumns,
        at: slice,
        k: slice,
        logits_NKS: Tensor,
        hidden_NKD: Tensor,
        confidence_NK: Tensor | None = None,
    ) -> TextInputs:
        """As `loss_inputs`, without p. q is taken before cutoffs, as in training with the
        target."""
        return TextInputs(
            self.sampler.uncut.log_probs(logits_NKS),
            label=columns.label_NK[at, k],
            valid=columns.valid_NK[at, k],
            logits=logits_NKS,
            hidden=hidden_NKD,
            confidence=confidence_NK,
            weight=columns.weight_NK[at, k],
        )

    def _draft_ids(self, target_ids: Tensor) -> Tensor:
        """Indices into the draft vocabulary, -1 for tokens outside it."""
        return target_ids if self._index_V is None else self._index_V[target_ids]

    def _adapted(self, batch: Batch, progress: float) -> tuple[Batch, float]:
        """The batch as the target reads it with trained adapters, and the weight of the draft's
        loss; the same batch if there are no adapters. The draft's gradient reaches the adapters
        through the hidden states that it reads; p is always a constant."""
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
        return chunked(part, cut, [], self.loss_config.chunk)[0]

    def _measured(
        self, batch: Batch, more: MoreColumns | None, depth: int | None
    ) -> AcceptanceTable:
        anchors = batch.anchors(depth or self.drafter.depth, "token")
        copied_NK, hidden_NKD = self._copied_and_hidden(batch, anchors)
        measured = []
        for rows in slices(hidden_NKD, self.loss_config.chunk):
            columns = self.target_columns(batch, anchors, rows)
            copied = None if copied_NK is None else copied_NK[rows]
            tensors = self.draft_tensors(hidden_NKD[rows], copied)
            for at in slices(tensors[0], at_once(tensors[0])):
                inputs = self.loss_inputs(columns, at, slice(None), *(x[at] for x in tensors))
                measured.append((*acceptance(inputs), *(more(inputs) if more else ())))
        whole_columns = [torch.cat(x) * anchors.valid_NK for x in zip(*measured, strict=True)]
        return AcceptanceTable(anchors, Acceptance(*whole_columns[:3]), tuple(whole_columns[3:]))

    def _hidden(
        self,
        drafter: Predictor,
        batch: Batch,
        anchors: Anchors,
        grid: tuple[Tensor, Tensor],
        moment: TrainingMoment | None = None,
    ) -> Tensor:
        """The draft's hidden states [N, K, D] given the text's own tokens, by the training pass if
        there is a `moment`; at visited anchors, given the drafted tokens. In training, a drafter
        with `separate_heads` returns their inputs in place of hidden states. `grid` is
        `Anchors.grid`."""
        (at_BA, column_N), drafted_BTK = grid, batch.drafted_BTK
        if moment is not None and isinstance(drafter, Trainable) and drafter.separate_heads:
            hidden_BAKD = drafter.read_by_heads(batch.ctx, at_BA)
        elif drafted_BTK is not None:
            drafted_BTK = drafted_BTK[..., :-1].clamp_min(0)
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

    def _copied_and_hidden(self, batch: Batch, anchors: Anchors) -> tuple[Tensor | None, Tensor]:
        """The ids [N, K] that the drafter copies (None if it does not copy) and its hidden states
        [N, K, D], given the text's own tokens. If it copies, these are the states of its head, if
        it has one."""
        drafter, (N, K) = self.drafter, anchors.weight_NK.shape
        at_BA, column_N = grid = anchors.grid(len(batch.mask_BT))
        if not drafter.copies:
            assert isinstance(drafter, Predictor)
            return None, self._hidden(drafter, batch, anchors, grid)
        hidden_NKD = batch.final_BTD.new_zeros(N, K, 0)
        if (with_head := drafter.copying_head) is not None:
            head, depth = with_head[0], min(K, with_head[1])
            assert isinstance(head, Predictor)
            own_BAK = text_after(batch.ctx.ids_BT, at_BA, depth - 1)
            hidden_BAKD = head.hidden(batch.ctx, at_BA, own_BAK)
            hidden_NKD = pad(hidden_BAKD[anchors.row_N, column_N], (0, 0, 0, K - depth))
        return drafter.copied(batch.ctx, at_BA, K)[anchors.row_N, column_N], hidden_NKD


def logits_of(
    drafter: Drafter, hidden_NKD: Tensor, copied_NK: Tensor | None = None, first: int = 0
) -> Tensor:
    """Draft logits [N, K, S] of K depths, from depth `first` on. Logits of copied tokens, over the
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


def acceptance_by_response(table: AcceptanceTable, batch: Batch) -> list[Acceptance]:
    """The acceptance of each response [T, K], taken from a table. Rows go from the anchor of a
    decoder's first speculation step (prefill emits a response's first token) to the last token but
    one. Depths beyond the end of a response are 0."""
    row_N, position_N = table.anchors.row_N, table.anchors.position_N
    usable_N = table.anchors.valid_NK[:, 0] & batch.mask_BT[row_N, position_N]
    place_N = (row_N * batch.mask_BT.shape[1] + position_N)[usable_N].cpu()
    cuts = ((place_N.diff() != 1).nonzero()[:, 0] + 1).tolist()
    columns = [column[usable_N].float().cpu().tensor_split(cuts) for column in table.alpha]
    return [Acceptance(*parts) for parts in zip(*columns, strict=True) if len(place_N)]


def predicted_steps(alpha_TK: Tensor) -> tuple[float, float]:
    """The number of tokens of one response after its first, and the expected number of speculation
    steps for them; τ is their ratio. `alpha_TK` has a row for each token but the last; depths
    beyond the end, where a decoder cuts its tokens off, have no effect. With greedy acceptance
    these are the decoder's own counts for the same response."""
    return float(len(alpha_TK)), float(visits(alpha_TK).sum())

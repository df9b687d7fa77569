"""Teacher forcing: what a drafter would do at every anchor of a known text.

The loss and every teacher-forced α come from the same pairs of p and q, made here. Only one
chunk's logits exist at a time: p over the draft vocabulary follows from the target's hidden
state and three numbers a position (`sampler.Summary`), normalised over the full vocabulary.

Letters: B batch, T time, N anchors of all rows, K depth, D width, S draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specdec.context import Context, Moment, Needs
from specdec.drafters.base import Drafter
from specdec.errors import UserError
from specdec.forcing.anchors import Anchors, anchors_of, together
from specdec.objectives.chunked import chunked
from specdec.objectives.objective import ObjectiveConfig
from specdec.objectives.piece import Piece
from specdec.sampling.sampler import Sampler, Summary
from specdec.target.base import Target
from specdec.target.parts import Parts
from specdec.theory.alpha import Acceptance, acceptance, expected_tokens, visits

Columns = Callable[[Piece], tuple[Tensor, ...]]
STATISTICS = ("positions", "loss", "sampled", "greedy_draft", "greedy")


@dataclass
class Batch:
    """Rows of text with what the target says of them, padded to one length."""

    ctx: Context
    final_BTD: Tensor  # the target's final hidden state: p comes from it
    summary: Summary  # each [B, T]
    mask_BT: Tensor  # tokens that loss and α are taken on


class Table(NamedTuple):
    """Acceptance at every anchor of a batch, and which anchors they are."""

    anchors: Anchors
    alpha: Acceptance  # each [N, K]; 0 where not valid
    more: tuple[Tensor, ...] = ()  # further columns [N, K] that were asked for


def summarise(target: Parts, final_BTD: Tensor, sampler: Sampler, chunk: int = 128) -> Summary:
    """`Sampler.summarise` of the target's logits, a chunk of positions at a time; [B, T] each."""
    parts = [sampler.summarise(target.logits(x)) for x in final_BTD.flatten(0, 1).split(chunk)]
    return Summary(*(torch.cat(p).view(final_BTD.shape[:2]) for p in zip(*parts, strict=True)))


@torch.no_grad()
def batch_of(
    target: Target,
    needs: Needs,
    sampler: Sampler,
    ids: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
) -> Batch:
    """A batch of whole texts, one a row, read by the target now."""
    B, T = len(ids), max(map(len, ids))
    ids_BT = torch.zeros(B, T, dtype=torch.long)
    mask_BT = torch.zeros(B, T, dtype=torch.bool)
    document_BT = torch.full((B, T), -1)
    for b, (tokens, mask) in enumerate(zip(ids, masks, strict=True)):
        ids_BT[b, : len(tokens)] = torch.tensor(tokens)
        mask_BT[b, : len(tokens)] = torch.tensor(mask)
        document_BT[b, : len(tokens)] = 0
    position_BT = torch.arange(T).expand(B, T).contiguous()
    moved = [x.to(target.device) for x in (ids_BT, position_BT, document_BT, mask_BT)]
    ctx, final = target.features(moved[0], needs, position_BT=moved[1], document_BT=moved[2])
    return Batch(ctx, final, summarise(target, final, sampler), moved[3])


class TeacherForcing(nn.Module):
    """A drafter read at all anchors of a batch: its loss, or its acceptance.

    `reference` is a frozen draft with the same vocabulary, for objectives that compare with one.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Parts,
        sampler: Sampler,
        objective: ObjectiveConfig | None = None,
        reference: Drafter | None = None,
    ) -> None:
        super().__init__()
        if sampler.greedy:
            raise UserError(
                "sampler.temperature=0 cannot be trained on (α has no gradient): train at 1 and "
                "serve greedily; reports show both"
            )
        if reference is not None and reference.needs != drafter.needs:
            raise UserError(
                "the reference draft reads other features of the target than the draft: give one "
                "of the same family and layers"
            )
        self.objective = objective or ObjectiveConfig()
        self.drafter = drafter
        self.sampler = sampler
        self._reference = (reference,)  # in a tuple: no part of what is trained and saved
        self._head = target.unembedding(drafter.vocab_S)
        self._index_V: Tensor | None = None
        if (vocab_S := drafter.vocab_S) is not None:
            self._index_V = torch.full((target.vocab_size,), -1, device=vocab_S.device)
            self._index_V[vocab_S] = torch.arange(len(vocab_S), device=vocab_S.device)

    def anchors(
        self,
        mask_T: NDArray[np.bool_],
        document_T: NDArray[np.int32],
        position_T: NDArray[np.int32],
        seed: int,
    ) -> Anchors:
        """The anchors of one row of training, which its drafter chooses, and the total that a loss
        over them is divided by. The same seed gives the same ones."""
        generator = torch.Generator().manual_seed(seed)
        mask_1T, document_1T, position_1T = (
            torch.as_tensor(x)[None] for x in (mask_T, document_T, position_T)
        )
        return anchors_of(
            mask_1T,
            document_1T,
            position_1T,
            self.drafter.train_depth,
            lambda valid_TK, _: self.drafter.anchors(valid_TK, generator),
            self.objective.per,
        )

    def forward(
        self,
        batch: Batch,
        anchors: Sequence[Anchors] | None = None,
        moment: Moment | None = None,
        measure: bool = False,
        more: Columns | None = None,
    ) -> tuple[Tensor, Tensor] | Table:
        """Summed loss and statistics [K, 5] over `STATISTICS`; or, to `measure`, a `Table`, with
        the columns that `more` computes.

        `anchors` are those of each row; None, as to measure: all valid positions. Through
        `forward` alone, so that DDP and FSDP see every use of the weights. The loss is
        Σ_k decay^k Σ_anchors weight · loss, not yet divided by the anchors' total.
        """
        if measure:
            return self._table(batch, more)
        moment = moment or Moment(seeds=range(len(batch.mask_BT)))
        depth = self.drafter.train_depth
        chosen = self._all(batch, depth) if anchors is None else together(anchors)
        chosen = chosen.to(batch.mask_BT.device)
        where_BA, slot_N = _grid(chosen, len(batch.mask_BT))
        hidden_BAKD = self.drafter.training_hidden(batch.ctx, where_BA, moment)
        hidden_NKD = hidden_BAKD[chosen.row_N, slot_N][:, :depth]
        compared_NKD = None
        if (reference := self._reference[0]) is not None:
            with torch.no_grad():
                compared_BAKD = reference.hidden(batch.ctx, where_BA, None)
                compared_NKD = compared_BAKD[chosen.row_N, slot_N][:, :depth]
        decay_K = hidden_NKD.new_tensor([self.objective.depth_decay**k for k in range(depth)])

        def part(some_NKD: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            piece = self._piece(batch, chosen, some_NKD, rows)
            piece.progress = moment.progress
            if reference is not None and compared_NKD is not None:
                with torch.no_grad():
                    logits_NKS = reference.unembed_all(compared_NKD[rows])
                    piece.reference_log_q = self.sampler.log_probs(logits_NKS)
            losses = self.objective.losses(piece)
            loss_NK = sum(self.objective.terms[name] * loss for name, loss in losses.items())
            assert isinstance(loss_NK, Tensor)
            total = (loss_NK * chosen.weight_NK[rows] * decay_K).sum()
            columns = [torch.ones_like(loss_NK), loss_NK.detach(), *acceptance(piece)]
            counted_CNK = torch.stack(columns) * piece.valid
            return total, counted_CNK.permute(2, 0, 1).contiguous().sum(-1)

        parameters = [p for p in self.drafter.parameters() if p.requires_grad]
        return chunked(part, hidden_NKD, parameters, self.objective.chunk)

    def _table(self, batch: Batch, more: Columns | None) -> Table:
        depth = self.drafter.depth
        anchors = self._all(batch, depth)
        where_BA, slot_N = _grid(anchors, len(batch.mask_BT))
        hidden_BAKD = self.drafter.hidden(batch.ctx, where_BA, None)
        hidden_NKD = hidden_BAKD[anchors.row_N, slot_N][:, :depth]
        found, chunk = [], self.objective.chunk
        for start in range(0, len(hidden_NKD), chunk):
            rows = slice(start, start + chunk)
            piece = self._piece(batch, anchors, hidden_NKD[rows], rows)
            found.append((*acceptance(piece), *(more(piece) if more else ())))
        columns = [torch.cat(x) * anchors.valid_NK for x in zip(*found, strict=True)]
        return Table(anchors, Acceptance(*columns[:3]), tuple(columns[3:]))

    def _all(self, batch: Batch, depth: int) -> Anchors:
        ctx = batch.ctx
        assert ctx.document_BT is not None and ctx.position_BT is not None
        per = self.objective.per
        return anchors_of(batch.mask_BT, ctx.document_BT, ctx.position_BT, depth, per=per)

    def _piece(self, batch: Batch, anchors: Anchors, hidden_NKD: Tensor, rows: slice) -> Piece:
        """p, q and what else an objective may read, for one chunk of anchors."""
        T = batch.mask_BT.shape[1]
        depths = torch.arange(hidden_NKD.shape[1], device=hidden_NKD.device)
        row_N1 = anchors.row_N[rows, None]
        at_NK = (anchors.position_N[rows, None] + depths).clamp_max(T - 1)
        # depth k at one anchor and k - 1 at the next have one p: it is made once
        where_U, index_NK = (row_N1 * T + at_NK).unique(return_inverse=True)
        summary = Summary(*(x.flatten()[where_U] for x in batch.summary))
        final_UD = batch.final_BTD.flatten(0, 1)[where_U]
        with torch.no_grad():
            log_p_US = self.sampler.log_probs_of(self._head(final_UD), summary)
        label_NK = batch.ctx.ids_BT[row_N1, (at_NK + 1).clamp_max(T - 1)]
        return Piece(
            log_p=log_p_US[index_NK],
            log_q=self.sampler.log_probs(self.drafter.unembed_all(hidden_NKD)),
            target_argmax=self._draft_ids(summary.argmax_N)[index_NK],
            label=self._draft_ids(label_NK),
            valid=anchors.valid_NK[rows],
            hidden=hidden_NKD,
            features=final_UD[index_NK],
            confidence=self.drafter.confidence(hidden_NKD),
        )

    def _draft_ids(self, target_ids: Tensor) -> Tensor:
        """Indices in the draft vocabulary, -1 where it lacks the token."""
        return target_ids if self._index_V is None else self._index_V[target_ids]


def _grid(anchors: Anchors, rows: int) -> tuple[Tensor, Tensor]:
    """Anchors as a padded table [B, A] of positions, and the column [N] that each is in."""
    counts_B = torch.bincount(anchors.row_N, minlength=rows)
    first_B = counts_B.cumsum(0) - counts_B
    slot_N = torch.arange(len(anchors.row_N), device=first_B.device) - first_B[anchors.row_N]
    where_BA = anchors.row_N.new_ones(rows, int(counts_B.max()))
    where_BA[anchors.row_N, slot_N] = anchors.position_N
    return where_BA, slot_N


class Answer(NamedTuple):
    """One assistant span of a text: its anchors in order, and the acceptance at each."""

    row: int
    start: int  # position of the first anchor: the span's first token
    alpha: Acceptance  # each [T, K], anchors start, start + 1, … whose depths are all valid


def answers(table: Table, batch: Batch) -> list[Answer]:
    """Cut a table into answers, each from the anchor at which a decoder's first round starts.

    Prefill emits an answer's first token, so the round that would predict it does not occur.
    """
    anchors = table.anchors.to(torch.device("cpu"))
    row_N, position_N = anchors.row_N, anchors.position_N
    usable = anchors.valid_NK.all(-1) & batch.mask_BT.cpu()[row_N, position_N]
    columns = [column.float().cpu() for column in table.alpha]
    found: list[Answer] = []
    index = usable.nonzero()[:, 0].tolist()
    start = 0
    for i in range(1, len(index) + 1):
        n = index[i - 1]
        joined = i < len(index) and (row_N[index[i]], position_N[index[i]]) == (
            row_N[n],
            position_N[n] + 1,
        )
        if not joined:
            rows = index[start:i]
            where = int(row_N[rows[0]]), int(position_N[rows[0]])
            found.append(Answer(*where, Acceptance(*(c[rows] for c in columns))))
            start = i
    return found


def predicted_rounds(alpha_TK: Tensor) -> tuple[float, float]:
    """Tokens and rounds that a decoder is expected to need for one answer: τ is their ratio."""
    visit_T = visits(alpha_TK)
    tokens_T = expected_tokens(alpha_TK.double())
    return float((visit_T * tokens_T).sum()), float(visit_T.sum())

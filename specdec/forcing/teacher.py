"""Teacher forcing: what a drafter would do at every anchor of a known text.

The loss and every teacher-forced α come from the same pairs of p and q, made here. Only one
chunk's logits exist at a time: p over the draft vocabulary follows from the target's hidden
state and three numbers a position (`sampler.Summary`), normalised over the full vocabulary.

Letters: B batch, T time, N anchors of all rows, K depth, D width, S draft vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specdec.context import Context, Needs
from specdec.drafters.base import Drafter
from specdec.errors import UserError
from specdec.objectives.losses import LOSSES, LossConfig, chunked
from specdec.sampling.sampler import Sampler, Summary
from specdec.target.base import Target
from specdec.theory.alpha import Acceptance, Pair, acceptance, expected_tokens, visits

STATISTICS = ("positions", "loss", "sampled", "greedy_draft", "greedy")


@dataclass
class Batch:
    """Rows of text with what the target says of them, padded to one length."""

    ctx: Context
    final_BTD: Tensor  # the target's final hidden state: p comes from it
    summary: Summary  # each [B, T]
    mask_BT: Tensor  # tokens that loss and α are taken on


class Anchors(NamedTuple):
    """Every anchor whose next token counts, row by row."""

    row_N: Tensor
    position_N: Tensor
    valid_NK: Tensor  # whether depth k's token is still of the same answer


class Table(NamedTuple):
    """Acceptance at every anchor of a batch, and which anchors they are."""

    anchors: Anchors
    alpha: Acceptance  # each [N, K]; 0 where not valid


def summarise(target: Target, final_BTD: Tensor, sampler: Sampler, chunk: int = 128) -> Summary:
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


def anchors_of(batch: Batch, depth: int) -> Anchors:
    """Anchors a >= 1 of a document whose token a + 1 counts; see `Anchors`."""
    mask_BT, document_BT = batch.mask_BT, batch.ctx.document_BT
    assert document_BT is not None and batch.ctx.position_BT is not None
    T = mask_BT.shape[1]
    pad = (0, depth)
    mask = nn.functional.pad(mask_BT, pad)
    document = nn.functional.pad(document_BT, pad, value=-2)
    counts_BTK = torch.stack(
        [
            mask[:, k + 1 : k + 1 + T] & (document[:, k + 1 : k + 1 + T] == document_BT)
            for k in range(depth)
        ],
        -1,
    ).cumprod(-1)
    first = counts_BTK[..., 0].bool() & (batch.ctx.position_BT > 0)
    row_N, position_N = first.nonzero(as_tuple=True)
    return Anchors(row_N, position_N, counts_BTK[row_N, position_N].bool())


def count_anchors(mask: NDArray[np.bool_], position: NDArray[np.int32]) -> int:
    """How many anchors `anchors_of` finds in a row, from its mask and positions alone."""
    return int((mask[1:] & (position[1:] > 1)).sum())


class TeacherForcing(nn.Module):
    """A drafter read at all anchors of a batch: its loss, or its acceptance."""

    def __init__(
        self, drafter: Drafter, target: Target, sampler: Sampler, cfg: LossConfig | None = None
    ) -> None:
        super().__init__()
        self.cfg = cfg or LossConfig()
        if sampler.greedy:
            raise UserError(
                "sampler.temperature=0 cannot be trained on (α has no gradient): train at 1 and "
                "serve greedily; reports show both"
            )
        self.drafter = drafter
        self.sampler = sampler
        self.loss = LOSSES[self.cfg.name]
        self._head = target.unembedding(drafter.vocab_S)
        self._index_V: Tensor | None = None
        if (vocab_S := drafter.vocab_S) is not None:
            self._index_V = torch.full((target.vocab_size,), -1, device=vocab_S.device)
            self._index_V[vocab_S] = torch.arange(len(vocab_S), device=vocab_S.device)

    def forward(self, batch: Batch, measure: bool = False) -> tuple[Tensor, Tensor] | Table:
        """Summed loss and statistics [K, 5] over `STATISTICS`; or, to `measure`, a `Table`.

        Through `forward` alone, so that DDP and FSDP see every use of the weights. The loss is
        Σ_k decay^k Σ_anchors loss, not yet divided by the number of anchors.
        """
        depth = self.drafter.depth if measure else self.drafter.train_depth
        anchors = anchors_of(batch, depth)
        hidden_NKD = self._hidden(batch, anchors)[:, :depth]
        if measure:
            return self._table(batch, anchors, hidden_NKD)

        def part(piece_NKD: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            total, seen = piece_NKD.new_zeros((), dtype=torch.float32), []
            for k, pair in enumerate(self._pairs(batch, anchors, piece_NKD, rows)):
                valid = anchors.valid_NK[rows, k].float()
                loss = (self.loss(pair, self.cfg) * valid).sum()
                total = total + self.cfg.depth_decay**k * loss
                columns = [torch.ones_like(valid), *acceptance(pair)]
                sums = [(column * valid).sum() for column in columns]
                seen.append(torch.stack([sums[0], loss.detach(), *sums[1:]]))
            return total, torch.stack(seen)

        parameters = [p for p in self.drafter.unembed_parameters() if p.requires_grad]
        return chunked(part, hidden_NKD, parameters, self.cfg.chunk)

    def _table(self, batch: Batch, anchors: Anchors, hidden_NKD: Tensor) -> Table:
        pieces = []
        for start in range(0, len(hidden_NKD), self.cfg.chunk):
            rows = slice(start, start + self.cfg.chunk)
            per_depth = map(acceptance, self._pairs(batch, anchors, hidden_NKD[rows], rows))
            pieces.append([torch.stack(x, -1) for x in zip(*per_depth, strict=True)])
        valid = anchors.valid_NK
        return Table(
            anchors, Acceptance(*(torch.cat(x) * valid for x in zip(*pieces, strict=True)))
        )

    def _hidden(self, batch: Batch, anchors: Anchors) -> Tensor:
        """Drafter's hidden states [N, K, D], from one pass over the padded rows."""
        counts_B = torch.bincount(anchors.row_N, minlength=len(batch.mask_BT))
        first_B = counts_B.cumsum(0) - counts_B
        slot_N = torch.arange(len(anchors.row_N), device=first_B.device) - first_B[anchors.row_N]
        anchors_BA = anchors.row_N.new_ones(len(counts_B), int(counts_B.max()))
        anchors_BA[anchors.row_N, slot_N] = anchors.position_N
        return self.drafter.hidden(batch.ctx, anchors_BA, None)[anchors.row_N, slot_N]

    def _pairs(
        self, batch: Batch, anchors: Anchors, hidden_NKD: Tensor, rows: slice
    ) -> Iterator[Pair]:
        """p and q at each depth, for one chunk of anchors."""
        row, position = anchors.row_N[rows], anchors.position_N[rows]
        last = batch.mask_BT.shape[1] - 1
        for k in range(hidden_NKD.shape[1]):
            at = (position + k).clamp_max(last)
            summary = Summary(*(x[row, at] for x in batch.summary))
            with torch.no_grad():
                logits_p = self._head(batch.final_BTD[row, at])
                log_p = self.sampler.log_probs_of(logits_p, summary)
            log_q = self.sampler.log_probs(self.drafter.unembed(hidden_NKD[:, k], k))
            label = batch.ctx.ids_BT[row, (at + 1).clamp_max(last)]
            yield Pair(log_p, log_q, self._draft_ids(summary.argmax_N), self._draft_ids(label))

    def _draft_ids(self, target_ids: Tensor) -> Tensor:
        """Indices in the draft vocabulary, -1 where it lacks the token."""
        return target_ids if self._index_V is None else self._index_V[target_ids]


class Answer(NamedTuple):
    """One assistant span of a text: its anchors in order, and the acceptance at each."""

    row: int
    start: int  # position of the first anchor: the span's first token
    alpha: Acceptance  # each [T, K], anchors start, start + 1, … whose depths are all valid


def answers(table: Table, batch: Batch) -> list[Answer]:
    """Cut a table into answers, each from the anchor at which a decoder's first round starts.

    Prefill emits an answer's first token, so the round that would predict it does not occur.
    """
    row_N, position_N, valid_NK = (x.cpu() for x in table.anchors)
    mask_BT = batch.mask_BT.cpu()
    usable = valid_NK.all(-1) & mask_BT[row_N, position_N]
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

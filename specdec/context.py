"""The types that every module shares: the input of a drafter and its proposals."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class HiddenStateSpec:
    """The hidden states of the target that a drafter reads. Layer k, from 1 to L, is the residual
    stream after k layers, as Hugging Face's `hidden_states[k]`; layer L is the stream before the
    final norm."""

    layers: tuple[int, ...] = ()
    final_hidden: bool = False  # the stream after the final norm, which the LM head reads


@dataclass
class Context:
    """Tokens and the target's hidden states for them. A drafter at anchor a reads only hidden
    states before a. While decoding, row b has `lengths[b]` tokens, the last of which is its anchor,
    and one hidden state less; padding follows. In training (`lengths` is None) tokens and hidden
    states cover complete packed rows."""

    ids_BT: Tensor
    layers_BTF: Tensor | None = (
        None  # the layers of a `HiddenStateSpec`, concatenated in their order
    )
    final_BTD: Tensor | None = None
    document_BT: Tensor | None = None  # each token's document, -1 = padding; None: see `documents`
    position_BT: Tensor | None = None  # position in its document; None = 0, 1, 2, …
    lengths: list[int] | None = None
    texts: list[list[int]] | None = None  # the tokens of each row, where a caller has them
    cache: Any = None  # the target's own `SlotCache`, for drafters that are part of the target

    def documents(self) -> tuple[Tensor, Tensor]:
        """The position [B, T] of each token within its document, and the document's number [B,
        T]."""
        position_BT, document_BT = self.position_BT, self.document_BT
        if position_BT is None:
            place_T = torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device)
            position_BT = place_T.expand_as(self.ids_BT)
        if document_BT is None:
            document_BT = (position_BT == 0).cumsum(1) - 1
        return position_BT, document_BT

    def hidden_states(self, needs: HiddenStateSpec) -> Tensor:
        """The target's hidden states for a drafter with these needs [B, T, F]: the requested
        layers, or the final state."""
        hidden_states = self.layers_BTF if needs.layers else self.final_BTD
        assert hidden_states is not None
        return hidden_states

    def counts(self) -> list[int]:
        return self.lengths or [self.ids_BT.shape[1]] * len(self.ids_BT)

    def rows(self) -> list[list[int]]:
        if self.texts is not None:
            return self.texts
        return [ids[:n] for ids, n in zip(self.ids_BT.tolist(), self.counts(), strict=True)]


@dataclass(frozen=True)
class KnownAnchors:
    """Anchors in texts that the target has read: the texts' tokens and hidden states, and the
    target's final states, which determine its next-token distribution. After every anchor, the text
    has at least as many tokens as the drafter requires (`Trainable.closed_form_depths`)."""

    ctx: Context
    final_BTD: Tensor
    row_N: Tensor
    position_N: Tensor

    def before(self, x_BTF: Tensor) -> Tensor:
        """The entries [N, F] of the tokens before the anchors."""
        return x_BTF[self.row_N, self.position_N - 1]

    def tokens(self, depth: int) -> Tensor:
        """The token [N] that depth `depth` reads in addition to the depth before it: at depth 0,
        the anchor."""
        return self.ctx.ids_BT[self.row_N, self.position_N + depth]

    def wanted(self, depth: int) -> Tensor:
        """The target's final states [N, D] that predict the token of this depth."""
        return self.final_BTD[self.row_N, self.position_N + depth]


@dataclass(frozen=True)
class TrainingMoment:
    """The progress of a run at one training pass, for methods and losses that change over a run,
    and the results of the pass that are needed."""

    progress: float = 0.0  # share of the run's steps done so far
    seeds: Sequence[int] = ()  # one per row, the source of all its random numbers
    # mask of the depths of each anchor in the loss; None: all
    counted_BAK: Tensor | None = field(default=None, compare=False)

    def generators(self, device: torch.device) -> list[torch.Generator]:
        """One generator per row. It is the same however rows are distributed over batches and
        processes."""
        return [torch.Generator(device).manual_seed(seed) for seed in self.seeds]


@dataclass
class Scouts:
    """Extra tokens that the target reads together with a proposal and that are never kept. They
    show the drafter what the target predicts after them (`Drafter.hear`). Scouts are numbered from
    0, a parent before its children; the parent -1 is the anchor."""

    tokens_BN: Tensor
    parents_BN: Tensor


@dataclass
class Proposal:
    """Drafted tokens: a chain, or a tree if there are `parents_BG`.

    A token of -1 marks a node that was not drafted: rows may have drafts of different lengths.
    Nodes are numbered from 0, a parent before its children, siblings in the order in which they
    were drawn; the parent -1 is the anchor. `q_BGV` is the distribution over the target's
    vocabulary that each node was drawn from. Siblings have the same one, even if they were drawn
    without replacement. If `q_BGV` is None, the tokens were chosen deterministically (point
    masses).

    The target reads the anchor and the nodes as one block of M = G + 1 *places*: the anchor at
    place 0 and node i at place i + 1; scouts, if any, follow. The outputs of that pass (logits,
    hidden states and cache slots) are indexed by place.
    """

    tokens_BG: Tensor
    q_BGV: Tensor | None = None
    parents_BG: Tensor | None = None
    scouts: Scouts | None = None

    @property
    def above_BG(self) -> Tensor:
        """The place of each node's parent."""
        if self.parents_BG is not None:
            return self.parents_BG + 1
        G = self.tokens_BG.shape[1]
        return torch.arange(G, device=self.tokens_BG.device).expand_as(self.tokens_BG)

    def above(self, x_BM: Tensor) -> Tensor:
        """The values [B, G] at the place of each node's parent, from values [B, M] by place."""
        return x_BM[:, :-1] if self.parents_BG is None else x_BM.gather(1, self.above_BG)

    def children_BMC(self) -> Tensor:
        """The places of each place's children, in sibling order; 0 where there is none."""
        (B, G), above_BG = self.tokens_BG.shape, self.above_BG
        there_BG = self.tokens_BG >= 0
        kin_BGG = (above_BG[:, :, None] == above_BG[:, None, :]) & there_BG[:, None, :]
        rank_BG = kin_BGG.tril(-1).sum(-1)
        C = int(torch.where(there_BG, rank_BG, 0).max()) + 1 if B * G else 1
        children_BMC = self.tokens_BG.new_zeros(B, G + 1, C)
        row_N, node_N = there_BG.nonzero(as_tuple=True)
        children_BMC[row_N, above_BG[row_N, node_N], rank_BG[row_N, node_N]] = node_N + 1
        return children_BMC

    def tokens_at(self, row: Tensor, place: Tensor) -> Tensor:
        """The tokens drafted at these places of these rows; -1 at place 0, which is the anchor."""
        return torch.where(place > 0, self.tokens_BG[row, place - 1], -1)

    def q_at(self, row: Tensor, place: Tensor) -> Tensor | None:
        """The distributions from which the tokens at these places were drawn; arbitrary at place
        0."""
        return None if self.q_BGV is None else self.q_BGV[row, place - 1]

    def path_BK(self, end_B: Tensor) -> Tensor:
        """The nodes on the path from the anchor to each row's place `end_B`, padded with -1; K is
        the length of the longest path."""
        node_B1, path_BK = end_B[:, None] - 1, self.tokens_BG[:, :0]
        if self.parents_BG is None:
            node_K = torch.arange(int(end_B.max()), device=end_B.device)
            return torch.where(node_K <= node_B1, node_K, -1)
        while bool((node_B1 >= 0).any()):
            path_BK = torch.cat([node_B1, path_BK], 1)
            above_B1 = self.parents_BG.gather(1, node_B1.clamp_min(0))
            node_B1 = torch.where(node_B1 < 0, -1, above_B1)
        return path_BK.gather(1, (path_BK < 0).long().argsort(dim=1, stable=True))

    def block(self, anchor_B1: Tensor) -> tuple[Tensor, Tensor | None]:
        """The input of the target's verification pass: ids by place, [B, M] or with scouts [B, M +
        N], and the place that each token follows (-1: the last committed token). The second is None
        if each token follows the previous one."""
        ids = [anchor_B1, self.tokens_BG.clamp_min(0)]
        above = [torch.full_like(anchor_B1, -1), self.above_BG]
        if self.scouts is not None:
            first, parents_BN = self.tokens_BG.shape[1] + 1, self.scouts.parents_BN
            ids.append(self.scouts.tokens_BN)
            above.append(torch.where(parents_BN < 0, 0, parents_BN + first))
        elif self.parents_BG is None:
            return torch.cat(ids, 1), None
        return torch.cat(ids, 1), torch.cat(above, 1)

    def kept_places(self, path_BK: Tensor) -> Tensor | None:
        """The places of the anchor and of the nodes of these paths, in order; arbitrary after the
        end of a path. None if they are simply the first places."""
        if self.parents_BG is None:
            return None
        return torch.cat([path_BK.new_zeros(len(path_BK), 1), path_BK.clamp_min(0) + 1], 1)

    def drafted_to(self) -> list[list[list[int]]]:
        """For each row and place, the drafted tokens on the path to that place; empty at the
        anchor."""
        paths: list[list[list[int]]] = []
        tokens = self.tokens_BG.clamp_min(0).tolist()
        for ids, above in zip(tokens, self.above_BG.tolist(), strict=True):
            paths.append([[]])
            for token, place in zip(ids, above, strict=True):
                paths[-1].append([*paths[-1][place], token])
        return paths

    def rows(self, rows: slice) -> "Proposal":
        """The proposal for these rows of the batch, without scouts."""
        q, parents = (None if x is None else x[rows] for x in (self.q_BGV, self.parents_BG))
        return Proposal(self.tokens_BG[rows], q, parents)

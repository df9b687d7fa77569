"""LiLiCorr (arXiv 2608.20530; NVIDIA/Model-Optimizer, plugins/modeling_lilicorr.py): a DFlash block
and a small transformer that chooses among the block's likeliest tokens.

DFlash predicts each slot without the tokens of the others, so its tokens are likely one by one and
may not fit together. Here the `candidates` likeliest tokens of every slot enter a transformer that
attends over all of them in both directions. Each candidate gets two vectors of length 1: `out` for
the slot after it, `into` for the slot before it. The logit of candidate y after the candidate x of
the slot before is `scale` · cos(out_x, into_y). In the first slot, `out` is made of the hidden
state before the anchor. Tokens that are no candidates have no probability.

Two things differ from the reference:

- It adds two losses on the candidates to DFlash's. Here there is one q, so that any loss of this
  project trains it. In training, each anchor draws with probability 1/2 whether its q is the
  block's own or the corrected one, so the expected loss is the mean of both. A corrected q leaves
  tokens that are no candidates their probability, so no loss is infinite.
- The block gets no gradient through the log-probabilities that the candidates read.

Where a text goes on with a token that is no candidate, the next slot's q is the block's own, over
its candidates. Drafted tokens are candidates.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad, silu

from specdec.context import Context, TrainingMoment
from specdec.drafters.attention import entries, tokens_from
from specdec.drafters.base import grow_with_depth
from specdec.drafters.block import Block, BlockConfig, BlockSizes
from specdec.drafters.layers import RMSNorm
from specdec.errors import require
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts

FEATURES, SMALLEST, AT_ONCE = 5, 1e-6, 256


@dataclass
class LiLiCorrConfig(BlockConfig):
    """A DFlash block with a transformer over its candidates."""

    bounds: ClassVar = {
        **BlockConfig.bounds,
        **dict.fromkeys(("candidates", "correction_layers", "correction_width"), 1),
        **dict.fromkeys(("correction_heads", "rank"), 1),
    }
    name: str = "lilicorr"
    candidates: int = 8  # only the likeliest tokens of a slot may be drafted: this many
    correction_layers: int = 2  # layers of the transformer over the candidates
    correction_width: int = 256  # width of the transformer over the candidates
    # attention heads of the transformer over the candidates; a divisor of correction_width
    correction_heads: int = 4
    rank: int = 128  # width of the candidates' vectors, whose cosines are the logits
    scale: float = 16.0  # factor on the cosines


class Candidates(NamedTuple):
    """The candidates of blocks: places in the draft vocabulary and the target's ids [N, K, C], the
    vectors `out` and `into` [N, K, C, D], and `start` [N, D], the way out before the first slot."""

    places: Tensor
    ids: Tensor
    out: Tensor
    into: Tensor
    start: Tensor


class CandidateLayer(nn.Module):
    """A layer with attention in both directions, whose scores have a learned bias by the distance
    of two slots."""

    def __init__(self, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [N, K · C, D] after the layer. `bias` [N · H, K · C, K · C] is added to the scores."""
        read = self.attn_norm(x)
        x = x + self.attn(read, read, read, attn_mask=bias, need_weights=False)[0]
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class Correction(nn.Module):
    """The transformer over candidates; its parts have the names of the reference."""

    def __init__(self, config: LiLiCorrConfig, width: int, eps: float) -> None:
        super().__init__()
        D, C, K, H = (
            config.correction_width,
            config.candidates,
            config.depth,
            config.correction_heads,
        )
        require(
            D % H == 0,
            f"drafter.correction_heads={H}: give a divisor of drafter.correction_width, {D}",
        )
        self.heads, self.slots = H, K
        self.token_proj, self.pass_hidden_proj = nn.Linear(width, D), nn.Linear(width, D)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, D), nn.SiLU(), nn.Linear(D, D)
        )
        self.slot_embedding = nn.Parameter(torch.empty(K, 1, D))
        self.rank_embedding = nn.Parameter(torch.empty(C, D))
        self.relative_slot_bias = nn.Parameter(torch.empty(H, 2 * K + 1))  # by signed distance
        self.same_slot_bias = nn.Parameter(torch.empty(H))
        self.context_proj = nn.Linear(width, D)
        self.layers = nn.ModuleList(
            [CandidateLayer(D, H, eps) for _ in range(config.correction_layers)]
        )
        self.output_norm, self.anchor_norm = RMSNorm(D, eps), RMSNorm(D, eps)
        self.factor_input_proj = nn.Linear(3 * D, D)
        self.out_head, self.in_head, self.anchor_out_head = (
            nn.Linear(D, config.rank) for _ in range(3)
        )

    def initialise(self) -> None:
        """Set every tensor but the linear weights, which are drawn like the block's."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.bias.zero_()
            elif isinstance(module, nn.MultiheadAttention):
                nn.init.normal_(module.in_proj_weight, std=0.02)
                module.in_proj_bias.zero_()
        for name in ("slot_embedding", "rank_embedding", "relative_slot_bias", "same_slot_bias"):
            self.get_parameter(name).zero_()

    def forward(
        self, embedding: Tensor, log_q: Tensor, states: Tensor, before: Tensor, exists: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`out` and `into` [N, K, C, D], and `start` [N, D], from the candidates' embeddings
        [N, K, C, D], their log-probabilities [N, K, C] in descending order, the slots' states
        [N, K, D], and the fused hidden state before each anchor [N, D], where it `exists` [N]."""
        N, K, C = log_q.shape
        place = torch.arange(C, device=log_q.device) / max(1, C - 1)
        top = (torch.arange(C, device=log_q.device) == 0).to(log_q)
        features = torch.stack(
            [
                log_q,
                log_q.exp(),
                log_q - log_q[..., :1],
                *(x.expand_as(log_q) for x in (place, top)),
            ],
            -1,
        )
        x = self.token_proj(embedding) + self.pass_hidden_proj(states)[:, :, None]
        x = x + self.feature_mlp(features.to(x)) + self.slot_embedding + self.rank_embedding
        x, bias = x.flatten(1, 2), self._bias(C).repeat(N, 1, 1)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(1, (K, C))
        anchor = self.anchor_norm(self.context_proj(before) * exists[:, None].to(before))
        beside = anchor[:, None, None].expand_as(x)
        read = silu(self.factor_input_proj(torch.cat([x, beside, x * beside], -1)))
        ways = (self.out_head(read), self.in_head(read), self.anchor_out_head(anchor))
        out, into, start = (normalize(way, dim=-1, eps=SMALLEST) for way in ways)
        return out, into, start

    def _bias(self, count: int) -> Tensor:
        """The bias of each head [H, K · C, K · C]."""
        slot = torch.arange(self.slots, device=self.slot_embedding.device).repeat_interleave(count)
        distance = slot[:, None] - slot
        bias = self.relative_slot_bias[:, distance + self.slots]
        return bias + (distance == 0) * self.same_slot_bias[:, None, None]


class LiLiCorr(Block):
    Config = LiLiCorrConfig
    added = "lilicorr."  # a DFlash draft that it starts from has no correction

    def __init__(self, config: LiLiCorrConfig, sizes: BlockSizes) -> None:
        super().__init__(config, sizes)
        size = sizes.draft_vocab or sizes.target_vocab
        require(
            config.candidates <= size,
            f"drafter.candidates={config.candidates}: the draft vocabulary has {size} tokens",
        )
        self.lilicorr = Correction(config, self.llama.hidden_size, self.llama.rms_norm_eps)

    def initialise(self, target: TargetParts) -> None:
        super().initialise(target)
        self.lilicorr.initialise()

    def candidates(self, states_NKD: Tensor, before_ND: Tensor, exists_N: Tensor) -> Candidates:
        """The candidates of blocks whose slots have these states. `before_ND` are the fused hidden
        states before the anchors."""
        likeliest = []
        with torch.no_grad():
            for some in states_NKD.split(AT_ONCE):
                logits = self.head(some).float()
                top = logits.topk(self.config.candidates)
                log_q = top.values - logits.logsumexp(-1, keepdim=True)
                likeliest.append((top.indices, log_q))
            index_NKC, log_q_NKC = (torch.cat(x) for x in zip(*likeliest, strict=True))
            ids_NKC = index_NKC if self.vocab_S is None else self.vocab_S[index_NKC]
            embedding = self.target.embed(ids_NKC).to(states_NKD)
        vectors = self.lilicorr(embedding, log_q_NKC, states_NKD, before_ND, exists_N)
        return Candidates(index_NKC, ids_NKC, *vectors)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        """The block's states, then the candidates' corrected logits and indices, and whether the
        token before each depth is a candidate [B, A, K, D + 2C + 1]."""
        states = self.blocks(ctx, anchors_BA)
        read = entries(ctx.hidden_states(self.needs), (anchors_BA - 1).clamp_min(0))
        own = self.candidates(
            states.flatten(0, 1), self.fuse(read).flatten(0, 1), (anchors_BA > 0).flatten()
        )
        before_NK = tokens_from(ctx, anchors_BA, drafted_BAK, self.depth).flatten(0, 1)
        count = before_NK.shape[1]
        found_NKC = own.ids[:, : count - 1] == before_NK[:, 1:, None]
        known_NK = pad(found_NKC.any(-1), (1, 0), value=True)  # the anchor is always known
        at = found_NKC.int().argmax(-1)[..., None, None].expand(-1, -1, 1, own.out.shape[-1])
        out_NKD = torch.cat([own.start[:, None], own.out[:, : count - 1].gather(2, at)[:, :, 0]], 1)
        logits_NKC = self.config.scale * (own.into[:, :count] @ out_NKD[..., None])[..., 0].float()
        parts = (logits_NKC, own.places[:, :count].float(), known_NK[..., None].float())
        more = torch.cat(parts, -1).unflatten(0, anchors_BA.shape)
        return torch.cat([states[:, :, :count], more], -1)

    def training_hidden(self, ctx: Context, anchors_BA: Tensor, moment: TrainingMoment) -> Tensor:
        """Half of the anchors, drawn anew at each pass, keep the block's own q."""
        hidden = self.hidden(ctx, anchors_BA, None)
        if moment.seeds:
            generators = moment.generators(torch.device("cpu"))
            drawn = [torch.rand(anchors_BA.shape[1], generator=g) < 0.5 for g in generators]
            keep_BA = torch.stack(drawn).to(hidden.device)
            corrected = hidden[..., -1:] * keep_BA[..., None, None]
            hidden = torch.cat([hidden[..., :-1], corrected], -1)
        return hidden

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        D, C = self.llama.hidden_size, self.config.candidates
        states, logits_C, index_C, known = hidden.split([D, C, C, 1], -1)
        return self.corrected(self.head(states), logits_C, index_C.long(), known > 0.5)

    def corrected(self, block: Tensor, logits_C: Tensor, index_C: Tensor, known: Tensor) -> Tensor:
        """The logits [..., S] of which the candidates `index_C` have `logits_C` [..., C] where the
        token before is `known` [..., 1], and else the `block`'s own."""
        own_C = block.gather(-1, index_C)
        if not self.training:
            kept_C = torch.where(known, logits_C.to(block), own_C)
            return torch.full_like(block, -torch.inf).scatter(-1, index_C, kept_C)
        whole = own_C.float().logsumexp(-1, keepdim=True)
        kept_C = torch.where(known, logits_C.float().log_softmax(-1) + whole, own_C.float())
        return block.scatter(-1, index_C, kept_C.to(block))

    def growth(
        self, ctx: Context, logits_BKS: Tensor, states_BKD: Tensor, anchor_B: Tensor
    ) -> Growth:
        last_B = torch.tensor(ctx.counts(), device=anchor_B.device) - 2
        read = entries(ctx.hidden_states(self.needs), last_B.clamp_min(0)[:, None])[:, 0]
        own = self.candidates(states_BKD, self.fuse(read), last_B >= 0)

        def after(tokens_BT: Tensor, parents_BT: Tensor | None, depth: int) -> Tensor:
            if depth:
                found_BTC = own.ids[:, depth - 1, None] == tokens_BT[..., None]
                out_BTD = entries(own.out[:, depth - 1], found_BTC.int().argmax(-1))
                known_BT1 = found_BTC.any(-1, keepdim=True)
            else:
                out_BTD = own.start[:, None]
                known_BT1 = torch.ones_like(tokens_BT[..., None], dtype=torch.bool)
            logits_BTC = self.config.scale * (out_BTD @ own.into[:, depth].mT).float()
            block_BTS = logits_BKS[:, depth, None].expand(-1, tokens_BT.shape[1], -1)
            index_BTC = own.places[:, depth, None].expand_as(logits_BTC)
            return self.corrected(block_BTS, logits_BTC, index_BTC, known_BT1)

        return Growth(after(anchor_B[:, None], None, 0)[:, 0], grow_with_depth(after))

"""Falcon (Gao et al. 2024, arXiv 2412.12639; Bestpay-inc/Falcon): EAGLE's layer drafts a block of k
= 2 tokens in each pass.

Pair t is the token x_{t+1} with the target's final state h_t. At anchor a, the last k pairs are a
block: query t = a - k + j forecasts the state h_{t+k}, from which the target's head predicts depth
j. All queries of a block attend to all pairs up to a - 1. The tokens and states that a block drafts
are the pairs of the next block. An LSTM of two layers replaces EAGLE's fc.

This differs from the authors' code (models/cnets.py, train/glance.py) in these points:
- Their nn.LSTM lacks `batch_first`, so by mistake it runs over the rows of a batch. In the paper it
  runs over time. Here it reads, for each pair, the k pairs that end with it, from a zero state.
- So here keys do not depend on where blocks begin, and a cache can keep them. Their blocks begin
  with each speculation step's new pairs, and after a partial acceptance k - 1 keys are computed
  again. If the number of new pairs is odd, the last block is cut and depth 0 does not see the
  anchor; here a block always ends at the anchor.
- There is no dropout between the LSTM's layers (theirs: 0.1).

The nodes of the paper's tree are blocks, and its shape is the same in every speculation step. Here
nodes are tokens, so that trees of any shape can be drafted: every k-th token of a path takes one
pass, which drafts the next k depths.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from specdec.context import Context, TrainingMoment
from specdec.drafters.attention import (
    At,
    Keys,
    OverSequence,
    OverSlots,
    entries,
    text_after,
    unread,
)
from specdec.drafters.base import DrafterConfig
from specdec.drafters.eagle import Eagle
from specdec.drafters.layers import Attend
from specdec.drafters.recurrence import RecurrentSizes, pairs_of
from specdec.errors import require_within
from specdec.runtime.cache import SlotCache
from specdec.runtime.cpu.compiled_pass import SHORT, Compiled
from specdec.sampling.trees import Growth

BLOCK = 2  # k; the best in the paper, which also tries 3 and 4
CHUNK = 256  # states whose logits exist at a time while wrong forecasts are counted


@dataclass
class FalconConfig(DrafterConfig):
    """Blocks of two depths. Glancing shows some blocks of a document the true tokens: `glance`
    times as many as it has wrong forecasts at the start of training, none at the end."""

    name: str = "falcon"
    depth: int = 4
    unroll: int | None = None  # trained depths; null: all; the paper trains one block, which is 2
    glance: float = 0.4  # 0 to 1: blocks shown the truth at first, per wrong forecast
    # width of the uniform noise that training adds to the hidden states of a document of 512 tokens
    # (the paper: 0.2); 0: none
    noise: float = 0.0
    intermediate_size: int | None = None  # width of the MLP; null: the target's

    def __post_init__(self) -> None:
        require_within("drafter", self, unroll=(1, self.depth), glance=(0, 1), noise=0)


class PairLSTM(nn.LSTM):
    """The output [..., D] of two layers after each window of pairs [..., K, F]."""

    def __init__(self, width: int) -> None:
        super().__init__(2 * width, width, num_layers=2, batch_first=True)

    def after(self, windows: Tensor) -> Tensor:
        output = self(windows.flatten(0, -3))[0]
        last: Tensor = output[:, -1].unflatten(0, windows.shape[:-2])
        return last


class Falcon(Eagle):
    Config = FalconConfig
    fc: PairLSTM

    def __init__(self, config: FalconConfig, sizes: RecurrentSizes) -> None:
        super().__init__(config, sizes)
        self.fc = PairLSTM(self.llama.hidden_size)
        self.compiled = Compiled(self.forecast, SHORT)

    def anchors(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """Blocks tile a text, as in the paper, but from an offset drawn at every step. The
        probability of an offset is its share of all anchors, and its anchors weigh 1 / that
        probability."""
        weight_TK, usable = torch.zeros(valid_TK.shape), valid_TK[:, 0].nonzero()[:, 0]
        if len(usable):
            drawn = usable[torch.randint(len(usable), (1,), generator=generator)]
            tiles = usable[(usable - drawn) % BLOCK == 0]
            weight_TK[tiles] = valid_TK[tiles] * (len(usable) / len(tiles))
        return weight_TK

    def enter(self, embedding: Tensor, hidden_state: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention and the residual stream, from `feature`, the LSTM's output for the
        pairs up to each place, which includes their embeddings."""
        return hidden_state, hidden_state

    def step(self, embedding: Tensor, state: Tensor, attend: Attend) -> Tensor:
        """The states [B, …, K, D] of the requested blocks, from the `state` [B, T, D], which is the
        output of `fc` for the pairs up to each place; `embedding` is not read. Both training and
        drafting call it, each with its own attention."""
        blocks: Tensor = super().step(embedding, state, attend).unflatten(1, (-1, BLOCK))
        return blocks

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        if drafted_BAK is None:
            drafted_BAK = text_after(ctx.ids_BT, anchors_BA, self.depth - 1)
        depths, (position_BP, sight) = drafted_BAK.shape[-1] + 1, pairs_of(ctx)
        pair_BA = (anchors_BA - 1).clamp_min(0)
        every_BP = torch.arange(position_BP.shape[1], device=pair_BA.device).expand_as(position_BP)
        end, keys = every_BP.shape[1] + depths, Keys(sight(pair_BA), BLOCK)

        windows_BPK = up_to(every_BP, (every_BP - position_BP).clamp_min(0))
        at_BAK = entries(windows_BPK, pair_BA)
        at = At(at_BAK.flatten(1), self.rope(position_BP.gather(1, at_BAK.flatten(1)), end))
        rope = self.rope(position_BP, end)
        read_BPD = self.fc.after(self.pairs(ctx, windows_BPK))
        attend = OverSequence(keys, rope, lambda _: sight(every_BP), at=at)
        blocks = [self.step(read_BPD, read_BPD, attend)]
        pairs = self.pairs(ctx, at_BAK)
        for depth in range(BLOCK, depths, BLOCK):
            tokens = drafted_BAK[..., depth - BLOCK : depth]
            pairs, read_BND = self.following(pairs, tokens, blocks[-1])
            last_BA = position_BP.gather(1, pair_BA) + depth
            rope = self.rope(up_to(last_BA, torch.zeros_like(last_BA)).flatten(1), end)
            blocks.append(self.step(read_BND, read_BND, OverSequence(keys, rope)))
        return torch.cat(blocks, 2)[:, :, :depths]

    def pairs(self, ctx: Context, at: Tensor) -> Tensor:
        """The pairs [B, …, K, F] of a text at these places [B, …, K]."""
        ids, hidden_states = (
            ctx.ids_BT[:, 1:].gather(1, at.flatten(1)),
            ctx.hidden_states(self.needs),
        )
        read = self.embed(ids), self.fuse(entries(hidden_states, at.flatten(1)))
        return torch.cat(read, -1).view(*at.shape, -1)

    def following(self, before: Tensor, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs [B, …, K, F] of the next blocks, from the tokens [B, …, K] and states [B, …, K,
        D] that the blocks with the pairs `before` drafted; and the input of attention for these new
        pairs [B, N, D]."""
        block = torch.cat([self.embed(tokens), states], -1)
        windows = torch.cat([before[:, :, 1:], block], 2).unfold(2, BLOCK, 1).transpose(3, 4)
        return block, self.fc.after(windows).flatten(1, 2)

    def training_hidden(self, ctx: Context, anchors_BA: Tensor, moment: TrainingMoment) -> Tensor:
        """Coupled sequential glancing distillation (section 3.2). A first pass without a gradient
        counts the wrong forecasts in the blocks of a row. In the second pass, which is trained,
        `glance` · (1 - progress) times as many random blocks get the truth: their first pair is
        replaced by the pair k later, with the state that they should forecast there. The rest of a
        block thus learns to depend on its beginning."""
        noisy, T = self.noisy(ctx, moment), ctx.ids_BT.shape[1]
        drafted_BAK = text_after(ctx.ids_BT, anchors_BA, self.train_depth - 1)
        share, true_BTD = self.config.glance * (1 - moment.progress), ctx.hidden_states(self.needs)
        if share > 0:
            with torch.no_grad():
                guess = self.hidden(noisy, anchors_BA, drafted_BAK[..., : BLOCK - 1])
            torch.clear_autocast_cache()  # its casts lack gradients (pytorch/pytorch#165068)
            at_BAK = anchors_BA[..., None] + torch.arange(guess.shape[2], device=guess.device)
            true = entries(true_BTD, at_BAK.flatten(1).clamp_max(T - 1))
            wrong_BAK = (self.likeliest(guess) != self.likeliest(true)).view_as(at_BAK)
            able_BA = pairs_of(ctx)[0].gather(1, (anchors_BA - 1).clamp_min(0)) >= BLOCK - 1
            if moment.counted_BAK is not None:
                wrong_BAK &= moment.counted_BAK[..., : guess.shape[2]]
                able_BA &= moment.counted_BAK[..., 0]
            ids_BT, final_BTD = ctx.ids_BT.clone(), noisy.hidden_states(self.needs).clone()
            for b, generator in enumerate(moment.generators(torch.device("cpu"))):
                able = anchors_BA[b, able_BA[b]]
                order = torch.randperm(len(able), generator=generator).to(able.device)
                drawn = able[order[: int(share * int(wrong_BAK[b].sum()))]]
                ids_BT[b, drawn - BLOCK + 1] = ctx.ids_BT[b, drawn + 1]
                final_BTD[b, drawn - BLOCK] = true_BTD[b, drawn].to(final_BTD)
            noisy = replace(noisy, ids_BT=ids_BT, final_BTD=final_BTD)
        return self.hidden(noisy, anchors_BA, drafted_BAK)

    @torch.no_grad()
    def likeliest(self, states: Tensor) -> Tensor:
        """The most likely token [N] after each of N states [..., D], computed a few at a time."""
        few = states.flatten(0, -2).split(CHUNK)
        return torch.cat([self.unembed(x, 0).argmax(-1) for x in few])

    def forecast(
        self, cache: SlotCache, new: Tensor, at: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The states and logits [B, …, K, …] of blocks of queries `at` [B, N, D], which see the
        slots of `mask`, once the `new` pairs [B, T, D] are written. The first T entries of `cos`
        and `sin` are for the new pairs, the last N for the queries; if the new pairs are the
        queries, these are the same entries.
        """
        states = self.step(at, at, OverSlots(cache, (cos, sin), lambda _: mask, written=new))
        return states, self.unembed(states, 0)

    def draft_growth(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        """With a cache, which keeps the keys of the text's pairs, each block is one pass."""
        if cache is None:
            return super().draft_growth(ctx)
        counts, device = [n - 1 for n in ctx.counts()], ctx.ids_BT.device
        new = unread(cache, counts)
        known_B1, count_B1, row_B1 = (
            torch.tensor(x, device=device)[:, None]
            for x in (cache.lengths, counts, range(len(new)))
        )
        fresh_BT = (known_B1 + torch.arange(max(new), device=device)).minimum(count_B1 - 1)
        places = torch.cat([fresh_BT, up_to(count_B1 - 1, 0 * count_B1)[:, 0]], 1)
        windows = self.pairs(ctx, up_to(places, torch.zeros_like(places)))
        cache.place(fresh_BT)

        def passed(read: Tensor, num_read: int, position: Tensor, sees: Tensor) -> list[Tensor]:
            """Blocks after `num_read` new pairs: states and logits [B, …, K, …]."""
            (cos, sin), num_new = self.rope(position, cache.shown + 1), sees.shape[1]
            parts = {
                "new": read[:, :num_read],
                "at": read[:, -num_new:],
                "cos": cos,
                "sin": sin,
                "mask": sees,
            }
            return list(self.compiled(cache, **parts))

        seen_B1P = torch.arange(cache.shown, device=device) < count_B1[..., None]
        seen_BKP = seen_B1P.expand(-1, BLOCK, -1)
        blocks = [windows[:, -1:], *passed(self.fc.after(windows), max(new), places, seen_BKP)]
        cache.commit(new)
        depths, block_BM = [0], torch.zeros_like(count_B1)  # depth of each node, the anchor first
        tokens_BMK = block_BM[..., None].repeat(1, 1, BLOCK)  # the last k tokens on the path to it

        def grow(tokens_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
            nonlocal blocks, block_BM, tokens_BMK
            last_BT, num_read = torch.full_like(tokens_BT, len(depths) - 1), tokens_BT.shape[1]
            above = row_B1, last_BT if parents_BT is None else parents_BT + 1
            block_BT, depth = block_BM[above], depths[int(above[1][0, 0])] + 1
            tokens_BTK = torch.cat([tokens_BMK[above][..., 1:], tokens_BT[..., None]], -1)
            if depth % BLOCK == 0:  # these nodes end a block, and each begins another
                before, states, _ = (x[row_B1, block_BT] for x in blocks)
                pairs, read = self.following(before, tokens_BTK, states)
                end_BT = BLOCK * block_BT - 1  # block m fills the k slots before m · k
                block_BT = (blocks[0].shape[1] + torch.arange(num_read, device=device)).expand_as(
                    block_BT
                )
                slots_BTK = up_to(BLOCK * block_BT - 2, torch.full_like(block_BT, -1))
                slots_BTK[..., 0] = end_BT
                place = cache.place(tokens_BTK.flatten(1), slots_BTK.flatten(1))
                sees = place.seen(cache.shown)[:, BLOCK - 1 :: BLOCK]
                sees = sees.repeat_interleave(BLOCK, 1)
                more = [pairs, *passed(read, num_read * BLOCK, place.position_BT, sees)]
                blocks = [torch.cat(x, 1) for x in zip(blocks, more, strict=True)]
            depths.extend([depth] * num_read)
            block_BM = torch.cat([block_BM, block_BT], 1)
            tokens_BMK = torch.cat([tokens_BMK, tokens_BTK], 1)
            return blocks[2][row_B1, block_BT, depth % BLOCK]

        return Growth(blocks[2][:, 0, 0], grow)


def up_to(last: Tensor, first: Tensor) -> Tensor:
    """The k places [..., k] that end at each of `last`; `first` replaces places before it."""
    back = torch.arange(1 - BLOCK, 1, device=last.device)
    return torch.maximum(last[..., None] + back, first[..., None])

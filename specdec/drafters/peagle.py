"""P-EAGLE (arXiv 2602.01469): EAGLE-3 that drafts all depths in one pass.

Depth 0 reads the pair (x_a, hidden state of a - 1), as in EAGLE-3. Every depth k > 0 reads the same
masked pair, but at the rotary position a - 1 + k: the embedding of a mask token, and a learned
`mask_hidden`, which goes through norms and fc in place of the target's hidden states. A masked pair
attends to the real pairs up to a - 1 and the masked pairs of its own anchor up to k, but to no
drafted token. Alignment, mask and sampling are those of vllm-project/speculators (models/peagle);
the masked pair is that of vLLM 0.32 (llama_eagle3.py and llm_base_proposer.py). The paper also
trains the embedding; here it is the target's, so that no engine needs a second one.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specdec.context import Context, TrainingMoment
from specdec.drafters.attention import entries, pieces, reading
from specdec.drafters.base import Limits, reading_no_draft
from specdec.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Sizes
from specdec.errors import require, require_within
from specdec.runtime.cache import SlotCache
from specdec.sampling.trees import Growth


@dataclass
class PEagleConfig(Eagle3Config):
    """Parallel EAGLE: all depths in one forward pass. COD sampling trains fewer depths, which saves
    time and memory: in a row with n anchors, depth k is trained at (n - k) · max(keep^k,
    keep_least) of them, drawn at every step from the anchors of depth k - 1. The reference uses 0.7
    and 0.2."""

    initialisations: ClassVar[tuple[str, ...]] = ("target", "random")
    name: str = "peagle"
    # target: copy the target's last num_layers layers and LM head; random: draw the weights at
    # random
    initialisation: str = "target"
    # token id whose embedding stands for tokens not yet known; null: the last id of the vocabulary
    mask_token: int | None = None
    keep: float = 1.0  # fraction of a depth's anchors kept for the next depth; 1: all
    keep_least: float = 0.2  # least fraction of anchors kept at any depth

    def __post_init__(self) -> None:
        super().__post_init__()
        require_within("drafter", self, keep=(0, 1), keep_least=(0, 1))
        require(not self.norm_output, "drafter.norm_output: peagle has no use for it: give false")


class PEagle(Eagle3):
    Config = PEagleConfig

    def __init__(self, config: PEagleConfig, sizes: Eagle3Sizes) -> None:
        super().__init__(config, sizes)
        require_within("drafter", config, mask_token=(0, sizes.target_vocab - 1))
        self.limits = Limits(depth=config.depth, slots=config.depth, parallel=True)
        mask_token = config.mask_token
        self.mask_token = sizes.target_vocab - 1 if mask_token is None else mask_token
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    def anchors(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """COD sampling: each depth is kept at a fraction of the anchors of the depth before it. Its
        weight is divided by the product of these fractions, so that the expected loss is that of
        all depths."""
        weight_TK = super().anchors(valid_TK, generator)
        n = int((weight_TK[:, 0] > 0).sum())
        for k in range(1, valid_TK.shape[1]):
            weight_TK[:, k] = weight_TK[:, k - 1] * valid_TK[:, k]
            able = weight_TK[:, k].nonzero()[:, 0]
            share = max(self.config.keep**k, self.config.keep_least)
            count = n if share == 1 else max(1, int((n - k) * share))
            if count < len(able):
                drawn = able[torch.randperm(len(able), generator=generator)]
                weight_TK[drawn[:count], k] *= len(able) / count
                weight_TK[drawn[count:], k] = 0
        return weight_TK

    def state_for_next_depth(self, hidden: Tensor) -> Tensor:
        return self.fuse(self.mask_hidden).expand_as(hidden)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        k = self.depth - 1 if drafted_BAK is None else drafted_BAK.shape[-1]
        return super().hidden(ctx, anchors_BA, self.masks(anchors_BA, k))

    def masks(self, anchors_BA: Tensor, k: int) -> Tensor:
        return torch.full_like(anchors_BA, self.mask_token)[..., None].expand(-1, -1, k)

    def training_hidden(self, ctx: Context, anchors_BA: Tensor, moment: TrainingMoment) -> Tensor:
        """Only the depths that count are computed; the others are 0."""
        if (counted_BAK := moment.counted_BAK) is None:
            return self.hidden(ctx, anchors_BA, None)
        A, K = counted_BAK.shape[1:]
        order_BA = counted_BAK.sum(-1).argsort(dim=1, descending=True, stable=True)
        widths = counted_BAK.sum(1).amax(0).clamp_min(1).tolist()  # the most in any row, by depth
        anchors_BA = anchors_BA.gather(1, order_BA)
        steps = self.unrolled(ctx, anchors_BA, self.masks(anchors_BA, K - 1), widths)
        hidden_BAKD = torch.stack([pad(x, (0, 0, 0, A - x.shape[1])) for x in steps], 2)
        return entries(hidden_BAKD.flatten(2), order_BA.argsort(1)).view_as(hidden_BAKD)

    def draft_growth(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        """The growth of all depths from one forward pass. A cache keeps the real pairs; masked ones
        are scratch."""
        if cache is None:
            anchor_B1 = torch.tensor(ctx.counts(), device=ctx.ids_BT.device)[:, None] - 1
            logits_BKS = self.unembed(self.hidden(ctx, anchor_B1, None)[:, 0], 0)
        else:
            masked, read = self.depth - 1, (ctx.hidden_states(self.needs), ctx.ids_BT[:, 1:])
            for new in reading(cache, [n - 1 for n in ctx.counts()], 1 + len(self.upper)):
                hidden_states, tokens = (pieces(x, cache.lengths, max(new) + masked) for x in read)
                place_T = torch.arange(tokens.shape[1], device=tokens.device)
                unknown_BT = place_T >= torch.tensor(new, device=tokens.device)[:, None]
                hidden_states = hidden_states.to(self.mask_hidden.dtype)
                hidden_states = torch.where(unknown_BT[..., None], self.mask_hidden, hidden_states)
                tokens = tokens.masked_fill(unknown_BT, self.mask_token)
                _, logits_BKS = self._cached(cache, hidden_states, None, tokens, None, new, masked)
                cache.commit(new)
        return reading_no_draft(lambda k: logits_BKS[:, k])

"""The drafter interface: one class a family, used by training and by decoding alike.

Letters: B batch, A anchors, k depth, K depths in all, D width, S draft vocabulary.

The alignment rule: a drafter reads tokens up to and including the anchor a, and the target's
features strictly before it. Depth k predicts token a + 1 + k, whose target distribution is
`target_logits[a + k]`.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from specdec.context import Context, Needs, Pick, Proposal
from specdec.errors import require

if TYPE_CHECKING:
    from specdec.target import Target


class Drafter(nn.Module):
    """Proposes tokens. A family gives `plan`, `hidden` and `unembed`; the rest follows.

    A drafter is made of its config (what the user chose) and its shape (a JSON-able dict of
    what the target then determined), so that a checkpoint can be read without the target.
    Frozen parts that belong to the target (its embedding) are attached, never saved.
    """

    Config: ClassVar[type]  # the dataclass that configures the family
    trainable: ClassVar[bool] = True
    needs: Needs = Needs()
    depth: int  # depths that are trained and measured, and the γ drafted by default
    max_depth: int | None = None  # parallel heads cannot draft more than they have
    vocab_S: Tensor | None  # target ids of the draft vocabulary, ascending; None = all

    def __init__(self, config: Any, shape: dict[str, Any]) -> None:
        super().__init__()
        require(config.depth >= 1, f"drafter.depth={config.depth}: give 1 or more")
        self.config = config
        self.shape = shape
        self.depth = config.depth
        self.register_buffer("vocab_S", None)
        if size := shape.get("draft_vocab"):
            self.vocab_S = torch.arange(size)

    @classmethod
    def plan(cls, config: Any, target: "Target") -> dict[str, Any]:
        """The shape of a drafter with this config for this target.

        "target_vocab" is always there; "draft_vocab" where the draft vocabulary is pruned.
        """
        raise NotImplementedError

    @classmethod
    def build(cls, config: Any, target: "Target", vocab_S: Tensor | None = None) -> Self:
        """A fresh drafter for a target, its weights started as the config says.

        `vocab_S` are the target ids of the pruned draft vocabulary, which a config with
        `draft_vocab` needs (see `specdec.drafters.frequent_tokens`).
        """
        drafter = cls(config, cls.plan(config, target))
        if drafter.vocab_S is not None and vocab_S is not None:
            drafter.vocab_S = vocab_S
        drafter.to(target.device)
        drafter.attach(target)
        with torch.no_grad():
            drafter.start(target)
        return drafter

    def start(self, target: "Target") -> None:
        """Set the weights that training starts from."""

    def attach(self, target: "Target") -> None:
        """Take hold of the frozen parts of the target that the drafter reads."""

    @property
    def target_vocab(self) -> int:
        return self.shape["target_vocab"]

    @property
    def train_depth(self) -> int:
        """Depths that the loss is taken over; fewer than `depth` where depths are alike."""
        return self.depth

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        """Hidden states [B, A, K, D] of every depth at every anchor.

        `drafted_BAk` are the k = K - 1 tokens drafted so far after each anchor; None stands for
        the text's own next tokens at the trained depth (teacher forcing), K = `depth`.
        """
        raise NotImplementedError

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """Draft logits [..., S] of depth k from hidden states [..., D]."""
        raise NotImplementedError

    def unembed_parameters(self) -> list[nn.Parameter]:
        """The trained parameters that `unembed` reads."""
        return []

    def new_cache(self) -> Any:
        """What `draft` may keep between the rounds of one generation; None: nothing."""
        return None

    @torch.no_grad()
    def draft(self, ctx: Context, gamma: int, pick: Pick, cache: Any = None) -> Proposal:
        """Draft up to `gamma` tokens after the last token of `ctx`, the anchor.

        `ctx` is always the whole context; a cache only saves work, and never changes what is
        drafted. This default recomputes everything: it is what cached versions must equal.
        """
        B, T = ctx.ids_BT.shape
        anchor_BA = torch.full((B, 1), T - 1, device=ctx.ids_BT.device)
        tokens: list[Tensor] = []
        qs: list[Tensor | None] = []
        for k in range(gamma if self.max_depth is None else min(gamma, self.max_depth)):
            drafted = torch.stack(tokens, -1)[:, None] if tokens else anchor_BA[..., None][..., :0]
            hidden_BD = self.hidden(ctx, anchor_BA, drafted)[:, 0, k]
            logits_BS = self.unembed(hidden_BD, k)
            if logits_BS.isneginf().all():  # nothing to propose
                break
            token_B, q_BS = pick(logits_BS)
            tokens.append(self.target_ids(token_B))
            qs.append(q_BS)
        return self.proposal(ctx, tokens, qs)

    def target_ids(self, token: Tensor) -> Tensor:
        """Target ids of ids in the draft vocabulary."""
        return token if self.vocab_S is None else self.vocab_S[token]

    def proposal(self, ctx: Context, tokens: list[Tensor], qs: list[Tensor | None]) -> Proposal:
        """Bring picked tokens (target ids) and their q (draft vocabulary) into a `Proposal`."""
        if not tokens:
            return Proposal(ctx.ids_BT[:, :0])
        tokens_BN = torch.stack(tokens, 1)
        drawn = [q for q in qs if q is not None]
        if not drawn:
            return Proposal(tokens_BN)
        q_BNS = torch.stack(drawn, 1)
        if self.vocab_S is None:
            return Proposal(tokens_BN, q_BNS)
        q_BNV = q_BNS.new_zeros(*q_BNS.shape[:2], self.target_vocab)
        q_BNV[..., self.vocab_S] = q_BNS
        return Proposal(tokens_BN, q_BNV)


def text_after(ids_BT: Tensor, anchors_BA: Tensor, count: int) -> Tensor:
    """The text's own tokens [B, A, count] after each anchor (clamped at the text's end)."""
    steps = torch.arange(1, count + 1, device=ids_BT.device)
    index = (anchors_BA[..., None] + steps).clamp_max(ids_BT.shape[1] - 1)
    return ids_BT.gather(1, index.flatten(1)).view(index.shape)

"""A drafter family of one's own: its class is enough to train, measure and decode with it.

python examples/family.py [SETTING=VALUE ...]
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import train
from specdec.context import Context
from specdec.drafters import DRAFTERS
from specdec.drafters.base import Drafter, Sizes
from specdec.drafters.nn.gather import text_after
from specdec.errors import command
from train.config import composed, register


@dataclass
class LastTokenConfig:
    """`rank`: the width between the token that is read and the one that is drafted."""

    name: str = "last_token"
    depth: int = 2
    rank: int = 16


class LastToken(Drafter):
    """A bigram of low rank, W e(x): each token drafts the one after it."""

    Config = LastTokenConfig

    def __init__(self, config: LastTokenConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.embedding = nn.Embedding(sizes.target_vocab, config.rank)
        self.head = nn.Linear(config.rank, sizes.target_vocab, bias=False)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        if drafted_BAk is None:
            drafted_BAk = text_after(ctx.ids_BT, anchors_BA, self.depth - 1)
        anchor_BA1 = ctx.ids_BT.gather(1, anchors_BA)[..., None]
        return self.embedding(torch.cat([anchor_BA1, drafted_BAk], -1))

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self.head(hidden)


def main(settings: Sequence[str]) -> None:
    DRAFTERS[LastTokenConfig.name] = LastToken
    register()
    own = ["drafter=last_token", "name=last-token", "budget.minutes=5", "export=null"]
    tau = train.run(composed(["experiment=quickstart", *own, *settings]))
    print(f"a draft of {tau:.2f} tokens per pass of the target, in runs/last-token")


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]))

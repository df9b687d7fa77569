"""A drafter family of one's own: its class is enough to train, measure and decode with it.

python examples/family.py [SETTING=VALUE ...]
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

import train
from specdec.context import Context
from specdec.drafters import DRAFTERS
from specdec.drafters.attention import tokens_from
from specdec.drafters.base import Sizes, Trainable
from specdec.errors import command
from train.run_config import composed, register


@dataclass
class LastTokenConfig:
    """`rank`: the width between the token that is read and the one that is drafted."""

    name: str = "last_token"
    depth: int = 2
    rank: int = 16


class LastToken(Trainable):
    """A bigram of low rank, W e(x): each token drafts the one after it."""

    Config = LastTokenConfig

    def __init__(self, config: LastTokenConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.embedding = nn.Embedding(sizes.target_vocab, config.rank)
        self.head = nn.Linear(config.rank, sizes.target_vocab, bias=False)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        return self.embedding(tokens_from(ctx, anchors_BA, drafted_BAK, self.depth))

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

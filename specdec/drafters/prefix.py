"""One decoder layer over the target's states, for heads that read more than the last of them."""

from typing import Any

from torch import Tensor, nn

from specdec.drafters.layer import Layer
from specdec.drafters.norm import RMSNorm
from specdec.drafters.recurrence import Recurrent, RecurrentConfig, RecurrentSizes


class Prefix(Recurrent):
    """This layer is a recurrent draft that reads features alone, is used at depth 0 only, and
    has a norm in place of an LM head."""

    def __init__(self, llama: dict[str, Any], vocab: int) -> None:
        config = RecurrentConfig("prefix", depth=1, start="random")
        super().__init__(config, RecurrentSizes(target_vocab=vocab, llama=llama))
        D = self.llama.hidden_size
        self.layers = nn.ModuleList([Layer(self.llama, D, ("input_layernorm",))])
        self.norm = RMSNorm(D, self.llama.rms_norm_eps)

    def embed(self, ids: Tensor) -> Tensor:
        return ids  # which `enter` does not read

    def enter(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.entered(feature)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        normed: Tensor = self.norm(hidden)
        return normed

"""DFlash (arXiv 2602.06036; z-lab/dflash:dflash/model.py): a bidirectional block.

Slot j of a block predicts the token at its own position, so slot 0, the anchor's, predicts nothing,
and depth k is slot k + 1. The paper trains on the text's tokens, with cross-entropy that decays by
e^{-1/γ} from depth to depth, at 512 sampled anchors per text; a block's supervision stops at its
first token that does not count (`experiment=dflash_paper`).
"""

from dataclasses import dataclass

from specdec.drafters.block import Block, BlockConfig


@dataclass
class DFlashConfig(BlockConfig):
    """A block of mask tokens with bidirectional attention."""

    name: str = "dflash"


class DFlash(Block):
    Config = DFlashConfig
    parallel = True

"""JetSpec (arXiv 2606.18394; hao-ai-lab/JetSpec:jetspec/models/draft_head.py): a causal block.

As in a bidirectional block, slot j predicts the token at its own position, but a slot attends only
to itself and the slots before it. A draft therefore does not depend on the number of later slots.
One pass gives the marginals of all depths, from which a tree of the most likely paths is drafted
(`decode.tree=best_first`). The paper trains with KL, all depths alike (`experiment=jetspec_paper`).
"""

from dataclasses import dataclass

from specdec.drafters.block import Block, BlockConfig


@dataclass
class JetSpecConfig(BlockConfig):
    """A block with causal attention."""

    name: str = "jetspec"


class JetSpec(Block):
    Config = JetSpecConfig
    parallel = True
    causal = True

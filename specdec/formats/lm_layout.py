"""A draft LM as a plain Hugging Face checkpoint.

An engine drafts only with a model that has as many rows as the target. A draft with fewer rows was
padded with rows of zeros (`specdec.drafters.pretrained`). The engine, which drafts greedily, gives
their tokens the logit 0.
"""

import torch
from torch import Tensor

from specdec.drafters.lm import LM
from specdec.formats.layout import Description, ExportLayout, Tensors, special_tokens
from specdec.targets.parts import TargetParts


def config(drafter: LM, target: TargetParts) -> Description:
    head, embedding = drafter.model.get_output_embeddings(), drafter.model.get_input_embeddings()
    return {
        **drafter.model.config.to_dict(),
        "tie_word_embeddings": head.weight is embedding.weight,
        "architectures": [type(drafter.model).__name__],
        **special_tokens(target),
    }


def to_engine(drafter: LM, tensors: Tensors) -> Tensors:
    return {name: x for name, x in tensors.items() if name != "vocab_S"}


def from_engine(drafter: LM, tensors: Tensors) -> Tensors:
    if (rows := drafter.sizes.draft_vocab) is None:
        return tensors
    return tensors | {"vocab_S": torch.arange(rows)}


def objection(drafter: LM, logits_NS: Tensor) -> str | None:
    """The reason why an engine might draft one of the added rows: their logit must be 0, and never
    the best."""
    if (rows := drafter.sizes.draft_vocab) is None:
        return None
    if bool(drafter.model.get_output_embeddings().weight[rows:].any()):
        return (
            f"the rows added to the draft's {rows} were trained as inputs, but are rows of its "
            "head as well: train with drafter.train_embeddings=false"
        )
    best = float(logits_NS.amax(-1).min())
    if best > 0:
        return None
    return (
        f"the draft's best logit at one place is {best:.2g}, but an engine gives a logit of 0 to "
        f"the rows added to the draft's {rows}: train it further, or give a drafter.source with as "
        "many rows as the target"
    )


LAYOUTS = {
    "hf": ExportLayout(
        config,
        to_engine,
        from_engine,
        objection=objection,
        prefixes={"model.": ""},
        whole_model=True,
    )
}

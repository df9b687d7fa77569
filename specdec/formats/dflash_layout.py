"""Blocks drafted in one pass, as vLLM and SGLang load them with the method `dflash`.

Read from vLLM 0.32 (qwen3_dflash.py, v1/spec_decode/dflash.py): the target may be any model that
gives the states of its layers. The target's embedding and LM head are shared, unless the file has
an `lm_head.weight`: for a pruned draft vocabulary, that tensor holds the rows of the target's head
for the tokens kept. Both are scaled by `logit_scale`. A window is written as `layer_types`, and as
`use_swa` and `swa_window_size` of `dflash_config`, as in MiMo's drafts; `causal` holds for the
slots of a block in any case (`_resolve_layer_attention`). In vLLM a block is the anchor and as many
mask tokens as are drafted, so a bidirectional block drafts as it does here only with
num_speculative_tokens = `depth`.
"""

import torch

from specdec.drafters.block import Block
from specdec.errors import require
from specdec.formats import eagle3_layout
from specdec.formats.layout import (
    Description,
    ExportLayout,
    Tensors,
    layers_of,
    refuse_biased_head,
    refuse_sinks,
    shared_head,
    special_tokens,
    window_of,
)
from specdec.targets.parts import TargetParts

HEAD = "lm_head.weight"


def config(drafter: Block, target: TargetParts) -> Description:
    """`architectures: [DFlashDraftModel]`, a Qwen3. Its layer ids are one less than ours."""
    window = drafter.config.window
    return {
        **layers_of(drafter.llama),
        **window_of(drafter, drafter.config.num_layers),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": drafter.config.num_layers,
        "num_target_layers": target.config.num_hidden_layers,
        "block_size": drafter.slots,
        "draft_vocab_size": drafter.sizes.draft_vocab or target.vocab_size,
        "dflash_config": {
            "mask_token_id": drafter.sizes.mask_token,
            "target_layer_ids": [k - 1 for k in drafter.needs.layers],
            "causal": drafter.causal,
            **({} if window is None else {"use_swa": True, "swa_window_size": window}),
        },
        **shared_head(target),
        "tie_word_embeddings": False,
        **special_tokens(target),
    }


def to_engine(drafter: Block, tensors: Tensors) -> Tensors:
    if drafter.vocab_S is not None:
        tensors[HEAD] = drafter.target.head.weight[drafter.vocab_S]
    return eagle3_layout.to_engine(drafter, tensors)


def from_engine(drafter: Block, tensors: Tensors) -> Tensors:
    """Raises UserError for a head that is not the target's."""
    if drafter.vocab_S is not None:
        rows_SD = tensors.pop(HEAD, None)
        kept_SD = drafter.target.head.weight[drafter.vocab_S]
        fits = rows_SD is not None and torch.equal(rows_SD, kept_SD.cpu())
        require(fits, f"tensor {HEAD!r} is not the target's head for the draft vocabulary")
    return eagle3_layout.from_engine(drafter, tensors)


def refuse(drafter: Block, target: TargetParts) -> None:
    refuse_biased_head(drafter, target)
    refuse_sinks(drafter, target)


LAYOUTS = {"hf": ExportLayout(config, to_engine, from_engine, refuse)}

"""Blocks drafted in one pass, in the format that vLLM and SGLang load with the method `dflash`.

By vLLM 0.32 (qwen3_dflash.py, v1/spec_decode/dflash.py), the target may be any model that provides
the states of its layers. The target's embedding and LM head are shared, unless the file has an
`lm_head.weight`: for a pruned draft vocabulary, that tensor holds the rows of the target's head for
the tokens kept. Both are scaled by `logit_scale`. A window is written as `layer_types`, and as
`use_swa` and `swa_window_size` of `dflash_config`, as in MiMo's drafts; `causal` holds for the
slots of a block in any case (`_resolve_layer_attention`). Where it is false, vLLM's attention has a
symmetric window (flash_attn.py; its CPU kernel computes the same), so the slots of a block see each
other as here. In vLLM a block is the anchor and as many mask tokens as are drafted, so a
bidirectional block drafts as here only with num_speculative_tokens = `depth`.

Imports, by the trainers' code and published configs; all share the target's embedding and head:

| written by | architecture | what it has beyond DFlash |
| --- | --- | --- |
| z-lab, SpecForge, Model-Optimizer | DFlashDraftModel | with `causal`, a JetSpec block |
| z-lab, SpecForge, Model-Optimizer | DFlash2DraftModel | convolutions, a selector of candidates |
| DeepSpec | Qwen3DSparkModel | a Markov head and confidence; embedding and head are repeated |
| SpecForge | DSparkDraftModel | the same, with its keys in `dflash_config` |
| speculators | `speculators_model_type` | its layer ids are ours, and it repeats the embedding |

`target_layer_ids` are one less than ours. DSpark's anchor slot predicts too, so that its block has
as many slots as it drafts.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.drafters.block import Block
from specdec.errors import require
from specdec.formats import eagle3_layout
from specdec.formats.foreign_config import ForeignConfig, layers_of_foreign
from specdec.formats.import_layout import (
    EMBEDDING,
    ImportLayout,
    Shapes,
    architecture,
    draft_vocabulary,
    embedding_copy,
    head_copy,
    kind_of_speculators,
    renamed_prefixes,
    require_same_head,
    unrenamed,
)
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
    """Raises UserError if the head is not the target's."""
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

MOST_SLOTS, MOST_LAYERS = 129, 64
# keys of speculators' DFlash that matter only with projector_type=domino, or in training
OF_DOMINO = (
    *("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start"),
    *("lambda_base_decay_ratio", "auf"),
)
COPIES = {EMBEDDING: embedding_copy, HEAD: head_copy}
OF_DSPARK = (  # theirs, then ours: these names are those of no engine's layout of ours
    ("markov_head.markov_w1.", "markov_w1."),
    ("markov_head.markov_w2.", "markov_w2."),
    ("confidence_head.proj.", "confidence_head."),
)


@dataclass(frozen=True)
class BlockNetwork:
    """How a method differs from DFlash in its files: the architectures that name it, the slot that
    predicts first, and its own settings, read from `dflash_config` or the config itself."""

    name: str
    architectures: tuple[str, ...]
    first: int = 1
    own: Callable[["BlockKeys"], dict[str, Any]] = lambda keys: {}
    renames: Callable[[Iterable[str]], dict[str, str]] = unrenamed
    over_vocab: tuple[str, ...] = (HEAD,)
    causal: bool = False

    def named_by(self, config: ForeignConfig) -> bool:
        inner = config.keys.get("dflash_config")
        inner = inner if isinstance(inner, dict) else {}
        projector = inner.get("projector_type")
        if architecture(config) not in self.architectures or kind_of_speculators(config):
            return False
        if "DFlashDraftModel" in self.architectures:
            return projector in (None, self.name, "dflash") and self.causal == (
                inner.get("causal") is True
            )
        return projector in (None, self.name)


@dataclass
class BlockKeys:
    """A key of a block drafter, wherever its writer puts it: in `dflash_config`, or beside it."""

    config: ForeignConfig
    inner: ForeignConfig = field(init=False)

    def __post_init__(self) -> None:
        self.inner = self.config.part("dflash_config")

    def place(self, key: str) -> ForeignConfig:
        """The object that has the key; both are read."""
        inside = self.inner.get(key)
        beside = self.config.get(key)
        if None not in (inside, beside) and inside != beside:
            raise self.config.wrong(key, f"{inside}, as dflash_config says")
        return self.inner if inside is not None else self.config

    def count(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        return self.place(key).count(key, default, most)

    def only(self, key: str, *allowed: Any) -> None:
        self.place(key).only(key, *allowed)


def block_settings(
    network: BlockNetwork, layers: ForeignConfig, keys: BlockKeys, shapes: Shapes
) -> dict[str, Any]:
    """The settings of a block drafter. Raises UserError for a network that is not ours."""
    config, causal = keys.config, network.causal
    vocab = layers.count("vocab_size")
    keys.only("projector_type", network.name, "dflash")
    for key in ("is_causal", "causal"):
        keys.only(key, causal)
    for key in ("use_swa", "attention_sink_bias", "sliding_window_non_causal"):
        keys.only(key, False)
    for key in ("sample_from_anchor", "shift_label"):  # whether the anchor's slot predicts
        keys.only(key, network.first == 0)
    keys.only("swa_window_size")
    for key, value in (("output_multiplier", 1.0), ("input_embedding_scale", 1.0)):
        keys.only(key, value)
    for key in ("logit_scale", "final_logit_softcapping"):
        config.get(key)  # compared with the target's
    keys.inner.only("final_logit_softcapping", 0.0)
    config.count("target_hidden_size", layers.count("hidden_size"))
    below, read = keys.place("target_layer_ids"), None
    if (ids := below.counts("target_layer_ids", 0)) is not None:
        read = [k + 1 for k in ids]
    read = config.counts("aux_hidden_state_layer_ids", 1) or read
    if read is None:
        raise config.wrong("target_layer_ids", "the layers that the draft reads")
    mask = keys.place("mask_token_id").token("mask_token_id")
    if mask is None or mask >= vocab:
        raise config.wrong("mask_token_id", f"the id of a token below {vocab}")
    slots = keys.count("block_size", most=MOST_SLOTS)
    if slots <= network.first:
        raise config.wrong("block_size", f"more than {network.first}")
    return {
        "depth": slots - network.first,
        "num_layers": layers.count("num_hidden_layers", most=MOST_LAYERS),
        "layers": read,
        "mask_token": mask,
        "intermediate_size": layers.count("intermediate_size"),
        "layer_config": layers_of_foreign(layers),
        "draft_vocab": draft_vocabulary(config, shapes, vocab),
        "initialisation": "random",
        **network.own(keys),
    }


def of_dflash2(keys: BlockKeys) -> dict[str, Any]:
    return {
        "taps": keys.count("conv_kernel_size", most=64),
        "group": keys.count("conv_group_size"),
        "rank": keys.count("selector_rank"),
        "candidates": keys.count("selector_top_k"),
    }


def of_dspark(keys: BlockKeys) -> dict[str, Any]:
    keys.only("markov_head_type", "vanilla")
    for key in ("enable_confidence_head", "use_confidence_head", "confidence_head_with_markov"):
        keys.only(key, True)
    keys.only("use_aux_hidden_state", True)
    keys.place("confidence_head_alpha")  # of training
    return {"rank": keys.count("markov_rank")}


NETWORKS = {
    "dflash": BlockNetwork("dflash", ("DFlashDraftModel",)),
    "jetspec": BlockNetwork("jetspec", ("DFlashDraftModel",), causal=True),
    "dflash2": BlockNetwork(
        "dflash2",
        ("DFlash2DraftModel",),
        own=of_dflash2,
        over_vocab=(HEAD, "candidate_selector.successor_codebook"),
    ),
    "dspark": BlockNetwork(
        "dspark",
        ("Qwen3DSparkModel", "DSparkDraftModel"),
        first=0,
        own=of_dspark,
        renames=renamed_prefixes(*OF_DSPARK),
        over_vocab=(HEAD, "markov_w2.weight"),
    ),
}


def flat_layout(network: BlockNetwork, written_by: str) -> ImportLayout:
    """The layout with one flat config, for vLLM and SGLang."""

    def settings(config: ForeignConfig, shapes: Shapes) -> dict[str, Any]:
        return block_settings(network, config, BlockKeys(config), shapes)

    def recognises(config: ForeignConfig, names: Collection[str]) -> bool:
        return network.named_by(config)

    return _import_layout(network, written_by, recognises, settings)


def layout_of_speculators(network: BlockNetwork) -> ImportLayout:
    """speculators' layout, which describes the layers apart."""

    def settings(config: ForeignConfig, shapes: Shapes) -> dict[str, Any]:
        config.get("speculators_model_type")
        layers = config.layers_part()
        for key in OF_DOMINO:
            config.get(key)
        return block_settings(network, layers, BlockKeys(config), shapes)

    def recognises(config: ForeignConfig, names: Collection[str]) -> bool:
        return kind_of_speculators(config) == network.name

    return _import_layout(network, "speculators", recognises, settings)


def _import_layout(
    network: BlockNetwork,
    written_by: str,
    recognises: Callable[[ForeignConfig, Collection[str]], bool],
    settings: Callable[[ForeignConfig, Shapes], dict[str, Any]],
) -> ImportLayout:
    return ImportLayout(
        written_by,
        recognises,
        settings,
        network.renames,
        over_vocab=network.over_vocab,
        copies=COPIES,
        fits=require_same_head,
        depths=True,
    )


WRITERS: Mapping[str, str] = {
    "dflash": "z-lab, SpecForge, Model-Optimizer",
    "jetspec": "JetSpec",
    "dflash2": "z-lab, SpecForge, Model-Optimizer",
    "dspark": "DeepSpec, SpecForge",
}
OF_SPECULATORS = ("dflash", "dspark")
BLOCK_IMPORTS = {
    name: {
        "hf": flat_layout(network, WRITERS[name]),
        **({"speculators": layout_of_speculators(network)} if name in OF_SPECULATORS else {}),
    }
    for name, network in NETWORKS.items()
}

"""The interface of formats: one `ExportLayout` for each format of a drafting method that engines
load."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from specdec.drafters.layers import share_of
from specdec.errors import require
from specdec.targets.output_head import soft_cap
from specdec.targets.parts import TargetParts

WEIGHTS, CONFIG = "model.safetensors", "config.json"
OVERRIDES = "target-overrides.json"  # keys to add to the target's config when it is served
MARK = "draftsmith.json"  # marks our own exports, which a new one may replace

LAYOUT = "hf"  # unless another is asked for; vLLM loads it by its method

OTHER = "train a family with a head of its own, such as eagle3, or give export=null"

Tensors = dict[str, Tensor]
Description = dict[str, Any]  # config.json


def unchanged(drafter: Any, tensors: Tensors) -> Tensors:
    return tensors


def save_safetensors(
    folder: Path, tensors: Tensors, config: Description, weights: str = WEIGHTS
) -> None:
    """Write an export's weights, and its config beside them."""
    save_file(tensors, folder / weights, metadata={"format": "pt"})
    described = json.dumps(config, indent=1, sort_keys=True)
    (folder / CONFIG).write_text(described, encoding="utf-8")


def load_safetensors(folder: Path) -> Tensors:
    """The weights of an export."""
    return load_file(folder / WEIGHTS)


@dataclass(frozen=True)
class FileChoices:
    """What a user may choose of an export in one file: the type of its weights (None: the one they
    were trained in), and a GGUF file whose tokenizer it copies (None: the target's own).
    `reference` is the text of the draft's reference for its key, if it has one."""

    weight_type: str | None = None
    tokenizer_from: Path | None = None
    reference: str | None = None


AS_TRAINED = FileChoices()


@dataclass(frozen=True)
class ExportLayout:
    """The engine's names, shapes and description of a method's weights. `to_engine` converts the
    drafter's tensors before they are renamed; `from_engine` converts them back after they are
    renamed back. `refuse` raises UserError if an engine would read any draft of this config for
    this target differently; it reads no weights, so it can be called before training. `objection`
    takes the drafter's logits on a short text and returns the reason why an engine would draft
    differently, or None."""

    config: Callable[[Any, TargetParts], Description]
    to_engine: Callable[[Any, Tensors], Tensors] = unchanged
    from_engine: Callable[[Any, Tensors], Tensors] = unchanged
    refuse: Callable[[Any, TargetParts], None] | None = None
    objection: Callable[[Any, Tensor], str | None] | None = None
    # returns a note for the user about a draft, from its hidden states [A, K, D] on a short text
    note: Callable[[Any, Tensor], str] | None = None
    # prefixes of names: ours, then the engine's
    prefixes: Mapping[str, str] = field(default_factory=dict)
    whole_model: bool = False  # it is written with the target's tokenizer
    # keys that the engine looks for in the target's own config; they are written beside the draft
    overrides: Callable[[Any, TargetParts], Description] | None = None
    # the end of the file's name, of a layout in one file; empty: the layout is a folder
    suffix: str = ""
    # functions that write tensors (with the engine's names) and config to files, and read them
    save: Callable[[Path, Tensors, Description], None] = save_safetensors
    load: Callable[[Path], Tensors] = load_safetensors


def renamed(tensors: Tensors, prefixes: Mapping[str, str]) -> Tensors:
    """The tensors, with the first of the `prefixes` that fits a name replaced by its new one."""
    old = {name: next(filter(name.startswith, prefixes), "") for name in tensors}
    return {prefixes.get(old[n], "") + n.removeprefix(old[n]): x for n, x in tensors.items()}


def layers_of(llama: LlamaConfig) -> Description:
    """The config of a draft's layers for engines. The rotary parameters are those of `alike`
    (layers.py), which all engines interpret alike; vLLM reads the scale of LongRoPE's factors from
    keys of its own."""
    described = llama.to_dict()
    rope: Description = dict(described["rope_parameters"])
    if (rotary_dim := described.pop("rotary_dim", None)) is not None:
        rope["partial_rotary_factor"] = share_of(rotary_dim, described["head_dim"])
    if rope["rope_type"] == "longrope":
        rope["short_mscale"] = rope["long_mscale"] = rope["attention_factor"]
    return described | {"rope_parameters": rope}


def window_of(drafter: Any, num_layers: int) -> Description:
    """The keys of a draft with a window. In transformers and vLLM, as here, a token itself is the
    last of the `sliding_window` tokens that it attends to."""
    window = getattr(drafter.config, "window", None)
    if window is None:
        return {}
    return {
        "sliding_window": window,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"] * num_layers,
    }


def refuse_sinks(drafter: Any, target: TargetParts) -> None:
    """Raises UserError for a draft that attends to the first tokens of a text besides its
    window."""
    sinks = getattr(drafter.config, "sink_tokens", 0)
    require(
        not sinks,
        f"drafter.sink_tokens={sinks}: this format has no key for the first tokens of a text, so "
        "an engine would draft other tokens in long texts: give 0, or export=null",
    )


def refuse_window(drafter: Any, target: TargetParts) -> None:
    """Raises UserError for a draft with a window, in a format that has no key for one."""
    window = getattr(drafter.config, "window", None)
    require(
        window is None,
        f"drafter.window={window}: this format has no key for a draft's window, so an engine would "
        "draft other tokens in long texts: give another layout, or export=null",
    )


def one_layer(drafter: Any) -> Description:
    """The config of a one-layer Llama, for the layer of a recurrent drafter."""
    return {**layers_of(drafter.llama), "model_type": "llama", "num_hidden_layers": 1}


def shared_head(target: TargetParts) -> Description:
    """The scaling of the target's own head, which an engine shares with the draft. Soft caps are
    read by SGLang alone, and change no greedy draft."""
    cap = soft_cap(target.config)
    scale = {"logit_scale": target.head_factor}
    return scale | ({"final_logit_softcapping": cap} if cap else {})


def refuse_biased_head(drafter: Any, target: TargetParts) -> None:
    """Raise UserError for a target whose head has a bias: an engine shares only its weight."""
    require(
        target.head.bias is None,
        f"the LM head of {target.name} has a bias, which vLLM leaves out for a draft that shares "
        f"the head: {OTHER}",
    )


def special_tokens(target: TargetParts) -> Description:
    """The ids of the target's special tokens, as a config names them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(target.config, name, None) for name in names}


def window_note(config: Description) -> str:
    """A note on engines that would draft other tokens in long texts, if a draft has a window."""
    of_layers = config.get("transformer_layer_config", config)
    if not of_layers.get("use_sliding_window"):
        return ""
    return (
        f"; each layer attends to {of_layers['sliding_window']} tokens, as vLLM 0.32 reads it: an "
        "engine that ignores the window drafts other tokens in longer texts"
    )


def rotary_note(config: Description) -> str:
    """A note on readers that would draft other tokens, if only a part of each head is rotated."""
    of_layers = config.get("transformer_layer_config", config)
    whole = of_layers.get("model_type") in ("llama", "qwen3")  # whose classes rotate whole heads
    share = (of_layers.get("rope_parameters") or {}).get("partial_rotary_factor", 1)
    if not whole or share == 1:
        return ""
    return (
        f"; only {share:.3g} of each head is rotated, as in the target: serve it with vLLM, since "
        "SGLang and transformers' own Llama and Qwen3 rotate whole heads and would draft other "
        "tokens"
    )

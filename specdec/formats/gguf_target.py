"""A target as a GGUF file: made of a loaded target, for architectures whose tensors llama.cpp
stores as transformers does, or of another GGUF file, in float32.

Llama, Qwen2 and Qwen3 are written here; for all others, llama.cpp's own converter is named. Names
of tensors are those of the package `gguf`. llama.cpp rotates neighbouring numbers of a Llama's
heads, so its query and key weights are permuted (`interleaved`).
"""

import json
from functools import partial
from pathlib import Path

from gguf import MODEL_ARCH, get_tensor_name_map
from torch import Tensor

from specdec.errors import require
from specdec.files import make_folder, new_file
from specdec.formats.draft_export import mark_of, require_free
from specdec.formats.gguf_file import (
    ARCHITECTURE,
    FILE_TYPE,
    MARK_KEY,
    SUFFIX,
    WEIGHT_TYPES,
    read_tensors,
    require_rounded,
    typed_keys,
    weight_type_of,
    write_gguf,
)
from specdec.formats.gguf_layout import (
    FACTORS,
    LAYOUT,
    interleaved,
    layer_keys,
    rope_factors,
    varies,
)
from specdec.formats.gguf_tokenizer import CONVERTER, target_tokenizer
from specdec.formats.layout import FileChoices
from specdec.formats.stored_tensors import require_finite, untied
from specdec.runtime.quantised import method
from specdec.targets.gguf import checksum_of_gguf, made_once
from specdec.targets.target import Target

ARCHITECTURES = {  # of a config's model_type
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}
PERMUTED = ("self_attn.q_proj.", "self_attn.k_proj.")  # of Llama alone
ROPES = ("default", "linear", "llama3")


def write_target_gguf(path: Path, target: Target, choices: FileChoices) -> str:
    """Write the target's file, which appears once it has been read back; returns what was compared.
    Raises UserError for an architecture or a tokenizer that is not written here."""
    require_free(path)
    refuse_target(target)
    config, dtype = target.config, target.dtype
    kind = weight_type_of(choices.weight_type, dtype)
    tensors = target_tensors(target)
    require_finite(tensors, f"{path}: not written")
    architecture = config.model_type
    keys = {
        **target_tokenizer(target, choices.tokenizer_from),
        **layer_keys(architecture, config, config.num_hidden_layers),
        "general.name": Path(target.name).stem,
        "general.quantization_version": 2,  # of q8_0 and q4_0 (ggml.h)
        FILE_TYPE: int(kind.file_type),
        MARK_KEY: json.dumps(mark_of(None, LAYOUT, target)),
    }
    make_folder(path.parent)
    with new_file(path) as partial:
        write_gguf(partial, tensors, keys)
        require_rounded(tensors, partial, kind, f"{path}: not written")
    return f"{len(tensors)} tensors read back"


def float32_gguf(gguf: Path, cache: Path) -> Path:
    """A file, made once under `cache`, with the weights of another as Draftsmith's float32 target
    has them: dequantised, rounded to bfloat16 as `dense_folder` does it, and stored in float32.
    Raises UserError for a file that is missing or damaged."""
    source = checksum_of_gguf(gguf)
    folder = cache / f"{gguf.stem}-{source[:12]}-float32"
    return made_once(folder, gguf.name, source, partial(_dequantise, gguf)) / gguf.name


def _dequantise(gguf: Path, folder: Path) -> None:
    keys = typed_keys(gguf)
    keys[ARCHITECTURE] = keys[ARCHITECTURE].value
    keys[FILE_TYPE] = int(WEIGHT_TYPES["f32"].file_type)
    tensors = {
        # factors are no weights
        name: x.bfloat16().float() if not name.startswith("rope") and x.is_floating_point() else x
        for name, x in read_tensors(gguf).items()
    }
    write_gguf(folder / gguf.name, tensors, keys)


def refuse_target(target: Target) -> None:
    """Raise UserError, naming llama.cpp's converter, for a target that is not written here."""
    config = target.config
    act = getattr(config, "hidden_act", "silu")
    rope = getattr(config, "rope_parameters", None) or {}
    partial = rope.get("partial_rotary_factor") not in (None, 1)
    for wrong, what in (
        (config.model_type not in ARCHITECTURES, f"of type {config.model_type}"),
        (method(target.model.config) is not None, f"quantised ({target.quantisation})"),
        (rope.get("rope_type", "default") not in ROPES, f"with {rope.get('rope_type')} rotary"),
        (partial, "with partial rotary"),
        (act != "silu", f"with {act}"),
        (bool(getattr(config, "mlp_bias", False)), "with biases in its MLPs"),
        (bool(getattr(config, "use_sliding_window", False)), "with a sliding window"),
    ):
        require(
            not wrong,
            f"{target.title} is a model {what}, and --with-target FILE{SUFFIX} writes only plain "
            f"{', '.join(ARCHITECTURES)}: {CONVERTER}, and export the draft alone",
        )


def target_tensors(target: Target) -> dict[str, Tensor]:
    """The target's weights under llama.cpp's names. A head that is tied to the embedding is left
    out, as llama.cpp then takes the embedding."""
    config = target.config
    architecture = ARCHITECTURES[config.model_type]
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {}
    for name, x in untied(target.model.state_dict()).items():
        stem, _, leaf = name.rpartition(".")
        mapped = names.get_name(stem)
        require(mapped is not None, f"{target.title} has tensor {name!r}: {CONVERTER}")
        weight = x.detach().cpu()
        if architecture == MODEL_ARCH.LLAMA and any(part in name for part in PERMUTED):
            weight = interleaved(weight, config)
        tensors[f"{mapped}.{leaf}"] = weight
    factors = rope_factors(config)
    return tensors | ({FACTORS: factors} if varies(factors) else {})

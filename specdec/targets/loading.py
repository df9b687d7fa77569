"""Loads the target of a configuration: all of it, its parts alone, or each while a job needs it.

The model's config decides the class of the target (`kind_of`). A package adds a class with an entry
point `draftsmith.targets`: a subclass of `Target` whose `loads` recognises its configs.
"""

import copy
import ctypes
import gc
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from specdec.busy_cores import waits_briefly
from specdec.errors import UserError, memory_for, require
from specdec.plugins import Plugins
from specdec.progress import tell
from specdec.runtime.cpu import packed_linear
from specdec.runtime.cpu.machine_probes import native_dtype
from specdec.runtime.device import free_bytes
from specdec.runtime.quantised import method
from specdec.targets import transformers_model
from specdec.targets.checkpoint_files import SIGNIFICANT, StoredLayers
from specdec.targets.parts import TargetParts, config_of_layers
from specdec.targets.prompt_rendering import DEFAULT_RENDERING, PromptRendering
from specdec.targets.self_check import check_head
from specdec.targets.spread import AUTO, in_words, is_spread
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig, target_name
from specdec.targets.tensor_parallel import (
    FREE,
    LOAD,
    TensorParallelTarget,
    TensorParallelTeam,
    division_rules,
    load_tensor_parallel,
)
from specdec.targets.transformers_model import empty_model, opened, without_warnings


def _require_kind(name: str, kind: Any) -> None:
    """Raise UserError for a value that is no class of target."""
    fits = isinstance(kind, type) and issubclass(kind, Target)
    require(fits, f"{kind!r} is no subclass of specdec.targets.target.Target")


TARGETS: Plugins[type[Target]] = Plugins(
    "draftsmith.targets", "kind of target", {"causal": Target}, _require_kind
)
# the same as types in the header of a safetensors file
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TOO_LARGE = "give target.dtype=bfloat16, a smaller target, or a device with more memory"
FITTING = 0.8  # share of the free memory that the weights of a target may take


@memory_for("loading the target", TOO_LARGE)
def load_target(cfg: TargetConfig) -> Target:
    """Load the model that `cfg` names. Raises UserError if it cannot be loaded."""
    cfg, path, config, tokenizer, weights = opened(cfg)
    if cfg.tensor_parallel:
        return load_tensor_parallel(cfg, path, config, kind_of(config), tokenizer, weights)
    fingerprint = (
        weights.fingerprint()
        if weights
        else transformers_model.fingerprint_of_bin(cfg, path, config)
    )
    quantisation = method(config)
    kind = kind_of(config)
    model = transformers_model.load_model(cfg, path, config, kind.auto_class(config))
    of_target = model, tokenizer, target_name(cfg), cfg.revision, quantisation
    target = kind(*of_target, fingerprint=fingerprint)
    target.weights = weights
    return target


def kind_of(config: Any) -> type[Target]:
    """The class of target for a model with this config: one of the lab or of another package that
    loads it, else `Target`, a causal LM."""
    TARGETS.add_installed()
    return next((kind for kind in TARGETS.values() if kind.loads(config)), Target)


def load_parts(cfg: TargetConfig) -> TargetParts | None:
    """The parts of the target that `cfg` names, without its layers. None if the parts cannot be
    loaded alone: the class is not `separable`, the model cannot be made without layers, or the
    checkpoint is not in safetensors or was never hashed (see `TargetLoader`). Raises UserError for
    a damaged checkpoint."""
    cfg, path, config, tokenizer, weights = opened(cfg)
    kind = kind_of(config)
    if not kind.separable or not weights or not weights.is_noted:
        return None
    auto = kind.auto_class(config)
    in_one = replace(cfg, device_map=None, max_memory={}, tensor_parallel=False)
    bare = copy.deepcopy(config)
    try:
        text = bare.get_text_config(decoder=True)
        text.update(config_of_layers(text.to_dict(), []) | {"num_hidden_layers": 0})
        with without_warnings():  # about the layers' weights, which are left unread
            model = transformers_model.load_model(in_one, path, bare, auto)
        layers = StoredLayers(
            files=weights,
            config=config,
            empty=partial(empty_model, cfg, config, auto),
            whole=partial(_in_one_piece if cfg.tensor_parallel else load_target, cfg),
        )
        of_parts = model, tokenizer, target_name(cfg), cfg.revision, method(config)
        parts = TargetParts(*of_parts, fingerprint=weights.fingerprint(), stored=layers)
        parts.reads_pairs = kind.reads_pairs
        check_head(parts)
        return parts
    except Exception:  # a model without layers may raise anything, even if the whole one does not
        return None


def _in_one_piece(cfg: TargetConfig) -> TargetParts:
    raise UserError(
        f"target.path={cfg.path!r}: the draft needs the weights of the target's layers, whose "
        "files have other names for them, and target.tensor_parallel never loads them in one "
        "piece: give a draft that starts afresh (drafter.initialisation=…), or leave "
        "target.tensor_parallel out"
    )


class TargetLoader:
    """The owner of a job's target. It keeps only the currently needed parts in memory.

    | in memory | from | until |
    | --- | --- | --- |
    | the parts around the layers | the first use of `parts` | the end of the job |
    | the layers as well | `whole()` | `release()` |

    A checkpoint that was never hashed is at first loaded completely. So is one whose parts cannot
    be loaded alone, and `release` does not free it. With `alone`, the files are hashed in place of
    loading the layers, if the checkpoint allows it.
    """

    def __init__(self, cfg: TargetConfig, alone: bool = False) -> None:
        self.cfg = cfg
        self.rendering = DEFAULT_RENDERING
        self._whole: Target | None = None
        if alone := alone or cfg.tensor_parallel:
            complete, _, config, _, weights = opened(cfg)
            kind = kind_of(config)
            if cfg.tensor_parallel:
                division_rules(complete, config, kind, weights)
            if weights is not None and kind.separable:
                weights.fingerprint()  # computes and records it
        self._stored = load_parts(cfg)
        require(
            not cfg.tensor_parallel or self._stored is not None,
            f"target.path={cfg.path!r}: target.tensor_parallel needs a model whose parts can be "
            "loaded without its layers: leave it out",
        )
        self.team = TensorParallelTeam(self.whole, self.release) if cfg.tensor_parallel else None
        if alone and self._stored is None:
            tell(
                f"target.path={cfg.path!r}: its parts cannot be loaded alone, as its checkpoint is "
                "not in safetensors or its model cannot be made without layers: all is loaded"
            )

    @property
    def parts(self) -> TargetParts:
        """The parts, available at any time; the complete target if it is loaded in one piece."""
        if self.team is not None and self._stored is not None:
            return self._stored
        return self._whole or self._stored or self.whole()

    def whole(self) -> Target:
        """The target with its layers, or with this process's part of them, which all processes load
        at the same time. Raises UserError if its weights have changed in the meantime."""
        if self._whole is None:
            if self.team is not None:
                self.team.tell(LOAD)
            self._whole = load_target(self.cfg)
            self._whole.render_prompts_with(self.rendering)
            if isinstance(self._whole, TensorParallelTarget) and self._stored is not None:
                self._whole.team = self.team
                self._whole.take_parts(self._stored)
            require(
                self._stored is None or self._whole.fingerprint() == self._stored.fingerprint(),
                f"target.path={self.cfg.path!r}: its files changed during this job, so the weights "
                "or the config are not those that it began with: run the job again",
            )
        return self._whole

    def to_compare(self) -> Target:
        """The complete target for a few forward passes, to check the output of an engine. Layers
        that do not fit into the free memory are read from disk."""
        spread = self._whole is None and self.team is None and self.cfg.device_map is None
        if spread and self._stored is not None and self._stored.weights is not None:
            files = {*self._stored.weights.files.values()}
            size = sum(file.stat().st_size for file in files)
            if self._stored.dtype == torch.float32 and self._stored.weights.kind in ("BF16", "F16"):
                size *= 2
            free = free_bytes(self._stored.device)
            if free is not None and FITTING * free < size:
                spread_target = load_target(replace(self.cfg, device_map=AUTO))
                spread_target.render_prompts_with(self.rendering)
                return spread_target
        return self.whole()

    def render_prompts_with(self, rendering: PromptRendering) -> None:
        """Call `TargetParts.render_prompts_with` on everything loaded now and later."""
        self.rendering = rendering
        for loaded in (self._stored, self._whole):
            if loaded is not None:
                loaded.render_prompts_with(rendering)

    def release(self) -> None:
        """Free the layers' memory, if the parts can be loaded alone and nothing else uses the
        layers."""
        if self._stored is None and (stored := load_parts(self.cfg)) is not None:
            stored.render_prompts_with(self.rendering)
            self._stored = stored
        if self._stored is not None and self._whole is not None:
            if self.team is not None:
                self.team.tell(FREE)
            self._whole = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)  # else glibc keeps the freed memory of all layers


def opening(target: TargetParts, cfg: TargetConfig, reason: str = "") -> str:
    """The first line that a program prints after loading `target` from `cfg`: the model, its dtype
    and the `reason` for it (for auto, this machine's), whether weights are packed, and a warning if
    no token ends a response."""
    dtype = str(target.dtype).removeprefix("torch.")
    reasons = [native_dtype(str(target.device)).reason if cfg.dtype == "auto" else reason]
    stored = target.weights.kind if target.weights and not target.quantisation else None
    if stored and SIGNIFICANT[stored] > SIGNIFICANT[KINDS[target.dtype]]:
        reasons.append(f"rounded from the checkpoint's {STORED[stored]}")
    if target.quantisation:
        dequantised = len(target.layers) > 0 and packed_linear.all_plain(target.model)
        here = f", dequantised on {target.device}" if dequantised else ""
        reasons.append(f"the checkpoint is quantised: {target.quantisation}{here}")
    reason = "; ".join(filter(None, reasons))
    after = target.turn_ends.after
    endless = (
        f"; responses may run on: its chat template ends them with {after!r}, which is no token"
    )
    kind, layers = type(target.model).__name__, target.depth
    whole = not is_spread(target.model) and not cfg.tensor_parallel
    pack = cfg.packed and target.device.type == "cpu" and whole
    spread = f"; {in_words(target.model)}" if is_spread(target.model) else ""
    if cfg.tensor_parallel:
        spread = f"; each of {dist.get_world_size()} processes holds its part of every layer"
    unchecked = ""
    if isinstance(target, Target) and target.without_twin is not None:
        unchecked = (
            "; runs only with transformers' modules and attention, since no small model of its "
            f"classes could be made to check ours ({target.without_twin})"
        )
    alone = isinstance(target, Target) and target.restricted
    busy = "; other processes keep a core busy, so threads soon sleep where they wait"
    return (
        f"target {target.name}: {kind}, {layers} layers, vocabulary {target.vocab_size:,}, "
        f"{dtype} on {target.device}{f' ({reason})' if reason else ''}"
        f"{f'; it {target.only_chains}' if alone else ''}"
        f"{unchecked}"
        f"{spread}{f'; prompts by {target.rendering}' if not target.rendering.is_default else ''}"
        f"{f'; {packed_linear.packing_in_words(target.model, target.dtype)}' if pack else ''}"
        f"{busy if waits_briefly() and target.device.type == 'cpu' else ''}"
        f"{endless if after is not None else ''}"
    )

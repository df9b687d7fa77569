"""What a job holds of its target: the parts at any time, the layers while they are needed."""

import ctypes
import gc
import sys
from dataclasses import replace

import torch

from specdec.errors import require
from specdec.progress import tell
from specdec.runtime.device import free_bytes
from specdec.targets import loading
from specdec.targets.loading import TargetConfig
from specdec.targets.parts import TargetParts
from specdec.targets.spread import AUTO
from specdec.targets.stored import StoredTargetParts
from specdec.targets.target import Target
from specdec.targets.tensor_parallel import FREE, LOAD, TensorParallelTarget, TensorParallelTeam

FITTING = 0.8  # share of the free memory that the weights of a target may take


class TargetLoader:
    """A job's target: only what the job needs at the time is in memory. `alone`: the parts are
    loaded without ever loading the layers, where the checkpoint allows it."""

    def __init__(self, cfg: TargetConfig, alone: bool = False) -> None:
        self.cfg = cfg
        self._whole: Target | None = None
        if cfg.tensor_parallel:
            resolved, _, config, _, weights = loading.opened(cfg)
            loading.division(resolved, config, weights)
        if alone := alone or cfg.tensor_parallel:
            loading.note_fingerprint(cfg)
        self._stored = loading.load_parts(cfg)
        require(
            not cfg.tensor_parallel or self._stored is not None,
            f"target.path={cfg.path!r}: target.tensor_parallel needs a model whose parts can be "
            "loaded without its layers: leave it out",
        )
        self.team = TensorParallelTeam(self) if cfg.tensor_parallel else None
        if alone and self._stored is None:
            tell(
                f"target.path={cfg.path!r}: its parts cannot be loaded alone, as its checkpoint is "
                "not in safetensors or its model cannot be made without layers: all is loaded"
            )

    @property
    def parts(self) -> TargetParts:
        """The parts, available at any time; the whole target if it is loaded in one piece."""
        if self.team is not None and self._stored is not None:
            return self._stored
        return self._whole or self._stored or self.whole()

    def whole(self) -> Target:
        """The target with its layers, or with this process's part of them, which all processes load
        at the same time. Raises UserError if its weights changed in the meantime."""
        if self._whole is None:
            if self.team is not None:
                self.team.tell(LOAD)
            self._whole = loading.load_target(self.cfg)
            if isinstance(self._whole, TensorParallelTarget) and isinstance(
                self._stored, StoredTargetParts
            ):
                self._whole.team = self.team
                self._whole.take_parts(self._stored)
            require(
                self._stored is None or self._whole.fingerprint() == self._stored.fingerprint(),
                f"target.path={self.cfg.path!r}: its files changed during this job, so the weights "
                "or the config are not those that it began with: run the job again",
            )
        return self._whole

    def to_compare(self) -> Target:
        """The whole target for a few forward passes, with which what an engine gave is compared.
        Where it does not fit into the free memory, the layers that do not are read from disk."""
        spread = self._whole is None and self.team is None and self.cfg.device_map is None
        if spread and self._stored is not None and self._stored.weights is not None:
            files = {*self._stored.weights.files.values()}
            size = sum(file.stat().st_size for file in files)
            if self._stored.dtype == torch.float32 and self._stored.weights.kind in ("BF16", "F16"):
                size *= 2
            free = free_bytes(self._stored.device)
            if free is not None and FITTING * free < size:
                return loading.load_target(replace(self.cfg, device_map=AUTO))
        return self.whole()

    def release(self) -> None:
        """Free the layers' memory, if the parts can be loaded alone and nothing else uses it."""
        self._stored = self._stored or loading.load_parts(self.cfg)
        if self._stored is not None and self._whole is not None:
            if self.team is not None:
                self.team.tell(FREE)
            self._whole = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)  # else glibc keeps the freed memory of all layers

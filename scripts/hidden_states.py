"""The connector with which vLLM writes the target's hidden states to files, for
`hidden_states.from=`.

It runs inside vLLM, which `scripts/serve` starts with it, so it imports nothing from the project.
vLLM's own connector (ExampleHiddenStatesConnector, version 0.32) copies the states through streams
and events of CUDA; on machines without CUDA, this one copies them at once. On all machines, it
reports the layers of the states in its response, so that a client never confuses layers, and marks
its folder and its files, so that a client never deletes a file of somebody else.
"""

import fcntl
import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

FOLDER_MARK = ".draftsmith-states"  # these two as in specdec/engines/vllm.py
MARK = {"written_by": "draftsmith"}


class Copied:
    """Replaces the event for the end of a copy, where copies are synchronous."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HiddenStates(ExampleHiddenStatesConnector):
    """vLLM's connector, also for machines without CUDA."""

    @property
    def layers(self) -> list[int]:
        config: Any = self._vllm_config.speculative_config.draft_model_config.hf_config
        return list(config.eagle_aux_hidden_state_layer_ids)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        later, params = super().request_finished(request, block_ids)
        return later, None if params is None else {**params, "layers": self.layers}

    def _submit_async_write(self, pending: PendingSave) -> None:
        if torch.cuda.is_available():
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        size = self._block_size
        block_ids = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (block_ids[:, None] * size + torch.arange(size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids}
        self._req_copy_events[pending.req_id] = Copied()
        self._write_tensors(tensors, Copied(), pending.filename, lock)

    @staticmethod
    def _write_tensors(tensors: Any, event: Any, filename: str, lock: int | None) -> None:
        """vLLM's own function for writing a file, with our marks in its folder and its header."""
        try:
            event.synchronize()
            folder = os.path.dirname(filename)
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, FOLDER_MARK), "a", encoding="utf-8"):
                pass
            save_file(tensors, filename, metadata=MARK)
            with open(
                f"{filename}.lock", "a", encoding="utf-8"
            ) as beside:  # save_file follows no umask
                os.chmod(filename, os.fstat(beside.fileno()).st_mode & 0o666)
        finally:
            if lock is not None:
                os.close(lock)  # a client that waits for the file goes on

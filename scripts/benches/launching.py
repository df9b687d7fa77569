"""Runs of `train.py` on several processes, by accelerate's own launcher."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from specdec.errors import require

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {"DDP": ("--multi_gpu",), "FSDP2": ("--use_fsdp", "--fsdp_version", "2")}


def launched(
    command: Sequence[str], processes: int = 2, kind: str = "DDP", pinned: bool = False
) -> "subprocess.CompletedProcess[str]":
    """The outcome of a Python command in this many processes of one thread each, on the CPU. They
    share the draft by `kind`; stdout has both streams. They may be `pinned` to as many cores. A
    single process is started without a launcher."""
    given = {k: v for k, v in os.environ.items() if not k.startswith(("HYDRA_", "ACCELERATE_"))}
    given |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    given |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    launcher = ("-m", "accelerate.commands.launch", "--num_processes", str(processes))
    launcher += ("--main_process_port", "0", *FLAGS[kind])
    full = [sys.executable, *(launcher if processes > 1 else ()), *command]

    def pin() -> None:
        own = psutil.Process()
        own.cpu_affinity(own.cpu_affinity()[:processes])

    with (
        TemporaryDirectory() as folder,
        (log := Path(folder, "log")).open("w", encoding="utf-8") as file,
    ):
        streams = {"stdout": file, "stderr": file}
        before = pin if pinned else None
        code = subprocess.call(full, cwd=ROOT, env=given, preexec_fn=before, **streams)
        return subprocess.CompletedProcess(full, code, log.read_text(encoding="utf-8"))


def started(command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """A command in the project's folder, as the leader of its own process group. Its output is
    appended to a log."""
    with log.open("a", encoding="utf-8") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def require_done(done: "subprocess.CompletedProcess[str]", what: str) -> None:
    require(
        done.returncode == 0, f"{what} ended with code {done.returncode}: {done.stdout[-2000:]}"
    )

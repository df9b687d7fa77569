"""Checks that equal runs, one after the other on an idle and on a busy machine, are equal bit for
bit."""

import hashlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from benches.launching import ROOT
from benches.tiny import Tiny, conversations, save
from benches.turns import show
from safetensors.torch import load_file

from specdec.errors import require
from specdec.files import make_folder, read_lines
from specdec.integrity import of_tensors, of_value
from specdec.progress import console

# wide enough that its layers are packed; with target.packed=false they are not
WIDE = {"hidden_size": 384, "intermediate_size": 1024, "head_dim": 96}
CHATS = 24
SETTINGS = (
    *("target=model", "target.device=cpu", "data=conversations", "data.responses=target"),
    *("data.max_length=128", "data.max_prompt=64", "data.held_out=0.2", "responses.batch=8"),
    *("responses.max_new_tokens=16", "drafter.layers=[1,2,3]", "drafter.depth=2"),
    *("loop.rows=2", "loop.epochs=1", "loop.log_every=1", "loop.eval_every=4", "track=none"),
    *("decode.prompts=0", "export=null"),
)
CLOCKED = ("tokens_per_second", "waiting")  # figures of a training record
BUSY = "while True: pass"
FORKS = multiprocessing.get_context("forkserver")  # of a process that has imported what takes long


def repeat(
    overrides: Annotated[Sequence[str], "of train.py, e.g. target.dtype=bfloat16"] = (),
    *,
    count: Annotated[int, "runs that are compared with the first"] = 20,
    busy: Annotated[int, "processes that compute beside every second run"] = 1,
    folder: Annotated[
        Path | None, "a new folder for the runs; default: one that is removed"
    ] = None,
) -> None:
    """Runs with the same seed: are their responses, hidden states, losses and drafts bit-identical?

    Each run is a process with its own caches, so each computes everything. The target is a random
    Llama of width 384 in float32, whose layers are large enough to be packed; torch uses its
    default number of threads. Other processes keep the machine busy during every second run.
    """
    FORKS.set_forkserver_preload(["train.pipeline", "transformers.models.llama.modeling_llama"])
    with TemporaryDirectory() as temporary:
        place = make_folder((folder or Path(temporary)).resolve())
        require(not any(place.iterdir()), f"--folder {place} is not empty: give a new one")
        save(Tiny("wide", "llama", True, WIDE), place / "target")
        (place / "chats.jsonl").write_text(
            "".join(f"{x}\n" for x in conversations(CHATS)), encoding="utf-8"
        )
        first, rows, same = dict[str, str](), list[list[str]](), 0
        for number in range(count + 1):
            beside = busy * (number % 2)
            with computing(beside):
                found = parts(trained(place, str(number), overrides))
            first = first or found
            other = [name for name, part in found.items() if part != first[name]]
            same += bool(number) and not other
            rows.append([str(number), str(beside), ", ".join(other) or "none"])
            console.print(
                f"run {number}, {beside} busy beside it: other than the first: {rows[-1][-1]}"
            )
        show(["run", "busy processes", "other than in run 0"], rows)
        console.print(f"{same} of {count} runs are the first one's, bit for bit")
        require(same == count, "runs with the same seed differ: see the table")


def trained(place: Path, name: str, overrides: Sequence[str]) -> Path:
    """The folder of a run with caches of its own."""
    folder = place / name
    roots = [f"{kind}.root={folder / kind}" for kind in ("responses", "hidden_states")]
    data = [f"target.path={place / 'target'}", f"data.path={place / 'chats.jsonl'}"]
    own = [*roots, *data, f"target.cache={folder / 'targets'}", f"hydra.run.dir={folder / 'run'}"]
    log = make_folder(folder) / "log"
    command = ["train.py", *SETTINGS, "target.dtype=float32", *overrides, *own]
    child = FORKS.Process(target=_train, args=(command, log))
    child.start()
    child.join()
    require(not child.exitcode, f"run {name} failed: {log.read_text(encoding='utf-8')[-2000:]}")
    return folder


def parts(folder: Path) -> dict[str, str]:
    """Checksums of the results of a run, by name."""
    lines = [
        {"prompt": r["prompt"], "ids": r["ids"]}
        for path in (folder / "responses").rglob("*.jsonl")
        for r in read_lines(path, ("prompt", "ids"))
    ]
    tensors: dict[str, Any] = {}
    for path in (folder / "hidden_states").rglob("*.safetensors"):
        tensors |= load_file(path)
    figures = []
    for record in read_lines(folder / "run" / "metrics.jsonl", ("step",)):
        train = {k: v for k, v in record.get("train", {}).items() if k not in CLOCKED}
        figures.append([record["step"], train, record.get("held_out")])
    draft = (folder / "run" / "best" / "draft.safetensors").read_bytes()
    require(bool(lines and tensors and figures), f"{folder}: this run has computed nothing")
    return {
        "responses": of_value(sorted(json.dumps(line) for line in lines)),
        "hidden states": of_tensors(tensors, ""),
        "losses": of_value(figures),
        "draft": hashlib.blake2b(draft).hexdigest(),
    }


def _train(command: list[str], log: Path) -> None:
    """`train.py` in this process, which is a new one."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.chdir(ROOT)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


@contextmanager
def computing(count: int) -> Iterator[None]:
    """Keep the machine busy with processes that only compute, during the block."""
    beside = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()

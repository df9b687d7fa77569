"""Everything that must be measured on a GPU, in pieces that fit into calls of under ten minutes.

Each piece is a separate command. Its outcome is stored as JSON in a folder, and a finished piece is
not run again. When the minutes of a call are nearly over, a piece that can resume is interrupted
and continues in the next call. Any other piece starts only if it should fit into the remaining
time, or if it is the first of the call.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Annotated

import torch

from specdec.drafters import DRAFTERS
from specdec.errors import UserError, require
from specdec.files import make_folder, read_record, write_whole
from specdec.progress import console

ROOT = Path(__file__).resolve().parents[2]
MORE = 3  # the exit code while pieces are left
GRACE = 30  # seconds that an interrupted piece has to save its work
TESTS = ("drafters/test_contract.py", "decoding", "losses", "runtime/cpu/test_compiled_pass.py")
STRONG = ("budget.minutes=30", "data.limit=20000", "loop.epochs=3", "loop.rows=8")


@dataclass(frozen=True)
class GpuPart:
    """A command that measures something and takes about `minutes`. If it `resumes`, it can continue
    after an interruption. `after` names a piece that must have succeeded first. `figures` matches
    the beginning of the output lines to keep: by default, all except progress."""

    name: str
    command: Sequence[str]
    minutes: float = 0.0
    resumes: bool = False
    after: str = ""
    figures: str = r"(?!\s*\d+%)"


@dataclass(frozen=True)
class PartOutcome:
    """The outcome of a piece over all its `calls`. `status` is the exit code of the last call; None
    if there was none, or if it was interrupted and can resume. `output` is the last call's."""

    command: list[str]
    status: int | None = None
    calls: int = 0
    seconds: float = 0.0
    output: str = ""

    @property
    def failed(self) -> bool:
        return self.status not in (0, None)


def pieces(folder: Path, overrides: Sequence[str], dry: bool) -> list[GpuPart]:
    """All pieces, in order. The last two decode with the head that the third trains."""
    head, best, python = folder / "head", str(folder / "head" / "best"), sys.executable
    bench = (python, "scripts/bench")
    (lookup,) = (n for n, kind in DRAFTERS.items() if kind.in_transformers == "prompt lookup")
    tests = ("-m", "pytest", "-q", "-m", "not slow and not serving")
    tests += tuple(f"tests/{name}" for name in (TESTS[-1:] if dry else TESTS))
    size = ("--prompts", "1", "--new", "8") if dry else ("--prompts", "10", "--new", "128")
    much = () if dry else ("data.limit=1000",)
    rows = ("--rows", "1", "2") if dry else ("--rows", "1", "4", "16", "64")
    train = ("train.py", "name=gpu-head", f"hydra.run.dir={head}", "track=none")
    train += ("debug=tiny",) if dry else STRONG
    exact = ("lossless", best, lookup, "--keep", str(folder / "identity"), *(size if dry else ()))
    strong = r"trained|measured|T="
    return [
        GpuPart("tests", (python, *tests), minutes=6, figures=r"\d+ passed"),
        GpuPart("training", (*bench, "throughput", *much, *overrides, *rows), minutes=4),
        GpuPart("head", (python, *train, *overrides), resumes=True, figures=strong),
        GpuPart("identity", (*bench, *exact), resumes=True, after="head"),
        GpuPart("speed", (*bench, "speed", best, *size, "--compiled"), minutes=8, after="head"),
    ]


def gpu(
    overrides: Annotated[Sequence[str], "of train.py, for the pieces that train"] = (),
    *,
    dry: Annotated[bool, "try every piece on the CPU, at a tiny size"] = False,
    minutes: Annotated[float, "for this call; the next one continues"] = 9.0,
    folder: Annotated[Path | None, "of all outcomes; default: runs/gpu[-dry]"] = None,
) -> None:
    """Everything that must be measured on a GPU, in pieces spread over several calls.

    Ends with exit code 3 while pieces are left. Raises UserError without a GPU and, at the end of a
    call, if a piece has failed; the next call tries that piece again, after the others.
    """
    there = dry or torch.cuda.is_available()
    require(there, "torch finds no GPU here: add --dry to try every piece on the CPU")
    folder = make_folder((folder or ROOT / "runs" / ("gpu-dry" if dry else "gpu")).resolve())
    todo = pieces(folder, overrides, dry)
    found = {piece.name: known(piece, folder) for piece in todo}
    end = time.monotonic() + 60 * minutes - GRACE
    begun = False
    for piece in sorted(todo, key=lambda piece: found[piece.name].failed):
        before, left = found[piece.name], end - time.monotonic()
        if before.status == 0 or (piece.after and found[piece.after].status != 0):
            continue
        if begun and left < (0 if dry else max(GRACE, 60 * piece.minutes)):
            continue  # a later piece may be short enough
        begun = True
        console.print(f"{piece.name}: {' '.join(piece.command)}")
        found[piece.name] = carried_out(piece, before, max(left, 1), dry, folder)
        write_whole(folder / f"{piece.name}.json", dumps(asdict(found[piece.name])) + "\n")
    rows = "\n".join(section(p, found[p.name]) for p in todo if found[p.name].status == 0)
    write_whole(folder / "rows.md", rows)
    console.print(rows)
    for name, made in found.items():
        if made.failed:
            last = made.output.strip().splitlines()[-1:] or ["no output"]
            where = folder / f"{name}.log"
            raise UserError(
                f"the piece {name} failed with {made.status}: {last[0]}; see {where}; the same "
                "command tries it again"
            )
    if left_over := [name for name, made in found.items() if made.status != 0]:
        console.print(f"left: {', '.join(left_over)}; run the same command again")
        sys.exit(MORE)


def known(piece: GpuPart, folder: Path) -> PartOutcome:
    """The outcome of a piece in earlier calls with the same command, or else an empty one."""
    path, fresh = folder / f"{piece.name}.json", PartOutcome(list(piece.command))
    found = read_record(PartOutcome, path) if path.exists() else fresh
    return found if found.command == fresh.command else fresh


def carried_out(
    piece: GpuPart, before: PartOutcome, seconds: float, dry: bool, folder: Path
) -> PartOutcome:
    """Run a piece for at most `seconds`, then interrupt it as Ctrl-C does, and kill it if it does
    not end. A piece that cannot resume then counts as failed."""
    device = {"DRAFTSMITH_TEST_DEVICE": "cuda"}
    if dry:  # without compiling, which would take minutes
        device = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    started = time.monotonic()
    log = folder / f"{piece.name}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            piece.command,
            cwd=ROOT,
            env=os.environ | device | {"COLUMNS": "200", "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # a shell's background jobs ignore Ctrl-C, and their children inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None if piece.resumes else -signal.SIGINT
        finally:
            for end in (signal.SIGINT, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, end)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE)
    spent = before.seconds + time.monotonic() - started
    output = log.read_text(errors="replace", encoding="utf-8")
    return PartOutcome(before.command, status, before.calls + 1, spent, output)


def section(piece: GpuPart, made: PartOutcome) -> str:
    """The figures of a finished piece, as a section of Markdown."""
    lines = [line for line in made.output.splitlines() if re.match(piece.figures, line)]
    spent = f"{made.seconds / 60:.1f} minutes, begun {made.calls} times"
    return "\n".join([f"## {piece.name}", "", f"{spent}.", "", *lines, ""])

"""Everything that only a GPU shows, in pieces of under ten minutes that can be resumed.

Each piece is a command of its own. What came of it is kept as JSON in a folder, and a piece that
has finished is not run again. A call ends before its minutes are over: a piece that can resume
is then interrupted and goes on in the next call, another is begun only where it fits.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path

import torch
from benches.subject import console

from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from specdec.files import make_folder, read_record, write_whole
from specdec.measure.results import Results

ROOT = Path(__file__).resolve().parents[2]
MORE = 3  # the exit code while pieces are left
GRACE = 30  # seconds that an interrupted piece has to save what it did
TESTS = ("drafters/test_contract.py", "decoding", "objectives", "runtime/test_compiled.py")
STRONG = ("budget.minutes=30", "data.limit=20000", "loop.epochs=3", "loop.rows=8")


@dataclass(frozen=True)
class Piece:
    """A command that measures something, in about so many `minutes`. `resumes`: interrupted, it
    goes on where it stopped. `after` names a piece without which it cannot run."""

    name: str
    title: str
    command: tuple[str, ...]
    minutes: float = 0.0
    resumes: bool = False
    after: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a piece, in all its `calls` together. `status` is the last one's exit code,
    None where it was interrupted; `output` is the last one's."""

    command: list[str]
    status: int | None = None
    calls: int = 0
    seconds: float = 0.0
    output: str = ""

    @property
    def done(self) -> bool:
        return self.status == 0

    @property
    def failed(self) -> bool:
        return self.status not in (0, None)


def pieces(folder: Path, overrides: Sequence[str], dry: bool) -> list[Piece]:
    """All pieces in the order in which they run; the last two decode with the head that the third
    trains."""
    head, python, bench = folder / "head", sys.executable, (sys.executable, "scripts/bench")
    train = (python, "train.py", "name=gpu-head", f"hydra.run.dir={head}", "track=none")
    tests = [f"tests/{name}" for name in (TESTS[-1:] if dry else TESTS)]
    (lookup,) = (n for n, kind in DRAFTERS.items() if kind.in_transformers == "prompt lookup")
    size = ("--prompts", "1" if dry else "10", "--new", "8" if dry else "128")
    exact = ("--keep", str(folder / "identity"), *(size if dry else ()))
    return [
        Piece(
            "tests",
            "The fast tests on the device",
            (python, "-m", "pytest", "-q", "-m", "not slow and not serving", *tests),
            minutes=6,
        ),
        Piece(
            "training",
            "Training throughput and memory",
            (*bench, "throughput", *([] if dry else ["data.limit=1000"]), *overrides)
            + ("--rows", *(("1", "2") if dry else ("1", "4", "16", "64"))),
            minutes=4,
        ),
        Piece(
            "head",
            "A head trained in half an hour",
            (*train, *(["debug=tiny"] if dry else STRONG), *overrides),
            resumes=True,
        ),
        Piece(
            "identity",
            "Greedy identity in float32",
            (*bench, "lossless", str(head / "best"), lookup, *exact),
            resumes=True,
            after="head",
        ),
        Piece(
            "speed",
            "Against transformers' own generation",
            (*bench, "speed", str(head / "best"), *size, "--compiled"),
            minutes=8,
            after="head",
        ),
    ]


def gpu(overrides: Sequence[str], dry: bool, minutes: float, folder: Path | None) -> None:
    """Run what is left of the pieces, and write the rows of those that are done.

    Ends with exit code 3 while pieces are left. Raises UserError without a GPU, and where a piece
    failed, once the others have had their turn; the next call tries that piece again.
    """
    if not dry and not torch.cuda.is_available():
        raise UserError("torch finds no GPU here: add --dry to try every piece on the CPU")
    folder = make_folder((folder or ROOT / "runs" / ("gpu-dry" if dry else "gpu")).resolve())
    todo = pieces(folder, overrides, dry)
    found = {piece.name: known(piece, folder) for piece in todo}
    end = time.monotonic() + 60 * minutes - GRACE
    begun = False
    for piece in sorted(todo, key=lambda piece: found[piece.name].failed):
        before, left = found[piece.name], end - time.monotonic()
        if before.done or (piece.after and not found[piece.after].done):
            continue
        if begun and left < (0 if dry else max(GRACE, 60 * piece.minutes)):
            break
        begun = True
        console.print(f"{piece.name}: {piece.title}")
        found[piece.name] = carried_out(piece, before, max(left, 1), dry, folder)
        write_whole(folder / f"{piece.name}.json", dumps(asdict(found[piece.name])) + "\n")
    sections = [section(piece, found[piece.name], folder) for piece in todo]
    write_whole(folder / "rows.md", "\n".join(filter(None, sections)))
    console.print("\n".join(filter(None, sections)), markup=False)
    for name, made in found.items():
        if made.failed:
            last = made.output.strip().splitlines()[-1:] or ["it said nothing"]
            where = folder / f"{name}.log"
            raise UserError(f"the piece {name} failed with {made.status}: {last[0]}; see {where}")
    if left_over := [name for name, made in found.items() if not made.done]:
        console.print(f"left: {', '.join(left_over)}; the same command goes on")
        sys.exit(MORE)


def known(piece: Piece, folder: Path) -> Outcome:
    """What earlier calls made of this very command."""
    path = folder / f"{piece.name}.json"
    found = read_record(Outcome, path) if path.exists() else None
    same = found is not None and found.command == list(piece.command)
    return found if found and same else Outcome(list(piece.command))


def carried_out(piece: Piece, before: Outcome, seconds: float, dry: bool, folder: Path) -> Outcome:
    """Run a piece for at most so many seconds, after which it is interrupted as by Ctrl-C. One
    that cannot resume has then failed."""
    device = {"DRAFTSMITH_TEST_DEVICE": "cuda"}
    if dry:  # nor is anything compiled, which takes minutes
        device = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    started = time.monotonic()
    log = folder / f"{piece.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            piece.command,
            cwd=ROOT,
            env=os.environ | device | {"COLUMNS": "200", "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None if piece.resumes else -signal.SIGINT
        finally:
            _stop(process)
    spent = before.seconds + time.monotonic() - started
    output = log.read_text(errors="replace")
    return Outcome(before.command, status, before.calls + 1, spent, output)


def _stop(process: subprocess.Popen) -> None:
    """Interrupt a process and what it started, and kill them where they do not end."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def section(piece: Piece, made: Outcome, folder: Path) -> str:
    """The figures of a piece that is done, as a section of Markdown; empty for another."""
    if not made.done:
        return ""
    lines = markdown(made.output)
    if piece.name == "tests":
        lines = lines[-1:]
    elif piece.name == "head":
        lines = _figures(Results.read(folder / "head" / "report"))
    spent = f"{made.seconds / 60:.1f} minutes, begun {made.calls} times"
    return "\n".join([f"## {piece.title}", "", f"{spent}.", "", *lines, ""])


def markdown(output: str) -> list[str]:
    """The tables in a command's output as Markdown tables, and the lines between them."""
    lines: list[str] = []
    inside = False
    for line in output.splitlines():
        if re.match(r"[\w ]*:?\s*\d+%", line):  # of a progress bar
            continue
        bordered = re.fullmatch(r"[│┃](.*)[│┃]", line.strip())
        cells = re.split("[│┃]", bordered[1]) if bordered else re.split(r"\s{2,}", line.strip())
        if len(cells) > 1:
            lines += [""] * (not inside and bool(lines) and lines[-1] != "")
            lines.append("| " + " | ".join(cell.strip() for cell in cells) + " |")
            lines += [] if inside else ["|" + " --- |" * len(cells)]
            inside = True
        elif not re.fullmatch(r"[─━┏┓┡┩├┤└┘┬┴┼╇┳╈╋┻ ]*", line):
            lines += [""] * inside + [line]
            inside = False
    return lines


def _figures(found: Results) -> list[str]:
    """The head's figures: a row for each temperature."""
    assert found.training is not None
    lines = [
        f"{found.training.tokens:,} tokens, {found.training.tokens_per_second:,.0f} a second; "
        f"{found.prompts} prompts of up to {found.max_new_tokens} new tokens; {found.machine}.",
        "",
        "| T | τ | times plain | tokens/s | plain | α at depth 0 |",
        "|" + " --- |" * 6,
    ]
    for at in found.temperatures:
        alpha = at.alpha.all.of(at.temperature)[0]
        speeds = (at.tokens_per_second, at.plain_tokens_per_second)
        cells = (at.tau, at.speedup, *(f"{x.value:.1f}" for x in speeds), alpha)
        lines.append(f"| {at.temperature:g} | " + " | ".join(map(str, cells)) + " |")
    return lines

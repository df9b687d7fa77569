"""Kills runs on two processes again and again; they must end as if undisturbed."""

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import psutil
from benches.launching import FLAGS, ROOT, launched, require_done
from benches.turns import show

from specdec.errors import UserError, require
from specdec.files import make_folder
from specdec.progress import console

RANKS, LAUNCHER = ([0], [1], [0, 1]), [-1]  # who is killed
CHATS = 60  # 12 batches of responses, 30 rows of hidden states, 12 steps an epoch
# phase → the places at which it can be cut, and up to which call they surely come in every life
PHASES = {
    "responses": (("response", 2), ("response_file", 1)),
    "hidden_states": (("hidden_state_row", 6), ("hidden_state_file", 1)),
    "training": (("lr", 4), ("evaluation", 1)),
    "checkpoints": (("checkpoint", 2), ("half", 2), ("half_best", 1)),
}
ONLY_MAIN = ("half", "half_best")  # places that no other rank comes to
ATTEMPTS = 5
SOON = 0.06  # seconds after a place's beginning within which the kill comes; a step takes some 0.03


@dataclass
class KilledRun:
    """A run of two processes: how they share the draft, whose responses it reads, and its kills, as
    the arguments of `tests.kills.Death`."""

    kind: str
    responses: str
    deaths: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.responses}"


def kills(
    *,
    count: Annotated[int, "SIGKILLs of one rank or of both"] = 20,
    seed: Annotated[int, "of the moments and of who is killed"] = 1,
    folder: Annotated[
        Path | None, "a new folder for the runs; default: one that is removed"
    ] = None,
) -> None:
    """SIGKILLs at random moments of runs on two processes, DDP and FSDP2: each resumes bit for bit.

    Four runs of a tiny random target on the CPU in float32, with the responses and hidden states of
    the target or of the data, are killed in responses, hidden states, training and checkpoints.
    After each kill the same command is started again. Then the launcher alone is killed, and its
    ranks must end. At the end, each run must have the losses, figures, weights and optimisers of an
    undisturbed one.
    """
    with TemporaryDirectory() as temporary:
        place = make_folder((folder or Path(temporary)).resolve())
        require(not any(place.iterdir()), f"--folder {place} is not empty: give a new one")
        tiny = f"from tests.tiny import make_tiny; make_tiny(Path({str(place)!r}), {CHATS})"
        _python(tiny)
        rows = list[list[str]]()
        for run in planned(count, seed):
            whole = _overrides(place, run, "whole")
            require_done(
                launched(("train.py", *whole), kind=run.kind), f"{run.name}: the run left alone"
            )
            rows += _killed(place, run)
            console.print(f"{run.name}: bit-identical after {len(run.deaths)} kills")
        show(["run", "moment", "killed"], rows)
        ranks = sum(row[2] != "launcher" for row in rows)
        console.print(
            f"{ranks} kills of ranks and {len(rows) - ranks} of launchers: all runs are "
            "bit-identical to those left alone"
        )


def _killed(place: Path, run: KilledRun) -> list[list[str]]:
    """Kill the run at all of its moments, let it end, and compare it with an undisturbed run.
    Returns the moments. On a fast machine, a phase may end within a delay, and the next kill then
    comes too late: the run is started again, with delays half as long. Raises UserError if a
    process fails or survives, if the runs differ, or if kills come too late `ATTEMPTS` times."""
    for attempt in range(ATTEMPTS):
        name, rows = f"killed-{attempt}", list[list[str]]()
        overrides = _overrides(place, run, name)
        for number, planned_death in enumerate(run.deaths):
            death = planned_death | {"delay": planned_death["delay"] / 2**attempt}
            notes = make_folder(place / "notes" / run.name / name / str(number))
            killing = ("-m", "tests.kills", json.dumps(death), str(notes), *overrides)
            done = launched(killing, kind=run.kind)
            came = (notes / "killed").exists()
            moment = f"{death['place']} {death['call']} + {1000 * death['delay']:.0f} ms"
            failed = f"{run.name}: failed without a kill at {moment}:\n{done.stdout[-2000:]}"
            require(came or done.returncode == 0, failed)
            if not came or done.returncode == 0:
                console.print(run.name, moment, "too late: begun anew", sep=" | ")
                break
            _require_ended(notes)
            who = [("rank", "launcher")[x < 0] + f" {x}" * (x >= 0) for x in death["victims"]]
            rows.append([run.name, moment, " and ".join(who)])
            console.print(*rows[-1], sep=" | ")
        else:
            done = launched(("train.py", *overrides), kind=run.kind)
            require_done(done, f"{run.name}: the last life")
            paths = [str(place / f"{run.kind}-{run.responses}-{x}") for x in (name, "whole")]
            _python(f"from tests.runs import require_same_run as f; f(*map(Path, {paths}))")
            return rows
    raise UserError(f"{run.name}: kills came too late {ATTEMPTS} times: give another --seed")


def planned(count: int, seed: int) -> list[KilledRun]:
    """The four runs with `count` kills of ranks in total, and one of the launcher in each. A run's
    kills follow its phases, the later ones in turn. The first phase is killed at its first place
    and then at its second, since a first kill near its end could come too late."""
    draw = random.Random(seed)
    runs = [KilledRun(kind, responses) for responses in ("target", "data") for kind in FLAGS]
    for n in range(count + len(runs)):
        run, turn = runs[n % len(runs)], n // len(runs)
        first = "responses" if run.responses == "target" else "hidden_states"
        later = ("training", "checkpoints")[turn % 2]
        place, calls = PHASES[first][turn] if turn < 2 else draw.choice(PHASES[later])
        victims = draw.choice(RANKS) if n < count else LAUNCHER
        at = 0 if place in ONLY_MAIN else draw.randrange(2)
        delay = round(draw.uniform(0.001, SOON), 4)
        run.deaths.append(
            {"at": at, "place": place, "call": draw.randint(1, calls), "delay": delay}
            | {"victims": victims}
        )
    return runs


def _overrides(place: Path, run: KilledRun, name: str) -> list[str]:
    """The command line of `train.py` for a run, with caches of its own."""
    folder = place / f"{run.kind}-{run.responses}-{name}"
    more = [f"responses.root={folder}-answers", f"hidden_states.root={folder}-features"]
    more += [f"data.responses={run.responses}", "responses.batch=4"]
    more += [f"loop.epochs={1 + len(run.deaths) // 2}"]
    more += ["loop.accumulate=1", "loop.save_every=2", "loop.eval_every=3", "decode.prompts=1"]
    tiny = "Tiny(place, place / 'target', place / 'chats.jsonl')"
    code = "import json; from tests.tiny import Tiny; from train import run_config; "
    code += "run_config.register(); "
    code += f"place = Path({str(place)!r}); usual = run_config.composed([]).drafter.name; "
    code += f"print(json.dumps({tiny}.overrides(usual, *{more})))"
    return [*json.loads(_python(code)), f"hydra.run.dir={folder}"]


def _require_ended(notes: Path, within: float = 60.0) -> None:
    """Raise UserError unless both ranks end, without help if the launcher was killed."""
    until = time.monotonic() + within
    for path in notes.glob("[01]"):  # one that was killed at once may have noted nothing
        while _lives(int(path.read_text(encoding="utf-8"))):
            require(time.monotonic() < until, f"rank {path.name} lives on after its launcher")
            time.sleep(0.1)


def _lives(process: int) -> bool:
    """Whether a process runs. A zombie, whose exit status was not read, has ended."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _python(code: str) -> str:
    """The output of a line of Python that uses the tests' own modules."""
    code = f"from pathlib import Path; {code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    require(done.returncode == 0, f"{code}: {done.stderr[-2000:]}")
    return done.stdout

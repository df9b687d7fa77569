"""Signals, closed or narrow output streams, and exit codes of commands.

Run alone: python -m pytest tests/test_signals.py
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress

from specdec import signals
from specdec.errors import command
from specdec.files import read_json
from specdec.signals import Terminated
from tests.processes import environment, launched
from tests.runs import require_same_run
from tests.tiny import REPOSITORY, Tiny
from train import loop
from train.held_out import TerminatedTogether

pytestmark = pytest.mark.usefixtures("one_thread")
OFTEN = ("loop.save_every=4", "loop.eval_every=3", "loop.log_every=4")  # of 12 steps


def _terminating(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """A function whose n-th call is followed by SIGTERM, and by another one, as a launcher that
    passes it on sends it."""
    calls: list[None] = []

    def wrapped(*args: Any, **more: Any) -> Any:
        result = function(*args, **more)
        calls.append(None)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    return wrapped


@pytest.fixture(scope="module")
def whole(tiny: Tiny) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.pipeline.finished", lambda *_: None)
        tiny.job(tiny.root / "whole", "medusa", *OFTEN)
    return tiny.root / "whole"


@pytest.mark.usefixtures("training_alone")
@pytest.mark.parametrize(
    ("place", "call", "saved"),
    [
        ("train.optim.learning_rate", 2, 2),  # between two records
        ("train.optim.learning_rate", 6, 6),  # an evaluation is due, and done by the next life
        ("train.optim.learning_rate", 12, 12),  # after the last step
        ("train.held_out.acceptance_by_response", 1, 3),  # in the middle of an evaluation
    ],
)
def test_sigterm_saves_a_checkpoint_and_the_continued_run_is_bit_identical(
    tiny: Tiny, tmp_path: Path, whole: Path, place: str, call: int, saved: int
) -> None:
    module, name = place.rsplit(".", 1)
    with pytest.MonkeyPatch.context() as patch:
        original = getattr(sys.modules[module], name)
        patch.setattr(place, _terminating(original, call))
        with signals.handled(), pytest.raises(Terminated):
            tiny.job(tmp_path / "run", "medusa", *OFTEN)
    newest = max(p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert newest == f"step-{saved:07d}"
    tiny.job(tmp_path / "run", "medusa", *OFTEN)
    require_same_run(tmp_path / "run", whole)


@pytest.mark.usefixtures("training_alone")
def test_a_step_that_outlasts_the_stated_time_ends_without_its_checkpoint(
    tiny: Tiny, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alarm, set to fire at once, stands for a step of minutes."""
    monkeypatch.setattr(signals, "SECONDS", 1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.optim, "learning_rate", _terminating(loop.optim.learning_rate, 6))
        with signals.handled(), pytest.raises(Terminated):
            tiny.job(tmp_path / "run", "medusa", *OFTEN)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-0000004"]
    tiny.job(tmp_path / "run", "medusa", *OFTEN)
    require_same_run(tmp_path / "run", whole)


def _python(code: str, **more: Any) -> subprocess.Popen[str]:
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=environment() | more.pop("env", {}),
        **(pipe | more),
    )


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted: continue"),
        (signal.SIGTERM, 143, "terminated by SIGTERM: continue"),
    ],
)
@pytest.mark.parametrize("when", ["importing", "running", "within a library"])
def test_a_signal_ends_a_command_with_one_line_and_its_exit_code(
    number: int, code: int, said: str, when: str
) -> None:
    """A library, here, makes an error of its own of an interrupted import."""
    job = "print('ready', flush=True); import time; time.sleep(60)"
    if when == "importing":
        program = "from specdec.signals import prepare_process\n"
        program += f"prepare_process('interrupted: continue')\n{job}"
    else:
        program = f"from specdec.errors import command\ndef main():\n  try:\n    {job}\n"
        caught = "KeyboardInterrupt" if when == "within a library" else "ValueError"
        program += f"  except {caught}:\n    raise ImportError('half a module')\n"
        program += "command(main, 'interrupted: continue')"
    running = _python(program)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    running.send_signal(number)
    _, errors = running.communicate(timeout=30)
    assert (running.returncode, errors.strip()) == (code, said)


def test_a_handler_of_the_launcher_stays() -> None:
    """Slurm's launcher of Hydra, submitit, handles SIGTERM itself."""
    theirs, before = (lambda *_: None), signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, theirs)
        assert command(lambda: signal.getsignal(signal.SIGTERM)) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)
    assert command(lambda: signal.getsignal(signal.SIGTERM)) is signals._terminate
    assert signal.getsignal(signal.SIGTERM) is before


PRINTS = """
from specdec.errors import command
from specdec.progress import console
def main():
    for n in range({lines}):
        console.print(f"τ {{n}}")
    open({path!r}, "w").write("done")
console.outlives_reader = {outlives}
command(main)
"""


@pytest.mark.parametrize(("outlives", "code"), [(True, 0), (False, 128 + signal.SIGPIPE)])
def test_a_reader_that_leaves_does_not_end_a_job(tmp_path: Path, outlives: bool, code: int) -> None:
    """As `train.py … | head -1`; a command that only prints ends as others do."""
    path = tmp_path / "end"
    running = _python(PRINTS.format(lines=40_000, path=str(path), outlives=outlives))
    assert running.stdout is not None and running.stderr is not None
    assert running.stdout.readline() == "τ 0\n"
    running.stdout.close()
    errors = running.stderr.read()
    assert running.wait(timeout=60) == code
    assert path.exists() == outlives
    assert ("goes on without further output" in errors) == outlives
    assert "Traceback" not in errors


def test_closed_standard_streams(tmp_path: Path) -> None:
    """As `train.py … >&- 2>&-`: else the first file that is opened becomes stdout."""
    program = PRINTS.format(lines=3, path=str(tmp_path / "end"), outlives=True)
    line = f"exec {sys.executable} -c '{program.replace(chr(39), chr(34))}' <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", line], cwd=REPOSITORY, env=environment(), timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "end").read_text() == "done"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_in_an_encoding_without_greek(tmp_path: Path, encoding: str) -> None:
    program = PRINTS.format(lines=1, path=str(tmp_path / "end"), outlives=True)
    running = _python(program, env={"PYTHONIOENCODING": encoding})
    output, errors = running.communicate(timeout=60)
    assert (running.returncode, output, errors) == (0, "\\u03c4 0\n", "")


@pytest.mark.slow
def test_train_py_is_terminated_while_it_trains(tiny: Tiny, tmp_path: Path) -> None:
    """The command itself: a checkpoint, one line, and exit code 143."""
    more = ("loop.save_every=0", "loop.eval_every=0", "loop.epochs=200", "decode.prompts=1")
    running = subprocess.Popen(
        [sys.executable, *tiny.command(tmp_path / "run", "medusa", *more)],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 90
    while not metrics.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    running.terminate()
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 143, errors
    assert "saving a checkpoint; this process ends within 20 seconds" in errors
    assert "terminated by SIGTERM: run the same command again" in errors
    assert "Traceback" not in errors
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_ends_both_after_the_same_step(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Whoever launches processes sends it to all, at moments that differ."""
    more = ("loop.save_every=0", "loop.eval_every=0", "loop.epochs=200", "decode.prompts=1")
    arguments = tiny.command(tmp_path / "run", "medusa", *more, "loop.accumulate=1")
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 90
    with launched(arguments, 2, tmp_path / "said") as children:
        while not metrics.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        children[1].terminate()
        for child in children:
            child.join(60)
        said = [(tmp_path / "said" / f"{rank}.err").read_text() for rank in range(2)]
        assert [child.exitcode for child in children] == [143, 143], said
    assert not any("Traceback" in text for text in said), said
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


def test_sigterm_after_the_reader_of_stderr_has_gone(tmp_path: Path) -> None:
    """As `train.py 2>&1 | tee log` in a group of processes to which SIGTERM is sent."""
    program = PRINTS.format(lines=40_000, path=str(tmp_path / "end"), outlives=True)
    program = (
        program.replace("command(main)", "")
        + """
import os, signal
from specdec import signals
def ends():
    main()
    with signals.checkpoint_first():
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.terminated()
        open("{0}.saved", "w").close()
        raise signals.Terminated
command(ends)
""".replace("{0}", str(tmp_path / "end"))
    )
    running = _python(program, stderr=subprocess.STDOUT)
    assert running.stdout is not None and running.stdout.readline() == "τ 0\n"
    running.stdout.close()
    assert running.wait(timeout=60) == 143
    assert (tmp_path / "end").exists() and (tmp_path / "end.saved").exists()


@pytest.mark.parametrize(
    ("raised", "processes", "saves"),
    [(Terminated, 1, True), (TerminatedTogether, 2, True), (Terminated, 2, False)],
)
def test_only_processes_that_end_together_save_together(
    monkeypatch: pytest.MonkeyPatch, raised: type[Terminated], processes: int, saves: bool
) -> None:
    """The alarm raises Terminated in one of several processes, in the middle of a collective."""
    saved: list[bool] = []

    def evaluate(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(loop, "evaluate", evaluate)
    state = SimpleNamespace(gamma=2, owed=False, metrics="")
    learner: Any = SimpleNamespace(
        state=state,
        model=None,
        accelerator=SimpleNamespace(num_processes=processes),
        forcing=SimpleNamespace(drafter=SimpleNamespace(depth=2)),
        cfg=loop.LoopConfig(),
        held_out=None,
        save_checkpoint=lambda: saved.append(state.owed),
    )
    with pytest.raises(raised):
        loop._evaluate_draft(learner, Progress())
    assert saved == [True] * saves


TERMINATED_WITHIN = """
import os, runpy, signal
import train.held_out

def responses(*given, before=train.held_out.acceptance_by_response, sent=[]):
    if os.environ["RANK"] == "1" and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))
    return before(*given)

train.held_out.acceptance_by_response = responses
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_ends_an_evaluation_in_both(
    tiny: Tiny, tmp_path: Path
) -> None:
    """After the same forward pass, with a checkpoint from which the next life evaluates first."""
    _, *more = tiny.command(tmp_path / "run", "medusa", *OFTEN, "loop.accumulate=1")
    (tmp_path / "train.py").write_text(TERMINATED_WITHIN)
    with launched([str(tmp_path / "train.py"), *more], 2, tmp_path / "said") as children:
        for child in children:
            child.join(90)
        said = [(tmp_path / "said" / f"{rank}.err").read_text() for rank in range(2)]
        assert [child.exitcode for child in children] == [143, 143], said
    assert not any("Traceback" in text for text in said), said
    (place,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert place.name == "step-0000003" and read_json(place / "training.json")["owed"]


TERMINATED_IN_A_STEP = """
import os, runpy, signal
from train import loop

def rate(*given, before=loop.optim.learning_rate, calls=[]):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 6:
        os.kill(os.getpid(), signal.SIGTERM)
    return before(*given)

loop.optim.learning_rate = rate
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_acts_in_steps_that_are_not_logged(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Both save after the step in which it came, although no figure is read before the end."""
    seldom = ("loop.save_every=0", "loop.eval_every=0", "loop.log_every=1000", "loop.epochs=50")
    _, *more = tiny.command(tmp_path / "run", "medusa", *seldom, "loop.accumulate=1")
    (tmp_path / "train.py").write_text(TERMINATED_IN_A_STEP)
    with launched([str(tmp_path / "train.py"), *more], 2, tmp_path / "said") as children:
        for child in children:
            child.join(90)
        said = [(tmp_path / "said" / f"{rank}.err").read_text() for rank in range(2)]
        assert [child.exitcode for child in children] == [143, 143], said
    assert not any("Traceback" in text for text in said), said
    (place,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert place.name == "step-0000006"

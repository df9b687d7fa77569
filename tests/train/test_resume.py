"""Runs on a tiny target that are killed, damaged, or of two processes: they equal one that was not.

Run alone: python -m pytest tests/train/test_resume.py
"""

import functools
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from specdec import progress
from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from specdec.files import read_lines, write_whole
from specdec.measure.reference import FILE
from specdec.targets.loading import TargetLoader
from tests.lives import Kill, Life, Lives
from tests.processes import forked, process, together
from tests.runs import draft, require_equal, require_same_run
from tests.tiny import DRAFTER_OVERRIDES, Tiny, losses
from train.data.sequences import Document, Row
from train.hidden_states import filling
from train.hidden_states import store as hidden_states
from train.hidden_states.batches import BatchSource, StoredBatches

TRAINABLE = [name for name in DRAFTER_OVERRIDES if (kind := DRAFTERS[name]).trains(kind.Config())]
pytestmark = pytest.mark.usefixtures("one_thread")


# Interruption

Killed = Callable[..., list[int]]


@pytest.fixture(scope="module")
def killed(tiny: Tiny) -> Killed:
    """Runs a job that dies of SIGKILL at each of the given places in turn, and then goes on to its
    end. Returns the signals."""
    lives = Lives(tiny)

    def run(folder: Path, drafter: str, kills: Sequence[Kill], *more: str) -> list[int]:
        deaths = [Life(kills={0: kill}) for kill in kills]
        ends, _ = lives.run(folder, drafter, [*deaths, Life()], *more)
        return [signal for (signal,) in ends[:-1]]

    return run


KILLS: dict[str, list[Kill]] = {
    "between_checkpoints": [("log", 2, True), ("log", 6, True), ("log", 3, False)],
    "around_a_checkpoint": [
        ("checkpoint", 2, False),
        ("checkpoint", 1, True),
        ("checkpoint", 2, True),
    ],
    "in_the_middle_of_writing": [("half", 2, False), ("half", 1, True), ("half_best", 1, True)],
    "between_two_renames": [
        ("rename", 1, False),
        ("rename", 2, True),
        ("rename", 3, True),
        ("rename", 2, True),
    ],
    "before_and_after_resuming": [
        ("hidden_states", 1, True),
        ("lr", 5, False),
        ("rewind", 1, True),
    ],
    "once": [("log", 7, True)],
}


OFTEN = ("loop.save_every=2", "loop.eval_every=3")
PLACES = [("eagle3", kills) for kills in KILLS]  # the places do not depend on the family
PLACES += [(n, "once") for n in TRAINABLE if n != "eagle3"]


@pytest.fixture(scope="module")
def whole(tiny: Tiny, killed: Killed) -> Callable[[str], Path]:
    """The folder of an uninterrupted run of each family, made as the killed ones are."""

    @functools.cache
    def run(name: str) -> Path:
        folder = tiny.root / f"whole-{name}"
        assert killed(folder, name, [], *OFTEN) == []
        return folder

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kills"), PLACES)
def test_killed_and_resumed_is_bit_identical(
    tmp_path: Path, killed: Killed, whole: Callable[[str], Path], name: str, kills: str
) -> None:
    """Saves every 2 steps and evaluates every 3: records lie after the newest checkpoint, and
    best drafts that it does not know of. The hidden states are made anew, in a cache of its own."""
    more = (*OFTEN, f"hidden_states.root={tmp_path / 'hidden_states'}")
    signals = killed(tmp_path / "cut", name, KILLS[kills], *more)
    assert signals == [signal.SIGKILL] * len(KILLS[kills])
    require_same_run(tmp_path / "cut", whole(name))
    assert not list(tmp_path.rglob("*.partial")), "half-written folders are left behind"


@pytest.mark.slow
def test_train_py_killed_at_a_length_of_metrics_and_started_again(
    tiny: Tiny, tmp_path: Path
) -> None:
    """The command itself, as a process, killed from outside whenever metrics.jsonl has grown by
    a few lines; then the same command to its end."""
    more = ("loop.save_every=2", "loop.epochs=20", "decode.prompts=1")  # 120 steps
    folder, whole = tmp_path / "cut", tmp_path / "whole"
    assert process(tiny.command(whole, "medusa", *more)).returncode == 0
    seen = 0
    for lines in (5, 17):
        running = forked(tiny.command(folder, "medusa", *more), Path(os.devnull), Path(os.devnull))
        deadline = time.monotonic() + 300
        while running.is_alive() and time.monotonic() < deadline:
            path = folder / "metrics.jsonl"
            if path.exists() and path.read_bytes().count(b"\n") >= max(lines, seen + 3):
                break
            time.sleep(0.002)
        running.kill()
        running.join()
        assert running.exitcode == -signal.SIGKILL, "it ended before it was killed"
        assert 0 < read_lines(folder / "metrics.jsonl", ["step"])[-1]["step"] < 120, (
            "it was killed, but not while it trained"
        )
        seen = (folder / "metrics.jsonl").read_bytes().count(b"\n")
    assert process(tiny.command(folder, "medusa", *more)).returncode == 0
    require_same_run(folder, whole)


def test_a_finished_run_is_not_trained_again(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    first = tiny.job(tmp_path / "run", "medusa")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    weights = draft(tmp_path / "run")
    assert tiny.job(tmp_path / "run", "medusa") == first
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines
    assert all(torch.equal(w, weights[n]) for n, w in draft(tmp_path / "run").items())


AGAIN = ["", "decode.max_new_tokens=7", "damaged", "deleted"]


@pytest.mark.parametrize("change", AGAIN)
def test_a_finished_run_is_measured_again_only_if_something_changed(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """With the same settings its results stay, times included, though it is exported again."""
    folder, few = tmp_path / "run", ["decode.prompts=2", "decode.max_new_tokens=8"]
    results, first = folder / "report" / "results.json", tiny.job(folder, "medusa", *few)
    times = json.loads(results.read_text())["measured"][0]["speedup"]
    shutil.rmtree(folder / "export")
    if change == "damaged":
        results.write_text(results.read_text().replace("1", "2", 1))
    elif change == "deleted":
        results.unlink()
    elif change:
        few = [*few, change, "export_reference=false"]
    capsys.readouterr()
    assert tiny.job(folder, "medusa", *few) == first
    said = " ".join(capsys.readouterr().out.split())
    again = json.loads(results.read_text())["measured"][0]["speedup"]
    assert (times == again) == (not change)
    assert (f"its report is {folder / 'report' / 'report.md'}; to measure" in said) == (not change)
    assert (folder / "export" / FILE).is_file() == (change != AGAIN[1])


@pytest.mark.parametrize("options", [["medusa", "combine_with=ngram"], ["ngram"]])
def test_a_finished_run_with_copying_is_not_measured_again(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """As a second draft, and alone, where there is nothing to train."""
    first = tiny.job(tmp_path / "run", *options, "decode.prompts=2")
    assert "this run is finished" not in capsys.readouterr().out
    assert tiny.job(tmp_path / "run", *options, "decode.prompts=2") == first
    assert "this run is finished" in capsys.readouterr().out


def test_a_record_cut_short_by_a_crash_does_not_stop_the_next_start(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    tiny.job(tmp_path / "whole", "medusa")
    tiny.job(tmp_path / "run", "medusa")
    for path in (tmp_path / "run" / "checkpoints").glob("step-0000012"):
        shutil.rmtree(path)  # as if killed after step 8
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "train": {"lo')
    checkpoints = tmp_path / "run" / "checkpoints"
    kept = shutil.copytree(checkpoints / "step-0000008", checkpoints / "step-0000008-keep")
    tiny.job(tmp_path / "run", "medusa")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert kept.exists(), "a user's own copy was deleted"


@pytest.mark.parametrize("kept", [0, 100], ids=["empty", "cut short"])
@pytest.mark.parametrize("file", ["training.safetensors", "training.json"])
def test_the_one_before_a_damaged_checkpoint_is_taken(
    tiny: Tiny,
    tmp_path: Path,
    training_alone: None,
    capsys: pytest.CaptureFixture[str],
    file: str,
    kept: int,
) -> None:
    """In one line that says so, and the run ends as it did; if both are damaged, it is refused."""
    run = tmp_path / "run"
    tiny.job(run, "medusa")
    whole = shutil.copytree(run, tmp_path / "whole")

    def damage(step: str) -> None:
        path = run / "checkpoints" / step / file
        path.write_bytes(path.read_bytes()[:kept])

    damage("step-0000012")
    capsys.readouterr()
    tiny.job(run, "medusa")
    said = [x for x in capsys.readouterr().err.splitlines() if "cannot be used" in x]
    assert len(said) == 1 and "training goes on from step-0000008" in said[0]
    require_same_run(run, whole)
    for step in ("step-0000008", "step-0000012"):
        damage(step)
    with pytest.raises(UserError, match=r"step-0000012 cannot be used .*no older checkpoint"):
        tiny.job(run, "medusa")
    assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == [
        "step-0000008",
        "step-0000012",
    ]


def test_a_run_config_cut_short_is_an_error_of_one_line(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    tiny.job(tmp_path / "run", "medusa")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(UserError, match=r"config\.json"):
        tiny.job(tmp_path / "run", "medusa")


# Processes

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def reasons(stderr: str) -> str:
    """What each process died of, without the launcher's words."""
    return "\n".join(x for x in stderr.splitlines() if re.search(r"rank\d.*Error|^error:", x))


@pytest.mark.slow
def test_two_processes_on_a_cpu_know_of_each_other(tiny: Tiny, tmp_path: Path) -> None:
    """Plain torchrun, no variable: one run of 6 steps of 2 · 2 rows, not two in one folder."""
    command = [*TORCHRUN, *tiny.command(tmp_path / "run", "medusa", "decode.prompts=1")]
    done = process(command)
    assert done.returncode == 0, reasons(done.stderr)
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 7))


def test_no_row_of_hidden_states_is_left_out_when_a_process_is_slow_to_look(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both share out the same list: the slow one must not see what the other made meanwhile."""
    monkeypatch.setattr(filling, "SHARD", 1)
    cfg = tiny.config("medusa", f"hidden_states.root={tmp_path}")
    target = TargetLoader(cfg.target)
    drafter = DRAFTERS["medusa"].build(cfg.drafter, target.whole()).float()
    whole, zero = np.ones(3, np.bool_), np.zeros(3, np.int32)
    position = np.arange(3, dtype=np.int32)
    rows = [Row(np.array([1, n, 2], np.int32), whole, zero, position) for n in range(3, 9)]
    look, together, ahead = (
        hidden_states.HiddenStateStore.missing,
        threading.Barrier(2),
        threading.Event(),
    )

    def missing(store: hidden_states.HiddenStateStore, rows: list[Row]) -> list[Row]:
        if threading.current_thread() is not threading.main_thread():
            ahead.wait(10)
        return look(store, rows)

    def wait() -> None:
        ahead.set()  # the main thread waits for the other, or has filled its share
        together.wait(10)

    def share(rank: int) -> BatchSource:
        everyone: Any = SimpleNamespace(num_processes=2, process_index=rank, wait_for_everyone=wait)
        with progress.bars(Console(quiet=True), False) as bar:
            states = filling.RunHiddenStates.of_run(
                stored=cfg.hidden_states,
                drafter=cfg.drafter,
                sampler=cfg.sampler,
                length=cfg.data.max_length,
                keeps_layers=cfg.needs_layers,
                target=target,
                accelerator=everyone,
                progress=bar,
            )
            return states.sources(drafter, texts)[0]

    texts: list[list[Document]] = [[]]
    monkeypatch.setattr(filling, "pack_rows", lambda *_: rows)
    monkeypatch.setattr(hidden_states.HiddenStateStore, "missing", missing)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(share, 1)
        disk = share(0)
        other.result()
    assert isinstance(disk, StoredBatches)
    assert look(disk.store, rows) == []


def test_a_file_is_read_whole_while_another_process_writes_it(tmp_path: Path) -> None:
    path, text = tmp_path / "meta.json", "x" * 100_000
    write_whole(path, text)
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(lambda: [write_whole(path, text) for _ in range(200)])
        while not writing.done():
            assert path.read_text() == text
        writing.result()
    assert [p.name for p in tmp_path.iterdir()] == ["meta.json"]


def test_a_damaged_description_of_a_hidden_state_cache_is_named(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    root = f"hidden_states.root={tmp_path / 'hidden_states'}"
    tiny.job(tmp_path / "a", "medusa", root)
    for path in (tmp_path / "hidden_states").rglob("meta.json"):
        path.write_text("")
    with pytest.raises(UserError, match=r"meta\.json is damaged.*delete that folder"):
        tiny.job(tmp_path / "b", "medusa", root)


@pytest.mark.slow
def test_two_processes_are_one_that_accumulates(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    """Both read the same micro-batches and sum the same gradients, but in another order and as two
    halves (the all-reduce's mean, times two). Float32 rounding, 6e-8 per operation, grows to some
    1e-6 over 12 steps of AdamW; the tolerance is 1e-5, relative. The variable is what
    `accelerate launch --cpu` sets. One start of the processes, which takes longer than training,
    serves all families."""
    tail = f"hidden_states.root={tmp_path / 'hidden_states'}"
    alone = ("hidden_states.mode=none", "loss=ce", "drafter.initialisation=random")
    runs: dict[str, tuple[str, tuple[str, ...]]] = {name: (name, ()) for name in TRAINABLE}
    runs["text"] = "eagle3", alone
    jobs = [
        (tiny.overrides(name, tail, *more, "loop.accumulate=1"), str(tmp_path / f"two-{run}"))
        for run, (name, more) in runs.items()
    ]
    for run, (name, more) in runs.items():
        tiny.job(tmp_path / run, name, tail, *more)
    (tmp_path / "driver.py").write_text(SEVERAL)
    command = [str(tmp_path / "driver.py"), json.dumps(jobs)]
    together(command, 2, tmp_path / "said", timeout=400, ACCELERATE_USE_CPU="true")
    for run, (name, _) in runs.items():
        require_equal(name, tmp_path / f"two-{run}", tmp_path / run)


SEVERAL = """
import json, sys
from tests.tiny import compose
from train import launcher, pipeline
pipeline.finished = lambda *_: None
with launcher.exiting_at_once():
    for overrides, folder in json.loads(sys.argv[1]):
        pipeline.run(compose(overrides), folder)
"""


def test_cutting_a_step_otherwise_changes_rounding_only(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    """2 rows in one micro-batch = 2 micro-batches of 1 row: rel 1e-5, for float32 sums in
    another order."""
    tiny.job(tmp_path / "a", "eagle3", "loop.rows=2", "loop.accumulate=1")
    tiny.job(tmp_path / "b", "eagle3", "loop.rows=1", "loop.accumulate=2")
    for (step, ours), (_, theirs) in zip(
        losses(tmp_path / "a"), losses(tmp_path / "b"), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5), step

"""Files of a run and of its caches that are damaged: found, and never used without a word.

Run alone: python -m pytest tests/train/test_damage.py (a run is continued for each damage)
All 60: python -m pytest tests/train/test_damage.py -m slow
"""

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import progress
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.integrity import of_tensors
from specdec.measure.results import FILE, Results
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.damage import corrupt
from tests.measure.test_results import results
from tests.tiny import losses, make_tiny
from train import pipeline, training_checkpoint
from train.tracking import curve

pytestmark = pytest.mark.usefixtures("one_thread")
MORE = ("data.responses=target", "responses.max_new_tokens=6", "loop.epochs=1", "loop.eval_every=2")
MORE += ("loop.save_every=2", "budget.minutes=0.001", "budget.floor=24", "data.max_length=64")
MORE += ("loop.accumulate=1", "loop.max_tokens=480", "loop.select_by=alpha_sampled")
FAMILY = "medusa"
CACHES = ("hidden_states/*/*", "responses/*/*", "targets/fingerprints/*")


class Runs:
    """A run that was interrupted between two checkpoints, its caches, and another run's beside it,
    as they were written. `work` is where they lie, and `again` puts them back there."""

    def __init__(self, root: Path) -> None:
        self.work, self.pristine = root / "work", root / "pristine"
        self.tiny = make_tiny(self.work)
        self.run, self.other = self.work / "run", self.work / "other"
        save = training_checkpoint.save

        def killed(folder: Path, *args: Any) -> None:
            if len(training_checkpoint.steps(folder)) == 2:  # those of steps 2 and 4
                raise KeyboardInterrupt
            save(folder, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training_checkpoint, "save", killed)
            with pytest.raises(KeyboardInterrupt):
                self.job(self.run)
        self.caches = [p for n in CACHES for p in sorted(self.work.glob(n))]
        self.job(self.other, "loop.seed=1", "responses.seed=3", "sampler.top_p=0.9")
        for run in (self.run, self.other):
            (run / "report").mkdir()
            results().write(run / "report")
        target = load_target(TargetConfig(str(self.tiny.target), "float32"))
        for run in (self.run, self.other):
            drafter = draft_checkpoint.read_draft(run / "best", target)
            draft_checkpoint.write_calibrations(run / "best", drafter)
        shutil.copytree(self.work, self.pristine)

    def job(self, folder: Path, *more: str) -> float:
        return self.tiny.job(folder, FAMILY, *MORE, *more)

    def again(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.pristine, self.work)

    def files(self) -> list[Path]:
        """Everything that the run reads again, but what the user gave."""
        places = [self.run / x for x in ("config.json", "budget.json", "metrics.jsonl")]
        places += [self.run / "report" / FILE]
        for pattern in ("checkpoints/*/*", "best/*"):
            places += sorted(self.run.glob(pattern))
        return places + self.caches

    def others(self, path: Path) -> list[Path]:
        """Files of the same kind: of another step, run or cache."""
        alike = [p for p in self.work.rglob(f"*{path.suffix}") if p.is_file() and p != path]
        same = [p for p in alike if p.name == path.name]
        return same or [p for p in alike if p.parent.parent == path.parent.parent]

    def outcome(self) -> dict[str, Any]:
        """Continue the run, and read what it left: figures of all that it computed."""
        self.job(self.run)
        newest = max((self.run / "checkpoints").glob("step-*"))
        target = load_target(TargetConfig(str(self.tiny.target), "float32"))
        drafter = draft_checkpoint.load_draft(self.run / "best", target)
        measured = Results.load(self.run / "report")
        return json.loads(
            json.dumps(
                {
                    "losses": losses(self.run),
                    "state": of_tensors(load_file(newest / "training.safetensors")),
                    "best": of_tensors(drafter.state_dict()),
                    "calibrations": asdict(drafter.calibrations),
                    "results": asdict(measured),
                    "curve": asdict(curve(self.run / "metrics.jsonl")),  # type: ignore[arg-type]
                }
            )
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pipeline, "finished", lambda *_: None
        )  # what follows training is not at stake
        yield Runs(tmp_path_factory.mktemp("runs"))


def apart(work: Callable[[], Any], said: Path) -> dict[str, Any]:
    """What `work` returns or raises in a process of its own, and what it prints; a process that
    crashes gives the signal."""
    pid = os.fork()
    if pid == 0:
        ended: dict[str, Any] = {}
        try:
            with said.with_suffix(".out").open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                sys.stdout = sys.stderr = progress.console.file = out
                progress.tell.cache_clear()
                try:
                    ended["value"] = work()
                except UserError as error:
                    ended["refused"] = str(error)
                except BaseException:
                    ended["traceback"] = traceback.format_exc()
                out.flush()
            said.write_text(json.dumps(ended))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if not said.exists():
        return {"crashed": status}
    ended = json.loads(said.read_text())
    said.unlink()
    return ended | {"said": said.with_suffix(".out").read_text()}


WORDS = ("damaged", "cannot be used", "cannot be read", "was best", "to be added")


def judged(runs: Runs, whole: dict[str, Any], seed: int, scratch: Path) -> str:
    """How a run with this damage ended: "refused", "harmless", "told", or what is wrong."""
    runs.again()
    what = corrupt(runs.files(), runs.others, seed)
    ended = apart(runs.outcome, scratch / "ended")
    if "crashed" in ended or "traceback" in ended:
        return f"{what}: {ended.get('traceback') or ended['crashed']}"
    if "refused" in ended:
        return "refused" if "\n" not in ended["refused"] else f"{what}: {ended['refused']}"
    if ended["value"] == whole:
        return "harmless"
    told = [line for line in ended["said"].splitlines() if any(w in line for w in WORDS)]
    different = [name for name, x in whole.items() if ended["value"][name] != x]
    return "told" if told else f"{what}: used silently; {different} differ"


def require_found(runs: Runs, seeds: Sequence[int], scratch: Path) -> dict[str, int]:
    runs.again()
    whole = apart(runs.outcome, scratch / "ended")
    assert "value" in whole, whole
    counts: dict[str, int] = {}
    for seed in seeds:
        verdict = judged(runs, whole["value"], seed, scratch)
        counts[verdict] = counts.get(verdict, 0) + 1
    assert set(counts) <= {"refused", "harmless", "told"}, "\n".join(counts)
    return counts


def test_damage_is_refused_or_told(runs: Runs, tmp_path: Path) -> None:
    counts = require_found(runs, range(30), tmp_path)
    assert counts["refused"] and counts["told"] + counts["harmless"]


@pytest.mark.slow
def test_60_damages_are_refused_or_told(runs: Runs, tmp_path: Path) -> None:
    counts = require_found(runs, range(1000, 1060), tmp_path)
    print(counts)


@pytest.mark.parametrize(
    "what", ["metrics.jsonl", ".lock", "config.json", "responses", "hidden_states"]
)
def test_a_named_pipe_in_the_place_of_a_file_does_not_hang(
    runs: Runs, tmp_path: Path, what: str
) -> None:
    """An alarm would kill the process that waits for somebody to write into the pipe."""
    runs.again()
    cached = [p for p in runs.caches if what in p.parts and p.suffix != ".json"]
    path = cached[0] if cached else runs.run / what
    path.unlink()
    os.mkfifo(path)

    def work() -> None:
        signal.alarm(60)
        runs.job(runs.run)

    ended = apart(work, tmp_path / "ended")
    assert "crashed" not in ended and "traceback" not in ended, ended
    assert str(path) in ended.get("refused", ended["said"])


# One by one


def flip(path: Path, at: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)


def shards(runs: Runs) -> list[Path]:
    return [p for p in runs.caches if p.suffix == ".safetensors"]


def test_a_damaged_document_is_computed_again_and_the_others_are_kept(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a run, which has the target's parts alone. What is damaged in each file is
    one number of one document; what is read of them is then what was written, to rounding, and the
    next start finds nothing to do."""
    runs.again()
    for path in shards(runs):
        flip(path, path.stat().st_size - 5)
    progress.tell.cache_clear()
    capsys.readouterr()
    runs.job(runs.run)
    said = [x for x in capsys.readouterr().err.splitlines() if "computed again" in x]
    assert 1 <= len(said) <= len(shards(runs)) and all("checksum" in x for x in said)
    folder = shards(runs)[0].parent
    stored: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
    written: dict[str, torch.Tensor] = {}
    for path in shards(runs):
        written |= load_file(runs.pristine / path.relative_to(runs.work))
    assert {n.split(".")[0] for n in written} >= {n.split(".")[0] for n in stored}
    others = [
        name
        for name, x in stored.items()
        # nothing reads the hidden states of a document's last token, which answering does not
        # compute
        if not torch.allclose(x[:-1], written[name][:-1], atol=1e-5, rtol=1e-5)
    ]
    assert len(others) == len(shards(runs)) - len(said)  # those that no step has read since
    runs.job(runs.run)
    assert "computed again" not in capsys.readouterr().err


def test_a_damaged_answer_is_written_again_as_it_was(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """An id that is plausible, a line that is cut, and a line of another seed's responses."""
    runs.again()
    (path, *_) = [p for p in runs.caches if p.suffix == ".jsonl"]
    lines = path.read_text().splitlines()
    (other, *_) = [p for p in runs.work.glob("responses/*/*.jsonl") if p.parent != path.parent]
    stranger = other.read_text().splitlines()[0]
    first = json.loads(lines[0])
    first["ids"][0] = (first["ids"][0] + 1) % 90
    path.write_text("\n".join([json.dumps(first), lines[1][:-9], stranger, *lines[2:]]) + "\n")
    progress.tell.cache_clear()
    capsys.readouterr()
    runs.job(runs.run)
    said = [x for x in capsys.readouterr().err.splitlines() if "damaged lines" in x]
    assert len(said) == 1 and f"3 in {path.name}" in said[0]


def stripped(path: Path) -> dict[str, Any]:
    """The state of a checkpoint as an earlier version wrote it."""
    state = json.loads(path.read_text())
    return {k: x for k, x in state.items() if k not in ("checksum", "run", "metrics", "tensors")}


def moments(tensors: dict[str, torch.Tensor], key: str) -> list[str]:
    return [name for name in tensors if name.endswith(f"|{key}")]


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "moments of another shape": lambda x: x.update(
        {n: torch.zeros(1) for n in moments(x, "exp_avg")}
    ),
    "a moment below 0": lambda x: [x[n].fill_(-1) for n in moments(x, "exp_avg_sq")],
    "a moment that is missing": lambda x: x.pop(moments(x, "exp_avg_sq")[0]),
    "a moment of no parameter": lambda x: x.update({"optimizer.x|exp_avg": torch.zeros(1)}),
    "a moment of whole numbers": lambda x: x.update({n: x[n].int() for n in moments(x, "exp_avg")}),
    "a weight that is not finite": lambda x: next(
        x[n] for n in x if n.startswith("model.") and x[n].is_floating_point()
    ).fill_(torch.nan),
    "weights of another type": lambda x: x.update(
        {n: x[n].half() for n in x if n.startswith("model.") and x[n].is_floating_point()}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_does_not_fit_the_model_is_not_used_even_without_a_checksum(
    runs: Runs, change: Callable[[dict[str, torch.Tensor]], Any], tmp_path: Path
) -> None:
    """Moments of another shape once reached the fused optimiser, and ended in a crash."""
    runs.again()
    place = runs.run / "checkpoints" / "step-0000004"
    (place / "training.json").write_text(json.dumps(stripped(place / "training.json")))
    tensors = load_file(place / "training.safetensors")
    change(tensors)
    save_file(tensors, place / "training.safetensors")
    ended = apart(lambda: runs.job(runs.run), tmp_path / "ended")
    assert "value" in ended, ended
    assert "step-0000004 cannot be used" in ended["said"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 3}, "is of step 3"),
        ({"step": -1}, "state.step=-1"),
        ({"seconds": float("nan")}, "state.seconds=nan"),
        ({"optimizer": [{"params": ["nobody"]}]}, "a group does not fit"),
        ({"optimizer": [{"params": [["x"]]}]}, "a group does not fit"),
        ({"optimizer": [3]}, "expected an object"),
    ],
)
def test_a_state_that_no_run_has_is_not_used(
    runs: Runs, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    runs.again()
    path = runs.run / "checkpoints" / "step-0000004" / "training.json"
    path.write_text(json.dumps(stripped(path) | change))
    ended = apart(lambda: runs.job(runs.run), tmp_path / "ended")
    assert "value" in ended, ended
    assert "step-0000004 cannot be used" in ended["said"] and words in ended["said"]


def test_a_checkpoint_and_a_draft_of_another_run_are_not_used(runs: Runs, tmp_path: Path) -> None:
    runs.again()
    for step in training_checkpoint.steps(runs.run / "checkpoints"):
        shutil.rmtree(step)
    shutil.copytree(runs.other / "checkpoints", runs.run / "checkpoints", dirs_exist_ok=True)
    ended = apart(lambda: runs.job(runs.run), tmp_path / "ended")
    assert "is of another run" in ended["refused"]
    runs.again()
    shutil.rmtree(runs.run / "best")
    shutil.copytree(runs.other / "best", runs.run / "best")
    ended = apart(lambda: runs.job(runs.run), tmp_path / "ended")
    assert "is the draft of another run" in ended["refused"]


def test_an_edited_metrics_file_is_told(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """And a record that holds no figures is left out of the curve."""
    runs.again()
    path = runs.run / "metrics.jsonl"
    first, *rest = path.read_text().splitlines()
    odd = {"step": 1, "train": {"loss": ["x"], "sampled": 3}}
    path.write_text("\n".join([first.replace("0.", "1.", 1), json.dumps(odd), *rest]) + "\n")
    progress.tell.cache_clear()
    runs.job(runs.run)
    assert "metrics.jsonl is damaged or was edited" in capsys.readouterr().err
    found = curve(path)
    assert found is not None and len(found.steps) == len(found.loss) == len(found.sampled) == 8


@pytest.mark.parametrize("name", ["config.json", "budget.json"])
def test_an_edited_setting_of_a_run_is_refused(runs: Runs, name: str) -> None:
    runs.again()
    path = runs.run / name
    value = json.loads(path.read_text())
    value["prompts" if name == "budget.json" else "name"] = 1 if name == "budget.json" else "x"
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match=rf"{name}.*was edited.*give another name="):
        runs.job(runs.run)

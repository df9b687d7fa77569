"""scripts/compare: two drafts on prompts that neither was trained on, two reports, and mistakes.

Run alone: python -m pytest tests/scripts/test_compare.py
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specdec.formats import draft_checkpoint
from tests.measure.test_comparison import A, B
from tests.processes import process
from tests.tiny import Tiny
from tests.told import require_one_line
from train import pipeline
from train.data.prompts_trained_on import TrainedOn, not_trained_on, trained_on
from train.data.sequences import Prompt
from train.folder import noted_prompts

SMALL = ["--max-new-tokens", "6", "--temperatures", "0", "--dtype", "float32"]


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same data, without what follows their training."""
    folder = tmp_path_factory.mktemp("compare")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "finished", lambda *_: None)
        tiny.job(folder / "a", "medusa", "decode.prompts=4")
        tiny.job(folder / "b", "eagle3", "decode.prompts=4", "drafter.depth=2")
    return folder


def compared_by_script(*arguments: str | Path) -> str:
    done = process(["scripts/compare", *map(str, arguments)])
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def refused(arguments: Sequence[str | Path], *parts: str) -> None:
    done = process(["scripts/compare", *map(str, arguments)])
    assert done.returncode == 2, done.stdout
    require_one_line(done.stderr, *parts)


@pytest.mark.slow
def test_two_drafts_are_measured_on_the_held_out_prompts_of_their_runs(
    runs: Path, tmp_path: Path
) -> None:
    a, b, out = runs / "a" / "best", runs / "b" / "best", tmp_path / "out"
    said = compared_by_script(a, b, "--limit", "4", "--timed", "3", *SMALL, "--out", out)
    assert "left out" not in said and "measures on 4 held-out prompts of both runs" in said
    found = json.loads((out / "compare.json").read_text())
    assert (found["prompts"], found["a"], found["b"]) == (4, str(a), str(b))
    (way,) = found["ways"]
    names = [figure["name"] for figure in way["figures"]]
    assert names == ["τ", "α at depth 0", "α at depth 1", "speedup"]
    assert way["figures"][-1]["prompts"] == 3
    assert re.search(r"(A|B) accepts more at T = 0|o difference in acceptance is shown", said)
    assert (out / "compare.html").exists()


@pytest.mark.slow
def test_all_turns_of_a_file_are_compared(runs: Path, tmp_path: Path) -> None:
    """Five conversations of two turns each: ten prompts, and intervals over five conversations."""
    suite = tmp_path / "suite.jsonl"
    turns = ({"turns": [f"a {word}", "and then"]} for word in ["cat", "dog", "sun", "sky", "tree"])
    suite.write_text("".join(json.dumps(record) + "\n" for record in turns))
    drafts, out = [runs / "a" / "best", runs / "b" / "best"], tmp_path / "out"
    said = compared_by_script(*drafts, "--prompts", suite, "--timed", "4", *SMALL, "--out", out)
    assert "measures on 10 turns of 5 conversations" in " ".join(said.split())
    found = json.loads((out / "compare.json").read_text())
    assert found["prompts"] == 10
    last = compared_by_script(
        *drafts, "--prompts", suite, "--turns", "last", "--timed", "3", *SMALL
    )
    assert "measures on 5 prompts of" in " ".join(last.split())
    refused([*drafts, "--turns", "all"], "--turns all is for conversations of your own")
    refused([*drafts, "--suite", "mt_bench", "--prompts", suite], "give one of them")


@pytest.mark.slow
def test_equal_drafts_show_no_difference_and_prompts_that_one_knows_are_left_out(
    runs: Path, tmp_path: Path
) -> None:
    """The copy of A in a folder without a run was also trained on two of the held-out prompts."""
    noted = noted_prompts(runs / "a", 1)
    assert noted is not None
    test = noted[0]
    copied = tmp_path / "copy"
    copied.mkdir()
    for path in (runs / "a" / "best").iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    known = trained_on(runs / "a" / "best")
    assert known is not None
    known.joined(TrainedOn.of_texts(test[:2])).write(copied)
    count = sum(not np.isin(p.opening, [x.opening for x in test[:2]]) for p in test)
    said = compared_by_script(runs / "a" / "best", copied, "--limit", f"{len(test)}", *SMALL)
    gone = re.search(r"(\d+) of (\d+) prompts of A's run are left out: B was trained on them", said)
    assert gone is not None and int(gone[2]) == len(test) and 2 <= int(gone[1]) < len(test)
    assert count >= len(test) - int(gone[1])
    assert f"measures on {len(test) - int(gone[1])} held-out prompts" in " ".join(said.split())
    assert "No difference in acceptance is shown at T = 0: τ +0.00, the same on all" in " ".join(
        said.split()
    )


def test_prompts_that_a_draft_was_trained_on_by_hand(tmp_path: Path) -> None:
    ids = np.array([1], np.int32)
    texts = ["what is the capital of France", "name three rivers in Asia", "tell me of owls"]
    prompts = [Prompt(text, ids, opening=text, placed=text) for text in texts]
    assert not_trained_on(prompts, tmp_path) == (prompts, False)  # no record
    TrainedOn.of_texts(prompts[:1]).write(tmp_path)
    assert not_trained_on(prompts, tmp_path) == (prompts[1:], True)
    alike = [Prompt(f"{n}", ids, opening="hi", placed=f"hi {text}") for n, text in enumerate(texts)]
    TrainedOn.of_texts(alike[:1]).write(tmp_path)  # all open alike: placed by more of their text
    assert not_trained_on(alike, tmp_path) == (alike[1:], True)


def test_reports_are_compared_without_any_model(tmp_path: Path) -> None:
    """By the folder of a run, of a report, or its file."""
    (tmp_path / "a" / "report").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    A.write(tmp_path / "a" / "report")
    B.write(tmp_path / "b")
    for b in (tmp_path / "b", tmp_path / "b" / "results.json"):
        said = " ".join(compared_by_script(tmp_path / "a", b).split())
        assert "B accepts more at T = 0: τ +0.25 [+0." in said and "on 4 prompts" in said


def test_mistakes_are_a_line(tiny: Tiny, runs: Path, tmp_path: Path) -> None:
    A.write(tmp_path)
    (tmp_path / "old").mkdir()
    old = json.loads((tmp_path / "results.json").read_text())
    for key in ("prompt_keys", "target_fingerprint", "checksum"):
        old.pop(key, None)
    (tmp_path / "old" / "results.json").write_text(json.dumps(old))
    draft = runs / "a" / "best"
    refused([tmp_path, draft], "A .* is a report and the other is not: give two reports")
    refused([tmp_path, tmp_path / "old"], "old has no figures by prompt", "scripts/evaluate")
    refused([tmp_path, tmp_path, "--gamma", "2"], "--gamma cannot be combined with two reports")
    refused([draft, tmp_path / "none"], "none holds no draft")
    refused([draft, draft, "--with", "suffix"], "--with is for one draft")
    refused([draft, draft, "--limit", "0"], "--limit 0: give 1 or more")
    alone, other = tmp_path / "alone", tmp_path / "other"
    for folder in (alone, other):
        folder.mkdir()
        for path in draft.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    refused([alone, alone], "no held-out prompts are known: give --prompts")
    card = json.loads((other / draft_checkpoint.CARD).read_text())
    card.pop("checksum", None)
    card["target"] |= {"fingerprint": "0" * 32, "name": "another"}
    (other / draft_checkpoint.CARD).write_text(json.dumps(card))
    refused([draft, other], "for another, another: compare drafts of one target")

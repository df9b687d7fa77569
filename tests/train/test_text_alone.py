"""Pretraining on text without running the target in training (`hidden_states.mode=none`).

Run alone: python -m pytest tests/train/test_text_alone.py                         (under 20 s)
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import UserError
from specdec.files import write_json
from specdec.forcing.batch import Batch
from specdec.forcing.teacher import TeacherForcing
from specdec.measure.results import Results
from specdec.report import plots
from specdec.targets.target import Target
from tests.runs import draft, require_learning
from tests.runs import require_same_run as same_as
from tests.tiny import Tiny, losses, records, write_jsonl
from train import loop, pipeline, training_checkpoint
from train.continued import digest_of_settings, require_same_run
from train.hidden_states.batches import OnlineBatches

ALONE = ("hidden_states.mode=none", "loss=ce")
pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def without_target_in_training() -> Iterator[dict[str, int]]:
    """Raise AssertionError wherever a training step runs the target or computes p. Counts the
    steps, and the tokens of the texts that the target reads outside of them."""
    counts, inside = {"steps": 0, "tokens": 0}, [False]
    step = loop._forward_and_backward
    forward, columns = Target.hidden_states, TeacherForcing.target_columns
    read = OnlineBatches.batch

    def watched_step(*args: Any) -> Any:
        inside[0], counts["steps"] = True, counts["steps"] + 1
        try:
            return step(*args)
        finally:
            inside[0] = False

    def watched_forward(*args: Any, **more: Any) -> Any:
        assert not inside[0], "a training step ran the target"
        return forward(*args, **more)

    def watched_batch(source: OnlineBatches, indices: Sequence[int]) -> Batch:
        counts["tokens"] += sum(len(source.rows[i].ids) for i in indices)
        return read(source, indices)

    def watched_columns(*args: Any, **more: Any) -> Any:
        assert not inside[0], "a training step computed p"
        return columns(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_forward_and_backward", watched_step)
        patch.setattr(Target, "hidden_states", watched_forward)
        patch.setattr(TeacherForcing, "target_columns", watched_columns)
        patch.setattr(OnlineBatches, "batch", watched_batch)
        yield counts


@pytest.mark.parametrize(
    ("name", "more"),
    [("lm", ()), ("eagle3", ("drafter.initialisation=random",))],
)
def test_training_steps_do_not_run_the_target(
    tiny: Tiny, tmp_path: Path, training_alone: None, name: str, more: tuple[str, ...]
) -> None:
    with without_target_in_training() as counts:
        own = f"hidden_states.root={tmp_path / 'states'}"
        tiny.job(tmp_path / "run", name, *ALONE, *more, own)
    assert counts["steps"] == 12
    assert counts["tokens"] == 5 * 50  # it reads the held-out texts once, and no other
    require_learning(tmp_path / "run")
    for _, record in losses(tmp_path / "run"):
        assert {*record} == {"loss", "text_probability", "lr", "gradient_norm"}  # nothing called α
        assert all(0 < q < 1 for q in record["text_probability"])
    held_out = [r["held_out"] for r in records(tmp_path / "run") if "held_out" in r]
    assert held_out and all(figures["positions"][0] > 0 for figures in held_out)


def test_the_watch_sees_a_run_with_the_target(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    for mode, said in (("online", "ran the target"), ("offline", "computed p")):
        with without_target_in_training(), pytest.raises(AssertionError, match=said):
            tiny.job(tmp_path / mode, "lm", f"hidden_states.mode={mode}", "loss=ce")


def test_a_normal_run_continues_from_the_draft(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On raw text first, then on the conversations."""
    lines = ["the cat and the dog sing all day. they jump on the boat by the lake."] * 3
    chats = [json.loads(line) for line in tiny.data.read_text().splitlines()]
    spoken = [" ".join(m["content"] for m in chat["messages"]) for chat in chats]
    path = write_jsonl(tmp_path / "raw.jsonl", [{"text": x} for x in [*lines, *spoken]])
    raw = ("data=text", f"data.path={path}", "data.prompt_characters=16")
    short = ("decode.prompts=1", "decode.temperatures=[0]", "combine_with=null", "export=null")
    start = "drafter.initialisation=target"
    tiny.job(tmp_path / "pre", "eagle3", *raw, *ALONE, start, *short)
    report = Results.load(tmp_path / "pre" / "report")
    assert report.training is not None and report.training.curve is not None
    assert report.training.curve.sampled[0] == []
    assert report.training.trained_on.endswith("the target was not run in training")
    first, best = report.asked[0], tmp_path / "pre" / "best"
    assert first.identical == report.prompts > 0

    head = tiny.config("eagle3", f"drafter.from={best}", "optim.lr=null")
    assert head.optim.lr == 3e-4  # as any draft that `drafter.from` continues, with no closed form
    monkeypatch.setattr(pipeline, "finished", lambda *_: None)
    tiny.job(tmp_path / "head", "eagle3", f"drafter.from={best}", "optim.lr=1e-9")
    before, after = draft(tmp_path / "pre"), draft(tmp_path / "head")
    assert before.keys() == after.keys()
    for name, x in before.items():  # 12 steps at 1e-9 leave all as it was
        torch.testing.assert_close(x, after[name], atol=1e-6, rtol=0)
    card = json.loads((tmp_path / "head" / "best" / "drafter.json").read_text())
    assert card["config"]["initialisation"] == "target"  # hence fc learns at the full rate
    assert "sampled" in losses(tmp_path / "head")[0][1]


@pytest.mark.usefixtures("pictures")
def test_the_report_shows_the_loss_and_held_out_alpha(tiny: Tiny, tmp_path: Path) -> None:
    tiny.job(tmp_path / "run", "eagle3", *ALONE, "drafter.initialisation=random")
    found = Results.load(tmp_path / "run" / "report")
    assert found.training is not None
    shown = found.training.curve
    assert shown is not None
    assert len(shown.loss) == len(shown.steps) > 5 and shown.sampled[0] == []
    assert shown.held_out_steps and len(shown.held_out_sampled[0]) == 2
    assert (tmp_path / "run" / "report" / "training.png").stat().st_size > 10_000
    plots.training(tmp_path / "loss.png", replace(shown, held_out_steps=[], held_out_sampled=[]))
    assert (tmp_path / "loss.png").stat().st_size > 5_000


def test_a_run_resumes_bit_for_bit(tiny: Tiny, tmp_path: Path, training_alone: None) -> None:
    """Interrupted before the checkpoint of step 8, it goes on from that of step 4."""
    tiny.job(tmp_path / "whole", "lm", *ALONE)
    save, calls = training_checkpoint.save, []

    def killed(*args: Any, **more: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_checkpoint, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            tiny.job(tmp_path / "again", "lm", *ALONE)
    assert 4 <= losses(tmp_path / "again")[-1][0] <= 8
    with without_target_in_training() as counts:
        tiny.job(tmp_path / "again", "lm", *ALONE)
    assert counts["steps"] == 8
    same_as(tmp_path / "again", tmp_path / "whole")


def test_the_mode_is_part_of_the_identity_of_a_run(tiny: Tiny, tmp_path: Path) -> None:
    by_mode = {
        mode: tiny.config("lm", f"hidden_states.mode={mode}", "loss=ce", "data.date=2026-11-28")
        for mode in ("none", "online", "offline")
    }
    for began, now in permutations(by_mode, 2):
        (tmp_path / began).mkdir(exist_ok=True)
        write_json(tmp_path / began / "config.json", asdict(by_mode[began]) | {"of": {}})
        if "none" not in (began, now):
            require_same_run(tmp_path / began, by_mode[now])
            continue
        with pytest.raises(UserError, match=rf"mode={began}, not {now}, .*give another name="):
            require_same_run(tmp_path / began, by_mode[now])
    alone, online, offline = map(digest_of_settings, by_mode.values())
    assert alone != online == offline


def test_the_clock_gives_training_the_time_of_the_texts(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    """A second passes whenever something looks at the clock."""
    seconds = iter(range(10**6))
    cfg = tiny.config("lm", *ALONE, "loop.epochs=99", "budget.minutes=1.2")
    assert not cfg.writes_texts
    pipeline.run(cfg, tmp_path / "run", now=lambda: float(next(seconds)))
    steps = losses(tmp_path / "run")[-1][0]
    assert 12 < steps < 99 * 6
    pipeline.run(
        cfg, tmp_path / "run", now=lambda: float(next(seconds))
    )  # ended: nothing is trained again
    assert losses(tmp_path / "run")[-1][0] == steps


REFUSED = [
    ("lm", ["loss=nla"], r"loss\.terms\.nla reads p .*loss=ce"),
    ("lm", ["loss=ce", "+loss.terms.kl=[1, 0, 0.5]"], r"loss\.terms\.kl reads p"),
    ("eagle3", ["loss=eagle", "drafter.initialisation=random"], r"smooth_l1"),
    ("eagle3", ["loss=ce"], r"closed_form .*initialisation=target or .*initialisation=random"),
    ("hydra", ["loss=ce"], r"closed_form .*give drafter\.initialisation=target$"),
    ("lm", ["loss=ce", "data.responses=target"], r"give data\.responses=data"),
    ("lm", ["loss=ce", "data.decoding_log=steps.jsonl"], r"data\.decoding_log"),
    (
        "lm",
        ["loss=ce", "data.responses=target", "rounds.count=2", "rounds.data=draft"],
        r"data\.responses=target",
    ),
    ("early_exit", ["loss=ce", "drafter.lora.rank=2"], "runs the target's layers"),
    ("medusa", ["loss=ce", "drafter.adapter.rank=2"], "runs the target's layers"),
    ("ngram", [], "nothing to train"),
    ("lm", ["loss=ce", "hidden_states.from=http://a:8000/v1"], "reads no store of its texts"),
    ("lm", ["loss=ce", "hidden_states.shard=1/2"], "stores none"),
    ("lm", ["loss=ce", "target.tensor_parallel=true"], "leave target.tensor_parallel out"),
]


@pytest.mark.parametrize(("name", "more", "said"), REFUSED)
def test_what_needs_the_target_is_refused(
    tiny: Tiny, name: str, more: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=said) as error:
        tiny.config(name, "hidden_states.mode=none", *more)
    assert "\n" not in str(error.value)

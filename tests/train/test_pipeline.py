"""The job's folders and caches: mistakes come before the work, what is made is not mistaken.

Run alone: python -m pytest tests/train/test_pipeline.py
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections import namedtuple
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
from accelerate import Accelerator
from rich.console import Console
from safetensors import SafetensorError

import train
from specdec import progress
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS
from specdec.errors import UserError, of_files
from specdec.files import read_lines
from specdec.formats import draft_checkpoint, draft_export
from specdec.losses.loss_config import LossConfig
from specdec.measure import evaluation
from specdec.measure.results import Results
from specdec.targets.loading import TargetLoader, load_target
from specdec.targets.target import Target
from tests.lab.targets.test_seq2seq import make_target as make_seq2seq
from tests.runs import as_before
from tests.tiny import Tiny, compose, conversations, losses, records, responding, write_jsonl
from train import held_out, loop, measurement, pipeline
from train.data import responses
from train.data.responses import documents_with_responses
from train.data.sequences import Prompt, Row
from train.folder import data_of_run, locked
from train.hidden_states import filling
from train.hidden_states import store as hidden_states
from train.hidden_states.batches import OnlineBatches, StoredBatches
from train.tracking import curve


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Target:
    return load_target(tiny.config().target)


# --- mistakes are told before the work -----------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "more", "said"),
    [
        (
            "medusa",
            ["+decode.draft_length_settings.foo=1"],
            "decode.draft_length_settings: unknown key 'foo'",
        ),
        (
            "medusa",
            ["decode.draft_length=confidence", "+decode.draft_length_settings.threshold=2"],
            "threshold=2",
        ),
        (
            "medusa",
            ["decode.draft_length=confidence", "+decode.draft_length_settings.limit=5"],
            "decode.gamma=5",
        ),
        (
            "medusa",
            ["decode.draft_length=disco", "+decode.draft_length_settings.path=/nope"],
            "/nope",
        ),
        ("medusa", ["decode.gamma=9"], "at most 2 tokens"),
        (
            "medusa",
            ["decode.tree=static", "decode.paths=[[0],[0,0],[0,0,0]]"],
            "drafts at most 2 tokens",
        ),
        ("eagle3", ["decode.tree=best_first"], "parallel heads"),
        ("medusa", ["decode.max_new_tokens=5000"], "do not fit the 512 positions"),
        (
            "medusa",
            ["data.responses=target", "data.max_length=20"],
            "do not fit data.max_length=20",
        ),
        ("medusa", ["data.responses=target", "data.held_out=0"], "no held-out conversation"),
    ],
    ids=lambda x: x if isinstance(x, str) else x[-1],
)
def test_what_cannot_be_decoded_is_told_before_training(
    tiny: Tiny, tmp_path: Path, drafter: str, more: list[str], said: str
) -> None:
    more = [*more, f"responses.root={tmp_path / 'responses'}"]
    with pytest.raises(UserError, match=said):
        tiny.job(tmp_path / "run", drafter, *more)
    made = [p for p in tmp_path.rglob("*") if p.suffix in (".safetensors", ".json", ".jsonl")]
    assert not made, "and leaves the folder to the corrected command"


def test_an_interruption_in_the_engine_loses_no_measurement(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    folder, settings = tmp_path / "run", ["export=null", "serve_in=llama.cpp"]
    monkeypatch.setattr(measurement, "gain_in_engine", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.job(folder, "eagle3", *settings)
    before = Results.load(folder / "report")
    monkeypatch.setattr(measurement, "gain_in_engine", lambda *_: None)
    capsys.readouterr()
    tiny.job(folder, "eagle3", *settings)
    assert "was measured with these settings before" in " ".join(capsys.readouterr().out.split())
    assert Results.load(folder / "report").asked == before.asked
    assert (folder / "report" / "report.md").exists()


def test_debug_tiny_goes_through_all_stages_with_24_chats_of_ones_own(
    tiny: Tiny, tmp_path: Path
) -> None:
    """The tutorial's first command: the target responds, and the lengths are the preset's."""
    own = ("data.", "responses.max", "responses.batch", "loop.", "decode.")
    command = [x for x in tiny.overrides() if not x.startswith(own) or x.startswith("data.path")]
    folder = tmp_path / "run"
    train.run(compose([*command, "export=null", "debug=tiny"]), folder)
    assert records(folder)[-1]["step"] >= 4 and (folder / "report" / "report.md").exists()


def test_a_draft_deeper_than_trained_is_told_before_training(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "this eagle3 was trained to draft 2 tokens in a row but drafts 9 here"
    settings = ["decode.gamma=9", "loop.epochs=1"]
    tiny.job(tmp_path / "run", "eagle3", *settings)
    out = capsys.readouterr().out
    assert out.count(told) == 1 and out.index(told) < out.index("trained ", out.index(told) + 20)
    assert "\ntrained " not in out[: out.index(told)]


@pytest.mark.parametrize(
    "value",
    [
        "loop.patience=0",
        "loop.max_tokens=0",
        "loop.eval_every=-1",
        "loop.seed=-1",
        "optim.betas=[1.5,2]",
        "optim.weight_decay=-1",
        "loss.depth_decay=nan",
        "loss.depth_decay=-1",
        "responses.batch=0",
        "responses.temperature=-1",
        "track.mode=foo",
        "name=..",
        "name=../a",
        "name=.",
        "drafter.name=eagle3",
        "export=speculators",
    ],
)
def test_values_out_of_range_are_named(tiny: Tiny, value: str) -> None:
    with pytest.raises(Exception, match=value.split("=")[0].replace(".", r"\.")):
        tiny.config("medusa", value)


@pytest.mark.parametrize("value", ["drafter.draft_vocab=-3", "target.device=nowhere"])
def test_values_that_only_a_target_can_refuse(tiny: Tiny, tmp_path: Path, value: str) -> None:
    with pytest.raises(UserError, match=value.split("=")[0]):
        tiny.job(tmp_path / "run", "medusa", value)


def test_an_incomplete_loss_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """A config that is changed in Python has not passed the command line's checks."""
    cfg = tiny.config("medusa")
    cfg.loss = LossConfig(terms={"adaspec": 1.0})
    with pytest.raises(UserError, match=r"loss\.reference=runs/NAME/best"):
        train.run(cfg, tmp_path / "run")


# --- a run's folder ------------------------------------------------------------------------------


def test_data_that_changed_are_not_trained_on_under_the_same_name(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", conversations(29))
    tiny.job(tmp_path / "run", "medusa", f"data.path={path}")
    before = records(tmp_path / "run")
    write_jsonl(path, conversations(60))
    with pytest.raises(UserError, match="training data changed since this run began"):
        tiny.job(tmp_path / "run", "medusa", f"data.path={path}")
    assert records(tmp_path / "run") == before


def test_a_run_older_than_a_setting_had_its_default(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    run = tmp_path / "run"
    tiny.job(run, "medusa")
    was = as_before(run / "config.json")
    del was["target"]["packed"], was["loop"]["patience"]
    (run / "config.json").write_text(json.dumps(was))
    with pytest.raises(UserError, match=r"holds a run with target\.packed=True, not False"):
        tiny.job(run, "medusa", "target.packed=false")
    tiny.job(run, "medusa")


def test_a_run_calibrates_on_held_out_prompts_that_it_does_not_measure(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Of 5 held-out prompts, 2 or all are measured; if all are, none is left to calibrate on."""
    tiny.job(tmp_path / "two", "bigram")
    found = Results.load(tmp_path / "two" / "report")
    assert found.calibrated_on == 3 and all(at.calibrated for at in found.asked)
    kept = json.loads((tmp_path / "two" / "best" / draft_checkpoint.CALIBRATION).read_text())
    assert kept["prompts"] == 3 and kept["greedy"] and kept["sampled"] and kept["greedy_draft"]
    tiny.job(tmp_path / "all", "bigram", "decode.prompts=5")
    found = Results.load(tmp_path / "all" / "report")
    assert found.calibrated_on == 0 and found.asked[0].confidence
    assert not (tmp_path / "all" / "best" / draft_checkpoint.CALIBRATION).exists()


def test_the_best_draft_is_selected_on_prompts_that_are_not_reported(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 chats half are held out: a quarter of these select, the others are measured. Without
    a validation part, and in runs from before there was one, the report says so."""
    path = write_jsonl(tmp_path / "chats.jsonl", conversations(100))
    more = [f"data.path={path}", "data.held_out=0.5", "loop.epochs=1", "decode.prompts=100"]
    selecting, measured = list[list[int]](), list[list[int]]()
    evaluated, drafted_in_turn = held_out.evaluate, evaluation.decoded_in_turn

    def noted(model: Any, source: Any, *rest: Any) -> Any:
        selecting.extend(row.ids.tolist() for row in source.rows)
        return evaluated(model, source, *rest)

    def asked(setup: Any, cfg: Any, ways: Any, prompts: Any, *rest: Any) -> Any:
        measured.extend(prompts)
        return drafted_in_turn(setup, cfg, ways, prompts, *rest)

    monkeypatch.setattr(loop, "evaluate", noted)
    monkeypatch.setattr(evaluation, "decoded_in_turn", asked)
    objective = tiny.job(tmp_path / "run", "medusa", *more)
    described = json.loads((tmp_path / "run" / "config.json").read_text())
    data = data_of_run(tmp_path / "run")
    assert (data.held_out, data.validation) == (0.5, described["data"]["validation"])
    found = Results.load(tmp_path / "run" / "report")
    assert found.training is not None and found.training.objective == objective
    held = found.prompts + found.training.validation
    assert found.training.validation == round(held / 4) > 10 < found.prompts
    assert f"selected on {found.training.validation} held-out conversations (validation)" in flat(
        capsys
    )
    page = (tmp_path / "run" / "report" / "report.md").read_text()
    assert f"selected on {found.training.validation} validation documents" in page
    read = [" ".join(map(str, row)) for row in selecting]
    assert read and len(measured) == 2 * found.prompts  # at two temperatures
    for prompt in measured:
        assert not any(" ".join(map(str, prompt)) in row for row in read)

    selecting.clear(), measured.clear()
    tiny.job(tmp_path / "two", "medusa", *more, "data.validation=0")
    assert "data.validation=0: the draft is selected on the prompts" in flat(capsys)
    assert "slightly too high" in (tmp_path / "two" / "report" / "report.md").read_text()
    read = [" ".join(map(str, row)) for row in selecting]
    for prompt in measured:
        assert any(" ".join(map(str, prompt)) in row for row in read)
    described = as_before(tmp_path / "two" / "config.json")
    del described["data"]["validation"]
    (tmp_path / "two" / "config.json").write_text(json.dumps(described))
    assert data_of_run(tmp_path / "two").validation == 0
    tiny.job(tmp_path / "two", "medusa", *more)  # continues as it began


def flat(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_folder_is_one_processes_at_a_time(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"), pytest.raises(UserError, match="another process is running in"):
        tiny.job(tmp_path / "run", "medusa")
    with locked(tmp_path / "run"):
        pass


def test_records_with_a_damaged_line_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\x00\n[3]\n{"other": 1}\n{"step": 2}\n{"step": 3')
    assert read_lines(path, ("step",)) == [{"step": 1}, {"step": 2}]
    assert curve(path) is None


def test_dropped_prompts_are_counted_on_both_sides(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], training_alone: None
) -> None:
    chats = conversations(60)
    for chat in chats[::2]:
        chat["messages"][0]["content"] *= 40  # longer than data.max_prompt
    path = write_jsonl(tmp_path / "chats.jsonl", chats)
    more = [
        f"data.path={path}",
        "data.responses=target",
        f"responses.root={tmp_path / 'responses'}",
    ]
    tiny.job(tmp_path / "run", "medusa", *more)
    said = capsys.readouterr().out.split()
    kept = int(said[said.index("kept") - 1])
    documents = [int(said[i - 1]) for i, word in enumerate(said) if word == "documents,"]
    assert kept == sum(documents) < 60


def test_what_an_export_refuses_is_told_before_any_text_is_read(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several modules, which no engine runs; without an export they are trained all the same."""

    class Read(Exception):
        pass

    def read(*_: object) -> None:
        raise Read

    monkeypatch.setattr(pipeline, "split_of_run", read)
    with pytest.raises(UserError, match=r"drafter\.modules=1.*export=null"):
        tiny.job(tmp_path / "run", "mtp", "drafter.modules=2")
    with pytest.raises(Read):
        tiny.job(tmp_path / "run", "mtp", "drafter.modules=2", "export=null")


def test_drafts_for_encoder_decoders_are_not_exported(tmp_path: Path) -> None:
    """This is told before any text is read: a draft's logits need a decoder's start token."""
    target = make_seq2seq("t5")
    kind = DRAFTERS["medusa"]
    with pytest.raises(UserError, match=r"encoder-decoder: no engine .* export=null"):
        draft_export.require_exportable(kind.Config(), target, "hf")
    with pytest.raises(UserError, match=r"encoder-decoder: no engine .* export=null"):
        draft_export.write_export(tmp_path / "out", kind.build(kind.Config(), target), target)
    assert not (tmp_path / "out").exists()


def test_an_export_replaces_nothing_but_an_export(target: Target, tmp_path: Path) -> None:
    config = DRAFTERS["medusa"].Config(depth=1, draft_vocab=None)
    drafter = DRAFTERS["medusa"].build(config, target)
    draft_export.write_export(tmp_path / "out", drafter, target)
    draft_export.write_export(tmp_path / "out", drafter, target)
    (tmp_path / "precious").mkdir()
    for folder in (tmp_path, tmp_path / "precious"):
        (folder / "thesis.txt").write_text("gold")
        with pytest.raises(UserError, match="not an earlier export"):
            draft_export.write_export(folder, drafter, target)
        assert (folder / "thesis.txt").read_text() == "gold"
    with pytest.raises(UserError, match="not an earlier export"):
        draft_export.write_export(tmp_path / "thesis.txt", drafter, target)
    draft_checkpoint.write_draft(tmp_path / "best", drafter, target)
    with pytest.raises(UserError, match="not an earlier export"):
        draft_export.write_export(tmp_path / "best", drafter, target)


def test_a_disk_that_fails_is_told_in_one_line() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "runs/x")
    assert str(of_files(full)).startswith("runs/x: No space left on device: make room")
    text = "Error while serializing: I/O error: File too large (os error 27)"
    assert "File too large" in str(of_files(SafetensorError(text)))
    assert "x is gone" in str(of_files(FileNotFoundError(errno.ENOENT, "no such file", "x")))
    for code in (errno.EIO, errno.ESTALE, errno.ELOOP, errno.EMFILE, errno.EACCES):
        said = str(of_files(OSError(code, os.strerror(code), "x")))
        assert said.startswith(f"x: {os.strerror(code)}: ") and "room" not in said
    for bug in (OSError(errno.EBADF, "bad descriptor"), SafetensorError("bad header")):
        with pytest.raises(type(bug)):
            of_files(bug)


@pytest.mark.parametrize("what", ["run", "hidden_states", "checkpoints"])
def test_folders_deleted_during_a_run_are_told_or_made_again(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Deleted at the first held-out evaluation, of three. The same command then makes the run."""
    places = {"run": tmp_path / "run", "hidden_states": tmp_path / "hidden_states"}
    places["checkpoints"] = tmp_path / "run" / "checkpoints"
    evaluate, calls = loop.evaluate, []

    def deleting(*args: Any) -> Any:
        if not calls:
            shutil.rmtree(places[what], ignore_errors=True)
        calls.append(args)
        return evaluate(*args)

    monkeypatch.setattr(loop, "evaluate", deleting)
    options = [
        f"hidden_states.root={tmp_path / 'hidden_states'}",
        "export=null",
        "decode.prompts=1",
    ]
    with contextlib.suppress(UserError):
        try:
            tiny.job(tmp_path / "run", "medusa", *options)
        except OSError as error:
            raise of_files(error) from error
    assert math.isfinite(tiny.job(tmp_path / "run", "medusa", *options))
    assert (tmp_path / "run" / "report" / "results.json").is_file()


# --- caches --------------------------------------------------------------------------------------


def filled(
    tiny: Tiny, target: Target, root: Path
) -> tuple[hidden_states.HiddenStateStore, OnlineBatches]:
    """An empty store, and a source of 5 rows of 2 documents."""
    twos, ones = np.array([0, 0, 0, 0, 1, 1, 1], np.int32), np.ones(7, np.bool_)
    ids = [np.array([1 + i, 2, 3, 4, 5, 6 + i, 7], np.int32) for i in range(5)]
    position = np.array([0, 1, 2, 3, 0, 1, 2], np.int32)
    rows = [Row(x, ones, twos, position) for x in ids]
    cfg = tiny.config("eagle3")
    needs = DRAFTERS["eagle3"].build(cfg.drafter, target).needs
    stored = hidden_states.HiddenStatesConfig(root=str(root))
    store = hidden_states.HiddenStateStore(stored, target, needs, cfg.sampler)
    return store, OnlineBatches(target, needs, cfg.sampler, rows)


def test_a_shard_that_is_cut_short_is_made_again(
    tiny: Tiny, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "SHARD", 2)
    store, source = filled(tiny, target, tmp_path)
    with progress.bars(Console(quiet=True), False) as bar:
        filling.fill_from_batches(store, source, bar)
        assert store.missing(source.rows) == []
        files = sorted(store.folder.glob("*.safetensors"))
        whole = [x.read_bytes() for x in files]
        assert len(files) == 3
        shard = next(f for f, x in zip(files, whole, strict=True) if len(x) == max(map(len, whole)))
        for keep in (0, 4, shard.stat().st_size // 2):
            shard.write_bytes(shard.read_bytes()[:keep])
            store.refresh()
            left = store.missing(source.rows)
            assert [len(r.ids) for r in left] == [7, 7], "both rows of that file, whole"
            filling.fill_from_batches(
                store, OnlineBatches(source.target, source.needs, source.sampler, left), bar
            )
            assert [x.read_bytes() for x in files] == whole


def test_a_document_is_read_again_in_other_rows(
    tiny: Tiny, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More data, packed otherwise, through no more open files than allowed: only what is new is
    read by the target, and batches equal those read online."""
    monkeypatch.setattr(filling, "SHARD", 1)
    monkeypatch.setattr(hidden_states, "OPEN", 2)
    store, source = filled(tiny, target, tmp_path)
    few = OnlineBatches(target, source.needs, source.sampler, source.rows[:4])
    with progress.bars(Console(quiet=True), False) as bar:
        filling.fill_from_batches(store, few, bar)
        others = []
        for rows in ([*source.rows[:2], source.rows[4]], source.rows[2:]):
            columns = zip(*(astuple(row)[:4] for row in rows))  # none has speculation steps
            others.append(Row(*(np.concatenate([a[4:], b[:4], c]) for a, b, c in columns)))
        left = store.missing(others)
        assert [r.ids.tolist() for r in left] == [source.rows[4].ids.tolist()] * 2
        filling.fill_from_batches(
            store, OnlineBatches(target, source.needs, source.sampler, left[:1]), bar
        )
    disk = StoredBatches(store, source.needs, others, target.device)
    for indices in ([0], [1], [0, 1]):
        ours = disk.batch(indices)
        theirs = OnlineBatches(target, source.needs, source.sampler, others).batch(indices)
        assert store._open.cache_info().currsize <= 2
        for name in ("ids_BT", "position_BT", "document_BT"):
            assert torch.equal(getattr(ours.ctx, name), getattr(theirs.ctx, name))
        assert torch.equal(ours.mask_BT, theirs.mask_BT)
        pairs = [
            (ours.final_BTD, theirs.final_BTD),
            (ours.ctx.layers_BTF, theirs.ctx.layers_BTF),
            *zip(ours.summary, theirs.summary, strict=True),
        ]
        for a, b in pairs:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_stored_hidden_states_train_with_cutoffs_as_the_target_does(
    tiny: Tiny, tmp_path: Path
) -> None:
    """The store keeps what p is before the cutoffs, which the loss reads, and after them."""
    more = ["sampler=chat", "sampler.top_k=20", f"hidden_states.root={tmp_path / 'hidden_states'}"]
    for mode in ("online", "offline"):
        tiny.job(tmp_path / mode, "medusa", f"hidden_states.mode={mode}", *more)
    ours, theirs = losses(tmp_path / "online"), losses(tmp_path / "offline")
    assert len(ours) == 12
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        for name in ("loss", "sampled", "greedy"):
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6)


def test_a_draft_for_greedy_decoding_alone_is_rejected_before_any_work(tiny: Tiny) -> None:
    with pytest.raises(UserError, match=r"sampler\.temperature=0 cannot be used in training"):
        tiny.config("medusa", "sampler.temperature=0")
    tiny.config("bigram", "sampler.temperature=0")  # nothing is trained


def test_only_what_is_missing_needs_room(
    tiny: Tiny, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, source = filled(tiny, target, tmp_path)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(store.kind.bytes(7)))
    one = OnlineBatches(target, source.needs, source.sampler, source.rows[:1])
    with progress.bars(Console(quiet=True), False) as bar:
        with pytest.raises(UserError, match=r"needs [\d.]+ MB more, and .* is 0\.1 MB short"):
            filling.fill_from_batches(store, source, bar)
        filling.fill_from_batches(store, one, bar)
    assert len(store.missing(source.rows)) == 4


def test_responses_are_kept_by_the_prompt_they_answer(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also sampled, of ids that look alike, one by one or together, and after damage."""
    target, asked = TargetLoader(tiny.config().target), list[int]()

    def counting(target: Target, prompts: Any, way: Way, **options: Any) -> Any:
        asked.append(len(prompts))
        return decode(target, prompts, way, **options)

    decode = responses.decode
    monkeypatch.setattr(responses, "decode", counting)
    ids = {"a": [5, 6, 7], "b": [8, 9], "a#2": [10, 11, 12, 13]}
    prompts = [Prompt(name, np.array(x, np.int32)) for name, x in ids.items()]

    def made(some: list[Prompt], root: str = "x", batch: int = 2) -> list[list[int]]:
        cfg = responding(1.0, max_new_tokens=6, batch=batch, root=str(tmp_path / root))
        with progress.bars(Console(quiet=True), False) as bar:
            return [
                d.ids.tolist()
                for d in documents_with_responses(target, some, cfg, Accelerator(cpu=True), bar)
            ]

    apart = [made([p], root=str(i))[0] for i, p in enumerate(prompts)]
    asked.clear()
    assert made(prompts[:2]) == apart[:2] and asked == [2]
    assert made(prompts, batch=3) == apart and asked == [2, 1], "the new one alone"
    path = min((tmp_path / "x").rglob("*.jsonl"), key=lambda p: p.read_text().count("\n"))
    path.write_text("{\x00}\n" + json.dumps({"ids": [1]}) + "\n" + path.read_text()[:-3])
    assert made(prompts) == apart and asked == [2, 1, 1]


def test_responses_follow_top_k_and_are_kept_apart_by_it(tiny: Tiny, tmp_path: Path) -> None:
    """With only the likeliest token, sampling is greedy decoding. Without top-k, the folder's name
    does not depend on that setting."""
    target = TargetLoader(tiny.config().target)
    prompts = [Prompt("a", np.array([5, 6, 7], np.int32)), Prompt("b", np.array([8, 9], np.int32))]

    def texts(temperature: float, top_k: int, folder: str) -> list[list[int]]:
        root = str(tmp_path / folder)
        cfg = responding(temperature, top_k=top_k, max_new_tokens=6, root=root)
        with progress.bars(Console(quiet=True), False) as bar:
            documents = documents_with_responses(target, prompts, cfg, Accelerator(cpu=True), bar)
        return [d.ids.tolist() for d in documents]

    greedy, drawn = texts(0.0, 0, "greedy"), texts(1.0, 0, "drawn")
    assert texts(1.0, 1, "drawn") == greedy != drawn
    how = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 6, "seed": 0}
    how |= {"target": target.parts.fingerprint(), "dtype": str(target.parts.dtype)}
    how |= {"eos": sorted(target.parts.eos)}
    before = hashlib.blake2b(json.dumps(how, sort_keys=True).encode(), digest_size=8).hexdigest()
    folders = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert len(folders) == 2 and before in folders


@pytest.mark.slow
def test_a_job_measured_in_three_ways_is_logged_offline(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More figures than the 100 that an artifact of W&B takes. A tiny job draws no pictures."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb, "Image", lambda path: str(path))
    ways = ["combine_with=suffix", "decode.fastest=true", "decode.gamma=2"]
    ways += ["decode.temperatures=[0,0.5,1,1.5]"]
    tiny.job(tmp_path / "run", "eagle3", *ways, "track=wandb", "drafter.depth=4", "export=hf")
    results = Results.load(tmp_path / "run" / "report")
    assert list(results.others) == ["fastest", "hybrid"] and len(results.headline()) > 100
    assert (tmp_path / "run" / "export" / "config.json").exists()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))

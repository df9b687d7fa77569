"""Mistakes in data, in folders and in what lies in them, each told in one line, with exit code 2.

Run alone: python -m pytest tests/train/test_mistakes.py        (-m "not slow": a minute)

Processes start slowly (about 4 s), so the command line itself is tried with one mistake of each
path that a message takes; the others go through the same functions in this process.
"""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import train
from specdec.drafters.eagle import Eagle
from specdec.drafters.medusa import Medusa
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.processes import environment, process
from tests.runs import as_before
from tests.tiny import (
    REPOSITORY,
    Tiny,
    compose,
    conversations,
    random_drafter,
    save_target,
    write_jsonl,
)
from tests.told import require_one_line, told
from train import pipeline
from train.data import responses

# Mistakes in the data


BROKEN = {
    "missing": (None, ["no such file"]),
    "empty": ("", ["no conversation", "empty"]),
    "blank lines": ("\n\n \n", ["no conversation"]),
    "not JSON": ("hello, world\n", ["no conversation", "broken JSON line"]),
    "a list of numbers": ("[1, 2, 3]", ["no conversation", "not a conversation"]),
    "other records": ('{"text": "once upon a time"}\n', ["not a conversation", "keys text"]),
    "a number a line": ("1\n2\n", ["no conversation", "not a conversation"]),
    "null": ("null\n", ["no conversation", "not a conversation"]),
    "one object": ('{"a": {"messages": []}}', ["no conversation", "keys a"]),
    "prompts alone": (
        '{"messages": [{"role": "user", "content": "we go home"}]}\n',
        ["no .*conversation|no assistant turn"],
    ),
    "other roles": (
        '{"messages": [{"role": "moderator", "content": "hi"}]}\n',
        ["another role: moderator"],
    ),
    "cut in the first record": ('[{"messages": [{"role": "us', ["cut off"]),
    "binary": ("\x00\x01\x02", ["no conversation"]),
}


@pytest.mark.parametrize(
    ("kind", "responses"),  # prompts alone are what the target answers
    [c for c in itertools.product(BROKEN, ("data", "target")) if c != ("prompts alone", "target")],
)
def test_data_that_are_no_conversations(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, responses: str
) -> None:
    text, parts = BROKEN[kind]
    path = tmp_path / "chats.jsonl"
    if text is not None:
        path.write_text(text)
    more = [f"data.path={path}", f"data.responses={responses}"]
    said = told(capsys, tiny.overrides("medusa", *more), tmp_path / "run")
    require_one_line(said, re.escape(str(path)), *parts)


def test_a_folder_without_data(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    said = told(
        capsys, tiny.overrides("medusa", f"data.path={tmp_path / 'empty'}"), tmp_path / "run"
    )
    require_one_line(said, "empty", r"\.jsonl")


def test_no_conversation_short_enough(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = told(capsys, tiny.overrides("medusa", "data.max_length=5"), tmp_path / "run")
    require_one_line(said, "max_length=5")
    said = told(capsys, tiny.overrides("medusa", "data.max_prompt=3"), tmp_path / "run2")
    require_one_line(said, "max_prompt=3")


def test_too_few_conversations_for_a_held_out_side(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "one.jsonl", conversations(1))
    for held_out in ("0.0001", "0.9999"):  # all on one side
        more = [f"data.path={path}", f"data.held_out={held_out}"]
        said = told(capsys, tiny.overrides("medusa", *more), tmp_path / f"run{held_out}")
        require_one_line(said, "no (training|held-out) conversation", "data.held_out")


def test_a_tokenizer_without_chat_template(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = save_target(tmp_path / "plain", template=None)
    said = told(capsys, tiny.overrides("medusa", f"target.path={target}"), tmp_path / "run")
    require_one_line(said, "plain", "no chat template", "instruction-tuned")


def test_a_template_that_fails_on_every_conversation(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = save_target(tmp_path / "odd", template="{{ raise_exception('never') }}")
    said = told(capsys, tiny.overrides("medusa", f"target.path={target}"), tmp_path / "run")
    require_one_line(said, "refused by the chat template")


# Run folders, caches and checkpoints of something else


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("optim.lr=1e-4", r"optim\.lr=0\.005"),
        ("drafter.depth=1", r"drafter\.depth=2"),
        ("loss=kl", r"loss\.terms={'nla': 1\.0}"),
        ("data.seed=7", r"data\.seed=0"),
    ],
)
def test_a_run_folder_of_another_configuration(
    tiny: Tiny,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    training_alone: None,
    change: str,
    part: str,
) -> None:
    tiny.job(tmp_path / "run", "medusa")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    said = told(capsys, tiny.overrides("medusa", change), tmp_path / "run")
    require_one_line(said, "run", part, "name=", "delete")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_another_drafter_in_a_run_folder(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path, training_alone: None
) -> None:
    tiny.job(tmp_path / "run", "medusa")
    said = told(capsys, tiny.overrides("eagle3"), tmp_path / "run")
    require_one_line(said, "run", "medusa", "name=")


def test_a_command_that_was_mended_runs(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path, training_alone: None
) -> None:
    """A mistake that was told before any work leaves nothing that the mended command trips on."""
    told(capsys, tiny.overrides("medusa", "data.path=/no/such/file.jsonl"), tmp_path / "run")
    tiny.job(tmp_path / "run", "medusa")


def test_a_hidden_state_cache_of_another_target(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path, training_alone: None
) -> None:
    """hidden_states.path filled with rows of this target's namesake: same words, other weights."""
    cache = f"hidden_states.path={tmp_path / 'cache'}"
    other = save_target(tmp_path / "other", seed=1)
    told_or_not = tiny.overrides("medusa", cache)
    try:
        train.run(compose(told_or_not), tmp_path / "a")
    except UserError:  # see test_loop.py, test_a_feature_cache_at_a_path_of_ones_own
        assert list((tmp_path / "cache").rglob("meta.json"))
    more = [cache, f"target.path={other}"]
    said = told(capsys, tiny.overrides("medusa", *more), tmp_path / "run")
    require_one_line(
        said, "hidden-state cache", "cache", "target|fingerprint", "hidden_states.path"
    )


def test_a_hidden_state_cache_of_another_target_in_its_place_is_not_used(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    """Without a path of one's own each target has a folder of its own, even under one name."""
    root = f"hidden_states.root={tmp_path / 'cache'}"
    tiny.job(tmp_path / "a", "medusa", root)
    one = {p.parent.name for p in (tmp_path / "cache").rglob("meta.json")}
    other = save_target(tmp_path / "other", seed=1)
    train.run(compose(tiny.overrides("medusa", root, f"target.path={other}")), tmp_path / "b")
    assert len({p.parent.name for p in (tmp_path / "cache").rglob("meta.json")}) == 2 * len(one)


@pytest.fixture(scope="module")
def trained(tiny: Tiny) -> Path:
    """A run's folder with a draft, without what follows training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "finished", lambda *_: None)
        tiny.job(tiny.root / "trained", "medusa")
    return tiny.root / "trained"


def test_a_draft_of_another_target_is_refused(tiny: Tiny, trained: Path, tmp_path: Path) -> None:
    namesake = load_target(TargetConfig(str(save_target(tmp_path / "other", seed=1)), "float32"))
    with pytest.raises(UserError, match="other weights"):
        draft_checkpoint.load_draft(trained / "best", namesake)


def test_a_draft_serves_its_target_in_any_dtype(tiny: Tiny, trained: Path) -> None:
    """The draft was trained with the target in float32; scripts/evaluate and scripts/generate
    load it in what the machine multiplies natively or in what is asked for, scripts/export in
    float32, whatever it was trained in: the same target, from the same files."""
    for dtype in ("float32", "bfloat16", "float16"):
        draft_checkpoint.load_draft(
            trained / "best", load_target(TargetConfig(str(tiny.target), dtype))
        )


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda data: data[: len(data) // 2], "cut short or damaged"),
        (lambda data: b"", "cut short or damaged"),
        (lambda data: b"\xff" * 64, "cut short or damaged"),
    ],
    ids=["half", "empty", "noise"],
)
def test_a_draft_file_that_is_damaged(
    tiny: Tiny, trained: Path, tmp_path: Path, damage: Any, part: str
) -> None:
    target = load_target(TargetConfig(str(tiny.target), "float32"))
    (tmp_path / "best").mkdir()
    for file in (trained / "best").iterdir():
        data = file.read_bytes()
        data = damage(data) if file.suffix == ".safetensors" else data
        (tmp_path / "best" / file.name).write_bytes(data)
    with pytest.raises(UserError, match=part):
        draft_checkpoint.load_draft(tmp_path / "best", target)


@pytest.mark.parametrize(
    "card", [b"", b"[]", b"{}", b"null", b'{"format": 2}', b'{"format": 99}', b"\x93\xff\x00"]
)
def test_a_card_that_is_none(tmp_path: Path, card: bytes) -> None:
    (tmp_path / draft_checkpoint.CARD).write_bytes(card)
    with pytest.raises(UserError, match=r"drafter\.json") as caught:
        draft_checkpoint.read_card(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="holds no draft"):  # a file of the folder, not the folder
        draft_checkpoint.read_card(tmp_path / draft_checkpoint.CARD)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"target": {}}, "target: the key 'name' is missing"),
        ({"target": [1]}, "target: expected an object, found a list of 1"),
        ({"family": ["x"]}, "family: expected text, found a list of 1"),
        ({"shape": [1]}, "shape: expected an object"),
        ({"config": None}, "config: expected an object, found null"),
    ],
)
def test_a_card_with_a_part_of_a_wrong_type(
    trained: Path, tmp_path: Path, change: dict[str, Any], part: str
) -> None:
    card = as_before(trained / "best" / draft_checkpoint.CARD)
    (tmp_path / draft_checkpoint.CARD).write_text(json.dumps({**card, **change}))
    with pytest.raises(UserError, match=part):
        draft_checkpoint.read_card(tmp_path)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"family": "medus"}, "did you mean 'medusa'"),
        ({"config": {"name": "medusa", "dept": 2}}, "dept"),
    ],
)
def test_a_card_of_another_version(
    tiny: Tiny, trained: Path, tmp_path: Path, change: dict[str, Any], part: str
) -> None:
    """A family or a key that this version does not have."""
    target = load_target(TargetConfig(str(tiny.target), "float32"))
    card = as_before(trained / "best" / draft_checkpoint.CARD)
    (tmp_path / draft_checkpoint.CARD).write_text(json.dumps({**card, **change}))
    save_file({"x": torch.zeros(1)}, tmp_path / draft_checkpoint.WEIGHTS)
    with pytest.raises(UserError, match=part):
        draft_checkpoint.load_draft(tmp_path, target)


# The command lines, as processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistakes", "parts"),
    [
        # while Hydra composes
        (["objective=kl"], ["objective is now loss", "give loss=kl"]),
        (["drafter=eagle4"], ["eagle4", "did you mean .eagle"]),
        (["--config-name=configs"], ["--config-name configs is unknown; did you mean 'config'"]),
        # in the job: after composition, then below train.run
        (["+loss.foo=1"], ["loss.foo", "known"]),
        (["data.path=/no/such/file.jsonl"], ["/no/such/file.jsonl", "no such file"]),
        # under a sweeper
        (["-m", "loop.rows=abc,2"], ["loop.rows", "abc"]),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else x,
)
def test_train_py_tells_a_mistake_in_one_line(
    tiny: Tiny, tmp_path: Path, mistakes: list[str], parts: list[str]
) -> None:
    sweep = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    flags = [x for x in mistakes if x.startswith("-")]  # argparse wants them before the rest
    script, *given = tiny.command(tmp_path / "run", "medusa")
    done = process([script, *flags, *given, sweep, *(x for x in mistakes if x not in flags)])
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    require_one_line(done.stderr, *parts)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("mistake", "responses", "part"),
    [
        ("data.path=nothing.jsonl", "target", "no such file"),
        ("data.max_length=5", "target", "max_length=5"),  # told once the target is loaded
        ("decode.max_new_tokens=600", "data", "positions"),  # told once the plan is made
    ],
)
def test_a_refused_run_leaves_nothing(
    tiny: Tiny,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    mistake: str,
    responses: str,
    part: str,
) -> None:
    """Nor does it change a folder that is there. It has not answered any prompt yet."""
    more = [f"responses.root={tmp_path / 'cache' / 'responses'}", f"data.responses={responses}"]
    more += [
        f"hidden_states.root={tmp_path / 'cache' / 'hidden_states'}",
        "track=wandb",
        "export=null",
    ]
    overrides = tiny.overrides("medusa", *more, "budget.minutes=5", mistake)
    require_one_line(told(capsys, overrides, tmp_path / "runs" / "new"), part)
    assert not any(tmp_path.iterdir())
    existing = tmp_path / "existing"
    existing.mkdir()
    (existing / "notes.txt").write_text("mine")
    told(capsys, overrides, existing)
    assert [*tmp_path.rglob("*")] == [existing, existing / "notes.txt"]


def test_a_refused_configuration_leaves_no_folder(tiny: Tiny, tmp_path: Path) -> None:
    done = process(tiny.command(tmp_path / "run", "medusa", "name=../elsewhere"))
    assert done.returncode == 2
    require_one_line(done.stderr, "name='../elsewhere' is not the name of a folder")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_reader_that_leaves_ends_train_py_quietly() -> None:
    """As in `python train.py --help | head -1`: no traceback, the exit code of SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "train.py", "--help"],
        cwd=REPOSITORY,
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
def test_scripts_tell_a_mistake_in_one_line(tiny: Tiny, trained: Path, tmp_path: Path) -> None:
    """scripts/evaluate: a draft cut short, a draft of another target, no draft at all."""
    cut = tmp_path / "cut" / "best"
    cut.mkdir(parents=True)
    for file in (trained / "best").iterdir():
        data = file.read_bytes()
        half = data[: len(data) // 2] if file.suffix == ".safetensors" else data
        (cut / file.name).write_bytes(half)
    shutil.copy(trained / "config.json", cut.parent)
    other = str(save_target(tmp_path / "other", seed=1))
    for arguments, parts in (
        ([str(cut)], ["draft.safetensors", "cut short"]),
        ([str(trained / "best"), "--target", other], ["other weights", re.escape(other)]),
        ([str(tmp_path)], ["holds no draft", "runs/NAME/best"]),
    ):
        done = process(["scripts/evaluate", *arguments, "--dtype", "float32"])
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        require_one_line(done.stderr, *parts)


@pytest.mark.slow
def test_scripts_work_on_what_a_run_leaves(tiny: Tiny, trained: Path, tmp_path: Path) -> None:
    """As the documents have them: no word about the dtype that the run had."""
    few = ["--limit", "1", "--max-new-tokens", "6", "--out", str(tmp_path / "report")]
    for arguments in (
        ["scripts/evaluate", str(trained / "best"), *few],
        ["scripts/evaluate", str(trained / "best"), *few, "--beams", "2"],
        ["scripts/export", str(trained / "best"), "--to", str(tmp_path / "export")],
        ["scripts/generate", str(trained / "best"), "we go home", "--max-new-tokens", "6"],
    ):
        done = process(arguments)
        assert done.returncode == 0, (arguments[0], done.stderr[-2000:])
    for file in ("results.json", "beams.json"):
        assert (tmp_path / "report" / file).exists()
    done = process(["scripts/evaluate", str(trained / "best"), *few, "--prompts", str(tiny.data)])
    said = r"prompts? of your own, of which the draft was trained on (1|none)"
    assert done.returncode == 0 and re.search(said, done.stdout), done.stderr[-2000:]
    assert re.search(said, (tmp_path / "report" / "report.md").read_text())


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_trial_that_diverges(tiny: Tiny, tmp_path: Path) -> None:
    """`optim.lr` from one that trains and one that cannot; 3 trials, the sampler's seed fixed so
    that both occur. The best is a trial that did not diverge, its value the best τ."""
    given = [x for x in tiny.overrides("medusa", "decode.prompts=1") if "optim.lr" not in x]
    done = process(
        [
            "train.py",
            "-m",
            "hydra/sweeper=optuna",
            "search=lr",
            *given,
            "optim.lr=choice(0.005,1e30)",
            "loss.depth_decay=choice(0.6,1.0)",
            "hydra.sweeper.n_trials=3",
            "hydra.sweeper.sampler.seed=4",
            f"hydra.sweep.dir={tmp_path / 'sweep'}",
        ]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trials = [tmp_path / "sweep" / str(i) for i in range(3)]
    diverged = [t for t in trials if (t / "diverged").exists()]
    assert 0 < len(diverged) < 3, "choose a seed with which both rates are tried"
    for trial in diverged:
        assert "not finite at step" in (trial / "diverged").read_text()
    results = (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    values = [
        json.loads((t / "report" / "results.json").read_text())["training"]["objective"]
        for t in trials
        if t not in diverged
    ]
    assert re.search(r"optim\.lr: 0\.005", results)
    best = float(re.search(r"best_value: (\S+)", results)[1])  # type: ignore[index]
    assert best == pytest.approx(max(values))
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(f"best of 3 trials ({len(diverged)} diverged): objective {best:.4f} ")
    assert "optim.lr=0.005" in last and "decode.prompts" not in last


# What is told before the first response


@pytest.fixture(scope="module")
def drafts_of_others(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafts from which a run of `tiny` cannot start: one in another project's format, one of
    another target, one of another family."""
    root = tmp_path_factory.mktemp("drafts")
    (root / "foreign").mkdir()
    (root / "foreign" / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle"]}')
    save_file({"fc.weight": torch.zeros(2, 2)}, root / "foreign" / "model.safetensors")
    mine = load_target(TargetConfig(str(tiny.target), "float32", "cpu", packed=False))
    folder = str(save_target(root / "target", seed=7))
    other = load_target(TargetConfig(folder, "float32", "cpu", packed=False))
    of_medusa = Medusa.Config(depth=2, draft_vocab=None)
    for name, target, config in (("other", other, of_medusa), ("eagle", mine, Eagle.Config())):
        draft_checkpoint.write_draft(root / name, random_drafter(config, target, 0.1), target)
    return root


@pytest.mark.parametrize(
    ("mistake", "part"),
    [
        ("drafter.from={drafts}/foreign", "foreign holds no draft"),
        ("drafter.from={drafts}/other", "with other weights"),
        ("drafter.from={drafts}/eagle", "is a draft of the family eagle"),
        ("loss.terms.adaspec=1 loss.reference={drafts}/other", "with other weights"),
        ("export=hf", "export exists and is not an earlier export"),
        ("responses.root={full}", "full.*No space left"),
        ("hidden_states.root={full}", "full.*No space left"),
        ("name=full", "the checkpoints of this draft need .* make room"),
    ],
)
def test_a_mistake_is_told_before_the_first_response(
    tiny: Tiny,
    tmp_path: Path,
    drafts_of_others: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: str,
    part: str,
) -> None:
    """Neither a prompt is answered nor a folder of this run left behind."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the target answers")

    full, fsync = tmp_path / "full", os.fsync

    def without_room(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(responses, "decode", never)
    monkeypatch.setattr("specdec.files.os.fsync", without_room)
    if mistake == "name=full":
        usage = SimpleNamespace(free=1000, total=10**6, used=10**6)
        monkeypatch.setattr("train.run_checks.shutil.disk_usage", lambda _: usage)
    run = tmp_path / "run"
    if mistake == "export=hf":
        (run / "export").mkdir(parents=True)
        (run / "export" / "mine.txt").write_text("mine")
    before = {*tmp_path.rglob("*")}
    given = mistake.format(drafts=drafts_of_others, full=full).split()
    roots = [f"{kind}.root={tmp_path / kind}" for kind in ("responses", "hidden_states")]
    more = [*roots, "data.responses=target", "drafter.draft_vocab=null", "export=null", *given]
    with pytest.raises(UserError, match=part):
        tiny.job(run, "medusa", *more)
    assert {*tmp_path.rglob("*")} == before

"""scripts/doctor: samples, figures, and the faults for which it fails.

Run alone: python -m pytest tests/scripts/test_doctor.py (about 15 s)
"""

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.targets.loading import TargetLoader
from specdec.targets.parts import TargetParts
from specdec.targets.target_config import TargetConfig
from tests.tiny import REPOSITORY, TEMPLATE, compose, conversations, save_target, write_jsonl
from tests.told import require_one_line
from train.data.conversations import DataConfig
from train.diagnosis import NO_STOP, Diagnosis, diagnose_data
from train.run_config import CONF

CAT = "a cat can come home by boat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and data for it: 40 chats of 50 tokens, one of them twice, and a long one."""
    folder = tmp_path_factory.mktemp("doctor")
    save_target(folder / "target")
    chats = conversations(40)
    long = conversations(1, seed=1)[0]
    long["messages"][1]["content"] = " ".join([CAT] * 30)
    write_jsonl(folder / "chats.jsonl", [*chats, chats[3] | {"id": "again"}, long, {"x": 1}])
    return folder


def doctor(monkeypatch: pytest.MonkeyPatch, place: Path, *arguments: Any) -> int:
    """The exit code of the script, run in this process."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["doctor", *map(str, arguments)])
    try:
        runpy.run_path(str(REPOSITORY / "scripts" / "doctor"), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_samples_and_figures(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [f"data={folder / 'chats.jsonl'}", f"target={folder / 'target'}"]
    settings += ["data.responses=data", "data.held_out=0.2", "data.max_length=128"]
    assert doctor(monkeypatch, tmp_path, *settings, "--samples", "3") == 0
    out = capsys.readouterr().out
    assert out.count("edges of the first response: ") == 3
    assert "'<|im_start|>' 'assistant' '\\n' ▸ " in out and " '.' '<|im_end|>' ◂ '\\n'" in out
    said = " ".join(out.split())
    for figure in (
        "1 dropped: not a conversation",
        "1 of 42 texts (2.4%) are longer than data.max_length=128 and are skipped",
        "longer than 256 1 longer than 512 0",
        "<|im_end|> 41",
        "Latin 100.0 %",
        "texts that another one equals 1",
        "of which to validate on 0",
    ):
        assert figure in said
    assert "keeps 99 %" not in said, "advice for one text of 42"
    page = (tmp_path / "doctor" / "data.html").read_text()
    assert page.count("<h4>") == 3 and page.count("<var>&lt;|im_end|&gt;</var>") == 3
    assert page.count("<samp>") == 3 + 1 and "No fault was found." in page  # the legend has one
    # prompts, which the target is to answer
    assert doctor(monkeypatch, tmp_path, *settings[:2], "data.held_out=0.2") == 0
    assert "prompts to train on" in capsys.readouterr().out
    # before the target is loaded, which does not exist either
    assert doctor(monkeypatch, tmp_path, "data=nowhere.jsonl", "target=no/model") == 2
    require_one_line(capsys.readouterr().err, "nowhere.jsonl: no such file")


def parts_with(place: Path, template: str) -> TargetParts:
    parts = TargetLoader(TargetConfig(str(save_target(place / "other", template=template)))).parts
    return parts


def of(folder: Path, parts: TargetParts, **options: Any) -> Diagnosis:
    cfg = DataConfig(str(folder / "chats.jsonl"), held_out=0.2, max_length=128, **options)
    return diagnose_data(cfg, parts, 48, 2)


def test_responses_that_end_in_no_stop_token_are_a_fault(folder: Path, tmp_path: Path) -> None:
    parts = parts_with(tmp_path, TEMPLATE.replace("<|im_end|>", " ."))
    for responses in ("data", "target"):
        diagnosis = of(folder, parts, responses=responses)
        (fault,) = diagnosis.faults
        assert f"{NO_STOP} ('<|im_end|>')" in fault and "\n" not in fault
    assert of(folder, parts, responses="data").stops == {NO_STOP: 41}


def test_template_and_mask_that_disagree_are_a_fault(folder: Path, tmp_path: Path) -> None:
    """A template that changes answers with the word `home` in them."""
    changed = TEMPLATE.replace("m['content'] }}", "m['content'] | replace('home', 'cat') }}")
    diagnosis = of(folder, parts_with(tmp_path, changed), responses="data")
    (fault,) = diagnosis.faults
    assert fault.startswith("template and mask disagree in ") and "{% generation %}" in fault


def test_the_fault_of_the_script_is_one_line(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = save_target(tmp_path / "other", template=TEMPLATE.replace("<|im_end|>", " ."))
    capsys.readouterr()  # bars of the saving
    settings = [f"target={target}", f"data={folder / 'chats.jsonl'}", "data.responses=data"]
    assert doctor(monkeypatch, tmp_path, *settings) == 2
    require_one_line(capsys.readouterr().err, NO_STOP)
    assert "Fault" in (tmp_path / "doctor" / "data.md").read_text()


def test_weights_are_shown(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chats = conversations(8)
    for n, chat in enumerate(chats[:6]):
        chat["messages"][1]["weight"] = (0.5, 0.1, 0.5, 2, 0, -1)[n]
    path = write_jsonl(tmp_path / "weighted.jsonl", chats)
    settings = [f"data={path}", f"target={folder / 'target'}", "data.held_out=0.3"]
    assert doctor(monkeypatch, tmp_path, *settings, "data.responses=data") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 dropped: a response whose weight is neither 0 nor a number from 0.001 to 100" in said
    assert "3 changed: responses that count by their weight" not in said
    assert "4 changed: responses that count by their weight in the loss" in said
    table = "Weights of the responses in the loss weight 0.1 1 weight 0.5 2 weight 1 2 weight 2 1"
    assert table in said
    assert "weight 0.5" in (tmp_path / "doctor" / "data.md").read_text()
    assert doctor(monkeypatch, tmp_path, *settings, "data.responses=target") == 0
    # the target answers in place of a response of weight 0, and its own response counts as any
    said = " ".join(capsys.readouterr().out.split())
    assert table.replace("weight 1 2", "weight 1 3") in said


def test_scripts_and_coverage(tmp_path: Path, folder: Path) -> None:
    parts = TargetLoader(TargetConfig(str(folder / "target"))).parts
    diagnosis = of(folder, parts, responses="data")
    assert diagnosis.coverage.keys() == {48}
    assert 0.5 < diagnosis.coverage[48] < 1
    chats = [{"prompt": text} for text in ("Привет, Ёж", "你好世界", "こんにちは", "hi")]
    path = write_jsonl(tmp_path / "x.jsonl", chats)
    cfg = DataConfig(str(path), responses="target", held_out=0.0)
    scripts = diagnose_data(cfg, parts, None, 0).scripts
    assert scripts == {"Cyrillic": 8 / 19, "Kana": 5 / 19, "Han": 4 / 19, "Latin": 2 / 19}


@pytest.mark.parametrize(
    "chosen",
    [
        f"{group}={file.stem}"
        for group in ("recipe", "experiment", "debug")
        for file in sorted((CONF / group).glob("*.yaml"))
    ],
)
def test_what_train_accepts_is_accepted_and_read_alike(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each recipe and experiment, with overrides of train.py; the data themselves are not read."""
    seen: list[Any] = []

    class Loader:
        def __init__(self, cfg: TargetConfig) -> None:
            self.parts = SimpleNamespace(
                cfg=cfg, tokenizer=None, render_prompts_with=lambda rendering: None
            )

    def diagnose(data: DataConfig, target: Any, **more: Any) -> None:
        seen.append((data, target.cfg, more["responses"], more["depth"]))
        raise SystemExit(0)

    monkeypatch.setattr("specdec.targets.loading.TargetLoader", Loader)
    monkeypatch.setattr("train.diagnosis.diagnose_data", diagnose)
    monkeypatch.setattr("train.data.rendering.prompt_rendering", lambda *_: None)
    # the targets are on the hub
    monkeypatch.setattr("train.target_defaults.with_target_defaults", lambda cfg: (cfg, []))
    settings = [chosen, "data.path=x", "data.limit=7", "track=none", "loop.rows=2"]
    assert doctor(monkeypatch, tmp_path, *settings) == 0
    cfg = compose(settings)
    target = replace(cfg.target, tensor_parallel=False)
    assert seen == [(cfg.data, target, cfg.response_generation, cfg.drafter.depth)]


def test_settings_of_another_folder_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndata: {held_out: 0.25, responses: data, max_length: 128}\n"
    )
    settings = [f"data={folder / 'chats.jsonl'}", f"target={folder / 'target'}"]
    settings += ["--config-dir", "own", "experiment=mine", "--samples", "1"]
    assert doctor(monkeypatch, tmp_path, *settings) == 0
    assert doctor(monkeypatch, tmp_path, *settings, "--config-dir", "absent") == 2


def test_the_targets_responses_have_their_place_in_the_samples(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [f"data={folder / 'chats.jsonl'}", f"target={folder / 'target'}"]
    settings += ["data.responses=target", "data.held_out=0.2", "responses.max_new_tokens=96"]
    assert doctor(monkeypatch, tmp_path, *settings, "--samples", "2") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("[the target's response of up to 96 tokens]") == 2
    assert "1 dropped: not a conversation" in said and "prompts to train on" in said

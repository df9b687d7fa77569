"""A job with arguments of the chat template, and one with a template of the user's own: what is
rendered, reported, exported and served.

Run alone: python -m pytest tests/train/test_template_args.py (about 40 s)
"""

import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec.errors import UserError
from specdec.files import read_json
from specdec.formats import draft_checkpoint, draft_export
from specdec.measure.reference import Reference
from specdec.measure.results import Results
from tests.tiny import (
    REPOSITORY,
    TEMPLATE,
    Tiny,
    conversations,
    make_tokenizer,
    save_target,
    write_jsonl,
)
from train.data.rendering import BoundedTemplate
from train.data.response_files import RESPONSES_READ
from train.folder import noted_prompts

EFFORT = "{% if effort == 'high' %}hot {% elif effort == 'low' %}cold {% endif %}"
THOUGHT = "{% if enable_thinking is false %}any {% elif enable_thinking is true %}all {% endif %}"
READS = TEMPLATE.replace("assistant\n{% endif %}", f"assistant\n{THOUGHT}{EFFORT}{{% endif %}}")
ARGUMENTS = "data.template_args={enable_thinking: false, effort: high}"
OWN = TEMPLATE.replace("assistant\n{% endif %}", "assistant\nnew " + EFFORT + "{% endif %}")
OPTION = """--default-chat-template-kwargs '{"enable_thinking": false, "effort": "high"}'"""


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A target whose prompts end with words that say with which arguments they were rendered."""
    root = tmp_path_factory.mktemp("reading")
    target = save_target(root / "target", template=READS)
    return Tiny(root, target, write_jsonl(root / "chats.jsonl", conversations(40)))


@pytest.fixture(scope="module")
def run(reading: Tiny) -> Path:
    folder = reading.root / "run"
    reading.job(folder, "eagle3", ARGUMENTS, "data.responses=target", "decode.prompts=4")
    return folder


def script(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: Any) -> list[str]:
    """Run a script; the texts that the chat template wrote meanwhile."""
    read, write = list[str](), BoundedTemplate.render

    def rendered(*args: Any, **kwargs: Any) -> Any:
        text, blocks = write(*args, **kwargs)
        read.append(text)
        return text, blocks

    with monkeypatch.context() as patch:
        patch.setattr(BoundedTemplate, "render", rendered)
        patch.syspath_prepend(str(REPOSITORY / "scripts"))
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(REPOSITORY / "scripts" / name), run_name="__main__")
    return read


def test_the_arguments_are_rendered_noted_and_reported(run: Path) -> None:
    noted = noted_prompts(run, 4)
    assert noted is not None and noted[0]
    assert all(make_tokenizer().decode(p.ids).endswith("assistant\nany hot ") for p in noted[0])
    rendering = draft_checkpoint.read_card(run / "best").target.rendering
    assert rendering.arguments == {"enable_thinking": False, "effort": "high"}
    assert Results.load(run / "report").rendering == rendering
    page = (run / "report" / "report.md").read_text()
    page = page.replace("\\", "")
    assert "rendered with the template arguments effort=high, enable_thinking=false" in page
    assert OPTION in page, "the serving command"
    assert "Kinds of prompts" not in page, "all prompts are of one kind"


def test_the_export_says_how_to_serve_it(run: Path) -> None:
    export = run / "export"
    readme = (export / "README.md").read_text()
    assert f"vllm serve TARGET {OPTION} --speculative-config" in readme
    assert '`effort="high"`, `enable_thinking=false`' in readme
    assert '{"chat_template_kwargs": {"enable_thinking": false, "effort": "high"}}' in readme
    mark = draft_export.read_mark(export)
    assert mark["template_args"] == {"enable_thinking": False, "effort": "high"}
    assert "README.md" in mark["files"], "another export replaces it"


@pytest.mark.parametrize("alone", [False, True])
def test_scripts_render_prompts_with_them(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """By the run's settings or, where the draft is alone, by its card."""
    draft = run / "best"
    if alone:
        draft = Path(shutil.copytree(draft, tmp_path / "draft"))
    (tmp_path / "prompts.txt").write_text("a cat\n")
    ends = "a cat<|im_end|>\n<|im_start|>assistant\n"
    few = ("--max-new-tokens", "4")
    read = script(monkeypatch, "generate", draft, "a cat", *few)
    assert any(text.endswith(ends + "any hot ") for text in read)
    out = tmp_path / "out"
    how = ("--prompts", tmp_path / "prompts.txt", "--out", out, *few)
    read = script(monkeypatch, "evaluate", draft, *how)
    assert any(text.endswith(ends + "any hot ") for text in read)
    read = script(monkeypatch, "evaluate", draft, "--thinking", "on", *how)
    assert any(text.endswith(ends + "all hot ") for text in read)
    assert Results.load(out).rendering.arguments == {"enable_thinking": True, "effort": "high"}


def test_serve_passes_them_on(
    run: Path, reading: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [x for x in reading.overrides() if x.startswith(("target", "drafter"))]
    script(monkeypatch, "serve", *settings, "--draft", run / "export", "--print")
    assert OPTION in capsys.readouterr().out.replace("\n", "")
    script(monkeypatch, "serve", *settings, "data.thinking=on", "--plain", "--print")
    printed = capsys.readouterr().out.replace("\n", "")
    assert """--default-chat-template-kwargs '{"enable_thinking": true}'""" in printed
    script(monkeypatch, "serve", *settings, "--plain", "--print")
    assert "chat-template" not in capsys.readouterr().out.replace("\n", "")


def test_responses_of_other_arguments_are_others(run: Path, reading: Tiny, tmp_path: Path) -> None:
    """Responses are kept by the ids of the rendered prompt, so none is read that answers a prompt
    with other arguments."""
    job = ("unigram", "data.responses=target", "decode.prompts=0")
    reading.job(tmp_path / "other", *job, "data.template_args={effort: low}")
    reading.job(tmp_path / "same", *job, ARGUMENTS)

    def of(folder: Path) -> set[str]:
        (files,) = read_json(folder / RESPONSES_READ).values()
        return {prompt for prompts in files.values() for prompt in prompts}

    assert of(tmp_path / "same") == of(run)
    assert not of(tmp_path / "other") & of(run)
    with pytest.raises(UserError, match=r"holds a run with data\.template_args="):
        reading.job(tmp_path / "same", *job, "data.template_args={effort: low}")


def test_records_with_arguments_of_their_own_are_slices(reading: Tiny, tmp_path: Path) -> None:
    chats = conversations(40)
    for n, chat in enumerate(chats):
        if n % 2:
            chat["chat_template_kwargs"] = {"effort": "low"}
    path = write_jsonl(tmp_path / "chats.jsonl", chats)
    settings = ["data.responses=target", "decode.prompts=8", f"data.path={path}"]
    reading.job(tmp_path / "run", "unigram", *settings, "data.template_args={effort: high}")
    results = Results.load(tmp_path / "run" / "report")
    for one in results.asked:
        parts = [part for part in one.slices.values() if part.by == "template arguments"]
        assert [part.value for part in parts] == ["effort=high", "effort=low"]
        assert sum(part.prompts for part in parts) == len(one.prompts)
    page = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "| template arguments: effort=low | " in page


def test_a_template_of_ones_own(
    reading: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, run = tmp_path / "own.jinja", tmp_path / "run"
    own.write_text(OWN)
    settings = [f"data.chat_template={own}", "data.template_args={effort: low}"]
    settings += ["data.responses=target", "decode.prompts=4"]
    reading.job(run, "eagle3", *settings)
    noted = noted_prompts(run, 4)
    assert noted is not None
    assert all(make_tokenizer().decode(p.ids).endswith("assistant\nnew cold ") for p in noted[0])
    assert (run / "chat_template.jinja").read_text() == OWN
    assert (run / "export" / "chat_template.jinja").read_text() == OWN
    rendering = Reference.load(run / "export").rendering
    assert rendering.own_template and rendering.arguments == {"effort": "low"}
    page = (run / "report" / "report.md").read_text()
    assert "--chat-template my-head/chat_template.jinja" in page
    assert "in place of the target's own" in (run / "export" / "README.md").read_text()

    # the file is needed only for the run: what follows reads the draft's own copy
    own.unlink()
    read = script(monkeypatch, "generate", run / "best", "a cat", "--max-new-tokens", "4")
    assert any(text.endswith("assistant\nnew cold ") for text in read)
    folders = (tmp_path / "head", tmp_path / "with-target")
    script(monkeypatch, "export", run / "best", "--to", folders[0], "--with-target", folders[1])
    assert (folders[0] / "chat_template.jinja").read_text() == OWN
    assert AutoTokenizer.from_pretrained(folders[1]).chat_template == OWN

    with pytest.raises(UserError, match="there is no such file"):
        reading.job(run, "eagle3", *settings)
    own.write_text(OWN.replace("new", "old"))
    with pytest.raises(UserError, match=r"data\.chat_template=.* changed since this run began"):
        reading.job(run, "eagle3", *settings)
    own.write_text(OWN)
    reading.job(run, "eagle3", *settings)


def test_a_template_for_a_tokenizer_without_one(tmp_path: Path) -> None:
    """Its end of a response is that of the given template."""
    target = save_target(tmp_path / "target", template=None)
    tiny = Tiny(tmp_path, target, write_jsonl(tmp_path / "chats.jsonl", conversations(29)))
    with pytest.raises(UserError, match=r"no chat template: .* give a template with data"):
        tiny.job(tmp_path / "none", "unigram")
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    tiny.job(tmp_path / "run", "unigram", f"data.chat_template={tmp_path / 'own.jinja'}")
    assert draft_checkpoint.read_card(tmp_path / "run" / "best").target.rendering.chat_template


def test_an_unread_argument_stops_a_job(reading: Tiny, tmp_path: Path) -> None:
    message = r"does not read it \(it reads effort, enable_thinking\)"
    with pytest.raises(UserError, match=message):
        reading.job(tmp_path / "run", "unigram", "data.template_args={reasoning_effort: high}")
    assert not (tmp_path / "run" / "config.json").exists()


def test_doctor_and_plan_render_with_them(
    reading: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own.jinja").write_text(OWN)
    settings = [*reading.overrides("unigram"), "data.template_args={effort: low}"]
    settings += [f"data.chat_template={tmp_path / 'own.jinja'}", "data.responses=target"]
    read = script(monkeypatch, "doctor", *settings, "--out", tmp_path / "doctor")
    assert any(text.endswith("assistant\nnew cold ") for text in read)
    printed = " ".join(capsys.readouterr().out.split())
    assert "with an own chat template (data.chat_template) and the template arguments" in printed
    assert "new cold " in (tmp_path / "doctor" / "data.md").read_text()

"""A job whose prompts ask for reasoning, or for none: its report has figures for both.

Run alone: python -m pytest tests/train/test_thinking.py (about 15 s)
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UserError
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
from tests.train.data.chats import talk
from train.data.conversations import DataConfig
from train.data.rendering import BoundedTemplate
from train.data.run_data import whole_prompts

PROMPT = "{% if enable_thinking is true %}all {% elif enable_thinking is false %}any {% endif %}"
ASKS = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n" + PROMPT + "{% endif %}")


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A target whose prompts end with a word that says whether reasoning is asked for."""
    root = tmp_path_factory.mktemp("asking")
    target = save_target(root / "target", template=ASKS)
    return Tiny(root, target, write_jsonl(root / "chats.jsonl", conversations(60)))


def test_the_report_has_figures_for_both(
    asking: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["data.thinking=mixed", "data.responses=target", "decode.prompts=8"]
    asking.job(tmp_path / "run", "eagle3", *settings)
    results = Results.load(tmp_path / "run" / "report")
    for one in results.asked:
        parts = [part for part in one.slices.values() if part.by == "reasoning"]
        assert [part.value for part in parts] == ["off", "on"]
        assert sum(part.prompts for part in parts) == len(one.prompts) == 8
        assert sum(part.tau.n for part in parts) == one.speculation_steps
    page = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "### Where drafting pays" in page and "| reasoning: off | " in page
    read, write = list[str](), BoundedTemplate.render

    def rendered(*args: Any, **kwargs: Any) -> Any:
        text, blocks = write(*args, **kwargs)
        read.append(text)
        return text, blocks

    monkeypatch.setattr(BoundedTemplate, "render", rendered)
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    few = [str(tmp_path / "run" / "best"), "--thinking", "on", "--max-new-tokens", "4"]
    (tmp_path / "prompts.txt").write_text("a cat\n")
    for script in (["generate", "a cat"], ["evaluate", "--prompts", str(tmp_path / "prompts.txt")]):
        monkeypatch.setattr(sys, "argv", [*script[:1], *few, *script[1:]])
        read.clear()
        runpy.run_path(str(REPOSITORY / "scripts" / script[0]), run_name="__main__")
        assert any(text.endswith("a cat<|im_end|>\n<|im_start|>assistant\nall ") for text in read)


def test_one_kind_of_prompts_has_no_table(asking: Tiny, tmp_path: Path) -> None:
    asking.job(tmp_path / "run", "unigram", "data.thinking=off", "data.responses=target")
    for one in Results.load(tmp_path / "run" / "report").asked:
        assert "reasoning" not in {part.by for part in one.slices.values()}
    assert "| reasoning" not in (tmp_path / "run" / "report" / "report.md").read_text()


def test_prompts_of_a_file_ask_for_reasoning() -> None:
    for thinking, end in (("on", "all "), ("off", "any "), ("template", "assistant\n")):
        (prompt,) = whole_prompts(
            [talk("a cat")], make_tokenizer(ASKS), None, DataConfig(thinking=thinking)
        )
        assert make_tokenizer(ASKS).decode(prompt.ids).endswith(end)
    with pytest.raises(UserError, match="--thinking on: the target has no chat template"):
        whole_prompts([talk("a cat")], make_tokenizer(None), None, thinking="on")

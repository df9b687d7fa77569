"""A job whose prompts ask for reasoning, or for none: its report has figures for both.

Run alone: python -m pytest tests/train/test_thinking.py (about 15 s)
"""

from pathlib import Path

import pytest

from specdec.measure.results import Results
from tests.tiny import TEMPLATE, Tiny, conversations, save_target, write_jsonl

PROMPT = "{% if enable_thinking is true %}all {% elif enable_thinking is false %}any {% endif %}"
ASKS = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n" + PROMPT + "{% endif %}")


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A target whose prompts end with a word that says whether reasoning is asked for."""
    root = tmp_path_factory.mktemp("asking")
    target = save_target(root / "target", template=ASKS)
    return Tiny(root, target, write_jsonl(root / "chats.jsonl", conversations(60)))


def test_the_report_has_figures_for_both(asking: Tiny, tmp_path: Path) -> None:
    settings = ["data.thinking=mixed", "data.answers=target", "decode.prompts=8"]
    asking.job(tmp_path / "run", "eagle3", *settings)
    results = Results.read(tmp_path / "run" / "report")
    for one in results.asked:
        assert [*one.slices] == ["with reasoning", "without reasoning"]
        parts = one.slices.values()
        assert sum(part.prompts for part in parts) == len(one.prompts) == 8
        assert sum(part.tau.n for part in parts) == one.rounds
    page = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "### Kinds of prompts" in page and "| without reasoning | " in page


def test_one_kind_of_prompts_has_no_table(asking: Tiny, tmp_path: Path) -> None:
    asking.job(tmp_path / "run", "unigram", "data.thinking=off", "data.answers=target")
    assert all(not one.slices for one in Results.read(tmp_path / "run" / "report").asked)
    page = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "Kinds of prompts" not in page

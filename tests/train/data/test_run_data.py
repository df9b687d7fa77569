"""One reader says what a run reads: train, evaluate, doctor, plan and generate agree.

Run alone: python -m pytest tests/train/data/test_run_data.py (about 30 s)
"""

import json
from argparse import Namespace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specdec import errors
from tests.tiny import REPOSITORY
from tests.train.data.chats import ASK, tokenizer_of
from tests.train.data.test_cases import CASES, FULL
from train.data.conversations import DataConfig, Tally
from train.data.run_data import whole_prompts
from train.data.sources import read_prompts_file
from train.data.split import split_prompts

# loses contents that are strings, as the templates of models that also read images
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}" + ASK
)
THINKS = "{% if enable_thinking is false %}<think></think>{% endif %}"
ASKS = FULL.replace("assistant\n{% endif %}", f"assistant\n{THINKS}{{% endif %}}")


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/generate as a module, without running it."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    monkeypatch.setattr(errors, "command", lambda main: None)
    loader = SourceFileLoader("script_generate", str(REPOSITORY / "scripts" / "generate"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_prompts_of_a_file_are_those_that_the_data_reader_makes() -> None:
    """With tools, a system turn and thinking, as transformers renders them."""
    path, tokenizer, tally = CASES / "prompts_with_tools.jsonl", tokenizer_of(ASKS), Tally()
    found = read_prompts_file(path, tally)
    (prompt,) = whole_prompts(found, tokenizer, None)
    cfg = DataConfig(path=str(path), answers="target", held_out=0)
    (read,) = split_prompts(cfg, tokenizer).train
    record = json.loads(path.read_text())
    expected = tokenizer.apply_chat_template(
        [{"role": "system", "content": record["system"]}, *record["messages"]],
        tools=record["tools"],
        enable_thinking=False,
        add_generation_prompt=True,
    )["input_ids"]
    assert prompt.ids.tolist() == read.ids.tolist() == expected
    assert prompt.kind == "without reasoning" and not tally.ignored and not tally.changed


def test_keys_of_prompts_that_are_not_read_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "temper": 3}\n"b"\n')
    tally = Tally()
    assert [c.messages[-1].content for c in read_prompts_file(path, tally)] == ["a", "b"]
    assert dict(tally.ignored) == {"the key 'temper' of records": 1} and tally.read == 2


@pytest.mark.parametrize("thinking", [None, "off"])
def test_generate_asks_what_a_server_would(
    generate: ModuleType, tmp_path: Path, thinking: str | None
) -> None:
    """By templates that read strings and content parts, in a chat of several turns; by default as
    the draft's run asked for reasoning."""
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    chat += [{"role": "user", "content": "And how?"}]
    asks = ({"thinking": thinking} if thinking else {}) | {"path": "x"}
    (tmp_path / "config.json").write_text(json.dumps({"data": asks}))
    args = Namespace(draft=tmp_path / "best", thinking=None)
    options: dict[str, Any] = {"enable_thinking": False} if thinking else {}
    for template in (PARTS, ASKS):
        tokenizer = tokenizer_of(template)
        for turns in (chat[:1], chat):
            expected = tokenizer.apply_chat_template(
                [
                    t | {"content": [{"type": "text", "text": t["content"]}]}
                    if template == PARTS
                    else t
                    for t in turns
                ],
                add_generation_prompt=True,
                **options,
            )["input_ids"]
            assert generate.prompt_of(turns, args, tokenizer) == expected
            assert turns[-1]["content"] in tokenizer.decode(expected)

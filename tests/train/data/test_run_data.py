"""One reader says what a run reads: train, evaluate, doctor, plan and generate agree.

Run alone: python -m pytest tests/train/data/test_run_data.py (about 40 s)
"""

import ast
import json
import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import train
from specdec.formats import draft_checkpoint
from specdec.targets.loading import TargetLoader
from specdec.targets.parts import TargetParts
from specdec.targets.target_config import TargetConfig
from tests.processes import script_module
from tests.tiny import (
    REPOSITORY,
    TEMPLATE,
    WORDS,
    Tiny,
    make_tokenizer,
    responding,
    save_target,
    write_jsonl,
)
from tests.train.data.chats import ASK, tokenizer_of
from tests.train.data.test_cases import CASES, FULL
from train.data.conversations import DataConfig, Tally
from train.data.run_data import DataCounts, measured_prompts, read_run_data, whole_prompts
from train.data.sources import read_prompts_file
from train.data.split import split_documents, split_prompts
from train.diagnosis import STOP, TRAINED, diagnose_data
from train.folder import HELD_OUT, data_of_run, noted_prompts
from train.planning import plan_of_run

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
    return script_module("generate", monkeypatch)


def test_prompts_of_a_file_are_those_that_the_data_reader_makes() -> None:
    """With tools, a system turn and thinking, as transformers renders them."""
    path, tokenizer, tally = CASES / "prompts_with_tools.jsonl", tokenizer_of(ASKS), Tally()
    found = read_prompts_file(path, tally)
    (prompt,) = whole_prompts(found, tokenizer, None)
    cfg = DataConfig(path=str(path), responses="target", held_out=0)
    (read,) = split_prompts(cfg, tokenizer).train
    record = json.loads(path.read_text())
    expected = tokenizer.apply_chat_template(
        [{"role": "system", "content": record["system"]}, *record["messages"]],
        tools=record["tools"],
        enable_thinking=False,
        add_generation_prompt=True,
    )["input_ids"]
    assert prompt.ids.tolist() == read.ids.tolist() == expected
    assert prompt.properties["reasoning"] == "off" and prompt.tools
    assert not tally.ignored and not tally.changed


@pytest.mark.parametrize("thinking", ["template", "on", "off"])
def test_training_and_generation_give_a_chat_the_same_ids(
    generate: ModuleType, tmp_path: Path, thinking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a document has before a response is the prompt that scripts/generate makes of these
    turns, by templates of strings and of content parts, and the prompt that a file of prompts
    gives, with tools, a system turn and reasoning."""
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    turns += [{"role": "user", "content": [{"type": "text", "text": "And how?"}]}]
    settings = {"path": "x", "thinking": thinking}
    (tmp_path / "config.json").write_text(json.dumps({"data": settings, "identity": "this run"}))
    card = SimpleNamespace(notes={"run": "this run"})
    monkeypatch.setattr(draft_checkpoint, "read_card", lambda _: card)
    args = Namespace(draft=tmp_path / "best", thinking=None)
    said = {"role": "assistant", "content": "Like this."}
    record = json.loads((CASES / "prompts_with_tools.jsonl").read_text())
    for template in (PARTS, ASKS):
        tokenizer = tokenizer_of(template)

        def before_the_response(record: dict[str, Any], tokenizer: Any = tokenizer) -> list[int]:
            path = write_jsonl(tmp_path / "trained.jsonl", [record])
            cfg = DataConfig(path=str(path), held_out=0, min_response=1, thinking=thinking)
            *_, document = split_documents(cfg, tokenizer).train
            start = [i for i, m in enumerate(document.mask) if m and not document.mask[i - 1]][-1]
            assert tokenizer.decode(document.ids[start:]).startswith(said["content"])
            ids: list[int] = document.ids[:start].tolist()
            return ids

        typed = [*turns[:2], {"role": "user", "content": "And how?"}]
        for chat, written in ((turns[:1], typed[:1]), (turns, typed)):
            ids = before_the_response({"messages": [*chat, said]})
            assert ids == generate.prompt_of(written, args, tokenizer)
        if template == ASKS:  # the other one writes no tools
            path = write_jsonl(tmp_path / "asked.jsonl", [record])
            cfg = DataConfig(thinking=thinking)
            (prompt,) = whole_prompts(read_prompts_file(path), tokenizer, None, cfg)
            answered = record | {"messages": [*record["messages"], said]}
            assert before_the_response(answered) == prompt.ids.tolist()


def test_keys_of_prompts_that_are_not_read_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "temper": 3}\n"b"\n')
    tally = Tally()
    assert [c.messages[-1].content for c in read_prompts_file(path, tally)] == ["a", "b"]
    assert dict(tally.ignored) == {"the key 'temper' of records": 1} and tally.read == 2


@pytest.mark.parametrize("thinking", [None, "off"])
def test_generate_asks_what_a_server_would(
    generate: ModuleType, tmp_path: Path, thinking: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By templates that read strings and content parts, in a chat of several turns; by default as
    the draft's run asked for reasoning."""
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    chat += [{"role": "user", "content": "And how?"}]
    asks = ({"thinking": thinking} if thinking else {}) | {"path": "x"}
    (tmp_path / "config.json").write_text(json.dumps({"data": asks, "identity": "this run"}))
    card = SimpleNamespace(notes={"run": "this run"})
    monkeypatch.setattr(draft_checkpoint, "read_card", lambda _: card)
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


def parts_of(place: Path, template: str = TEMPLATE) -> TargetParts:
    return TargetLoader(TargetConfig(str(save_target(place, template=template)))).parts


def chat(n: int, turns: int = 1, words: int = 6) -> dict[str, Any]:
    """A chat of turns of as many words."""
    draw = random.Random(n)
    texts = [" ".join(draw.choices(WORDS, k=words)) for _ in range(2 * turns)]
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"id": f"c{n}", "messages": messages}


def test_the_doctor_asks_the_prompts_that_a_run_asks(tmp_path: Path) -> None:
    """A chat of four questions has a prompt of its first question alone: a turn has 6 words with 5
    spaces between them and 5 tokens around them, and the generation prompt has 3."""
    parts = parts_of(tmp_path / "target")
    path = write_jsonl(tmp_path / "x.jsonl", [chat(n, turns=4) for n in range(45)])
    cfg = DataConfig(str(path), responses="target", max_prompt=24, max_length=100)
    split = read_run_data(cfg, parts)
    diagnosis = diagnose_data(cfg, parts, None, 3, responding(max_new_tokens=9))
    assert diagnosis.counts == DataCounts.of_split(split)
    prompts = [*split.train, *split.held_out]
    assert [len(prompt.ids) for prompt in prompts] == [6 + 5 + 5 + 3] * 45
    assert diagnosis.counts.train == 36 and diagnosis.counts.train_tokens == 36 * 19
    assert diagnosis.longer == {24: 45} and not diagnosis.faults
    assert [p.ids.tolist() for p in diagnosis.prompts] == [p.ids.tolist() for p in split.prompts]
    for sample in diagnosis.samples:
        assert sample.pieces[-1] == (TRAINED, "[the target's response of up to 9 tokens]")


def test_the_doctor_counts_the_tokens_that_a_run_keeps(tmp_path: Path) -> None:
    """Documents of 20 tokens that are cut at 12, and skipped where they are not cut."""
    parts = parts_of(tmp_path / "target")
    records = [chat(n, words=30) for n in range(40)] + [chat(n) for n in range(40, 50)]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    cut = DataConfig(str(path), max_length=12, too_long="truncate", held_out=0.2, min_response=1)
    for cfg in (
        replace(cut, max_length=80),
        replace(cut, max_length=80, too_long="drop"),
    ):
        diagnosis, split = diagnose_data(cfg, parts, None, 0), read_run_data(cfg, parts)
        documents = [*split.train, *split.held_out]
        assert diagnosis.counts == DataCounts.of_split(split)
        # a turn of 30 words has 59 tokens and 5 around them, one of 6 words has 11 and 5
        length = 80 if cfg.too_long == "truncate" else 32
        assert max(len(d.ids) for d in documents) <= length
        assert len(documents) + split.tally.dropped.total() == 50
        assert diagnosis.longer[80] == 40
        assert diagnosis.counts.train_tokens == sum(len(d.ids) for d in split.train)
        assert diagnosis.texts["tokens of these"] == diagnosis.counts.train_tokens


def test_a_template_that_opens_a_thought_is_no_fault_where_the_target_answers(
    tmp_path: Path,
) -> None:
    template = (CASES / "template_prompt_opens_a_thought.jinja").read_text()
    parts = parts_of(tmp_path / "target", template)
    path = write_jsonl(tmp_path / "x.jsonl", [chat(n) for n in range(40)])
    cfg = DataConfig(str(path), responses="target")
    assert not diagnose_data(cfg, parts, None, 1, responding()).faults


def test_the_doctor_shows_responses_that_are_stored(tiny: Tiny, tmp_path: Path) -> None:
    settings = ["data.responses=target", f"responses.root={tmp_path / 'responses'}"]
    settings += ["decode.prompts=0", "responses.max_new_tokens=5"]
    cfg = tiny.config("ngram", *settings)
    train.run(cfg, tmp_path / "run")
    parts = TargetLoader(cfg.target).parts
    for sample in diagnose_data(cfg.data, parts, None, 4, cfg.response_generation).samples:
        shown = sum(kind in (TRAINED, STOP) for kind, _ in sample.pieces)
        assert shown >= 1 and 1 <= sample.trained <= 5 and "[the" not in sample.pieces[-1][1]


def test_a_plan_counts_what_a_run_reads(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several sources, and not the JSON files of the working folder; of 500 conversations, a
    fifth of which no longer is held out, and not of a sample."""
    write_jsonl(tmp_path / "other.jsonl", [chat(n) for n in range(900, 960)])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    numbers = range(0, 350), range(350, 640)
    files = [
        write_jsonl(tmp_path / "data" / f"{k}.jsonl", [chat(n) for n in some])
        for k, some in enumerate(numbers)
    ]
    sources = f"data.sources=[{','.join(f'{{path:{file}}}' for file in files)}]"
    cfg = tiny.config("eagle3", "data.path=''", sources, "planning.device=l4", "data.held_out=null")
    amount = plan_of_run(cfg).facts.data
    split = read_run_data(cfg.data, TargetLoader(cfg.target).parts)
    assert amount.split is not None and DataCounts.of_split(amount.split) == DataCounts.of_split(
        split
    )
    assert split.tally.read == 640 and len(split.held_out) == 120
    assert amount.conversations == len(split.train) == 640 - 120 - split.tally.dropped.total()
    assert amount.tokens == sum(len(document.ids) for document in split.train)


def test_an_evaluation_measures_the_prompts_of_the_run(tiny: Tiny, tmp_path: Path) -> None:
    """With weighted sources, of which half of the conversations are unusable; by the notes of the
    run, and without them where they are damaged."""
    long = [chat(n, words=80 if n % 2 else 6) for n in range(60)]
    files = [
        write_jsonl(tmp_path / f"{k}.jsonl", some)
        for k, some in enumerate((long, [chat(n) for n in range(100, 200)]))
    ]
    sources = f"data.sources=[{{path:{files[0]},weight:2}},{{path:{files[1]},weight:1}}]"
    settings = ["data.path=''", sources, "data.responses=data", "decode.prompts=0"]
    cfg = tiny.config("ngram", *settings, "data.held_out=0.3", "data.max_length=64")
    folder = tmp_path / "run"
    train.run(cfg, folder)
    parts = TargetLoader(cfg.target).parts
    split = read_run_data(cfg.data, parts)
    expected = [p.ids.tolist() for p in split.prompts]
    noted = noted_prompts(folder, 1000)
    assert noted is not None and len(expected) > 4
    assert [p.ids.tolist() for p in noted[0]] == expected
    assert vars(noted[0][0]) | {"ids": 0} == vars(split.prompts[0]) | {"ids": 0}
    again, others = measured_prompts(data_of_run(folder), parts.tokenizer, 1000, 1000)
    assert [p.ids.tolist() for p in again] == expected
    assert [p.id for p in others] == [p.id for p in noted[1]]
    file = folder / HELD_OUT
    file.write_text(file.read_text().replace('"part": "test"', '"part": "validation"', 1))
    assert noted_prompts(folder, 1000) is None


def test_other_thinking_asks_the_same_conversations(tmp_path: Path) -> None:
    """As scripts/evaluate --thinking does: what the run held out is asked in another way."""
    template = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n" + THINKS + "{% endif %}")
    tokenizer = make_tokenizer(template)
    path = write_jsonl(tmp_path / "x.jsonl", [chat(n) for n in range(60)])
    for responses in ("data", "target"):
        cfg = DataConfig(str(path), held_out=0.3, responses=responses)
        asked, _ = measured_prompts(cfg, tokenizer, 100, 0)
        other, _ = measured_prompts(cfg, tokenizer, 100, 0, "off")
        assert [p.id for p in asked] == [p.id for p in other] and len(asked) > 8
        for one, two in zip(asked, other, strict=True):
            assert one.ids.tolist() == two.ids[: len(one.ids)].tolist()
            assert len(two.ids) > len(one.ids) and two.thinking is False


def test_random_configurations_are_read_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of `scripts/bench readers`."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    from benches import readers

    found = readers.outcomes(tmp_path, 6, seed=2)
    assert [x.settings for x in found if not x.agrees] == []
    assert sum(not x.rejected for x in found) >= 4
    assert all(
        {*x.read} == {"train", "evaluate", "doctor", "plan"} for x in found if not x.rejected
    )


def test_one_module_reads_the_data_of_runs() -> None:
    """Nobody else splits or reads conversations, so nobody can read others: but for a bench that
    trains its target, and so has no tokenizer yet."""
    inner = {"split_documents", "split_prompts", "split_conversations", "read_conversations"}
    inner |= {"records", "near_duplicates"}
    found = set[tuple[str, str]]()
    for folder in ("train", "scripts"):
        for file in (REPOSITORY / folder).rglob("*"):
            inside = file.parent == REPOSITORY / "train" / "data"
            if inside or not file.is_file() or file.suffix not in ("", ".py"):
                continue
            for node in ast.walk(ast.parse(file.read_text())) if is_python(file) else ():
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("train.data."):
                    names = {alias.name for alias in node.names}
                    module = str(node.module).removeprefix("train.data.")
                    if module in ("split", "reader", "sources"):
                        found |= {(file.name, name) for name in names & inner}
    assert found == {("translation.py", "split_conversations")}


def is_python(file: Path) -> bool:
    with file.open("rb") as opened:
        return file.suffix == ".py" or b"python" in opened.readline()

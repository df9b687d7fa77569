"""The shapes of records and the kinds of files that docs/formats.md lists: each row of its tables
is a test.

Run alone: python -m pytest tests/train/data/test_shapes.py (about 15 s)
"""

import csv
import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.errors import UserError
from tests.train.data.chats import CHATML, tokenizer_of
from tests.train.data.test_cases import FULL
from tests.train.data.test_conversations import read_all, write_lines
from train.data.conversations import Conversation, DataConfig, SourceConfig, Tally, Unusable
from train.data.reader import read_conversations, shuffled
from train.data.records import calls_within, tools_within
from train.data.split import split_conversations, split_documents, split_prompts
from train.run_config import composed, register

PAGE = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in table
    ]


SHAPES = rows("Shapes of records")
FILES = {cells[0].strip("`") for cells in rows("Kinds of files")}


def described(conversation: Conversation) -> str:
    """A conversation as the table writes it."""
    if (tokens := conversation.tokens) is not None:
        text = " ".join(
            f"({i})" if said else str(i) for i, said in zip(tokens.ids, tokens.mask, strict=True)
        )
        return "tokens " + text.replace(") (", " ")
    turns = []
    for m in conversation.messages:
        turn = f"{m.role} "
        if "reasoning_content" in m.beside:
            turn += f"(thinks {m.beside['reasoning_content']}) "
        turn += m.content.replace("\n", "⏎")
        for call in m.beside.get("tool_calls", ()):
            arguments = call["function"]["arguments"].items()
            said = ", ".join(f"{k}={x}" for k, x in arguments)
            turn = f"{turn.rstrip()} → {call['function']['name']}({said})"
        weight = f" (weight {m.weight:g})" if m.trained and m.weight != 1 else ""
        turns.append(turn + weight + " (not trained on)" * (not m.trained))
    tools = [tool["function"]["name"] for tool in conversation.tools]
    return f"tools {', '.join(tools)}; " * bool(tools) + ", ".join(turns)


@pytest.mark.parametrize("row", SHAPES, ids=[row[0] for row in SHAPES])
def test_a_shape_of_the_table_is_read_as_it_says(tmp_path: Path, row: list[str]) -> None:
    _, record, expected = row
    path = tmp_path / "x.jsonl"
    path.write_text(f"{record.strip('`')}\n" * 2)
    for conversation in read_all(str(path), responses="target")[0]:
        assert described(conversation) == expected


def test_the_table_has_the_shapes() -> None:
    assert len(SHAPES) >= 35 and len({row[0] for row in SHAPES}) == len(SHAPES)


CHAT = [{"role": "user", "content": "Why, é😀?"}, {"role": "assistant", "content": 'So "it" is.'}]
EXPECTED = ("Why, é😀?", 'So "it" is.')


def _zstd(data: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def _table(suffix: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / f"x{suffix}"
        with path.open("w", newline="") as file:
            writer = csv.writer(file) if suffix == ".csv" else csv.writer(file, "excel-tab")
            if suffix == ".csv":
                writer.writerows([["messages"], [json.dumps(CHAT)], [str(CHAT)]])
            else:
                file.write("prompt\tcompletion\n" + ("\t".join(EXPECTED) + "\n") * 2)
        return path

    return write


def _datasets(kind: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        from datasets import Dataset, DatasetDict

        data = Dataset.from_list([{"messages": CHAT}] * 2)
        if kind == "parquet":
            data.to_parquet(folder / "x.parquet")
            return folder / "x.parquet"
        other = Dataset.from_list([{"messages": [{"role": "user", "content": "test"}]}])
        DatasetDict({"train": data, "test": other}).save_to_disk(folder / "saved")
        if kind == "folder":
            return folder / "saved"
        return next((folder / "saved" / "train").glob("*.arrow"))

    return write


def _bytes(name: str, data: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


LINES = (json.dumps({"messages": CHAT}) + "\n") * 2
WRITERS: dict[str, Callable[[Path], Path]] = {
    ".jsonl": _bytes("x.jsonl", LINES.encode()),
    ".json": _bytes("x.json", json.dumps([{"messages": CHAT}] * 2, indent=1).encode()),
    ".jsonl.gz": _bytes("x.jsonl.gz", gzip.compress(LINES.encode())),
    ".zst": _bytes("x.zst", _zstd(LINES.encode())),
    ".csv": _table(".csv"),
    ".tsv": _table(".tsv"),
    ".parquet": _datasets("parquet"),
    ".arrow": _datasets("arrow"),
    ".txt": _bytes("x.txt", f"{EXPECTED[0]}\n\n{EXPECTED[0]}\n".encode()),
    "a folder": _datasets("folder"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_kind_of_file_is_read(tmp_path: Path, kind: str) -> None:
    found, tally = read_all(str(WRITERS[kind](tmp_path)), responses="target")
    texts = [tuple(m.content for m in c.messages) for c in found]
    assert texts == [EXPECTED[:1] if kind == ".txt" else EXPECTED] * 2
    assert not tally.dropped and not tally.unread and not tally.ignored


def test_the_table_has_the_kinds_of_files() -> None:
    assert {*WRITERS, "a hub data set"} == FILES  # hub: test_conversations.py, and the next test


def test_the_subset_of_a_hub_data_set_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def stored(*args: Any, **kwargs: Any) -> list[Any]:
        asked.append((args, kwargs["split"], kwargs["streaming"]))
        return [{"messages": CHAT}]

    monkeypatch.setattr(datasets, "load_dataset", stored)
    split_conversations(DataConfig("a/b", subset="c", split="test_sft", held_out=0), lambda c: c)
    sources = [SourceConfig("a/b", "c"), SourceConfig("d/e", split="x")]
    split_conversations(DataConfig("", sources=sources, held_out=0), lambda c: c)
    assert asked == [
        (("a/b", "c"), "test_sft", True),
        (("a/b", "c"), "train", True),
        (("d/e",), "x", True),
    ]


def test_splits_of_a_folder(tmp_path: Path) -> None:
    from datasets import Dataset

    saved = WRITERS["a folder"](tmp_path)
    (one,), _ = read_all(str(saved), split="test")
    assert one.opening == "test"
    with pytest.raises(UserError, match=r"has the splits test, train: give one as data\.split"):
        read_all(str(saved), split="dev")
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    for split in ("train", "test_sft"):
        for n in range(2):
            data = Dataset.from_list([{"prompt": f"{split} {n}"}])
            data.to_parquet(hub / f"{split}-{n:05}-of-00002.parquet")
    for split in ("train", "test_sft"):
        found, _ = read_all(str(hub.parent), split=split)
        assert [c.opening for c in found] == [f"{split} 0", f"{split} 1"]
    with pytest.raises(UserError, match=r"data.split='dev': .* has the splits test_sft, train: g"):
        read_all(str(hub.parent), split="dev")


# Tables


def test_cells_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    long = "x" * 200_000  # more than csv allows by itself
    path.write_text(
        "\ufeffprompt,completion,id\n"
        '"q, with\na ""line""",a,1\n'
        f"q,{long},2\n"
        "q,,3\n"
        "\n"
        "q,a,4,more\n"
        "q,a,5\n",
        encoding="utf-8",
    )
    before = csv.field_size_limit()
    found, tally = read_all(str(path))
    assert csv.field_size_limit() == before
    assert [m.content for m in found[0].messages] == ['q, with\na "line"', "a"]
    assert len(found[1].messages[1].content) == 200_000
    assert [len(c.messages) for c in found] == [2, 2, 1, 2]
    assert tally.unread == {"rows with more cells than the header has": 1}
    pairs = DataConfig(str(path), "pairs", ["prompt", "completion"], held_out=0)
    assert split_conversations(pairs, lambda c: c).tally.kept == 3


def test_a_csv_file_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.data.sources.LARGEST", 1000)
    path = tmp_path / "x.csv"
    path.write_text('prompt\nq\n"' + "endless\n" * 1000)
    found, tally = read_all(str(path))
    assert len(found) == 1 and "broken row" in str(tally)


# Tools in texts


TOOLS = [{"name": "f"}]
PROMPT = f"You are a function calling AI model. Tools: <tools>{json.dumps(TOOLS)}</tools> Call."


def test_tools_are_taken_out_of_system_prompts() -> None:
    assert tools_within(f"Be brief.\n\n{PROMPT}") == ("Be brief.", TOOLS)
    qwen = 'Be brief.\n\n# Tools\n\nYou may …\n<tools>\n{"name": "f"}\n{"name": "g"}\n</tools>'
    assert tools_within(qwen) == ("Be brief.", [*TOOLS, {"name": "g"}])
    for other in ("Be brief.", "Use <tools></tools>.", f"Mine: <tools>{json.dumps(TOOLS)}</tools>"):
        assert tools_within(other) is None


CALLS = [
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", 1),
    ("Let me see.\n<tool_call>\n{'name': 'f', 'arguments': {'x': True}}\n</tool_call>", "Let", 1),
    ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>', "", 2),
    ('Well. <functioncall> {"name": "f", "arguments": \'{"x": "it\\\'s"}\'}', "Well.", 1),
    ("no call", "no call", 0),
]


@pytest.mark.parametrize(("text", "said", "count"), CALLS)
def test_calls_are_taken_out_of_responses(text: str, said: str, count: int) -> None:
    content, calls = calls_within(text)
    assert content.startswith(said) and len(calls) == count
    assert "call>" not in content


def test_calls_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for text in ("<tool_call>f(x)</tool_call>", "<tool_call>{}</tool_call> Done."):
        with pytest.raises(Unusable, match=r"not JSON|text after a tool call"):
            calls_within(text)
    human = {"from": "human", "value": "q"}
    system = {"from": "system", "value": f"Mine: <tools>{json.dumps(TOOLS)}</tools>"}
    both = {"conversations": [system, human, {"from": "gpt", "value": "a"}], "tools": TOOLS}
    plain = {"conversations": [human, {"from": "gpt", "value": "<tool_call>x</tool_call>"}]}
    found, tally = read_all(write_lines(tmp_path / "x.jsonl", [both, plain]))
    assert list(tally.dropped) == ["tools that its system prompt describes, too, in an unknown way"]
    assert found[0].messages[1].content == "<tool_call>x</tool_call>"  # no tools: a text


def test_hermes_and_messages_give_the_same_document(tmp_path: Path) -> None:
    by_name = {row[0]: row[1].strip("`") for row in SHAPES}
    tokenizer = tokenizer_of(FULL)
    ids = set()
    for name in ("Hermes function calling", "Glaive function calling, v2", "APIGen-MT"):
        record = json.loads(by_name[name])
        record.pop("system", None)
        if "chat" in record:
            record["tools"] = TOOLS
        path = write_lines(tmp_path / "x.jsonl", [record])
        cfg = DataConfig(path, held_out=0, min_response=1)
        (document,) = split_documents(cfg, tokenizer).train
        ids.add((document.ids.tobytes(), document.mask.tobytes()))
    assert len(ids) == 1


# Rows of token ids


def tokens(tmp_path: Path, *records: Any, **options: Any) -> DataConfig:
    path = write_lines(tmp_path / "t.jsonl", records)
    return DataConfig(path, held_out=0, min_response=1, **options)


def test_rows_of_token_ids(tmp_path: Path) -> None:
    labelled = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, -100, 8, -100], "id": "r"}
    for format, template in (("auto", CHATML), ("tokens", None)):
        cfg = tokens(tmp_path, labelled, format=format)
        (document,) = split_documents(cfg, tokenizer_of(template)).train
        assert document.ids.tolist() == [5, 6, 7, 8] and document.id == "r"
        assert document.mask.tolist() == [False, True, False, True]
        asks = tokens(tmp_path, labelled, format=format, responses="target")
        (prompt,) = split_prompts(asks, tokenizer_of(template)).train
        assert prompt.ids.tolist() == [5, 6, 7] and prompt.ids.dtype == np.int32
        asks.max_prompt = 2
        (prompt,) = split_prompts(asks, tokenizer_of(template)).train
        assert prompt.ids.tolist() == [5]
    alone = tokens(tmp_path, {"input_ids": [5, 6, 7]}, responses="target")
    (prompt,) = split_prompts(alone, tokenizer_of(CHATML)).train
    assert prompt.ids.tolist() == [5, 6, 7]
    text = tokens(tmp_path, {"input_ids": [5, 6, 7]}, format="paragraphs")
    (document,) = split_documents(text, tokenizer_of(None)).train
    assert document.mask.tolist() == [False, True, True]


WRONG = [
    ({"input_ids": [1, 2]}, "without labels or a mask"),
    ({"input_ids": [1, 2], "labels": [1]}, "labels of another number"),
    ({"input_ids": [1, 2], "labels": [2, -100]}, "neither its token ids nor -100"),
    ({"input_ids": [1, -2], "labels": [1, -2]}, "negative or too large"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "not a 0 or a 1"),
    ({"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 0, 1]}, "padding between"),
    ({"input_ids": [1, 2], "labels": [-100, -100]}, "no assistant turn"),
]


@pytest.mark.parametrize(("record", "reason"), WRONG)
def test_rows_of_token_ids_that_are_wrong(tmp_path: Path, record: Any, reason: str) -> None:
    good = {"input_ids": [1, 2], "labels": [-100, 2]}
    split = split_documents(tokens(tmp_path, good, record), tokenizer_of(CHATML))
    assert len(split.train) == 1 and reason in str(split.tally)


# Several sources


def source(folder: Path, name: str, count: int) -> str:
    records = [{"prompt": f"{name} {i}", "id": f"{name}{i}"} for i in range(count)]
    return write_lines(folder / f"{name}.jsonl", records)


def mixed(folder: Path, *weights: float | None, **options: Any) -> tuple[list[str], Tally]:
    names = ["a", "b", "c"][: len(weights)]
    sources = [
        SourceConfig(source(folder, x, 40), weight=w) for x, w in zip(names, weights, strict=True)
    ]
    tally = Tally()
    cfg = DataConfig("", sources=sources, **options)
    return [c.id for c, _ in read_conversations(cfg, tally, lambda c: c)], tally


def test_sources_with_weights_have_their_shares_at_any_point(tmp_path: Path) -> None:
    ids, tally = mixed(tmp_path, 3, 1)
    assert len(ids) == 54 and "the rest of the other sources, after the end of" in str(tally)
    for n in range(4, 50):
        count = Counter(id[0] for id in ids[:n])
        assert abs(count["a"] - n * 0.75) <= 1
    ids, _ = mixed(tmp_path, 1, 1, 2, limit=20)
    assert Counter(id[0] for id in ids) == {"a": 5, "b": 5, "c": 10}
    ids, tally = mixed(tmp_path, None, None)
    assert len(ids) == 80 and not tally.unread


def test_shards_are_those_of_usable_conversations(tmp_path: Path) -> None:
    good, bad = {"prompt": "q", "completion": "an answer"}, {"messages": []}
    a = write_lines(tmp_path / "a.jsonl", [good | {"id": "a"}] * 20)
    b = write_lines(tmp_path / "b.jsonl", [bad, good | {"id": "b"}] * 20)
    sources = [SourceConfig(a, weight=1), SourceConfig(b, weight=1)]
    cfg = DataConfig("", sources=sources, limit=20, held_out=0)
    ids = [c.id[0] for c, _ in read_conversations(cfg, Tally(), lambda c: c)]
    assert Counter(ids) == {"a": 10, "b": 10}


def test_shuffling_keeps_every_conversation_and_repeats(tmp_path: Path) -> None:
    path = source(tmp_path, "a", 40)
    orders = []
    for options in ({}, {"shuffle": 10}, {"shuffle": 10}, {"shuffle": 10, "seed": 1}):
        cfg = DataConfig(path, **options)  # type: ignore[arg-type]
        orders.append([c.id for c, _ in read_conversations(cfg, Tally(), lambda c: c)])
    assert [*map(sorted, orders)] == [sorted(orders[0])] * 4
    assert orders[1] == orders[2] != orders[0] != orders[3] != orders[1]
    assert [*shuffled(iter(range(5)), 0, 0)] == [0, 1, 2, 3, 4]
    assert sorted(shuffled(iter(range(5)), 100, 0)) == [0, 1, 2, 3, 4]


def test_a_piece_of_a_chat_keeps_its_opening_when_it_is_shuffled(tmp_path: Path) -> None:
    def piece(id: str, first: str) -> dict[str, Any]:
        return {"id": id, "messages": [{"role": "user", "content": first}, CHAT[1]]}

    records = [piece(f"x_{2 * i}", f"prompt {i}") for i in range(30)]
    cfg = DataConfig(write_lines(tmp_path / "x.jsonl", records), shuffle=20)
    assert {c.opening for c, _ in read_conversations(cfg, Tally(), lambda c: c)} == {"prompt 0"}


BEFORE = ["drafter=eagle3", "target=model", "target.path=x", "data=conversations"]
MISTAKES = [
    (["data.sources=[{path:a.jsonl}]", "data.path=b.jsonl"], "data.path=b.jsonl and data.sources"),
    (["data.sources=[{weight:1}]"], "give each of them a path"),
    (["data.sources=[{path:a.jsonl,weight:1},{path:b.jsonl}]"], "for all or for none"),
    (["data.sources=[{path:a.jsonl,weight:-1}]"], "numbers above 0"),
    (["data.sources=[{path:a.jsonl,wieght:1}]"], "wieght"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES)
def test_mistakes_about_sources_are_one_line(overrides: list[str], message: str) -> None:
    register()
    with pytest.raises(UserError, match=re.escape(message)) as error:
        composed(
            ["drafter=eagle3", "target=model", "target.path=x", "data=conversations", *overrides]
        )
    assert "\n" not in str(error.value)


def test_sources_are_composed_as_the_page_writes_them() -> None:
    register()
    guide = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    (argument,) = re.findall(r"'(data\.sources=.*)'", guide)
    cfg = composed(
        ["drafter=eagle3", "target=model", "target.path=x", "data=conversations", argument]
    )
    assert [s.weight for s in cfg.data.sources] == [3, 1]
    assert cfg.data.name == "chats.jsonl and tools.parquet"


# Two hundred records of these shapes, changed at random


VALUES: list[Any] = [None, "", 0, -1, 1.5, True, [], {}, "q", "<think>t</think>a", "\ud800"]
VALUES += ["<tool_call>{}</tool_call>", "<functioncall> {", "{'a': 1}", [None], ["a", "b"], [1, 2]]
VALUES += [{"role": "user"}, {"messages": []}, [["a", "b"]], float("nan"), 10**30]
KEYS = ("messages", "role", "content", "tools", "answers", "chosen", "history", "labels", "prompt")
KEYS += ("tool_calls", "arguments", "thinking", "enable_thinking", "body", "response", "sample")


def changed(value: Any, draw: random.Random) -> Any:
    """A JSON value with some of its parts replaced, added or left out."""
    if draw.random() < 0.08:
        return draw.choice(VALUES)
    if isinstance(value, dict):
        value = {k: changed(x, draw) for k, x in value.items() if draw.random() > 0.05}
        return value | ({draw.choice(KEYS): draw.choice(VALUES)} if draw.random() < 0.2 else {})
    if isinstance(value, list):
        return [changed(x, draw) for x in value if draw.random() > 0.05]
    return value


@pytest.mark.parametrize("template", [CHATML, FULL], ids=["plain", "full"])
def test_records_of_these_shapes_that_are_damaged(tmp_path: Path, template: str) -> None:
    """Each is kept or dropped, or the whole is told in one line."""
    draw, tokenizer = random.Random(0), tokenizer_of(template)
    shapes = [json.loads(row[1].strip("`")) for row in SHAPES]
    for n in range(100):
        path = tmp_path / f"{n}.jsonl"
        records = [changed(draw.choice(shapes), draw) for _ in range(4)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        for responses, split_into in (("data", split_documents), ("target", split_prompts)):
            thinking = draw.choice(["template", "on", "data", "mixed"])
            options = {"min_response": 1, "responses": responses, "thinking": thinking}
            try:
                cfg = DataConfig(str(path), held_out=0, **options)  # type: ignore[arg-type]
                tally = split_into(cfg, tokenizer).tally
                assert tally.kept + tally.dropped.total() == tally.read > 0
            except UserError as error:
                assert "\n" not in str(error)

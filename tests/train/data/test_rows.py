"""One document for each response whose history the template writes otherwise later on, and
reasoning as a server asks for it.

Run alone: python -m pytest tests/train/data/test_rows.py (about 10 s)
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UserError
from tests.train.data.chats import ASK, CHATML, said, talk, tokenizer_of
from tests.train.data.test_conversations import write_lines
from train.data.conversations import Conversation, DataConfig, Message, Unusable
from train.data.reader import Reader
from train.data.sequences import Document, pack_rows
from train.data.split import split_documents, split_prompts
from train.data.template import LOST, OPENED, SEVERAL, WEIGHTED, Chat

# The parts of Qwen3's template that are about reasoning: that of responses before the last prompt
# is left out, a response after it always has a thought, and a prompt for none closes an empty one.
QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- set content = m.content %}{% set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls %}{{ '<call>' + call.function.name + '</call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""
# as DeepSeek-R1's: the prompt opens a thought, and no text has one, not even in its last response
R1 = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content }}{% endif %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
EMPTY = "<think>\n\n</think>\n\n"


def thoughtful(*texts: str, within: bool = False, **options: Any) -> Conversation:
    """User and assistant in turn; a response "t|a" has the reasoning t."""
    messages = []
    for n, text in enumerate(texts):
        thought, _, response = text.rpartition("|")
        if n % 2 == 0 or not thought:
            messages.append(Message(("user", "assistant")[n % 2], response))
        else:
            raw = f"<think>\n{thought}\n</think>\n\n{response}" if within else None
            beside = {"reasoning_content": thought}
            messages.append(Message("assistant", response, beside, as_written=raw))
    return Conversation("x", tuple(messages), texts[0], **options)


def rows(template: str, chat: Conversation, thinking: str = "template") -> list[tuple[str, str]]:
    """What comes before the first response that is trained on, and all that is."""
    tokenizer = tokenizer_of(template)
    documents = Chat(tokenizer, thinking=thinking).documents(chat, DataConfig(min_response=1))
    return [(tokenizer.decode(d.ids[: d.mask.argmax()]), said(d, tokenizer)) for d in documents]


def served(template: str, chat: Conversation, turn: int, thinking: bool | None = None) -> str:
    """The prompt of a server that is to answer a turn, rendered by transformers itself."""
    messages = [{"role": m.role, "content": m.content, **m.beside} for m in chat.messages[:turn]]
    more = {} if thinking is None else {"enable_thinking": thinking}
    text = tokenizer_of(template).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **more
    )
    return str(text)


def test_reasoning_of_earlier_turns_is_left_out_as_the_template_does() -> None:
    chat = thoughtful("q", "t|a", "r", "u|b", "s", "v|c")
    found = rows(QWEN3, chat)
    assert [before for before, _ in found] == [served(QWEN3, chat, turn) for turn in (1, 3, 5)]
    assert [response for _, response in found] == [
        f"<think>\n{t}\n</think>\n\n{a}<|im_end|>" for t, a in ("ta", "ub", "vc")
    ]


def test_responses_after_one_prompt_share_a_row() -> None:
    """Between calls and their results, earlier reasoning stays: one row has all of a prompt's."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    calling = Message("assistant", "", {"reasoning_content": "u", "tool_calls": [call]})
    result, response = Message("tool", "r"), Message("assistant", "b", {"reasoning_content": "v"})
    first = thoughtful("q", "t|a").messages
    chat = Conversation("x", (*first, Message("user", "p"), calling, result, response), "q")
    (_, one), (before, two) = rows(QWEN3, chat)
    assert one == "<think>\nt\n</think>\n\na<|im_end|>" and before == served(QWEN3, chat, 3)
    thinks = "<think>\n{}\n</think>\n\n{}<|im_end|>"
    assert two == thinks.format("u", "<call>f</call>") + "|" + thinks.format("v", "b")


def test_a_template_that_changes_nothing_gives_one_row() -> None:
    (row,) = rows(CHATML, talk("q", "a", "r", "b", "s", "c"))
    assert row[1] == "a<|im_end|>|b<|im_end|>|c<|im_end|>"


@pytest.mark.parametrize("within", [False, True])
def test_reasoning_that_no_text_has_is_trained_on_as_the_target_writes_it(within: bool) -> None:
    chat = thoughtful("q", "t|a", "r", "u|b", within=within)
    found = rows(R1, chat)
    assert found == [
        (served(R1, chat, 1), "t\n</think>\n\na<|im_end|>"),
        (served(R1, chat, 3), "u\n</think>\n\nb<|im_end|>"),
    ]
    assert found[0][0].endswith("<think>\n")
    # a response without reasoning cannot follow a prompt that opens a thought
    mixed = Chat(tokenizer_of(R1)).documents(thoughtful("q", "a", "r", "u|b"), DataConfig())
    assert len(mixed) == 1 and LOST in mixed[0].notes
    with pytest.raises(Unusable, match=OPENED):
        rows(R1, talk("q", "a"))


def test_reasoning_within_a_response_stays_there_if_the_template_knows_none(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    for text in ("<think>\nt\n</think>\n\na", "t\n</think>\n\na"):
        turns[1]["content"] = text
        path = write_lines(tmp_path / "x.jsonl", [{"messages": turns}])
        for template, expected in ((CHATML, text), (QWEN3, "<think>\nt\n</think>\n\na")):
            tokenizer = tokenizer_of(template)
            cfg = DataConfig(path, held_out=0, min_response=1)
            (document,) = split_documents(cfg, tokenizer).train
            assert said(document, tokenizer) == expected + "<|im_end|>"


def test_four_names_of_reasoning_give_one_document(tmp_path: Path) -> None:
    user, response = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    ways = [response | {name: "t"} for name in ("reasoning_content", "reasoning", "thinking")]
    ways += [response | {"content": "<think>\nt\n</think>\n\na"}]
    records = [{"messages": [user, way]} for way in ways]
    cfg = DataConfig(write_lines(tmp_path / "x.jsonl", records), held_out=0, min_response=1)
    split = split_documents(cfg, tokenizer_of(QWEN3))
    assert len({d.ids.tobytes() + d.mask.tobytes() for d in split.train}) == 1
    assert len(split.train) == 4 and not split.tally.changed


# Whether reasoning is asked for


def test_a_response_without_reasoning_follows_the_prompt_that_asks_for_none() -> None:
    chat = thoughtful("q", "a", "r", "u|b")
    for thinking, first, second in (
        ("template", (None, EMPTY + "a"), (None, "<think>\nu\n</think>\n\nb")),
        ("on", (True, EMPTY + "a"), (True, "<think>\nu\n</think>\n\nb")),
        ("data", (False, "a"), (None, "<think>\nu\n</think>\n\nb")),
    ):
        expected = [
            (served(QWEN3, chat, turn, asked), response + "<|im_end|>")
            for turn, (asked, response) in ((1, first), (3, second))
        ]
        assert rows(QWEN3, chat, thinking) == expected
    # a response with reasoning cannot follow the prompt that asks for none
    documents = Chat(tokenizer_of(QWEN3), thinking="off").documents(
        chat, DataConfig(min_response=1)
    )
    assert len(documents) == 1 and LOST in documents[0].notes


def test_prompts_ask_for_reasoning_as_the_settings_or_the_records_say(tmp_path: Path) -> None:
    def prompt(text: str, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], **more}

    records = [prompt(f"question number {n}") for n in range(20)]
    records += [
        prompt("no", enable_thinking=False),
        prompt("yes", chat_template_kwargs={"enable_thinking": True}),
        {"prompt": "reasons", "completion": "a", "reasoning": "t"},
        {"prompt": "does not", "completion": "a"},
    ]
    path = write_lines(tmp_path / "x.jsonl", records)
    tokenizer = tokenizer_of(QWEN3)
    for thinking, off, on in (
        ("template", 1, 1),
        ("on", 0, 24),
        ("off", 24, 0),
        ("data", 2, 2),
        ("mixed", 11, 13),
    ):
        cfg = DataConfig(path, held_out=0, responses="target", thinking=thinking)
        split = split_prompts(cfg, tokenizer)
        texts = [tokenizer.decode(p.ids) for p in split.train]
        assert sum(text.endswith(EMPTY) for text in texts) == off, thinking
        assert [p.thinking for p in split.train].count(True) == on
        assert not split.tally.ignored
    with pytest.raises(UserError, match=r"data\.thinking='maybe' is unknown"):
        DataConfig(path, thinking="maybe")


def test_the_two_names_of_the_variable_are_both_given() -> None:
    prompt = "{% if thinking is true %}<think>{% elif thinking is false %}</think>{% endif %}"
    template = CHATML.replace(ASK, ASK.replace("{% endif %}", prompt + "{% endif %}"))
    for thinking, end in (("on", "<think>"), ("off", "</think>"), ("template", "\n")):
        cfg = DataConfig("", responses="target", thinking=thinking)
        tokenizer = tokenizer_of(template)
        ids = Reader(cfg, tokenizer).prompt(talk("q")).ids
        assert tokenizer.decode(ids).endswith(end)


# What is left out


def test_histories_that_diverge_are_counted(tmp_path: Path) -> None:
    """A template whose prompts say how long the chat is, but whose texts do not."""
    header = "{% if add_generation_prompt and messages | length > 1 %}<note>{% endif %}"
    chat = [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, "qarb")]
    path = write_lines(tmp_path / "x.jsonl", [{"messages": chat}] * 3)
    cfg = DataConfig(path, held_out=0, min_response=1)
    split = split_documents(cfg, tokenizer_of(header + CHATML))
    assert split.tally.changed == {LOST: 3} and len(split.train) == 3
    assert {said(d, tokenizer_of(CHATML)) for d in split.train} == {"a<|im_end|>"}


def test_rows_have_lengths_and_weights_of_their_own(tmp_path: Path) -> None:
    chat = thoughtful("q", "t|" + "a" * 10, "r", "u|" + "b" * 100, "s", "v|" + "c" * 10)
    whole = Chat(tokenizer_of(QWEN3)).documents(chat, DataConfig())
    lengths = [len(d.ids) for d in whole]
    assert [d.id for d in whole] == ["x, up to turn 2", "x, up to turn 4", "x"]
    assert SEVERAL in whole[-1].notes
    short = Chat(tokenizer_of(QWEN3)).documents(chat, DataConfig(max_length=lengths[1] - 1))
    assert [len(d.ids) for d in short] == [lengths[0]] + [lengths[2]] * (lengths[2] < lengths[1])
    assert LOST in short[-1].notes
    messages = list(chat.messages)
    messages[3] = Message("assistant", messages[3].content, messages[3].beside, weight=0)
    weighted = Conversation("x", tuple(messages), "q")
    some = Chat(tokenizer_of(QWEN3)).documents(weighted, DataConfig())
    assert [len(d.ids) for d in some] == [lengths[0], lengths[2]]
    assert "responses of weight 0 not trained on" in some[-1].notes
    for n, weight in ((1, 0.5), (3, 2.0), (5, 1.0)):
        messages[n] = replace(messages[n], weight=weight)
    each = Chat(tokenizer_of(QWEN3)).documents(
        replace(weighted, messages=tuple(messages)), DataConfig()
    )
    assert [d.weight is None or set(d.weight[d.mask].tolist()) for d in each] == [{0.5}, {2}, True]
    assert WEIGHTED in each[-1].notes and WEIGHTED not in some[-1].notes


def test_responses_of_one_row_have_weights_of_their_own() -> None:
    tokenizer, chat = tokenizer_of(CHATML), talk("q", "a", "r", "bb", "s", "ccc")
    turns = list(chat.messages)
    for n, weight in ((1, 0.25), (3, 0), (5, 3.0)):
        turns[n] = replace(turns[n], weight=weight)
    (row,) = Chat(tokenizer).documents(
        replace(chat, messages=tuple(turns)), DataConfig(min_response=1)
    )
    assert said(row, tokenizer) == "a<|im_end|>|ccc<|im_end|>"
    assert row.weight is not None
    assert row.weight[row.mask].tolist() == [0.25] * 2 + [3] * 4
    (packed,) = pack_rows([row, *Chat(tokenizer).documents(chat, DataConfig(min_response=1))], 1000)
    assert packed.weight is not None and sorted(packed.weight[packed.mask].tolist()) == (
        [0.25] * 2 + [1] * 9 + [3] * 4
    )
    short = DataConfig(min_response=1, max_length=int(row.mask.argmax()) + 3, too_long="truncate")
    (cut,) = Chat(tokenizer).documents(replace(chat, messages=tuple(turns)), short)
    assert cut.weight is not None and len(cut.weight) == len(cut.ids)


def test_a_chat_that_is_too_long_gives_no_shorter_row() -> None:
    """Where the template changes nothing, a chat is one row, whole or not at all."""
    chat = talk("q", "a" * 20, "r", "b" * 20)
    with pytest.raises(Unusable, match="longer than max_length=70"):
        Chat(tokenizer_of(CHATML)).documents(chat, DataConfig(max_length=70))


def test_limits_count_conversations_not_rows(tmp_path: Path) -> None:
    think = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning": "t"},
    ]
    records = [{"messages": think * 3, "id": str(n)} for n in range(5)]
    cfg = DataConfig(
        write_lines(tmp_path / "x.jsonl", records), held_out=0, limit=3, min_response=1
    )
    split = split_documents(cfg, tokenizer_of(QWEN3))
    assert len(split.train) == 9 and split.tally.kept == 3
    assert split.tally.changed[SEVERAL] == 3
    assert isinstance(split.train[0], Document)

"""The settings of the chat template: its arguments, and a template of the user's own.

Run alone: python -m pytest tests/train/data/test_template_settings.py (about 3 s)
"""

from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UserError
from specdec.targets.prompt_rendering import PromptRendering
from tests.train.data.chats import CHATML, said, talk, tokenizer_of
from tests.train.data.test_conversations import write_lines
from train.data.conversations import DataConfig
from train.data.reader import Reader
from train.data.rendering import own_chat_template, prompt_rendering
from train.data.sequences import Prompt
from train.data.split import split_prompts
from train.data.template import Chat

EFFORT = "{% if effort is defined %}<effort {{ effort }}>\n{% endif %}"
THOUGHT = "{% if enable_thinking is false %}<think></think>{% endif %}"
READS = EFFORT + CHATML.replace("assistant\n{% endif %}", "assistant\n" + THOUGHT + "{% endif %}")


def prompts(tmp_path: Path, records: list[dict[str, Any]], **options: Any) -> list[Prompt]:
    cfg = DataConfig(
        str(write_lines(tmp_path / "x.jsonl", records)),
        held_out=0,
        responses="target",
        **options,
    )
    return split_prompts(cfg, tokenizer_of(READS)).train


def asked(prompt: Prompt) -> tuple[str, str]:
    """What a prompt asks of the template, as the report has it."""
    return prompt.properties["reasoning"], prompt.properties["template arguments"]


def record(text: str, **beside: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} | beside


def test_arguments_are_those_of_apply_chat_template(tmp_path: Path) -> None:
    arguments = {"enable_thinking": False, "effort": "high"}
    (prompt,) = prompts(tmp_path, [record("a")], template_args=arguments)
    tokenizer = tokenizer_of(READS)
    expected = tokenizer.apply_chat_template(
        record("a")["messages"], add_generation_prompt=True, **arguments
    )
    assert prompt.ids.tolist() == expected["input_ids"]
    assert tokenizer.decode(prompt.ids).startswith("<effort high>")
    assert prompt.thinking is False and prompt.arguments == {"effort": "high"}
    assert asked(prompt) == ("off", "effort=high")


def test_a_record_replaces_them_as_a_request_does(tmp_path: Path) -> None:
    """vLLM merges --default-chat-template-kwargs with a request's chat_template_kwargs."""
    arguments = {"enable_thinking": False, "effort": "high"}
    records = [
        record("a"),
        record("b", chat_template_kwargs={"effort": "low"}),
        record("c", chat_template_kwargs={"enable_thinking": True}),
        record("d", chat_template_kwargs={"tone": "dry"}),  # which the template does not read
    ]
    found = {p.words: p for p in prompts(tmp_path, records, template_args=arguments)}
    assert {words: asked(p) for words, p in found.items()} == {
        "a": ("off", "effort=high"),
        "b": ("off", "effort=low"),
        "c": ("on", "effort=high"),
        "d": ("off", "effort=high"),
    }
    texts = {words: tokenizer_of(READS).decode(p.ids) for words, p in found.items()}
    assert texts["b"].startswith("<effort low>") and texts["b"].endswith("<think></think>")
    assert texts["c"].startswith("<effort high>") and texts["c"].endswith("assistant\n")


def test_responses_follow_prompts_with_the_arguments() -> None:
    """The mask begins where the prompt with these arguments ends."""
    chat, tokenizer = talk("q", "an answer"), tokenizer_of(READS)
    for arguments in ({}, {"effort": "high"}, {"enable_thinking": False, "effort": "low"}):
        one = Chat(tokenizer, arguments=arguments)
        (document,) = one.documents(chat, DataConfig(min_response=1))
        first = int(document.mask.argmax())
        assert document.ids[:first].tolist() == one.prompt(chat).ids.tolist()
        assert said(document, tokenizer) == "an answer<|im_end|>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"template_args": {"enable_thinking": False}, "thinking": "off"},
            r"data\.thinking=off and data\.template_args\.enable_thinking=false both say whether "
            "to reason: leave one of them out",
        ),
        (
            {"template_args": {"add_generation_prompt": False}},
            r"data\.template_args\.add_generation_prompt: a server sets this variable itself",
        ),
        (
            {"template_args": {"effort": "high"}, "format": "lines"},
            r"data\.template_args: data\.format=lines uses no chat template: leave it out",
        ),
        (
            {"chat_template": "x.jinja", "format": "tokens"},
            r"data\.chat_template: data\.format=tokens uses no chat template: leave it out",
        ),
    ],
)
def test_contradicting_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig("x", **options)


def test_an_argument_that_the_template_does_not_read() -> None:
    cfg = DataConfig("x", template_args={"efort": "high"})
    message = (
        r"data\.template_args\.efort: .* does not read it \(it reads effort, enable_thinking\)"
    )
    with pytest.raises(UserError, match=message):
        Reader(cfg, tokenizer_of(READS))
    with pytest.raises(UserError, match=r"does not read it \(it reads no argument\)"):
        Reader(cfg, tokenizer_of(CHATML))
    # SmolLM3's form: the template sets the variable only where it is not given
    given = "{% if not mode is defined %}{% set mode = 'a' %}{% endif %}{{ mode }}" + CHATML
    Reader(DataConfig("x", template_args={"mode": "b"}), tokenizer_of(given))


def test_the_template_of_a_file(tmp_path: Path) -> None:
    def text_of(content: bytes | None) -> str | None:
        path = tmp_path / "own.jinja"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        return own_chat_template(DataConfig("x", chat_template=str(path)))

    assert text_of(READS.encode()) == READS
    assert own_chat_template(DataConfig("x")) is None
    for content, message in (
        (None, "there is no such file"),
        (b" \n", "the file is empty"),
        (b"\xff\xfe", "the file is not UTF-8 text"),
        (b"a\n{% for m in %}", "the chat template is broken in line 2"),
    ):
        with pytest.raises(UserError, match=rf"^data\.chat_template=.*own\.jinja: {message}"):
            text_of(content)
    with pytest.raises(UserError, match="there is no such file"):
        own_chat_template(DataConfig("x", chat_template=str(tmp_path)))


def test_a_server_is_given_what_all_prompts_share() -> None:
    """Whether to reason is given under the names that the template reads."""

    def rendering(template: str, **options: Any) -> PromptRendering:
        return prompt_rendering(DataConfig("x", **options), tokenizer_of(template), None)

    assert rendering(READS).is_default
    assert rendering(READS, thinking="off").arguments == {"enable_thinking": False}
    named = READS.replace("enable_thinking", "thinking")
    assert rendering(named, thinking="on").arguments == {"thinking": True}
    assert rendering(CHATML, thinking="on").is_default, "a template that does not ask"
    mixed = rendering(READS, thinking="mixed", template_args={"effort": "low"})
    assert mixed.arguments == {"effort": "low"}, "no server's default asks in two ways"
    assert rendering(READS, thinking="off", format="lines").is_default
    own = prompt_rendering(DataConfig("x", thinking="off"), tokenizer_of(CHATML), READS)
    assert own == PromptRendering({"enable_thinking": False}, READS)
    assert str(own) == (
        "an own chat template (data.chat_template) and the template arguments enable_thinking=false"
    )


def test_thinking_of_the_command_line_replaces_the_argument() -> None:
    cfg = DataConfig("x", template_args={"enable_thinking": False, "effort": "low"})
    on = cfg.with_thinking("on")
    assert (on.thinking, on.template_args) == ("on", {"effort": "low"})
    assert cfg.with_thinking(None) is cfg
    chat = Chat(tokenizer_of(READS), thinking=on.thinking, arguments=on.template_args)
    assert asked(chat.prompt(talk("q"))) == ("on", "effort=low")

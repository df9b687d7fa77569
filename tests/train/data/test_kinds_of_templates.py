"""The kinds of chat templates that well-known models have, each as a short template of our own:
what a document has before a response is what a server reads, and its end is a stop token.

Run alone: python -m pytest tests/train/data/test_kinds_of_templates.py (about 10 s)
"""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, pre_tokenizers

from specdec.errors import UserError
from tests.train.data.chats import said, talk, tokenizer_of
from train.data.conversations import Conversation, DataConfig, Message, Tally, Unusable
from train.data.reader import require_spans
from train.data.records import conversation_of_record
from train.data.rendering import ChatTemplate
from train.data.sequences import Document
from train.data.template import OPENED, SHORT, Chat

# gpt-oss: reasoning is written before calls, unless a response follows in the text
CHANNELS = """\
{%- for tool in tools or [] %}{{ '<|start|>' + tool.function.name + '<|end|>' }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- if m.reasoning_content and not messages[loop.index0:] | selectattr('content') |
 selectattr('role', 'equalto', 'assistant') | list %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|message|>{' }}
{{- m.tool_calls[0].function.arguments.town + '}<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- if loop.last and m.reasoning_content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
# Gemma 4: a prompt that asks for no reasoning has an empty thought, which no text has
EMPTY_THOUGHT = """\
{%- for m in messages %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn>model\\n' }}
{%- if not enable_thinking %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}
{%- endif %}"""
# DeepSeek V3.2: of the empty thought, texts have the end
HALF_A_THOUGHT = """\
{%- for m in messages %}
{{- ('<|assistant|></think>' if m.role == 'assistant' else '<|user|>') + m.content }}
{{- '<|end|>' if m.role == 'assistant' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think></think>' }}{% endif %}"""
# GLM 4.5: a response ends with the token that begins the next turn; earlier thoughts are emptied
NEXT_TURN = """\
{%- for m in messages %}
{%- if m.role != 'assistant' %}{{ '<|' + m.role + '|>\\n' + m.content }}
{%- else %}
{{- '<|assistant|>\\n<think>' + (m.reasoning_content or '' if loop.last else '') + '</think>\\n' }}
{{- m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' + ('\\n<think></think>' if enable_thinking is false else '') }}
{%- endif %}"""
# Mistral: no generation prompt, and the system prompt before the last question alone
BEFORE_THE_LAST = """\
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'assistant' %}{{ m.content + '</s>' }}
{%- else %}
{{- '[INST]' }}
{%- if loop.last and m == last and messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- m.content + '[/INST]' }}
{%- endif %}
{%- endfor %}"""
# Llama 3: blank lines after the header, which GPT-2's rules split otherwise before a word
BLANK_LINES = """\
{%- for m in messages %}{{ '<|start|>' + m.role + '<|message|>\\n\\n' + m.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|message|>\\n\\n' }}{% endif %}"""
# Qwen3.5: the prompt opens a thought unless it is to have none
OPENS_A_THOUGHT = """\
{%- for m in messages %}
{{- '<|start|>' + m.role + '<|message|>' }}
{%- if m.role == 'assistant' and loop.last %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start|>assistant<|message|><think>\\n' }}
{%- if enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
# Qwen3: tools, calls and results, several of which share a turn
QWEN = """\
{%- if tools %}{{ '<|start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|end|>\n' }}{% endif %}
{%- else %}
{{- '<|start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""
# Llama 3.1: results as JSON texts
QUOTED = """\
{%- for m in messages %}
{{- '<|start|>' + ('ipython' if m.role == 'tool' else m.role) + '<|message|>' }}
{%- if m.tool_calls %}
{{- m.tool_calls[0].function | tojson }}
{%- else %}{{ m.content | tojson if m.role == 'tool' else m.content | trim }}{% endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif %}"""
# models that see images: texts are parts
PARTS = """\
{%- for m in messages %}
{{- '<|start|>' + m.role + ':' }}
{%- for part in m.content if part.type == 'text' %}{{ ' ' + part.text }}{% endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant:' }}{% endif %}"""

KINDS = {name: x for name, x in globals().items() if name.isupper() and "messages" in str(x)}
STOPS = {"<|end|>", "<|return|>", "<|call|>", "<turn|>", "<|user|>", "<|observation|>", "</s>"}
SPECIAL = [
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|turn>"),
    *("<turn|>", "<|channel>", "<channel|>", "<|user|>", "<|assistant|>", "<|system|>", "</s>"),
    *("[INST]", "[/INST]"),
]


def tokenizer_for(template: str) -> Any:
    """By GPT-2's rules, with merged line ends and the special tokens of all these templates."""
    tokenizer = tokenizer_of(template, merges=[("Ċ", "Ċ")])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens([AddedToken(x, normalized=False) for x in ("<think>", "</think>")])
    tokenizer.add_tokens([AddedToken(x, special=True) for x in SPECIAL], special_tokens=True)
    return tokenizer


def thoughtful(*turns: tuple[str, str]) -> Conversation:
    messages = []
    for question, response in turns:
        thought, _, said = response.rpartition("|")
        beside = {"reasoning_content": thought} if thought else {}
        messages += [Message("user", question), Message("assistant", said, beside)]
    return Conversation("x", tuple(messages), turns[0][0])


def calling() -> Conversation:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]

    def turns(town: str, degrees: str) -> list[dict[str, Any]]:
        call = {"name": "weather", "arguments": {"town": town}}
        calls = [{"type": "function", "function": call}]
        return [
            {"role": "user", "content": f"Is it cold in {town}?"},
            {"role": "assistant", "content": "", "reasoning": "Ask.", "tool_calls": calls},
            {"role": "tool", "content": degrees},
            {"role": "assistant", "content": f"{degrees} in {town}.", "reasoning": "Say it."},
        ]

    record = {"messages": [*turns("Ulm", "four"), *turns("Bonn", "nine")], "tools": tools}
    return conversation_of_record(record, "x", DataConfig(""), Tally())


PLAIN = talk("How tall is it?", "Forty metres.", "And wide?", "Two.\n\nReally.", "r", "r")
SYSTEM = talk("How tall is it?", "Forty metres.", "And wide?", "Two.", system="Be polite.")
LATER = Conversation(
    "x",
    (*SYSTEM.messages[:3], Message("system", "Be brief."), *SYSTEM.messages[3:])
    + (Message("system", "Say more."), Message("assistant", "Two or three.")),
    SYSTEM.opening,
)
THINK = thoughtful(("How tall?", "The map.|Forty."), ("Wide?", "The book.\n\nSee.|Two."))
MIXED = thoughtful(("How tall?", "Forty."), ("Wide?", "The book.|Two."))
CASES = [
    *((name, "template", PLAIN) for name in KINDS if name != "OPENS_A_THOUGHT"),
    *((name, "template", SYSTEM) for name in KINDS if name != "OPENS_A_THOUGHT"),
    *((name, "template", LATER) for name in KINDS if name != "OPENS_A_THOUGHT"),
    *((name, "off", PLAIN) for name in ("EMPTY_THOUGHT", "NEXT_TURN", "OPENS_A_THOUGHT")),
    *((name, "data", MIXED) for name in ("NEXT_TURN", "OPENS_A_THOUGHT", "CHANNELS")),
    *((name, "template", THINK) for name in ("NEXT_TURN", "OPENS_A_THOUGHT", "CHANNELS")),
    ("CHANNELS", "template", calling()),
]


def served(tokenizer: Any, chat: Conversation, turn: int, thinking: bool | None) -> str:
    """The prompt of a server that is to answer a turn, rendered by transformers itself."""
    parts = "part.type" in tokenizer.chat_template
    messages = []
    for m in chat.messages[:turn]:
        content = [{"type": "text", "text": m.content}] if parts else m.content
        messages.append({"role": m.role, "content": content, **m.beside})
    more = {} if thinking is None else {"enable_thinking": thinking}
    tools = list(chat.tools) or None
    return str(
        tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, **more
        )
    )


def responses(document: Document) -> list[tuple[list[int], list[int]]]:
    """The tokens before each response of a document, and those of the response."""
    mask = document.mask.tolist()
    edges = [i for i, said in enumerate(mask) if said != (i > 0 and mask[i - 1])] + [len(mask)]
    starts = [(i, edges[n + 1]) for n, i in enumerate(edges[:-1]) if mask[i]]
    ids = document.ids.tolist()
    return [(ids[:a], ids[a:b]) for a, b in starts]


@pytest.mark.parametrize(("name", "thinking", "chat"), CASES)
def test_a_row_is_what_a_server_reads_and_then_the_response(
    name: str, thinking: str, chat: Conversation
) -> None:
    """Each response is trained on once, after exactly the tokens of the server's prompt for it. It
    ends with its stop token, unless the text has the beginning of a system turn in its place."""
    tokenizer = tokenizer_for(KINDS[name])
    documents = Chat(tokenizer, thinking=thinking).documents(chat, DataConfig(min_response=1))
    expected = {}
    for turn, m in enumerate(chat.messages):
        if m.role == "assistant":
            reasons = "reasoning_content" in m.beside
            asked = {"off": False, "data": reasons}.get(thinking)
            prompt = served(tokenizer, chat, turn, asked)
            next_role = next((x.role for x in chat.messages[turn + 1 :]), "user")
            stops = name != "NEXT_TURN" or next_role != "system"
            expected[tuple(tokenizer(prompt, add_special_tokens=False).input_ids)] = m, stops
    found = [pair for document in documents for pair in responses(document)]
    assert {tuple(before) for before, _ in found} == set(expected)
    assert len(found) == len(expected)
    for before, ids in found:
        said, (message, stops) = tokenizer.decode(ids), expected[tuple(before)]
        assert message.content in said and message.beside.get("reasoning_content", "") in said
        assert tokenizer.decode(ids[-1:]) in STOPS if stops else said.endswith(message.content)


def test_a_call_and_the_response_after_it_share_a_row() -> None:
    """The reasoning of calls is in the prompts of the same question, and in no later one."""
    chat = Chat(tokenizer_for(CHANNELS))
    one, two = chat.documents(calling(), DataConfig(min_response=1))
    assert len(responses(one)) == len(responses(two)) == 2
    assert chat.tokenizer.decode(two.ids).count("Ask.") == 1


def agent(*contents: tuple[str, str]) -> Conversation:
    """A log of turns with these roles and texts; one that begins with "call" calls tools."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
    beside = {"call": {"tool_calls": [call]}, "calls": {"tool_calls": [call, call]}}
    turns = [Message(role, text, beside.get(text, {})) for role, text in contents]
    turns = [replace(m, content="" if m.beside else m.content) for m in turns]
    tools = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)
    return Conversation("x", tuple(turns), "q", tools=tools)


USER, CALL, RESULT, RESPONSE = (
    *(("user", "Cold?"), ("assistant", "call"), ("tool", "four")),
    ("assistant", "Rather."),
)
PARALLEL, OTHER = ("assistant", "calls"), ("tool", "nine")
RULE = ("system", "Be brief.")


@pytest.mark.parametrize(
    ("turns", "asked"),
    [
        ([USER, CALL, RESULT], 3),
        ([USER, PARALLEL, RESULT, OTHER], 4),
        ([USER, PARALLEL, RESULT, OTHER, RESPONSE], 4),
        ([USER, CALL, RESULT, PARALLEL, OTHER, RESULT], 6),
        ([USER, RESPONSE, USER, CALL, ("tool", "")], 5),
        ([USER, CALL, RESULT, RESPONSE, USER], 5),
        ([USER, CALL, RESULT, USER], 4),  # as Anthropic's turns with results and a question
        ([USER, CALL], 1),
        ([USER, RULE], 2),
        ([USER, RULE, RULE, RESPONSE], 3),
        ([USER, RESPONSE, RULE], 1),  # nobody asked after that
        ([USER, RESPONSE, RULE, RESPONSE], 3),
        ([USER, CALL, RESULT, RULE], 4),
        ([USER, RULE, USER, RESPONSE, RULE, USER], 6),
    ],
)
def test_a_prompt_is_what_an_agent_s_server_is_asked(
    turns: list[tuple[str, str]], asked: int
) -> None:
    """The tokens of transformers' own rendering up to there; with less room, an earlier such place,
    but never one between the results of parallel calls."""
    tokenizer, chat = tokenizer_for(QWEN), agent(*turns)

    def tokens(turn: int) -> list[int]:
        ids = tokenizer(served(tokenizer, chat, turn, None), add_special_tokens=False).input_ids
        return list(ids)

    prompt = Chat(tokenizer).prompt(chat)
    assert prompt.ids.tolist() == tokens(asked)
    assert prompt.words == "Cold?"
    question = max(n for n in range(asked) if turns[n] == USER)
    assert [role for role, _ in prompt.earlier] == [role for role, _ in turns[:question]][-4:]
    places = [n for n in range(1, len(turns)) if turns[n][0] == "assistant"]
    for most in range(len(tokens(1)), len(prompt.ids)):
        fitting = [n for n in places if len(tokens(n)) <= most]
        if fitting:
            assert Chat(tokenizer).prompt(chat, most).ids.tolist() == tokens(fitting[-1])
        else:
            with pytest.raises(Unusable, match="no prompt of at most"):
                Chat(tokenizer).prompt(chat, most)


RESULTS = [
    "four",
    "  four\n",
    "\tx = 1\n\n",
    "",
    "\n",
    '{"degrees": "4", "town": "Zürich"}\n```py\nprint("\\n")\n```',
]


@pytest.mark.parametrize("name", ["QWEN", "QUOTED"])
@pytest.mark.parametrize("result", RESULTS)
def test_results_of_tools_are_read_to_the_letter(name: str, result: str) -> None:
    """With the white space around them, as a server does."""
    tokenizer = tokenizer_for(KINDS[name])
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Cold?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "Rather."},
    ]
    chat = conversation_of_record({"messages": turns}, "x", DataConfig(""), Tally())
    messages = [turn | {"content": turn["content"] or ""} for turn in turns[:3]]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert Chat(tokenizer).prompt(chat).ids.tolist() == expected
    documents = Chat(tokenizer).documents(chat, DataConfig(min_response=1))
    found = [pair for document in documents for pair in responses(document)]
    assert [before for before, _ in found][-1] == expected and len(found) == 2
    parts = [{"type": "tool_result", "tool_use_id": "c", "content": result}]
    anthropic = [*turns[:2], {"role": "user", "content": parts}]
    conversation = conversation_of_record({"messages": anthropic}, "x", DataConfig(""), Tally())
    assert conversation.messages[2].content == result


def test_a_response_without_reasoning_does_not_follow_a_prompt_that_opens_a_thought() -> None:
    tokenizer = tokenizer_for(OPENS_A_THOUGHT)
    with pytest.raises(Unusable, match=OPENED):
        Chat(tokenizer).documents(PLAIN, DataConfig())
    with pytest.raises(Unusable, match="reasoning, which this template writes in another way"):
        Chat(tokenizer, thinking="off").documents(THINK, DataConfig())
    tally = Tally()
    tally.dropped[OPENED] = 200
    with pytest.raises(UserError, match=r"opens a thought.* data\.thinking=data"):
        require_spans(tally, 200)


def test_a_template_that_writes_texts_is_given_texts() -> None:
    assert ChatTemplate(tokenizer_for(PARTS)).template.parts
    assert not ChatTemplate(tokenizer_for(CHANNELS)).template.parts


def test_one_short_answer_is_skipped_by_itself() -> None:
    """Where each response has a document of its own, as its prompt has other tokens alone."""
    chat = thoughtful(("Is it far?", "No"), ("How far?", "It is nine miles to the harbour."))
    cfg = DataConfig(min_response=4)
    tokenizer = tokenizer_for(BLANK_LINES)
    (document,) = Chat(tokenizer).documents(chat, cfg)
    assert said(document, tokenizer) == "It is nine miles to the harbour.<|end|>"
    assert document.notes == (SHORT.format(4),)
    with pytest.raises(Unusable, match="responses shorter than min_response=4"):
        Chat(tokenizer).documents(thoughtful(("Is it far?", "No"), ("And now?", "No")), cfg)

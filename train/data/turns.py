"""A turn of a conversation: how data sets write its role, its content, reasoning and tool calls."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from train.data.calls import absent, call_of, calls_within, from_json, results_within
from train.data.conversations import Message, Repeated, Unusable

ROLES = {  # as in data, in lower case → as servers and chat templates call them
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
FROM, CONTENT = ("from", "role"), ("value", "content", "text", "parts")  # keys of a turn
REASONING = ("reasoning_content", "reasoning", "thinking")
CALLS = ("tool_calls", "function_call")
WEIGHTS = ("weight", "train", "loss")
LEAST, MOST = 0.001, 100  # weights of answers that are trained on
MEDIA = ("image", "images", "image_url", "video", "videos", "audio", "audios")
# reasoning at the beginning of an answer; what opens it may have been a part of the prompt
THOUGHT = re.compile(r"\s*(?:<think>)?((?:(?!<think>).)*?)</think>(.*)", re.DOTALL)
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which JSON can contain


def without_tags(message: Message) -> list[Message]:
    """A turn, whose text may have calls or the results of tools in it, with these beside it or, if
    it has several results, as several turns."""
    if message.role == "tool":
        return [replace(message, content=result) for result in results_within(message.content)]
    if message.role != "assistant" or "tool_calls" in message.beside:
        return [message]
    content, calls = calls_within(message.content)
    if not calls:
        return [message]
    beside = {**message.beside, "tool_calls": [call_of(call) for call in calls]}
    return [replace(message, content=content, beside=beside, as_written=None)]


def is_turn(value: Any) -> bool:
    """Whether a JSON value is a turn of a conversation, by its keys."""
    return isinstance(value, dict) and any(key in value for key in FROM)


def messages_of(turn: Any, ignored: set[str]) -> list[Message]:
    """A turn; before it, the results of tools that its content has (Anthropic). Its keys that are
    not read are added to `ignored`. Raises Unusable."""
    if isinstance(turn, dict) and isinstance(parts := turn.get("content"), list):
        results = [x for x in parts if isinstance(x, dict) and x.get("type") == "tool_result"]
        rest = [x for x in parts if x not in results]
        if results:
            tools = [_result(part) for part in results]
            return tools + ([_message(turn | {"content": rest}, ignored)] if rest else [])
    message = _message(turn, ignored)
    # null as content is no turn, while an empty text is an empty system turn
    there = message.role != "system" or any(not absent(turn.get(key)) for key in CONTENT)
    return [message] if there else []


def _result(part: Mapping[str, Any]) -> Message:
    """The result of a tool, of those that a turn of the user may have as a part."""
    id = part.get("tool_use_id")
    content = "" if absent(part.get("content")) else _content(part["content"], whole=True).text
    return Message("tool", content, {"tool_call_id": id} if isinstance(id, str) else {})


def _message(turn: Any, ignored: set[str]) -> Message:
    """A turn. Its keys that are not read are added to `ignored`. Raises Unusable."""
    require_single(turn)
    turn = {key: x for key, x in turn.items() if not absent(x)} if isinstance(turn, dict) else {}
    theirs = sorted({str(turn[key]).strip().lower() for key in FROM if key in turn})
    roles = {ROLES.get(name.replace("-", "_")) for name in theirs}
    if not roles or None in roles:
        raise Unusable(f"a turn of another role: {', '.join(theirs)[:40] or 'none is given'}")
    if len(roles) > 1:
        raise Unusable("a turn with two different roles")
    require_no_media(turn)
    role = str(roles.pop())
    called = role == "assistant" and "function_call" in {x.replace("-", "_") for x in theirs}
    contents = [_content(turn[key], whole=role == "tool") for key in CONTENT if key in turn]
    if any(content.text != contents[0].text for content in contents):
        raise Unusable("a turn with two different contents")
    content = contents[0] if contents else Content()
    read, beside = {*FROM, *CONTENT}, dict[str, Any]()
    as_written = None
    if role == "assistant":
        read |= {*REASONING, *CALLS}
        thoughts = [plain(turn[key]) for key in REASONING if key in turn] or content.thoughts
        if any(thought != thoughts[0] for thought in thoughts):
            raise Unusable("a turn with two different reasonings")
        within = THOUGHT.match(content.text)
        if within is not None and not any(thoughts) and "</think>" not in within[2]:
            as_written, content.text = content.text, within[2].strip()
            thoughts = [within[1].strip()]
        if thoughts and thoughts[0]:
            beside["reasoning_content"] = thoughts[0]
        calls = [*content.calls]
        if called:
            calls += from_json(content.text)
            content.text = ""
        for key in CALLS:
            value = from_json(turn.get(key, []))
            calls += value
        if calls:
            beside["tool_calls"] = [call_of(call) for call in calls]
    if role == "tool" and isinstance(turn.get("tool_call_id"), str):
        beside["tool_call_id"] = turn["tool_call_id"]
        read.add("tool_call_id")
    if isinstance(turn.get("name"), str):
        beside["name"] = turn["name"]
        read.add("name")
    if not contents and role not in ("tool", "system") and "tool_calls" not in beside:
        raise Unusable("a turn without content")
    weight = 1.0
    for key in WEIGHTS:
        if key not in turn:
            continue
        said = _number_of(turn[key])
        # a loss such as 0.37 is a measurement, which says nothing about what is trained on
        if said is not None and (key == "weight" or said in (0, 1) or isinstance(turn[key], int)):
            read.add(key)
        if role != "assistant":
            continue
        if key == "weight":
            weight *= _weight(turn[key] if said is None else said)
            read.add(key)
        elif key in read:
            weight *= bool(said)
    ignored |= {f"the key {key!r} of turns" for key in turn if key not in read}
    return Message(role, content.text, beside, weight, as_written)


def _number_of(value: Any) -> float | None:
    """The number that a value is or, as tables and JSON have it in a text, stands for; None if it
    is neither a number nor true or false."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("true", "yes", "false", "no"):
            return float(word in ("true", "yes"))
        try:
            return float(word)
        except ValueError:
            return None
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def _weight(value: Any) -> float:
    """How much an answer counts. Raises Unusable for what is no such number."""
    if not isinstance(value, bool | int | float) or not (value == 0 or LEAST <= value <= MOST):
        raise Unusable(f"an answer whose weight is neither 0 nor a number from {LEAST} to {MOST}")
    return float(value)


@dataclass
class Content:
    """What is said in a turn: its text and, if it has parts, also those that are not text."""

    text: str = ""
    thoughts: list[str] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)


def _content(value: Any, whole: bool) -> Content:
    """A text, or parts that are texts, thoughts and calls; with the white space around it if it is
    to be `whole`, as the results of tools are. Raises Unusable for other parts."""
    read = _whole if whole else plain
    if not isinstance(value, list):
        return Content(read(value))
    content, texts = Content(), list[str]()
    for part in value:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise Unusable("content that is not text")
        part = {key: x for key, x in part.items() if not absent(x)}
        kind = str(part.get("type") or ("text" if "text" in part else next(iter(part), "none")))
        if kind == "thinking" and isinstance(part.get("thinking"), str):
            content.thoughts.append(part["thinking"])
        elif kind == "tool_use":
            content.calls.append(
                {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")}
            )
        elif kind in ("text", "input_text", "output_text"):
            texts.append(part.get("text", ""))
        else:
            raise Unusable(f"content that is not text: {kind[:40]}")
    if content.thoughts:
        content.thoughts = [plain("\n\n".join(map(plain, content.thoughts)))]
    content.text = read("".join(map(_whole, texts)))
    return content


def plain(text: Any) -> str:
    """A text without the white space around it. Raises Unusable for anything but text."""
    return _whole(text).strip()


def _whole(text: Any) -> str:
    if not isinstance(text, str):
        raise Unusable("content that is not text")
    if SURROGATE.search(text):
        raise Unusable("text that is not Unicode")
    return text


def joined(one: Message, two: Message) -> Message:
    """Two turns of one role as one, with a blank line between their texts; the calls of both."""
    calls = [call for m in (one, two) for call in m.beside.get("tool_calls", ())]
    rest = [{k: x for k, x in m.beside.items() if k != "tool_calls"} for m in (one, two)]
    alike = rest[0] == rest[1] or ("tool_calls" in two.beside and not rest[1])
    moved = "tool_calls" in one.beside and two.content  # a template writes the text first
    if not alike or moved or one.weight != two.weight:
        raise Unusable("turns of one role in a row with reasoning, calls, names or weights")
    content = "\n\n".join(m.content for m in (one, two) if m.content)
    return Message(
        one.role, content, rest[0] | ({"tool_calls": calls} if calls else {}), one.weight
    )


def require_unicode(value: Any) -> None:
    """Raise Unusable if a text within a JSON value has half of a character in it."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, str):
        _whole(value)
    for inner in value if isinstance(value, list | tuple) else ():
        require_unicode(inner)


def require_single(value: Any) -> None:
    if isinstance(value, Repeated):
        raise Unusable("a key that occurs twice in an object, with different values")


def require_no_media(value: Mapping[str, Any]) -> None:
    for key in MEDIA:
        if not absent(value.get(key)) and value[key] != "":
            raise Unusable(f"{key}, which is not read")

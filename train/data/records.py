"""Records → conversations in their normal form: how data sets write turns, roles, reasoning, tool
calls and pairs. Keys of a record that are not read are counted; a record that would mean something
else without them is left out."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from train.data.conversations import (
    TEXTS,
    Conversation,
    DataConfig,
    Message,
    Repeated,
    Tally,
    Unusable,
)

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
SHAPES: dict[str, tuple[str, ...]] = {  # format → the keys under which a record may have its turns
    "sharegpt": ("conversations", "conversation"),
    "messages": ("messages",),
}
OTHER_SHAPES = ("dialogue", "dialog", "chat", "turns", "data")  # further keys, for format auto
SOURCES = ("instruction", "prompt", "question", "query", "input")  # a prompt, for format auto
MORE = ("input", "context")  # what an instruction is about
ANSWERS = ("output", "completion", "response", "answer")
SYSTEM, TOOLS = ("system", "system_prompt"), ("tools", "functions")
FROM, CONTENT = ("from", "role"), ("value", "content", "text")  # keys of a turn
REASONING = ("reasoning_content", "reasoning", "thinking")
CALLS = ("tool_calls", "function_call")
WEIGHTS = ("weight", "train", "loss")
MEDIA = ("image", "images", "image_url", "video", "videos", "audio", "audios")
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which JSON can contain


def normal(record: Any, name: str, cfg: DataConfig, tally: Tally) -> Conversation:
    """A record in the normal form; `name` is its id if it has none of its own. Raises Unusable."""
    _require_single(record)
    if cfg.format == "pairs":
        return _pair(record, name, cfg, tally)
    if cfg.format in TEXTS:
        return _text(record, name, cfg, tally)
    return conversation_of(record, name, cfg.format, tally)


def _pair(record: Any, name: str, cfg: DataConfig, tally: Tally) -> Conversation:
    """A pair as a prompt and, if there is one, its answer."""
    source, answer = (_within(record, key) for key in cfg.pair)
    if source is None:
        raise Unusable(f"no {cfg.pair[0]!r} in it")
    if not (source := _plain(source)):
        raise Unusable("a blank source")
    messages = [Message("user", cfg.prefix + source)]
    if answer is not None and (answer := _plain(answer)):
        messages.append(Message("assistant", answer))
    elif cfg.answers == "data":
        raise Unusable("no answer, or a blank one")
    _count_ignored(record, {*cfg.pair, *(key.partition(".")[0] for key in cfg.pair)}, tally)
    return Conversation(name, tuple(messages), source)


def _within(record: Any, key: str) -> Any:
    """The value of a key, or of a key within a key; None if it is missing."""
    if not isinstance(record, dict):
        raise Unusable("not a pair")
    outer, _, inner = key.partition(".")
    if key in record or not isinstance(record.get(outer), dict):
        return record.get(key)
    return _within(record[outer], inner)


def _text(record: Any, name: str, cfg: DataConfig, tally: Tally) -> Conversation:
    """A text in two parts: its beginning, which is the prompt, and the rest, which starts with the
    space between them."""
    text = _plain(record.get("text") if isinstance(record, dict) else record)
    if not text:
        raise Unusable("a blank text")
    opening = text[: cfg.beginning]
    if len(text) > cfg.beginning:
        opening = (opening.rsplit(None, 1) or [opening])[0]
    messages = Message("user", opening), Message("assistant", text[len(opening) :])
    if isinstance(record, dict):
        _count_ignored(record, {"text"}, tally)
    return Conversation(name, messages, opening)


def conversation_of(record: Any, name: str, format: str, tally: Tally) -> Conversation:
    """A record as at most one system turn, then user and assistant turns in alternation, with the
    results of tools after their calls. No turn is blank, and there is no white space around any
    text: a space before an answer would become part of the answer's first token. `name` is its id
    if it has none of its own. Raises Unusable."""
    turns, read = _turns(record, format)
    record = record if isinstance(record, dict) else {}
    _require_no_media(record)
    ignored: set[str] = set()
    messages = [_message(turn, ignored) for turn in turns]
    roles = tuple(m.role for m in messages)
    if not roles:
        raise Unusable("no turns")
    if "system" in roles[1:]:
        raise Unusable("a system turn that is not the first")
    if "user" not in roles:
        raise Unusable("no user turn")
    system = [m for m in messages[:1] if m.role == "system"]
    first = roles.index("user")
    changes = ["answers before the first prompt left out"] if first > len(system) else []
    kept: list[Message] = []
    for message in messages[first:]:
        if message.blank:
            changes.append("cut at a blank turn")
            break
        if kept and kept[-1].role == message.role != "tool":
            message = _joined(kept.pop(), message)
            changes.append("turns of one role in a row joined")
        kept.append(message)
    if not kept:
        raise Unusable("a blank first prompt")
    system = [m for m in system if m.content]
    above = {_plain(record[key]) for key in SYSTEM if not _absent(record.get(key))} - {""}
    if len(above | {m.content for m in system}) > 1:
        raise Unusable("two different system prompts")
    system = system or [Message("system", text) for text in above]
    for change in dict.fromkeys(changes):
        tally.count(tally.changed, change)
    for key in sorted(ignored):
        tally.count(tally.ignored, key)
    _count_ignored(record, {*read, *SYSTEM, *TOOLS, "id"}, tally)
    id = record.get("id")
    if isinstance(id, int) or (isinstance(id, str) and id and not SURROGATE.search(id)):
        name = str(id)
    tools = _tools(record)
    _require_unicode([tools, *(m.beside for m in kept)])
    return Conversation(name, (*system, *kept), kept[0].content, roles, tools)


def is_turn(value: Any) -> bool:
    """Whether a JSON value is a turn of a conversation, by its keys."""
    return isinstance(value, dict) and any(key in value for key in FROM)


def is_record(value: Any) -> bool:
    """Whether a JSON value is a record, by its keys, and not a turn or a tool."""
    shapes = sum(SHAPES.values(), OTHER_SHAPES)
    known = {*shapes, *SOURCES, *ANSWERS, "text", "source", "target"}
    return isinstance(value, dict) and not known.isdisjoint(value) and not is_turn(value)


def _turns(record: Any, format: str) -> tuple[list[Any], list[str]]:
    """The turns of a record, and the keys that hold them. A key without turns does not hide another
    one. Raises Unusable if there are no turns, or two lists of them that differ."""
    auto = format == "auto"
    if isinstance(record, list) and record and auto and all(map(is_turn, record)):
        return record, []
    if not isinstance(record, dict):
        raise Unusable("not a conversation")
    usual = sum(SHAPES.values(), ()) if auto else SHAPES[format]
    known = {key: turns for key in usual if (turns := _as_turns(record.get(key)))}
    for key in OTHER_SHAPES if auto and not known else ():
        turns = _as_turns(record.get(key))
        if turns and all(map(is_turn, turns)):
            known = known or {key: turns}
    if not known and auto and (turns := _prompted(record)):
        return turns, [*SOURCES, *MORE, *ANSWERS]
    if not known:
        lists = any(isinstance(record.get(key), list) for key in usual)
        raise Unusable("no turns" if lists else "not a conversation")
    (one, turns), *others = known.items()
    for other, theirs in others:
        if [_message(turn, set()) for turn in turns] != [_message(turn, set()) for turn in theirs]:
            raise Unusable(
                f"two different conversations, under {one!r} and {other!r}: choose one with "
                "data.format"
            )
    return turns, list(known)


def _as_turns(value: Any) -> list[Any] | None:
    """The turns that a key holds: as a list, as texts of the user and the assistant in alternation,
    as columns instead of rows, or any of these as JSON in a text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return _as_turns(json.loads(value))
        except (ValueError, RecursionError):
            return None
    if isinstance(value, dict):
        columns = {key: x for key, x in value.items() if isinstance(x, list)}
        if not is_turn(columns) or len({len(x) for x in columns.values()}) > 1:
            return None
        return [dict(zip(columns, row)) for row in zip(*columns.values())]
    if not isinstance(value, list):
        return None
    if value and all(isinstance(x, str) for x in value):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(value)]
    return value


def _prompted(record: Mapping[str, Any]) -> list[Any]:
    """The turns of a record with a prompt and, if there is one, its completion; either may be a
    text or turns. What an instruction is about follows it after a blank line."""
    source = next((key for key in SOURCES if not _absent(record.get(key))), "")
    prompt = record.get(source)
    about = [record[k] for k in MORE if k != source and not _absent(record.get(k))]
    if isinstance(prompt, str) and source != "input":
        prompt = "\n\n".join([prompt, *(x for x in about if isinstance(x, str))])
    answers = [record[key] for key in ANSWERS if not _absent(record.get(key))]
    turns: list[Any] = []
    for role, said in (("user", prompt), ("assistant", answers[0] if answers else [])):
        if isinstance(said, str):
            turns.append({"role": role, "content": said})
        elif isinstance(said, list) and all(map(is_turn, said)):
            turns += said
        else:
            return []
    return turns


def _message(turn: Any, ignored: set[str]) -> Message:
    """A turn. Its keys that are not read are added to `ignored`. Raises Unusable."""
    _require_single(turn)
    turn = {key: x for key, x in turn.items() if not _absent(x)} if isinstance(turn, dict) else {}
    theirs = sorted({str(turn[key]).strip().lower() for key in FROM if key in turn})
    roles = {ROLES.get(name.replace("-", "_")) for name in theirs}
    if not roles or None in roles:
        raise Unusable(f"a turn of another role: {', '.join(theirs)[:40] or 'none is given'}")
    if len(roles) > 1:
        raise Unusable("a turn with two different roles")
    _require_no_media(turn)
    role = str(roles.pop())
    contents = [_content(turn[key]) for key in CONTENT if key in turn]
    if any(content.text != contents[0].text for content in contents):
        raise Unusable("a turn with two different contents")
    content = contents[0] if contents else Content()
    read, beside = {*FROM, *CONTENT}, dict[str, Any]()
    if role == "assistant":
        read |= {*REASONING, *CALLS}
        thoughts = [_plain(turn[key]) for key in REASONING if key in turn] or content.thoughts
        if any(thought != thoughts[0] for thought in thoughts):
            raise Unusable("a turn with two different reasonings")
        if thoughts and thoughts[0]:
            beside["reasoning_content"] = thoughts[0]
        calls = [*content.calls]
        if theirs[0] == "function_call":
            calls += _from_json(content.text)
            content.text = ""
        for key in CALLS:
            value = _from_json(turn.get(key, []))
            calls += value
        if calls:
            beside["tool_calls"] = [_call(call) for call in calls]
    if role == "tool" and isinstance(turn.get("tool_call_id"), str):
        beside["tool_call_id"] = turn["tool_call_id"]
        read.add("tool_call_id")
    if isinstance(turn.get("name"), str):
        beside["name"] = turn["name"]
        read.add("name")
    if not contents and role != "tool" and "tool_calls" not in beside:
        raise Unusable("a turn without content")
    trained = True
    for key in WEIGHTS:
        if isinstance(weight := turn.get(key), bool | int) or (
            key == "weight" and weight in (0, 1)
        ):
            trained = trained and (bool(weight) or role != "assistant")
            read.add(key)
    ignored |= {f"the key {key!r} of turns" for key in turn if key not in read}
    return Message(role, content.text, beside, trained)


@dataclass
class Content:
    """What is said in a turn: its text and, if it has parts, also those that are not text."""

    text: str = ""
    thoughts: list[str] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)


def _content(value: Any) -> Content:
    """A text, or parts that are texts, thoughts and calls. Raises Unusable for other parts."""
    if not isinstance(value, list):
        return Content(_plain(value))
    content, texts = Content(), list[str]()
    for part in value:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise Unusable("content that is not text")
        part = {key: x for key, x in part.items() if not _absent(x)}
        kind = str(part.get("type", "text"))
        if kind == "thinking" and isinstance(part.get("thinking"), str):
            content.thoughts.append(part["thinking"])
        elif kind == "tool_use":
            content.calls.append({"name": part.get("name"), "arguments": part.get("input")})
        elif kind in ("text", "input_text", "output_text"):
            texts.append(part.get("text", ""))
        else:
            raise Unusable(f"content that is not text: {kind[:40]}")
    if content.thoughts:
        content.thoughts = [_plain("\n\n".join(map(_plain, content.thoughts)))]
    content.text = _plain("".join(map(_whole, texts)))
    return content


def _plain(text: Any) -> str:
    """A text without the white space around it. Raises Unusable for anything but text."""
    return _whole(text).strip()


def _whole(text: Any) -> str:
    if not isinstance(text, str):
        raise Unusable("content that is not text")
    if SURROGATE.search(text):
        raise Unusable("text that is not Unicode")
    return text


def _joined(one: Message, two: Message) -> Message:
    """Two turns of one role as one, with a blank line between their texts."""
    if one.beside != two.beside or one.trained != two.trained or "tool_calls" in one.beside:
        raise Unusable("turns of one role in a row with reasoning, calls, names or weights")
    return Message(one.role, f"{one.content}\n\n{two.content}", one.beside, one.trained)


def _call(call: Any) -> dict[str, Any]:
    """A tool call as servers give it to a chat template, its arguments as an object. Raises
    Unusable."""
    call = _filled(call)
    inner = call.get("function", call) if isinstance(call, dict) else {}
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or call.get("type", "function") != "function":
        raise Unusable("tool calls without a function's name")
    arguments = inner.get("arguments", inner.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise Unusable("tool calls whose arguments are not JSON") from error
    if not isinstance(arguments, dict):
        raise Unusable("tool calls whose arguments are not an object")
    described = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return ({"id": call["id"]} if isinstance(call.get("id"), str) else {}) | described


def _tools(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The tools that a record describes, as servers give them to a chat template. Raises
    Unusable."""
    tools = [tool for key in TOOLS for tool in _from_json(record.get(key))]
    if not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("tools that are not JSON objects")
    wrapped = (
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    )
    return tuple(map(_filled, wrapped))


def _from_json(value: Any) -> list[Any]:
    """A list, or one value as a list of one; either may be JSON in a text. Raises Unusable."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Unusable("tools or tool calls that are not JSON") from error
    if _absent(value):
        return []
    return value if isinstance(value, list) else [value]


def _filled(value: Any) -> Any:
    """A value without the keys that a table fills with null, since other rows have them."""
    if isinstance(value, dict):
        return {key: _filled(x) for key, x in value.items() if x is not None}
    return [_filled(x) for x in value] if isinstance(value, list) else value


def _absent(value: Any) -> bool:
    """Whether a key with this value is as good as missing: tables fill what a row lacks with null,
    NaN or nothing. A blank text is there."""
    return value is None or value != value or (isinstance(value, list | dict) and not value)


def _require_unicode(value: Any) -> None:
    """Raise Unusable if a text within a JSON value has half of a character in it."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, str):
        _whole(value)
    for inner in value if isinstance(value, list | tuple) else ():
        _require_unicode(inner)


def _require_single(value: Any) -> None:
    if isinstance(value, Repeated):
        raise Unusable("a key that occurs twice in an object, with different values")


def _require_no_media(value: Mapping[str, Any]) -> None:
    for key in MEDIA:
        if not _absent(value.get(key)) and value[key] != "":
            raise Unusable(f"{key}, which is not read")


def _count_ignored(record: Mapping[str, Any], read: Collection[str], tally: Tally) -> None:
    for key in record:
        if key not in read and not _absent(record[key]):
            tally.count(tally.ignored, f"the key {key!r} of records")

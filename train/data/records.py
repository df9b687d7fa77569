"""Turns records into conversations in their normal form, as servers pass them to a template: turns,
tools, calls and results. record_shapes.py finds the turns in the record.

Ignored keys are counted. A record that would mean something else without them is skipped. OpenAI's
and Anthropic's messages have calls beside the text. Hermes, Glaive and xLAM write them into the
text; they are parsed and removed from it, so that the target's own template renders them.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from train.data.conversations import (
    RENDERED,
    TEXTS,
    THINKING_ARGUMENTS,
    Conversation,
    DataConfig,
    Message,
    Repeated,
    Tally,
    Unusable,
)
from train.data.record_shapes import (
    CONTENT,
    FROM,
    PROMPTS,
    REASONING,
    TOOLS,
    absent,
    are_texts,
    from_json,
    is_tokenised,
    require_known_form,
    responses_api_as_messages,
    tokens_of,
    turn_lists,
    unwrapped_request,
    written_by_python,
)

# keys of a record that say what its prompt is about, and its language, in a word or two
CATEGORY, LANGUAGE = ("category", "subject"), ("language", "lang")
LONGEST_LABEL = 40  # characters of these
LATER_PROMPTS = "later prompts left out, as their responses are not given"
SYSTEM = ("system", "system_prompt")  # keys of a record
EFFORT = "reasoning_effort"  # an argument that a request may also have beside its messages
ARGUMENTS = "chat_template_kwargs"  # a request's variables for the chat template
ROLES = {  # names in data, in lower case → names for servers and chat templates
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
CALLS = ("tool_calls", "function_call")  # keys of a turn
WEIGHTS = ("weight", "train", "loss")
LEAST, MOST = 0.001, 100  # weights of responses that are trained on
MEDIA = ("image", "images", "image_url", "video", "videos", "audio", "audios")
# reasoning at the beginning of a response; what opens it may have been a part of the prompt
THOUGHT = re.compile(r"\s*(?:<think>)?((?:(?!<think>).)*?)</think>(.*)", re.DOTALL)
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which JSON can contain
BAD_ARGUMENTS = "tool calls whose arguments are not JSON"
RETOLD = "a system prompt that describes tools, of which its template writes the tools"
# headings of tools in texts
DESCRIBED = re.compile(r"<tools>\s*([\[{].*?)\s*</tools>", re.DOTALL)
LEADS = ("You are a function calling AI model", "# Tools")  # where the words about tools begin
GLAIVE = re.compile(r"[,\s]*with access to the following functions\..*?-\s*(?=\{)", re.DOTALL)
GLAIVE_CALL = "<functioncall>"
QUOTED = re.compile(r"^(.*\"arguments\"\s*:\s*)'(.*)'(\s*\})$", re.DOTALL)
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)


def conversation_of_record(record: Any, name: str, cfg: DataConfig, tally: Tally) -> Conversation:
    """A record in the normal form; `name` is its id if it has none of its own. Raises Unusable."""
    require_single(record)
    if cfg.format == "pairs":
        return _pair(record, name, cfg, tally)
    texts, tokens = cfg.format in TEXTS, cfg.format == "tokens"
    if tokens and not is_tokenised(record):
        raise Unusable("no token ids")
    if tokens or (is_tokenised(record) and (texts or not _has_turns(record, cfg.format))):
        return _tokenised(record, name, cfg, tally)
    if texts:
        return _text(record, name, cfg, tally)
    return conversation_of_chat(record, name, cfg.format, tally)


def _has_turns(record: Any, format: str) -> bool:
    try:
        return bool(_turns(record, format)[0])
    except Unusable:
        return False


def _tokenised(record: dict[str, Any], name: str, cfg: DataConfig, tally: Tally) -> Conversation:
    """A row of token ids."""
    tokens, read = tokens_of(record, cfg.responses == "target", cfg.format in TEXTS)
    _count_ignored(record, {*read, "id"}, tally)
    name = _id(record, name)
    return Conversation(name, (), tokens.opening, ("user", "assistant"), tokens=tokens)


def _id(record: Mapping[str, Any], name: str) -> str:
    """The id of a record, or else this name."""
    id = record.get("id")
    if isinstance(id, int) or (isinstance(id, str) and id and not SURROGATE.search(id)):
        return str(id)
    return name


def _pair(record: Any, name: str, cfg: DataConfig, tally: Tally) -> Conversation:
    """The conversation of a pair: a prompt and, if the pair has one, a response."""
    source, answer = (_within(record, key) for key in cfg.pair)
    if source is None:
        raise Unusable(f"no {cfg.pair[0]!r} in it")
    if not (source := plain(source)):
        raise Unusable("a blank source")
    messages = [Message("user", cfg.prefix + source)]
    if answer is not None and (answer := plain(answer)):
        messages.append(Message("assistant", answer))
    elif cfg.responses == "data":
        raise Unusable("no response, or a blank one")
    _count_ignored(record, {*cfg.pair, *(key.partition(".")[0] for key in cfg.pair)}, tally)
    return Conversation(name, tuple(messages), source)


def _within(record: Any, key: str) -> Any:
    """The value of a key, or of a nested key a.b; None if it is missing."""
    if not isinstance(record, dict):
        raise Unusable("not a pair")
    outer, _, inner = key.partition(".")
    if key in record or not isinstance(record.get(outer), dict):
        return record.get(key)
    return _within(record[outer], inner)


def _text(record: Any, name: str, cfg: DataConfig, tally: Tally) -> Conversation:
    """A text in two parts: its beginning, which is the prompt, and the rest, which starts with the
    space between them."""
    text = plain(record.get("text") if isinstance(record, dict) else record)
    if not text:
        raise Unusable("a blank text")
    opening = text[: cfg.prompt_characters]
    if len(text) > cfg.prompt_characters:
        opening = (opening.rsplit(None, 1) or [opening])[0]
    messages = Message("user", opening), Message("assistant", text[len(opening) :])
    if isinstance(record, dict):
        _count_ignored(record, {"text"}, tally)
    return Conversation(name, messages, opening)


def conversation_of_chat(record: Any, name: str, format: str, tally: Tally) -> Conversation:
    """A record as alternating user and assistant turns, with tool results after their calls, and
    with system turns before, between and after them. No turn is blank. Texts other than tool
    results have no white space around them: a space before a response would become part of its
    first token. `name` is its id if it has none of its own. Raises Unusable."""
    record, changes = responses_api_as_messages(unwrapped_request(record)), list[str]()
    if format == "auto":
        require_known_form(record)
    turns, read = _turns(record, format)
    later: tuple[Message, ...] = ()
    record = record if isinstance(record, dict) else {}
    if turns[1:] and any(are_texts(record.get(key)) for key in read if key in PROMPTS):
        changes.append(LATER_PROMPTS)
        later = tuple(m for turn in turns[1:] for m in messages_of(turn, set()))
        turns = turns[:1]
    require_no_media(record)
    ignored: set[str] = set()
    messages = [message for turn in turns for message in messages_of(turn, ignored)]
    roles = tuple(m.role for m in messages)
    if not roles:
        raise Unusable("no turns")
    if "user" not in roles:
        raise Unusable("no user turn")
    first = roles.index("user")
    system = [m for m in messages[:first] if m.role == "system"]
    if first > len(system):
        changes.append("responses before the first prompt left out")
    kept: list[Message] = []
    for message in messages[first:]:
        if message.blank and message.role != "system":
            changes.append("cut at a blank turn")
            break
        if kept and kept[-1].role == message.role not in ("tool", "system"):
            message = joined(kept.pop(), message)
            changes.append("turns of one role in a row joined")
        kept.append(message)
    if not kept:
        raise Unusable("a blank first prompt")
    texts = (plain(record[key]) for key in SYSTEM if not absent(record.get(key)))
    above = {text.removeprefix("SYSTEM:").strip() for text in texts} - {""}
    if above and not any(m.content for m in system):
        system = []
    if len(above) > 1 or (system and above - {m.content for m in system}):
        raise Unusable("two different system prompts")
    system = system or [Message("system", text) for text in above]
    tools = tools_of(record)
    if system and (within := tools_within(system[0].content)) is not None:
        tools = tools or tools_of({"tools": within[1]})
        system = [replace(system[0], content=within[0])] if within[0] else []
        changes.append(RETOLD)
    elif tools and system and "<tools>" in system[0].content:
        raise Unusable("tools that its system prompt describes, too, in an unknown way")
    if tools:
        kept = [message for turn in kept for message in without_tags(turn)]
    for change in dict.fromkeys(changes):
        tally.count(tally.changed, change)
    for key in sorted(ignored):
        tally.count(tally.ignored, key)
    thinking, arguments, named = _arguments(record)
    category, language = _label(record, CATEGORY), _label(record, LANGUAGE)
    read = [*read, *named, *category, *language]
    _count_ignored(record, {*read, *SYSTEM, *TOOLS, "id"}, tally)
    require_unicode([tools, arguments, *(m.beside for m in kept)])
    return Conversation(
        _id(record, name),
        (*system, *kept),
        kept[0].content,
        roles,
        tools,
        thinking=thinking,
        arguments=arguments,
        later=later,
        category="".join(category.values()),
        language="".join(language.values()),
    )


def _label(record: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    """The first of these keys that a record has, with its value; empty if none has a short text."""
    for key in keys:
        value = record.get(key)
        label = value.strip() if isinstance(value, str) else ""
        if 0 < len(label) <= LONGEST_LABEL and label.isprintable():
            return {key: label}
    return {}


def _turns(record: Any, format: str) -> tuple[list[Any], list[str]]:
    """The turns of a record, and the keys that hold them. Raises Unusable if there are no turns, or
    two lists of them that differ."""
    (turns, *others), read, follow = turn_lists(record, format)
    for n, more in enumerate(others, 1):
        if follow:  # a preferred response may repeat the prompt
            repeats = 0 < len(turns) < len(more) and _alike(turns, more[: len(turns)])
            turns = more if repeats else [*turns, *more]
        elif not _alike(turns, more):
            raise Unusable(
                f"two different conversations, under {read[0]!r} and {read[n]!r}: choose one with "
                "data.format"
            )
    return turns, read


def _alike(turns: list[Any], others: list[Any]) -> bool:
    """Whether two lists of turns mean the same, independent of their form."""
    one, other = ([messages_of(turn, set()) for turn in some] for some in (turns, others))
    return one == other


def _arguments(record: Mapping[str, Any]) -> tuple[bool | None, dict[str, Any], list[str]]:
    """Whether a record requests reasoning for its responses, as in a request to a server; the other
    variables that it sets for the chat template; and the keys with both. Raises Unusable for
    arguments that contradict each other, or that would change the rendering of turns."""
    asked, named = record.get(ARGUMENTS), [ARGUMENTS]
    if isinstance(asked, str):
        try:
            asked = json.loads(asked)
        except (ValueError, RecursionError):
            asked = None
    if not isinstance(asked, dict):
        asked, named = {}, []
    arguments = {str(key): x for key, x in asked.items() if not absent(x)}
    for key in RENDERED.keys() & arguments.keys():
        if arguments.pop(key) != RENDERED[key]:
            raise Unusable(f"the template argument {key!r}, which a server sets itself")
    if isinstance(effort := record.get(EFFORT), str):
        named.append(EFFORT)
        if arguments.setdefault(EFFORT, effort) != effort:
            raise Unusable(f"two different values of {EFFORT!r}")
    above = [key for key in THINKING_ARGUMENTS if isinstance(record.get(key), bool)]
    said = [record[key] for key in above]
    within = [key for key in THINKING_ARGUMENTS if isinstance(arguments.get(key), bool)]
    said += [arguments.pop(key) for key in within]
    if any(x != said[0] for x in said):
        raise Unusable("two different values of arguments that turn reasoning on or off")
    return (said[0] if said else None), arguments, [*named, *above]


def _count_ignored(record: Mapping[str, Any], read: Collection[str], tally: Tally) -> None:
    for key in record:
        if key not in read and not absent(record[key]):
            tally.count(tally.ignored, f"the key {key!r} of records")


# Turns


def messages_of(turn: Any, ignored: set[str]) -> list[Message]:
    """The messages of a turn: first the tool results in its content (Anthropic), then the turn. Its
    ignored keys are added to `ignored`. Raises Unusable."""
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
    """A tool result that is a part of a user's turn."""
    id = part.get("tool_use_id")
    content = "" if absent(part.get("content")) else _content(part["content"], whole=True).text
    return Message("tool", content, {"tool_call_id": id} if isinstance(id, str) else {})


def _message(turn: Any, ignored: set[str]) -> Message:
    """A message from a turn. Its ignored keys are added to `ignored`. Raises Unusable."""
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
    """A value as a number, also if it is a number as text, as in tables and JSON; None for anything
    but a number, true or false."""
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
    """The weight of a response. Raises Unusable if it is not a valid number."""
    if not isinstance(value, bool | int | float) or not (value == 0 or LEAST <= value <= MOST):
        raise Unusable(f"a response whose weight is neither 0 nor a number from {LEAST} to {MOST}")
    return float(value)


@dataclass
class Content:
    """The content of a turn: its text and, if it has parts, those that are not text."""

    text: str = ""
    thoughts: list[str] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)


def _content(value: Any, whole: bool) -> Content:
    """The content of a text, or of parts that are texts, thoughts and calls. The text is stripped
    unless it is `whole`, as for tool results. Raises Unusable for other parts."""
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
    """A stripped text. Raises Unusable for anything but text."""
    return _whole(text).strip()


def _whole(text: Any) -> str:
    if not isinstance(text, str):
        raise Unusable("content that is not text")
    if SURROGATE.search(text):
        raise Unusable("text that is not Unicode")
    return text


def joined(one: Message, two: Message) -> Message:
    """Two turns of one role as one, with a blank line between their texts and the calls of both."""
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
    """Raise Unusable if a text within a JSON value contains a lone surrogate."""
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


# Tools, calls and their results


def call_of(call: Any) -> dict[str, Any]:
    """A tool call as servers give it to a chat template, its arguments as an object. Raises
    Unusable."""
    call = filled(call)
    inner = call.get("function", call) if isinstance(call, dict) else {}
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or call.get("type", "function") != "function":
        raise Unusable("tool calls without a function's name")
    arguments = inner.get("arguments", inner.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise Unusable(BAD_ARGUMENTS) from error
    if not isinstance(arguments, dict):
        raise Unusable("tool calls whose arguments are not an object")
    described = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return ({"id": call["id"]} if isinstance(call.get("id"), str) else {}) | described


def tools_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The tools that a record describes, as servers give them to a chat template. Raises
    Unusable."""
    tools = [tool for key in TOOLS for tool in from_json(record.get(key))]
    if not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("tools that are not JSON objects")
    return tuple(map(_tool, map(filled, tools)))


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    if isinstance(tool.get("function"), dict):
        return tool
    tool = {key: x for key, x in tool.items() if not (key == "type" and x == "function")}
    if "input_schema" in tool:  # Anthropic's
        tool["parameters"] = tool.pop("input_schema")
    parameters = tool.get("parameters")
    described = isinstance(parameters, dict) and "properties" not in parameters
    if described and parameters and all(isinstance(x, dict) for x in parameters.values()):
        tool["parameters"] = {"type": "object", "properties": parameters}  # xLAM's
    return {"type": "function", "function": tool}


def filled(value: Any) -> Any:
    """A value without keys that are null, which tables add because other rows have them."""
    if isinstance(value, dict):
        return {key: filled(x) for key, x in value.items() if x is not None}
    return [filled(x) for x in value] if isinstance(value, list) else value


# …, where data sets write them within texts


def without_tags(message: Message) -> list[Message]:
    """The messages of a turn whose text may contain calls or tool results: these are moved out of
    the text. Several tool results become several turns."""
    if message.role == "tool":
        return [replace(message, content=result) for result in results_within(message.content)]
    if message.role != "assistant" or "tool_calls" in message.beside:
        return [message]
    content, calls = calls_within(message.content)
    if not calls:
        return [message]
    beside = {**message.beside, "tool_calls": [call_of(call) for call in calls]}
    return [replace(message, content=content, beside=beside, as_written=None)]


def tools_within(text: str) -> tuple[str, list[Any]] | None:
    """A system prompt without the tools that it describes, and these tools; None if it describes
    none in a known format."""
    if (block := DESCRIBED.search(text)) is not None:  # Hermes, and what Qwen's template writes
        starts = [at for lead in LEADS if 0 <= (at := text.find(lead)) < block.start()]
        tools = _values(block[1])
        if starts and tools:
            return text[: min(starts)].strip(), tools
    if (lead := GLAIVE.search(text)) is not None and (tools := _values(text[lead.end() :])):
        return f"{text[: lead.start()].rstrip('.')}.", tools
    return None


def _values(text: str) -> list[Any]:
    """The objects in a text, one after another or in a list; empty for anything else."""
    decoder, values, at = json.JSONDecoder(), list[Any](), 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            values += value if isinstance(value, list) else [value]
            at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,"))
    except (ValueError, RecursionError):
        return []
    return values if all(isinstance(value, dict) for value in values) else []


def calls_within(text: str) -> tuple[str, list[Any]]:
    """A response without the calls at its end, in the formats of Hermes and Glaive, and the calls.
    Raises Unusable if they cannot be parsed, or if more text follows."""
    if GLAIVE_CALL in text:
        said, *calls = text.split(GLAIVE_CALL)
        return said.strip(), [_call_within(call.strip()) for call in calls]
    if (first := CALL.search(text)) is None:
        return text, []
    if CALL.sub("", text[first.start() :]).strip():
        raise Unusable("text after a tool call")
    calls = [call for block in CALL.findall(text) for call in _listed(_call_within(block))]
    return text[: first.start()].strip(), calls


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _call_within(text: str) -> Any:
    """A call in JSON or, as in some of these data sets, in Python's syntax, or with its arguments
    as JSON in single quotes."""
    if (quoted := QUOTED.match(text)) is not None:
        arguments = json.dumps(quoted[2].replace("\\'", "'"))
        text = f"{quoted[1]}{arguments}{quoted[3]}"
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if (value := written_by_python(text)) is None:
        raise Unusable(BAD_ARGUMENTS)
    return value


def results_within(text: str) -> list[str]:
    """The tool results in a tool's turn, without the tags that Hermes puts around each."""
    results = RESULT.findall(text)
    return results if results and not RESULT.sub("", text).strip() else [text]

"""Records → conversations in their normal form: under which keys data sets write turns, pairs and
tools (turns.py reads a turn). Keys of a record that are not read are counted; a record that would
mean something else without them is left out."""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from train.data.calls import (
    RETOLD,
    TOOLS,
    absent,
    from_json,
    glaive_turns,
    is_call,
    tools_of,
    tools_within,
    written_by_python,
)
from train.data.conversations import (
    TEXTS,
    Conversation,
    DataConfig,
    Message,
    Tally,
    Unusable,
)
from train.data.rendering import RENDERED, THINKING
from train.data.tokenised import is_tokenised, tokens_of
from train.data.turns import (
    CONTENT,
    REASONING,
    SURROGATE,
    is_turn,
    joined,
    messages_of,
    plain,
    require_no_media,
    require_single,
    require_unicode,
    without_tags,
)

SHAPES: dict[str, tuple[str, ...]] = {  # format → the keys under which a record may have its turns
    "sharegpt": ("conversations", "conversation"),
    "messages": ("messages",),
}
# further keys, for format auto
OTHER_SHAPES = ("dialogue", "dialog", "chat", "turns", "data", "contents")
PROMPTS = ("turns", "prompt")  # keys under which several texts are prompts, not a chat
WRAPPERS = ("body", "request", "input")  # keys of a request that a server was sent
# a prompt, for format auto
SOURCES = ("instruction", "prompt", "question", "query", "input", "inputs")
MORE = ("input", "context")  # what an instruction is about
ANSWERS = ("output", "completion", "response", "answer", "targets", "chosen", "preferred_output")
ROLE_PAIR = ("user", "assistant")
CALLED, HISTORY = "answers", "history"  # an answer's calls (xLAM); pairs before the prompt (Alpaca)
# items of OpenAI's Responses API
RESPONSES = {"message", "reasoning", "function_call", "function_call_output"}
SYSTEM = ("system", "system_prompt")
EFFORT = "reasoning_effort"  # an argument that a request may also have beside its messages
ARGUMENTS = "chat_template_kwargs"  # of a request: variables of the chat template


def normal(record: Any, name: str, cfg: DataConfig, tally: Tally) -> Conversation:
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
    return conversation_of(record, name, cfg.format, tally)


def _has_turns(record: Any, format: str) -> bool:
    try:
        return bool(_turns(record, format)[0])
    except Unusable:
        return False


def _tokenised(record: dict[str, Any], name: str, cfg: DataConfig, tally: Tally) -> Conversation:
    """A row of token ids."""
    tokens, read = tokens_of(record, cfg.answers == "target", cfg.format in TEXTS)
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
    """A pair as a prompt and, if there is one, its answer."""
    source, answer = (_within(record, key) for key in cfg.pair)
    if source is None:
        raise Unusable(f"no {cfg.pair[0]!r} in it")
    if not (source := plain(source)):
        raise Unusable("a blank source")
    messages = [Message("user", cfg.prefix + source)]
    if answer is not None and (answer := plain(answer)):
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
    text = plain(record.get("text") if isinstance(record, dict) else record)
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
    """A record as user and assistant turns in alternation, with the results of tools after their
    calls, and with system turns before, between and after them. No turn is blank, and there is no
    white space around any text but the results of tools: a space before an answer would become part
    of the answer's first token. `name` is its id if it has none of its own. Raises Unusable."""
    record, changes = _responses(_unwrapped(record)), list[str]()
    if format == "auto":
        _require_known_form(record)
    turns, read = _turns(record, format)
    record = record if isinstance(record, dict) else {}
    if turns[1:] and any(_are_texts(record.get(key)) for key in read if key in PROMPTS):
        changes.append("later prompts left out, as their answers are not given")
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
        changes.append("answers before the first prompt left out")
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
    read = [*read, *named]
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
    )


def _arguments(record: Mapping[str, Any]) -> tuple[bool | None, dict[str, Any], list[str]]:
    """Whether a record says that its answers were asked for with reasoning, as to a server; the
    other variables that it sets for the chat template; and the keys that say so. Raises Unusable
    for arguments that contradict each other, or that would change what is rendered."""
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
    above = [key for key in THINKING if isinstance(record.get(key), bool)]
    said = [record[key] for key in above]
    said += [arguments.pop(key) for key in THINKING if isinstance(arguments.get(key), bool)]
    if any(x != said[0] for x in said):
        raise Unusable("two different values of arguments that turn reasoning on or off")
    return (said[0] if said else None), arguments, [*named, *above]


def _unwrapped(record: Any) -> Any:
    """A record in which a request to a server is wrapped, as in logs and in files of batches, with
    its keys beside those of the record, and the server's answer as the last turn."""
    if not isinstance(record, dict) or any(record.get(k) for k in sum(SHAPES.values(), ())):
        return record
    for key in WRAPPERS:
        inner = record.get(key)
        turns = _as_turns(inner.get("messages")) if isinstance(inner, dict) else None
        if not turns or not isinstance(inner, dict):
            continue
        record = {k: x for k, x in record.items() if k != key} | inner
        for name in ANSWERS:
            answer = record.get(name)
            if isinstance(answer, dict) and isinstance(answer.get("body"), dict):
                answer = answer["body"]
            choices = answer.get("choices") if isinstance(answer, dict) else None
            if isinstance(choices, list) and choices and isinstance(choices[0], dict):
                answer = [choices[0].get("message")]
            if isinstance(answer, list) and answer and all(map(is_turn, answer)):
                return {k: x for k, x in record.items() if k != name} | {
                    "messages": [*turns, *answer]
                }
        return record
    return record


def _responses(record: Any) -> Any:
    """A record of OpenAI's Responses API as messages: `instructions`, the items of `input` and
    those of `output`. Raises Unusable for items of other kinds, as a summary of the reasoning."""
    if not isinstance(record, dict) or any(record.get(k) for k in sum(SHAPES.values(), ())):
        return record
    asked, said = record.get("input"), record.get("output")
    items = [x for part in (asked, said) if isinstance(part, list) for x in part]
    kinds = {x.get("type") for x in items if isinstance(x, dict)}
    if asked is None or not (kinds & RESPONSES or isinstance(record.get("instructions"), str)):
        return record
    turns = list[Any]()
    for role, part in (("user", asked), ("assistant", said)):
        if isinstance(part, str):
            turns.append({"role": role, "content": part})
            continue
        for item in part if isinstance(part, list) else ():
            turns += _items(item)
    system = {} if absent(record.get("instructions")) else {"system": record["instructions"]}
    rest = {k: x for k, x in record.items() if k not in ("input", "output", "instructions")}
    return rest | system | {"messages": turns}


def _items(item: Any) -> list[Any]:
    """The turns that an item of the Responses API is."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and is_turn(item):
        return [{k: x for k, x in item.items() if k not in ("type", "id", "status")}]
    if kind == "function_call":
        call = {"id": item.get("call_id"), "name": item.get("name")}
        return [{"role": "assistant", "tool_calls": [call | {"arguments": item.get("arguments")}]}]
    if kind == "function_call_output":
        result = {"role": "tool", "content": item.get("output")}
        return [result | {"tool_call_id": item.get("call_id")}]
    if kind == "reasoning" and not item.get("summary") and not item.get("content"):
        return []
    raise Unusable(f"an item of the Responses API that is no message or call: {str(kind)[:40]}")


def _require_known_form(record: Any) -> None:
    """Raise Unusable, with the name of the form, for records that are no conversations, or that
    would lose what makes them one."""
    if not isinstance(record, dict) or any(record.get(k) for k in sum(SHAPES.values(), ())):
        return
    inner = record.get("message")
    if isinstance(record.get("mapping"), dict):
        raise Unusable("a ChatGPT export: give one path of the tree under 'mapping' as messages")
    if "message_tree_id" in record or _has_replies(record.get("prompt")):
        raise Unusable("a tree of replies, as OpenAssistant has it: give one path as messages")
    if is_turn(inner) and "type" in record:
        raise Unusable("an agent's session, one turn a record: give its turns as messages")
    if isinstance(record.get("chat_messages"), list):
        raise Unusable("a Claude export: give chat_messages as messages, sender as role")
    if is_turn(record) and not is_record(record) and any(k in record for k in CONTENT):
        raise Unusable("one turn a record: give all turns of a chat in one record, as messages")
    if len(record) == 1 and ";" in next(iter(record)):
        raise Unusable("a table with semicolons between its cells: use commas")
    if record and all(is_record(value) for value in record.values()):
        raise Unusable("records under their ids: give a list of the records")


def _has_replies(value: Any) -> bool:
    return isinstance(value, dict) and "replies" in value


def is_record(value: Any) -> bool:
    """Whether a JSON value is a record, by its keys, and not a turn or a tool."""
    shapes = sum(SHAPES.values(), OTHER_SHAPES)
    known = {*shapes, *SOURCES, *ANSWERS, "text", "source", "target"}
    return isinstance(value, dict) and not known.isdisjoint(value) and not is_turn(value)


def _turns(record: Any, format: str) -> tuple[list[Any], list[str]]:
    """The turns of a record, and the keys that hold them. A key without turns does not hide another
    one. Raises Unusable if there are no turns, or two lists of them that differ."""
    auto = format == "auto"
    if isinstance(record, str) and auto:
        return [{"role": "user", "content": record}], []
    if isinstance(record, list) and record and auto and all(map(is_turn, record)):
        return record, []
    if not isinstance(record, dict):
        raise Unusable("not a conversation")
    usual = sum(SHAPES.values(), ()) if auto else SHAPES[format]
    known = {key: turns for key in usual if (turns := _as_turns(record.get(key)))}
    for key in OTHER_SHAPES if auto and not known else ():
        texts = record.get(key)
        glaive = isinstance(texts, str) and glaive_turns(texts)
        turns = glaive or _as_turns(texts, prompts=key in PROMPTS)
        if turns and all(map(is_turn, turns)):
            known = known or {key: turns}
    if not known and auto and isinstance(sample := record.get("sample"), str):  # Glaive's first
        known = {"sample": glaive_turns(sample)} if glaive_turns(sample) else known
    if not known and auto and (prompted := _prompted(record)):
        return prompted
    if not known:
        lists = any(isinstance(record.get(key), list) for key in usual)
        raise Unusable("no turns" if lists else "not a conversation")
    (one, turns), *others = known.items()
    for other, theirs in others:
        if [messages_of(turn, set()) for turn in turns] != [
            messages_of(turn, set()) for turn in theirs
        ]:
            raise Unusable(
                f"two different conversations, under {one!r} and {other!r}: choose one with "
                "data.format"
            )
    return turns, list(known)


def _as_turns(value: Any, prompts: bool = False) -> list[Any] | None:
    """The turns that a key holds: as a list, as texts of the user and the assistant in alternation
    (or of the user alone, if they are `prompts`), as columns instead of rows, or any of these as
    JSON in a text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return _as_turns(json.loads(value), prompts)
        except (ValueError, RecursionError):
            return _as_turns(written_by_python(value), prompts)
    if isinstance(value, dict):
        columns = {key: x for key, x in value.items() if isinstance(x, list)}
        if not is_turn(columns) or len({len(x) for x in columns.values()}) > 1:
            return None
        return [dict(zip(columns, row)) for row in zip(*columns.values())]
    if not isinstance(value, list):
        return None
    if _are_texts(value):
        roles = ("user", "user" if prompts else "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(value)]
    return value


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, str) for x in value)


def _prompted(record: Mapping[str, Any]) -> tuple[list[Any], list[str]] | None:
    """The turns of a record with a prompt and, if there is one, its completion, and the keys that
    hold them. Either may be a text or turns. What an instruction is about follows it after a blank
    line; pairs of a prompt and an answer may come before."""
    source = next((key for key in SOURCES if not absent(record.get(key))), "")
    prompt, read = record.get(source), [source]
    if isinstance(prompt, list) and source in PROMPTS:
        prompt = _as_turns(prompt, prompts=True)
    if isinstance(prompt, str) and source not in ("input", "inputs"):
        about = [k for k in MORE if k != source and not absent(record.get(k))]
        texts = [k for k in about if isinstance(record[k], str)]
        prompt, read = "\n\n".join([prompt, *(record[k] for k in texts)]), [*read, *texts]
    answers = [key for key in ANSWERS if not absent(record.get(key))]
    said: Any = record[answers[0]] if answers else []
    read += answers[:1]
    turns = _history(record.get(HISTORY))
    read += [HISTORY] if turns else []
    for role, what in (("user", prompt), ("assistant", said)):
        if isinstance(what, str):
            turns.append({"role": role, "content": what})
        elif isinstance(what, dict) and is_turn(what):
            turns.append(what)
        elif isinstance(what, list) and all(map(is_turn, what)):
            # a preferred answer may repeat the prompt
            turns = [*what] if _begins_with(what, turns) else [*turns, *what]
        else:
            return None
    if not answers and record.get(TOOLS[0]) and CALLED in record:
        calls = from_json(record[CALLED])
        if calls and all(map(is_call, calls)):
            turns.append({"role": "assistant", "tool_calls": calls})
            read.append(CALLED)
    if isinstance(said, str) and answers:
        for key in REASONING:
            if isinstance(record.get(key), str):
                turns[-1][key] = record[key]
                read.append(key)
    return (turns, read) if turns else None


def _begins_with(turns: list[Any], others: list[Any]) -> bool:
    """Whether turns begin with these others, and go on."""
    if not others or len(turns) <= len(others):
        return False
    ours = [messages_of(turn, set()) for turn in turns[: len(others)]]
    return ours == [messages_of(turn, set()) for turn in others]


def _history(value: Any) -> list[Any]:
    """The turns before a prompt, which a record gives as pairs. Raises Unusable for others."""
    pairs = [] if absent(value) or value == "" else value
    for pair in pairs if isinstance(pairs, list) else [None]:
        texts = pair if isinstance(pair, list) else []
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise Unusable("a history that is not pairs of a prompt and an answer")
    return [{"role": r, "content": x} for pair in pairs for r, x in zip(ROLE_PAIR, pair)]


def _count_ignored(record: Mapping[str, Any], read: Collection[str], tally: Tally) -> None:
    for key in record:
        if key not in read and not absent(record[key]):
            tally.count(tally.ignored, f"the key {key!r} of records")

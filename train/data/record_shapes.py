"""The keys of a record that hold its turns or token ids, in the formats of data sets, requests and
logs. records.py interprets the turns."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from train.data.conversations import Tokens, Unusable

SHAPES: dict[str, tuple[str, ...]] = {  # format → the keys under which a record may have its turns
    "sharegpt": ("conversations", "conversation"),
    "messages": ("messages",),
}
# further keys, for format auto
OTHER_SHAPES = ("dialogue", "dialog", "chat", "turns", "data", "contents")
PROMPTS = ("turns", "prompt")  # keys under which several texts are prompts, not a chat
WRAPPERS = ("body", "request", "input")  # keys of a request that a server was sent
# a prompt, for format auto
SOURCES = ("instruction", "prompt", "question", "problem", "query", "input", "inputs")
MORE = ("input", "context")  # the input of an instruction
RESPONSES = (
    *("output", "completion", "response", "solution", "answer"),
    *("targets", "chosen", "preferred_output"),
)
ROLE_PAIR = ("user", "assistant")
CALLED, HISTORY = (
    "answers",
    "history",
)  # calls (xLAM); pairs before the prompt (Alpaca)
# items of OpenAI's Responses API
ITEMS = {"message", "reasoning", "function_call", "function_call_output"}
TOOLS = ("tools", "functions")  # keys of a record
FROM, CONTENT = ("from", "role"), ("value", "content", "text", "parts")  # keys of a turn
REASONING = ("reasoning_content", "reasoning", "thinking")
NOT_JSON = "tools or tool calls that are not JSON"
GLAIVE_TURN = re.compile(r"(?:^|\n\s*\n)\s*(SYSTEM|USER|ASSISTANT|FUNCTION RESPONSE):")
GLAIVE_ROLES = {
    "SYSTEM": "system",
    "USER": "user",
    "ASSISTANT": "assistant",
    "FUNCTION RESPONSE": "tool",
}
# keys of rows that are token ids already
IDS = ("input_ids", "token_ids", "ids", "tokens")
PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "prompt_input_ids")
RESPONSE_IDS = (
    "completion_ids",
    "completion_token_ids",
    "completion_input_ids",
    "response_ids",
    "response_token_ids",
    "output_ids",
    "answer_ids",
)
RESPONSE_MASK = "completion_mask"
MASKS = ("loss_mask", "assistant_masks", "assistant_mask", RESPONSE_MASK, "answer_mask")
LABELS, PADDING, IGNORED = "labels", "attention_mask", -100
LARGEST_ID = 2**31 - 1


def turn_lists(record: Any, format: str) -> tuple[list[list[Any]], list[str], bool]:
    """The lists of turns in a record, the keys that hold them, and whether the lists follow each
    other (a history, a prompt, a response), of which one may repeat those before it; otherwise each
    list is the whole conversation. A key without turns is ignored. Raises Unusable if there are no
    turns."""
    auto = format == "auto"
    if isinstance(record, str) and auto:
        return [[{"role": "user", "content": record}]], [], False
    if isinstance(record, list) and record and auto and all(map(is_turn, record)):
        return [record], [], False
    if not isinstance(record, dict):
        raise Unusable("not a conversation")
    usual = sum(SHAPES.values(), ()) if auto else SHAPES[format]
    known = {key: turns for key in usual if (turns := _as_turns(record.get(key)))}
    for key in OTHER_SHAPES if auto and not known else ():
        texts = record.get(key)
        glaive = isinstance(texts, str) and _glaive_turns(texts)
        turns = glaive or _as_turns(texts, prompts=key in PROMPTS)
        if turns and all(map(is_turn, turns)):
            known = known or {key: turns}
    if not known and auto and isinstance(sample := record.get("sample"), str):  # Glaive's first
        known = {"sample": _glaive_turns(sample)} if _glaive_turns(sample) else known
    if not known and auto and (prompted := _prompted(record)):
        return *prompted, True
    if not known:
        lists = any(isinstance(record.get(key), list) for key in usual)
        raise Unusable("no turns" if lists else "not a conversation")
    return list(known.values()), list(known), False


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
    if are_texts(value):
        roles = ("user", "user" if prompts else "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(value)]
    return value


def are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, str) for x in value)


def _prompted(record: Mapping[str, Any]) -> tuple[list[list[Any]], list[str]] | None:
    """The turns of a record with a prompt and, if there is one, its completion (those before the
    prompt, of the prompt, and after it), and the keys that hold them. Prompt and completion may be
    texts or turns. The input of an instruction follows it after a blank line."""
    source = next((key for key in SOURCES if not absent(record.get(key))), "")
    prompt, read = record.get(source), [source]
    if isinstance(prompt, list) and source in PROMPTS:
        prompt = _as_turns(prompt, prompts=True)
    if isinstance(prompt, str) and source not in ("input", "inputs"):
        about = [k for k in MORE if k != source and not absent(record.get(k))]
        texts = [k for k in about if isinstance(record[k], str)]
        prompt, read = "\n\n".join([prompt, *(record[k] for k in texts)]), [*read, *texts]
    responses = [key for key in RESPONSES if not absent(record.get(key))]
    said: Any = record[responses[0]] if responses else []
    read += responses[:1]
    history = _history(record.get(HISTORY))
    read += [HISTORY] if history else []
    lists = [history]
    for role, what in (("user", prompt), ("assistant", said)):
        if isinstance(what, str):
            lists.append([{"role": role, "content": what}])
        elif isinstance(what, dict) and is_turn(what):
            lists.append([what])
        elif isinstance(what, list) and all(map(is_turn, what)):
            lists.append([*what])
        else:
            return None
    if not responses and record.get(TOOLS[0]) and CALLED in record:
        calls = from_json(record[CALLED])
        if calls and all(map(_is_call, calls)):
            lists.append([{"role": "assistant", "tool_calls": calls}])
            read.append(CALLED)
    if isinstance(said, str) and responses:
        for key in REASONING:
            if isinstance(record.get(key), str):
                lists[-1][0][key] = record[key]
                read.append(key)
    return (lists, read) if any(lists) else None


def _history(value: Any) -> list[Any]:
    """The turns before a prompt, given as pairs. Raises Unusable for other forms."""
    pairs = [] if absent(value) or value == "" else value
    for pair in pairs if isinstance(pairs, list) else [None]:
        texts = pair if isinstance(pair, list) else []
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise Unusable("a history that is not pairs of a prompt and an answer")
    return [{"role": r, "content": x} for pair in pairs for r, x in zip(ROLE_PAIR, pair)]


def _is_call(value: Any) -> bool:
    """Whether a JSON value is a call: a function's name and its arguments."""
    return isinstance(value, dict) and "name" in value and "arguments" in value


def _glaive_turns(text: str) -> list[dict[str, str]]:
    """The turns of a chat that Glaive writes as one text."""
    first, *rest = GLAIVE_TURN.split(text)
    if first.strip():
        return []
    return [
        {"role": GLAIVE_ROLES[name], "content": said.strip().removesuffix("<|endoftext|>").strip()}
        for name, said in zip(rest[::2], rest[1::2], strict=True)
    ]


def is_turn(value: Any) -> bool:
    """Whether a JSON value is a turn of a conversation, by its keys."""
    return isinstance(value, dict) and any(key in value for key in FROM)


def is_record(value: Any) -> bool:
    """Whether a JSON value is a record, by its keys, and not a turn or a tool."""
    shapes = sum(SHAPES.values(), OTHER_SHAPES)
    known = {*shapes, *SOURCES, *RESPONSES, "text", "source", "target"}
    return isinstance(value, dict) and not known.isdisjoint(value) and not is_turn(value)


def absent(value: Any) -> bool:
    """Whether a key with this value counts as missing: tables fill missing cells with null, NaN or
    nothing. A blank text is not missing."""
    return value is None or value != value or (isinstance(value, list | dict) and not value)


def from_json(value: Any) -> list[Any]:
    """A list, or one value as a list of one; either may be JSON in a text. Raises Unusable."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Unusable(NOT_JSON) from error
    if absent(value) or value == "":
        return []
    return value if isinstance(value, list) else [value]


def written_by_python(text: str) -> Any:
    """The value of a text in Python's syntax, as in tables that were saved with str(); None if it
    is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


# Requests, logs and other forms


def unwrapped_request(record: Any) -> Any:
    """A record that wraps a request to a server, as in logs and batch files: the request's keys
    together with those of the record, and the server's response as the last turn."""
    if not isinstance(record, dict) or any(record.get(k) for k in sum(SHAPES.values(), ())):
        return record
    for key in WRAPPERS:
        inner = record.get(key)
        turns = _as_turns(inner.get("messages")) if isinstance(inner, dict) else None
        if not turns or not isinstance(inner, dict):
            continue
        record = {k: x for k, x in record.items() if k != key} | inner
        for name in RESPONSES:
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


def responses_api_as_messages(record: Any) -> Any:
    """A record of OpenAI's Responses API as messages: `instructions`, the items of `input` and
    those of `output`. Raises Unusable for other kinds of items, such as a summary of the
    reasoning."""
    if not isinstance(record, dict) or any(record.get(k) for k in sum(SHAPES.values(), ())):
        return record
    asked, said = record.get("input"), record.get("output")
    items = [x for part in (asked, said) if isinstance(part, list) for x in part]
    kinds = {str(x.get("type")) for x in items if isinstance(x, dict)}
    if asked is None or not (kinds & ITEMS or isinstance(record.get("instructions"), str)):
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
    """The turns for an item of the Responses API."""
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


def require_known_form(record: Any) -> None:
    """Raise Unusable, with the name of the form, for records that are no conversations, or that
    would lose essential information."""
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


# Rows of token ids, read without a tokenizer


def is_tokenised(record: Any) -> bool:
    """Whether a record has token ids, by its keys."""
    return isinstance(record, dict) and any(_numbers(record.get(k)) for k in (*IDS, *PROMPT_IDS))


def tokens_of(record: Mapping[str, Any], prompts: bool, texts: bool) -> tuple[Tokens, set[str]]:
    """The tokens of a record, and the keys that were read. Ids without a mask are a prompt with
    `prompts`, or a text with `texts`. Raises Unusable."""
    ids_key = next((k for k in IDS if _numbers(record.get(k))), None)
    if ids_key is None:
        prompt_key = next(k for k in PROMPT_IDS if _numbers(record.get(k)))
        response_key = next((k for k in (*RESPONSE_IDS, LABELS) if _numbers(record.get(k))), None)
        prompt, answer = _ids(record, prompt_key), _ids(record, response_key)
        said, read = (True,) * len(answer), {prompt_key, response_key or prompt_key}
        if answer and not absent(record.get(RESPONSE_MASK)):
            said = _flags(record, RESPONSE_MASK, len(answer))
            read.add(RESPONSE_MASK)
        return Tokens(prompt + answer, (False,) * len(prompt) + said), read
    ids, read = _ids(record, ids_key), {ids_key}
    kept = range(len(ids))
    if not absent(record.get(PADDING)):
        read.add(PADDING)
        padding = _flags(record, PADDING, len(ids))
        kept = range(*_edges(padding))
    key = next((k for k in (*MASKS, LABELS) if not absent(record.get(k))), None)
    mask = (False,) * len(ids)
    if key is None and texts:
        mask = (False,) + (True,) * (len(ids) - 1)
    elif key is None and not prompts:
        raise Unusable("token ids without labels or a mask of the assistant's tokens")
    elif key == LABELS:
        labels = record[LABELS]
        if not _numbers(labels) or len(labels) != len(ids):
            raise Unusable("labels of another number than its token ids")
        if any(label not in (IGNORED, id) for label, id in zip(labels, ids, strict=True)):
            raise Unusable(f"labels that are neither its token ids nor {IGNORED}")
        mask = tuple(label != IGNORED for label in labels)
    elif key is not None:
        mask = _flags(record, key, len(ids))
    read |= {key} if key else set()
    return Tokens(tuple(ids[i] for i in kept), tuple(mask[i] for i in kept)), read


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _ids(record: Mapping[str, Any], key: str | None) -> tuple[int, ...]:
    ids: Sequence[int] = record[key] if key is not None else ()
    if any(not 0 <= x <= LARGEST_ID for x in ids):
        raise Unusable("token ids that are negative or too large")
    return tuple(ids)


def _flags(record: Mapping[str, Any], key: str, count: int) -> tuple[bool, ...]:
    flags = record[key]
    if not isinstance(flags, list) or len(flags) != count or any(x not in (0, 1) for x in flags):
        raise Unusable(f"{key} that is not a 0 or a 1 for each token")
    return tuple(map(bool, flags))


def _edges(real: Sequence[bool]) -> tuple[int, int]:
    """The start and end of the tokens that are not padding. Raises Unusable if padding divides
    them."""
    if True not in real:
        raise Unusable("no tokens but padding")
    first, last = real.index(True), len(real) - real[::-1].index(True)
    if not all(real[first:last]):
        raise Unusable("padding between its tokens")
    return first, last

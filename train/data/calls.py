"""Tools, calls and their results, as data sets write them → as servers give them to a template.

OpenAI's and Anthropic's messages keep them beside the text. Hermes, Glaive and xLAM write them into
it; there they are taken out of the text, so that the target's own template writes them.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from train.data.conversations import Unusable

TOOLS = ("tools", "functions")  # keys of a record
NOT_JSON = "tools or tool calls that are not JSON"
BAD_ARGUMENTS = "tool calls whose arguments are not JSON"
RETOLD = "a system prompt that describes tools, of which its template writes the tools"
# how texts name the tools
DESCRIBED = re.compile(r"<tools>\s*([\[{].*?)\s*</tools>", re.DOTALL)
LEADS = ("You are a function calling AI model", "# Tools")  # where the words about tools begin
GLAIVE = re.compile(r"[,\s]*with access to the following functions\..*?-\s*(?=\{)", re.DOTALL)
GLAIVE_TURN = re.compile(r"(?:^|\n\s*\n)\s*(SYSTEM|USER|ASSISTANT|FUNCTION RESPONSE):")
GLAIVE_ROLES = {
    "SYSTEM": "system",
    "USER": "user",
    "ASSISTANT": "assistant",
    "FUNCTION RESPONSE": "tool",
}
GLAIVE_CALL = "<functioncall>"
QUOTED = re.compile(r"^(.*\"arguments\"\s*:\s*)'(.*)'(\s*\})$", re.DOTALL)
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)


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


def is_call(value: Any) -> bool:
    """Whether a JSON value is a call: a function's name and its arguments."""
    return isinstance(value, dict) and "name" in value and "arguments" in value


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


def filled(value: Any) -> Any:
    """A value without the keys that a table fills with null, since other rows have them."""
    if isinstance(value, dict):
        return {key: filled(x) for key, x in value.items() if x is not None}
    return [filled(x) for x in value] if isinstance(value, list) else value


def absent(value: Any) -> bool:
    """Whether a key with this value is as good as missing: tables fill what a row lacks with null,
    NaN or nothing. A blank text is there."""
    return value is None or value != value or (isinstance(value, list | dict) and not value)


# Calls and results within texts


def tools_within(text: str) -> tuple[str, list[Any]] | None:
    """A system prompt as it is without the tools that it describes, and these tools; None if it
    describes none in a way that is known."""
    if (block := DESCRIBED.search(text)) is not None:  # Hermes, and what Qwen's template writes
        starts = [at for lead in LEADS if 0 <= (at := text.find(lead)) < block.start()]
        tools = _values(block[1])
        if starts and tools:
            return text[: min(starts)].strip(), tools
    if (lead := GLAIVE.search(text)) is not None and (tools := _values(text[lead.end() :])):
        return f"{text[: lead.start()].rstrip('.')}.", tools
    return None


def _values(text: str) -> list[Any]:
    """The objects in a text, one after another or in a list; none if it is anything else."""
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
    """An answer without the calls that it ends with, as Hermes and Glaive write them, and the
    calls. Raises Unusable if they cannot be read, or if more text follows."""
    if GLAIVE_CALL in text:
        said, *calls = text.split(GLAIVE_CALL)
        return said.strip(), [_read(call.strip()) for call in calls]
    if (first := CALL.search(text)) is None:
        return text, []
    if CALL.sub("", text[first.start() :]).strip():
        raise Unusable("text after a tool call")
    calls = [call for block in CALL.findall(text) for call in _listed(_read(block))]
    return text[: first.start()].strip(), calls


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read(text: str) -> Any:
    """A call in JSON or, as some of these data sets have it, as Python writes an object, or with
    its arguments as JSON in single quotes."""
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


def written_by_python(text: str) -> Any:
    """The value of a text as Python writes it, as tables do that were saved without care; None if
    it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def results_within(text: str) -> list[str]:
    """The results in the turn of a tool, without the tags that Hermes puts around each."""
    results = RESULT.findall(text)
    return results if results and not RESULT.sub("", text).strip() else [text]


def glaive_turns(text: str) -> list[dict[str, str]]:
    """The turns of a chat that Glaive writes as one text."""
    first, *rest = GLAIVE_TURN.split(text)
    if first.strip():
        return []
    return [
        {"role": GLAIVE_ROLES[name], "content": said.strip().removesuffix("<|endoftext|>").strip()}
        for name, said in zip(rest[::2], rest[1::2], strict=True)
    ]

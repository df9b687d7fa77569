"""Text settings, kept as they were typed: Hydra and YAML read `1.10` as the number 1.1, `2024_01`
as 202401 and `1e5` as 100000.0, and strip blanks at the end of a value. On the command line, such
texts get quotes here; in files of settings, they are rejected."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from specdec.errors import UserError

OPENS, CLOSES = "[{(", "]})"
CHOICE = re.compile(r"choice\((.*)\)", re.DOTALL)  # Hydra drops the quotes of its values
PACKAGE = re.compile(r"#\s*@package\s+(\S+)")


def kinds_within(kinds: Sequence[Any], name: str) -> list[Any]:
    """The types of the values of a key, given the types of its owner: a field of a dataclass, or
    any key of a dictionary."""
    types = list[Any]()
    for kind in kinds:
        if is_dataclass(kind):
            types.append(get_type_hints(kind).get(name))
        types += [get_args(x)[1] for x in _choices(kind) if get_origin(x) is dict]
    return types


def _choices(kind: Any) -> tuple[Any, ...]:
    """The members of a union type, without None."""
    if get_origin(kind) in (Union, UnionType):
        return tuple(x for x in get_args(kind) if x is not type(None))
    return (kind,)


def is_text(kinds: Sequence[Any]) -> bool:
    """Whether a value of one of these types must be a text."""
    return any(_choices(kind) == (str,) for kind in kinds)


def _elements(kinds: Sequence[Any]) -> list[Any]:
    """The types of the elements of lists of these types."""
    return [get_args(x)[0] for kind in kinds for x in _choices(kind) if get_origin(x) is list]


def as_typed(value: str, kinds: Sequence[Any]) -> str:
    """A value of an override in which texts, by these types, are quoted if Hydra would read
    something else: also those in lists, in dictionaries and among the values of a sweep."""
    inner = value.strip()
    if (choice := CHOICE.fullmatch(inner)) and is_text(kinds):
        return _each(choice[1], kinds)
    if inner[:1] == "[" and inner[-1:] == "]" and (elements := _elements(kinds)):
        return f"[{_each(inner[1:-1], elements)}]"
    if inner[:1] == "{" and inner[-1:] == "}" and any(map(is_dataclass, kinds)):
        parts = (part.partition(":") for part in pieces(inner[1:-1]))
        texts = (
            f"{name}{colon}{as_typed(x.strip(), kinds_within(kinds, name.strip()))}"
            for name, colon, x in parts
        )
        return f"{{{','.join(texts)}}}"
    if not is_text(kinds):
        return value
    return _each(value, kinds) if len(pieces(value)) > 1 else _quoted_text(value, blanks=True)


def _each(values: str, kinds: Sequence[Any]) -> str:
    """Values with commas between them, each as it was typed, but stripped."""
    texts = (part.strip() for part in pieces(values))
    return ",".join(
        _quoted_text(x, blanks=False)
        if is_text(kinds) and x[:1] not in OPENS
        else as_typed(x, kinds)
        for x in texts
    )


def pieces(text: str) -> list[str]:
    """A text split at its commas, except those in quotes or brackets."""
    parts, depth, quote, escaped = [""], 0, "", False
    for c in text:
        if not escaped and c == quote:
            quote = ""
        elif not escaped and not quote and c in "'\"":
            quote = c
        elif not quote and c in OPENS + CLOSES:
            depth += 1 if c in OPENS else -1
        escaped = c == "\\" and not escaped
        if c == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def _quoted_text(word: str, blanks: bool) -> str:
    """A text, quoted if Hydra would read it differently; `blanks`: white space around it belongs to
    it."""
    if word.strip() in ("", "null") or re.search(r"['\"$]", word):
        return word
    if blanks and word != word.strip():
        return f"'{word}'" if not word.endswith("\\") else word
    try:
        value = OverridesParser.create().parse_override(f"key={word}").value()
    except HydraException:
        return word
    changed = isinstance(value, bool | int | float) and str(value) != word
    return f"'{word}'" if changed else word


def require_texts_in(path: Path, group: str, kinds_of: Callable[[str], Sequence[Any]]) -> None:
    """Raise UserError for a text in a file of settings that YAML reads differently. `group` is the
    folder of the file, to which its keys belong unless it has a `@package`; `kinds_of` returns the
    types of a key's values."""
    try:
        source = path.read_text(encoding="utf-8")
        root = yaml.compose(source, Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return  # Hydra tells
    package = next((m[1] for m in map(PACKAGE.match, source.splitlines()) if m), group)
    prefix = {"_global_": "", "_group_": group}.get(package, package).replace("/", ".")
    kinds = kinds_of(prefix)
    for key, node in _changed(root, kinds, prefix):
        raise UserError(
            f"{path}, line {node.start_mark.line + 1}: {key}: {node.value} is read as a number: put"
            f" quotes around it, as in '{node.value}'"
        )


def _changed(node: Any, kinds: Sequence[Any], key: str) -> Iterator[tuple[str, Any]]:
    """The scalars within a YAML node that are texts by these types but are read differently."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            inner = f"{key}.{name.value}" if key else str(name.value)
            yield from _changed(value, kinds_within(kinds, str(name.value)), inner)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _changed(value, _elements(kinds), key)
    elif isinstance(node, yaml.ScalarNode) and is_text(kinds) and node.style is None:
        # OmegaConf reads more as numbers than YAML does, such as 1e5
        read = yaml.safe_load(node.value)
        number = re.fullmatch(r"[+-]?[\d_]*\.?[\d_]+(e[+-]?\d+)?", node.value, re.IGNORECASE)
        if isinstance(read, bool | int | float) or number:
            try:
                same = str(float(node.value) if number and "e" in node.value.lower() else read)
            except ValueError:
                same = ""
            if same != node.value:
                yield key, node

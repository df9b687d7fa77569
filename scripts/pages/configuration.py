"""docs/configuration.md: every setting, from the dataclasses of the configuration.

What a setting means is read from its dataclass's docstring and from the comment beside the field,
and its default from what `python train.py` composes, so the page cannot say what the code does not.
"""

import ast
import inspect
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from io import StringIO
from textwrap import dedent
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from specdec.drafters import shipped
from specdec.losses.loss_terms import LOSS_TERMS
from train.run_config import CONF, NO_GROUPS, Config, register

PATH = CONF.parent / "docs" / "configuration.md"
INTRODUCTION = """# Configuration

*`scripts/docs` writes this page from the dataclasses of the configuration; a test compares them.*

A setting is given on the command line as `KEY=VALUE`, as in `python train.py data.limit=500
loop.epochs=2`. A key that does not exist is refused with the nearest one that does, and so is a
value of the wrong type. `null` means none. A value with brackets, braces, spaces or quotes needs
quotes around the whole setting, as in `'loss.terms={nla: 1.0, smooth_l1: 0.1}'`.

A text is kept as you type it, as in `name=1.10`. A text with a comma needs quotes inside those of
the shell, as in `"data.path='a,b.jsonl'"`. In a file of settings, a text that YAML reads as a
number, such as `1.10` or `2024_01`, is rejected: put quotes around it.

`GROUP=NAME` chooses a file of settings from `conf/GROUP`, as in `sampler=chat`; the settings that
you give beside it are applied on top. The default in each table is what `python train.py` uses
without any settings.
"""


@dataclass
class DocumentedSetting:
    """A field of a dataclass as its source has it."""

    name: str
    kind: str
    comment: str


def page() -> str:
    """The whole page as Markdown."""
    register()
    defaults = composed_defaults()
    parts = [INTRODUCTION, "## Groups\n", groups(), "## The run\n", text_of(Config), ""]
    own = [s for s in settings_of(Config) if not is_dataclass(get_type_hints(Config)[s.name])]
    own = [s for s in own if s.name != "drafter"]
    parts += [table("", own, defaults)]
    for name, kind in get_type_hints(Config).items():
        if is_dataclass(kind):
            parts += [f"## {name}\n", text_of(kind), "", section(name, kind, defaults[name])]
    parts += ["## drafter\n", "The settings depend on the family, which `drafter=NAME` chooses.\n"]
    for name, family in sorted((kind.Config.name, kind) for kind in shipped()):
        values = {f.name: default_of(f) for f in fields(family.Config)}
        parts += [f"### {name}\n", text_of(family.Config), ""]
        parts += [section("drafter", family.Config, values)]
    return "\n".join(parts).rstrip() + "\n"


def composed_defaults() -> dict[str, Any]:
    """What `python train.py` composes without any settings, before it is checked."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config")
    values = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def groups() -> str:
    """A table of the groups of settings: each file with the first words of its comment."""
    lines = ["| choice | what it is |", "| --- | --- |"]
    for path in sorted(CONF.glob("*/*.yaml")):
        if path.parent.name in NO_GROUPS:
            continue
        if path.parent.name != "experiment":
            comments = [
                x for x in path.read_text(encoding="utf-8").splitlines() if x.startswith("# ")
            ]
            words = " ".join(x.removeprefix("# ") for x in comments if "@package" not in x)
            lines.append(f"| `{path.parent.name}={path.stem}` | {cell(first_sentence(words))} |")
    lines.append("| `drafter=NAME` | one of the families [below](#drafter) |")
    names = ", ".join(f"`{name}`" for name in sorted(LOSS_TERMS))
    lines.append(f"| `loss=NAME` | one of {names} |")
    return "\n".join(lines) + "\n"


def first_sentence(words: str) -> str:
    """The words up to the first full stop that ends a sentence, without a command after a colon."""
    return re.split(r"(?<=[a-zτα)])(?<!et al)\. |: [a-z]+=", words, maxsplit=1)[0].rstrip(".")


def section(key: str, kind: type[Any], defaults: dict[str, Any]) -> str:
    """The table of a dataclass's settings, and those of the dataclasses within it."""
    hints = get_type_hints(kind)
    plain = [s for s in settings_of(kind) if not is_dataclass(hints[s.name]) and s.name != "name"]
    parts = [table(f"{key}.", plain, defaults)] if plain else []
    for name, inner in hints.items():
        if is_dataclass(inner) and isinstance(inner, type):
            values = {f.name: default_of(f) for f in fields(inner)}
            parts += [
                f"`{key}.{name}`: {text_of(inner)}\n",
                section(f"{key}.{name}", inner, values),
            ]
    return "\n".join(parts)


def table(prefix: str, settings: list[DocumentedSetting], defaults: dict[str, Any]) -> str:
    lines = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for s in settings:
        value = shown(defaults[s.name])
        lines.append(f"| `{prefix}{s.name}` | `{s.kind}` | {value} | {cell(s.comment)} |")
    return "\n".join(lines) + "\n"


def settings_of(kind: type[Any]) -> list[DocumentedSetting]:
    """The fields of a dataclass in their order, with type and comment as written where the field
    was last defined."""
    written: dict[str, DocumentedSetting] = {}
    for owner in reversed(kind.__mro__):
        if is_dataclass(owner):
            written |= {s.name: s for s in written_in(owner)}
    return [written[f.name] for f in fields(kind) if f.init]


def written_in(owner: type[Any]) -> Iterator[DocumentedSetting]:
    source = dedent(inspect.getsource(owner))
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = ast.unparse(node.annotation).replace(" | None", " or null")
            comment = comments.get(node.end_lineno or node.lineno, "")
            yield DocumentedSetting(node.target.id, kind.replace(" | ", " or "), comment)


def text_of(kind: type[Any]) -> str:
    """A dataclass's docstring as Markdown, a paragraph or an item of a list a line."""
    doc = inspect.cleandoc(kind.__doc__ or "")
    if doc.startswith(f"{kind.__name__}("):  # the one that dataclass makes
        return ""
    doc = re.sub(r"(?<=:)\n(?=- )", "\n\n", doc)
    doc = re.sub(r"\n(?=- )", "\0", doc)
    blocks = [re.sub(r"\s*\n\s*", " ", block) for block in doc.split("\n\n")]
    return "\n\n".join(blocks).replace("\0", "\n").replace("\n\n\n", "\n\n")


def default_of(f: Any) -> Any:
    if f.default_factory is not MISSING:
        return f.default_factory()
    return None if f.default is MISSING else f.default


def shown(value: Any) -> str:
    """A default as the command line takes it."""
    plain = isinstance(value, str) and value != ""
    return f"`{value if plain else json.dumps(value, ensure_ascii=False)}`"


def cell(text: str) -> str:
    return text.replace("|", "or")

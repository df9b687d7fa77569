"""docs/configuration.md: every setting, from the dataclasses of the configuration.

The meaning of a setting is read from the comments above and beside its field, in the dataclass or
in the base class that explains it, and its default from the configuration that `python train.py`
composes. The page therefore always agrees with the code.
"""

import ast
import inspect
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from io import StringIO
from textwrap import dedent
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from specdec.drafters import shipped
from specdec.drafters.base import Trainable, learning_rate
from specdec.losses.loss_terms import LOSS_TERMS
from train.run_config import CONF, NO_GROUPS, Arguments, Config, register

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
without any settings, followed by the defaults of the groups of settings with another value (of the
experiments, only the quickstart's; [Recipes](recipes.md) has all others and those for targets).
"""
# The pages that explain each section
GUIDES = {
    "": "[Training](training.md), [Choosing a draft](choosing.md#hybrids)",
    "target": "[The target](data.md#the-target), [On GPUs](gpus.md#how-to-hold-the-target)",
    "initialisation": "[Training a draft further](training.md#training-a-draft-further)",
    "data": "[Targets and data](data.md#conversations)",
    "responses": "[Time](data.md#time), [Engines](engines.md#responses)",
    "hidden_states": "[Hidden states on disk](gpus.md#hidden-states-on-disk), "
    "[Engines](engines.md#hidden-states)",
    "sampler": "[p and q](concepts.md#p-and-q)",
    "loss": "[The loss](training.md#the-loss)",
    "optim": "[The optimizer](training.md#the-optimizer)",
    "loop": "[While it trains](training.md#while-it-trains)",
    "rounds": "[Training a draft further](training.md#training-a-draft-further)",
    "budget": "[Tutorial](tutorial.md#1-run-the-quickstart)",
    "decode": "[Decoding](decoding.md)",
    "track": "[Tracking](training.md#tracking)",
    "planning": "[The plan](gpus.md#the-plan)",
    "drafter": "[Choosing a draft](choosing.md), "
    "[Settings of drafters](training.md#settings-of-drafters), "
    "[Where training starts](training.md#where-training-starts)",
}


@dataclass
class DocumentedSetting:
    """A field of a dataclass with its comment in the source."""

    name: str
    kind: str
    comment: str


def page() -> str:
    """The whole page as Markdown."""
    register()
    defaults = composed()
    others = {choice: composed(choice) for choice in choices()}
    parts = [INTRODUCTION, "## Groups\n", groups(), "## The run\n", text_of(Config), ""]
    hints = get_type_hints(Config)
    own = [s for s in settings_of(Config) if not is_dataclass(hints[s.name])]
    own = [s for s in own if s.name != "drafter"]
    parts += [guide(""), table("", own, defaults, others)]
    for name, kind in hints.items():
        if is_dataclass(kind) and isinstance(kind, type):
            parts += [f"## {name}\n", text_of(kind), "", guide(name)]
            inner = {choice: values[name] for choice, values in others.items()}
            parts += [section(name, kind, defaults[name], inner)]
    parts += ["## drafter\n", "The settings depend on the method, which `drafter=NAME` chooses.\n"]
    parts += [guide("drafter")]
    for name, method in sorted((kind.Config.name, kind) for kind in shipped()):
        values = asdict(method.Config())
        inner = {choice: other["drafter"] for choice, other in others.items()}
        inner = {choice: other for choice, other in inner.items() if other["name"] == name}
        parts += [f"### {name}\n", text_of(method.Config), ""]
        parts += [section("drafter", method.Config, values, inner)]
        if issubclass(method, Trainable):
            rate = f"`{learning_rate(method.Config()):g}`"
            if values.get("initialisation") == "closed_form":
                other = learning_rate(method.Config(initialisation="target"))
                rate += f", or `{other:g}` with another `drafter.initialisation`"
            parts += [f"With `optim.lr=null`, the learning rate is {rate}.\n"]
    return "\n".join(parts).rstrip() + "\n"


def composed(*settings: str) -> dict[str, Any]:
    """The configuration that `python train.py` composes from these settings, before it is
    checked."""
    values = OmegaConf.to_container(Arguments().composed(settings), resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def choices() -> list[str]:
    """The groups of settings with defaults of their own: all files but recipes and experiments."""
    files = [f"{p.parent.name}={p.stem}" for p in sorted(CONF.glob("*/*.yaml"))]
    apart = {*NO_GROUPS, "experiment", "recipe", "search"}
    return ["experiment=quickstart", *(x for x in files if x.split("=")[0] not in apart)]


def guide(name: str) -> str:
    """The line of links to the pages that explain a section."""
    return f"Guide: {GUIDES[name]}\n"


def groups() -> str:
    """A table of the groups of settings: each file with the first sentence of its comment."""
    lines = ["| choice | what it is |", "| --- | --- |"]
    for path in sorted(CONF.glob("*/*.yaml")):
        if path.parent.name in NO_GROUPS:
            continue
        if path.parent.name != "experiment":
            paragraph = path.read_text(encoding="utf-8").partition("\n#\n")[0]
            comments = [x for x in paragraph.splitlines() if x.startswith("# ")]
            words = " ".join(x.removeprefix("# ") for x in comments if "@package" not in x)
            lines.append(f"| `{path.parent.name}={path.stem}` | {cell(first_sentence(words))} |")
    lines.append("| `drafter=NAME` | one of the families [below](#drafter) |")
    names = ", ".join(f"`{name}`" for name in sorted(LOSS_TERMS))
    lines.append(f"| `loss=NAME` | one of {names} |")
    return "\n".join(lines) + "\n"


def first_sentence(words: str) -> str:
    """The text up to the first full stop that ends a sentence, without a command after a colon."""
    return re.split(r"(?<=[a-zτα)])(?<!et al)\. |: [a-z]+=", words, maxsplit=1)[0].rstrip(".")


def section(
    key: str, kind: type[Any], defaults: dict[str, Any], others: dict[str, dict[str, Any]]
) -> str:
    """The table of a dataclass's settings, and those of the dataclasses within it."""
    hints = get_type_hints(kind)
    plain = [s for s in settings_of(kind) if not is_dataclass(hints[s.name]) and s.name != "name"]
    parts = [table(f"{key}.", plain, defaults, others)] if plain else []
    for name, inner in hints.items():
        if is_dataclass(inner) and isinstance(inner, type):
            parts += [f"`{key}.{name}`: {text_of(inner)}\n"]
            values = {choice: other[name] for choice, other in others.items()}
            parts += [section(f"{key}.{name}", inner, defaults[name], values)]
        for item in get_args(inner):
            if is_dataclass(item) and isinstance(item, type):
                parts += [f"Each item of `{key}.{name}`: {text_of(item)}\n"]
                parts += [section(f"{key}.{name}[i]", item, asdict(item()), {})]
    return "\n".join(parts)


def table(
    prefix: str,
    settings: list[DocumentedSetting],
    defaults: dict[str, Any],
    others: dict[str, dict[str, Any]],
) -> str:
    """A row for each setting; `others` are the values in groups of settings."""
    lines = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for s in settings:
        given: dict[str, list[str]] = {}
        for choice, values in others.items():
            if values[s.name] != defaults[s.name]:
                value = "none" if values[s.name] == "" else shown(values[s.name])
                given.setdefault(value, []).append(f"`{choice}`")
        default = "; ".join(
            [shown(defaults[s.name]), *(f"{v} with {', '.join(c)}" for v, c in given.items())]
        )
        lines.append(f"| `{prefix}{s.name}` | `{s.kind}` | {default} | {cell(s.comment)} |")
    return "\n".join(lines) + "\n"


def settings_of(kind: type[Any]) -> list[DocumentedSetting]:
    """The fields of a dataclass in their order, with the type and the comment of their last
    definition that has one."""
    written: dict[str, DocumentedSetting] = {}
    for owner in reversed(kind.__mro__):
        if is_dataclass(owner):
            for s in written_in(owner):
                inherited = written[s.name].comment if s.name in written else ""
                written[s.name] = replace(s, comment=s.comment or inherited)
    return [written[f.name] for f in fields(kind) if f.init]


def written_in(owner: type[Any]) -> Iterator[DocumentedSetting]:
    """The fields that a class itself defines, with the comments above and beside them."""
    source = dedent(inspect.getsource(owner))
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    found = [t for t in tokens if t.type == tokenize.COMMENT]
    comments = {t.start[0]: t.string.lstrip("# ") for t in found}
    alone = {t.start[0] for t in found if t.line.lstrip().startswith("#")}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = ast.unparse(node.annotation).replace(" | None", " or null")
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            lines = [*range(first, node.lineno), node.end_lineno or node.lineno]
            comment = " ".join(comments[x] for x in lines if x in comments)
            yield DocumentedSetting(node.target.id, kind.replace(" | ", " or "), comment)


def text_of(kind: type[Any]) -> str:
    """A dataclass's docstring as Markdown, a paragraph or an item of a list a line."""
    doc = inspect.cleandoc(kind.__doc__ or "")
    if doc.startswith(f"{kind.__name__}("):  # the one that dataclass makes
        return ""
    doc = re.sub(r"\n(?=- )", "\0", doc)
    blocks = [re.sub(r"\s*\n\s*", " ", block) for block in doc.split("\n\n")]
    return "\n\n".join(blocks).replace(":\0", ":\n\n").replace("\0", "\n").replace("\n\n\n", "\n\n")


def shown(value: Any) -> str:
    """A default in the syntax of the command line."""
    plain = isinstance(value, str) and value != ""
    return f"`{value if plain else json.dumps(value, ensure_ascii=False)}`"


def cell(text: str) -> str:
    return text.replace("|", "or")

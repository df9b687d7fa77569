"""The rules of the house: imports go down and never in a circle, and no family's name is known
outside its places.

Run alone: python -m pytest tests/test_house.py (under 15 s; nothing is computed)

What stands in CIRCLES, UPWARDS and NAMES is known and has to shrink: whoever mends one deletes its
line, and the test fails until that is done.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from specdec.drafters import DRAFTERS
from specdec.drafters.base import Drafter, Predictor, Trainable
from specdec.shapes import LETTERS

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [  # from the bottom; a module belongs to the longest prefix that fits its name
    (
        "specdec",
        "specdec.terminal",
        "specdec.compat",
        "specdec.errors",
        "specdec.files",
        "specdec.frozen",
        "specdec.hub",
        "specdec.plugins",
        "specdec.integrity",
        "specdec.progress",
        "specdec.shapes",
        "specdec.context",
        "specdec.ranks",
        "specdec.busy_cores",
        "specdec.signals",
    ),
    ("specdec.runtime",),
    ("specdec.sampling",),
    ("specdec.engines",),
    ("specdec.theory",),
    ("specdec.targets",),
    ("specdec.drafters",),
    ("specdec.losses",),
    ("specdec.forcing",),
    ("specdec.formats",),
    ("specdec.decoding",),
    ("specdec.measure",),
    ("specdec.report",),
    ("specdec.lab",),
    ("train",),
    ("scripts",),
]
OF_THE_FIELD = {"copy", "eagle", "lm", "lookahead", "mlp", "ngram", "sparse", "suffix"}
OF_THE_FIELD |= {"unigram", "bigram"}
OF_THE_FIELD |= {"translated", "hybrid", "hydra"}  # hydra is also the configuration library
PLACES = ("specdec/drafters/registry.py", "specdec/formats/", "train/run_config.py")
PLACES += ("specdec/engines/",)  # an engine's methods for the drafters that it loads
PLACES += ("scripts/benches/tiny.py",)  # of architectures of targets, one of which is Falcon too

CIRCLES: set[frozenset[str]] = set()
UPWARDS: set[tuple[str, str]] = set()
NAMES: set[tuple[str, str]] = set()


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the product, by its name, parsed."""
    files = [ROOT / "train.py"]
    for folder in ("specdec", "train", "scripts"):
        files += (f for f in sorted((ROOT / folder).rglob("*")) if f.is_file())
    found = {}
    for file in files:
        python = file.suffix == ".py" or (
            not file.suffix and file.read_bytes()[:40].startswith(b"#!/usr/bin/env python")
        )
        if python:
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            name = "train.py" if file == ROOT / "train.py" else name
            found[name] = ast.parse(file.read_text(), str(file))
    return found


def path_of(module: str) -> str:
    if module == "train.py":
        return module
    stem = module.replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py", stem):
        if (ROOT / path).is_file():
            return path
    raise AssertionError(module)


def imports(module: str) -> Iterator[str]:
    """The modules of the product that a module imports anywhere in it, also inside functions and
    for types alone."""
    tree, known = modules()[module], modules()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path_of(module)}: a relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if _product(name) in known else base for name in names]
        else:
            continue
        for name in names:
            if (found := _product(name)) in known and found != module:
                yield found


def _product(name: str) -> str:
    """Scripts import each other by their bare names."""
    return f"scripts.{name}" if name.split(".")[0] in ("benches", "command_line") else name


def layer(module: str) -> int:
    """The index in LAYERS of the longest prefix of a module's name."""
    if module == "train.py":
        return len(LAYERS)
    fitting = [
        (len(prefix), i)
        for i, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if module == prefix or (module.startswith(f"{prefix}.") and prefix != "specdec")
    ]
    assert fitting, f"{path_of(module)} is in no layer: put it into one, or into LAYERS"
    return max(fitting)[1]


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of more than one node that reach each other."""

    @cache
    def reached(start: str) -> frozenset[str]:
        seen, todo = set[str](), list(graph[start])
        while todo:
            if (node := todo.pop()) not in seen:
                seen.add(node)
                todo += graph[node]
        return frozenset(seen)

    found = {frozenset(n for n in reached(m) if m in reached(n)) for m in graph if m in reached(m)}
    return {circle for circle in found if len(circle) > 1}


def families_named(module: str) -> set[str]:
    """The families that a module names: in a string, as a class, or by importing their module. A
    name that is also a word of the language counts where it is the whole string. A family may name
    the one that it extends."""
    own = {k for k in DRAFTERS.values() if path_of(k.__module__) == path_of(module)}
    known = own | {base for kind in own for base in kind.__mro__}
    others = {n: k for n, k in DRAFTERS.items() if k not in known}
    classes = {c: n for n, k in others.items() for c in (k.__name__, k.Config.__name__)}
    files = {kind.__module__: name for name, kind in others.items()}
    inside = re.compile(rf"\b({'|'.join(sorted(set(others) - OF_THE_FIELD))})\b")
    found = set()
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(inside.findall(node.value)) | ({node.value} & set(others))
        elif isinstance(node, ast.ImportFrom) and node.module in files:
            found.add(files[node.module])
        elif isinstance(node, ast.Import):
            found |= {files[alias.name] for alias in node.names if alias.name in files}
        elif isinstance(node, ast.Name) and node.id in classes:
            found.add(classes[node.id])
    return found


def test_no_import_goes_in_a_circle() -> None:
    assert len(modules()) > 60
    graph = {module: set(imports(module)) for module in modules()}
    assert sum(map(len, graph.values())) > 200  # they do import each other
    assert circles(graph) == CIRCLES


def test_no_test_patches_a_private_function_of_the_pipeline() -> None:
    private = re.compile(r"""\bpipeline\._|train\.pipeline\._|pipeline, ["']_""")
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    assert len(files) > 60
    assert [
        str(f) for f in files if private.search(f.read_text()) and f.name != "test_house.py"
    ] == []


def test_no_module_imports_upwards() -> None:
    up = {
        (path_of(module), path_of(imported))
        for module in modules()
        for imported in imports(module)
        if layer(imported) > layer(module)
    }
    assert up == UPWARDS


def test_imported_names_exist() -> None:
    """mypy reads neither the scripts nor the tests, where a rename would break an import."""
    missing = []
    for folder in ("scripts", "tests", "examples"):
        for file in sorted((ROOT / folder).rglob("*")):
            python = file.suffix == ".py" or (
                file.is_file() and file.read_bytes()[:22] == b"#!/usr/bin/env python\n"
            )
            for node in ast.walk(ast.parse(file.read_text())) if python else ():
                module = node.module if isinstance(node, ast.ImportFrom) else None
                if module is None or not module.startswith(("specdec.", "train.")):
                    continue
                known = _defined(module) if module in modules() else set()
                missing += [
                    f"{file.relative_to(ROOT)}:{node.lineno}: {module} has no {alias.name}"
                    for alias in node.names
                    if alias.name not in known and f"{module}.{alias.name}" not in modules()
                ]
    assert missing == []


@cache
def _defined(module: str) -> set[str]:
    """The names that a module defines or imports."""
    names = set()
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return names


def test_the_core_never_imports_the_lab() -> None:
    """It finds what the lab brings by name (specdec/plugins.py). Scripts are command lines of
    both."""
    reaching = {
        (path_of(module), path_of(imported))
        for module in modules()
        if not module.startswith(("specdec.lab", "scripts"))
        for imported in imports(module)
        if imported.startswith("specdec.lab")
    }
    assert reaching == set()


def test_no_family_is_named_outside_its_places() -> None:
    named = {
        (path_of(module), family)
        for module in modules()
        if not path_of(module).startswith(PLACES)
        for family in families_named(module)
    }
    assert named == NAMES


def test_the_layers_are_those_of_the_documents() -> None:
    """docs/adding.md lists the folders in the order in which they import each other."""
    tree = (ROOT / "docs" / "adding.md").read_text().split("## Where things are")[1].split("```")[1]
    inside = re.findall(r"^  (\w+)/ ", tree.partition("\ntrain/ ")[0], re.M)
    outside = re.findall(r"^(\w+)/ ", tree.partition("\nconf/ ")[0], re.M)
    listed = ["specdec", *(f"specdec.{folder}" for folder in inside), *outside[1:]]
    assert listed == [layers[0] for layers in LAYERS]


@pytest.mark.parametrize(("edges", "found"), [("ab bc", []), ("ab bc ca cd", ["abc"])])
def test_circles_are_found(edges: str, found: list[str]) -> None:
    graph: dict[str, set[str]] = {node: set() for node in "abcd"}
    for start, end in edges.split():
        graph[start].add(end)
    assert circles(graph) == {frozenset(circle) for circle in found}


def test_layers_are_told_by_the_longest_prefix() -> None:
    assert layer("specdec.errors") == 0 < layer("specdec.runtime.cache") < layer("train.loop")
    order = [layer(f"specdec.{part}") for part in ("sampling", "targets", "drafters", "decoding")]
    assert all(low < high for low, high in pairwise(order))


# what Python's own library offers under such names
OF_PYTHON = {"_exit", "_fields", "_replace", "_run_exitfuncs"}


def test_private_functions_of_libraries_are_called_in_one_file() -> None:
    """A private name is the product's own if the product assigns or defines it."""
    own, used = set(OF_PYTHON), dict[str, str]()
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if ast.unparse(node.value) == "self" else set()
            if name == "specdec.compat" or not name.startswith(("specdec", "train")):
                continue
            if isinstance(node, ast.Attribute):
                used[node.attr] = f"{path_of(name)}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom):
                for part in [*(node.module or "").split("."), *(x.name for x in node.names)]:
                    used[part] = f"{path_of(name)}:{node.lineno}"
    private = {name for name in used if name.startswith("_") and not name.endswith("__")}
    assert {used[name] for name in private - own} == set()


def test_objects_of_libraries_are_changed_in_one_file() -> None:
    """No class of an object and no method of a module is replaced outside specdec/compat.py, which
    gives the reason for each."""
    changed = {
        where
        for where, node in nodes_of_product(ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for part in ast.walk(target)
        if isinstance(part, ast.Attribute) and part.attr in ("__class__", "forward")
    }
    changed |= {
        where
        for where, call in nodes_of_product(ast.Call)
        if isinstance(call.func, ast.Name) and call.func.id == "setattr"
        if any(isinstance(x, ast.Constant) and x.value == "forward" for x in call.args)
    }
    assert {where.partition(":")[0] for where in changed} == {"specdec/compat.py"}, sorted(changed)
    # ConfigParser's own documentation changes how it reads names in this way
    replaced = {n for n in modules() if "ignore[method-assign" in (ROOT / path_of(n)).read_text()}
    assert {n for n in replaced if n.startswith(("specdec", "train"))} <= {"specdec.plugins"}


VAGUE = ("read", "begin", "of", "keep", "start", "some", "theirs", "told")


def nodes_of_product(kind: Any) -> Iterator[tuple[str, Any]]:
    """Every node of a kind in the product, and where it is."""
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield f"{path_of(name)}:{getattr(node, 'lineno', 0)}", node


def shared_names(named: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """The names that stand in more than one place, from pairs of a place and a name."""
    places: dict[str, list[str]] = {}
    for place, name in named:
        places.setdefault(name, []).append(place)
    return {name: where for name, where in places.items() if len(where) > 1}


def test_no_two_classes_share_a_name() -> None:
    assert shared_names((w, node.name) for w, node in nodes_of_product(ast.ClassDef)) == {}


def test_no_two_modules_share_a_name() -> None:
    """A command such as scripts/evaluate counts as a module."""
    paths = [Path(path_of(name)) for name in modules() if name != "train.py"]
    assert shared_names((str(x), x.stem) for x in paths if x.stem != "__init__") == {}


def test_a_module_is_imported_under_its_own_name() -> None:
    aliases = []
    for where, node in nodes_of_product(ast.Import | ast.ImportFrom):
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        renamed = [alias.name for alias in node.names if alias.asname]
        aliases += [(where, x) for x in renamed if _product(f"{base}{x}") in modules()]
    assert aliases == []


def test_public_functions_have_names_that_can_be_searched() -> None:
    """Of modules and classes: a function within another one is read where it stands."""
    called = [
        f"{where.partition(':')[0]}:{node.lineno}: {node.name}"
        for where, outer in nodes_of_product(ast.Module | ast.ClassDef)
        for node in outer.body
        if isinstance(node, ast.FunctionDef) and node.name in VAGUE
    ]
    assert called == []


def test_arguments_are_named_where_there_are_many() -> None:
    """No call takes its positional arguments from literal tuples, as f(*(a, b), *(c, d)) does."""
    splats = [
        where
        for where, call in nodes_of_product(ast.Call)
        if any(isinstance(x, ast.Starred) and isinstance(x.value, ast.Tuple) for x in call.args)
    ]
    assert splats == []


@pytest.mark.parametrize("word", ["found", "made", "given"])
def test_names_say_what_a_thing_is(word: str) -> None:
    """No variable, argument, attribute or function of the product is called so."""
    called = set()
    for name, tree in modules().items():
        for node in ast.walk(tree) if name.startswith(("specdec", "train")) else ():
            own = (getattr(node, part, None) for part in ("id", "arg", "attr", "name"))
            if word in own:
                called.add(f"{path_of(name)}:{getattr(node, 'lineno', 0)}")
    assert called == set()


BASES = ("Drafter", "Predictor", "Trainable")
MEMBERS = 12  # public attributes and methods of what every drafter does


ABILITIES = (  # the attribute that declares what only some drafters can do, and what belongs to it
    ("draft_growth",),
    ("copies", "copied", "copying_head"),
    ("fits_texts", "fit", "require_sound"),
    ("weighs_choices", "weigh"),
    ("sends_scouts", "hear"),
    ("runs_target",),
    ("calibrations", "noted_alpha", "origin"),
    ("in_transformers", "long_prompts"),
    ("trains", "weights_to_save", "beyond_training"),
    ("adapts_target", "adapted", "with_adapters_merged"),
    ("estimates_acceptance", "confidence"),
    ("separate_heads", "read_by_heads", "heads_of"),
    ("closed_form_initialisation", "closed_form_depths", "solve_closed_form"),
)


def members(kind: type, beyond: type) -> set[str]:
    """The public attributes and methods that a class has and `beyond`, one of its bases, lacks."""
    declared = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
    known = {name for base in beyond.__mro__ for name in vars(base).get("__annotations__", {})}
    names = {*dir(kind), *declared} - {*dir(beyond), *known}
    return {name for name in names if not name.startswith("_")}


def test_the_interface_of_drafters_is_small() -> None:
    """What only some can do has defaults, and is small as well."""
    optional = {name for ability in ABILITIES for name in ability}
    assert all(len(ability) <= 4 for ability in ABILITIES) and len(ABILITIES) < 17
    for kind, beyond in ((Drafter, nn.Module), (Predictor, Drafter), (Trainable, Predictor)):
        own = members(kind, beyond)
        assert len(own - optional) <= MEMBERS, sorted(own - optional)
        assert all(getattr(kind, name).__doc__ for name in own if callable(getattr(kind, name, 0)))
    assert optional <= members(Trainable, nn.Module)
    assert Drafter.__abstractmethods__ == {"draft", "draft_growth"}
    assert Trainable.__abstractmethods__ == {"hidden", "unembed"}


def test_no_method_is_compared_with_its_base() -> None:
    """An ability is an attribute, never whether a method is overridden."""
    compared = {
        f"{path_of(name)}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(o, ast.Is | ast.IsNot) for o in node.ops)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Attribute) and ast.unparse(side.value) in BASES
    }
    assert compared == set()


WRITTEN = r"(?:…|\.\.\.|[A-Za-z0-9]+)(?: ?[·+*-] ?[A-Za-z0-9]+)*"  # one dimension
SHAPE = re.compile(rf"\[({WRITTEN}(?:,\s+{WRITTEN})*)\]")
# a suffix has at most two small letters in a row, unlike a word such as the one in `int_Tensor`
SUFFIX = re.compile(r"_*[a-z]\w*_([0-9]?[A-Z](?:[A-Z0-9]|[a-z](?![a-z]{2}))*)")
LETTER = "|".join(sorted(LETTERS, key=len, reverse=True))


def letters_of(suffix: str) -> list[str]:
    """The letters of a suffix, without its digits; characters outside the alphabet are kept."""
    return [x for x in re.findall(rf"{LETTER}|[0-9]|.", suffix) if not x.isdigit()]


def shapes_in(source: str) -> Iterator[tuple[str, str]]:
    """The letters that a module uses, and where it uses each: in the suffix of a name, as the name
    of a size in a function, or in a shape that a docstring or a comment gives."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name"):
            name = getattr(node, field, None)
            if not isinstance(name, str) or name.isupper() or name in ("do_GET", "do_HEAD"):
                continue
            if m := SUFFIX.fullmatch(name):
                yield from ((letter, name) for letter in letters_of(m.group(1)))
        if isinstance(node, ast.FunctionDef):
            stored = [x for x in ast.walk(node) if isinstance(x, ast.Name)]
            sizes = [x.id for x in stored if isinstance(x.ctx, ast.Store)]
            yield from ((x, x) for x in sizes if re.fullmatch(r"[A-Z](?:[a-z]|kv)?", x))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or token.string.startswith('"""'):
            for shape in SHAPE.findall(token.string):
                for letter in re.findall(r"\b[A-Z](?:[a-z]|kv)?\b", shape):
                    yield letter, f"[{shape}]"


def test_shapes_have_one_alphabet() -> None:
    files = [ROOT / path_of(module) for module in modules()]
    files += [*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    used, unknown = set[str](), list[str]()
    for file in files:
        path, source = file.relative_to(ROOT), file.read_text()
        product = path.parts[0] != "tests"
        assert not product or not re.search(r"\bLetters:", source), f"{path}: see specdec/shapes.py"
        for letter, where in shapes_in(source):
            used |= {letter} if product else set()
            unknown += [] if letter in LETTERS else [f"{path}: {letter} in {where}"]
    assert unknown == []
    assert used == set(LETTERS)


def test_letters_of_shapes_are_told() -> None:
    source = 'def f(x_BHTxD):\n    """[B, J]"""\n    Y = x_BHTxD.seen_1P(int_Tensor)'
    letters = ["Y", *["B", "H", "T", "x", "D"] * 2, "P", "B", "J"]
    assert sorted(letter for letter, _ in shapes_in(source)) == sorted(letters)


def test_the_alphabet_is_short() -> None:
    assert len(LETTERS) <= 14 and all(len(letter) == 1 for letter in LETTERS)


def test_the_alphabet_is_in_the_documents() -> None:
    text = (ROOT / "docs" / "adding.md").read_text()
    section = text.partition("## Shapes")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.M)) == LETTERS


def test_text_files_are_utf8_whatever_the_locale() -> None:
    """Otherwise τ in a report raises where the locale is Latin-1."""
    without = []
    for name, tree in modules().items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function = call.func
            method = isinstance(function, ast.Attribute)
            called = function.attr if method else getattr(function, "id", "")
            if called not in ("open", "read_text", "write_text"):
                continue
            if method and ast.unparse(function.value) == "os":
                continue
            arguments = call.args if method else call.args[1:]
            arguments = arguments + [x.value for x in call.keywords if x.arg == "mode"]
            binary = called == "open" and arguments and "b" in ast.unparse(arguments[0])
            if not binary and all(x.arg != "encoding" for x in call.keywords):
                without.append(f"{path_of(name)}:{call.lineno}")
    assert without == []


# What may name vLLM in its code: its file and the table of engines, the layouts of exports and
# their check, the scripts that vLLM itself runs in its own environment, and the bench of one.
OF_VLLM = ("specdec/engines/vllm.py", "specdec/engines/known_engines.py", "specdec/formats/")
OF_VLLM += ("scripts/hidden_states.py", "scripts/vllm_worker.py", "scripts/benches/engine.py")


def words_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The names and strings of a module without its docstrings, which may cite a source."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        texts = [getattr(node, part, None) for part in ("id", "arg", "attr", "name", "module")]
        if isinstance(node, ast.Constant) and id(node) not in documents:
            texts.append(node.value)
        for text in texts:
            if isinstance(text, str):
                yield getattr(node, "lineno", 0), text


def test_an_engine_is_named_in_its_own_file_alone() -> None:
    named = {
        f"{path_of(name)}:{line}"
        for name, tree in modules().items()
        if not path_of(name).startswith(OF_VLLM)
        for line, text in words_of(tree)
        if "vllm" in text.lower()
    }
    assert named == set()
    table = modules()["specdec.engines.known_engines"]
    assert any("vllm" in text.lower() for _, text in words_of(table))


# transformers' own flag, where a config or a model is read before its kind of target is known
OF_PAIRS = {"specdec/targets/fingerprint.py", "specdec/runtime/quantised.py"}


def test_the_core_knows_no_kind_of_target_of_the_lab() -> None:
    """What a kind of target does in another way, it says itself (`Target`, `kind_of`)."""
    named = {
        path_of(name)
        for name, tree in modules().items()
        if name.startswith(("specdec", "train")) and not name.startswith("specdec.lab")
        for _, text in words_of(tree)
        if re.search("encoder_decoder|seq2seq", text, re.I)
    }
    assert named == OF_PAIRS

"""Every command and Python snippet of README and of the site: none names what is not there.

Run alone: python -m pytest tests/test_documents.py (about 2 minutes)

The fenced blocks are found by their structure. Scripts run for real, in this process, on a tiny
draft that stands in for all of runs/; `train.py` composes what it is given, and `scripts/bench`
reads its arguments; Python snippets run against the tiny target. The notebook is history: its
commands are those of their day. What cannot run here is named below with the reason, and what is
neither fails: so whoever writes a new kind of block says here what it is.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import pytest
from hydra.errors import HydraException

from specdec.decoding.draft_length import LENGTHS
from specdec.decoding.speculative import speculative_generate
from specdec.decoding.verification_methods import VERIFICATION_METHODS
from specdec.drafters import DRAFTERS, shipped
from specdec.drafters.base import Trainable
from specdec.errors import UserError
from specdec.files import make_folder
from specdec.formats.gguf_file import ARCHITECTURE, FILE_TYPE, write_gguf
from specdec.formats.gguf_tokenizer import plain_keys
from specdec.plugins import lab_entries
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.measure.test_comparison import A, B
from tests.public_drafts import PUBLIC, write_public
from tests.tiny import REPOSITORY, Tiny, compose
from train import pipeline
from train.run_config import in_full

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
PAGES += (REPOSITORY / "docs").glob("*.md")
TEXTS = {str(path.relative_to(REPOSITORY)): path.read_text() for path in sorted(PAGES)}
SCRIPTS = ("generate", "evaluate", "compare", "export")
FEW = ["--max-new-tokens", "6"]
SHORTER = {"generate": FEW, "evaluate": [*FEW, "--limit", "2"], "export": []}
SHORTER["compare"] = SHORTER["evaluate"]
ELSEWHERE = {  # the beginning of a command that does not run here, and why
    "scripts/check": "needs a server: tests/measure/test_served_diagnosis.py",
    "scripts/doctor": "tests/scripts/test_doctor.py",
    "scripts/quickstart": "takes 15 minutes: run before each release",
    "scripts/test": "would run itself",
    "source ": "the shell's own",
    "cd ": "the shell's own",
    "git clone": "needs a network",
    "pip install": "needs a network",
    "python3 -m venv": "makes an environment",
    "hf download": "needs a network",
    "nvidia-smi": "needs a GPU",
    "export ": "the shell's own",
    "scripts/serve": "starts a serving engine: tests/scripts/test_serve.py",
    "scripts/llama-cpp-env": "needs a network",
    "vllm serve": "a serving engine: tests/test_end_to_end.py, with -m serving",
    "llama-server": "the same options as scripts/llama_server.py: tests/test_end_to_end.py",
    "python -m sglang": "a serving engine that is not installed here",
    "wandb sync": "needs a network",
    "tensorboard --logdir": "a server: tests/train/test_tracking.py reads what it shows",
    "python examples/": "tests/test_examples.py",
}
OUTPUTS = ("specdec/   ",)  # how blocks begin that show something else than commands
VALUES = {"…": "x", "NAME": "eagle3", "FILE": "x.jsonl"}  # what placeholders stand for
# settings that no test can compose: placeholders, and a family of another package
KINDS = ("drafter=NAME", "loss=NAME", "experiment=NAME", "recipe=NAME", "drafter=last_token")
VARIABLES = r"^(?:[A-Z_]+=\S+ )+"  # of the environment, before a command


@dataclass
class Block:
    document: str
    language: str
    text: str
    line: int

    @property
    def commands(self) -> list[str]:
        """The commands of a block, each in one line, without comments."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"\s+#\s.*$", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks() -> Iterator[Block]:
    fence = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
    for name, page in TEXTS.items():
        for block in fence.finditer(page):
            text = re.sub(f"^{block[1]}", "", block[3], flags=re.M)
            yield Block(name, block[2], text, page.count("\n", 0, block.start()) + 1)


BLOCKS = list(blocks())
PYTHON = [b for b in BLOCKS if b.language == "python"]
SHELL = [b for b in BLOCKS if b.language in ("", "sh", "bash", "console")]
SHELL = [b for b in SHELL if not b.text.startswith(OUTPUTS)]
WRITTEN = [(command, f"{b.document}:{b.line}") for b in SHELL for command in b.commands]
COMMANDS = [(re.sub(VARIABLES, "", command), where) for command, where in WRITTEN]


def of(pattern: str) -> list[str]:
    return list(dict.fromkeys(c for c, _ in COMMANDS if re.match(pattern, c)))


TRAINING = of(r"(accelerate launch .*|python )train\.py")
RUN = of(rf"scripts/({'|'.join(SCRIPTS)})\b")
LOOKING = of(r"scripts/(doctor|serve)\b")
MEASURING = of(r"scripts/bench\b")


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    assert len(BLOCKS) > 20
    assert sum(page.count("```") for page in TEXTS.values()) == 2 * len(BLOCKS)
    unknown = {b.language for b in BLOCKS} - {"", "sh", "bash", "console", "python", "json", "toml"}
    assert not unknown
    tried = {*TRAINING, *RUN, *MEASURING}
    for command, where in COMMANDS:
        known = command in tried or command.startswith(tuple(ELSEWHERE))
        assert known, f"{where}: nothing tries {command!r}"


@pytest.mark.parametrize("name", TEXTS)
def test_scripts_that_are_named_exist(name: str) -> None:
    for script in set(re.findall(r"(?<![\w/])scripts/[\w-]+", TEXTS[name])):
        assert os.access(REPOSITORY / script, os.X_OK) or (REPOSITORY / script).is_dir(), script


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "README.md"])
def test_paths_that_are_named_exist(name: str) -> None:
    """In README, paths may be those of a user's own."""
    folders = "specdec|train|tests|scripts|examples|conf|docs"
    for path in set(re.findall(rf"`((?:{folders})/[a-z_][\w./-]*)`", TEXTS[name])):
        assert (REPOSITORY / path).exists(), path


# the most files of the product that each of the ten changes may touch, in the order of the page
FILES_OF_CHANGES = (5, 3, 3, 2, 2, 4, 2, 3, 2, 2)


def test_each_of_ten_changes_touches_few_files() -> None:
    """And the tests that check it exist."""
    table = TEXTS["docs/adding.md"].split("## Ten changes")[1].split("\n\n")
    rows = re.findall(r"^\| (?!---|change )(.+) \| (.+) \| (.+) \|$", table[2], re.M)
    assert len(rows) == len(FILES_OF_CHANGES)
    for (change, files, tests), most in zip(rows, FILES_OF_CHANGES, strict=True):
        touched = re.findall(r"`([^`]+)`", files)
        assert 0 < len(touched) <= most, change
        checked = re.findall(r"`([^`]+)`", tests)
        assert checked and all(path.startswith("tests/") for path in checked), change
        for path in [*touched, *checked]:
            assert (REPOSITORY / path).exists(), path


def test_the_tree_leads_to_the_place_of_each_change() -> None:
    """The tree of the page names the files of both tables below their folders."""
    before, after = TEXTS["docs/adding.md"].split("## Where things are")
    tree, after = after.split("```")[1], after.split("More places:")[1]
    first = before.split("## Ten changes")[1].split("\n\n")[2]
    places = re.findall(r"`([^`]+)`", " ".join(x.split(" | ")[1] for x in first.splitlines()[2:]))
    places += re.findall(r"`([^`]+)`", after)
    assert len(places) > 25
    parts = dict(re.findall(r"^(\w+/) (.*(?:\n  .*)*)", tree, re.M))
    for path in map(Path, places):
        if path.name == "pyproject.toml":
            continue
        is_folder = (REPOSITORY / path).is_dir()
        part, *folders = path.parts if is_folder else path.parts[:-1]
        words = parts[f"{part}/"]
        for folder in folders:  # its own lines, up to the next entry
            words = re.findall(rf"^  {folder}/ .*(?:\n {{9}}.*)*", words, re.M)[0]
        assert is_folder or path.name in words, f"the tree does not lead to {path}"


def test_every_file_that_the_tree_names_exists() -> None:
    """A file stands in the line of its folder, or in the lines below it."""
    tree = TEXTS["docs/adding.md"].split("## Where things are")[1].split("```")[1]
    part = folder = Path()
    named = 0
    for line in tree.strip().splitlines():
        if entry := re.match(r"(\w+)/ ", line):
            part = folder = REPOSITORY / entry.group(1)
        elif entry := re.match(r"  (\w+)/ ", line):
            folder = part / entry.group(1)
        elif re.match(r"  \w", line):
            folder = part
        assert folder.is_dir(), line
        for name in re.findall(r"[\w/]+\.py", line):
            assert name == "train.py" or (folder / name).is_file(), f"{folder}: {name}"
            named += 1
    assert named > 50


def test_names_of_the_interface_are_those_of_the_code() -> None:
    adding, python = TEXTS["docs/adding.md"], TEXTS["docs/api.md"]
    family = adding.split("## A drafting method")[1].split("## A loss")[0]
    methods = re.findall(r"^- `(\w+)\(", family, re.M)
    assert methods and not [name for name in methods if not hasattr(Trainable, name)]
    arguments = re.findall(r"^\| `(\w+)` \|", python, re.M)
    assert arguments and set(arguments) <= set(signature(speculative_generate).parameters)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=str)
def test_json_can_be_read(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


def test_the_readme_is_two_screens_and_leads_to_every_page() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 90
    assert "no GPU has run this project yet" in " ".join(TEXTS["README.md"].split())
    for name in TEXTS:
        assert f"]({name})" in TEXTS["README.md"] or name in ("README.md", "docs/index.md"), name


def test_every_recipe_and_family_has_its_words() -> None:
    for path in (REPOSITORY / "conf" / "experiment").glob("*.yaml"):
        assert f"`{path.stem}`" in TEXTS["docs/recipes.md"] or path.stem == "quickstart", path.stem
    for path in (REPOSITORY / "conf" / "recipe").glob("*.yaml"):
        assert f"`{path.stem}`" in TEXTS["docs/recipes.md"], path.stem
    for family in shipped():
        assert f"`{family.Config.name}`" in TEXTS["docs/choosing.md"], family
    core, lab = (
        TEXTS["docs/choosing.md"].split("## Core drafters")[1].split("## Drafters of the lab")
    )
    rows = {
        name for row in re.findall(r"(?m)^\| (`.*?) \|", lab) for name in re.findall("`(.*?)`", row)
    }
    assert rows - {"drafter="} == {*lab_entries(DRAFTERS.group)}
    for name in (*lab_entries(VERIFICATION_METHODS.group), *lab_entries(LENGTHS.group)):
        assert f"`{name}`" in lab and f"`{name}`" not in core, name
    for name in (*VERIFICATION_METHODS, *LENGTHS):
        assert f"`{name}" in TEXTS["docs/decoding.md"] or name in ("fixed", "auto"), name


def override(text: str) -> str:
    for placeholder, value in VALUES.items():
        text = text.replace(placeholder, value)
    return text


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands_compose(command: str) -> None:
    """Their overrides name settings that are there, with values that they take; and the flags for
    accelerate are ones that it knows."""
    before, after = command.split("train.py", 1)
    words = [w for w in shlex.split(after) if w != "…" and not w.startswith("-")]
    sweeps = "-m" in shlex.split(after)
    if sweeps:  # of the values of a sweep, the first stands for all
        words = [w if "[" in w else w.split(",")[0] for w in words]
        if find_spec("hydra_plugins.hydra_submitit_launcher") is None:  # of an extra
            words = [w for w in words if not w.startswith("hydra/launcher=")]
    compose(in_full([override(w) for w in words]), hydra=sweeps)
    if before.startswith("accelerate"):
        from accelerate.commands.launch import launch_command_parser

        given = shlex.split(before)[2:]
        assert launch_command_parser().parse_args([*given, "train.py"]).training_script


@pytest.mark.parametrize("command", LOOKING)
def test_settings_of_data_checks_and_servers_compose(command: str) -> None:
    """Those of scripts/doctor, which may name target and data as they are, and of scripts/serve."""
    words = [w for w in shlex.split(command.split(" -- ")[0])[1:] if re.match(r"[a-z_.]+=", w)]
    compose(in_full([override(w) for w in words]))


@pytest.mark.parametrize("command", MEASURING)
def test_benchmarks_know_their_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their overrides compose, those of a drafter within a list too."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    bench = runpy.run_path(str(REPOSITORY / "scripts" / "bench"), run_name="bench")
    words = shlex.split(command)[1:]
    arguments = vars(bench["parser"]().parse_args(words))
    compose(arguments.get("overrides") or [])
    for family in arguments.get("families") or []:
        compose([f"drafter={family.split()[0]}", *family.split()[1:]])


def inline_overrides() -> list[str]:
    """Settings in running text, such as `data.responses=data`, but not those of an option. The page
    of all settings is made from them."""
    written = "\n".join(page for name, page in TEXTS.items() if "configuration" not in name)
    prose = re.sub(r"^ *```.*?^ *```", "", written, flags=re.M | re.S)
    spans = [s for s in re.findall(r"`([^`\n]+)`", prose) if not s.startswith("-")]
    setting = re.compile(r"[a-z_]+(\.[a-z_]+)*=\S+")
    words = {w for span in spans for w in span.split() if setting.fullmatch(w)}
    return sorted(words.difference(KINDS))


@pytest.mark.parametrize("word", inline_overrides())
def test_settings_in_the_text_compose(word: str) -> None:
    """Alone, or with a family that has it; a key without a dot may be one of a family's own."""
    key = word.split("=")[0].removeprefix("drafter.").split(".")[0]
    having = [n for n, kind in DRAFTERS.items() if key in {f.name for f in fields(kind.Config)}]
    given = [[override(word)], *([f"drafter={d}", override(word)] for d in having)]
    given += [[f"drafter={d}", f"drafter.{override(word)}"] for d in having if "." not in word]
    for overrides in given:
        with contextlib.suppress(UserError, HydraException):
            compose(in_full([*NEEDED.get(word, []), *overrides]))
            return
    raise AssertionError(f"{word!r} is a setting that no configuration takes")


NEEDED = {  # what a setting wants beside it
    "initialisation.new_tokens=500": ["drafter.from=runs/quickstart/best"],
    "drafter.sink_tokens=4": ["drafter.window=1024"],
    "hidden_states.mode=none": ["loss=ce", "data.responses=data", "drafter.initialisation=random"],
    "initialisation.other_target=true": ["drafter.from=runs/quickstart/best"],
    "data=pairs": ["data.path=pairs.tsv"],
    "data=text": ["data.path=articles.txt"],
    "target=model": ["target.path=x"],
    "recipe=qwen3_8b": ["data.path=x"],
    "data=conversations": ["data.path=x"],
    "loss=adaspec": ["loss.reference=runs/NAME/best"],
    "loss.reference=runs/NAME/best": ["loss=adaspec"],
}


@pytest.fixture(scope="module")
def place(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/quickstart, made by a tiny job without the steps after its training, and
    with reports of two runs."""
    folder = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "finished", lambda *_: None)
        tiny.job(folder / "runs" / "quickstart", "eagle3", "drafter.depth=3")
    for name, results in (("quickstart", A), ("hydra", B)):
        results.write(make_folder(folder / "runs" / name / "report"))
    target = load_target(TargetConfig(str(tiny.target), "float32", "cpu"))
    write_public(folder / "their-draft", PUBLIC["SpecForge"](target))
    for name in ("base-model", "my-fine-tune"):
        (folder / name).symlink_to(tiny.target)
    question = '{"question_id": 81, "turns": ["we go home", "why"]}\n'
    (folder / "question.jsonl").write_text(question * 3)
    target = load_target(TargetConfig(path=str(tiny.target), dtype="float32"))
    keys = plain_keys(target) | {ARCHITECTURE: "llama", FILE_TYPE: 0}
    write_gguf(folder / "target-q4.gguf", {}, keys)  # of its tokenizer alone
    return folder


def run_script(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a script as its command line says, shorter, in this process; its output."""
    words = shlex.split(re.sub(r"runs/[\w-]+/best", "runs/quickstart/best", command))
    name = words[0].removeprefix("scripts/")
    more = [*SHORTER[name]]
    if name == "export":
        more = [w for w in more if w not in words]
    if name == "compare" and not any(w.endswith("/best") for w in words):
        more = []  # two reports take no options of measuring
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    monkeypatch.setattr(sys, "argv", [words[0], *words[1:], *more])
    monkeypatch.setattr(sys, "stdin", io.StringIO("we go home\n\n"))
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as errors:
        try:
            runpy.run_path(str(REPOSITORY / words[0]), run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{command}: {errors.getvalue()}"
    return said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in RUN if not re.search("--(compile|engine)", c)])
def test_scripts_run_as_written(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(command, place, monkeypatch)
    if "--to" in (words := shlex.split(command)):
        written = place / words[words.index("--to") + 1]
        assert written.is_file() if written.suffix else (written / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in RUN if "--compile" in c])
def test_scripts_that_compile_know_their_options(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes minutes: the options are read, and a draft that is not there ends it."""
    elsewhere = command.replace("runs/quickstart/best", "runs/nowhere")
    with pytest.raises(AssertionError, match=r"error: .*runs/nowhere"):
        run_script(elsewhere, place, monkeypatch)


def test_every_setting_has_a_meaning_and_every_section_a_guide() -> None:
    """The page shows defaults of nested dataclasses and of groups of settings, and explains what a
    method inherits."""
    (page,) = (text for name, text in TEXTS.items() if name.endswith("configuration.md"))
    rows = re.findall(r"^\| `([^`]+)` \| `[^|]*` \|([^|]*)\|([^|]*)\|$", page, re.M)
    assert len(rows) == len(re.findall(r"^\| `[a-z_.\[\]]+` \|", page, re.M))
    assert {key.split(".")[0] for key, _, _ in rows} >= {"name", "target", "decode", "drafter"}
    assert not [key for key, _, meaning in rows if not meaning.strip()]
    sections = re.split(r"^## ", page, flags=re.M)[2:]
    assert not [s.splitlines()[0] for s in sections if "\nGuide: [" not in s]
    jetspec = re.split(r"^### ", page.split("### jetspec")[1], flags=re.M)[0]
    assert "| `drafter.anchors.per_row` | `int or null` | `64` |" in jetspec
    assert re.search(r"`drafter.depth` \| `int` \| `7` \| draft length", jetspec)
    assert "`256`; `128` with `experiment=quickstart`; `null` with `data=conversations`" in page


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in RUN if "--engine" in c])
def test_scripts_that_ask_an_engine_know_their_options(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine is running: tests/measure/test_served.py has one."""
    nobody = command.replace("localhost:8000", "localhost:1")
    monkeypatch.setitem(SHORTER, "evaluate", [])
    with pytest.raises(AssertionError, match="no engine answers at http://localhost:1/v1"):
        run_script(nobody, place, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON, ids=lambda b: f"{b.document}:{b.line}")
def test_python_snippets_run(
    block: Block, place: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand, but that models are the tiny one."""
    monkeypatch.chdir(place)
    default = f"TargetConfig(path={str(tiny.target)!r}, dtype='float32')"
    text = block.text.replace("TargetConfig()", default)
    text = text.replace('"Qwen/Qwen3-4B"', repr(str(tiny.target)))
    if "runs/lm/export" in text:
        tiny.job(place / "runs" / "lm", "lm", "drafter.depth=3", "export=hf")
    with redirect_stdout(io.StringIO()):
        exec(compile(text, f"{block.document}, {block.line}", "exec"), {"__name__": "documents"})

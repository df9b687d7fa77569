"""Every command and Python snippet of README.md: none names an option that is not there.

Run alone: python -m pytest tests/test_readme.py (about 1 minute)

The fenced blocks are found by their structure. Scripts run for real, in this process, on a tiny
draft that stands in for runs/quickstart; `train.py` composes what it is given; Python snippets run
against the tiny target. What cannot run here is named below with the reason, and what is neither
fails: so whoever writes a new kind of block says here what it is.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from hydra.errors import HydraException

from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from tests.tiny import REPOSITORY, Tiny, compose
from train import pipeline

README = (REPOSITORY / "README.md").read_text()
SCRIPTS = ("generate", "evaluate", "export")
FEW = ["--max-new-tokens", "6"]
SHORTER = {"generate": FEW, "evaluate": [*FEW, "--limit", "2"], "export": []}
ELSEWHERE = {  # the beginning of a command that does not run here, and why
    "scripts/quickstart": "takes 15 minutes: run before each release",
    "scripts/test": "would run itself",
    "scripts/bench": "measures for minutes; tests/scripts try its options",
    "source ": "the shell's own",
    "cd ": "the shell's own",
    "git clone": "needs a network",
    "pip install": "needs a network",
    "vllm serve": "a serving engine: tests/test_end_to_end.py, with -m serving",
    "python -m sglang": "a serving engine that is not installed here",
    "wandb sync": "needs a network",
}
OUTPUTS = ("train.py   ", "trained ", "this machine", "QUICKSTART_OUTPUT", "target ")
VALUES = {"…": "x", "NAME": "eagle3", "FILE": "x.jsonl"}  # what placeholders stand for


@dataclass
class Block:
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
    for found in fence.finditer(README):
        text = re.sub(f"^{found[1]}", "", found[3], flags=re.M)
        yield Block(found[2], text, README.count("\n", 0, found.start()) + 1)


BLOCKS = list(blocks())
PYTHON = [b for b in BLOCKS if b.language == "python"]
SHELL = [b for b in BLOCKS if b.language in ("", "sh", "bash", "console")]
SHELL = [b for b in SHELL if not b.text.startswith(OUTPUTS)]
COMMANDS = [(c, b.line) for b in SHELL for c in b.commands]


def of(pattern: str) -> list[str]:
    return [c for c, _ in COMMANDS if re.match(pattern, c)]


TRAINING = of(r"(accelerate launch .*|python )train\.py")
RUN = of(rf"scripts/({'|'.join(SCRIPTS)})\b")


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    assert len(BLOCKS) > 2 and README.count("```") == 2 * len(BLOCKS)
    unknown = {b.language for b in BLOCKS} - {"", "sh", "bash", "console", "python", "json"}
    assert not unknown
    tried = {*TRAINING, *RUN}
    for command, line in COMMANDS:
        known = command in tried or command.startswith(tuple(ELSEWHERE))
        assert known, f"README.md, the block in line {line}: nothing tries {command!r}"


def test_scripts_that_are_named_exist() -> None:
    for name in set(re.findall(r"(?<![\w/])scripts/[\w-]+", README)):
        assert os.access(REPOSITORY / name, os.X_OK) or (REPOSITORY / name).is_dir(), name


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
    compose([override(w) for w in words], hydra="-m" in shlex.split(after))
    if before.startswith("accelerate"):
        from accelerate.commands.launch import launch_command_parser

        given = shlex.split(before)[2:]
        assert launch_command_parser().parse_args([*given, "train.py"]).training_script


def inline_overrides() -> list[str]:
    """Settings in running text, such as `data.answers=data`, but not those of an option."""
    prose = re.sub(r"^```.*?^```", "", README, flags=re.M | re.S)
    spans = [s for s in re.findall(r"`([^`\n]+)`", prose) if not s.startswith("-")]
    setting = re.compile(r"[a-z_]+(\.[a-z_]+)*=\S+")
    return sorted({w for span in spans for w in span.split() if setting.fullmatch(w)})


@pytest.mark.parametrize("word", inline_overrides())
def test_settings_in_the_text_compose(word: str) -> None:
    """Alone, or with a family that has it; a key without a dot may be one of a family's own."""
    key = word.split("=")[0].removeprefix("drafter.").split(".")[0]
    having = [n for n, kind in DRAFTERS.items() if key in {f.name for f in fields(kind.Config)}]
    given = [[override(word)], *([f"drafter={d}", override(word)] for d in having)]
    given += [[f"drafter={d}", f"drafter.{override(word)}"] for d in having if "." not in word]
    for overrides in given:
        with contextlib.suppress(UserError, HydraException):
            compose([*NEEDED.get(word, []), *overrides])
            return
    raise AssertionError(f"README.md has {word!r}, which no configuration takes")


NEEDED = {
    "stage.new_tokens=500": ["drafter.from=runs/quickstart/best"],  # what a setting wants beside it
    "data=pairs": ["data.path=pairs.tsv"],
    "data=text": ["data.path=articles.txt"],
    "target=model": ["target.path=x"],
    "data=conversations": ["data.path=x"],
    "objective=adaspec": ["objective.reference=runs/NAME/best"],
    "objective.reference=runs/NAME/best": ["objective=adaspec"],
}


@pytest.fixture(scope="module")
def place(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which runs/quickstart is there, made by a tiny job without what follows its
    training."""
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_finish", lambda *_: {"temperatures": []})
        tiny.job(folder / "runs" / "quickstart", "eagle3", "drafter.depth=3")
    return folder


def run_script(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a script as its command line says, shorter, in this process; its output."""
    words = shlex.split(command)
    name = words[0].removeprefix("scripts/")
    more = [*SHORTER[name]]
    if name == "export":
        more = [w for w in more if w not in words]
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
@pytest.mark.parametrize("command", [c for c in RUN if "--compile" not in c])
def test_scripts_run_as_written(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(command, place, monkeypatch)
    if "--to" in (words := shlex.split(command)):
        assert (place / words[words.index("--to") + 1] / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in RUN if "--compile" in c])
def test_scripts_that_compile_know_their_options(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes minutes: the options are read, and a draft that is not there ends it."""
    elsewhere = command.replace("runs/quickstart/best", "runs/nowhere/best")
    with pytest.raises(AssertionError, match=r"error: .*runs/nowhere/best"):
        run_script(elsewhere, place, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON, ids=lambda b: f"line {b.line}")
def test_python_snippets_run(
    block: Block, place: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand, but that the default target is the tiny one."""
    monkeypatch.chdir(place)
    default = f"TargetConfig(path={str(tiny.target)!r}, dtype='float32')"
    text = block.text.replace("TargetConfig()", default)
    with redirect_stdout(io.StringIO()):
        exec(compile(text, f"README.md, line {block.line}", "exec"), {"__name__": "readme"})

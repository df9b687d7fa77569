"""Tables of what has a name: the core's entries, the lab's, and those of installed packages.

Run alone: python -m pytest tests/test_plugins.py (under 30 s)

Packages with drafters of their own are in tests/drafters/test_installed.py.
"""

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from specdec import plugins
from specdec.decoding.config import DecodeConfig
from specdec.decoding.draft_length import LENGTHS, Length
from specdec.errors import UserError
from specdec.measure.results import Results
from specdec.plugins import Plugins, lab_entries
from specdec.report import report_page
from specdec.report.report_page import FIGURES
from tests.measure.test_results import results

ROOT = Path(__file__).resolve().parent.parent
GROUP = "draftsmith.numbers"


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plugins[float]:
    """One number of the core, one of a lab, and three of other packages, two of them broken."""
    lab = tmp_path / "entry_points.txt"
    lab.write_text(f"[{GROUP}]\ntau = math:tau\n")
    elsewhere = [
        EntryPoint("e", "math:e", GROUP),
        EntryPoint("missing", "math:missing", GROUP),
        EntryPoint("wrong", "math:sqrt", GROUP),
    ]
    monkeypatch.setattr(plugins, "LAB", lab)
    monkeypatch.setattr(plugins, "entry_points", lambda group: elsewhere * (group == GROUP))
    lab_entries.cache_clear()

    def require_number(name: str, value: object) -> None:
        if not isinstance(value, float):
            raise UserError(f"{name} is not a number")

    return Plugins(GROUP, "number", {"one": 1.0}, require_number)


@pytest.fixture(autouse=True)
def forgotten() -> object:
    yield
    lab_entries.cache_clear()


def test_the_core_and_the_lab_are_listed_and_packages_once_they_are_loaded(
    numbers: Plugins[float],
) -> None:
    assert list(numbers) == ["one", "tau"] and len(numbers) == 2 and "e" not in numbers
    assert numbers["tau"] == pytest.approx(6.2832, abs=1e-4)
    assert numbers.named("e") == pytest.approx(2.7183, abs=1e-4)
    assert sorted(numbers) == ["e", "one", "tau"]


def test_broken_packages_are_skipped_until_they_are_asked_for(numbers: Plugins[float]) -> None:
    numbers.add_installed()
    assert sorted(numbers) == ["e", "one", "tau"]
    with pytest.raises(UserError, match=r"number 'missing' .* cannot be loaded .AttributeError"):
        numbers.named("missing")
    with pytest.raises(UserError, match=r"number 'wrong' of the .* package math: .*not a number"):
        numbers.named("wrong")
    with pytest.raises(UserError, match=r"number 'tua' is unknown; did you mean 'tau'"):
        numbers.named("tua")
    with pytest.raises(KeyError):
        numbers["tua"]


def test_the_core_runs_without_the_lab() -> None:
    """Nothing of it is imported, and its names are unknown, where its table is not there."""
    program = (
        "import sys\n"
        "class Lab:\n"
        "    def find_spec(self, name, *_):\n"
        "        assert not name.startswith('specdec.lab'), name\n"
        "sys.meta_path.insert(0, Lab())\n"
        "from pathlib import Path\n"
        "from specdec import plugins\n"
        "plugins.LAB = Path('nowhere')\n"
        "from train.run_config import composed, register\n"
        "from specdec.drafters import DRAFTERS\n"
        "from specdec.decoding.verification_methods import VERIFICATION_METHODS\n"
        "register()\n"
        "config = composed(['drafter=eagle3'])\n"
        "known = 'spire' in DRAFTERS, 'kseq' in VERIFICATION_METHODS, len(DRAFTERS)\n"
        "print(config.drafter.name, *known)\n"
    )
    run = [sys.executable, "-c", program]
    said = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["eagle3", "False", "False", "15"]


@dataclass
class Mine(Length):
    """A draft length of another package."""


def test_a_draft_length_and_a_figure_of_another_package_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settings accept the one before anything has loaded it; the report shows the other."""
    entries = {
        LENGTHS.group: [EntryPoint("mine", "tests.test_plugins:Mine", LENGTHS.group)],
        FIGURES.group: [EntryPoint("mine", "tests.test_plugins:paragraph", FIGURES.group)],
    }
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries.get(group, []))
    try:
        assert DecodeConfig(draft_length="mine").draft_length == "mine"
        assert "A paragraph of another package." in report_page.page(results(), {})
    finally:
        for table in (LENGTHS, FIGURES):
            table._loaded.pop("mine", None)
    with pytest.raises(UserError, match=r"decode.draft_length='mine' is unknown"):
        monkeypatch.setattr(plugins, "entry_points", lambda group: [])
        DecodeConfig(draft_length="mine")


def paragraph(_: Results) -> list[str]:
    return ["A paragraph of another package."]

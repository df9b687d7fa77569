"""The programs in examples/: each runs as it stands, on the tiny target.

Run alone: python -m pytest tests/test_examples.py (under 30 s)
"""

import runpy
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from specdec.drafters import DRAFTERS
from tests.tiny import REPOSITORY, Tiny
from tests.told import require_one_line

EXAMPLES = REPOSITORY / "examples"
QUICK = ["budget.minutes=null", "loop.epochs=1", "decode.temperatures=[0]", "decode.prompts=1"]
QUICK += ["decode.fastest=false", "combine_with=null", "export=null"]  # tried elsewhere


def output_of(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", *arguments])
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return said.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(autouse=True)
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder."""
    monkeypatch.chdir(place)


@pytest.fixture
def no_family_is_left() -> Iterator[None]:
    yield
    DRAFTERS.pop("last_token", None)
    ConfigStore.instance().repo["drafter"].pop("last_token.yaml", None)


def test_every_example_is_short_named_in_the_readme_and_tried_here() -> None:
    paths = sorted(EXAMPLES.glob("*.py"))
    files = {path.name: path.read_text() for path in paths if path.is_file()}
    assert set(files) == {"training.py", "decoding.py", "family.py"}
    readme, tests = (REPOSITORY / "README.md").read_text(), Path(__file__).read_text()
    for name, text in files.items():
        assert len(text.splitlines()) <= 60, name
        assert f"(examples/{name})" in readme, name
        assert f'output_of("{name.removesuffix(".py")}"' in tests, name
        assert f"python examples/{name}" in text, name


def test_a_draft_is_trained_and_decoded_with(
    tiny: Tiny, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = output_of("training", tiny.overrides("eagle3", *QUICK), monkeypatch)
    assert "T=0: " in said and "times the speed of vanilla decoding" in said
    draft = Path("runs") / "example" / "best"
    assert str(draft) in said and (place / draft).is_dir()
    assert (place / "runs" / "example" / "report" / "report.md").exists()

    said = output_of("decoding", [str(draft), "we go home", "why"], monkeypatch)
    assert said.startswith("> we go home\n") and "\n> why\n" in said
    assert "2 of 2 responses are those of vanilla decoding" in said


def test_a_family_is_trained(
    tiny: Tiny, place: Path, monkeypatch: pytest.MonkeyPatch, no_family_is_left: None
) -> None:
    own = [word for word in tiny.overrides("x", *QUICK) if not word.startswith("drafter=")]
    said = output_of("family", own, monkeypatch)
    assert said.splitlines()[-1].endswith("in runs/last-token")
    assert (place / "runs" / "last-token" / "best").is_dir()


def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in {"decoding": [], "training": ["loop.rows=many"]}.items():
        with pytest.raises(SystemExit) as end:
            output_of(name, words, monkeypatch)
        assert end.value.code == 2
        require_one_line(capsys.readouterr().err)

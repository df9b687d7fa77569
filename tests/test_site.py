"""The site in docs/: it builds without a warning, and its generated pages say what the code says.

Run alone: python -m pytest tests/test_site.py (about 20 s)
"""

import json
import os
import re
import runpy
import subprocess
import sys
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.tiny import REPOSITORY

PICTURES = sorted(path.stem for path in (REPOSITORY / "docs" / "pictures").glob("*.svg"))


def output_of(*command: str) -> str:
    """What a command prints, run in the repository's folder; it must succeed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """A page that no menu has is one, and a link to a page or a heading that is not there."""
    said = output_of("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"))
    assert "WARNING" not in said
    pages = [path.relative_to(REPOSITORY / "docs") for path in (REPOSITORY / "docs").rglob("*.md")]
    assert len(pages) > 2
    for page in pages:
        folder = page.parent if page.stem == "index" else page.with_suffix("")
        assert (tmp_path / "site" / folder / "index.html").exists(), page


def test_generated_pages_say_what_the_code_says() -> None:
    """If this fails after a change of settings or of files of results: run scripts/docs."""
    output_of("scripts/docs", "--check")


def test_every_table_says_where_its_figures_are_from() -> None:
    for path in (REPOSITORY / "docs" / "results").glob("*.json"):
        table = json.loads(path.read_text())
        for run in table["runs"]:
            assert re.fullmatch(r"[0-9a-f]{7,}", run["commit"]), path.name
            date.fromisoformat(run["date"])
            assert run["machine"] and run["command"] and run["rows"], path.name


def test_the_readme_has_the_figures_of_the_quickstart() -> None:
    table = json.loads((REPOSITORY / "docs" / "results" / "01-quickstart.json").read_text())
    names = [column["name"] for column in table["columns"]]
    readme = (REPOSITORY / "README.md").read_text()
    for row in table["runs"][0]["rows"][:3]:  # those at T = 0
        for name in ("τ", "speedup"):
            value, low, high = row[names.index(name)]
            assert f"| {value:.2f} [{low:.2f}, {high:.2f}] |" in readme, row[0]


@pytest.mark.parametrize("name", PICTURES)
def test_words_of_a_picture_do_not_meet(name: str) -> None:
    """Not even in the widest font that stands in for Helvetica; nor do they leave the picture."""
    width_of = runpy.run_path(str(REPOSITORY / "scripts" / "pages" / "drawing.py"))["width_of"]
    picture = ElementTree.parse(REPOSITORY / "docs" / "pictures" / f"{name}.svg").getroot()
    boxes = []
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        words, size = text.text or "", float(text.attrib["font-size"])
        width = width_of(words, size, mono="monospace" in text.attrib.get("font-family", ""))
        shift = {"start": 0, "middle": width / 2, "end": width}[text.attrib["text-anchor"]]
        left, bottom = float(text.attrib["x"]) - shift, float(text.attrib["y"])
        assert left >= 0 and left + width <= float(picture.attrib["width"]), words
        for other, (x, y, x2, y2) in boxes:
            apart = x2 <= left + 1 or left + width <= x + 1 or y2 <= bottom - size or bottom <= y
            assert apart, f"{words!r} is over {other!r}"
        boxes.append((words, (left, bottom - size, left + width, bottom)))
    assert boxes


def test_every_picture_is_made_and_shown() -> None:
    folder = REPOSITORY / "docs"
    drawn = {path.stem for path in (folder / "pictures").glob("*.svg")}
    source = (REPOSITORY / "scripts" / "pages" / "pictures.py").read_text()
    assert drawn == set(re.findall(r"^def (\w+)\(\) -> str:", source, re.M))
    pages = [REPOSITORY / "README.md", *folder.rglob("*.md")]
    shown = "".join(path.read_text() for path in pages)
    for name in drawn - {"speedups", "families"}:
        assert f"pictures/{name}.svg)" in shown, name


def test_the_page_of_targets_begins_with_well_known_ones() -> None:
    text = (REPOSITORY / "docs" / "targets.md").read_text()
    shown, *folded = text.split("<details markdown")
    rows = re.findall(r"^\| (\S+) \| \w+ \| (?:chains|whole)", shown, re.M)
    assert len(rows) == 20 and {"llama", "qwen3", "gpt_oss"} < set(rows)
    assert len(folded) == 3 and len(re.findall(r"^\| .* \| \w+ \| chains", folded[0], re.M)) > 180

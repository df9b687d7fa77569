"""The site in docs/: it builds without a warning, and its generated pages say what the code says.

Run alone: python -m pytest tests/test_site.py (about 20 s)
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.tiny import REPOSITORY


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

"""The front page of the site, which begins like README."""

import re

from train.run_config import CONF

README = CONF.parent / "README.md"
PATH = CONF.parent / "docs" / "index.md"
BEGIN, END = "<!-- scripts/docs copies this from README.md -->", "<!-- end of what is copied -->"


def page() -> str:
    """The page with README's first screen: everything before README's list of all pages."""
    first = README.read_text(encoding="utf-8").split("\n## Where to go next")[0]
    first = first.replace("](docs/", "](").replace("](README.md", "](index.md")
    inside = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    text = PATH.read_text(encoding="utf-8")
    return inside.sub(lambda _: f"{BEGIN}\n{first}\n{END}", text)

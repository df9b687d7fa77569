"""A family of another installed package is found by its entry point.

Run alone: python -m pytest tests/drafters/test_installed.py (under 15 s)

Nothing is installed: a folder as pip would leave it is on sys.path.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hydra.core.config_store import ConfigStore

from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS, family, with_copying
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.sampling.trees import Chain, Dynamic
from tests.tiny import architectures, random_drafter, random_target
from tests.told import told
from train.run_config import Config, composed, register

WHOLE = "from examples.family import LastToken as Family\n"
COPYING = """
from dataclasses import dataclass

from specdec.drafters.ngram import Ngram, NgramConfig


@dataclass
class Config(NgramConfig):
    name: str = "copying_one"


class Family(Ngram):
    Config = Config
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Lays a package with one module, which is to have a drafter `Family`, into a site folder."""
    before = {*DRAFTERS}

    def lay(name: str, source: str) -> None:
        (tmp_path / f"{name}_package.py").write_text(source)
        about = tmp_path / f"{name}_package-1.0.dist-info"
        about.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}_package\nVersion: 1.0\n"
        (about / "METADATA").write_text(metadata)
        entry = f"[draftsmith.drafters]\n{name} = {name}_package:Family\n"
        (about / "entry_points.txt").write_text(entry)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield lay
    for name in {*DRAFTERS} - before:
        del DRAFTERS[name]
        ConfigStore.instance().repo["drafter"].pop(f"{name}.yaml", None)
    for name in [n for n in sys.modules if n.endswith("_package")]:
        del sys.modules[name]


def registered_and_composed(overrides: list[str]) -> Config:
    """As `train.py` does, with what is installed now."""
    register()
    return composed(overrides)


def test_an_installed_family_is_composed_built_saved_and_decoded_with(
    install: Install, tmp_path: Path
) -> None:
    install("last_token", WHOLE)
    config = registered_and_composed(["drafter=last_token", "drafter.rank=8", "export=null"])
    assert config.family is family("last_token") is DRAFTERS["last_token"]
    assert config.family.__name__ == "LastToken" and config.drafter.rank == 8

    target = random_target(architectures(vocab=64, layers=2)["llama"])
    drafter = random_drafter(config.drafter, target, noise=0.1)
    draft_checkpoint.write_draft(tmp_path / "draft", drafter, target)
    del DRAFTERS["last_token"]  # a script loads a draft before it composes any configuration
    loaded = draft_checkpoint.load_draft(tmp_path / "draft", target)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])
    prompts = [[5, 9, 30], [7, 8]]
    plain = decode(target, prompts, max_new_tokens=12, eos=())
    for shape in (Chain(2), Dynamic(2, 8, 4)):
        drafted = decode(target, prompts, Way(loaded, shape), max_new_tokens=12, eos=())
        assert [a.ids for a in drafted] == [a.ids for a in plain]


INCOMPLETE = r"not a complete subclass of Drafter"
BROKEN = {
    "import torhc\n": r"ModuleNotFoundError: No module named 'torhc'",
    "raise SystemError('no\\nway')\n": r"SystemError: no\)",
    "": r"AttributeError: .*has no attribute 'Family'",
    "Family = 3\n": INCOMPLETE,
    "from specdec.drafters.base import Drafter as Family\n": INCOMPLETE,
    WHOLE: r"the name in its Config is 'last_token'",
    WHOLE + "class Family(Family):\n    Config = int\n": r"its Config is not a dataclass",
    WHOLE
    + "from dataclasses import make_dataclass\nclass Family(Family):\n"
    + "    Config = make_dataclass('C', [('x', set, 0)])\n": r"cannot be loaded",
}


@pytest.mark.parametrize("source", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_one_is_told_only_to_those_who_ask_for_it(
    install: Install, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install("odd_one", source)
    assert registered_and_composed(["drafter=medusa"]).drafter.name == "medusa"
    for overrides in (["drafter=odd_one"], ["drafter=odd_one", "loop.rows=2"]):
        said = told(capsys, overrides)
        assert "'odd_one' of the installed package odd_one_package" in said
    with pytest.raises(UserError, match=BROKEN[source]) as caught:
        family("odd_one")
    assert "\n" not in str(caught.value)
    assert "odd_one" not in DRAFTERS


def test_an_installed_family_may_be_a_part_of_a_hybrid(install: Install) -> None:
    install("copying_one", COPYING)
    target = random_target(architectures(vocab=64, layers=2)["llama"])
    head = random_drafter(family("bigram").Config(depth=2), target, noise=0.0)
    hybrid = with_copying(head, "copying_one", target)
    assert type(hybrid.copier).__module__ == "copying_one_package"
    install("odd_one", "import torhc\n")
    with pytest.raises(UserError, match=r"odd_one_package cannot be loaded"):
        with_copying(head, "odd_one", target)


def test_installed_families_are_suggested(install: Install) -> None:
    install("last_token", WHOLE)
    with pytest.raises(UserError, match="did you mean 'last_token'"):
        family("last_tokne")


def test_a_package_cannot_replace_a_family_of_ours(install: Install) -> None:
    install("medusa", WHOLE)
    registered_and_composed(["drafter=medusa"])
    assert family("medusa").__module__.startswith("specdec.")

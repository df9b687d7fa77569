"""The scripts' own modules can be imported in their tests."""

import pytest

from tests.tiny import REPOSITORY


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))

"""Fixtures of several test files."""

from collections.abc import Iterator

import pytest
import torch

from tests.device import DEVICE, Placed
from tests.tiny import Tiny, make_tiny
from train import pipeline

if DEVICE.type != "cpu":
    Placed(DEVICE).__enter__()  # from here on: tests make tensors when they are imported, too


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Sums in one order, so that runs can be compared bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one drafter on the real target stand together, so that a worker seldom waits for a
    draft that another one trains."""
    at = [n for n, item in enumerate(items) if item.path.name == "test_end_to_end.py"]
    together = sorted((items[n] for n in at), key=_drafter)
    for n, item in zip(at, together, strict=True):
        items[n] = item


def _drafter(item: pytest.Item) -> str:
    spec = getattr(item, "callspec", None)
    return spec.params.get("name", "eagle3") if spec else "eagle3"


@pytest.fixture
def training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what follows training: decoding, report and export have tests of their own."""
    monkeypatch.setattr(pipeline, "finished", lambda *_: None)

"""Fixtures of several test files.

What takes seconds to import is imported where it is used: the process that only hands tests to
workers does without.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.tiny import Tiny

HERE = Path(__file__).parent
ROW_OF_ENGINES = "a row of the table of engines"  # the property of a test that made one
if os.environ.get("DRAFTSMITH_TEST_DEVICE", "cpu") != "cpu":
    from tests.device import DEVICE, Placed

    Placed(DEVICE).__enter__()  # from here on: tests make tensors when they are imported, too

# Files that take long, though each of their tests is short: scripts/test --fast leaves them out.
LONG = {
    "lab/decoding/test_beam.py",
    "lab/drafters/test_early_exit.py",
    "drafters/test_medusa2.py",
    "drafters/test_packed_documents.py",
    "drafters/test_recurrent.py",
    "drafters/test_closed_form.py",
    "lab/drafters/test_translated.py",
    "formats/test_export_check.py",
    "measure/test_evaluation.py",
    "runtime/test_memory.py",
    "scripts/test_gpu.py",
    "scripts/test_targets.py",
    "scripts/test_training_benches.py",
    "targets/test_gguf.py",
    "lab/targets/test_seq2seq.py",
    "targets/test_recurrent_states.py",
    "test_documents.py",
    "test_shared_files.py",
    "train/data/test_engines.py",
    "train/data/test_responses_read.py",
    "train/data/test_split.py",
    "train/test_configs.py",
    "train/test_continued.py",
    "train/test_damage.py",
    "train/test_divided.py",
    "train/test_engine_hidden_states.py",
    "train/test_engine_kills.py",
    "train/test_launcher.py",
    "train/test_loop.py",
    "train/test_mistakes.py",
    "train/test_pipeline.py",
    "train/test_resume.py",
    "train/test_training_rounds.py",
    "train/test_initialisation.py",
}


def pytest_collection_finish() -> None:
    """Leave what is there now, all modules and all tests, out of garbage collection, which else
    takes a sixth of the time of tiny jobs."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Sums in one order, so that runs can be compared bit for bit."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> "Tiny":
    from tests.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `LONG` files, and order all so that workers share them out well. The tests
    on the real target come first, so that one worker runs them, with one target and one vLLM.
    Files with slow tests follow, so that none is left for the end, and then those of `LONG`."""
    long = {HERE / name for name in LONG}
    assert all(path.exists() for path in long), "LONG names a file that is not there"
    for item in items:
        if item.path in long:
            item.add_marker(pytest.mark.long)
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[int, str]:
        if item.path.name == "test_end_to_end.py":
            return (0, _drafter(item))
        return (1 if item.path in slow else 2 if item.path in long else 3, "")

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of engines and methods, in Markdown, if tests with engines ran."""
    reports = [r for of in terminalreporter.stats.values() for r in of if hasattr(r, "when")]
    properties = [pair for r in reports if r.when == "call" for pair in r.user_properties]
    rows = [value for name, value in properties if name == ROW_OF_ENGINES]
    if not rows:
        return
    terminalreporter.section("drafts in engines, in float32, compared with our decoder")
    columns, cells = [*rows[0]], sorted([*row.values()] for row in rows)
    for row in (columns, ["---"] * len(columns), *cells):
        terminalreporter.write_line(f"| {' | '.join(row)} |")


def _drafter(item: pytest.Item) -> str:
    """The drafter of a test on the real target. Tests of one stand together: a worker that helps at
    the end then seldom waits for a draft that another one trains. Those that start a server, which
    take longest, are first."""
    fixtures = getattr(item, "fixturenames", ())
    if "runs" not in fixtures:
        return ""
    spec = getattr(item, "callspec", None)
    return spec.params.get("name", "eagle3") if spec else "eagle3"


@pytest.fixture(scope="session", autouse=True)
def savefig() -> Iterator[Any]:
    """matplotlib's method that draws a plot. In tests without `pictures` a plot is one pixel, as
    drawing takes a third of the time of a tiny job; jobs in processes of their own draw."""
    from matplotlib.figure import Figure
    from PIL import Image

    pixel, draw = Image.new("RGB", (1, 1)), Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda _, path: pixel.save(path))
        yield draw


@pytest.fixture
def pictures(savefig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are drawn."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture
def training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what follows training: decoding, report and export have tests of their own."""
    from train import pipeline

    monkeypatch.setattr(pipeline, "finished", lambda *_: None)

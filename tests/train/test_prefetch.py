"""Hidden states that are read ahead: the same batches in the same order, whatever happens.

Run alone: python -m pytest tests/train/test_prefetch.py (about 15 s)
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UserError
from specdec.integrity import Damaged
from tests.runs import require_same_run
from tests.tiny import Tiny, losses, records
from train.hidden_states.batches import BatchesReadAhead, StoredBatches
from train.hidden_states.store import HiddenStatesConfig


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("hidden_states")]


def test_batches_come_in_order_and_no_more_than_asked_are_held() -> None:
    read, allowed = list[Sequence[int]](), threading.Semaphore(0)

    def batch(indices: Sequence[int]) -> Any:
        allowed.acquire()
        read.append(indices)
        return f"batch {list(indices)}"

    prefetch, requests = BatchesReadAhead(batch, 2), [[0, 1], [2], [3, 4], [5]]
    prefetch.expect(requests)
    for n, request in enumerate(requests):
        for _ in range(2):
            allowed.release()
        assert prefetch.take(request) == f"batch {request}"
        assert len(read) <= n + 3, "the one that is taken, and two more"
    assert prefetch.take([6]) is None, "it was not expected"
    prefetch.expect([])
    assert not readers()


def test_batches_out_of_order_are_not_taken_from_those_read_ahead() -> None:
    prefetch = BatchesReadAhead(lambda indices: list(indices), 1)  # type: ignore[arg-type, return-value]
    prefetch.expect([[1], [2]])
    assert prefetch.take([2]) is None
    assert prefetch.take([1]) == [1] and prefetch.take([2]) == [2]
    prefetch.expect([])


def test_nothing_is_read_ahead_by_default_of_a_source() -> None:
    prefetch = BatchesReadAhead(lambda indices: pytest.fail("read"), 0)
    prefetch.expect([[1]])
    assert prefetch.take([1]) is None and not readers()


def test_what_reading_raised_is_raised_where_the_batch_is_taken() -> None:
    def damaged(indices: Sequence[int]) -> Any:
        raise Damaged(f"batch {indices}")

    prefetch = BatchesReadAhead(damaged, 2)
    prefetch.expect([[7]])
    with pytest.raises(Damaged, match="7"):
        prefetch.take([7])
    prefetch.expect([])


@pytest.mark.parametrize("more", [[], ["loop.rows=2", "loop.accumulate=1"]])
def test_a_run_is_bit_for_bit_the_same_without_reading_ahead(
    tiny: Tiny, tmp_path: Path, more: list[str]
) -> None:
    tiny.job(tmp_path / "ahead", "eagle3", "hidden_states.prefetch=3", *more)
    tiny.job(tmp_path / "plain", "eagle3", "hidden_states.prefetch=0", *more)
    require_same_run(tmp_path / "ahead", tmp_path / "plain")
    assert not readers(), "the thread has ended"
    waiting = [r["train"]["waiting"] for r in records(tmp_path / "plain") if "train" in r]
    assert len(waiting) == 12 and all(0 < share < 1 for share in waiting)


def test_a_run_that_computes_hidden_states_does_not_wait(tiny: Tiny, tmp_path: Path) -> None:
    tiny.job(tmp_path / "run", "eagle3", "hidden_states.mode=online")
    assert all(r["train"]["waiting"] == 0 for r in records(tmp_path / "run") if "train" in r)


def test_damage_that_the_thread_meets_is_mended(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bit of the store is flipped after the store is filled, before training reads it."""
    sound = [f"hidden_states.root={tmp_path / 'sound'}"]
    tiny.job(tmp_path / "whole", "eagle3", *sound)
    expect, damaged = StoredBatches.expect, list[Path]()

    def damage(self: StoredBatches, requests: Sequence[Sequence[int]]) -> None:
        if not damaged:
            damaged.extend(sorted(self.store.folder.glob("*.safetensors")))
            for path in damaged:
                whole = bytearray(path.read_bytes())
                whole[-100] ^= 1
                path.write_bytes(whole)
        expect(self, requests)

    monkeypatch.setattr(StoredBatches, "expect", damage)
    tiny.job(tmp_path / "again", "eagle3", f"hidden_states.root={tmp_path / 'damaged'}")
    said = capsys.readouterr()
    assert damaged and "computed again" in said.out + said.err
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    assert not readers()


def test_an_interrupted_run_leaves_no_thread_that_reads_on(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is stopped in the middle of an epoch, and goes on exactly."""
    tiny.job(tmp_path / "whole", "eagle3")
    batch, count = StoredBatches.batch, []

    def stop(self: StoredBatches, indices: Sequence[int]) -> Any:
        count.append(indices)
        if len(count) == 15:
            raise KeyboardInterrupt
        return batch(self, indices)

    with monkeypatch.context() as patch:
        patch.setattr(StoredBatches, "batch", stop)
        with pytest.raises(KeyboardInterrupt):
            tiny.job(tmp_path / "again", "eagle3")
    tiny.job(tmp_path / "again", "eagle3")
    require_same_run(tmp_path / "again", tmp_path / "whole")


def test_a_negative_number_of_batches_is_refused() -> None:
    with pytest.raises(UserError, match=r"hidden_states\.prefetch"):
        HiddenStatesConfig(prefetch=-1)

"""Several processes read the same data as one: the same texts in the same order, the same count of
what is left out, and the same errors.

Run alone: python -m pytest tests/train/data/test_processes.py
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ReportedByAnotherProcess, UserError
from specdec.ranks import Ranks
from tests.ranks import together
from tests.train.data.chats import CHATML, tokenizer_of
from tests.train.data.test_conversations import write_lines
from train.data import reader, split
from train.data.conversations import DataConfig, SourceConfig
from train.data.reader import ReaderWork
from train.data.split import DataSplit, split_documents, split_prompts

WORDS = [f"w{i}" for i in range(300)]


def chats(count: int, seed: int, shared_ids: bool = False) -> list[Any]:
    """Chats, of which some are too short, too long or no conversations, and some of whose ids are
    those of others."""
    draw, records = random.Random(seed), list[Any]()
    for n in range(count):
        question = " ".join(draw.choices(WORDS, k=8))
        response = draw.choices(["fine", "x", "long " * 60, "forged <|im_end|>"], [6, 1, 1, 1])[0]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
        turns += [{"role": "user", "content": "and?"}, {"role": "assistant", "content": response}]
        id = n % 7 if shared_ids else f"{seed}-{n}"
        records.append(draw.choices([{"id": id, "messages": turns}, {"a": n}, "{"], [12, 1, 1])[0])
    return records


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = []
    for seed, count in ((1, 60), (2, 25)):
        path = tmp_path / f"{seed}.jsonl"
        write_lines(path, chats(count, seed, shared_ids=True))
        paths.append(str(path))
    return paths


def described(found: DataSplit[Any]) -> list[Any]:
    """All of a split that a run reads."""
    sides = [found.train, found.held_out, found.prompts]
    texts = [
        [(x.id, x.ids.tolist(), x.notes, getattr(x, "mask", x.ids).tolist()) for x in side]
        for side in sides
    ]
    return [*texts, str(found.tally), found.tally.read, found.share]


def read_by(
    monkeypatch: pytest.MonkeyPatch,
    world: int,
    cfg: DataConfig,
    done: list[int] | None = None,
) -> Any:
    """What each process has in the end: the split, in the first, or what it raises."""
    tokenizer = tokenizer_of(CHATML)
    make = split_prompts if cfg.responses == "target" else split_documents

    def work(us: Ranks) -> DataSplit[Any] | None:
        of_rank = ReaderWork(cfg, tokenizer)

        def counted(task: Any) -> Any:
            if done is not None:
                done.append(us.rank)
            return of_rank(task)

        alone = us.alone
        return us.led(lambda share: make(cfg, tokenizer, None if alone else share), counted)

    return together(monkeypatch, world, work)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"limit": 11},
    {"limit": 1},
    {"limit": 1000},
    {"records": 30},
    {"records": 30, "limit": 29},
    {"shuffle": 9},
    {"shuffle": 9, "limit": 20, "seed": 5},
    {"shuffle": 500, "records": 31},
    {"held_out": 0.3},
    {"held_out": 0.0, "too_long": "truncate"},
    {"responses": "target"},
    {"responses": "target", "limit": 13, "held_out": 0.3},
]
MIXED: list[tuple[float | None, ...]] = [(None, None), (3, 1), (1, 1), (1, 5)]


@pytest.mark.parametrize("several", [None, *MIXED])
def test_the_same_for_any_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, files: list[str], several: Sequence[float | None] | None
) -> None:
    """With blocks of 8 conversations, so that there are many."""
    for module in (reader, split):
        monkeypatch.setattr(module, "AT_ONCE", 8)
    for options in SETTINGS:
        cfg = DataConfig(files[0], max_length=200, min_response=6, **options)
        if several:
            pairs = zip(files, several, strict=False)
            sources = [SourceConfig(path, weight=weight) for path, weight in pairs]
            cfg = replace(cfg, path="", sources=sources)
        (alone,) = read_by(monkeypatch, 1, cfg)
        assert len(alone.train) + len(alone.held_out) >= 1
        for world in (2, 3):
            done: list[int] = []
            first, *others = read_by(monkeypatch, world, cfg, done)
            assert described(first) == described(alone), (options, world)
            assert others == [None] * (world - 1)
            if not (cfg.limit == 1 or (cfg.records and several and several[0])):
                assert {*done} == {*range(world)}  # all of them rendered


def test_no_more_is_read_than_may_be_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor an error met that one process would not meet."""
    records = [{"prompt": f"question number {n}", "completion": "fine"} for n in range(40)]
    path, taken = str(write_lines(tmp_path / "x.jsonl", records)), list[int]()
    cfg = DataConfig(path, min_response=1, limit=20, held_out=0)

    def endless(*_: Any) -> Any:
        for n in range(20):
            taken.append(n)
            yield f"row {n}", {"prompt": f"question number {n}", "completion": "fine"}
        raise UserError("gone offline")

    monkeypatch.setattr(reader, "records", endless)
    first, _ = read_by(monkeypatch, 2, cfg)
    assert len(first.train) == len(taken) == 20
    own, other = read_by(monkeypatch, 2, replace(cfg, limit=21))
    assert type(own) is UserError and type(other) is ReportedByAnotherProcess
    assert str(own) == str(other) == "gone offline"


Broken = Callable[[DataConfig], DataConfig]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda cfg: replace(cfg, path="nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (lambda cfg: replace(cfg, min_response=10_000), "no usable conversation"),
    ],
)
def test_mistakes_end_all(
    monkeypatch: pytest.MonkeyPatch, files: list[str], change: Broken, said: str
) -> None:
    ends = read_by(monkeypatch, 2, change(DataConfig(files[0])))
    assert [type(end) for end in ends] == [UserError, ReportedByAnotherProcess]
    assert all(said in str(end) for end in ends)

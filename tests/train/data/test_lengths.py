"""Percentiles of lengths, the share that exceeds a limit, and the setting that changes it.

Run alone: python -m pytest tests/train/data/test_lengths.py
"""

from collections.abc import Sequence

import numpy as np
import pytest

from specdec.targets.loading import TargetLoader
from tests.tiny import Tiny
from train.data.conversations import DataConfig
from train.data.lengths import DataLengths, advice_on_rows, percentiles_of
from train.data.sequences import Document, Prompt, reason_prompt_too_long
from train.data.split import DataSplit
from train.diagnosis import diagnose_data
from train.planning import plan_of_run


def documents(*lengths: int, truncated: int = 0) -> list[Document]:
    every = (Document(str(n), np.ones(n, np.int32), np.ones(n, np.bool_)) for n in lengths)
    texts = [*every]
    for text in texts[:truncated]:
        text.truncated = True
    return texts


def prompts(*lengths: int, shortened: int = 0) -> list[Prompt]:
    ids = (np.ones(n, np.int32) for n in lengths)
    return [Prompt(str(n), of, "", shortened=n < shortened) for n, of in enumerate(ids)]


def test_percentiles_are_lengths_that_occur() -> None:
    """Of 1 to 100: the least length with at least this share of them at or below it."""
    assert percentiles_of(range(1, 101)) == [51, 91, 100, 100]
    assert percentiles_of([7]) == [7, 7, 7, 7]
    assert percentiles_of([]) == [0, 0, 0, 0]


def test_skipped_documents_are_counted_with_their_lengths() -> None:
    """3 documents of at most 10 tokens, and one of 12 that was skipped: a limit of 12 keeps all."""
    split = DataSplit(train=documents(4, 8), held_out=documents(10))
    split.tally.too_long.append(12)
    found = DataLengths.of_split(DataConfig("x", max_length=10), split)
    assert found.percentiles["documents"] == [10, 12, 12, 12]
    assert found.longer == {10: 1, 20: 0, 40: 0}
    assert found.too_long == (
        "1 of 4 texts (25.0%) are longer than data.max_length=10 and are skipped "
        "(data.too_long=truncate cuts them). data.max_length=12 keeps 99 % of them"
    )


def test_cut_documents_are_counted() -> None:
    split = DataSplit(train=documents(10, 10, 3, truncated=2), held_out=documents(5))
    cfg = DataConfig("x", max_length=10, too_long="truncate")
    found = DataLengths.of_split(cfg, split)
    assert found.longer == {10: 2}
    assert found.too_long == (
        "2 of 4 texts (50.0%) are longer than data.max_length=10 and are cut there. A larger "
        "data.max_length keeps more"
    )


@pytest.mark.parametrize(("skipped", "share"), [(0, "1 of 4 prompts (25.0%)"), (1, "2 of 5")])
def test_shortened_and_skipped_prompts_are_counted(skipped: int, share: str) -> None:
    split = DataSplit(train=prompts(5, 6, 7, 8, shortened=1))
    split.tally.dropped[reason_prompt_too_long(9)] = skipped
    found = DataLengths.of_split(DataConfig("x", responses="target", max_prompt=9), split)
    assert found.percentiles == {"prompts": [7, 8, 8, 8]}
    assert found.too_long.startswith(share) and "data.max_prompt=9" in found.too_long
    assert found.lines()[0] == "tokens of prompts: 50 % 7, 90 % 8, 99 % 8, longest 8"


@pytest.mark.parametrize("responses", ["data", "target"])
def test_the_doctor_and_a_plan_have_the_same(tiny: Tiny, responses: str) -> None:
    cfg = tiny.config("medusa", f"data.responses={responses}", "planning.device=l4")
    plan = plan_of_run(cfg)
    split = plan.facts.data.split
    assert split is not None
    lines: Sequence[str] = DataLengths.of_split(cfg.data, split).lines()
    assert all(line in str(plan).splitlines() for line in lines)
    parts = TargetLoader(cfg.target).parts
    diagnosis = diagnose_data(cfg.data, parts, None, 0, cfg.response_generation)
    assert diagnosis.too_long == lines[-1]
    name = "prompts" if responses == "target" else "documents"
    row = ", ".join(
        f"{p} {n:,}"
        for p, n in zip(("50 %", "90 %", "99 %", "longest"), diagnosis.lengths[name], strict=True)
    )
    assert f"tokens of {name}: {row}" == lines[0]


@pytest.mark.parametrize(
    ("count", "longest", "rows", "advised"),
    [
        (62, 4096, 1, "about 4 steps"),  # 62 chats of 300 tokens
        (62, 4096, 2, "about 2 steps"),
        (62, 767, 1, None),  # 384 hold all, but that is more than half of a row
        (62, 768, 1, None),  # 24 steps
        (273, 4096, 1, "about 19 steps"),
        (274, 4096, 1, None),  # 20 steps
    ],
)
def test_few_steps_of_long_rows_are_told(
    count: int, longest: int, rows: int, advised: str | None
) -> None:
    """By hand: 62 · 300 = 18,600 tokens are 4.5 rows of 4,096."""
    said = advice_on_rows([300] * count, longest, rows)
    assert (said is None) == (advised is None)
    if said is not None and advised is not None:
        assert advised in said and "data.max_length=384 takes" in said

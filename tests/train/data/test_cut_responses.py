"""Responses that end at responses.max_new_tokens instead of where the target ends them.

Run alone: python -m pytest tests/train/data/test_cut_responses.py
"""

from pathlib import Path

import numpy as np
import pytest

from specdec.measure.results import CutResponses, Results
from specdec.targets.loading import TargetLoader
from specdec.targets.parts import UNBOUNDED
from specdec.targets.target_config import TargetConfig
from tests.tiny import Tiny, responding
from train.data.response_files import cut_responses, cut_responses_in_cache
from train.data.sequences import Document
from train.data.split import split_prompts
from train.diagnosis import diagnose_data
from train.planning import plan_of_run

END = 9


def document(*response: int) -> Document:
    ids = np.array([1, END, 2, *response], np.int32)
    return Document("x", ids, np.arange(len(ids)) >= 3)


def test_a_response_is_cut_if_it_is_full_and_has_no_end() -> None:
    """Of 5 tokens at most: full without an end; full with the end as its last token; shorter with
    an end; shorter without one, as an engine may stop for a reason of its own; empty, as of a
    prompt that only later rounds answer."""
    documents = [document(3, 3, 3, 3, 3), document(3, 3, 3, 3, END), document(3, END), document(3)]
    found = cut_responses([*documents, document()], (END,), responding(max_new_tokens=5))
    assert (found.responses, found.cut, found.share) == (4, 1, 0.25)


@pytest.mark.parametrize(
    ("cut", "warns", "advises"), [(5, False, False), (6, True, False), (30, True, False)]
)
def test_above_five_percent_it_warns(cut: int, warns: bool, advises: bool) -> None:
    said = str(CutResponses(100, cut, 192))
    assert f"{cut} of 100 responses ({cut} %)" in said.replace("%", " %")
    assert "responses.max_new_tokens=192" in said
    assert said.startswith("Warning: ") == warns
    assert ("Raise responses.max_new_tokens" in said) == advises


def test_above_thirty_percent_it_advises() -> None:
    said = str(CutResponses(100, 31, 192))
    assert said.startswith("Warning: ") and "Raise responses.max_new_tokens" in said
    assert CutResponses(0, 0, 192).share == 0


@pytest.mark.parametrize(
    ("cut", "most", "room", "enough"),
    [
        # half of them are longer than 100, so a quarter than 200, 5 % than 100 log 0.05 / log 0.5
        (50, 100, None, 448),  # 432.2, as a multiple of 64
        (40, 100, None, 384),  # 326.9
        (6, 100, None, 256),  # not less than twice as many: 200
        (100, 100, None, 832),  # nothing is known of their length: 8 times as many
        (50, 10, None, 44),  # 43.2; a small limit is not rounded up to 64
        (50, 100, 300, 300),  # what the target has room for
        (50, 100, 100, None),
        (5, 100, None, None),  # few enough
    ],
)
def test_a_larger_limit_is_worked_out(
    cut: int, most: int, room: int | None, enough: int | None
) -> None:
    found = CutResponses(100, cut, most, room)
    assert found.enough == enough
    advised = f"Raise responses.max_new_tokens to about {enough}, "
    assert (advised in str(found)) == (cut > 30 and enough is not None)
    assert ("no room" in str(found)) == (cut > 30 and enough is None)


def test_room_is_what_the_longest_prompt_leaves() -> None:
    """Of 40 positions, the prompt takes 3; a target without a limit has any room."""
    documents, cfg = [document(3, 3)], responding(max_new_tokens=2)
    assert cut_responses(documents, (END,), cfg, 40).room == 37
    assert cut_responses(documents, (END,), cfg, UNBOUNDED).room is None


def test_a_run_the_doctor_and_a_plan_count_the_same_responses(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny target rarely ends a response within 3 tokens. The run says so in the terminal and
    in its report; the doctor and the plan find its responses in the cache, and none before."""
    more = [
        "data.responses=target",
        "responses.max_new_tokens=3",
        f"responses.root={tmp_path / 'responses'}",
        "planning.device=here",
    ]
    cfg = tiny.config("medusa", *more)
    parts = TargetLoader(TargetConfig(str(tiny.target), dtype="float32", device="cpu")).parts
    assert plan_of_run(cfg).facts.cut is None
    assert diagnose_data(cfg.data, parts, None, 0, cfg.response_generation).cut is None
    tiny.job(tmp_path / "run", "medusa", *more)
    split = split_prompts(cfg.data, parts.tokenizer)
    found = cut_responses_in_cache(
        parts, [*split.train, *split.validation], cfg.response_generation
    )
    assert found is not None and found.responses == len(split.train) + len(split.validation)
    assert 0.3 * found.responses < found.cut <= found.responses
    assert str(found) in " ".join(capsys.readouterr().out.split())
    assert Results.load(tmp_path / "run" / "report").cut == found
    page = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "were cut at responses.max\\_new\\_tokens=3" in page or str(found) in page
    assert diagnose_data(cfg.data, parts, None, 0, cfg.response_generation).cut == found
    planned = plan_of_run(cfg)
    known = cut_responses_in_cache(parts, split.train, cfg.response_generation)
    assert planned.facts.cut == known and f"stored so far: {known}" in str(planned)

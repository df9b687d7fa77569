"""The rule by which a cause is named from misfits, without a server (served_diagnosis.py).

Run alone: python -m pytest tests/measure/test_diagnosis_rule.py
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.measure import served_diagnosis
from specdec.measure.served_diagnosis import ROUNDED, Explanation, named


@pytest.mark.parametrize(
    ("unchanged", "accepted", "culprit"),
    [(1, 60, ROUNDED), (2, 20, ROUNDED), (3, 60, "RoPE"), (3, 300, ROUNDED), (4, 300, "RoPE")],
)
def test_few_tokens_name_no_culprit(unchanged: int, accepted: int, culprit: str) -> None:
    """One of many hypotheses gives counts that differ by one or two tokens by chance."""
    tried = [Explanation("RoPE", "another theta", 0), Explanation("layer ids", "off by one", 9)]
    assert named(tried, unchanged, accepted).culprits == [culprit]


@pytest.mark.parametrize(
    ("unchanged", "in_bfloat16", "other", "culprits"),
    [
        (1, 1, 1, ["dtype"]),  # of too few tokens to name another cause
        (30, 10, 25, ["dtype"]),
        (10, 30, 25, ["dtype"]),
        (60, 2, 2, ["dtype"]),  # fits as well as another cause
        (60, 20, 2, ["other"]),  # which explains more
        (60, 25, 25, ["none"]),
    ],
)
def test_the_dtype_is_named_by_the_better_of_its_misfits(
    monkeypatch: pytest.MonkeyPatch,
    unchanged: int,
    in_bfloat16: int,
    other: int,
    culprits: list[str],
) -> None:
    """Of a server whose tokens are those of a target in bfloat16, with 100 accepted tokens."""
    misfits = {"as exported": unchanged, "dtype": in_bfloat16, "other": other}
    made = [SimpleNamespace(culprit=x, change=x) for x in ("dtype", "other")]
    monkeypatch.setattr(served_diagnosis, "HYPOTHESES", {"all": lambda here: made})
    monkeypatch.setattr(served_diagnosis, "_other_target", lambda here: None)
    here: Any = SimpleNamespace(
        target=SimpleNamespace(dtype=torch.float32),
        gaps=lambda target: [0.05],
        misfit=lambda change: misfits[change.culprit],
        unchanged=SimpleNamespace(culprit="as exported"),
        responses=[SimpleNamespace(accepted_in_all=100)],
    )
    assert served_diagnosis.diagnosed(here).culprits == culprits

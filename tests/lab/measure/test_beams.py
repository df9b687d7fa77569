"""Beam search with a draft, measured beside the plain one.

Run alone: python -m pytest tests/lab/measure/test_beams.py
"""

import json
from pathlib import Path

import pytest

from specdec.lab.decoding.beam import beam_search
from specdec.lab.measure.beams import FILE, measure_beams
from specdec.progress import bars, console
from tests.tiny import architectures, lm, random_target

PROMPTS = [[5, 9, 30, 12, 5, 9], [7, 22, 8], [4, 4, 31, 17, 6]]


def test_beams_are_measured_beside_plain_ones(tmp_path: Path) -> None:
    """A draft that is the target but for some noise finds the same hypotheses in fewer passes."""
    target = random_target(architectures(41, layers=4)["llama"])
    drafter, how = lm(target, 0.01), {"beams": 2, "gamma": 3, "max_new_tokens": 9}
    with bars(console, shown=False) as progress:
        found = measure_beams(target, drafter, PROMPTS, progress=progress, **how)
    searched = [beam_search(target, p, drafter=drafter, **how) for p in PROMPTS]
    passes = sum(len(r.speculation_steps) for r in searched)
    assert found.identical == found.prompts == 3 and found.dtype == "float32"
    assert found.tau.n == passes < sum(r.steps - 1 for r in searched)
    assert found.tau.value == pytest.approx(sum(r.steps - 1 for r in searched) / passes)
    assert found.speedup.value == pytest.approx(found.plain_seconds / found.seconds)
    said = str(found)
    assert said.startswith("2 beams, 3 steps ahead, on 3 prompts: τ ")
    assert said.endswith("the same hypotheses for 3 of 3 prompts")
    found.dtype, found.identical = "bfloat16", 2
    assert "2 of 3 prompts (a target in bfloat16 may round to others" in str(found)
    found.write(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["tau"]["n"] == passes

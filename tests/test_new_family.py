"""The drafter family of examples/family.py: 40 lines are enough for the whole job.

Run alone: python -m pytest tests/test_new_family.py (under 15 s)
"""

import inspect
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hydra.core.config_store import ConfigStore

from examples.family import LastToken, LastTokenConfig
from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS
from specdec.formats.draft_checkpoint import load_draft
from specdec.measure.results import Results
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic
from specdec.targets.loading import load_target
from tests.runs import require_learning
from tests.tiny import Tiny


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setitem(DRAFTERS, "last_token", LastToken)
    yield "last_token"
    del ConfigStore.instance().repo["drafter"]["last_token.yaml"]


def test_a_family_is_forty_lines() -> None:
    own = (LastTokenConfig, LastToken)
    assert 20 < sum(len(inspect.getsource(part).splitlines()) for part in own) <= 40


def test_it_is_trained_measured_decoded_and_reported(
    tiny: Tiny, tmp_path: Path, family: str
) -> None:
    tau = tiny.job(tmp_path, family, "loop.epochs=20", "decode.temperatures=[0,1]", "export=null")

    require_learning(tmp_path, epochs=20)
    results = Results.load(tmp_path / "report")
    assert results.training is not None
    assert results.training.objective == tau
    for at in results.asked:
        assert len(at.alpha.all.at_temperature(at.way.temperature)) == 2
        assert at.tau.value >= 1 and at.drafted_per_step.value > 0
    assert "last_token" in (tmp_path / "report" / "report.md").read_text()

    target = load_target(tiny.config().target)
    drafter, prompts = load_draft(tmp_path / "best", target), [[5, 9, 30], [7, 8]]
    plain = decode(target, prompts, max_new_tokens=24, eos=())
    with torch.no_grad():  # whatever it learned, it now knows what followed a token in a response
        head = drafter.head.weight.div_(drafter.head.weight.norm(dim=-1, keepdim=True))
        for before, after in pairwise(plain[0].ids):
            drafter.embedding.weight[before] = 10 * head[after]
    for shape in (Chain(2), Dynamic(2, 8, 4)):
        drafted = decode(target, prompts, Way(drafter, shape), max_new_tokens=24, eos=())
        assert [a.ids for a in drafted] == [a.ids for a in plain]
        assert sum(r.accepted for a in drafted for r in a.steps) > 0
    sampled = decode(
        target, prompts, Way(drafter, sampler=Sampler(temperature=1.0)), max_new_tokens=8
    )
    assert all(response.ids for response in sampled)

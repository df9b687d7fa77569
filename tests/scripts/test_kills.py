"""`scripts/bench kills`: when it kills whom. What it does then is tested with forks, in
tests/train/test_continued.py; the bench itself starts some thirty launchers. Also
tested here: what `scripts/bench engine_kills` finds in a run's folder. The kills themselves are
elsewhere: tests/train/test_engine_kills.py kills a small engine, and the bench kills vLLM.

Run alone: python -m pytest tests/scripts/test_kills.py
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from specdec.errors import UserError
from tests.kills import PLACES, Death


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_kills_come_in_every_phase_of_every_kind_of_run(seed: int) -> None:
    from benches.kills import ONLY_MAIN, PHASES, planned

    runs = planned(20, seed)
    assert [(run.kind, run.responses) for run in runs] == [
        ("DDP", "target"),
        ("FSDP2", "target"),
        ("DDP", "data"),
        ("FSDP2", "data"),
    ]
    deaths = [Death(**death) for run in runs for death in run.deaths]
    assert sum(-1 in death.victims for death in deaths) == 4
    assert sum(-1 not in death.victims for death in deaths) == 20
    assert {tuple(death.victims) for death in deaths} == {(0,), (1,), (0, 1), (-1,)}
    phase = {place: name for name, places in PHASES.items() for place, _ in places}
    for run in runs:
        first = "responses" if run.responses == "target" else "hidden_states"
        counts = Counter(phase[death["place"]] for death in run.deaths)
        assert counts == {first: 2, "training": 2, "checkpoints": 2}
    for death in deaths:
        assert death.place in PLACES and death.delay > 0
        assert death.at == 0 or death.place not in ONLY_MAIN
    assert planned(20, seed) == runs != planned(20, seed + 1)


def test_two_responses_to_one_prompt_are_found(tmp_path: Path) -> None:
    from benches.engine_kills import EngineKilledRun

    run, folder = EngineKilledRun(tmp_path / "run", "", 4), tmp_path / "run" / "responses" / "key"
    folder.mkdir(parents=True)
    assert run.responses() == {}
    for name, prompt in (("a", "x"), ("b", "y")):
        line = json.dumps({"prompt": prompt, "ids": [1, 2]})
        (folder / f"{name}.jsonl").write_text(f"{line}\n{line[:9]}")  # the last write was cut
    assert run.responses() == {"x": [1, 2], "y": [1, 2]}
    (folder / "c.jsonl").write_text(f"{line}\n")
    with pytest.raises(UserError, match="two responses"):
        run.responses()


def test_an_engine_that_ends_is_told_with_what_it_said(tmp_path: Path) -> None:
    from benches.serving import ServedEngine

    with pytest.raises(UserError, match="the engine ended: ") as told:
        ServedEngine(tmp_path, "--gamma", "many").launch()
    assert "--gamma" in str(told.value)

"""`scripts/bench kills`: when it kills whom. What it does then is tested with forks, in
tests/train/test_continued.py; the bench itself starts some thirty launchers.

Run alone: python -m pytest tests/scripts/test_kills.py
"""

from collections import Counter

import pytest

from tests.kills import PLACES, Death


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_kills_come_in_every_phase_of_every_kind_of_run(seed: int) -> None:
    from benches.kills import ONLY_MAIN, PHASES, planned

    runs = planned(20, seed)
    assert [(run.kind, run.answers) for run in runs] == [
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
        first = "answers" if run.answers == "target" else "features"
        counts = Counter(phase[death["place"]] for death in run.deaths)
        assert counts == {first: 2, "training": 2, "checkpoints": 2}
    for death in deaths:
        assert death.place in PLACES and death.delay > 0
        assert death.at == 0 or death.place not in ONLY_MAIN
    assert planned(20, seed) == runs != planned(20, seed + 1)

"""What a folder says of its run, and which settings may change when the run is continued.

Run alone: python -m pytest tests/train/test_same_run.py (under 30 s)
"""

import json
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UserError
from specdec.files import read_json, read_record, write_json
from specdec.formats import draft_checkpoint
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.tiny import Tiny, random_drafter
from train import pipeline
from train.budget import BUDGET, BudgetRecord, places_in
from train.continued import (
    CHANGES,
    Change,
    change_of,
    date_of_run,
    note_beginning,
    note_date,
    require_same_run,
)
from train.folder import (
    BEGAN,
    data_of_run,
    known_data_of_run,
    shape_of_run,
)
from train.run_config import Config

DATE = "2031-03-03T12:30:00"


def leaves(config: Any) -> list[str]:
    """Every setting of a run, as GROUP.NAME or NAME."""
    return [
        f"{group.name}.{f.name}" if inner else group.name
        for group in fields(config)
        for inner in [is_dataclass(getattr(config, group.name))]
        for f in (fields(getattr(config, group.name)) if inner else [group])
    ]


def test_one_table_knows_every_setting_and_no_other(tiny: Tiny) -> None:
    settings = leaves(tiny.config())
    assert len(settings) > 100
    verdicts = {key: change_of(key) for key in settings}
    assert CHANGES.keys() <= verdicts.keys()
    assert {*verdicts.values()} == {*Change}
    with pytest.raises(KeyError):
        change_of("hidden_states.new_setting")


def begun(tiny: Tiny, folder: Path, *more: str) -> Config:
    """A run that has begun in a folder."""
    folder.mkdir(exist_ok=True)
    cfg = tiny.config("eagle3", f"data.date={DATE}", *more)
    write_json(folder / "config.json", asdict(cfg) | {"identity": "ours", "of": {}})
    return cfg


REJECTED = [
    ((), ("hidden_states.bits=8",), "hidden_states.bits=None, not 8"),
    (("hidden_states.bits=8",), (), "hidden_states.bits=8, not None"),
    (
        ("hidden_states.bits=8",),
        ("hidden_states.bits=8", "hidden_states.mode=online"),
        "are rounded otherwise",
    ),
    ((), ("hidden_states.from=http://a:8000/v1",), "hidden_states.engines="),
    ((), ("loop.seed=7",), "loop.seed=0, not 7"),
    ((), ("drafter.depth=1",), "drafter.depth=2, not 1"),
    ((), ("budget.minutes=3",), "began without budget.minutes"),
]
CONTINUED = [
    ("hidden_states.prefetch=0", "hidden_states.root=elsewhere", "decode.prompts=9", "export=null"),
    ("hidden_states.mode=online", "loop.save_every=7", "budget.floor=3", "planning.alpha=.5"),
]


@pytest.mark.parametrize(("began", "now", "message"), REJECTED)
def test_a_setting_that_must_stay_is_named(
    tiny: Tiny, tmp_path: Path, began: tuple[str, ...], now: tuple[str, ...], message: str
) -> None:
    begun(tiny, tmp_path / "run", *began)
    with pytest.raises(UserError) as error:
        require_same_run(tmp_path / "run", tiny.config("eagle3", f"data.date={DATE}", *now))
    assert message in str(error.value) and "give another name=" in str(error.value)


@pytest.mark.parametrize("now", CONTINUED)
def test_a_setting_that_may_change_continues_the_run(
    tiny: Tiny, tmp_path: Path, now: tuple[str, ...]
) -> None:
    begun(tiny, tmp_path / "run")
    require_same_run(tmp_path / "run", tiny.config("eagle3", f"data.date={DATE}", *now))


def test_other_engines_continue_a_run_that_engines_began(tiny: Tiny, tmp_path: Path) -> None:
    begun(tiny, tmp_path / "run", "hidden_states.from=http://a:8000/v1")
    now = tiny.config("eagle3", f"data.date={DATE}", "hidden_states.from=http://b:8000/v1")
    require_same_run(tmp_path / "run", now)


def test_a_budget_that_was_left_does_not_rule_the_next_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C before the run has begun. The same command trains on the same texts; one with other
    settings decides again."""
    own = ["budget.minutes=0.001", "data.responses=target", "responses.batch=1"]

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def decided(*more: str) -> list[int]:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(pipeline, "initial_drafter", interrupted)
            root = f"responses.root={tmp_path / 'responses'}"
            tiny.job(tmp_path / "run", "ngram", *own, root, *more)
        return places_in(read_record(BudgetRecord, tmp_path / "run" / BUDGET).texts["responses"])

    first = decided("budget.floor=5")
    assert len(first) == 5
    assert decided("budget.floor=5") == first
    assert "what is decided" in " ".join(capsys.readouterr().out.split())
    assert len(decided("budget.floor=9")) == 9
    assert "was made for other settings" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("by_share", [False, True])
def test_no_damaged_bit_changes_the_day_of_a_run(
    tiny: Tiny, tmp_path: Path, by_share: bool
) -> None:
    """Each bit of the file, one after the other; before, one of them could change the date."""
    cfg = tiny.config("eagle3")
    dated = replace(cfg, data=replace(cfg.data, date=DATE))
    if by_share:
        note_beginning(tmp_path / BEGAN)
        date = (tmp_path / BEGAN).read_text().split()[0]
    else:
        note_date(dated.data.date, tmp_path)
        date = DATE
    written = (tmp_path / BEGAN).read_bytes()
    assert date_of_run(cfg.data.date, tmp_path) == date
    rejected = 0
    for bit in range(8 * len(written)):
        damaged = bytearray(written)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / BEGAN).write_bytes(damaged)
        try:
            assert date_of_run(cfg.data.date, tmp_path) == date  # white space at the end
        except UserError as error:
            assert "is damaged: delete it" in str(error)
            rejected += 1
    assert rejected >= 8 * (len(written) - 1)
    (tmp_path / BEGAN).write_text(f"{DATE}\n")  # as an earlier version wrote it
    assert date_of_run(cfg.data.date, tmp_path) == DATE


def test_another_run_s_config_beside_a_draft_is_not_believed(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`scripts/evaluate` measured on prompts that this draft's run had trained on."""
    cfg = begun(tiny, tmp_path / "run")
    target = load_target(TargetConfig(str(tiny.target), "float32", "cpu"))
    drafter = random_drafter(tiny.config("medusa").drafter, target, 0.1)
    best = tmp_path / "run" / "best"
    keys = ("gamma", "tree")
    for notes in ({"run": "ours"}, {}):  # an earlier version wrote no identity
        draft_checkpoint.write_draft(best, drafter, target, notes=notes)
        assert data_of_run(tmp_path / "run", best).path == cfg.data.path
        assert shape_of_run(tmp_path / "run", keys, "eagle3", best) is not None
    draft_checkpoint.write_draft(best, drafter, target, notes={"run": "another"})
    with pytest.raises(UserError, match=r"another run than the draft's.*give --prompts"):
        data_of_run(tmp_path / "run", best)
    assert known_data_of_run(tmp_path / "run", best) is None
    assert shape_of_run(tmp_path / "run", keys, "eagle3", best) is None
    assert "another run than the draft's" in " ".join(capsys.readouterr().err.split())


def test_every_draft_of_a_run_carries_its_identity(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    for family in ("ngram", "medusa"):
        tiny.job(tmp_path / family, family, "loop.epochs=1")
        identity = read_json(tmp_path / family / "config.json")["identity"]
        assert draft_checkpoint.read_card(tmp_path / family / "best").notes["run"] == identity
    assert json.loads((tmp_path / "ngram" / "config.json").read_text())["identity"]

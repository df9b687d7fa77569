"""A chat template that writes the date: a run that goes on another day is the same run.

Run alone: python -m pytest tests/train/test_date.py (about 15 s)
"""

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from specdec.errors import UserError
from tests.tiny import TEMPLATE, Tiny, compose, save_target
from tests.train.data.chats import CHATML, talk, tokenizer_of
from train import pipeline
from train.data import rendering
from train.data.conversations import DataConfig
from train.data.template import Chat
from train.folder import BEGAN, config_of, data_of_run

# the tiny tokenizer has no numbers
DATED = "{{ ['a', 'sun', 'moon', 'star', 'rain', 'wind'][strftime_now('%d') | int] }} " + TEMPLATE


def on(patch: pytest.MonkeyPatch, day: int) -> None:
    """Let a day of March be today."""

    class Day(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Day":
            return cls(2031, 3, day, 12, 30)

    patch.setattr(rendering, "datetime", Day)
    patch.setattr("train.continued.datetime", Day)


def test_a_date_that_is_given_is_the_templates_date() -> None:
    tokenizer = tokenizer_of("{{ strftime_now('%Y-%m-%d %H:%M') }}" + CHATML)
    for date, expected in (("2026-01-31", "2026-01-31 00:00"), ("2026-01-31T09:30", "09:30")):
        prompt = Chat(tokenizer, DataConfig(date=date).clock).prompt(talk("q"))
        assert expected in tokenizer.decode(prompt.ids)
    with pytest.raises(UserError, match=r"data\.date='tomorrow' is not a date"):
        DataConfig(date="tomorrow")


def test_a_run_goes_on_the_next_day(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training_alone: None
) -> None:
    """It is interrupted once its responses are written, before it has a config.json, and again
    after it was trained. No prompt is answered twice, and the texts are those of the first day."""
    target = save_target(tmp_path / "target", template=DATED)
    responses = tmp_path / "responses"
    more = [f"target.path={target}", "data.responses=target", f"responses.root={responses}"]
    cfg = compose(tiny.overrides("medusa", *more))
    folder = tmp_path / "run"

    def lines() -> list[str]:
        return sorted(x for f in responses.rglob("*.jsonl") for x in f.read_text().splitlines())

    with monkeypatch.context() as patch:
        on(patch, 3)
        patch.setattr(pipeline, "initial_drafter", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(cfg, folder)
    first = lines()
    assert first and not (folder / "config.json").exists()
    assert (folder / BEGAN).read_text().split()[0] == "2031-03-03T12:30:00"
    for day in (4, 5):
        with monkeypatch.context() as patch:
            on(patch, day)
            pipeline.run(cfg, folder)
        (folder / BEGAN).unlink()  # from now on config.json says it
        assert lines() == first
    assert config_of(folder)["data"]["date"] == "2031-03-03T12:30:00"
    assert data_of_run(folder).date == "2031-03-03T12:30:00"
    with monkeypatch.context() as patch:  # another run of that day asks for its own prompts
        on(patch, 5)
        patch.setattr(pipeline, "initial_drafter", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(cfg, tmp_path / "other")
    assert len(lines()) == 2 * len(first)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_run_of_an_older_version_began_when_its_config_was_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"data": {"path": "x"}, "loss": {}}))
    when = datetime(2030, 5, 6, 7, 8, 9)
    os.utime(tmp_path / "config.json", (when.timestamp(), when.timestamp()))
    assert config_of(tmp_path)["data"]["date"] == "2030-05-06T07:08:09"

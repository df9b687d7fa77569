"""Keys of the configuration that have another name now: each gives one line that names the new key.

.venv/bin/python -m pytest tests/train/test_renamed_keys.py
"""

import json
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UserError
from tests.tiny import Tiny, compose
from train.continued import change_of
from train.renamed_keys import RENAMED, RENAMED_VALUES, renamed_key
from train.run_config import Arguments, Config, composed

KEYS = {  # a key of each group in the table
    "answers": "seed",
    "features": "bits",
    "objective": "depth_decay",
    "stage": "new_tokens",
}


def key_of(old: str) -> str:
    """A key that the row of the table is about: the row's own, or a key of its group."""
    return f"{old}.{KEYS[old]}" if old in KEYS else old


def rejected(overrides: list[str]) -> str:
    """The message of the error that the configuration gives, which has one line."""
    with pytest.raises(UserError) as error:
        compose(overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_on_the_command_line_names_the_new_one(old: str) -> None:
    key = key_of(old)
    new = renamed_key(key)
    for prefix in ("", "+", "++"):
        message = rejected(["drafter=eagle3", f"{prefix}{key}=7"])
        assert message == f"configuration: {key} is now {new}: give {new}=7"
    assert rejected([f"~{key}"]) == f"configuration: {key} is now {new}: give {new}"


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_in_a_file_names_the_new_one(old: str, tmp_path: Path) -> None:
    key = key_of(old)
    inner: Any = 7
    for name in reversed(key.split(".")):
        inner = {name: inner}
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text(f"# @package _global_\n{json.dumps(inner)}\n")
    with pytest.raises(UserError) as error:
        composed_with(tmp_path, "experiment=mine")
    message = str(error.value)
    assert "\n" not in message
    named = next(k for k in (key, old, old.partition(".")[0]) if f" {k} is now " in message)
    new = renamed_key(named)
    assert message == f"configuration: in experiment/mine: {named} is now {new}: give {new}"


def composed_with(folder: Path, *overrides: str) -> Config:
    asked = Arguments.parsed([f"--config-dir={folder}", *overrides])
    return composed(asked.overrides, asked)


@pytest.mark.parametrize("old", [old for old in RENAMED if "." not in old])
def test_an_old_group_names_the_new_one(old: str, tmp_path: Path) -> None:
    new = RENAMED[old]
    for prefix in ("", "+"):
        message = rejected([f"{prefix}{old}=kl"])
        assert message == f"configuration: {old} is now {new}: give {new}=kl"
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text(f"# @package _global_\ndefaults:\n  - override /{old}: kl\n")
    with pytest.raises(UserError) as error:
        composed_with(tmp_path, "experiment=mine")
    message = f"configuration: in experiment/mine: {old} is now {new}: give {new}"
    assert str(error.value) == message


@pytest.mark.parametrize("old", ["answers.from", "features.from"])
def test_the_old_names_of_engines_name_the_new_ones(old: str) -> None:
    new = old.replace("answers", "responses").replace("features", "hidden_states")
    message = rejected([f"{old}=http://host:8000/v1"])
    assert message == f"configuration: {old} is now {new}: give {new}=http://host:8000/v1"


@pytest.mark.parametrize(
    ("new", "was", "now"),
    [(new, was, now) for new, values in RENAMED_VALUES.items() for was, now in values.items()],
)
def test_an_old_value_is_given_as_the_new_one(new: str, was: str, now: str) -> None:
    old = next(old for old, name in RENAMED.items() if name == new)
    said = f"configuration: {old} is now {new}: give {new}={now}"
    assert rejected([f"{old}={was}"]) == said
    assert rejected([f"{old}='{was}'"]) == said
    assert rejected([f"{old}={was}, {was}"]) == f"{said},{now}"


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_in_the_record_of_a_run_names_the_new_one(
    old: str, tiny: Tiny, tmp_path: Path
) -> None:
    """The run is not continued."""
    key = key_of(old)
    inner: Any = 7
    for name in reversed(key.split(".")):
        inner = {name: inner}
    (tmp_path / "config.json").write_text(json.dumps({"name": "x"} | inner))
    with pytest.raises(UserError) as error:
        tiny.job(tmp_path, "medusa")
    message = str(error.value)
    assert "\n" not in message
    assert f"config.json has the key {key}, which is now {renamed_key(key)}:" in message


def test_the_table_names_keys_that_exist() -> None:
    """No old key is a key today, and each new one is."""
    cfg = compose(["drafter=eagle3"])
    for old, new in RENAMED.items():
        assert not known(cfg, old), old
        assert known(cfg, new), new
        assert renamed_key(new) is None, new
    assert renamed_key("loss.terms") is None and renamed_key("answerss") is None


def known(cfg: Any, key: str) -> bool:
    """Whether a configuration has a key."""
    for name in key.split("."):
        if not is_dataclass(cfg) or not hasattr(cfg, name):
            return False
        cfg = getattr(cfg, name)
    return True


def test_continued_runs_know_the_new_keys() -> None:
    for new in RENAMED.values():
        if new.partition(".")[0] != "hidden_states" or "." in new:
            change_of(new)

"""Whatever is written as an override, it composes or is told in one line.

Run alone: python -m pytest tests/train/test_random_configs.py (about 20 s)

Overrides are drawn from the fields of the dataclasses themselves, so that a new setting is tried
without being added here: values of its type, extremes of it, and values of other types.
"""

import dataclasses
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from train.run_config import CONF, Config, composed, register

TEXT = ["", "''", "' '", "null", "x", "a=b", "cpu", "/proc/x", "é", "'\\\\'", "[", "${name}", "???"]
WHOLE = ["0", "1", "-1", "2", "3", "128", "4294967295", "4294967296", "1e9", "true", "9" * 25]
WHOLE += ["9" * 400, "2.5"]
REAL = ["0", "0.0", "1", "-1", "0.5", "1.5", "1e-30", "1e30", "inf", "-inf", "nan", "1e400"]
REAL += ["9" * 400, "1e-38"]
LISTS = [
    "[]",
    "[0]",
    "[[0]]",
    "[1e-38]",
    "[1,1]",
    "[0,0.5]",
    "[-1]",
    "[nan]",
    "[[0],[0,0]]",
    "[[0,0]]",
    "[a]",
]
LISTS += ["[[0]]", "[1e-38]"]
FLAGS = ["true", "false", "yes", "0", "2", "null"]


def kind_of(hint: Any) -> type:
    """The plain type of a field's annotation: int of `int | None`, list of `list[int]`."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(a for a in get_args(hint) if a is not types.NoneType)
    return get_origin(hint) or hint


def settings_of(config: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Every setting of a configuration by its dotted key, with its type."""
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from settings_of(hints[field.name], f"{prefix}{field.name}.")
        elif field.name != "drafter":
            yield f"{prefix}{field.name}", kind_of(hints[field.name])


GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
ODD = st.text("ab{}[],:=$ '\"0", max_size=6)
VALUES = {int: WHOLE, float: REAL, bool: FLAGS, str: TEXT, list: LISTS}
OUTCOMES: Counter[str] = Counter()
ALL = list(settings_of(Config))
OF_DRAFTERS = {name: list(settings_of(kind.Config, "drafter.")) for name, kind in DRAFTERS.items()}


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    """A drafter, and one or two settings: mostly of the right type, else of any, else misspelt."""
    name = draw(st.sampled_from(sorted(DRAFTERS)))
    chosen = [f"drafter={name}"]
    for _ in range(draw(st.integers(1, 2))):
        key, kind = draw(st.sampled_from(ALL + 3 * OF_DRAFTERS[name]))
        of = (
            VALUES.get(kind, TEXT)
            if draw(st.integers(0, 7))
            else draw(st.sampled_from(list(VALUES.values())))
        )
        if not draw(st.integers(0, 15)):
            key = draw(st.sampled_from(GROUPS))
        if not draw(st.integers(0, 15)):
            key = draw(st.sampled_from(["+", "~", "++"])) + key
        if not draw(st.integers(0, 15)):
            key += "s"
        chosen.append(f"{key}={draw(st.sampled_from(of) | ODD)}")
    return chosen


@pytest.fixture(scope="module", autouse=True)
def hydra() -> None:
    register()


def test_the_settings_are_found() -> None:
    keys = dict(ALL)
    assert keys["loop.rows"] is int and keys["optim.lr"] is float and keys["decode.paths"] is list
    assert all(dict(found)["drafter.depth"] is int for found in OF_DRAFTERS.values())


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True)
@given(given=overrides())
def test_whatever_is_configured(given: list[str]) -> None:
    """Only the errors that `train.py` tells in one line come out, each of them in one line; what
    is accepted is a configuration that says what it was given."""
    try:
        config = composed(given)
    except UserError as error:
        assert str(error) and "\n" not in str(error).strip() and len(str(error)) < 2000
        OUTCOMES["told"] += 1
        return
    OUTCOMES["accepted"] += 1
    assert isinstance(config, Config)
    assert "???" not in repr(config)


def test_both_outcomes_were_seen() -> None:
    """Or the generator above makes nothing but nonsense, or nothing but sense."""
    if OUTCOMES:  # nothing where this test runs alone, or in another process
        assert min(OUTCOMES["told"], OUTCOMES["accepted"]) > 10, OUTCOMES

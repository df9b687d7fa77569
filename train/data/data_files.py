"""Finds the files of a split in a folder, by the rules of the `datasets` library for a copy of a
hub data set or for a folder that it has saved."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.compat import glob_expression, split_patterns
from specdec.errors import UserError, first_line, require
from specdec.files import read_json
from train.data.conversations import DataConfig, Tally

# files of the datasets library and of models that are no records
NO_DATA = (
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
    *("config.json", "dummy_data.zip"),
)
CACHED = re.compile(r"(cache|tmp)[-_\w]*\.arrow")  # leftovers of `map` and `filter` in a saved set
# a part of a split, as `push_to_hub` names it, and as the hub's own conversion to parquet does
PART = re.compile(r"(?:.*/)?(\w+(?:\.\w+)*)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.\w+(?:\.\w+)?")
CONVERTED = re.compile(r"[^/]+/(?:partial-)?([^/]+)/\d{4}\.parquet")


def split_files(
    cfg: DataConfig, kind: Callable[[Path], bool], kinds: Sequence[str], tally: Tally
) -> list[Path]:
    """The files of the folder `cfg.path` with the records of `cfg.split` and `cfg.subset`, sorted;
    files of other splits, or of none, are counted as unread. `kind` is a test for the file types
    `kinds`. Raises UserError if there is no such subset, split or file."""
    folder = Path(cfg.path)
    if (folder / "dataset_dict.json").is_file():  # several splits, as datasets saves them
        _require_no_subset(cfg)
        splits = sorted(x.name for x in folder.iterdir() if (x / "state.json").is_file())
        _require_split(cfg, cfg.path, splits)
        folder /= cfg.split
    elif (folder / "state.json").is_file():  # one split, which may have its name
        _require_no_subset(cfg)
        name = _json_of(folder / "state.json").get("_split")
        _require_split(cfg, cfg.path, [str(name or "train")])
    else:
        return _of_hub_copy(cfg, folder, kind, kinds, tally)
    candidates = _candidates(folder, kind)
    require(bool(candidates), f"{folder}: no {', '.join(kinds)} file in this folder")
    return list(candidates.values())


def _of_hub_copy(
    cfg: DataConfig,
    folder: Path,
    kind: Callable[[Path], bool],
    kinds: Sequence[str],
    tally: Tally,
) -> list[Path]:
    """The files of a split in a folder that may be the copy of a hub data set."""
    subsets, patterns = _subsets(folder), dict[str, list[str]]()
    where, subset = cfg.path, cfg.subset
    if subset is None and len(subsets) > 1:
        chosen = [name for name, x in subsets.items() if x.get("default") or name == "default"]
        require(
            bool(chosen), f"{cfg.path} has the subsets {_listed(subsets)}: give one as data.subset"
        )
        subset = chosen[0]
    elif subset is None and subsets:
        subset = next(iter(subsets))
    if subset is not None and subset in subsets:
        folder /= str(subsets[subset].get("data_dir") or "")
        patterns = _patterns(subsets[subset].get("data_files"))
    elif subset is not None:
        folders = [x.name for x in folder.iterdir() if x.is_dir() and _candidates(x, kind)]
        plain = Path(subset).name == subset
        require(
            not subsets and plain and subset in folders,
            f"data.subset={subset!r}: {cfg.path} has "
            + (f"the subsets {_listed(subsets or folders)}" if subsets or folders else "none")
            + ": give one of them, or leave data.subset out",
        )
        folder /= subset
    if cfg.subset is not None:
        where = f"the subset {cfg.subset} of {cfg.path}"
    candidates = _candidates(folder, kind)
    require(bool(candidates), f"{folder}: no {', '.join(kinds)} file in this folder")
    splits = _splits(list(candidates), patterns)
    _require_split(cfg, where, list(splits))
    for split, names in splits.items():
        for name in names if split != cfg.split else ():
            tally.count(tally.unread, f"a file of the split {split!r}", name)
    for name in candidates.keys() - set().union(*splits.values()):
        tally.count(tally.unread, "a file that belongs to no split", name)
    return [candidates[name] for name in splits[cfg.split]]


def _candidates(folder: Path, kind: Callable[[Path], bool]) -> dict[str, Path]:
    """The files of a folder that may hold records, by their names within it, without hidden files,
    files that the datasets library cached, and files that the `state.json` beside them does not
    list."""
    candidates, listed = dict[str, Path](), dict[Path, set[str] | None]()
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        hidden = any(part.startswith((".", "__")) for part in inside.parts)
        if hidden or file.name in NO_DATA or not kind(file) or not file.is_file():
            continue
        if file.suffix == ".arrow":
            if file.parent not in listed:
                listed[file.parent] = _listed_by_state(file.parent)
            names = listed[file.parent]
            if CACHED.fullmatch(file.name) if names is None else file.name not in names:
                continue
        candidates[inside.as_posix()] = file
    return candidates


def _listed_by_state(folder: Path) -> set[str] | None:
    """The files of a saved data set; None if the folder is none."""
    if not (folder / "state.json").is_file():
        return None
    files = _json_of(folder / "state.json").get("_data_files")
    names = [x.get("filename") for x in files if isinstance(x, dict)] if files else []
    missing = [name for name in names if not (folder / str(name)).is_file()]
    require(
        not missing,
        f"{folder}: state.json lists {', '.join(map(str, missing[:3]))}, which is missing: copy "
        "the whole folder again",
    )
    return {str(name) for name in names}


def _json_of(path: Path) -> dict[str, Any]:
    value = read_json(path)
    require(isinstance(value, dict), f"{path} is not a file of the datasets library")
    return dict(value)


def _subsets(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The subsets that the README.md of a hub data set names, with their settings."""
    if not (folder / "README.md").is_file():
        return {}
    from datasets.utils.metadata import MetadataConfigs  # slow to import, seldom used
    from huggingface_hub import DatasetCard

    try:
        card = DatasetCard.load(folder / "README.md", ignore_metadata_errors=True)
        return dict(MetadataConfigs.from_dataset_card_data(card.data))
    except Exception as error:  # no YAML, or no list of subsets
        raise UserError(
            f"{folder / 'README.md'}: its header does not name the subsets of a data set "
            f"({first_line(error)[:80]}): fix the header, or remove the file"
        ) from error


def _patterns(data_files: Any) -> dict[str, list[str]]:
    """The file name patterns of a subset for each split; {}: the library's defaults."""
    if not data_files:
        return {}
    from datasets.data_files import sanitize_patterns

    return {
        split: [pattern.removeprefix("./") for pattern in patterns]
        for split, patterns in sanitize_patterns(data_files).items()
    }


def _splits(names: Sequence[str], patterns: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The files of each split among the given names in a folder."""
    for form in (PART, CONVERTED) if not patterns else ():
        parts = [form.fullmatch(name) for name in names]
        if all(parts):
            splits = dict[str, list[str]]()
            for name, part in zip(names, parts, strict=True):
                splits.setdefault(part[1] if part else "", []).append(name)
            return splits

    def resolved(pattern: str) -> list[str]:
        expression = glob_expression(pattern)
        return [name for name in names if re.match(expression, name)]

    by_split = patterns or split_patterns(resolved)
    files_of = {
        split: sorted({name for pattern in some for name in resolved(pattern)})
        for split, some in by_split.items()
    }
    return {split: files for split, files in files_of.items() if files}


def _require_no_subset(cfg: DataConfig) -> None:
    require(
        cfg.subset is None,
        f"data.subset={cfg.subset!r}: {cfg.path} was saved by the datasets library, without "
        "subsets: leave data.subset out",
    )


def _require_split(cfg: DataConfig, where: str, splits: Sequence[str]) -> None:
    several = f"the splits {_listed(splits)}" if len(splits) > 1 else f"the split {_listed(splits)}"
    require(
        cfg.split in splits,
        f"data.split={cfg.split!r}: {where} has {several if splits else 'no split'}: give one as "
        "data.split",
    )


def _listed(names: Any) -> str:
    return ", ".join(sorted(map(str, names)))


def require_whole(cfg: DataConfig) -> None:
    """Raise UserError if a subset, or a split other than `train`, is requested for a single file;
    the datasets library calls all of it `train`."""
    wrong = [f"data.subset={cfg.subset!r}"] if cfg.subset is not None else []
    wrong += [f"data.split={cfg.split!r}"] if cfg.split != "train" else []
    require(
        not wrong,
        f"{' and '.join(wrong)}: {cfg.path} is a single file, which has neither subsets nor splits"
        ": leave it out, or give the folder",
    )

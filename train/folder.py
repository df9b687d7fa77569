"""The folder of a run: its records, and its lock."""

import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from specdec.decoding.config import DecodeConfig
from specdec.errors import Unreadable, UserError, require
from specdec.files import (
    folder_for,
    read_json,
    record,
    require_file,
    sealed_lines,
    take_lock,
    write_json,
    write_whole,
)
from specdec.formats import draft_checkpoint
from specdec.integrity import of_value, sealed
from specdec.progress import tell
from specdec.targets.prompt_rendering import CHAT_TEMPLATE
from train.budget import BUDGET, texts_of_run
from train.data.conversations import DataConfig
from train.data.rendering import own_chat_template
from train.data.response_files import RESPONSES_READ
from train.data.sequences import Document, Prompt
from train.data.split import trained_openings
from train.run_documents import RunDocuments
from train.tracking import files_of_trackers

# the setting of runs from before there was a validation part
WITHOUT_VALIDATION: dict[str, Any] = {"validation": 0.0}
# and of runs from before the target decided these
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 192}
HELD_OUT = "held-out-prompts.jsonl"  # the file with the decoder's prompts, as the run read them
KEPT = 4000  # the most prompts in it
TEMPLATE_OF = "chat template"  # its digest in config.json, among what a run reads
BEGAN = "began"  # the file that says when a run began to answer prompts


def is_early(name: str) -> bool:
    """Whether a run may write a file of this name before it has begun."""
    names = "|".join(map(re.escape, (BUDGET, RESPONSES_READ, HELD_OUT, *files_of_trackers())))
    return bool(re.fullmatch(rf"\.?({names})(\.[0-9a-f]{{32}})?|\.lock|shares", name))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a run's folder and lock it during the block. Raises UserError if another process has
    locked it. If a UserError ends the block before the run has begun (when it answers prompts or
    has a config.json), the folder is restored, or removed if it is new."""
    lock = folder / ".lock"
    with folder_for(folder):
        before = {lock} & {*folder.iterdir()}
        if before:
            require_file(lock)
        with lock.open("w", encoding="utf-8") as file:
            try:
                if not take_lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
                    tell(
                        f"{folder} is on a file system without locks, where two runs in one folder "
                        "cannot be told apart: start only one"
                    )
            except BlockingIOError as error:
                raise UserError(
                    f"another process is running in {folder}: wait for it, or give another name="
                ) from error
            before |= {*folder.iterdir()} - {lock}
            try:
                yield
            except UserError:
                if not ((folder / BEGAN).exists() or (folder / "config.json").exists()):
                    new = {*folder.iterdir()} - before
                    _remove({path for path in new if is_early(path.name)})
                raise


def _remove(paths: Collection[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def require_same_texts(folder: Path, of: dict[str, str]) -> None:
    """Like `require_same_run`, for the contents of the data and the models."""
    for name, was in config_of(folder).get("of", of).items():
        require(
            was == of.get(name),
            f"{folder}: the {name} changed since this run began: give another name=, or delete "
            "that folder",
        )


def describe(
    folder: Path,
    identity: str,
    settings: Mapping[str, Any],
    drafts: Mapping[str, str | None],
    fingerprint: str,
    texts: RunDocuments,
    chat_template: str | None = None,
) -> None:
    """Write the run's config.json: its `settings` and its inputs, namely the target with this
    fingerprint, the texts, the text of an own chat template, and `drafts` by their role in the run.
    If the folder holds a run of other texts or models, raise UserError instead. Until here, an
    error leaves the folder free for another run."""
    of = {"target": fingerprint, "training data": digest(texts.train)}
    of["held-out data"] = digest(texts.validation)
    of["held-out prompts"] = of_value([prompt.ids.tolist() for prompt in texts.prompts])
    if chat_template is not None:
        of[TEMPLATE_OF] = of_value(chat_template)
    for name, draft in drafts.items():
        if draft is not None:
            of[name] = draft_checkpoint.digest_of_draft(draft)
    require_same_texts(folder, of)
    described = {**settings, "of": of, "records": texts.records, "identity": identity}
    described["data"] = described["data"] | {
        "held_out": texts.share,
        "validation": texts.validation_share,
    }
    note_prompts(folder, identity, texts)
    if texts.counts is not None:
        described["read"] = asdict(texts.counts)
    write_json(folder / "config.json", described)


def chat_template_of_run(cfg: DataConfig, folder: Path) -> str | None:
    """The text of `data.chat_template`; None if the tokenizer's template is used. Raises UserError
    as `own_chat_template` does, and if the run in this folder began with another text."""
    text = own_chat_template(cfg)
    known = config_of(folder).get("of", {}).get(TEMPLATE_OF)
    require(
        known is None or text is None or known == of_value(text),
        f"{folder}: data.chat_template={cfg.chat_template} changed since this run began: give "
        f"another name=, or put back the text in {folder / CHAT_TEMPLATE}",
    )
    return text


def note_chat_template(folder: Path, text: str | None) -> None:
    """Record the text of a run's own chat template in its folder."""
    if text is not None:
        write_whole(folder / CHAT_TEMPLATE, text)


def note_prompts(folder: Path, identity: str, texts: RunDocuments) -> None:
    """Record the decoder's prompts of a run, so that later evaluations measure on the same ones
    without reading the data. Of many, the first are kept."""
    parts = {"test": texts.prompts, "validation": texts.validation_prompts}
    lines: list[dict[str, Any]] = [{name: len(prompts) for name, prompts in parts.items()}]
    for name, prompts in parts.items():
        for prompt in prompts[: KEPT // 2]:
            lines.append(asdict(prompt) | {"ids": prompt.ids.tolist(), "part": name})
    written = (json.dumps(sealed(line, identity)) for line in lines)
    write_whole(folder / HELD_OUT, "".join(f"{line}\n" for line in written))


def noted_prompts(folder: Path, limit: int) -> tuple[list[Prompt], list[Prompt]] | None:
    """The prompts of the test and of the validation part of the run in this folder; None if it did
    not record them, if the file is damaged or not that of the run, or if it holds fewer than
    `limit` because there were more."""
    path, identity = folder / HELD_OUT, config_of(folder).get("identity")
    if not path.is_file() or not isinstance(identity, str):
        return None
    lines, damaged = sealed_lines(path, (), identity)
    if damaged or not lines or not {"test", "validation"} <= lines[0].keys():
        return None
    parts: dict[str, list[Prompt]] = {"test": [], "validation": []}
    try:
        for line in lines[1:]:
            part = parts[line.pop("part")]
            earlier = tuple((role, text) for role, text in line.pop("earlier"))
            ids, notes = np.array(line.pop("ids"), np.int32), tuple(line.pop("notes"))
            part.append(Prompt(**line, ids=ids, earlier=earlier, notes=notes))
    except (KeyError, TypeError, ValueError):  # written by another version
        return None
    for name, prompts in parts.items():
        if len(prompts) < min(lines[0][name], limit if name == "test" else KEPT // 2):
            return None
    return parts["test"], parts["validation"]


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a run's folder, in the form of today's version; empty if there is none.
    Raises UserError if the file is damaged."""
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        return _upgraded(dict(read_json(path)), datetime.fromtimestamp(path.stat().st_mtime))
    except Unreadable:
        raise
    except UserError as error:
        raise UserError(f"{error}: put it back, or give another name=") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: put it back, or give another name=") from error


def require_run_of(draft: Path, described: Any) -> None:
    """Raise UserError if a run's config.json, as `described`, is not that of the run that trained a
    draft: both have the identity of their run. Drafts and runs of earlier versions have none."""
    theirs = draft_checkpoint.read_card(draft).notes.get("run")
    identity = described.get("identity") if isinstance(described, dict) else None
    require(
        None in (theirs, identity) or theirs == identity,
        f"the config.json beside {draft} belongs to another run than the draft's",
    )


def data_of_run(folder: Path, draft: Path | None = None) -> DataConfig:
    """A run's data settings, limited to the records that it read (if recorded), so that the
    held-out side stays the same. Raises UserError if the folder holds no run or is damaged, or if
    it is not the run of this `draft`."""
    try:
        described = read_json(folder / "config.json")
        if draft is not None:
            require_run_of(draft, described)
        data = WITHOUT_VALIDATION | dict(described["data"])
        # of shuffled data, these records are not those that the conversations come from
        if (read := described.get("records")) is not None and not data.get("shuffle"):
            data |= {"limit": None, "records": read}
        return record(DataConfig, data, "data")
    except (UserError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder} has no readable config.json of a run, so its held-out prompts are unknown "
            f"({error}): give --prompts"
        ) from error


def known_data_of_run(folder: Path, draft: Path | None = None) -> DataConfig | None:
    """`data_of_run`. If the folder holds no run, or not that of the draft: settings with the
    template arguments on the draft's card, or None if it has none."""
    try:
        return data_of_run(folder, draft)
    except UserError:
        arguments = draft_checkpoint.read_card(draft).target.rendering.arguments if draft else {}
        return DataConfig(template_args=arguments) if arguments else None


def origin_of_prompts(
    folder: Path, tokenizer: Any, openings: Sequence[str], draft: Path | None = None
) -> str:
    """A sentence about a user's own prompts and the draft of this run: how many of them it was
    trained on, by their opening prompts, as far as the folder and the data show."""
    try:
        data, path = data_of_run(folder, draft), folder / BUDGET
        require(
            data.decoding_log is None,
            "a log does not say from which prompts its speculation steps are",
        )
        read = texts_of_run(path) if path.exists() else None
        trained = trained_openings(data, tokenizer, openings, read)
    except (UserError, KeyError, TypeError):
        return "prompts of your own, on which the draft may have been trained"
    count = sum(opening in trained for opening in openings)
    return f"prompts of your own, of which the draft was trained on {count or 'none'}"


def shape_of_run(
    folder: Path, keys: Sequence[str], family: str, draft: Path | None = None
) -> dict[str, Any] | None:
    """The run's decoding settings that define the draft topology, for a draft of this method in its
    folder: the run's own draft, or its hybrid, whose chains have their own length. None if the
    folder holds no run, or not that of the `draft`. Raises UserError for a damaged file."""
    path = folder / "config.json"
    if not path.exists():
        return None
    try:
        described = dict(read_json(path))
        if draft is not None:
            try:
                require_run_of(draft, described)
            except UserError as error:
                tell(f"{error}: ignored")
                return None
        if not isinstance(decode := described.get("decode"), dict):
            return None
        shape = {key: decode[key] for key in keys if key in decode}
        if shape.get("tree") is None and described["drafter"]["name"] != family:
            shape["gamma"] = None
        record(DecodeConfig, shape, "decode")
    except (UserError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: the shape that this run drafted is not readable ({error}): give --gamma"
        ) from error
    return shape


def digest(documents: Sequence[Document]) -> str:
    """A short hash of documents, their masks and, if they have any, their speculation steps and
    weights."""
    digest = hashlib.blake2b(digest_size=12)
    for document in documents:
        digest.update(json.dumps([document.ids.tolist(), document.mask.tolist()]).encode())
        if document.speculation_steps is not None:
            digest.update(document.speculation_steps.tobytes())
        if document.weight is not None:
            digest.update(document.weight.astype("<f4").tobytes())
    return digest.hexdigest()


def _upgraded(written: dict[str, Any], when: datetime) -> dict[str, Any]:
    """A run's config.json, written `when` it was, in the form of today's version. Older ones had no
    validation part, and lack the date of the run and some settings of its sampling."""
    if isinstance(responses := written.get("responses"), dict):
        written = written | {"responses": GREEDY | responses}
    if isinstance(data := written.get("data"), dict):
        data = WITHOUT_VALIDATION | data
        written = written | {"data": data | {"date": data.get("date") or _text(when)}}
    return written


def _text(when: datetime) -> str:
    return when.isoformat(timespec="seconds")

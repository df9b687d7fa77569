"""The file that records a draft's training prompts and is copied with it: 32 bytes a prompt.

Each opening prompt has a key, the hash by which the split places it, and a sketch (b-bit minwise
hashing, Li and König 2010), from which near duplicates are estimated: two prompts agree at about as
large a share of its 24 places as their sets of word 3-shingles overlap. Prompts that the split
treats as near duplicates mostly agree at 16 places or more. For conversations with the same
opening, the file also has the texts by which the split placed them (`told_apart`).
"""

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from specdec.errors import UserError, require
from specdec.files import new_file
from specdec.formats.draft_checkpoint import TRAINED_ON
from specdec.integrity import Damaged
from specdec.progress import console
from train.data.near_duplicates import NEAR, shingles_of
from train.data.sequences import Document, Prompt
from train.data.split import DataSplit, place_of

PLACES = 24  # number of places in a sketch
AGREEING = PLACES * NEAR // 100  # places in which near duplicates agree, at least
ALL_NEAR = 0.9  # share of prompts above which what is near in all of them tells nothing
T = TypeVar("T", Document, Prompt)
_DRAW = np.random.default_rng(0)  # the same in all versions: files are compared across them
_FACTOR = _DRAW.integers(1, 2**32, PLACES, dtype=np.uint64) | np.uint64(1)
_SHIFT = _DRAW.integers(0, 2**32, PLACES, dtype=np.uint64)
_LOW = np.uint64(2**32 - 1)


def origin_of(text: str) -> bytes:
    """The key and the sketch of an opening prompt."""
    return place_of(text).to_bytes(8, "big") + _sketch(text).tobytes()


def _sketch(text: str) -> NDArray[np.uint8]:
    shingles = np.fromiter(shingles_of(text), dtype=np.uint64)
    least = ((shingles[:, None] * _FACTOR + _SHIFT) & _LOW).min(0)
    mixed: NDArray[np.uint8] = ((least * np.uint64(0x9E3779B1) & _LOW) >> np.uint64(24)).astype(
        np.uint8
    )
    return mixed


@dataclass(frozen=True)
class TrainedOn:
    """The conversations of all stages of a draft's training. It is not `complete` if a stage left
    no such file, or trained on a log, which does not contain the opening prompts. `earlier_N` marks
    those of stages before the last."""

    keys_N: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    sketches_NC: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, PLACES), np.uint8))
    complete: bool = True
    earlier_N: NDArray[np.bool_] | None = None  # None: nothing

    @classmethod
    def of_texts(cls, texts: Sequence[Document | Prompt]) -> "TrainedOn":
        asked = {text.opening for text in texts} | {text.placed for text in texts}
        origins = sorted(map(origin_of, asked - {""}))
        whole = np.frombuffer(b"".join(origins), np.uint8).reshape(-1, 8 + PLACES)
        keys_N = whole[:, :8].copy().view(">u8")[:, 0].astype(np.uint64)
        keys_N, first_N = np.unique(keys_N, return_index=True)
        return cls(keys_N, whole[first_N, 8:], all(text.opening for text in texts))

    def joined(self, other: "TrainedOn") -> "TrainedOn":
        """The union of two stages."""
        keys_N, first_N = np.unique(np.concatenate([self.keys_N, other.keys_N]), return_index=True)
        sketches_NC = np.concatenate([self.sketches_NC, other.sketches_NC])[first_N]
        return TrainedOn(keys_N, sketches_NC, self.complete and other.complete)

    def after(self, earlier: "TrainedOn") -> "TrainedOn":
        """This stage together with those before it."""
        both = self.joined(earlier)
        return replace(both, earlier_N=np.isin(both.keys_N, earlier.keys_N))

    @property
    def before(self) -> "TrainedOn":
        """The part from stages before the last."""
        if self.earlier_N is None:
            return TrainedOn()
        return TrainedOn(self.keys_N[self.earlier_N], self.sketches_NC[self.earlier_N])

    def exactly(self, origins: Sequence[bytes]) -> list[bool]:
        """A flag for each of `origins` that was trained on, word for word."""
        known = {*self.keys_N.tolist()}
        return [int.from_bytes(origin[:8], "big") in known for origin in origins]

    def nearly(self, origins: Sequence[bytes]) -> list[bool]:
        """A flag for each of `origins` that was trained on, or has a near duplicate that was. If
        nearly all have one, they share an instruction, and only exact matches count."""
        exactly = self.exactly(origins)
        near = [self._near(origin) for origin in origins]
        others = sum(there and not same for there, same in zip(near, exactly, strict=True))
        if others > ALL_NEAR * len(origins):
            return exactly
        return [there or same for there, same in zip(near, exactly, strict=True)]

    def _near(self, origin: bytes) -> bool:
        sketch = np.frombuffer(origin[8:], np.uint8)
        agreeing_N = (self.sketches_NC == sketch).sum(1)
        return bool((agreeing_N >= AGREEING).any())

    def write(self, folder: Path) -> None:
        """Write the file into a folder: of a draft, its run, or its export."""
        with new_file(folder / TRAINED_ON) as partial, partial.open("wb") as file:
            earlier_N = (
                np.zeros(len(self.keys_N), bool) if self.earlier_N is None else self.earlier_N
            )
            np.savez(
                file,
                keys=self.keys_N,
                sketches=self.sketches_NC,
                complete=np.array(self.complete),
                earlier=np.packbits(earlier_N),
            )


def trained_on(draft: Path) -> TrainedOn | None:
    """The training prompts of the draft in this folder; None if neither this folder nor that of its
    run records them. Raises Damaged for a file that cannot be read."""
    for path in (draft / TRAINED_ON, draft.parent / TRAINED_ON):
        if not path.is_file():
            continue
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                count = len(file["keys"])
                earlier_N = np.unpackbits(file["earlier"], count=count).astype(bool)
                known = file["keys"], file["sketches"], bool(file["complete"])
                record = TrainedOn(*known, earlier_N)
            if record.sketches_NC.shape != (*record.keys_N.shape, PLACES):
                raise ValueError("its shapes do not fit")
        except (ValueError, KeyError, EOFError, BadZipFile) as error:
            raise Damaged(f"{path} is damaged ({error}): copy the draft again") from error
        return record
    return None


def before_this_stage(drafts: Collection[Path]) -> TrainedOn:
    """The training prompts, in all stages, of the drafts that a run starts from or contains."""
    known = [trained_on(draft) for draft in drafts]
    stages = [one if one is not None else TrainedOn(complete=False) for one in known]
    return reduce(TrainedOn.joined, stages, TrainedOn())


def without_trained_on(split: DataSplit[Any], drafts: Collection[Path]) -> None:
    """Remove from the held-out parts of a split the training prompts of the drafts that a run
    starts from, with near duplicates: the draft would be measured and selected on known texts.
    Raises UserError if no prompt remains to measure on."""
    if not drafts:
        return
    names, earlier = " and ".join(map(str, drafts)), before_this_stage(drafts)
    if not earlier.complete:
        console.print(
            f"{names} has no complete record of its training data: held-out prompts may be in it"
        )
    before = len(split.test)
    leave_out(split, earlier, names)
    if gone := before - len(split.test):
        console.print(
            f"{gone} of {before} held-out texts were trained on by {names}, or are near "
            "duplicates of such texts: they are neither measured nor selected on"
        )


def leave_out(split: DataSplit[Any], earlier: TrainedOn, names: str) -> None:
    """`without_trained_on`, given the record of the drafts with these `names`. The held-out side is
    judged as a whole, so that all its parts are treated alike. If all of it has openings like those
    trained on, only conversations whose distinguishing texts were trained on (`told_apart`) are
    removed."""
    if not len(earlier.keys_N) or not (split.test and split.prompts):
        return
    parts = split.test, split.validation, split.prompts, split.validation_prompts
    held_out = [text for item in split.held_out for text in _texts(item)]
    left: list[list[Any]] = []
    for text_of in (attrgetter("opening"), attrgetter("placed")):
        asked = sorted({text_of(text) for text in held_out})
        seen = earlier.nearly([origin_of(text) for text in asked])
        known = {text for text, there in zip(asked, seen, strict=True) if there}
        left = [
            [item for item in part if all(text_of(x) not in known for x in _texts(item))]
            for part in parts
        ]
        if left[0] and left[2]:
            break
    require(
        bool(left[0] and left[2]),
        f"all held-out prompts were trained on by {names}: give other data, or the data.held_out "
        "and data.validation with which it was trained",
    )
    split.test, split.validation, split.prompts, split.validation_prompts = left
    if split.validation_share and not split.validation:
        split.validation, split.validation_share = split.test, 0.0


def _texts(item: Any) -> list[Any]:
    """The texts of a conversation, as a list."""
    return item if isinstance(item, list) else [item]


def overlap_in_words(draft: Path, openings: Sequence[str]) -> str | None:
    """A sentence on how many of these opening prompts a draft was trained on; None if its folder
    does not record them."""
    try:
        known = trained_on(draft)
    except UserError:
        return None
    if known is None:
        return None
    origins = [origin_of(opening) for opening in openings]
    same, near = sum(known.exactly(origins)), sum(known.nearly(origins))
    said = f"prompts of your own, of which the draft was trained on {same or 'none'}"
    if near > same:
        said += f" and on near duplicates of {near - same}"
    return said if known.complete else f"{said}, and perhaps on others"


def not_trained_on(prompts: Sequence[Prompt], draft: Path) -> tuple[list[Prompt], bool]:
    """The prompts that the draft in this folder was not trained on in any stage, without near
    duplicates of its training prompts; and whether its record is complete. If all of them have
    openings like those trained on, their distinguishing texts decide, as in `leave_out`. Raises
    Damaged for a record that cannot be read."""
    known = trained_on(draft)
    if known is None or not len(known.keys_N):
        return [*prompts], known is not None and known.complete
    kept: list[Prompt] = []
    for text_of in (attrgetter("opening"), attrgetter("placed")):
        asked = sorted({text_of(prompt) for prompt in prompts} - {""})
        seen = known.nearly([origin_of(text) for text in asked])
        trained = {text for text, there in zip(asked, seen, strict=True) if there}
        kept = [prompt for prompt in prompts if text_of(prompt) not in trained]
        if kept:
            break
    return kept, known.complete

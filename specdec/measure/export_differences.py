"""Whether the files of an export are those that its reference was written for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.drafters.base import Drafter
from specdec.errors import UserError
from specdec.files import read_json
from specdec.formats import draft_export
from specdec.formats.exported_network import ExportedNetwork
from specdec.formats.layout import CONFIG
from specdec.measure.hypotheses import ChangedDraft
from specdec.measure.reference import Reference, tensor_digests
from specdec.targets.parts import TargetParts
from specdec.targets.saved import with_older_rope_keys

# of a file's key or of a tensor's name, the culprit that a difference points at
SIGNS = (
    ("layer_ids", "layer ids"),
    ("rope", "RoPE"),
    ("norm", "norm"),
    ("vocab", "vocabulary map"),
    ("head", "stale head"),
    ("embed", "stale embedding"),
)
UNREAD = {"dtype", "torch_dtype", "transformers_version"}  # keys that change nothing computed


@dataclass(frozen=True)
class Difference:
    """What differs, and the culprit that it points at."""

    culprit: str
    what: str


def culprit_of(name: str) -> str:
    """The culprit of a difference in a key or tensor of this name."""
    return next((culprit for sign, culprit in SIGNS if sign in name.lower()), "export files")


@dataclass(frozen=True)
class ExportState:
    """The `draft` that an export holds (None: it cannot be read), whether its tensors are those of
    the reference, and what differs."""

    draft: Drafter | None
    intact: bool
    differences: Sequence[Difference]


def state_of_export(export: Path, reference: Reference, target: TargetParts) -> ExportState:
    """Read an export and compare it with its reference."""
    like, written = reference.draft.empty(), reference.draft
    like.to(target.device, target.dtype)
    like.attach(target)
    try:
        draft = draft_export.read_export(export, like, target, written.layout, written.as_it_came)
    except UserError as error:
        return ExportState(None, False, [Difference(culprit_of(str(error)), str(error))])
    differences = _of_tensors(draft, reference)
    intact = not differences
    if export.is_dir() and not written.as_it_came:  # the config is somebody else's then
        differences += _of_config(export, draft, reference, target)
    return ExportState(draft, intact, differences)


def _of_tensors(draft: Drafter, reference: Reference) -> list[Difference]:
    digests = tensor_digests(draft)
    other = [
        name for name, digest in reference.draft.tensors.items() if digests.get(name) != digest
    ]
    if len(other) > 1 and len(other) >= 0.5 * len(digests):
        what = f"{len(other)} of {len(digests)} tensors are not those of the reference"
        return [Difference("another draft", what)]
    return [
        Difference(culprit_of(name), f"tensor {name} is not that of the reference")
        for name in other
    ]


def _of_config(
    export: Path, draft: Drafter, reference: Reference, target: TargetParts
) -> list[Difference]:
    layout = draft_export.layout_of(reference.draft.family, reference.draft.layout)
    wanted = _plain(with_older_rope_keys(layout.config(draft, target)))
    there = read_json(export / CONFIG)
    there = there if isinstance(there, dict) else {}
    names = sorted((wanted.keys() | there.keys()) - UNREAD)
    other = [name for name in names if wanted.get(name) != there.get(name)]
    return [
        Difference(
            culprit_of(name),
            f"{CONFIG}: {name} is {there.get(name)!r:.60}, where the export had "
            f"{wanted.get(name)!r:.60}",
        )
        for name in other
    ]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def export_as_it_is(
    export: Path, reference: Reference, target: TargetParts, differences: Sequence[Difference]
) -> ChangedDraft | None:
    """The export as an engine reads its files, where these differ from the reference's; None where
    nothing can compute that."""
    if not differences or not export.is_dir():
        return None
    like = reference.draft.empty()
    like.attach(target)
    try:
        network = ExportedNetwork(export, like, target)
    except UserError:
        return None
    change = f"the files of {export} are served as they are: " + "; ".join(
        one.what for one in differences[:3]
    )
    return ChangedDraft(differences[0].culprit, change, network)

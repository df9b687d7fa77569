"""The initial weights of training: random ones, those of an earlier draft, or the closed-form
(least-squares) initialisation of drafters that have one (`Trainable.solve_closed_form`)."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from numpy.typing import NDArray
from rich.progress import Progress
from transformers.utils.generic import flatten_dict

from specdec.context import KnownAnchors
from specdec.drafters import DRAFTERS, family, frequent_tokens
from specdec.drafters.base import Drafter, Predictor, Trainable
from specdec.errors import UserError, require, require_within
from specdec.forcing.anchors import anchors_of
from specdec.formats import draft_checkpoint
from specdec.progress import console
from specdec.targets.parts import TargetParts
from train.data.sequences import Document
from train.hidden_states.batches import BatchSource, OnlineBatches

WHOLE = "its vocabulary is the target's"
# keys of a model's config that name the dtype of its weights, on disk or in memory
DTYPES_OF_CONFIG = ("dtype", "torch_dtype")
# the most bytes of hidden states kept in memory, so as not to compute them again
REMEMBERED = 2**30
# an initialisation reads about one to two times as many tokens, or all if there are fewer
CLOSED_FORM_TOKENS = 80_000
AT_ONCE = 4096  # tokens that an initialisation reads at a time, or one packed row if that is longer


@dataclass
class InitialisationConfig:
    """The draft that training continues. The draft keeps its vocabulary."""

    # its folder, such as runs/NAME/best, set by drafter.from= on the command line; null: a fresh
    # draft
    draft: str | None = None
    # most tokens added to the draft vocabulary: the most frequent ones in the new responses that it
    # lacks
    new_tokens: int = 0
    # the target may have other weights than the draft's own, such as a fine-tuned or quantised form
    other_target: bool = False

    def __post_init__(self) -> None:
        require_within("initialisation", self, new_tokens=0)
        require(
            self.draft is not None or not self.other_target,
            "initialisation.other_target is about the target of an earlier draft: give "
            "drafter.from=FOLDER too",
        )
        require(
            self.draft is not None or self.new_tokens == 0,
            "initialisation.new_tokens adds to an earlier draft's vocabulary: give "
            "drafter.from=FOLDER too",
        )


def with_settings_of_import(initialisation: InitialisationConfig, config: Any) -> tuple[Any, str]:
    """A drafter's config with the settings that an imported draft decides, where training starts
    from one, and the layout that it came in; else the config as it is, and "". Raises UserError for
    a setting that was given another value, and as `draft_checkpoint.imported` does."""
    draft = initialisation.draft
    there = draft and (Path(draft).is_dir() or draft_checkpoint.is_foreign_draft(draft))
    known = (
        draft_checkpoint.imported(draft) if draft and there else None
    )  # else `check_files` raises
    if known is None or known.family != config.name:  # `_fitting` raises for another family
        return config, ""
    default = type(config)()
    for key, value in known.settings.items():
        asked = getattr(config, key)
        free = key in ("initialisation", "draft_vocab")
        require(
            free or asked in (value, getattr(default, key)),
            f"drafter.{key}={asked}: the draft of drafter.from={draft} has {value}: omit "
            f"drafter.{key}",
        )
    return replace(config, **known.settings), known.layout


def named_head(config: Any) -> str | None:
    """The folder of the draft that is a part of a drafter with this config; None if there is none,
    or if it builds its own."""
    named = getattr(config, "head", None)
    return str(named) if named and named not in DRAFTERS else None


def earlier_drafts(initialisation: InitialisationConfig, config: Any) -> list[Path]:
    """The folders of the drafts that a stage starts from or that are a part of its drafter."""
    return [
        Path(draft) for draft in (initialisation.draft, named_head(config)) if draft is not None
    ]


def initial_drafter(
    initialisation: InitialisationConfig,
    config: Any,
    target: TargetParts,
    documents: Sequence[Document],
    seed: int,
) -> Drafter:
    """The drafter that a stage trains, in float32. A pruned draft vocabulary holds the assistant's
    most frequent tokens. If the config names a draft's folder as the `head`, that draft becomes a
    part of the drafter. Raises UserError if an earlier draft does not fit."""
    torch.manual_seed(seed)
    said = [d.ids[d.mask] for d in documents]
    if initialisation.draft is not None:
        return _continued(initialisation, config, target, said)
    kind, vocab_S, head = family(config.name), None, None
    if (named := named_head(config)) is not None:
        head = draft_checkpoint.read_draft(named, target)
    elif size := kind.plan(config, target).draft_vocab:
        vocab_S = frequent_tokens((ids.tolist() for ids in said), size).to(target.device)
    drafter = kind.build(config, target, vocab_S, head).float()
    if drafter.fits_texts:  # only then: lists take many times the memory of arrays
        drafter.fit([d.ids.tolist() for d in documents], [d.mask.tolist() for d in documents])
    return drafter


def reference_draft(named: str | None, target: TargetParts) -> Drafter | None:
    """The frozen draft that losses compare with; None if there is none."""
    if named is None:
        return None
    reference = draft_checkpoint.read_draft(named, target).to(target.device)
    reference.attach(target)
    return reference.eval().requires_grad_(False)


def require_initialisation(
    initialisation: InitialisationConfig, config: Any, target: TargetParts
) -> None:
    """Raise UserError if no stage with this config can start from the draft of `drafter.from` or
    use the draft that is a part of the drafter, whatever its texts are."""
    if initialisation.draft is not None:
        _fitting(initialisation, config, target)
    elif (named := getattr(config, "head", None)) and named not in DRAFTERS:
        draft_checkpoint.read_draft(named, target)


def _fitting(initialisation: InitialisationConfig, config: Any, target: TargetParts) -> Predictor:
    """The draft that training starts from. Raises UserError unless training can continue from it
    with this config and `new_tokens` more tokens in its vocabulary."""
    folder, new_tokens, kind = initialisation.draft, initialisation.new_tokens, family(config.name)
    assert folder is not None
    require(
        kind.trains(config),
        f"drafter.from={folder}: drafter={config.name} has no weights to train: omit drafter.from",
    )
    earlier = draft_checkpoint.read_draft(folder, target, initialisation.other_target)
    require(
        earlier.config.name == config.name,
        f"drafter.from={folder} is a draft of the family {earlier.config.name}: give "
        f"drafter={earlier.config.name} as well",
    )
    assert isinstance(earlier, Predictor)
    require(
        new_tokens == 0 or earlier.vocab_S is not None,
        f"initialisation.new_tokens={new_tokens} cannot add to {folder}: {WHOLE}; omit "
        "initialisation.new_tokens",
    )
    config = _with_settings_of(earlier, config)
    both = (earlier.sizes, kind.plan(config, target))
    was, now = (flatten_dict(json.loads(json.dumps(asdict(sizes)))) for sizes in both)
    for name in sorted(was.keys() | now.keys()):
        size = name.rpartition(".")[2] not in ("draft_vocab", *DTYPES_OF_CONFIG)
        if size and was.get(name) not in (now.get(name), []):  # [] may be filled
            raise UserError(
                f"drafter.from={folder} was trained with {name}={was.get(name)}, but this run asks "
                f"for {now.get(name)}: give the settings that the draft had"
            )
    return earlier


def _with_settings_of(earlier: Predictor, config: Any) -> Any:
    """A config with the vocabulary and the initialisation of an earlier draft."""
    if hasattr(config, "draft_vocab"):
        size = None if earlier.vocab_S is None else len(earlier.vocab_S)
        config = replace(config, draft_vocab=size)
    if hasattr(config, "initialisation"):  # the start decides `Trainable.learning_rates`
        config = replace(config, initialisation=earlier.config.initialisation)
    return config


def _continued(
    initialisation: InitialisationConfig,
    config: Any,
    target: TargetParts,
    said: Sequence[NDArray[np.int32]],
) -> Drafter:
    """The draft that training starts from with this config, and with up to `new_tokens` tokens of
    `said` added to its vocabulary. Raises UserError if the draft does not fit."""
    folder, new_tokens = initialisation.draft, initialisation.new_tokens
    assert folder is not None
    earlier, kind = _fitting(initialisation, config, target), family(config.name)
    config = _with_settings_of(earlier, config)
    vocab_S, note = earlier.vocab_S, WHOLE
    if vocab_S is not None:
        counts_V = np.bincount(np.concatenate(said), minlength=target.vocab_size)
        covered = counts_V[vocab_S.numpy()].sum() / max(1, counts_V.sum())
        counts_V[vocab_S.numpy()] = 0
        missing = np.argsort(-counts_V, kind="stable")[:new_tokens]
        added = torch.from_numpy(missing[counts_V[missing] > 0])
        which = f", which covers {covered:.1%} of this data," if any(map(len, said)) else ""
        note = (
            f"its draft vocabulary of {len(vocab_S):,} tokens{which} is kept, and {len(added)} "
            "tokens are added"
        )
        vocab_S = torch.cat([vocab_S, added]).sort().values.to(target.device)
    if hasattr(config, "draft_vocab"):
        config = replace(config, draft_vocab=None if vocab_S is None else len(vocab_S))
    drafter = kind.build(config, target, vocab_S, earlier)
    drafter.origin = earlier.origin
    console.print(f"training starts from {folder}: {note}")
    if other := draft_checkpoint.note_of_other_weights(folder, target):
        console.print(f"  {other}")
    for f in fields(config):
        before, after = getattr(earlier.config, f.name), getattr(config, f.name)
        if before != after and f.name != "draft_vocab":
            console.print(f"  drafter.{f.name} was {before!r} and is {after!r} now")
    return drafter.float()


def stride(tokens: int) -> int:
    """The n for which an initialisation reads every n-th row of texts with this total number of
    tokens."""
    return max(1, tokens // CLOSED_FORM_TOKENS)


def initialise_in_closed_form(
    drafter: Drafter, data: BatchSource, length: int, accelerator: Accelerator, progress: Progress
) -> None:
    """Set the drafter's initial weights by least squares, on evenly spaced rows of up to `length`
    tokens (see `CLOSED_FORM_TOKENS`). The weights are unchanged if no response is long enough."""
    assert isinstance(drafter, Trainable)
    rows = range(0, len(data.rows), stride(sum(len(row.ids) for row in data.rows)))
    at_once = max(1, AT_ONCE // length)
    task = progress.add_task("least squares", total=len(rows))
    count = 0

    def known() -> Iterator[KnownAnchors]:
        nonlocal count
        progress.update(task, completed=0)
        count = 0
        for start in range(0, len(rows), at_once):
            batch = data.batch(rows[start : start + at_once])
            position_BT, document_BT = batch.ctx.documents()
            anchors = anchors_of(
                batch.mask_BT, document_BT, position_BT, drafter.closed_form_depths
            )
            followed = anchors.valid_NK.all(-1)
            where = anchors.row_N[followed], anchors.position_N[followed]
            count += len(where[0])
            if len(where[0]):
                yield KnownAnchors(batch.ctx, batch.final_BTD, *where)
            progress.advance(task, len(batch.mask_BT))

    source: Callable[[], Iterator[KnownAnchors]] = known
    if isinstance(data, OnlineBatches) and data.bytes(rows) <= REMEMBERED:
        source = partial(iter, [*known()])  # so that the target reads these rows only once
    solvable = any(True for _ in source())
    if solvable:
        with torch.no_grad():
            drafter.solve_closed_form(source)
    progress.remove_task(task)
    if accelerator.num_processes > 1:
        for weight in drafter.parameters():
            broadcast(weight.data)  # processes may round differently
    said = f"least squares at {count:,} anchors in {len(rows):,} of {len(data.rows):,} packed rows"
    none = f"no response has {drafter.closed_form_depths} tokens, so no weights are solved for"
    console.print(f"initialisation: {said if solvable else none}")

"""What it takes to read somebody else's draft: one `ImportLayout` for each public layout, and the
`Origin` that a drafter keeps of its files, by which it is written back as it came.

An import is the inverse of an `ExportLayout`: the tensors get the engine's names (`renames`) and
then the drafter's (`prefixes`), and their draft vocabulary is put in ascending order. `settings`
makes the drafter's config from the foreign config.json.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import require
from specdec.formats.foreign_config import ForeignConfig
from specdec.formats.layout import WEIGHTS, Tensors
from specdec.targets.output_head import soft_cap
from specdec.targets.parts import TargetParts

Shapes = Mapping[str, list[int]]  # of tensors, by the engine's names
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
OFFSETS, INSIDE = "d2t", "t2d"


@dataclass(frozen=True)
class Origin:
    """The files that a draft was imported from, as far as its weights and config do not say it."""

    source: str  # their folder or hub name
    layout: str
    settings: dict[str, Any]  # those of the drafter's config that its files decide
    config: dict[str, Any]  # their config.json
    names: dict[str, str]  # of tensors: the engine's, then theirs
    kinds: dict[str, str]  # the types of their tensors, by the engine's names
    order: list[int] = field(default_factory=list)  # of their draft vocabulary, if not ascending


def unrenamed(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


def renamed_prefixes(*pairs: tuple[str, str]) -> Callable[[Iterable[str]], dict[str, str]]:
    """Names of theirs to the engine's, by prefixes: theirs, then the engine's."""

    def rename(names: Iterable[str]) -> dict[str, str]:
        renamed = {}
        for name in names:
            fit = next(((old, new) for old, new in pairs if name.startswith(old)), ("", ""))
            renamed[name] = fit[1] + name.removeprefix(fit[0])
        return renamed

    return rename


@dataclass(frozen=True)
class ImportLayout:
    """A public layout of drafts. `recognises` tells it by the config and the names of tensors.
    `settings` gives the settings of the drafter's config that the files decide, from the config and
    the shapes of the tensors by the engine's names; it raises UserError for a network that is not
    ours. The engine's names become the drafter's by the `prefixes` of an `ExportLayout`."""

    written_by: str  # for documents and messages
    recognises: Callable[[ForeignConfig, Collection[str]], bool]
    settings: Callable[[ForeignConfig, Shapes], dict[str, Any]]
    renames: Callable[[Iterable[str]], dict[str, str]] = unrenamed  # theirs to the engine's
    prefixes: Mapping[str, str] = field(default_factory=dict)  # ours, then the engine's
    over_vocab: tuple[str, ...] = (HEAD,)  # tensors with a row for each token of the draft
    # tensors that repeat the target's own, by the engine's names, given the draft vocabulary; the
    # draft reads the target's
    copies: Mapping[str, Callable[[TargetParts, Tensor | None], Tensor]] = field(
        default_factory=dict
    )
    # tensors that a file may lack: the engine takes these instead
    defaults: Mapping[str, Callable[[TargetParts, Tensor | None], Tensor]] = field(
        default_factory=dict
    )
    fits: Callable[[ForeignConfig, TargetParts], None] | None = None  # raises UserError if not
    weights: str = WEIGHTS  # the file that they are written to
    depths: bool = False  # whether the files decide how many depths there are
    in_target: bool = False  # whether the draft is a part of its target's own checkpoint
    # the tensors as their files have them, by the engine's names, given all names there; and back
    splits: Callable[[Tensors, Collection[str]], Tensors] = lambda tensors, names: tensors
    joins: Callable[[Tensors], Tensors] = lambda tensors: tensors
    # their name of a tensor by the engine's, given all names there; for messages
    called: Callable[[str, Collection[str]], str] = lambda name, names: name
    # writes the tensors, by their own names, into a folder, given the source they came from; None:
    # a folder with these tensors and the config alone
    writes: Callable[[Path, str, Tensors], None] | None = None


def head_copy(target: TargetParts, vocab_S: Tensor | None) -> Tensor:
    """The target's head, or its rows of a draft vocabulary."""
    return target.head.weight if vocab_S is None else target.head.weight[vocab_S]


def embedding_copy(target: TargetParts, vocab_S: Tensor | None) -> Tensor:
    return target.embedding.weight


def require_same_head(config: ForeignConfig, target: TargetParts) -> None:
    """Raise UserError if the draft scales the target's head, which it shares, in another way than
    the target."""
    scale, cap = config.get("logit_scale"), config.get("final_logit_softcapping")
    if scale not in (None, target.head_factor):
        raise config.wrong("logit_scale", f"that of {target.name}, {target.head_factor}")
    if cap not in (None, soft_cap(target.config)):
        raise config.wrong("final_logit_softcapping", f"that of {target.name}")


def architecture(config: ForeignConfig) -> str:
    """The name of the model's class in a config; empty if there is none."""
    names = config.keys.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) else ""


def kind_of_speculators(config: ForeignConfig) -> str | None:
    """The `speculators_model_type`; None in other formats."""
    kind = config.keys.get("speculators_model_type")
    return kind if isinstance(kind, str) else None


def proposed_depth(config: ForeignConfig) -> dict[str, Any]:
    """The setting `depth`, if speculators' config says how many tokens to draft."""
    of_engine = config.part("speculators_config")
    of_engine.unread.clear()  # of serving
    methods = of_engine.keys.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    return {"depth": count} if type(count) is int and 1 <= count <= 128 else {}


def draft_vocabulary(config: ForeignConfig, shapes: Shapes, vocab: int) -> int | None:
    """The size of the draft vocabulary; None: all `vocab` tokens. Raises UserError if config and
    tensors differ."""
    size = config.count("draft_vocab_size", vocab)
    listed = shapes.get(OFFSETS)
    if listed is not None and listed != [size]:
        raise config.wrong("draft_vocab_size", f"the length of tensor {OFFSETS!r}, {listed}")
    if listed is None and size != vocab:
        raise config.wrong("draft_vocab_size", f"{vocab}, as there is no tensor {OFFSETS!r}")
    if size > vocab:
        raise config.wrong("draft_vocab_size", f"at most the vocabulary's {vocab}")
    return None if size == vocab else size


def rising_vocabulary(
    tensors: Tensors, over_vocab: Collection[str], vocab: int, where: Any
) -> tuple[Tensors, Tensor | None, list[int]]:
    """The tensors of a draft without the maps of its vocabulary, with their rows in ascending order
    of the target's ids; these ids, or None for the whole vocabulary of `vocab` tokens; and the
    order in which they came, if that was another. Raises UserError for ids that are out of range,
    that come twice, or that the two maps disagree on."""
    tensors = dict(tensors)
    offset_S, inside_V = tensors.pop(OFFSETS, None), tensors.pop(INSIDE, None)
    if inside_V is not None:
        require(
            list(inside_V.shape) == [vocab],
            f"{where}: tensor {INSIDE!r} has shape {list(inside_V.shape)}, not {[vocab]}: it is of "
            "another vocabulary than the target's",
        )
    if offset_S is None:
        whole = inside_V is None or bool(inside_V.bool().all())
        require(whole, f"{where}: tensor {OFFSETS!r} is missing")
        return tensors, None, []
    shape = list(offset_S.shape)
    require(
        len(shape) == 1 and 1 <= shape[0] <= vocab,
        f"{where}: tensor {OFFSETS!r} has shape {shape}, not one number for each drafted token",
    )
    ids_S = offset_S.long() + torch.arange(len(offset_S))
    rising_S, order_S = ids_S.sort()
    require(
        int(rising_S[0]) >= 0 and int(rising_S[-1]) < vocab,
        f"{where}: tensor {OFFSETS!r} gives ids outside 0 to {vocab - 1}",
    )
    distinct = bool((rising_S[1:] > rising_S[:-1]).all())
    require(distinct, f"{where}: tensor {OFFSETS!r} gives a token twice")
    marked_V = torch.zeros(vocab, dtype=torch.bool)
    marked_V[rising_S] = True
    require(
        inside_V is None or torch.equal(inside_V.bool(), marked_V),
        f"{where}: tensors {OFFSETS!r} and {INSIDE!r} describe different draft vocabularies",
    )
    if not torch.equal(ids_S, rising_S):
        tensors |= {name: tensors[name][order_S] for name in over_vocab if name in tensors}
    order = [] if torch.equal(ids_S, rising_S) else order_S.tolist()
    return tensors, None if len(ids_S) == vocab else rising_S, order


def vocabulary_as_it_came(
    tensors: Tensors, over_vocab: Collection[str], rising_S: Tensor, order: list[int], vocab: int
) -> Tensors:
    """The inverse of `rising_vocabulary`: the tensors with both maps, in the order in which they
    came. A vocabulary that has grown since is written in ascending order."""
    ids_S, tensors = rising_S, dict(tensors)
    if len(order) == len(rising_S):
        place_S = torch.tensor(order).argsort()
        ids_S = rising_S[place_S]
        tensors |= {name: tensors[name][place_S] for name in over_vocab if name in tensors}
    inside_V = torch.zeros(vocab, dtype=torch.bool)
    inside_V[rising_S] = True
    return tensors | {OFFSETS: ids_S - torch.arange(len(ids_S)), INSIDE: inside_V}

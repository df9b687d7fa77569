"""Other people's drafts: recognised by their files, read as drafters, and written back as they
came.

    foreign_draft(named)       what its config.json and the header of its weights say; UserError,
                               naming the key or the tensor, for what is not read
    ForeignDraft.drafter(…)    the drafter for its target, with all weights
    as_it_came(drafter, …)     the tensors and the config in the layout that they came in

The layouts are in `IMPORTS`; each is described in the file of its method (eagle3_layout.py, …).
"""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.drafters import family
from specdec.drafters.base import Drafter, Predictor
from specdec.errors import UserError, located, require
from specdec.formats import (
    dflash_layout,
    eagle3_layout,
    eagle_layout,
    medusa_layout,
    native_layout,
    peagle_layout,
)
from specdec.formats.foreign_config import ForeignConfig
from specdec.formats.foreign_files import CONFIG, FLOATS, KINDS, ForeignFiles, HubName
from specdec.formats.import_layout import (
    INSIDE,
    OFFSETS,
    ImportLayout,
    Origin,
    architecture,
    rising_vocabulary,
    vocabulary_as_it_came,
)
from specdec.formats.layout import Description, Tensors, renamed
from specdec.formats.stored_tensors import require_finite, require_same, untied
from specdec.targets.parts import TargetParts

OF_FAMILIES = {
    "mtp": native_layout.IMPORTS,
    "peagle": peagle_layout.IMPORTS,
    "eagle3": eagle3_layout.IMPORTS,
    "eagle": eagle_layout.IMPORTS,
    "medusa": medusa_layout.IMPORTS,
    **dflash_layout.BLOCK_IMPORTS,
}
IMPORTS: dict[tuple[str, str], ImportLayout] = {
    (name, layout): imports
    for name, layouts in OF_FAMILIES.items()
    for layout, imports in layouts.items()
}


def is_foreign(named: Path | str) -> bool:
    """Whether this may be somebody else's draft: a folder with a config.json, or a hub name."""
    folder = Path(named)
    if folder.exists():
        return folder.is_dir() and (folder / CONFIG).exists()
    return HubName.parsed(named) is not None


def is_draft_alone(named: Path | str) -> bool:
    """Whether this is a draft in a public layout, by its folder or hub name, and not a target that
    has a module of its own. False for files that cannot be read."""
    if not is_foreign(named):
        return False
    try:
        return not foreign_draft(named).layout.in_target
    except UserError:
        return False


@dataclass(frozen=True)
class ForeignDraft:
    """A draft in a public layout; its weights are not read yet. `names` maps the names of its
    tensors to the engine's, and `settings` are those of the drafter's config that it decides."""

    named: str
    files: ForeignFiles
    family: str
    layout_name: str
    names: dict[str, str]
    settings: dict[str, Any]

    @property
    def layout(self) -> ImportLayout:
        return IMPORTS[self.family, self.layout_name]

    @property
    def of_target(self) -> tuple[str, str | None]:
        """Name and revision of its target, if the files say it."""
        config = self.files.config
        if self.layout.in_target:
            return HubName.parsed(self.named) or (self.named, None)
        of_engine = config.get("speculators_config")
        verifier = of_engine.get("verifier") if isinstance(of_engine, dict) else None
        named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
        name = named or config.get("base_model_name_or_path")
        return name if isinstance(name, str) else "", None

    def drafter(self, target: TargetParts) -> Drafter:
        """The drafter with its weights in float32, on the CPU and not attached to its target.
        Raises UserError, naming the key or the tensor, for a draft of another target, for a tensor
        that is missing, extra or of another shape, and for values that no draft has."""
        where, kind = self.files.folder, family(self.family)
        for keys in (self.files.config, self.files.config.get("transformer_layer_config")):
            rows = keys.get("vocab_size") if isinstance(keys, dict) else None
            require(
                rows in (None, target.vocab_size),
                f"{where / CONFIG}: vocab_size is {rows!r}, but {target.name} has "
                f"{target.vocab_size}: give the draft's own target",
            )
        if self.layout.fits is not None:
            self.layout.fits(ForeignConfig(where / CONFIG, self.files.config), target)
        with located(where):
            config = kind.Config(**self.settings)
            sizes = kind.plan(config, target)
        try:
            with located(where), torch.device("meta"):
                planned = kind(config, sizes)
        except UserError:
            raise
        except Exception as error:  # whatever transformers' and torch's own checks raise
            said = " ".join(str(error).split())[:200]
            raise UserError(
                f"{where / CONFIG}: no {self.family} can be built from it ({said})"
            ) from error
        self._require_tensors(planned, target)
        drafter = kind(config, sizes)
        order = self._load(drafter, target)
        kinds = {self.names[name]: x.kind for name, x in self.files.tensors.items()}
        drafter.origin = Origin(
            source=self.named,
            layout=self.layout_name,
            settings=self.settings,
            config=self.files.config,
            names={engine: theirs for theirs, engine in self.names.items()},
            kinds=kinds,
            order=order,
        )
        with located(where):
            drafter.require_sound()
        return drafter

    def _require_tensors(self, planned: Drafter, target: TargetParts) -> None:
        """Raise UserError unless the file lists the tensors of the planned network, in their
        shapes."""
        state = {n: x for n, x in untied(planned.state_dict()).items() if n != "vocab_S"}
        split = self.layout.splits(renamed(state, self.layout.prefixes), self.names.values())
        wanted = {n: list(x.shape) for n, x in split.items()}
        vocab_S = planned.vocab_S if isinstance(planned, Predictor) else None
        kept_S = None if vocab_S is None else torch.arange(len(vocab_S))
        for name, copy in self.layout.copies.items():
            wanted[name] = list(copy(target, kept_S).shape)
        theirs = {engine: name for name, engine in self.names.items()}
        for engine, name in theirs.items():
            stored = self.files.tensors[name]
            if engine in (OFFSETS, INSIDE):
                fitting = ("I64", "I32") if engine == OFFSETS else ("BOOL",)
                require(
                    stored.kind in fitting,
                    f"{stored.path}: tensor {name!r} is of type {stored.kind}, expected "
                    f"{' or '.join(fitting)}",
                )
                continue
            require(
                engine in wanted,
                f"{stored.path}: tensor {name!r} does not belong to a draft of {self.family} in "
                f"the layout {self.layout_name}",
            )
            require(
                stored.kind in FLOATS,
                f"{stored.path}: tensor {name!r} is of type {stored.kind}, expected "
                f"{' or '.join(FLOATS)}",
            )
            require(
                stored.shape == wanted[engine],
                f"{stored.path}: tensor {name!r} has shape {stored.shape}, not {wanted[engine]}, "
                f"as its config and {target.name} ask for",
            )
        for engine in wanted:
            optional = engine in self.layout.copies or engine in self.layout.defaults
            require(
                engine in theirs or optional,
                f"{self.files.folder}: tensor {self._called(engine)!r} is missing",
            )

    def _load(self, drafter: Drafter, target: TargetParts) -> list[int]:
        """Load the weights into a drafter; the order in which its vocabulary came (`Origin`)."""
        where, layout = self.files.folder, self.layout
        read = self.files.read_tensors()
        require_finite(read, where)
        tensors = {self.names[name]: x for name, x in read.items()}
        V = drafter.sizes.target_vocab
        tensors, vocab_S, order = rising_vocabulary(tensors, layout.over_vocab, V, where)
        for name, copy in layout.copies.items():
            if (stored := tensors.pop(name, None)) is not None:
                own = copy(target, vocab_S).detach().cpu()
                require(
                    torch.equal(stored.to(own.dtype), own),
                    f"{where}: tensor {self._called(name)!r} is not that of {target.name}: give "
                    "the draft's own target",
                )
        for name, default in layout.defaults.items():
            if name not in tensors:
                tensors[name] = default(target, vocab_S).detach().cpu()
        tensors = layout.joins(tensors)
        tensors = renamed(tensors, {engine: ours for ours, engine in layout.prefixes.items()})
        tensors = {n: x.float() if x.is_floating_point() else x for n, x in tensors.items()}
        if vocab_S is not None:
            tensors["vocab_S"] = vocab_S
        require_same(tensors, untied(drafter.state_dict()), where)
        drafter.load_state_dict(tensors, strict=False)
        return order

    def _called(self, engine: str) -> str:
        return self.layout.called(engine, self.files.tensors.keys())

    def digest(self) -> str:
        """A short hash of its config and weights."""
        hasher = hashlib.blake2b(digest_size=12)
        paths = {x.path for x in self.files.tensors.values()} | {self.files.folder / CONFIG}
        for path in sorted(paths):
            hasher.update(path.read_bytes())
        return hasher.hexdigest()


def foreign_draft(named: Path | str) -> ForeignDraft:
    """A draft in a public layout, from its folder or hub name. Raises UserError for files that
    cannot be read, for a layout that is not known, and for a config that describes another network
    than the drafter's."""
    files = ForeignFiles.opened(named, native_layout.own_tensors)
    path = files.folder / CONFIG
    for (name, layout_name), layout in IMPORTS.items():
        config = ForeignConfig(path, files.config)
        if not layout.recognises(config, files.tensors.keys()):
            continue
        names = layout.renames(files.tensors)
        twice = [engine for engine, count in Counter(names.values()).items() if count > 1]
        require(not twice, f"{files.folder}: two tensors are {twice[:1]}")
        shapes = {names[theirs]: x.shape for theirs, x in files.tensors.items()}
        settings = layout.settings(config, shapes)
        config.require_all_read()
        return ForeignDraft(str(named), files, name, layout_name, names, settings)
    known = ", ".join(sorted({layout.written_by for layout in IMPORTS.values()}))
    said = architecture(ForeignConfig(path, files.config)) or "none"
    raise UserError(
        f"{files.folder} holds no draft in a layout that is read here (architecture {said[:80]}): "
        f"those of {known}; a plain language model is given as drafter=lm drafter.source="
    )


def keeps_layout(drafter: Drafter, layout: str) -> bool:
    """Whether an export of the drafter in this layout is that of an imported draft, as it came."""
    return drafter.origin is not None and bool(drafter.origin.layout == layout)


def as_it_came(drafter: Drafter, target: TargetParts) -> tuple[Tensors, Description, ImportLayout]:
    """An imported draft's tensors, by their names and in the types in which they came, the config
    that came with them, and their layout. A vocabulary that has grown is described."""
    origin: Origin = drafter.origin
    layout, V = IMPORTS[drafter.config.name, origin.layout], drafter.sizes.target_vocab
    state = {n: x.detach().cpu() for n, x in untied(drafter.state_dict()).items()}
    vocab_S = state.pop("vocab_S", None)
    tensors = layout.splits(renamed(state, layout.prefixes), origin.names)
    for name, copy in layout.copies.items():
        if name in origin.names:
            tensors[name] = copy(target, vocab_S).detach().cpu().clone()  # the two may be tied
    for name, default in layout.defaults.items():
        own = default(target, vocab_S).detach().cpu().to(tensors[name])
        if name not in origin.names and torch.equal(tensors[name], own):
            del tensors[name]
    rising_S = torch.arange(V) if vocab_S is None else vocab_S
    tensors = vocabulary_as_it_came(tensors, layout.over_vocab, rising_S, origin.order, V)
    for name in (OFFSETS, INSIDE):
        if name not in origin.names:
            del tensors[name]
    config = dict(origin.config)
    if "draft_vocab_size" in config and vocab_S is not None:
        config["draft_vocab_size"] = len(vocab_S)
    written = {
        origin.names.get(name, name): x.to(KINDS[_kind_of(name, origin)]).contiguous()
        for name, x in tensors.items()
    }
    return written, config, layout


def _kind_of(name: str, origin: Origin) -> str:
    """The type of a tensor, by the engine's name; that of most tensors, if theirs lack it."""
    usual = Counter(kind for kind in origin.kinds.values() if kind in FLOATS).most_common(1)[0][0]
    return origin.kinds.get(name, usual)


def rounded_as_it_came(drafter: Drafter) -> dict[str, Tensor]:
    """The state of an imported draft, in float32, as it is after `as_it_came` and back."""
    origin, state = drafter.origin, {n: x.detach().cpu() for n, x in drafter.state_dict().items()}
    layout = IMPORTS[drafter.config.name, origin.layout]
    rounded = dict[str, Tensor]()
    for name, x in layout.splits(renamed(state, layout.prefixes), origin.names).items():
        floats = x.is_floating_point()
        rounded[name] = x.to(KINDS[_kind_of(name, origin)]).float() if floats else x
    back = {engine: ours for ours, engine in layout.prefixes.items()}
    return renamed(layout.joins(rounded), back)

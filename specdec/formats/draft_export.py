"""Export for serving engines. Every export is read back and compared before it counts as done.

Layouts: `hf` is the format that vLLM and SGLang load by method; `speculators` is vLLM's
self-describing format; `gguf` is a single file for llama.cpp. Each drafting method that engines
serve has its own module here. Weights are written in the precision of training, unless a GGUF file
is to round them.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.context import Context
from specdec.drafters import family
from specdec.drafters.base import Drafter, Predictor
from specdec.errors import UserError, located, nearest, require
from specdec.files import make_folder, new_file, read_json, replaced, require_elsewhere, write_whole
from specdec.formats import (
    dflash_layout,
    draft_import,
    eagle3_layout,
    eagle_layout,
    export_check,
    gguf_layout,
    lm_layout,
    medusa_layout,
    mlp_layout,
    mtp_layout,
    peagle_layout,
)
from specdec.formats.check_text import CheckText
from specdec.formats.draft_checkpoint import copy_trained_on
from specdec.formats.export_readme import README, export_readme
from specdec.formats.gguf_file import (
    FILE_TYPE,
    MARK_KEY,
    REFERENCE_KEY,
    WEIGHT_TYPES,
    WeightType,
    read_json_key,
    require_rounded,
    weight_type_of,
)
from specdec.formats.gguf_tokenizer import draft_tokenizer
from specdec.formats.layout import (
    AS_TRAINED,
    CONFIG,
    LAYOUT,
    MARK,
    OVERRIDES,
    WEIGHTS,
    ExportLayout,
    FileChoices,
    renamed,
    rotary_note,
    save_safetensors,
    window_note,
)
from specdec.formats.reference_networks import REFERENCE_NETWORKS
from specdec.formats.stored_tensors import require_finite, require_same, untied
from specdec.runtime.cpu.packed_linear import is_packed, pack
from specdec.targets.parts import TargetParts
from specdec.targets.prompt_rendering import CHAT_TEMPLATE
from specdec.targets.saved import save_tokenizer, with_older_rope_keys
from specdec.targets.target import Target

OWN_TEMPLATE = "chat_template"  # in the mark of a file: see `_own_template`
FAMILIES = {
    "eagle": eagle_layout,
    "eagle3": eagle3_layout,
    "medusa": medusa_layout,
    "mlp": mlp_layout,
    "mtp": mtp_layout,
    "peagle": peagle_layout,
    "dflash": dflash_layout,
    "jetspec": dflash_layout,
    "lm": lm_layout,
}
LAYOUTS: dict[tuple[str, str], ExportLayout] = {
    (family, name): layout
    for family, module in FAMILIES.items()
    for name, layout in module.LAYOUTS.items()
}
LAYOUTS |= {
    (family, gguf_layout.LAYOUT): layout for family, layout in gguf_layout.GGUF_LAYOUTS.items()
}


def layout_names(family: str) -> list[str]:
    """The layouts in which drafts of a method can be exported; empty if no engine loads them."""
    return [name for theirs, name in LAYOUTS if theirs == family]


def exports(family: str, layout: str | None) -> bool:
    """Whether a run with the setting export=`layout` exports a draft of this family."""
    return (family, layout) in LAYOUTS


def export_path(folder: Path, family: str, layout: str) -> Path:
    """Where a run in this folder exports to: a folder, also for a layout in which only imported
    drafts are written, or a file."""
    chosen = LAYOUTS.get((family, layout))
    return folder / f"export{'' if chosen is None else chosen.suffix}"


def layout_of(family: str, name: str) -> ExportLayout:
    """The layout of a method with this name. Raises UserError if there is none."""
    known = layout_names(family)
    require(bool(known), f"drafter {family!r} cannot be exported: no engine loads it from a file")
    if name not in known:
        raise UserError(f"export layout {name!r} of {family!r} is unknown{nearest(name, known)}")
    return LAYOUTS[family, name]


def require_exportable(config: Any, target: TargetParts, layout: str) -> None:
    """Raise UserError if no draft with this config could be exported for this target, whatever its
    weights. Nothing is computed, so this can be called before training."""
    kind = family(config.name)
    with torch.device("meta"):
        drafter = kind(config, kind.plan(config, target))
    _require_readable(drafter, target, layout)


def _require_readable(drafter: Drafter, target: TargetParts, layout: str) -> ExportLayout:
    """The layout of this name, in which an engine would read a draft with this config as it was
    trained. Raises UserError otherwise."""
    chosen = layout_of(drafter.config.name, layout)
    _require_one_text(target)
    if chosen.refuse is not None:
        chosen.refuse(drafter, target)
    chosen.config(drafter, target)
    if chosen.overrides is not None:
        chosen.overrides(drafter, target)
    return chosen


def rejected_layouts(drafter: Drafter, target: TargetParts) -> dict[str, str]:
    """For each layout of this method in which this draft cannot be exported, the reason."""
    reasons = {}
    for layout in layout_names(drafter.config.name):
        if draft_import.keeps_layout(drafter, layout):
            continue  # written as it came
        try:
            _require_readable(drafter, target, layout)
        except UserError as error:
            reasons[layout] = str(error)
    return reasons


def _require_one_text(target: TargetParts) -> None:
    """Raise UserError unless the target reads prompt and response as one text."""
    require(
        target.reads_pairs is None,
        f"{target.title} is {target.reads_pairs}: no engine loads a draft for it; give export=null",
    )


def default_layout(drafter: Drafter) -> str:
    """The layout of an export unless another is asked for: that in which an imported draft came."""
    return LAYOUT if drafter.origin is None else str(drafter.origin.layout)


def can_be_exported(drafter: Drafter, layout: str) -> bool:
    """Whether a draft is exported for `export=layout`: by its method, or because it came in this
    layout."""
    return draft_import.keeps_layout(drafter, layout) or exports(drafter.config.name, layout)


def write_export(
    path: Path | str,
    drafter: Drafter,
    target: TargetParts,
    layout: str | None = None,
    draft: Path | None = None,
    choices: FileChoices = AS_TRAINED,
) -> str:
    """Export a draft in a layout (None: `default_layout`). Returns a line that describes the
    comparison. An imported draft is written in its own layout, with the names, types and config
    that it came with. `draft` is its folder, from which the record of its training data is copied
    into the folder of an export. The export, a folder or a file, appears only if the draft, read
    back, gives the same logits; in a file with rounded weights, also only if no weight is off by
    more than rounding explains. Raises UserError for a layout that this method does not have, for a
    weight that is missing or not finite, for a draft that an engine would read differently, and for
    a path that is not an earlier export."""
    path, name = Path(path), drafter.config.name
    layout = layout or default_layout(drafter)
    require_writable(path, drafter, target, layout)
    if draft_import.keeps_layout(drafter, layout):
        return _write_as_it_came(path, drafter, target, draft)
    chosen = layout_of(name, layout)
    tensors = chosen.to_engine(drafter, untied(drafter.state_dict()))
    tensors = {n: x.detach().cpu().contiguous() for n, x in tensors.items()}
    require_finite(tensors, f"{path}: not written")
    dtype = next(x.dtype for x in tensors.values() if x.is_floating_point())
    named = renamed(tensors, chosen.prefixes)
    if chosen.suffix:
        kind = weight_type_of(choices.weight_type, dtype)
        keys = draft_tokenizer(target, choices.tokenizer_from) | chosen.config(drafter, target)
        keys[MARK_KEY] = json.dumps(mark_of(drafter, layout, target) | _own_template(target))
        if choices.reference is not None:
            keys[REFERENCE_KEY] = choices.reference
        make_folder(path.parent)
        with new_file(path) as partial:  # compared without rounding, and then rounded
            chosen.save(partial, named, keys | {FILE_TYPE: int(WEIGHT_TYPES["f32"].file_type)})
            said = _compared(path, partial, drafter, target, layout)
            if kind is not WEIGHT_TYPES["f32"]:
                chosen.save(partial, named, keys | {FILE_TYPE: int(kind.file_type)})
                require_rounded(named, partial, kind, f"{path}: not written")
                said += f"; {_rounded(partial, drafter, target, kind)}"
        if chosen.note is not None:
            said += chosen.note(drafter, short_text_hidden(drafter, target))
        return f"{len(named)} tensors read back, {said}{_stops(target)}"
    config = with_older_rope_keys(chosen.config(drafter, target))
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    with replaced(path, _written(path)) as partial:
        chosen.save(partial, named, config)
        if chosen.overrides:
            (partial / OVERRIDES).write_text(
                json.dumps(chosen.overrides(drafter, target)), encoding="utf-8"
            )
        if chosen.whole_model and target.tokenizer is not None:
            save_tokenizer(target.tokenizer, partial)
        _write_beside(partial, path, drafter, target, layout, draft)
        said = _compared(path, partial, drafter, target, layout)
    return (
        f"{len(named)} tensors read back, {said}{rotary_note(config)}{window_note(config)}"
        f"{_stops(target)}"
    )


def require_writable(path: Path, drafter: Drafter, target: TargetParts, layout: str) -> None:
    """Raise UserError where `write_export` would whatever the weights. Nothing is computed."""
    _require_one_text(target)
    require_free(path)
    if draft_import.keeps_layout(drafter, layout):
        return
    chosen = layout_of(drafter.config.name, layout)
    require(not (chosen.suffix and path.is_dir()), f"{path} is a folder: name a file")
    require(bool(chosen.suffix) or not path.is_file(), f"{path} is a file: name a folder")
    if chosen.refuse is not None:
        chosen.refuse(drafter, target)


def _compared(path: Path, partial: Path, drafter: Drafter, target: TargetParts, layout: str) -> str:
    """Compare what was written to `partial` with the draft, and with a second implementation of its
    network; returns a line about it. Raises UserError if they differ."""
    chosen = layout_of(drafter.config.name, layout)
    again = read_export(partial, drafter, target, layout)
    before, twice, after = (short_text_logits(d, target) for d in (drafter, drafter, again))
    if chosen.objection and (said := chosen.objection(drafter, before)):
        raise UserError(f"{path}: not written, because {said}")
    gap, rounding = distance(before, after), rounding_of(before, distance(before, twice))
    if not gap <= rounding:
        raise UserError(f"{path}: not written: read back, its logits differ by {gap:.2g}")
    described = "its keys" if chosen.suffix else CONFIG
    same = "identical" if gap == 0 else "equal but for rounding"
    return f"logits {same}; {_by_reference(path, partial, drafter, target, layout, described)}"


def _by_reference(
    path: Path,
    partial: Path,
    drafter: Drafter,
    target: TargetParts,
    layout: str,
    described: str = CONFIG,
) -> str:
    """Compare what was written to `partial` with a second implementation of its network; returns a
    line about it. `described` is where engines read the network's sizes. Raises UserError if they
    differ."""
    if (drafter.config.name, layout) not in REFERENCE_NETWORKS:
        return "no second implementation of this layout to compare it with"
    elsewhere = export_check.reference_gap(partial, drafter, target)
    most = export_check.largest_gap(target)
    if not elsewhere <= most:
        raise UserError(
            f"{path}: not written: an engine that reads {described} would compute logits "
            f"that differ by {elsewhere:.2g} of the largest (rounding explains "
            f"{most:.2g}): this is a bug, please report it with the target's config"
        )
    return (
        f"a network of {described} as engines build it differs by {elsewhere:.0e} of the largest "
        "logit"
    )


def _rounded(partial: Path, drafter: Drafter, target: TargetParts, kind: WeightType) -> str:
    """What rounding the weights of a file does to the logits of a random text."""
    trial = CheckText.drawn_for(drafter, target)
    before = export_check.drafter_logits(drafter, target, trial)
    after = export_check.reference_logits(partial, target, trial)
    inside = before.isfinite()
    gap = (before - after)[inside].abs().max() / before[inside].abs().max()
    other = int((before.argmax(-1) != after.argmax(-1)).sum())
    return (
        f"{kind.stored.name.lower()} changes logits by up to {float(gap):.1e} of the largest, and "
        f"the likeliest token at {other} of {len(before)} places"
    )


def _write_beside(
    partial: Path,
    folder: Path,
    drafter: Drafter,
    target: TargetParts,
    layout: str,
    draft: Path | None,
) -> None:
    """Write what lies beside the weights of an export."""
    overrides = (partial / OVERRIDES).exists()
    if draft is not None:
        copy_trained_on(draft, partial)
    if (template := target.rendering.chat_template) is not None:
        (partial / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    if README in _written(folder) or not (folder / README).exists():  # else it is the user's
        readme = export_readme(drafter, layout, target, overrides)
        (partial / README).write_text(readme, encoding="utf-8")
    _write_mark(partial, mark_of(drafter, layout, target))


def _write_as_it_came(
    folder: Path, drafter: Drafter, target: TargetParts, draft: Path | None
) -> str:
    """`write_export` of an imported draft in its own layout."""
    tensors, config, layout = draft_import.as_it_came(drafter, target)
    require_finite(tensors, f"{folder}: not written")
    with replaced(folder, _written(folder)) as partial:
        if layout.writes is None:
            save_safetensors(partial, tensors, config, layout.weights)
            _write_beside(partial, folder, drafter, target, drafter.origin.layout, draft)
        else:  # all other files are the target's own
            layout.writes(partial, drafter.origin.source, tensors)
            _write_mark(partial, mark_of(drafter, drafter.origin.layout, target))
        again = draft_import.foreign_draft(partial).drafter(target)
        kept, state = draft_import.rounded_as_it_came(drafter), again.state_dict()
        for name, x in kept.items():
            same = torch.equal(state[name].float(), x.float())
            require(same, f"{folder}: not written: read back, tensor {name!r} differs")
        again.to(target.device).attach(target)
        compared = _by_reference(folder, partial, again.eval(), target, drafter.origin.layout)
    return (
        f"{len(tensors)} tensors read back, identical, in the layout that they came in; {compared}"
    )


def add_to_export(folder: Path, texts: Mapping[str, str]) -> None:
    """Add text files to an export, by their paths in it. Its mark lists them first, so a later
    export replaces them. Raises UserError as `read_mark` does."""
    names = {*_written(folder), *(Path(place).parts[0] for place in texts)}
    write_whole(folder / MARK, json.dumps(read_mark(folder) | {"files": sorted(names)}, indent=1))
    for place, text in texts.items():
        make_folder((folder / place).parent)
        write_whole(folder / place, text)


def _stops(target: TargetParts) -> str:
    """A note for the user on settings with which an engine ends responses where they ended here;
    usually empty."""
    unknown = sorted(set(target.eos) - set(target.declared_eos))
    said = f"; give the engine stop_token_ids={unknown}, which the target's own files leave out"
    return said if unknown else ""


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference; NaN if either holds a NaN."""
    return float((one.float() - other.float()).abs().max())


def rounding_of(logits: Tensor, again: float) -> float:
    """The maximum difference between two computations of logits from the same weights: 0 in float32
    on a CPU, where the same products are summed in the same order. Elsewhere kernels may sum in any
    order; `again` is the difference that the same draft had when it was computed twice."""
    if logits.is_cpu and logits.dtype == torch.float32:
        return 0.0
    return 4 * (again + torch.finfo(logits.dtype).eps * float(logits.abs().max()))


def write_target(folder: Path, target: Target) -> None:
    """Write the dense target in a format that engines load; the folder is complete or absent."""
    require_free(folder)
    with replaced(folder, _written(folder)) as partial:
        target.save(partial)
        _write_mark(partial, mark_of(None, LAYOUT, target))


def mark_of(drafter: Drafter | None, layout: str, target: TargetParts) -> dict[str, Any]:
    """The mark of an export: the method and its depth, or "target"."""
    named: dict[str, Any] = {"drafter": "target"}
    if drafter is not None:
        named = {"drafter": drafter.config.name, "depth": drafter.depth}
    arguments = target.rendering.arguments
    return {**named, "layout": layout, "target": target.name, "template_args": arguments}


def _own_template(target: TargetParts) -> dict[str, str]:
    """The entry of a file's mark for a chat template that replaces the target's own. In a folder,
    the template is a file beside the mark."""
    template = target.rendering.chat_template
    return {} if template is None else {OWN_TEMPLATE: template}


def _write_mark(folder: Path, mark: dict[str, Any]) -> None:
    """Write the mark of an export, with a list of its files."""
    files = sorted({MARK, *(path.name for path in folder.iterdir())})
    (folder / MARK).write_text(json.dumps(mark | {"files": files}, indent=1), encoding="utf-8")


def _written(folder: Path) -> list[str]:
    """The names of an export's own files. Raises UserError as `read_mark` does, and for a mark that
    does not list them."""
    if not (folder / MARK).is_file():
        return []
    files = read_mark(folder).get("files")
    if not isinstance(files, list) or not all(isinstance(x, str) for x in files):
        raise UserError(
            f"{folder / MARK} is damaged: it lists no files; delete {folder}, and the same command "
            "exports again"
        )
    return files


def read_mark(export: Path) -> dict[str, Any]:
    """The contents of the mark of an export, a folder or a GGUF file. Raises UserError if it is
    missing or damaged."""
    in_file, remedy = export.is_file(), f"delete {export}, and the same command exports again"
    path = export if in_file else export / MARK
    require(
        export.exists(),
        f"{export} does not exist: a run writes it at its end, and scripts/export runs/NAME/best "
        f"--to {export} writes it again",
    )
    try:
        mark = read_json_key(export, MARK_KEY) if in_file else read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error
    if not isinstance(mark, dict):
        raise UserError(f"{path} is damaged: it holds no object; {remedy}")
    return mark


def require_free(path: Path) -> None:
    """Raise UserError if writing here would destroy anything but an earlier export."""
    require_elsewhere(path)
    free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    require(
        free or (path / MARK).is_file() or (path.is_file() and is_marked(path)),
        f"{path} exists and is not an earlier export: name one that does not exist yet",
    )


def is_marked(file: Path) -> bool:
    """Whether a file is a GGUF file of ours."""
    try:
        return isinstance(read_json_key(file, MARK_KEY), dict)
    except UserError:
        return False


def require_apart(folders: Sequence[Path]) -> None:
    """Raise UserError if two of the folders to write are the same, or one is in another."""
    for one, other in combinations(folders, 2):
        shorter, longer = sorted((one.resolve(), other.resolve()), key=lambda path: len(path.parts))
        require(
            not longer.is_relative_to(shorter),
            f"{one} and {other} are the same folder, or one is inside the other: name two folders "
            "beside each other",
        )


def read_export(
    export: Path,
    like: Drafter,
    target: TargetParts,
    layout: str = LAYOUT,
    as_it_came: bool = False,
) -> Drafter:
    """An exported checkpoint, loaded as a drafter with the method and config of `like`. With
    `as_it_came`, it is that of an imported draft in the layout that it came in. Raises UserError,
    naming the tensor, for one that is missing, extra or of another shape."""
    if as_it_came:
        path, stored = export, draft_import.foreign_draft(export).drafter(target)
        tensors = untied(stored.state_dict())
    else:
        chosen = layout_of(like.config.name, layout)
        path = export if chosen.suffix else export / WEIGHTS
        back = {theirs: ours for ours, theirs in chosen.prefixes.items()}
        with located(path):
            tensors = chosen.from_engine(like, renamed(chosen.load(export), back))
    drafter = type(like)(like.config, like.sizes)
    require_same(tensors, untied(drafter.state_dict()), path)
    drafter.load_state_dict(tensors, strict=False)
    drafter.to(target.device, next(like.parameters()).dtype)
    drafter.attach(target)
    if is_packed(like):  # so that products are summed in the same order
        pack(drafter)
    return drafter.eval()


@torch.no_grad()
def short_text_logits(drafter: Drafter, target: TargetParts) -> Tensor:
    """A drafter's logits [N, S] at all depths, for a few anchors of a short text."""
    hidden_AKD = short_text_hidden(drafter, target)
    assert isinstance(drafter, Predictor)
    return torch.cat([drafter.unembed(hidden_AKD[:, k], k) for k in range(hidden_AKD.shape[1])])


@torch.no_grad()
def short_text_hidden(drafter: Drafter, target: TargetParts) -> Tensor:
    """A drafter's hidden states [A, K, D] at all depths, for a few anchors of a short text. Random
    states replace the target's if its layers are not loaded."""
    ids_BT = torch.arange(3, 35, device=target.device)[None] % target.vocab_size
    if isinstance(target, Target):
        read, _ = target.hidden_states(ids_BT, drafter.needs)
        ctx = Context(ids_BT, read.layers_BTF, read.final_BTD)
    else:
        generator = torch.Generator().manual_seed(0)
        widths = len(drafter.needs.layers) * target.width, target.width
        layers_BTF, final_BTD = (
            torch.randn(*ids_BT.shape, width, generator=generator).to(target.device, target.dtype)
            for width in widths
        )
        ctx = Context(ids_BT, layers_BTF, final_BTD)
    anchors = torch.tensor([[4, 17, 30]], device=target.device)
    assert isinstance(drafter, Predictor)
    hidden_AKD: Tensor = drafter.hidden(ctx, anchors, None)[0]
    return hidden_AKD

"""Export for serving engines. Every export is read back and compared before it counts as done.

Layouts: `hf` is what vLLM and SGLang load by method; `speculators` is vLLM's self-describing
format. Each family that engines serve has its own module here. Weights are written in the
precision they were trained in.
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
from specdec.files import make_folder, read_json, replaced, require_elsewhere
from specdec.formats import (
    dflash_layout,
    eagle3_layout,
    eagle_layout,
    export_check,
    lm_layout,
    medusa_layout,
    mlp_layout,
    mtp_layout,
    peagle_layout,
)
from specdec.formats.draft_checkpoint import copy_trained_on, require_finite, require_same, untied
from specdec.formats.export_readme import README, export_readme
from specdec.formats.layout import (
    CONFIG,
    LAYOUT,
    MARK,
    OVERRIDES,
    WEIGHTS,
    ExportLayout,
    renamed,
    rotary_note,
)
from specdec.formats.reference_networks import REFERENCE_NETWORKS
from specdec.runtime.cpu.packed_linear import is_packed, pack
from specdec.targets.parts import TargetParts
from specdec.targets.prompt_rendering import CHAT_TEMPLATE
from specdec.targets.saved import save_tokenizer, with_older_rope_keys
from specdec.targets.target import Target

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


def layout_names(family: str) -> list[str]:
    """The layouts in which a family can be exported; none if no engine loads it."""
    return [name for theirs, name in LAYOUTS if theirs == family]


def layout_of(family: str, name: str) -> ExportLayout:
    """Raises UserError if a family does not have this layout."""
    known = layout_names(family)
    require(bool(known), f"drafter {family!r} cannot be exported: no engine loads it from a file")
    if name not in known:
        raise UserError(f"export layout {name!r} of {family!r} is unknown{nearest(name, known)}")
    return LAYOUTS[family, name]


def require_exportable(config: Any, target: TargetParts, layout: str) -> None:
    """Raise UserError if no draft with this config could be exported for this target, whatever its
    weights turn out to be. Nothing is computed, so this can be asked before training."""
    chosen = layout_of(config.name, layout)
    _require_one_text(target)
    kind = family(config.name)
    with torch.device("meta"):
        drafter = kind(config, kind.plan(config, target))
    if chosen.refuse is not None:
        chosen.refuse(drafter, target)
    chosen.config(drafter, target)
    if chosen.overrides is not None:
        chosen.overrides(drafter, target)


def _require_one_text(target: TargetParts) -> None:
    """Raise UserError unless the target reads prompt and response as one text."""
    require(
        target.reads_pairs is None,
        f"{target.title} is {target.reads_pairs}: no engine loads a draft for it; give export=null",
    )


def write_export(
    folder: Path | str,
    drafter: Drafter,
    target: TargetParts,
    layout: str = LAYOUT,
    draft: Path | None = None,
    beside: Mapping[str, str] | None = None,
) -> str:
    """Export a draft; returns a line that says what was compared. `draft` is its folder, whose file
    that says what it was trained on goes into the export, and `beside` are the texts of further
    files, by their paths in it. The folder appears only if the
    draft read back gives the same logits. Raises UserError for a layout that this family does not
    have, for a weight that is missing or not finite, for a draft that an engine would read
    differently, and for a folder that is not an earlier export."""
    folder, name = Path(folder), drafter.config.name
    chosen = layout_of(name, layout)
    require_free(folder)
    _require_one_text(target)
    if chosen.refuse is not None:
        chosen.refuse(drafter, target)
    tensors = chosen.to_engine(drafter, untied(drafter.state_dict()))
    tensors = {n: x.detach().cpu().contiguous() for n, x in tensors.items()}
    require_finite(tensors, f"{folder}: not written")
    dtype = next(x.dtype for x in tensors.values() if x.is_floating_point())
    config = with_older_rope_keys(chosen.config(drafter, target))
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    with replaced(folder, _written(folder)) as partial:
        chosen.save(partial, renamed(tensors, chosen.prefixes), config)
        if chosen.overrides:
            (partial / OVERRIDES).write_text(
                json.dumps(chosen.overrides(drafter, target)), encoding="utf-8"
            )
        if chosen.whole_model and target.tokenizer is not None:
            save_tokenizer(target.tokenizer, partial)
        if draft is not None:
            copy_trained_on(draft, partial)
        if target.rendering.chat_template is not None:
            template = target.rendering.chat_template
            (partial / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
        if README in _written(folder) or not (folder / README).exists():  # else it is the user's
            readme = export_readme(drafter, layout, target, bool(chosen.overrides))
            (partial / README).write_text(readme, encoding="utf-8")
        for place, text in (beside or {}).items():
            make_folder((partial / place).parent)
            (partial / place).write_text(text, encoding="utf-8")
        _write_mark(partial, name, layout, target)
        again = read_export(partial, drafter, target, layout)
        before, twice, after = (short_text_logits(d, target) for d in (drafter, drafter, again))
        if chosen.objection and (said := chosen.objection(drafter, before)):
            raise UserError(f"{folder}: not written, because {said}")
        gap, rounding = distance(before, after), rounding_of(before, distance(before, twice))
        if not gap <= rounding:
            raise UserError(f"{folder}: not written: read back, its logits differ by {gap:.2g}")
        compared = "no second implementation of this layout to compare it with"
        if (name, layout) in REFERENCE_NETWORKS:
            elsewhere, most = (
                export_check.reference_gap(partial, drafter, target),
                export_check.largest_gap(target),
            )
            if not elsewhere <= most:
                raise UserError(
                    f"{folder}: not written: an engine that reads {CONFIG} would compute logits "
                    f"that differ by {elsewhere:.2g} of the largest (rounding explains "
                    f"{most:.2g}): this is a bug, please report it with the target's config"
                )
            compared = (
                f"a network of {CONFIG} as engines build it differs by {elsewhere:.0e} of the "
                "largest logit"
            )
    same = "identical" if gap == 0 else "equal but for rounding"
    return (
        f"{len(tensors)} tensors read back, logits {same}; {compared}{rotary_note(config)}"
        f"{_stops(target)}"
    )


def _stops(target: TargetParts) -> str:
    """What to tell an engine so that it ends responses where they ended here; mostly nothing."""
    unknown = sorted(set(target.eos) - set(target.declared_eos))
    said = f"; give the engine stop_token_ids={unknown}, which the target's own files leave out"
    return said if unknown else ""


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference; NaN if either holds a NaN."""
    return float((one.float() - other.float()).abs().max())


def rounding_of(logits: Tensor, again: float) -> float:
    """By how much two computations of logits from the same weights may differ: not at all in
    float32 on a CPU, where the same products are summed in the same order. Elsewhere kernels may
    sum in any order; `again` is by how much the same draft differed when it was computed twice."""
    if logits.is_cpu and logits.dtype == torch.float32:
        return 0.0
    return 4 * (again + torch.finfo(logits.dtype).eps * float(logits.abs().max()))


def write_target(folder: Path, target: Target) -> None:
    """Write the dense target as engines load it; the folder appears whole or not at all."""
    require_free(folder)
    with replaced(folder, _written(folder)) as partial:
        target.save(partial)
        _write_mark(partial, "target", LAYOUT, target)


def _write_mark(folder: Path, drafter: str, layout: str, target: TargetParts) -> None:
    """Mark an export as ours, and the files in it. `drafter` is the family, or "target"."""
    files = sorted({MARK, *(path.name for path in folder.iterdir())})
    mark: dict[str, Any] = {"drafter": drafter, "layout": layout, "target": target.name}
    mark |= {"template_args": target.rendering.arguments, "files": files}
    (folder / MARK).write_text(json.dumps(mark, indent=1), encoding="utf-8")


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


def read_mark(folder: Path) -> dict[str, Any]:
    """What the mark of an export says. Raises UserError if it is missing or damaged."""
    path, remedy = folder / MARK, f"delete {folder}, and the same command exports again"
    try:
        mark = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error
    if not isinstance(mark, dict):
        raise UserError(f"{path} is damaged: it holds no object; {remedy}")
    return mark


def require_free(folder: Path) -> None:
    """Raise UserError if writing here would destroy anything but an earlier export."""
    require_elsewhere(folder)
    free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(
        free or (folder / MARK).is_file(),
        f"{folder} exists and is not an earlier export: name a folder that does not exist yet",
    )


def require_apart(folders: Sequence[Path]) -> None:
    """Raise UserError if two of the folders to write are the same, or one is in another."""
    for one, other in combinations(folders, 2):
        shorter, longer = sorted((one.resolve(), other.resolve()), key=lambda path: len(path.parts))
        require(
            not longer.is_relative_to(shorter),
            f"{one} and {other} are the same folder, or one is inside the other: name two folders "
            "beside each other",
        )


def read_export(folder: Path, like: Drafter, target: TargetParts, layout: str = LAYOUT) -> Drafter:
    """An exported checkpoint as a drafter again, of the family and config of `like`. Raises
    UserError, naming the tensor, for one that is missing, extra or of another shape."""
    chosen, path = layout_of(like.config.name, layout), folder / WEIGHTS
    back = {theirs: ours for ours, theirs in chosen.prefixes.items()}
    with located(path):
        tensors = chosen.from_engine(like, renamed(chosen.load(folder), back))
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
    """A drafter's logits [N, S] at all depths, for a few anchors of a short text. Random states
    stand for the target's where its layers are not loaded."""
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
    hidden = drafter.hidden(ctx, anchors, None)
    return torch.cat([drafter.unembed(hidden[0, :, k], k) for k in range(hidden.shape[2])])

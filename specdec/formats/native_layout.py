"""A target's own MTP module, read from its checkpoint and written back into its shards.

Names of tensors, as vLLM 0.32 reads them (deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py,
qwen3_5_mtp.py, mimo_mtp.py), for a target of L layers:

| | pair | norm before the head | layer |
| --- | --- | --- | --- |
| DeepSeek-V3, GLM-4.x: model.layers.L. | enorm, hnorm, eh_proj | shared_head.norm | beside them |
| Qwen3-Next, Qwen3.5: mtp. | pre_fc_norm_embedding, pre_fc_norm_hidden, fc | norm | layers.0 |
| MiMo: model.mtp_layers.0. | token_layernorm, hidden_layernorm, input_proj | final_layernorm | |

DeepSeek and GLM repeat the target's embedding and head (`embed_tokens`, `shared_head.head`), which
must be equal to them. transformers holds all experts of a layer in one tensor, most checkpoints
each in its own.

A checkpoint is written back by copying it: files without a changed tensor are hard links where the
file system has them, and a shard with one is written anew under its name, so the index is the same.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.drafters.native_layers import layer_keys
from specdec.errors import UserError, located, require
from specdec.files import reading
from specdec.formats.foreign_config import ForeignConfig
from specdec.formats.foreign_files import ForeignFiles, local_folder
from specdec.formats.import_layout import ImportLayout, Shapes, embedding_copy, head_copy
from specdec.formats.layout import Tensors
from specdec.targets.parts import TargetParts

OURS = "layers.0."
MOST_EXPERTS = MOST_LAYERS = 1024
BESIDE = re.compile(r"(?P<module>(?:[\w.]+\.)?layers\.\d+\.)eh_proj\.weight")
QWEN, MIMO = "mtp.", "model.mtp_layers.0."
SHARED = {"shared_head.head.": "shared_head.head.", "embed_tokens.": "embed_tokens."}
# names within a module: theirs, then ours; what is not named is the layer's
OF_BESIDE = {**SHARED, "shared_head.norm.": f"{OURS}final_layernorm.", "": OURS}
OF_QWEN = {
    "pre_fc_norm_embedding.": f"{OURS}enorm.",
    "pre_fc_norm_hidden.": f"{OURS}hnorm.",
    "fc.": f"{OURS}eh_proj.",
    "norm.": f"{OURS}final_layernorm.",
    "layers.0.": OURS,
}
OF_MIMO = {
    "token_layernorm.": f"{OURS}enorm.",
    "hidden_layernorm.": f"{OURS}hnorm.",
    "input_proj.": f"{OURS}eh_proj.",
    "": OURS,
}
KINDS = {  # the model_type of a config, and the layer of its module
    "deepseek": {"deepseek_v3": "deepseek_v3", "glm4_moe": "glm4_moe"},
    "qwen3": {
        "qwen3_next": "qwen3_next",
        **{name: "qwen3_5_text" for name in ("qwen3_5", "qwen3_5_text")},
        **{name: "qwen3_5_moe_text" for name in ("qwen3_5_moe", "qwen3_5_moe_text")},
    },
    "mimo": {"mimo": "mimo"},
}


def modules_beside(names: Iterable[str]) -> list[str]:
    """The prefixes of modules among the layers of a checkpoint, in the order of the layers."""
    modules = {match["module"] for name in names if (match := BESIDE.fullmatch(name))}
    return sorted(modules, key=lambda module: [int(n) for n in re.findall(r"\d+", module)])


def module_of(names: Iterable[str]) -> tuple[str, str, Mapping[str, str]] | None:
    """Where the MTP module of a checkpoint with these tensors is: the layout, the prefix of its
    names, and the names within. None if the checkpoint has none."""
    names = set(names)
    if f"{QWEN}fc.weight" in names:
        return "qwen3", QWEN, OF_QWEN
    if f"{MIMO}input_proj.weight" in names:
        return "mimo", MIMO, OF_MIMO
    first = modules_beside(names)
    return ("deepseek", first[0], OF_BESIDE) if first else None


def own_tensors(names: Collection[str]) -> list[str]:
    """Which of a checkpoint's tensors are of its MTP modules; all tensors if it has none. Those of
    a second module are included, and belong to no draft of ours."""
    known = module_of(names)
    if known is None:
        return list(names)
    layout = known[0]
    if layout == "qwen3":
        return [name for name in names if name.startswith(QWEN)]
    if layout == "mimo":
        return [name for name in names if name.startswith("model.mtp_layers.")]
    modules = tuple(modules_beside(names))
    return [name for name in names if name.startswith(modules)]


def renames(names: Iterable[str]) -> dict[str, str]:
    """Names of theirs to the drafter's; names outside the module stay as they are."""
    names = list(names)
    known = module_of(names)
    assert known is not None
    _, prefix, within = known
    renamed = {}
    for name in names:
        rest = name.removeprefix(prefix)
        old = next(filter(rest.startswith, within), None) if name.startswith(prefix) else None
        renamed[name] = name if old is None else within[old] + rest.removeprefix(old)
    return renamed


def called(ours: str, names: Collection[str]) -> str:
    """The inverse of `renames` for one name."""
    known = module_of(names)
    assert known is not None
    _, prefix, within = known
    for theirs, name in within.items():
        if ours.startswith(name):
            return prefix + theirs + ours.removeprefix(name)
    return ours


def recognises(layout: str) -> Callable[[ForeignConfig, Collection[str]], bool]:
    def of_layout(config: ForeignConfig, names: Collection[str]) -> bool:
        known = module_of(names)
        return known is not None and known[0] == layout

    return of_layout


def described_layers(config: ForeignConfig) -> Mapping[str, Any]:
    """The keys of the text model; a model of images and text has them in a part of its config."""
    nested = config.keys.get("text_config")
    return nested if isinstance(nested, dict) else config.keys


def settings_of(layout: str) -> Callable[[ForeignConfig, Shapes], dict[str, Any]]:
    def settings(config: ForeignConfig, shapes: Shapes) -> dict[str, Any]:
        kind = config.get("model_type")
        known = KINDS[layout]
        if not isinstance(kind, str) or kind not in known:
            some = next(iter(shapes))
            raise UserError(
                f"{config.where}: model_type is {str(kind)[:40]!r}, but an MTP module with tensors "
                f"such as {some!r} is read only for {', '.join(known)}"
            )
        described = ForeignConfig(config.where, described_layers(config))
        for key in ("n_routed_experts", "num_experts"):
            if described.get(key) is not None:
                described.count(key, most=MOST_EXPERTS)
        layers = described.count("num_hidden_layers", most=MOST_LAYERS)
        with located(config.where):
            keys = layer_keys(known[kind], described.keys, layers)
        config.unread.clear()  # they describe the target, whose loader reads them
        return {
            "modules": 1,
            "layer": known[kind],
            "layer_config": keys,
            "initialisation": "random",
        }

    return settings


def require_own_target(config: ForeignConfig, target: TargetParts) -> None:
    """Raise UserError unless the module reads and writes states of the target's width."""
    described = described_layers(config)
    width, rows = described.get("hidden_size"), described.get("vocab_size")
    if (width, rows) != (target.width, target.vocab_size):
        raise UserError(
            f"{config.where}: hidden_size and vocab_size are {width!r} and {rows!r}, but "
            f"{target.name} has {target.width} and {target.vocab_size}: give the target of this "
            "checkpoint"
        )


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
EXPERT = re.compile(r"(?P<before>.*mlp\.experts\.)(?P<k>\d+)\.(?P<part>gate|up|down)_proj\.weight")


def split_experts(tensors: Tensors, names: Collection[str]) -> Tensors:
    """The tensors with each expert in its own, if the checkpoint with these `names` has them so."""
    if not any(EXPERT.fullmatch(name) for name in names):
        return dict(tensors)
    split: Tensors = {}
    for name, x in tensors.items():
        if name.endswith(GATE_UP):
            for k, both in enumerate(x):
                gate, up = both.chunk(2)
                before = f"{name.removesuffix('gate_up_proj')}{k}."
                split |= {f"{before}gate_proj.weight": gate, f"{before}up_proj.weight": up}
        elif name.endswith(DOWN):
            before = name.removesuffix("down_proj")
            split |= {f"{before}{k}.down_proj.weight": x[k] for k in range(len(x))}
        else:
            split[name] = x
    return split


def joined_experts(tensors: Tensors) -> Tensors:
    """The inverse of `split_experts`."""
    joined, experts = Tensors(), dict[str, dict[str, dict[int, Tensor]]]()
    for name, x in tensors.items():
        if match := EXPERT.fullmatch(name):
            parts = experts.setdefault(match["before"], {})
            parts.setdefault(match["part"], {})[int(match["k"])] = x
        else:
            joined[name] = x
    for before, parts in experts.items():
        gate, up, down = ([parts[p][k] for k in sorted(parts[p])] for p in ("gate", "up", "down"))
        both = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        joined |= {
            f"{before}gate_up_proj": torch.stack(both),
            f"{before}down_proj": torch.stack(down),
        }
    return joined


def write_checkpoint(folder: Path, source: str, tensors: Tensors) -> None:
    """Copy the checkpoint at `source`, with these tensors in place of its own. Raises UserError if
    it no longer has one of them."""
    origin = local_folder(source)
    # tensors of the target may be of types in which no draft is read
    stored = ForeignFiles.opened(origin, lambda names: [n for n in names if n in tensors]).tensors
    for name in tensors:
        require(
            name in stored,
            f"{origin}: the checkpoint has changed since it was imported: tensor {name!r} is "
            "missing. Restore it, or import it again with drafter.from",
        )
    changed = {stored[name].path.name for name in tensors}
    for path in sorted(origin.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.name in changed:
            _write_shard(path, folder / path.name, tensors)
        elif path.suffix == ".safetensors":
            _link(path.resolve(), folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)


def _write_shard(path: Path, to: Path, tensors: Tensors) -> None:
    """A shard with these tensors in place of its own of the same names."""
    with reading(path), safe_open(path, framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        noted = file.metadata()
    save_file(kept | {n: x for n, x in tensors.items() if n in kept}, to, metadata=noted)


def _link(path: Path, to: Path) -> None:
    """A hard link, or a copy on another file system."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)


def imports(layout: str, written_by: str) -> ImportLayout:
    return ImportLayout(
        written_by,
        recognises(layout),
        settings_of(layout),
        renames,
        over_vocab=(),
        copies={"shared_head.head.weight": head_copy, "embed_tokens.weight": embedding_copy},
        fits=require_own_target,
        splits=split_experts,
        joins=joined_experts,
        called=called,
        writes=write_checkpoint,
        in_target=True,
    )


IMPORTS = {
    "deepseek": imports("deepseek", "DeepSeek-V3 and GLM-4.x (their own MTP module)"),
    "qwen3": imports("qwen3", "Qwen3-Next and Qwen3.5 (their own MTP module)"),
    "mimo": imports("mimo", "MiMo (its own MTP module)"),
}

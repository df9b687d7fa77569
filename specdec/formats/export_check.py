"""Checks an exported draft with other code: the network that an engine builds from a folder.

    reference_logits(folder, target, trial)    [N, V]: logits of an engine
    drafter_logits(drafter, target, trial)     [N, V]: logits of our drafter
    reference_gap(folder, drafter, target)     the largest difference, relative to the logits
    largest_gap(target)                        the largest gap that rounding explains

The network (reference_networks.py) is built from the folder's files alone: config.json,
model.safetensors, and the overrides of the target's config, with an engine's names of tensors and
its defaults for absent keys; or from the keys and tensors of a GGUF file. It shares the target's
embedding table and head weight, like an engine.

A `CheckText` is a random text with random states in place of the target's, so no forward pass of
the target is needed, and the text can be long enough for rotary positions to matter. N runs over
its anchors at depth 0, then at depth 1, and so on; a token outside the draft vocabulary has the
logit -inf or, if the engine gives it a row of zeros, 0. Networks are computed in float32.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.context import Context
from specdec.drafters.base import Drafter, Predictor
from specdec.errors import UserError
from specdec.formats.check_text import FINAL, CheckText, ExportFolder
from specdec.formats.gguf_file import MARK_KEY, read_json_key, read_keys, read_tensors
from specdec.formats.layout import CONFIG, MARK, OVERRIDES, WEIGHTS
from specdec.formats.reference_networks import REFERENCE_NETWORKS, ReferenceNetwork
from specdec.targets.parts import TargetParts


@torch.no_grad()
def reference_logits(folder: Path | str, target: TargetParts, trial: CheckText) -> Tensor:
    """The logits [N, V] of an exported draft, computed by the reference network. Raises UserError
    for a folder that an engine would not load."""
    files, network = network_of_export(Path(folder), target)
    rows = [network(files, trial, anchor) for anchor in trial.anchors]
    return torch.stack(rows, 1).flatten(0, 1)


def network_of_export(folder: Path, target: TargetParts) -> tuple[ExportFolder, ReferenceNetwork]:
    """The files of an export, and the network that an engine builds from them. Raises UserError for
    a layout without a reference network."""
    files, mark = _in_file(folder, target) if folder.is_file() else _in_folder(folder, target)
    network = REFERENCE_NETWORKS.get((mark["drafter"], mark["layout"]))
    if network is None:
        raise UserError(
            f"{folder}: no second implementation of layout {mark['layout']!r} of "
            f"{mark['drafter']!r}: add one to specdec/formats/reference_networks.py"
        )
    return files, network


def _in_folder(folder: Path, target: TargetParts) -> tuple[ExportFolder, dict[str, Any]]:
    """The files of an export in a folder, and its mark."""
    config, mark = (
        json.loads((folder / name).read_text(encoding="utf-8")) for name in (CONFIG, MARK)
    )
    overrides = folder / OVERRIDES
    files = ExportFolder(
        config,
        {n: x.to(target.device) for n, x in load_file(folder / WEIGHTS).items()},
        json.loads(overrides.read_text(encoding="utf-8")) if overrides.exists() else {},
        target,
        folder,
    )
    return _with_engine_config(files), mark


def _in_file(file: Path, target: TargetParts) -> tuple[ExportFolder, dict[str, Any]]:
    """The keys and tensors of a GGUF file, and its mark."""
    tensors = {n: x.to(target.device) for n, x in read_tensors(file).items()}
    files = ExportFolder(read_keys(file), tensors, {}, target, file)
    return files, read_json_key(file, MARK_KEY)


@torch.no_grad()
def drafter_logits(drafter: Drafter, target: TargetParts, trial: CheckText) -> Tensor:
    """The logits [N, V] of our drafter."""
    state, original = drafter.state_dict(), drafter
    drafter = type(original)(original.config, original.sizes)
    drafter.load_state_dict(state)
    drafter.to(target.device, torch.float32).eval()
    drafter.attach(target)
    layers = [trial.state(k) for k in drafter.needs.layers]
    ctx = Context(
        trial.ids_T[None],
        torch.cat(layers, -1)[None] if layers else None,
        trial.state(FINAL)[None],
    )
    anchors_BA = torch.tensor([trial.anchors], device=trial.ids_T.device)
    drafted_BAK = torch.stack([trial.following(a) for a in trial.anchors])[None]
    assert isinstance(drafter, Predictor)
    hidden_AKD = drafter.hidden(ctx, anchors_BA, drafted_BAK)[0]
    logits_NS = torch.cat(
        [drafter.unembed(hidden_AKD[:, k], k) for k in range(trial.depths)]
    ).float()
    if drafter.vocab_S is None:
        return logits_NS
    whole = logits_NS.new_full((len(logits_NS), drafter.sizes.target_vocab), -torch.inf)
    whole[:, drafter.vocab_S] = logits_NS
    return whole


def reference_gap(
    folder: Path | str, drafter: Drafter, target: TargetParts, trial: CheckText | None = None
) -> float:
    """The largest difference between the reference network's logits of an export and those of the
    drafter, relative to the largest logit; infinite if their vocabularies differ."""
    trial = trial or CheckText.drawn_for(drafter, target)
    mine, theirs = drafter_logits(drafter, target, trial), reference_logits(folder, target, trial)
    inside = mine.isfinite()
    if not (theirs[~inside].isneginf() | (theirs[~inside] == 0)).all():
        return float("inf")
    return float((mine - theirs)[inside].abs().max() / mine[inside].abs().max().clamp_min(1e-9))


def largest_gap(target: TargetParts) -> float:
    """The largest `reference_gap` that rounding explains: the networks are computed in float32, but
    a head shared with the target in the target's dtype."""
    return 1e-4 + 4 * torch.finfo(target.dtype).eps


def _with_engine_config(files: ExportFolder) -> ExportFolder:
    """The files, with the config that vLLM derives from its self-describing format."""
    config = files.config
    kind = config.get("speculators_model_type")
    if kind is None:
        return files
    config_of_vllm = dict(config["transformer_layer_config"])
    for name in ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
        if config.get(name) is not None:
            config_of_vllm[name] = config[name]
    config_of_vllm["norm_before_residual"] = config.get("norm_before_residual", kind == "eagle3")
    config_of_vllm["norm_before_fc"] = config.get("norm_before_fc", False)
    if kind == "eagle3":
        config_of_vllm |= {name: config.get(name, False) for name in ("fc_norm", "norm_output")}
    else:
        config_of_vllm["pard_token"] = config["mask_token_id"]
    return replace(files, config=config_of_vllm)

"""A model with a peft adapter, merged once into a checkpoint of its own, which is then an
ordinary target: its parts can be loaded alone, caches use its own fingerprint, and engines serve
its folder."""

import copy
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specdec.errors import UserError, first_line, require
from specdec.integrity import of_file, of_value
from specdec.progress import tell
from specdec.runtime.quantised import method
from specdec.targets.gguf import made_once
from specdec.targets.target_config import TargetConfig

CONFIG, WEIGHTS, TOKENIZER = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer_config.json",
)
# peft's kinds that add tokens or activations instead of changing weights
PROMPTS = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "CPT",
    "CARTRIDGE",
)


def merged_checkpoint(cfg: TargetConfig, base: str) -> Path:
    """The folder under `target.cache` with the model at `base` and the adapter `cfg.adapter` merged
    into its weights, in the dtype of the files. Its tokenizer is the adapter's, if that has one.
    The folder's name ends in a hash of the adapter and of the base's location. Raises UserError if
    there is no adapter, if it belongs to another model, or if the model is quantised."""
    adapter, settings = _opened(cfg)
    trained_for = str(settings.get("base_model_name_or_path") or "")
    if trained_for and Path(trained_for).name != Path(cfg.path).name:
        tell(f"target.adapter={cfg.adapter!r} was trained for {trained_for}, not for {cfg.path}")
    files = sorted(path for path in adapter.iterdir() if path.is_file())
    source = of_value(
        {
            "model": str(Path(base).resolve()) if Path(base).exists() else base,
            "revision": cfg.revision,
            "states": states_of(Path(base)),
            "adapter": [[path.name, of_file(path)] for path in files],
        }
    )
    name = f"{Path(base).name}-{adapter.resolve().name}"
    folder = Path(cfg.cache) / f"{name}-{source[:12]}"

    def merge(building: Path) -> None:
        _merge(cfg, base, adapter, building, tied=bool(settings.get("ensure_weight_tying")))

    return made_once(folder, name, source, merge)


def require_mergeable(cfg: TargetConfig, config: Any) -> None:
    """Raise UserError if `cfg.adapter` cannot be merged into the model of this config, as far as
    its settings tell."""
    _, settings = _opened(cfg)
    require(
        method(config) is None,
        f"target.path={cfg.path!r} is quantised, and an adapter can be merged only into plain "
        "weights: give the model that it was made from",
    )
    kind = str(settings.get("peft_type"))
    require(kind not in PROMPTS, _not_mergeable(cfg, kind))


def _not_mergeable(cfg: TargetConfig, kind: str) -> str:
    return (
        f"target.adapter={cfg.adapter!r} is of a kind that cannot be merged into weights ({kind}): "
        "give a LoRA adapter"
    )


def tokenizer_source(cfg: TargetConfig, base: str) -> str:
    """The source of a target's tokenizer and chat template: the adapter's folder if it has them,
    else the model."""
    own = cfg.adapter is not None and (Path(cfg.adapter) / TOKENIZER).is_file()
    return str(cfg.adapter) if own else base


def states_of(folder: Path) -> list[list[Any]]:
    """Names, sizes and times of a folder's files, which change with the model. Empty for a hub
    model, which its revision identifies."""
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _opened(cfg: TargetConfig) -> tuple[Path, dict[str, Any]]:
    """The adapter's folder and settings."""
    adapter = Path(cfg.adapter or "")
    for name in (CONFIG, WEIGHTS):
        require(
            (adapter / name).is_file(),
            f"target.adapter={cfg.adapter!r} has no {name}: give a folder that peft wrote",
        )
    return adapter, _settings(adapter)


def _settings(adapter: Path) -> dict[str, Any]:
    try:
        settings = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
        if isinstance(settings, dict):
            return settings
        reason = "it is no object"
    except ValueError as error:
        reason = first_line(error)
    raise UserError(f"{adapter / CONFIG} cannot be read ({reason}): save the adapter again")


def _merge(cfg: TargetConfig, base: str, adapter: Path, folder: Path, tied: bool) -> None:
    """Write the merged model and its tokenizer to a folder. `tied`: if the model shares one matrix
    between embedding and head, a change by the adapter holds for both."""
    from peft import PeftModel, get_peft_model_state_dict  # as slow to import as transformers

    options: Any = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    config = AutoConfig.from_pretrained(base, **options)
    require_mergeable(cfg, config)
    tell(f"merging target.adapter={cfg.adapter!r} into {cfg.path}: made once, kept in {cfg.cache}")
    model = AutoModelForCausalLM.from_pretrained(
        base, config=copy.deepcopy(config), dtype="auto", **options
    )
    wrong = f"target.adapter={cfg.adapter!r} does not fit target.path={cfg.path!r}"
    try:
        with safe_open(adapter / WEIGHTS, framework="pt") as file:
            stored = set(file.keys())
        if not tied:
            _untie_if_adapted(model, stored)
        adapted: Any = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{adapter / WEIGHTS} cannot be read ({first_line(error)}): save the adapter again"
        ) from error
    except Exception as error:  # peft raises errors of many classes
        raise UserError(
            f"{wrong} ({first_line(error)[:200]}): give the model that it was trained for"
        ) from error
    require(
        hasattr(adapted.base_model, "merge_and_unload"),
        _not_mergeable(cfg, adapted.active_peft_config.peft_type.value),
    )
    ours = set(get_peft_model_state_dict(adapted))
    if strangers := sorted(stored ^ ours):
        raise UserError(
            f"{wrong} ({len(strangers)} of its tensors have no counterpart, such as "
            f"{strangers[0]}): give the model that it was trained for"
        )
    with torch.no_grad():
        merged = adapted.merge_and_unload(safe_merge=True)
    merged.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_source(cfg, base), **options).save_pretrained(folder)


def _untie_if_adapted(model: Any, stored: Collection[str]) -> None:
    """Separate the head's weights from the embedding's if the adapter changes one of the two: peft
    changes only that one."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    if last is None or first.weight is not last.weight:
        return
    names = {name.split(".")[-1] for name, x in model.named_modules() if x in (first, last)}
    if names & {part for name in stored for part in name.split(".")}:
        last.weight = nn.Parameter(first.weight.detach().clone())
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False

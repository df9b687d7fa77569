"""Loading with transformers: a target, its first layers, its parts or the source of a draft.

transformers raises errors of any class for a model that it cannot load. Here they become a
`UserError`, and its warnings are shown once each.
"""

import copy
import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME, logging

from specdec.compat import adapter_beside, shown_warnings
from specdec.errors import UserError, first_line, located, require
from specdec.files import make_folder
from specdec.hub import require_on_hub
from specdec.progress import tell
from specdec.runtime.cpu import packed_linear
from specdec.runtime.cpu.grouped_attention import use_grouped_attention
from specdec.runtime.device import capability
from specdec.runtime.quantised import (
    itemsize,
    method,
    plain_state,
    require_packages,
    unpack_weights,
    without_method,
)
from specdec.targets.adapter import merged_checkpoint
from specdec.targets.checkpoint_files import AGAIN, SafetensorsFiles, file_of_model
from specdec.targets.fingerprint import computing_keys, digest_of_weights, fingerprint_of, in_files
from specdec.targets.gguf import model_path
from specdec.targets.parts import depth_of
from specdec.targets.spread import DISK, device_map
from specdec.targets.target_config import DTYPES, TargetConfig, resolved
from specdec.terminal import one_line

WARNED = set[str]()  # transformers' warnings that this process has shown


def opened(cfg: TargetConfig) -> tuple[TargetConfig, str, Any, Any, SafetensorsFiles | None]:
    """The resolved configuration, and the path, config, tokenizer and files of its model."""
    cfg, path = resolved(cfg), model_path(cfg.path, Path(cfg.cache))
    _require_no_adapter(cfg, path)
    if cfg.adapter is not None:
        with loading_errors(cfg):
            path = str(merged_checkpoint(cfg, path).resolve())
        cfg = replace(cfg, path=path, adapter=None, revision=None)
    with loading_errors(cfg):
        config = AutoConfig.from_pretrained(path, **_options(cfg))
    require_packages(cfg.path, config)
    with loading_errors(cfg):
        tokenizer = AutoTokenizer.from_pretrained(path, **_options(cfg))
    with located(f"target.path={cfg.path!r}"):
        weights = SafetensorsFiles.find(path, cfg.revision, Path(cfg.cache), config)
    return cfg, path, config, tokenizer, weights


def _require_no_adapter(cfg: TargetConfig, path: str) -> None:
    """Raise UserError for a model with an adapter beside it. transformers would apply the adapter,
    but engines, and code that reads the model's own files, would not."""
    with loading_errors(cfg):
        adapter = adapter_beside(path, cfg.revision)
    require(
        adapter is None,
        f"target.path={cfg.path!r}: adapter_config.json beside the model names an adapter, which "
        "engines do not apply: move it to a folder of its own and give target.adapter=FOLDER, or "
        "remove adapter_config.json to use the model without it",
    )


def _options(cfg: TargetConfig) -> dict[str, Any]:
    return {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}


def load_model(
    cfg: TargetConfig, path: str, config: Any, auto: Any, rules: dict[str, str] | None = None
) -> Any:
    """The model of a resolved configuration, on its device and packed if `cfg` says so, of the
    class `auto` of transformers. With `rules` (see `rules_of`), this process's part of the model.
    Raises UserError if it cannot be loaded, or if weights are missing in the checkpoint."""
    grouped, quantised = cfg.attn_implementation == "grouped", method(config) is not None
    # quantised layers are made on their device, and some cannot be moved later
    places: dict[str, Any] | None = {"": cfg.device} if quantised else None
    with loading_errors(cfg):
        options, offloaded = _options(cfg), None
        if cfg.device_map:
            places = _places(cfg, auto, config)
            if DISK in places.values():  # weights that the files hold in another form go there
                root = make_folder(Path(cfg.cache))
                offloaded = tempfile.TemporaryDirectory(prefix="offloaded-", dir=root)
                options["offload_folder"] = offloaded.name
        model, loading = auto.from_pretrained(
            path,
            config=config,
            dtype=DTYPES[cfg.dtype],
            attn_implementation=None if grouped else cfg.attn_implementation,
            output_loading_info=True,
            device_map=places,
            distributed_config=None if rules is None else _over_processes(rules),
            **options,
        )
        if offloaded is not None:
            weakref.finalize(model, offloaded.cleanup)
        if quantised:
            unpack_weights(model, config, cfg.path, cfg.dtype)
        elif places is None and rules is None:
            model.to(torch.device(cfg.device))
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"target.path={cfg.path!r}: the checkpoint lacks {len(missing)} of the weights of a "
            f"{type(model).__name__}, such as {missing[0]}: {AGAIN}, or give a whole model"
        )
    if grouped:
        use_grouped_attention(model)
    alone = places is None or (not cfg.device_map and packed_linear.all_plain(model))
    if cfg.packed and alone and rules is None:  # then drafts loaded for this target are packed too
        packed_linear.pack(model)
    return model


def _over_processes(rules: dict[str, str]) -> DistributedConfig:
    return DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]), tp_plan=rules)


def _places(cfg: TargetConfig, auto: Any, config: Any) -> dict[str, Any]:
    """The device map of the model (`device_map` in spread.py)."""
    require(
        int(os.environ.get("WORLD_SIZE", "1")) == 1,
        "target.device_map=auto spreads one target over all devices: start one process",
    )
    empty = empty_model(cfg, config, auto)
    count = depth_of(config.get_text_config(decoder=True))
    device, dtype = torch.device(cfg.device), DTYPES[cfg.dtype]
    bytes_each = itemsize(config, dtype, capability(device))
    return device_map(empty, count, device, dtype, cfg.max_memory, bytes_each)


def empty_model(cfg: TargetConfig, config: Any, auto: Any) -> Any:
    """The model of a config on the meta device, with plain weights (see `load_model`)."""
    config = copy.deepcopy(config)
    if method(config) is not None:
        del config.quantization_config
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=cfg.trust_remote_code)


def load_source(auto: Any, source: str, device: str) -> Any:
    """The model from which a draft is initialised, of transformers' class `auto`, in float32 and
    with plain weights even if they are quantised. Raises UserError if it cannot be loaded this
    way."""
    cfg = TargetConfig(path=source, dtype="float32", device="cpu", packed=False)
    require_on_hub("drafter.source", source)
    try:
        with loading_errors(cfg):
            config = AutoConfig.from_pretrained(source)
        require_packages(cfg.path, config)
        if (quantisation := method(config)) is None:
            return load_model(cfg, source, config, auto)
        # some quantised layers compute on one kind of device alone
        model = load_model(replace(cfg, device=device), source, copy.deepcopy(config), auto)
    except UserError as error:
        raise UserError(str(error).replace("target.path", "drafter.source")) from error
    keys = without_method(config.to_dict())
    whole = auto.from_config(AutoConfig.for_model(**keys), trust_remote_code=False).float()
    try:
        whole.load_state_dict(plain_state(model, torch.float32))
    except (UserError, RuntimeError) as error:
        raise UserError(
            f"drafter.source={source!r} stores its weights quantised ({quantisation}), in a way "
            f"that cannot be read as plain numbers ({first_line(error)}): give the model that it "
            "was made from"
        ) from error
    return whole


def fingerprint_of_bin(cfg: TargetConfig, path: str, config: Any) -> str | None:
    """The fingerprint of a checkpoint in PyTorch's own files; None if there are none."""

    def file_of(name: str) -> str | None:
        return file_of_model(path, name, cfg.revision)

    with loading_errors(cfg):
        names = [WEIGHTS_NAME]
        if file_of(WEIGHTS_NAME) is None:
            if (index := file_of(WEIGHTS_INDEX_NAME)) is None:
                return None
            names = sorted(
                set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
            )
        files = [Path(file) for name in names if (file := file_of(name)) is not None]
        weights = digest_of_weights(in_files(files))
    return fingerprint_of(weights, computing_keys(config))


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress transformers' warnings."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def loading_errors(cfg: TargetConfig) -> Iterator[None]:
    """Turn all errors that transformers and its libraries raise for a model that they cannot load
    into a UserError, and show each warning of transformers once."""

    def show(warning: str) -> None:
        line = f"target.path={cfg.path!r}: transformers warns: {one_line(warning)[:400]}"
        if line not in WARNED:
            WARNED.add(line)
            tell(line)

    try:
        with shown_warnings(show):
            yield
    except (UserError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"target.path={cfg.path!r} could not be loaded ({first_line(error)}): give a hub name, "
            "a folder with a causal or encoder-decoder LM of transformers, a .gguf file, or "
            "package:NAME"
        ) from error

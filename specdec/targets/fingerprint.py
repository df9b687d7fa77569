"""The fingerprint of a target: a hash of everything that changes a logit, in its weights and its
config.

It identifies the checkpoint, however it is loaded. Weights are hashed by the names in the files,
which no library update changes, and by value, independent of the floating-point type in the files.
Only config keys that change the computation count, without values that a class of transformers
derives or takes by default: a newer version may have more of those. Code that comes with the
checkpoint counts too.
"""

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import logging
from xxhash import xxh3_128

AT_ONCE = 2**22  # numbers of a tensor that are hashed at a time
# parts of config keys without effect on logits outside training
IDLE = re.compile(
    r"_.*|transformers_version|architectures|auto_map|model_name|name_or_path|dtype|torch_dtype"
    r"|use_cache|output_(attentions|hidden_states|router_logits|scores)|return_dict.*"
    r"|gradient_checkpointing.*|tokenizer_class|tokenizer_config"
    r"|task_specific_params|id2label|label2id|num_labels|problem_type|finetuning_task|prefix"
    r"|chunk_size_feed_forward|(bos|eos|sep|cls|mask|unk)_token_id|initializer_.*|init_std"
    r"|.*dropout.*|.*pdrop|.*layerdrop|.*aux_loss.*|router_z_loss.*|max_length|min_length"
)
# in the code of a model whose positions are counted from the padding token's id
BY_PADDING = re.compile("position_ids_from_input_ids|SinusoidalPositional")
_described_configs: dict[tuple[type, str], str] = {}  # the `computing_keys` of configs seen before


def digest_of(x: Tensor) -> str:
    """A hash of a tensor's shape and values, independent of a wider type: bfloat16 or float16
    stored as float32 has the same hash."""
    flat = x.detach().reshape(-1)
    kept = _type_needed(flat)
    digest = xxh3_128(json.dumps([str(kept), list(x.shape)]).encode())
    for some in flat.split(AT_ONCE):
        some = some if kept is some.dtype else some.to(kept)
        digest.update(some.contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def _type_needed(flat: Tensor) -> torch.dtype:
    """The first of bfloat16, float32 and float64 that represents these numbers exactly; for other
    types, their own."""

    def all_parts(same: Any) -> bool:
        return all(same(some) for some in flat.split(AT_ONCE))

    if flat.dtype not in (torch.float16, torch.float32, torch.float64):
        return flat.dtype
    if flat.dtype is torch.float64 and not all_parts(
        lambda x: torch.equal(x.float().double().view(torch.int64), x.view(torch.int64))
    ):
        return torch.float64
    low = 0xFFFF  # the bits of a float32 that a bfloat16 lacks
    short = all_parts(lambda x: not bool((x.float().view(torch.int32) & low).any()))
    return torch.bfloat16 if short else torch.float32


def digest_of_weights(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of named tensors, independent of their order; they are read one at a time."""
    digests = sorted((name, digest_of(x)) for name, x in tensors)
    return hashlib.blake2b(json.dumps(digests).encode(), digest_size=16).hexdigest()


def untied(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a file would hold: of tensors that share memory, only the first."""
    held = list(tensors)  # while a tensor lives, no other can take its place in memory
    known = set[Any]()
    for name, x in held:
        place = (x.device, x.data_ptr(), tuple(x.shape), x.stride()) if x.numel() else name
        if place not in known:
            known.add(place)
            yield name, x


def fingerprint_of(weights: str, computed: str) -> str:
    """The fingerprint of a target, from the hash of its weights and its `computing_keys`."""
    return hashlib.blake2b(f"{weights} {computed}".encode(), digest_size=12).hexdigest()


def computing_keys(config: Any) -> str:
    """The keys of a config that change its model's computation, as one text. Saving a config again,
    or giving a key its default value, does not change it."""
    of = type(config), json.dumps(_plain(config.to_dict()), sort_keys=True)
    if of not in _described_configs:
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # about keys that are missing below
        try:
            keys = _described(config)
        finally:
            logging.set_verbosity(verbosity)
        _described_configs[of] = json.dumps([keys, _own_code(config)], sort_keys=True)
    return _described_configs[of]


def _described(config: PreTrainedConfig) -> dict[str, Any]:
    nested = {k: x for k, x in vars(config).items() if isinstance(x, PreTrainedConfig)}
    all_keys = config.to_dict()
    keys = {k: x for k, x in all_keys.items() if not IDLE.fullmatch(k) and k not in nested}
    if not _counts_by_padding(config):
        keys.pop("pad_token_id", None)
    needed = _not_derived(type(config), keys, {k: all_keys[k] for k in nested if k in all_keys})
    parts = {name: _described(part) for name, part in nested.items()}
    return dict(_plain({**needed, "model_type": config.model_type, **parts}))


def _not_derived(kind: Any, keys: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """The keys without those that have their default value in a config of this class. `rest`: its
    nested parts, which it needs in any case."""

    def same(some: Mapping[str, Any]) -> bool:
        try:
            again = kind(**some, **rest).to_dict()
        except Exception:  # a config's own checks raise anything
            return False
        return bool(_plain({k: again.get(k) for k in keys}) == whole)

    whole = _plain(keys)
    try:
        default = kind().to_dict()
    except Exception:
        default = {}
    unusual = {k: x for k, x in keys.items() if k not in default or default[k] != x}
    needed = unusual if same(unusual) else dict(keys)
    for key in sorted(needed):
        without = {k: x for k, x in needed.items() if k != key}
        if same(without):
            needed = without
    return needed


def _plain(value: Any) -> Any:
    """A value in JSON's types, with whole numbers written alike whatever their type."""
    if isinstance(value, Mapping):
        return {str(k): _plain(x) for k, x in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(x) for x in (sorted(value, key=str) if isinstance(value, set) else value)]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return _plain(value.to_dict()) if hasattr(value, "to_dict") else str(value)


def _counts_by_padding(config: Any) -> bool:
    """Whether the padding token's id affects the model's computation."""
    if getattr(config, "is_encoder_decoder", False):
        return True
    module = type(config).__module__.replace("configuration_", "modeling_")
    try:
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    except (ImportError, OSError, ValueError):
        return True
    return not source or bool(BY_PADDING.search(source))


def _own_code(config: Any) -> list[str]:
    """Hashes of the code in a checkpoint, if it runs; empty for transformers' own classes."""
    if not type(config).__module__.startswith("transformers_modules"):
        return []
    folder = Path(str(sys.modules[type(config).__module__].__file__)).parent
    return [xxh3_128(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.py"))]


def in_files(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of PyTorch's own files, read without running pickled code."""
    for file in files:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        yield from ((name, x) for name, x in state.items() if isinstance(x, Tensor))

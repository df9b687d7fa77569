"""Every private function of torch, transformers and accelerate that this project calls, each with
the public alternative and why it does not suffice, and settings that hold for a whole process. If a
release removes one of them, fix this file; tests/test_house.py finds private functions that are
called elsewhere. Changes to objects of other libraries (a method, a class, the layers of a model)
are made here as well, each with the reason."""

import copy
import csv
import ctypes
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from logging import WARNING, Handler, LogRecord
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from huggingface_hub import constants as hub_constants
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import mark_static_address
from torch._inductor import config as inductor_config
from transformers import GenerationConfig, modeling_gguf_pytorch_utils
from transformers.utils import chat_template_utils, logging
from transformers.utils.peft_utils import find_adapter_config_file

__all__ = ["dynamo_config", "inductor_config", "mark_static_address"]
# torch.compile's own settings have no other place; `torch.compiler.config` has few of them. A
# buffer at a fixed address, which CUDA graphs do not copy, is marked by no public function.


# torch


def packed_weight(weight: Tensor, rows: int) -> Tensor:
    """A copy of a weight [out, in] in oneDNN's layout for products with `rows` rows. The public
    alternative, torch.utils.mkldnn, converts inputs and outputs at every call. Raises RuntimeError
    if this CPU or this build cannot make it, AttributeError if torch has no such operator."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a weight from `packed_weight`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def packed_sum(x: Tensor, packed: Tensor, bias: Tensor | None, other: Tensor) -> Tensor:
    """`F.linear` with a weight from `packed_weight`, plus `other`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, bias, "add")
    return out


def onednn_multiplies_bfloat16() -> bool:
    """Whether oneDNN has bfloat16 products for this CPU, fast or slow. False if this build of torch
    cannot report it. No public function reports it."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


def packed_operator() -> Any:
    """The operator behind `packed_product`, for counting its operations; None if torch lacks it."""
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def version(x: Tensor) -> int:
    """The number of times that a tensor was written in place. torch's notes on autograd describe
    this counter, but no public function returns it."""
    return x._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """The `version` of each tensor. Each forward pass reads those of all its weights."""
    return [x._version for x in tensors]


def storage_of(x: Tensor) -> int:
    """An identifier that two tensors share if and only if they share memory. The public
    alternative, a storage's `data_ptr`, is 0 for every empty tensor and on the meta device."""
    address: int = x.untyped_storage()._cdata
    return address


def own_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module itself, without its submodules, that belong in its
    state dict. `state_dict()` gives them too, but makes layers of bitsandbytes change the layout of
    their weight."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    dropped = module._non_persistent_buffers_set
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    yield from ((name, x) for name, x in buffers if name not in dropped)


def set_buffer(module: nn.Module, name: str, x: Tensor) -> None:
    """Replace a buffer and keep whether it is saved; `register_buffer` would make it persistent."""
    module._buffers[name] = x


def hooks_of(module: nn.Module) -> list[Any]:
    """The dicts in which a module, its submodules and torch keep hooks on calls. These dicts are
    never replaced, so a forward pass can check them for hooks. No public function reports hooks."""
    of_torch = nn.modules.module
    dicts = [of_torch._global_forward_hooks, of_torch._global_forward_pre_hooks]
    for part in module.modules():
        dicts += [part._forward_hooks, part._forward_pre_hooks]
    return dicts


def parts_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The dict in which a module keeps its submodules. It remains the same object when a submodule
    is replaced; the public `children` would create new objects in each forward pass."""
    return module._modules


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward function that a module runs now: its class's method, or the one given to
    `replace_forward`."""
    forward: Callable[..., Any] = vars(module).get("forward", partial(type(module).forward, module))
    return forward


def replace_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Make a library's module run `forward` in place of its class's method. The public alternatives
    fall short: a wrapper module would rename all weights inside, and a hook can neither call the
    method several times nor change its attributes during the call. Pass a `partial` of the module,
    so that a deep copy runs the copy."""
    module.forward = forward


@contextmanager
def with_attributes(module: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a library's module during a block, for values that its forward pass
    takes no argument for: a bias, a bound of time steps, a recurrent state that the module keeps
    itself."""
    own = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(module, name, value)


def change_class(thing: Any, kind: type) -> None:
    """Turn an existing object into an instance of a subclass of its class. Caches that are made
    before other processes start to mirror them need this: a proxy would be no instance of the cache
    classes that models check for."""
    assert issubclass(kind, type(thing))
    thing.__class__ = kind


def copy_of_layers(
    model: Any,
    layers: nn.ModuleList,
    kept: Sequence[int],
    copied: Callable[[nn.Module, Tensor], Tensor],
    plain: Callable[[nn.Module], nn.Module | None],
) -> tuple[Any, nn.ModuleList]:
    """A copy of a model of any library with only the layers `kept` of its list `layers`, and the
    copied list. Each tensor x of a module becomes `copied(module, x)`; a module for which `plain`
    returns a replacement becomes a copy of that replacement. Embeddings update their number of
    rows. No public function does this: `deepcopy` copies all layers, and a model made from the
    configuration lacks what a library changed after loading. This function therefore calls
    `deepcopy` with a memo that holds the copied tensors."""
    memo = dict[int, Any]()
    left = {id(m) for k, layer in enumerate(layers) if k not in kept for m in layer.modules()}
    for part in model.modules():
        if id(part) in left:
            continue
        if (instead := plain(part)) is not None:
            for x in instead.parameters():
                memo[id(x)] = copied(part, x)
            memo[id(part)] = copy.deepcopy(instead, memo)
            continue
        for x in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            if id(x) not in memo:
                memo[id(x)] = copied(part, x)
    memo[id(layers)] = nn.ModuleList(copy.deepcopy(layers[k], memo) for k in kept)
    few = copy.deepcopy(model, memo)
    for part in few.modules():
        if isinstance(part, nn.Embedding):
            part.padding_idx, part.num_embeddings = None, len(part.weight)
    return few, memo[id(layers)]


def twin(module: nn.Module) -> Any:
    """The same module, with its own dicts of submodules, buffers and hooks at every level; linear
    layers are shared, as they may hold a packed copy of their weight. `copy.deepcopy` would copy
    the weights, and `copy.copy` shares these dicts."""
    if isinstance(module, nn.Linear):
        return module
    same: Any = copy.copy(module)
    inner = module._modules.items()
    same._modules = {name: None if m is None else twin(m) for name, m in inner}
    same._buffers = dict(module._buffers)  # rotary factors may be replaced while it runs
    same._forward_hooks = copy.copy(module._forward_hooks)
    return same


# transformers


def random_model(kind: Any, config: Any, attention: str | None = None) -> Any:
    """A model of class `kind` in float32 from a copy of its configuration, with transformers' own
    choice of `attention` if none is named. The auto classes do this, but only for classes that they
    know, and calling the class itself makes parts in the dtype that the process happens to have."""
    copied = copy.deepcopy(config)
    return kind._from_config(copied, dtype=torch.float32, attn_implementation=attention)


def restore_rescaled_weights(model: nn.Module) -> bool:
    """Restore the stored weights of a model that rescales them in place in a forward pass, such as
    RWKV; the next forward pass rescales them again. Returns whether the model is such a model. The
    factors are powers of two. The public alternative, `train()` and a forward pass, would switch
    dropout on."""
    rescaling: list[Any] = [m for m in model.modules() if hasattr(m, "layers_are_rescaled")]
    for module in rescaling:
        if module.layers_are_rescaled and not module.training:
            module.training = True
            module._rescale_layers()
            module.training = False
    return bool(rescaling)


def keep_stored_weights(model: nn.Module) -> None:
    """Make a model that rescales its weights return and accept stored weights whenever its state
    dict is made or loaded."""
    for module in model.modules():
        if hasattr(module, "layers_are_rescaled"):
            module.register_state_dict_pre_hook(lambda m, *_: restore_rescaled_weights(m))
            module.register_load_state_dict_pre_hook(lambda m, *_: restore_rescaled_weights(m))


def attention_of(config: Any) -> str | None:
    """The attention implementation of a model of this configuration ("sdpa", "eager", …). The
    public `set_attn_implementation` sets it, but no public function reads it."""
    kind: str | None = config._attn_implementation
    return kind


def set_attention(config: Any, kind: str) -> None:
    """Choose the attention implementation in a configuration whose model does not exist yet, or
    that several models share."""
    config._attn_implementation = kind


def generation_defaults() -> dict[str, Any]:
    """The values of a generation config that have no effect. `GenerationConfig()` itself has None
    for them in transformers 5, since a model's own values may replace them."""
    return dict(GenerationConfig._get_default_generation_params())


def logits_processors(
    model: Any, config: GenerationConfig, eos: Any, *args: Any, **more: Any
) -> Any:
    """The logits processors that `generate` builds from a generation config. With the public
    classes, this project would have to repeat the order of `generate`."""
    config._eos_token_tensor = eos
    return model._get_logits_processor(config, *args, **more)


class TokensBefore(Tensor):
    """The number of tokens before those of a forward pass, for each row and token [B, T], less 0 to
    T - 1.

    Llama 4 scales the queries of some layers by position, but these layers receive no positions:
    they add 0 to T - 1 to the length of the cache, as if all rows were equally long and no token
    were a branch. If this object takes the place of that length, the sum is the tokens' true
    positions, and the scales have the shape [B, T, 1, 1] in place of [1, T, 1, 1]. No public
    argument passes positions to these layers.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.view:
            return args[0].as_subclass(Tensor)[..., None, None]
        devices = [x.device for x in args if isinstance(x, Tensor) and not isinstance(x, cls)]
        if devices:  # a layer may be on another device than the text
            args = tuple(
                x.as_subclass(Tensor).to(devices[0]).as_subclass(cls) if isinstance(x, cls) else x
                for x in args
            )
        return super().__torch_function__(  # type: ignore[no-untyped-call]
            func, types, args, kwargs or {}
        )


def relative_position_bucket(attention: Any, distance_BTP: Tensor) -> Tensor:
    """T5's buckets for the distances between decoder tokens. Only a private method of the layer
    computes them."""
    bucket_BTP: Tensor = attention._relative_position_bucket(
        distance_BTP,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return bucket_BTP


def template_environment() -> Any:
    """The jinja environment of transformers' chat templates: filters, globals and extensions.
    `apply_chat_template` uses it but does not expose it."""
    return chat_template_utils._compile_jinja_template("").environment


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress, during the block, library output that a user cannot act on: transformers'
    progress bars for loading and saving, its warnings, and announcements of changes in later
    versions. Progress bars of downloads stay, and so do warnings that the environment enables
    (TRANSFORMERS_VERBOSITY, PYTHONWARNINGS). No public function suppresses the bar for GGUF
    files."""
    gguf: Any = modeling_gguf_pytorch_utils
    verbosity, bar_of_gguf = logging.get_verbosity(), gguf.tqdm
    hook = logging.set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **kwargs | {"disable": True}))
    gguf.tqdm = partial(bar_of_gguf, disable=True)
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            for kind in (FutureWarning, DeprecationWarning) if not sys.warnoptions else ():
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        logging.set_tqdm_hook(hook)
        gguf.tqdm = bar_of_gguf
        logging.set_verbosity(verbosity)


# messages of transformers at loading without effect on results
NO_MATTER = re.compile(
    r"deprecated|fast path|falling back|load report|generation flags|pad_token|attention mask|"
    r"flash",
    re.IGNORECASE,
)


class _Shown(Handler):
    """Passes each warning that does not match NO_MATTER on to `show`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(WARNING)
        self.show = show

    def emit(self, record: LogRecord) -> None:
        message = record.getMessage()
        if not NO_MATTER.search(message):
            self.show(message)


@contextmanager
def shown_warnings(show: Callable[[str], None]) -> Iterator[None]:
    """Within `quiet_libraries`, pass on the warnings that transformers gives while it loads a model
    or a tokenizer, such as incorrect tokenization or untied weights, because they concern results.
    Outside it, transformers shows them itself."""
    verbosity = logging.get_verbosity()
    if verbosity <= WARNING or "TRANSFORMERS_VERBOSITY" in os.environ:
        yield
        return
    handler = _Shown(show)
    logging.set_verbosity_warning()
    logging.disable_default_handler()
    logging.add_handler(handler)
    try:
        yield
    finally:
        logging.remove_handler(handler)
        logging.enable_default_handler()
        logging.set_verbosity(verbosity)


def adapter_beside(path: str, revision: str | None) -> str | None:
    """The adapter_config.json beside a model in a folder or on the hub, which transformers applies
    when it loads the model; None if there is none."""
    adapter: str | None = find_adapter_config_file(path, revision=revision)
    return adapter


# datasets and fsspec


def split_patterns(resolved: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """The file name patterns of each split, by the datasets library's rules for folders without
    settings of their own; `resolved` returns the names that match a pattern. The public
    `get_data_patterns` also considers files without records, and treats brackets in the folder's
    name as a pattern."""
    from datasets import data_files  # slow to import, seldom used

    patterns: Mapping[Any, list[str]] = data_files._get_data_files_patterns(resolved)
    return {str(split): list(some) for split, some in patterns.items()}


def glob_expression(pattern: str) -> str:
    """The regular expression for a file name pattern, as fsspec and the datasets library match it.
    Their public functions match names only against a file system."""
    from fsspec.utils import glob_translate

    return str(glob_translate(pattern))


# accelerate


def forget_precision() -> None:
    """Allow the next Accelerator of this process to have another precision. accelerate keeps that
    of the first one, and `free_memory` does not clear it."""
    AcceleratorState._reset_state()


# huggingface_hub


def read_hub_cache_alone() -> None:
    """Read models and data of the hub from its cache alone, in this process and in those that it
    starts. The variable HF_HUB_OFFLINE is read only when the libraries are imported, and they have
    no function to change this later."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    hub_constants.HF_HUB_OFFLINE = True
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.config.HF_HUB_OFFLINE = True


# csv


def csv_rows(lines: Iterable[str], longest: int) -> Iterator[list[str]]:
    """The rows of a CSV file whose cells have up to `longest` characters. The csv module has one
    limit for the whole process (131,072 characters by default), and checks it at each row."""
    rows = csv.reader(lines)
    while True:
        before = csv.field_size_limit(longest)
        try:
            row = next(rows, None)
        finally:
            csv.field_size_limit(before)
        if row is None:
            return
        yield row


# the C library

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # from Linux's <fcntl.h> and <linux/fs.h>
RENAME_SWAP = 2  # from macOS's <sys/stdio.h>


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two files or folders atomically, so that both names exist at any moment.
    Returns False, without a change, if the system or the file system does not support this.
    Python's `os` has no such function."""
    library, a, b = ctypes.CDLL(None), os.fsencode(one), os.fsencode(other)
    try:
        if sys.platform == "darwin":
            return bool(library.renamex_np(a, b, RENAME_SWAP) == 0)
        return bool(library.renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE) == 0)
    except AttributeError:  # an older C library
        return False


# hydra


def hydra_arguments(arguments: Sequence[str]) -> Any:
    """The flags and overrides of a command line, parsed by Hydra's own parser. No public function
    offers it."""
    from hydra._internal.utils import get_args_parser  # only where a command line is read

    return get_args_parser().parse_args(arguments)


def start_hydra(folder: str, beside: str | None) -> None:
    """Make `hydra.compose` read the configurations in `folder` and, as with --config-dir, in
    `beside`. The public `initialize_config_dir` takes one folder."""
    import hydra._internal.hydra
    from hydra import version
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery

    places = create_config_search_path(folder)
    if beside is not None:
        places.prepend("command-line", f"file://{beside}", SearchPathQuery(provider="schema"))
    version.setbase("1.3")
    hydra._internal.hydra.Hydra.create_main_hydra2("train", places)

"""Quantised weights of a checkpoint as the plain numbers that the model computes with.

Each library stores them differently: as integers with scales, packed into other shapes, or in
tensors of its own class. They are read through the layers themselves: a linear layer applied to the
identity matrix gives its weight, in whatever form it is stored.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specdec.compat import own_state, with_attributes
from specdec.errors import UserError, first_line, require


class QuantisationKind(NamedTuple):
    """A quantisation method that transformers reads from a checkpoint: the `packages` that it needs
    (names for installing and for importing), the CUDA capability below which transformers
    dequantises the weights (a CPU has 0), and the bits of a weight if the config does not have
    them."""

    packages: dict[str, str] = {}
    dense_below: float = 0.0
    bits: int = 8


# every method that needs more than a plain 8-bit one; a new kind is a line here and its test
KINDS = {
    "auto-round": QuantisationKind({"auto-round": "auto_round"}),
    "awq": QuantisationKind({"gptqmodel": "gptqmodel"}),
    "bitsandbytes": QuantisationKind({"bitsandbytes": "bitsandbytes"}),
    "compressed-tensors": QuantisationKind({"compressed-tensors": "compressed_tensors"}),
    "fp8": QuantisationKind(dense_below=8.9),
    "gptq": QuantisationKind({"optimum": "optimum", "gptqmodel": "gptqmodel"}),
    "mxfp4": QuantisationKind(dense_below=7.5, bits=4),
    "torchao": QuantisationKind({"torchao": "torchao"}),
}
SCALES = 0.0625  # bytes that a weight's share of its scales takes, with groups of 32
AT_ONCE = 1024  # rows of the identity that a layer multiplies at a time


def method(config: Any) -> str | None:
    """The name of a model's quantisation method, such as "fp8", from its config; None if it is not
    quantised."""
    theirs = getattr(config, "quantization_config", None)
    if theirs is None:
        return None
    name = theirs.get("quant_method") if isinstance(theirs, dict) else theirs.quant_method
    return str(getattr(name, "value", name))


def itemsize(config: Any, dtype: torch.dtype, capability: float) -> float:
    """The approximate bytes of a weight of a model's quantised layers in memory, from its config:
    those of the dtype if it is stored as a plain number, or dequantised on a device of this CUDA
    capability (0 for a CPU)."""
    name, theirs = method(config), getattr(config, "quantization_config", {})
    kind = KINDS.get(name or "", QuantisationKind(bits=4 if "mxfp4" in (name or "") else 8))
    if name is None or capability < kind.dense_below:
        return float(dtype.itemsize)
    keys = theirs if isinstance(theirs, dict) else theirs.to_dict()
    four = keys.get("load_in_4bit") or "nvfp4" in str(keys)
    bits = keys.get("bits") or _bits_of_groups(keys) or (4 if four else kind.bits)
    return int(bits) / 8 + SCALES


def _bits_of_groups(keys: Mapping[str, Any]) -> int | None:
    """The most bits of a weight in the `config_groups` of compressed-tensors; None without them."""
    groups = keys.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights = [group.get("weights") for group in groups if isinstance(group, dict)]
    bits = [w.get("num_bits") for w in weights if isinstance(w, dict)]
    return max((n for n in bits if type(n) is int), default=None)


def lacking(name: str | None) -> list[str]:
    """The packages that a quantisation method needs and that are not installed."""
    packages = KINDS.get(name or "", QuantisationKind()).packages
    return [package for package, module in packages.items() if find_spec(module) is None]


def require_packages(path: str, config: Any) -> None:
    """Raise UserError if a quantised checkpoint needs packages that are not installed."""
    name = method(config)
    require(
        not (packages := lacking(name)),
        f"target.path={path!r} is stored quantised ({name}), for which transformers needs "
        f"{' and '.join(packages)}: pip install {' '.join(packages)}",
    )


@torch.no_grad()
def unpack_weights(model: Any, config: Any, path: str, dtype: str) -> None:
    """Run the whole model once: some libraries unpack weights in the first forward pass, but not if
    only a part of the model runs. Raises UserError if a library's layers compute only in the dtype
    of the files, given in `config`."""
    ids_BT = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    decoder = {"decoder_input_ids": ids_BT} if model.config.is_encoder_decoder else {}
    own = str(getattr(config.get_text_config(decoder=True), "dtype", None)).split(".")[-1]
    try:
        model.eval()(input_ids=ids_BT, **decoder)
    except RuntimeError as error:
        if own == dtype or own not in ("float32", "bfloat16", "float16"):
            raise
        raise UserError(
            f"target.path={path!r} is stored quantised ({method(config)}), and its layers do "
            f"not compute in {dtype} ({first_line(error)}): give target.dtype={own}"
        ) from error


def without_method(config: dict[str, Any]) -> dict[str, Any]:
    """A config's keys without its quantisation, for a model with plain weights."""
    return {key: x for key, x in config.items() if key != "quantization_config"}


def plain(x: Tensor) -> bool:
    """Whether a tensor's values are stored directly, as floating-point numbers of 16 bits or
    more."""
    inner = x.data if isinstance(x, nn.Parameter) else x
    return type(inner) is Tensor and x.is_floating_point() and x.itemsize >= 2


def is_plain(layer: nn.Module) -> bool:
    """Whether a linear layer only multiplies by its weight and adds its bias."""
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)  # some libraries replace the method of one layer
        and {name for name, _ in layer.named_parameters(recurse=False)} <= {"weight", "bias"}
        and not any(True for _ in layer.buffers(recurse=False))
        and plain(layer.weight)
        and tuple(layer.weight.shape) == (layer.out_features, layer.in_features)
    )


@torch.no_grad()
def plain_state(
    module: nn.Module, dtype: torch.dtype, without: str | None = None
) -> dict[str, Tensor]:
    """The state dict of a module with the weights of its quantised linear layers as plain
    numbers in `dtype`, and without the additional tensors of their libraries. The submodule at
    the path `without` is skipped. Raises UserError for a submodule that is neither plain nor a
    linear layer."""
    state: dict[str, Tensor] = {}
    done = [] if without is None else [without]  # paths of parts that are not looked into
    for path, part in module.named_modules(remove_duplicate=False):
        if any(path.startswith(f"{outer}.") for outer in done):
            continue
        name = f"{path}." if path else ""
        if is_linear(part) and not holds_weight(part):
            done.append(path)
            bias = getattr(part, "bias", None)
            state[f"{name}weight"] = product_of(part, dtype)
            if isinstance(bias, Tensor):
                state[f"{name}bias"] = bias.to(dtype)
            continue
        for own, x in own_state(part):
            if is_linear(part) and own not in ("weight", "bias"):
                continue  # scales that were already applied
            require(
                type(x.data) is Tensor and x.itemsize >= 2,
                f"the target keeps {name}{own} as {_kind(x)} in a {type(part).__name__}, which "
                "cannot be read as plain numbers: give a drafter.initialisation or drafter.source "
                "that does not copy the target's layers, or a target that is not quantised",
            )
            state[name + own] = x
    return state


def dense_linear(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """A plain linear layer that is equivalent to a quantised one."""
    state = plain_state(layer, dtype)
    out, width = state["weight"].shape
    linear = nn.Linear(width, out, bias="bias" in state, device="meta")
    linear.load_state_dict(state, assign=True)
    return linear.requires_grad_(False)


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer of any library."""
    return isinstance(getattr(module, "in_features", None), int) and isinstance(
        getattr(module, "out_features", None), int
    )


def holds_weight(layer: Any) -> bool:
    """Whether a linear layer's `weight` is the plain matrix that it multiplies by."""
    weight = getattr(layer, "weight", None)
    shape = (layer.out_features, layer.in_features)
    return isinstance(weight, Tensor) and plain(weight) and tuple(weight.shape) == shape


@torch.no_grad()
def product_of(layer: Any, dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] of a linear layer, from its outputs for all unit vectors. They are
    computed without its bias, since a large bias would hide the weight's digits in the sum. Raises
    UserError for a layer whose bias cannot be removed."""
    device = next(x.device for x in [*layer.parameters(), *layer.buffers()])
    unit = partial(torch.zeros, dtype=dtype, device=device)
    columns = []
    with bias_zeroed(layer):
        require(
            not bool(layer(unit(1, layer.in_features)).any()),
            f"a {type(layer).__name__} of the target adds a bias that cannot be taken out, so its "
            "weights cannot be read as plain numbers: give a drafter.initialisation or "
            "drafter.source that does not copy the target's layers, or a target that is not "
            "quantised",
        )
        for rows in torch.arange(layer.in_features, device=device).split(AT_ONCE):
            unit_ND = unit(len(rows), layer.in_features)
            unit_ND[torch.arange(len(rows), device=device), rows] = 1
            columns.append(layer(unit_ND).to(dtype))
    return torch.cat(columns).T.contiguous()


@contextmanager
def bias_zeroed(layer: Any) -> Iterator[None]:
    """A block in which the layer's bias is 0."""
    bias = getattr(layer, "bias", None)
    if not isinstance(bias, Tensor):
        yield
        return
    zeros = torch.zeros_like(bias.data)
    if isinstance(bias, nn.Parameter):
        zeros = nn.Parameter(zeros, requires_grad=False)
    with with_attributes(layer, bias=zeros):
        yield


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.") if type(x.data) is Tensor else type(x.data).__name__

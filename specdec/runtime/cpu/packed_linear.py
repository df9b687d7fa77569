"""Linear layers with a copy of their weight in oneDNN's layout, for decoding on a CPU.

For products of a few rows, torch's public operator may rearrange the weight every time. The copy
avoids this: a step of SmolLM2-135M takes two thirds of the time in bfloat16 and half in float32.
The two products round differently, so a rule (`packing_pays`), not a timing, decides for which
numbers of rows the copy is used: two processes on one machine compute the same numbers, idle or
busy. `torch.compile` packs frozen weights itself; this file is for uncompiled passes.
"""

import platform
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.compat import packed_product, packed_sum, packed_weight, version
from specdec.errors import first_line
from specdec.runtime.cpu import SWITCH, fast_paths_on
from specdec.runtime.cpu.machine_probes import INTEL, ProbeResult, agreement, processor
from specdec.runtime.quantised import is_plain, plain

LEAST = 1 << 16  # weights; a smaller layer gains nothing
LAYOUT_ROWS = 8  # rows that the layout is chosen for: best from 1 to 16, and no worse beyond
PROBED = 1 << 20  # the most weights that a probe multiplies by
WORK = 1 << 24  # the most multiplications in one product of a probe
MACHINES = ("x86_64", "AMD64")  # whose packed products were measured
# dtypes that oneDNN packs, and how far two orders of summation may differ, relative to the norm
DTYPES = {torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Product = Callable[..., Tensor]  # (x [..., in], residual [..., out] or None) -> [..., out]


class PackedLinear(nn.Linear):
    """`nn.Linear` with the parameters of `layer`. Outside autograd, autocast and compiled graphs,
    it multiplies by a packed copy of its weight if `packing_pays` for the number of rows. The copy
    is made on first use and again after the weight changes; it doubles the layer's memory."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)
        self._copy: Tensor | None = None
        self._copied: tuple[int, int] | None = None  # address and version of the copied weight
        self._faster: dict[tuple[torch.dtype, int], bool] = {}  # by dtype and number of rows

    def forward(self, x: Tensor) -> Tensor:
        weight, rows = self.weight, x.numel() // self.in_features
        if not multiplies(x, weight) or not self.faster(x.dtype, rows):
            return F.linear(x, weight, self.bias)
        at = weight.data_ptr(), version(weight)
        if self._copied != at:
            self._copy, self._copied = packed_copy(weight.detach()), at
        assert self._copy is not None
        return packed_product(x, self._copy, self.bias)

    def faster(self, dtype: torch.dtype, rows: int) -> bool:
        """Whether the copy is used for this many rows. The result is cached, since every forward
        pass asks every layer."""
        key = dtype, rows
        if key not in self._faster:
            size = self.out_features, self.in_features
            used = dtype in DTYPES and probe(*size, dtype, bucket(rows)).used
            self._faster[key] = used
        return self._faster[key]

    def forget(self) -> None:
        """Free the copy; the next use makes it again."""
        self._copy = self._copied = None

    def __getstate__(self) -> dict[str, Any]:
        """The state without the copy, which can be neither pickled nor copied, and without the
        cached results of `faster`, which are valid on this machine only."""
        return self.__dict__ | {"_copy": None, "_copied": None, "_faster": {}}


class JointLinear:
    """Linear layers with the same input, as one layer: [..., in] -> [..., sum of out]. It
    multiplies by one packed copy of all their weights if `packing_pays` for the number of rows,
    else by one plain copy. It is not a module, so it adds nothing to a model's state."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = list(layers)
        self.width = self.layers[0].in_features
        self.out = sum(x.out_features for x in self.layers)
        self.packs = all(isinstance(x, PackedLinear) for x in self.layers)
        self._faster: dict[tuple[torch.dtype, int], bool] = {}  # by dtype and number of rows
        self.renew()

    @classmethod
    def joining(cls, *layers: nn.Module) -> "JointLinear | None":
        """One joint layer for these layers; None if one of them is not linear, or if only some have
        a bias."""
        linear = [x for x in layers if isinstance(x, nn.Linear)]
        plain = all(isinstance(x, PackedLinear) or is_plain(x) for x in linear)
        alike = len({x.bias is None for x in linear}) == 1
        return cls(linear) if len(linear) == len(layers) and plain and alike else None

    def renew(self) -> None:
        """Discard the copy of the weights after they have changed."""
        self._copy: Tensor | None = None
        self._plain: Tensor | None = None  # the joint weight, or that of the only layer
        self._copied: list[tuple[int, int]] | None = None
        biases = [x.bias for x in self.layers if x.bias is not None]
        self.bias = torch.cat([x.detach() for x in biases]) if biases else None

    def renew_if_changed(self) -> None:
        """Call `renew` if a weight or a bias has changed since the last such call."""
        tensors = [x for y in self.layers for x in (y.weight, y.bias) if x is not None]
        at = [(x.data_ptr(), version(x)) for x in tensors]
        if at != self._copied:
            self.renew()
            self._copied = at

    def __getstate__(self) -> dict[str, Any]:
        """The state without the copy, which can be neither pickled nor copied, and without probe
        results, which are valid on this machine only."""
        return self.__dict__ | {"_copy": None, "_plain": None, "_copied": None, "_faster": {}}

    def faster(self, x: Tensor) -> bool:
        """Whether the packed copy is used for inputs of this dtype and number of rows."""
        key = x.dtype, x.numel() // self.width
        if (faster := self._faster.get(key)) is None:
            size = self.out, self.width, x.dtype, bucket(key[1])
            faster = self._faster[key] = self.packs and x.dtype in DTYPES and probe(*size).used
        return faster

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The product, plus `residual` [..., out] if given."""
        return self.product(x)(x, residual)

    def product(self, x: Tensor) -> Product:
        """The product function for inputs of this dtype and number of rows; valid until the weights
        change."""
        if self.faster(x):
            if self._copy is None:
                self._copy = packed_copy(self._joint_weight())
            return partial(_packed_product, self._copy, self.bias)
        if not self.packs and len(self.layers) > 1:  # it gets no copies, as it asked for none
            return self._one_by_one
        if self._plain is None:
            self._plain = self._joint_weight()
        return partial(_plain_product, self._plain, self.bias)

    def _one_by_one(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = torch.cat([F.linear(x, layer.weight, layer.bias) for layer in self.layers], -1)
        return out if residual is None else out.add_(residual)

    def _joint_weight(self) -> Tensor:
        weights = [layer.weight.detach() for layer in self.layers]
        return weights[0] if len(weights) == 1 else torch.cat(weights)


def _packed_product(
    copy: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None = None
) -> Tensor:
    if residual is None:
        return packed_product(x, copy, bias)
    return packed_sum(x, copy, bias, residual)


def _plain_product(
    weight: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None = None
) -> Tensor:
    out = F.linear(x, weight, bias)
    return out if residual is None else out.add_(residual)


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether x may be multiplied by a packed copy of the weight: on a CPU, in the same dtype, and
    outside autograd, autocast and compiled graphs."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or not x.is_cpu
        or not x.numel()
        or x.dtype is not weight.dtype
        or torch.is_autocast_enabled("cpu")
    )


def joint(before: JointLinear | None, *layers: nn.Module) -> JointLinear | None:
    """A joint layer for packed layers with the same input, with a copy of their current weights. It
    reuses `before` if that joins the same layers. None unless all of them are packed."""
    if before is None or any(x is not y for x, y in zip(before.layers, layers, strict=True)):
        if not all(isinstance(x, PackedLinear) for x in layers):
            return None
        before = JointLinear.joining(*layers)
    if before is not None:
        before.renew_if_changed()
    return before


def packed_copy(weight: Tensor) -> Tensor:
    """A copy of a weight [out, in] in oneDNN's layout. Raises RuntimeError if this CPU or this
    build of oneDNN cannot make it, AttributeError if torch has no such operator."""
    return packed_weight(weight, LAYOUT_ROWS)


def packing_pays(dtype: torch.dtype, rows: int) -> bool:
    """Whether packed products of this many rows are at least as fast as the public operator on this
    kind of CPU. The rule summarises measurements of `scripts/bench packed`
    (docs/notebook/machines.md): only in float32 on an Intel CPU is the public operator, there
    MKL's, as fast, from 65 rows and, with AVX-512, up to 3."""
    if platform.machine() not in MACHINES:
        return False
    if dtype is not torch.float32 or processor().vendor != INTEL:
        return True
    least = 1 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 4
    return least <= rows <= 64


def bucket(rows: int) -> int:
    """The number of rows to probe in place of this many; `packing_pays` is the same for both."""
    return next((n for n in (1, 2, 3, 4, 8, 16, 64) if rows <= n), 256)


@cache
def probe(out: int, width: int, dtype: torch.dtype, rows: int) -> ProbeResult:
    """Whether products of `rows` rows by packed weights [out, width] are used here: they must pay,
    run, and agree with the public operator. Only a part of a large weight is tried."""
    if not packing_pays(dtype, rows):
        return ProbeResult(False, "they are no faster here")
    out = min(out, max(1, PROBED // width), max(256, WORK // (rows * width)))
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, width, generator=generator).to(dtype)
        weight = torch.randn(out, width, generator=generator).to(dtype)
        return agreement(
            lambda: packed_product(x, packed_copy(weight), None),
            lambda: F.linear(x, weight),
            DTYPES[dtype],
        )


@cache
def obstacle(dtype: torch.dtype) -> str | None:
    """The reason why no weight of this dtype can be packed here; None if it can."""
    if dtype not in DTYPES:
        return f"oneDNN does not pack {str(dtype).removeprefix('torch.')}"
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    try:
        with torch.inference_mode():
            packed_product(
                torch.ones(1, 64, dtype=dtype), packed_copy(torch.ones(64, 64, dtype=dtype)), None
            )
    except (AttributeError, RuntimeError) as error:
        return first_line(error)
    return None


def packing_in_words(module: nn.Module, dtype: torch.dtype) -> str:
    """A clause for the user that says for which numbers of rows a packed `module` uses its copies:
    of 1, 4 and 16 rows (a vanilla step, a speculation step, a batch), those with copies are named,
    unless all have them."""
    if not fast_paths_on():
        return f"the fast paths of a CPU are turned off ({SWITCH}=0)"
    if reason := obstacle(dtype):
        return f"weights are not packed: {reason}"
    layers = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    if not layers:
        return "no layer is large enough to be packed"
    shapes = {layer.weight.shape for layer in layers}
    rows = [n for n in (1, 4, 16) if any(probe(*x, dtype, n).used for x in shapes)]
    if not rows:
        return "packed weights are not used: they are no faster here"
    some = "" if len(rows) == 3 else f" for {' or '.join(map(str, rows))} rows at once"
    return f"its weights are packed{some}"


def is_packed(module: nn.Module) -> bool:
    return any(isinstance(layer, PackedLinear) for layer in module.modules())


def all_plain(model: nn.Module) -> bool:
    """Whether a model computes with plain weights alone, also because its quantised checkpoint was
    dequantised on load."""
    linear = (part for part in model.modules() if isinstance(part, nn.Linear))
    return all(map(plain, model.parameters())) and all(
        isinstance(part, PackedLinear) or is_plain(part) for part in linear
    )


def pack(module: nn.Module) -> None:
    """Replace each large linear layer inside `module` by a PackedLinear, if it is on a CPU, its
    dtype can be packed there and the fast paths are on. Call this before anything holds a reference
    to one of the layers."""
    if not fast_paths_on():
        return
    packed: dict[nn.Module, PackedLinear] = {}  # a layer that occurs twice stays one layer
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if not path or not is_plain(layer) or layer.weight.numel() < LEAST:
            continue
        if layer.weight.is_cpu and obstacle(layer.weight.dtype) is None:
            module.set_submodule(path, packed.setdefault(layer, PackedLinear(layer)))

"""A device that pretends: it computes on the CPU and complains as CUDA does.

`install()` registers the device "pretend" with torch, with two indices. A tensor there is a wrapper
around a CPU tensor. As on CUDA, operands on two devices raise, unless one is a CPU number without
dimensions; index tensors may lie on the CPU; a generator of another device raises, and so does
`numpy()`; each device has its own random state; autocast treats operators as CUDA's does, by the
lists in torch's own header. `syncs` counts what would make the host wait for a GPU.
"""

import copy
import functools
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_map

NAME, COUNT = "pretend", 2
aten = torch.ops.aten
CpuGenerator = torch.Generator

syncs: Counter[str] = Counter()  # what made the host wait, since the counter was last cleared


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the host's waits inside: "item", "nonzero", "download" and "upload"."""
    before, inside = Counter(syncs), Counter[str]()
    yield inside
    inside.update(syncs - before)


class PretendTensor(Tensor):
    """A tensor on the device "pretend". `elem` is the CPU tensor that holds its values."""

    elem: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: Tensor, device: torch.device) -> "PretendTensor":
        assert type(elem) is Tensor, type(elem)
        wrapper: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=device,
        )
        wrapper.elem = elem
        return wrapper

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.elem!r} on {self.device}"

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, other: Tensor) -> None:
        Tensor.data.__set__(self, other)
        self.elem = other.elem  # type: ignore[attr-defined]

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def untyped_storage(self) -> Any:
        return self.elem.untyped_storage()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    __array__ = numpy

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copied = place(self.elem.detach().clone(), self.device)
            for name, value in self.__dict__.items():
                if name != "elem":
                    setattr(copied, name, copy.deepcopy(value, memo))
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def tolist(self) -> Any:
        syncs["download"] += 1
        return self.elem.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def at(device: Any = None) -> torch.device:
    """The device with its index."""
    device = torch.device(NAME if device is None else device)
    return torch.device(NAME, module.current_device()) if device.index is None else device


def on(device: torch.device | str | None) -> bool:
    return device is not None and torch.device(device).type == NAME


def place(x: Any, device: torch.device) -> Any:
    """CPU tensors as tensors of the device."""
    if type(x) is Tensor:
        # a view of a tensor that was made outside inference mode is one, too
        with torch.inference_mode(x.is_inference()):
            return PretendTensor(x, device)
    return [place(y, device) for y in x] if isinstance(x, list | tuple) else x


# ---- operators ----

ANY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
ANY_INDEX |= {aten._unsafe_index.Tensor, aten._index_put_impl_.default}
COPIES = {aten.copy_.default, aten._copy_from.default}
WAITS = {
    aten._local_scalar_dense.default: "item",
    aten.equal.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "nonzero",
    aten._unique2.default: "nonzero",
    aten.unique_dim.default: "nonzero",
    aten.unique_consecutive.default: "nonzero",
    aten.repeat_interleave.Tensor: "nonzero",
    aten.bincount.default: "nonzero",
}
# not pointwise, yet they take a CPU number
NUMBERS = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill.Tensor, aten.fill_.Tensor}
NUMBERS |= {aten.where.self, aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor}


class Facts(NamedTuple):
    """What the dispatcher needs to know of an operator."""

    numbers: bool  # whether it takes CPU numbers beside tensors of the device
    seeded: bool
    written: list[tuple[int, str]]  # the arguments that it writes
    returned: list[tuple[int, str] | None]  # for each result, the argument that it is


@functools.cache
def facts(func: Any) -> Facts:
    arguments, returns = func._schema.arguments, func._schema.returns
    written = {
        frozenset(a.alias_info.before_set): (i, a.name)
        for i, a in enumerate(arguments)
        if a.alias_info and a.alias_info.is_write
    }
    return Facts(
        torch.Tag.pointwise in func.tags or func in NUMBERS or func in ANY_INDEX,
        torch.Tag.nondeterministic_seeded in func.tags,
        list(written.values()),
        [
            written[frozenset(r.alias_info.before_set)]
            if r.alias_info and r.alias_info.is_write
            else None
            for r in returns
        ],
    )


CPU = torch.device("cpu")


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if func in COPIES:
        return _copied(func, *args)
    if torch.is_inference_mode_enabled():  # where what an operator consists of does not come here
        made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    module.done += 1
    known, tensors, generators = facts(func), list[Tensor](), list[CpuGenerator]()

    def inside(x: Any) -> Any:
        if isinstance(x, Tensor):
            tensors.append(x)
            return x.elem if type(x) is PretendTensor else x
        if isinstance(x, list | tuple):
            return [inside(y) for y in x]
        if isinstance(x, CpuGenerator):
            generators.append(x)
        return CPU if isinstance(x, torch.device) else x

    inner = [inside(x) for x in args]
    inner_kwargs = {name: inside(x) for name, x in kwargs.items()}
    device = _common(func, args, tensors)
    for generator in generators:
        require_generator(generator, device)
    goal, wanted = device, kwargs.get("device")
    if wanted is not None:
        goal = at(wanted) if on(wanted) else torch.device(wanted)
    if func in WAITS and kwargs.get("output_size") is None:
        syncs[WAITS[func]] += 1
    if func in ANY_INDEX:
        _count_indices(func, *args)
    if known.seeded and not generators:
        with own_state(device):
            out = func(*inner, **inner_kwargs)
    else:
        out = func(*inner, **inner_kwargs)
    results = [out] if len(known.returned) == 1 else list(out or ())
    for i, argument in enumerate(known.returned):
        if argument is not None:  # what is written in place is returned as itself
            n, name = argument
            results[i] = args[n] if n < len(args) else kwargs[name]
            _follow(func, results[i], args, kwargs)
        elif goal.type == NAME:
            results[i] = place(results[i], goal)
    return results[0] if len(known.returned) == 1 else tuple(results) if results else None


def _follow(func: Any, x: Any, args: Any, kwargs: Any) -> None:
    """Give a wrapper the shape that its inner tensor got, by `squeeze_` for instance; torch's own
    subclasses do it in this way."""
    if type(x) is not PretendTensor or x.shape == x.elem.shape:
        return
    if torch.Tag.inplace_view not in func.tags:
        raise NotImplementedError(f"{func} resizes its output, which no code here does so far")
    before = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)
    try:
        with no_dispatch():
            func(*args, **kwargs)
    finally:
        torch._C._set_meta_in_tls_dispatch_include(before)
    assert x.shape == x.elem.shape, func


def _common(func: Any, args: Any, tensors: list[Tensor]) -> torch.device:
    """The device on which an operator runs; raises RuntimeError for operands on two."""
    ours = {x.device for x in tensors if type(x) is PretendTensor}
    others = [x for x in tensors if type(x) is not PretendTensor]
    if len(ours) == 1 and not others:
        return next(iter(ours))
    if func in ANY_INDEX:
        if type(args[0]) is not PretendTensor and any(type(x) is PretendTensor for x in args[1]):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        others = [x for x in (args[0], *args[2:3]) if type(x) is not PretendTensor]
    into = [args[i] for i, _ in facts(func).written if i < len(args)]
    numbers = facts(func).numbers
    stray = [x for x in others if x.dim() or not numbers or any(x is y for y in into)]
    if len(ours) > 1 or stray:
        devices = sorted({str(d) for d in ours} | {str(x.device) for x in stray})
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(devices)}! (when checking arguments of {func})"
        )
    return next(iter(ours))


def _count_indices(func: Any, x: Tensor, indices: Any, values: Any = None, *_: Any) -> None:
    for index in indices:
        if index is None:
            continue
        if index.dtype in (torch.bool, torch.uint8):
            if values is None or values.numel() > 1:  # a mask and one value is masked_fill
                syncs["nonzero"] += 1
        elif not isinstance(index, PretendTensor):
            syncs["upload"] += 1


def _to_copy(x: Tensor, *, device: Any = None, non_blocking: bool = False, **more: Any) -> Any:
    goal = x.device if device is None else torch.device(device)
    goal = at(goal) if goal.type == NAME else goal
    inner = x.elem if isinstance(x, PretendTensor) else x
    if goal != x.device and not non_blocking:
        syncs["upload" if x.device.type == "cpu" else "download"] += 1
    out = aten._to_copy.default(inner, device=torch.device("cpu"), **more)
    return place(out, goal) if goal.type == NAME else out


def _copied(func: Any, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if func is aten._copy_from.default:
        into, source = source, into
    if into.device != source.device and not non_blocking:
        syncs["upload" if source.device.type == "cpu" else "download"] += 1
    a, b = (x.elem if isinstance(x, PretendTensor) else x for x in (into, source))
    a.copy_(b)
    return into


# ---- randomness ----


_devices: dict[int, torch.device] = {}  # of all generators, by their address


class Generator(CpuGenerator):
    """A generator that remembers its device, as CUDA's do."""

    where: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        generator = super().__new__(cls, device="cpu")
        generator.where = at(device) if on(device) else torch.device(device)
        _devices[generator._cdata] = generator.where
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where


def device_of(generator: Any) -> torch.device:
    """Its device, also where torch has wrapped it anew on its way through C++."""
    return getattr(generator, "where", _devices.get(generator._cdata, CPU))


def require_generator(generator: Any, device: torch.device) -> None:
    """Raises RuntimeError, as torch does, for a generator of another device."""
    other = device_of(generator)
    if other.type != device.type:
        raise RuntimeError(
            f"Expected a '{device.type}' device type for generator but found '{other.type}'"
        )
    if other != device and device.type == NAME:
        raise RuntimeError(f"Expected a generator on {device} but found one on {other}")


_states: dict[int, Tensor] = {}
_lock = threading.RLock()


@contextmanager
def own_state(device: torch.device) -> Iterator[None]:
    """Draws come from the device's own random state, not from the CPU's."""
    with _lock:
        index, before = device.index or 0, CpuGenerator().get_state()
        before = torch.default_generator.get_state()
        if index not in _states:
            _states[index] = CpuGenerator().manual_seed(0).get_state()
        torch.default_generator.set_state(_states[index])
        try:
            yield
        finally:
            _states[index] = torch.default_generator.get_state()
            torch.default_generator.set_state(before)


# ---- factories ----

FACTORIES = {
    getattr(torch, name)
    for name in [
        "tensor",
        "as_tensor",
        "asarray",
        "arange",
        "zeros",
        "ones",
        "full",
        "empty",
        "eye",
        "linspace",
        "logspace",
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "empty_strided",
        "scalar_tensor",
    ]
}


def lstm(x_BTF: Tensor, states: Any, weights: Any, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """An LSTM of single steps, since torch has a kernel for each device."""
    biased, layers, _, _, both, batch_first = options
    assert batch_first and not both
    ends, per = [], 4 if biased else 2
    for i in range(layers):
        mine, (h, c), out = weights[i * per : (i + 1) * per], (x[i] for x in states), []
        for x in x_BTF.unbind(1):
            h, c = _cell(x, h, c, *mine)
            out.append(h)
        x_BTF = torch.stack(out, 1)
        ends.append((h, c))
    return x_BTF, *(torch.stack(x) for x in zip(*ends))


def _cell(
    x: Tensor, h: Tensor, c: Tensor, w_x: Tensor, w_h: Tensor, b_x: Any = None, b_h: Any = None
) -> tuple[Tensor, Tensor]:
    linear = torch.nn.functional.linear
    i, f, g, o = (linear(x, w_x, b_x) + linear(h, w_h, b_h)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class Factories(TorchFunctionMode):
    """Makes tensors on the device, and raises for a generator of another device than the tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in FACTORIES and on(kwargs.get("device")):
            device = at(kwargs.pop("device"))
            if kwargs.get("generator") is not None:
                require_generator(kwargs["generator"], device)
            if any(isinstance(x, PretendTensor) for x in args):
                return func(*args, **kwargs).to(device)
            seeded = func.__name__.startswith(("rand", "normal")) and not kwargs.get("generator")
            requires = kwargs.pop("requires_grad", False)
            if any(isinstance(x, Tensor) for x in args):
                return func(*args, **kwargs).to(device).requires_grad_(requires)
            with own_state(device) if seeded else nullcontext(), torch._C.DisableTorchFunction():
                made = func(*args, device="cpu", **kwargs)
            if func in (torch.tensor, torch.as_tensor):
                syncs["upload"] += 1
            return place(made.detach(), device).requires_grad_(requires)
        if func is torch.nn.functional.one_hot and type(args[0]) is PretendTensor:
            classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
            assert classes > 0
            return (args[0][..., None] == torch.arange(classes, device=args[0].device)).long()
        if func is torch.lstm and type(args[0]) is PretendTensor:
            return lstm(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and device_of(generator).type == NAME:
            leaves = tree_flatten((args, kwargs))[0]
            if not any(isinstance(x, PretendTensor) for x in leaves):
                require_generator(generator, torch.device("cpu"))
        return func(*args, **kwargs)


def _library() -> list[torch.library.Library]:
    """What operators that allocate inside, and copies from the CPU, need of a device."""
    lib = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return place(torch.empty(size, dtype=dtype, device="cpu"), at(device))

    def strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
        return place(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), at(device))

    def copy_from(x: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
        return _copied(aten.copy_.default, into, x, non_blocking)

    lib.impl("empty.memory_format", empty, "PrivateUse1")
    lib.impl("empty_strided", strided, "PrivateUse1")
    lib.impl("_copy_from", copy_from, "PrivateUse1")
    return [lib, *_autocast()]


# ---- autocast ----

FORBIDDEN = "binary_cross_entropy"
OVERLOADS = {"int": "int"}


def _autocast() -> list[torch.library.Library]:
    """Kernels of AutocastPrivateUse1, by the lists of operators that CUDA's autocast uses."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text()
    lib, every = (torch.library.Library(name, "IMPL") for name in ("aten", "_"))
    key = "AutocastPrivateUse1"
    every.fallback(torch.library.fallthrough_kernel, key)
    lower, upper, first, widest = (
        re.findall(r"\b_\((\w+)(?:, (\w+))?\)", _define(text, name))
        for name in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE")
    )
    for names, cast in ((lower, _lower), (upper, _upper), (first, _with_dtype), (widest, _widest)):
        for name, overload in names:
            packet = getattr(aten, name, None)
            overload = overload or "default"
            if packet is None or overload not in packet.overloads():
                continue
            op = getattr(packet, overload)
            lib.impl(op, functools.partial(_cast, op, cast), key)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast."
        )

    lib.impl(FORBIDDEN, forbidden, key)
    return [lib, every]


def _define(text: str, name: str) -> str:
    start = text.index(f"#define AT_FORALL_{name}(_)")
    return text[start : text.index("\n\n", start)].split("\n", 1)[1]


def _cast(op: Any, cast: Any, *args: Any, **kwargs: Any) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        args, kwargs = cast(op, args, kwargs)
        return op(*args, **kwargs)


def _floats(dtype: torch.dtype, leaves: Any) -> Any:
    def to(x: Any) -> Any:
        wrong = isinstance(x, PretendTensor) and x.is_floating_point() and x.dtype != dtype
        return x.to(dtype) if wrong and x.dtype != torch.float64 else x

    return tree_map(to, leaves)


def _lower(op: Any, args: Any, kwargs: Any) -> Any:
    return _floats(torch.get_autocast_dtype(NAME), (args, kwargs))


def _upper(op: Any, args: Any, kwargs: Any) -> Any:
    def to(x: Any) -> Any:
        low = isinstance(x, PretendTensor) and x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if low else x

    return tree_map(to, (args, kwargs))


def _with_dtype(op: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    low = x.dtype in (torch.bfloat16, torch.float16)
    names = [a.name for a in op._schema.arguments]
    place_of = names.index("dtype")
    given = kwargs.get("dtype") is not None or (len(args) > place_of and args[place_of] is not None)
    if low and not given:
        args = args[:place_of]
        kwargs = {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _widest(op: Any, args: Any, kwargs: Any) -> Any:
    leaves = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, PretendTensor)]
    dtypes = {x.dtype for x in leaves if x.is_floating_point()}
    mixed = torch.float32 in dtypes and dtypes & {torch.bfloat16, torch.float16}
    return _floats(torch.float32, (args, kwargs)) if mixed else (args, kwargs)


# ---- the module torch.pretend ----


class Event:
    """A mark on the device's timeline, on which an operator takes a millisecond."""

    def __init__(self, module: "Module", enable_timing: bool = False) -> None:
        assert enable_timing
        self.module, self.at = module, -1

    def record(self) -> None:
        self.at = self.module.done

    def synchronize(self) -> None:
        syncs["synchronize"] += 1

    def elapsed_time(self, end: "Event") -> float:
        return float(end.at - self.at)


class Module:
    """What `torch.get_device_module("pretend")` gives."""

    def __init__(self) -> None:
        self.index = 0
        self.done = 0  # operators, the unit of this device's time
        self.Event = functools.partial(Event, self)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return self.index

    def set_device(self, device: Any) -> None:
        self.index = device if isinstance(device, int) else at(device).index

    def synchronize(self, device: Any = None) -> None:
        syncs["synchronize"] += 1

    def empty_cache(self) -> None: ...

    def manual_seed(self, seed: int) -> None:
        _states[self.index] = CpuGenerator().manual_seed(seed).get_state()

    def manual_seed_all(self, seed: int) -> None:
        for index in range(COUNT):
            _states[index] = CpuGenerator().manual_seed(seed).get_state()

    def get_rng_state(self, device: Any = None) -> Tensor:
        index = at(device).index if not isinstance(device, int) else device
        if index not in _states:
            self.manual_seed_all(0)
        return _states[index].clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        index = at(device).index if not isinstance(device, int) else device
        _states[index] = state.clone()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
    """`nn.Module._apply`, which `.to` calls: as on CUDA, parameters that move stay the same
    objects, so that tied ones stay tied."""
    for param in self._parameters.values():
        if param is not None:
            with torch.no_grad():
                moved = fn(param)
            if isinstance(moved, PretendTensor) != isinstance(param, PretendTensor):
                _swap(param, torch.nn.Parameter(moved.detach(), param.requires_grad))
    return torch_apply(self, fn, recurse)


def _swap(x: Any, y: Any) -> None:
    """`torch.utils.swap_tensors`, which refuses tensors that anything in C++ refers to."""
    x.__class__, y.__class__ = y.__class__, x.__class__
    x.__dict__, y.__dict__ = y.__dict__, x.__dict__
    torch._C._swap_tensor_impl(x, y)


torch_apply = torch.nn.Module._apply
module = Module()
_kept: list[Any] = []


def install() -> None:
    """Register the device, for the rest of the process."""
    if _kept:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    _kept.extend(_library())
    torch.Generator = Generator  # type: ignore[misc]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    # autograd would compute a checkpoint again in a thread of its own, where this device aborts
    torch.utils.checkpoint.checkpoint = lambda run, *args, **_: run(*args)
    _kept.append(mode := Factories())
    mode.__enter__()

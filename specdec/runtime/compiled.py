"""Passes of decoding through `torch.compile`, over caches of fixed capacity.

On a CPU the weights are packed inside the graph, on a GPU a pass is a CUDA graph. Each number of
rows, tokens and slots is a graph of its own. One is built when it is first asked for, and used if
it then agrees with the pass as it stands and is at least as fast; otherwise the pass runs as it
stands.
"""

from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config

from specdec.progress import tell
from specdec.runtime.cache import SlotCache
from specdec.runtime.probes import compare

GRAPHS = 64  # that one pass is compiled to at most
SHORT = 16  # tokens a row; a draft's longer pass, as a prefill is, runs as it stands
TOLD = 5.0  # seconds; a graph that took longer to build is told of
TIMINGS = 7  # of a graph and of the pass as it stands, in turn
# how far a graph's results may lie from those of the pass, relative to the norm: it rounds less
# often to the weights' dtype
LIMITS = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
# the weights are constants, packed when a graph is built; q, k and v are one product (-19 % time)
FROZEN = {"freezing": True, "cpp.enable_concat_linear": True}
DYNAMO = {  # which would otherwise stop after 8 graphs, silently
    "recompile_limit": 4 * GRAPHS,
    "accumulated_recompile_limit": 16 * GRAPHS,
    "fail_on_recompile_limit_hit": True,
}

Pass = Callable[..., tuple[Tensor | None, ...]]  # (SlotCache, **inputs) -> tensors


class Compiled:
    """`run(cache, **inputs)`, a pass that writes the slots which `cache.place` gave it, and so
    can be repeated. `device` is where it runs."""

    def __init__(self, run: Pass, device: torch.device) -> None:
        self.run, self.device = run, device
        self.graph = _graph(run, device)
        self.ways: dict[Hashable, Pass] = {}  # by the shapes of a pass

    def __call__(self, cache: SlotCache, **inputs: Any) -> tuple[Tensor | None, ...]:
        slots = cache.slots if isinstance(cache.slots, slice) else cache.slots.dim()
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        key = (cache.capacity, str(slots), modes, _signature(inputs))
        way = self.ways.get(key)
        if way is None:
            way = self.ways[key] = self._chosen(cache, inputs)
        return way(cache, **inputs)

    def _chosen(self, cache: SlotCache, inputs: dict[str, Any]) -> Pass:
        """The graph for inputs of these shapes, or the pass as it stands."""
        if len(self.ways) >= GRAPHS:
            tell(f"torch.compile: further passes than these {GRAPHS} run uncompiled")
            return self.run
        layers = len(cache.slot_layers)
        if layers * 1.0 >= TOLD:
            tell(
                f"torch.compile: every number of rows, tokens and slots of {layers} layers is a "
                f"graph of its own, each built once in some {layers} to {2 * layers} s"
            )
        began = perf_counter()
        built: list[float] = []

        def through(way: Pass) -> Tensor:
            parts = [x.float().flatten() for x in way(cache, **inputs) if x is not None]
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            if way is self.graph and not built:
                built.append(perf_counter() - began)
            return torch.cat(parts)

        dtype = next(x.dtype for x in self.run(cache, **inputs) if x is not None)
        with dynamo_config.patch(DYNAMO), inductor_config.patch(FROZEN):
            answer = compare(
                lambda: through(self.graph),
                lambda: through(self.run),
                LIMITS[dtype],
                gain=1.0,
                repeats=TIMINGS,
            )
        tokens = next((x.shape for x in inputs.values() if isinstance(x, Tensor)), ())
        what = f"a pass of {' × '.join(map(str, tokens[:2]))} tokens over {cache.capacity} slots"
        if not answer.used:
            tell(f"torch.compile: {what} runs uncompiled here: {answer.reason}")
        elif built and built[0] > TOLD:
            tell(f"torch.compile: {what} was compiled in {built[0]:.0f} s, {answer.reason}")
        return self.graph if answer.used else self.run


class Short:
    """A drafter's pass, compiled over a cache of fixed capacity where it is short; else as it
    stands. `run(cache, **inputs)` is of the module `owner`."""

    def __init__(self, owner: nn.Module, run: Pass) -> None:
        self.owner, self.run = owner, run
        self.built: Pass | None = None

    def __call__(self, cache: SlotCache, tokens: int, **inputs: Any) -> tuple[Tensor | None, ...]:
        """A pass of so many tokens a row."""
        if not cache.fixed or tokens > SHORT:
            return self.run(cache, **inputs)
        if self.built is None:
            run = self.run
            device = next(self.owner.parameters()).device
            self.built = Compiled(lambda cache, **inputs: run(cache, **inputs), device)
        return self.built(cache, **inputs)


def _graph(run: Pass, device: torch.device) -> Pass:
    """`run` through torch.compile, which builds a graph when it is called with new shapes."""
    if device.type != "cuda":
        options: dict[str, Any] = {"guard_filter_fn": _guards_of_shapes}
        options["cpp_wrapper"] = True  # calls the kernels from C++, not from Python: -7 % time
        return torch.compile(_own_code(run), dynamic=False, options=options)
    graph = torch.compile(run, dynamic=False, mode="reduce-overhead")

    def copied(*args: Any, **inputs: Any) -> tuple[Tensor | None, ...]:
        """Copies: the next run of a CUDA graph overwrites what this one returned."""
        return tuple(x if x is None else x.clone() for x in graph(*args, **inputs))

    return copied


def _signature(x: Any) -> Hashable:
    """What a graph depends on of its inputs: shapes and dtypes, not values."""
    if isinstance(x, Tensor):
        return (*x.shape, x.dtype)
    if isinstance(x, dict):
        return tuple((name, _signature(value)) for name, value in x.items())
    if isinstance(x, list | tuple):
        return tuple(map(_signature, x))
    return x


def _own_code(function: Any) -> Any:
    """The function with a code object that is its own: Dynamo keeps graphs by code object, and
    closures of one `def` share theirs."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, closure=function.__closure__)


def _guards_of_shapes(guards: Sequence[Any]) -> list[bool]:
    """Of what Dynamo would check before every pass, over a millisecond's worth, what can change
    between passes of one model: shapes of the inputs and of the cache, and global state."""
    changing = ("inputs", "cache.capacity", "cache.shown", "cache.slots")
    names = [g.name.removeprefix("L['").replace("']", "", 1) for g in guards]
    return [
        not name or name.startswith(changing) or name.startswith("cache.layers[0].keys")
        for name in names
    ]

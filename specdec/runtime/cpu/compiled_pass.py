"""Forward passes of decoding through `torch.compile`, over caches of fixed capacity.

On a CPU the weights are packed inside the graph; on a GPU a pass is meant to be a CUDA graph, which
is recorded again for each new cache (no GPU has run this yet). Each combination of rows, tokens and
slots has its own graph, which is built on first use. The graph is used if its output agrees with
the uncompiled pass. Its speed does not decide, because the graph rounds differently, but a slower
graph is reported to the user.
"""

import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdec.compat import dynamo_config, inductor_config
from specdec.progress import tell
from specdec.runtime.cache import SlotCache
from specdec.runtime.cpu import fast_paths_on
from specdec.runtime.cpu.machine_probes import agreement, seconds
from specdec.runtime.device import finish

GRAPHS = 64  # the most graphs of one pass
SHORT = 16  # tokens per row; a draft's longer passes, such as prefill, run uncompiled
TOLD = 5.0  # seconds; the user is told of a graph that took longer to build
SLOWER = 0.9  # the user is told of a graph that is less than so many times as fast
TIMINGS = 7  # timings of the graph and of the uncompiled pass, in turn
# how far a graph's results may differ from the uncompiled pass, relative to the norm: the graph
# rounds to the weights' dtype less often
LIMITS = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
# the weights are constants, packed when a graph is built; q, k and v are one product (-19 % time)
FROZEN = {"freezing": True, "cpp.enable_concat_linear": True}
DYNAMO = {  # otherwise Dynamo would silently stop after 8 graphs
    "recompile_limit": 4 * GRAPHS,
    "accumulated_recompile_limit": 16 * GRAPHS,
    "fail_on_recompile_limit_hit": True,
}

Pass = Callable[..., tuple[Any, ...]]  # (SlotCache, **inputs) -> tensors, some None


class Compiled:
    """The pass `run(cache, **inputs)`, compiled. It must be repeatable: it writes the slots that
    `cache.place` assigned. It runs uncompiled if the cache can grow or a row has more than
    `longest` tokens."""

    def __init__(self, run: Pass, longest: int = sys.maxsize) -> None:
        self.run, self.longest = run, longest
        self.graph: Pass | None = None
        self.ways: dict[Hashable, Pass] = {}  # the graph or `run`, by capacity, modes and shapes

    def __call__(self, cache: SlotCache, **inputs: Any) -> tuple[Any, ...]:
        slots = cache.slots
        if not cache.fixed or isinstance(slots, slice) or slots.shape[-1] > self.longest:
            return self.run(cache, **inputs)
        if slots.device.type == "cpu" and not fast_paths_on():
            return self.run(cache, **inputs)
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        key = (cache.capacity, slots.dim(), modes, _signature(inputs))
        if key not in self.ways:
            self.ways[key] = self._chosen(cache, slots, inputs)
        return self.ways[key](cache, **inputs)

    def _chosen(self, cache: SlotCache, slots: Tensor, inputs: dict[str, Any]) -> Pass:
        """The graph for inputs of these shapes, or the uncompiled pass."""
        if len(self.ways) >= GRAPHS:
            tell(f"torch.compile: passes beyond {GRAPHS} graphs run uncompiled")
            return self.run
        layers = len(cache.slot_layers)
        if layers >= TOLD:  # at about a second a layer
            tell(
                "torch.compile: each combination of rows, tokens and slots needs its own graph of "
                f"{layers} layers, built once in about {layers} to {2 * layers} s"
            )
        graph = self.graph = self.graph or _graph(self.run, slots.device)
        taken: list[float] = []  # seconds of each run of the graph; the first run builds it

        def through(way: Pass) -> Tensor:
            began = perf_counter()
            parts = [x.float().flatten() for x in way(cache, **inputs) if x is not None]
            finish(slots.device)
            if way is graph:
                taken.append(perf_counter() - began)
            return torch.cat(parts)

        dtype = next(x.dtype for x in self.run(cache, **inputs) if x is not None)
        with dynamo_config.patch(DYNAMO), inductor_config.patch(FROZEN):
            ours, public = partial(through, graph), partial(through, self.run)
            result = agreement(ours, public, LIMITS[dtype])
            times = seconds([ours, public], TIMINGS) if result.used else [1.0, 1.0]
        rows, tokens, capacity = len(cache.lengths), slots.shape[-1], cache.capacity
        what = f"a pass of {rows} × {tokens} tokens over {capacity} slots"
        if not result.used:
            tell(f"torch.compile: {what} runs uncompiled; its graph: {result.reason}")
        elif taken[0] > TOLD or times[1] < SLOWER * times[0]:
            gain = f"{times[1] / times[0]:.2f} times as fast as without"
            tell(f"torch.compile: {what} was compiled in {taken[0]:.0f} s and is {gain}")
        return graph if result.used else self.run


def _graph(run: Pass, device: torch.device) -> Pass:
    """`run` through torch.compile, which builds a graph for each new combination of shapes."""

    def own(cache: SlotCache, **inputs: Any) -> tuple[Any, ...]:
        return run(cache, **inputs)

    # Dynamo keeps graphs by code object, which closures of one `def` share
    own.__code__ = own.__code__.replace()
    if device.type != "cuda":
        options: dict[str, Any] = {"guard_filter_fn": _guards_of_shapes}
        options["cpp_wrapper"] = True  # calls the kernels from C++, not from Python: -7 % time
        return torch.compile(own, dynamic=False, options=options)
    graph = torch.compile(own, dynamic=False, mode="reduce-overhead")
    # copies: the next run of a CUDA graph overwrites what this one returned
    return lambda cache, **inputs: tuple(
        x if x is None else x.clone() for x in graph(cache, **inputs)
    )


def _signature(x: Any) -> Hashable:
    """The properties of the inputs that a graph depends on: shapes and dtypes, not values."""
    if isinstance(x, Tensor):
        return (*x.shape, x.dtype)
    if isinstance(x, dict):
        return tuple((name, _signature(value)) for name, value in x.items())
    if isinstance(x, list | tuple):
        return tuple(map(_signature, x))
    value: Hashable = x
    return value


def _guards_of_shapes(guards: Sequence[Any]) -> list[bool]:
    """A flag for each of Dynamo's guards: true for those to keep, on things that can change between
    passes of one model (shapes of inputs and cache, global state). Evaluating all guards would take
    over 1 ms per pass."""
    of_cache = ("capacity", "shown", "slots", "layers[0].keys")
    changing = ("inputs", *(f"cache.{name}" for name in of_cache))
    names = [g.name.removeprefix("L['").replace("']", "", 1) for g in guards]
    return [not name or name.startswith(changing) for name in names]

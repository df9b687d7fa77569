"""Passes through `torch.compile`: on a CPU weights are packed, on a GPU a pass is a CUDA graph."""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._inductor import config as inductor_config

from specdec.errors import UserError
from specdec.runtime.cache import SlotCache

GRAPHS = 64  # that passes of one kind may be compiled to; Dynamo's own limit is 8
SHORT = 16  # tokens a row; a longer pass, as a prefill is, runs as it stands

Pass = Callable[..., tuple[Tensor | None, ...]]  # (SlotCache, **tensors) -> tensors


def compiled(run: Pass, device: torch.device) -> Pass:
    """`run(cache, **inputs)` compiled, over a cache of fixed capacity.

    One graph for each number of rows and tokens and each capacity; of a target it takes half a
    minute on 2 cores. Weights are constants of the graphs. The call raises UserError when there
    are more than `GRAPHS`.
    """
    if device.type == "cuda":
        graph = torch.compile(run, dynamic=False, mode="reduce-overhead")

        def built(*args: Any, **inputs: Any) -> tuple[Tensor | None, ...]:
            """Copies: the next run of a CUDA graph overwrites what this one returned."""
            return tuple(x if x is None else x.clone() for x in graph(*args, **inputs))
    else:
        inductor_config.freezing = True  # packs the weights; dynamo reads it as well
        inductor_config.cpp.enable_concat_linear = True  # q, k and v are one product: -19 %
        options: dict[str, Any] = {"guard_filter_fn": _guards_of_shapes}
        options["cpp_wrapper"] = True  # calls the kernels from C++, not from Python: -7 %
        built = torch.compile(_own_code(run), dynamic=False, options=options)
    dynamo_config.recompile_limit = GRAPHS  # of one function
    dynamo_config.accumulated_recompile_limit = max(256, GRAPHS)
    dynamo_config.fail_on_recompile_limit_hit = True  # else decoding goes on uncompiled

    def call(*args: Any, **inputs: Any) -> tuple[Tensor | None, ...]:
        try:
            return built(*args, **inputs)
        except FailOnRecompileLimitHit as error:
            raise UserError(
                f"more than {GRAPHS} graphs of the same passes would be compiled, one for each "
                "number of rows, tokens and slots: leave compile off for inputs as varied as these"
            ) from error

    return call


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
            self.built = compiled(lambda cache, **inputs: run(cache, **inputs), device)
        return self.built(cache, **inputs)


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

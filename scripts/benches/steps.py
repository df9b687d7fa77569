"""A process that does training steps on request, for `bench training`, which runs one for each
checkout that it compares. It imports `specdec` and `train` from the checkout on `PYTHONPATH`, and
times that checkout's own `train.machine_timing.training_step`.

At its start it writes a line of JSON with the tokens of a step and the kind of device. Then it
answers each request, a line of input, with a line of output. For `step` it does a training step and
returns the seconds. For `products` it also does each of the step's matrix products separately, and
returns their seconds and floating-point operations.
"""

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}
REPEATS = 5  # timings of each product, after one that does not count


class Layout(NamedTuple):
    """The properties of a tensor on which the speed of a product depends."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of_tensor(cls, x: Tensor) -> "Layout":
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device)

    def drawn(self) -> Tensor:
        """A random tensor of this layout."""
        x = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return x.normal_()


class Products(TorchDispatchMode):
    """Records the matrix products of the code that runs within it, by operator and layouts of
    inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[Any, tuple[Layout, ...]]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in PRODUCTS:
            inputs = tuple(Layout.of_tensor(x) for x in args if isinstance(x, Tensor))
            self.counts[func, inputs] += 1
        return func(*args, **(kwargs or {}))

    def seconds(self, clock: Callable[[Callable[[], Any]], float]) -> float:
        """The sum of the products' median times, each timed separately on random numbers."""
        total = 0.0
        for (func, layouts), count in self.counts.items():
            inputs = [layout.drawn() for layout in layouts]
            times = [clock(lambda: func(*inputs)) for _ in range(1 + REPEATS)]  # noqa: B023
            total += count * statistics.median(times[1:])
        return total

    @property
    def operations(self) -> int:
        """Floating-point operations: two for each pair of numbers that are multiplied."""
        total = 0
        for (_, layouts), count in self.counts.items():
            left, right = layouts[-2:]
            total += count * 2 * torch.Size(left.shape).numel() * right.shape[-1]
        return total


def step_of(overrides: Sequence[str]) -> tuple[Callable[[], int], torch.device]:
    """A function that does a training step and returns its number of tokens, and the device."""
    from specdec.targets.loading import load_target
    from specdec.targets.target_config import resolved
    from train.accelerated import accelerator_of
    from train.data.run_data import read_run_data
    from train.machine_timing import training_step
    from train.run_config import composed, register

    register()
    cfg = composed(overrides)
    target = load_target(cfg.target)
    documents = read_run_data(cfg.data, target).train
    cfg = replace(cfg, target=resolved(cfg.target))
    accelerator = accelerator_of(cfg.target, cfg.loop.precision)
    step = training_step(cfg, target, documents, accelerator)
    return step, target.device


def main() -> None:
    responses = sys.stdout
    with redirect_stdout(sys.stderr):  # a checkout's output is no reply
        step, device = step_of(sys.argv[1:])

        def clock(run: Callable[[], Any]) -> float:
            def wait() -> None:
                if device.type != "cpu":
                    torch.get_device_module(device).synchronize(device)

            wait()
            start = time.perf_counter()
            run()
            wait()
            return time.perf_counter() - start

        tokens = step()
        responses.write(json.dumps({"tokens": tokens, "device": device.type}) + "\n")
        responses.flush()
        for request in sys.stdin:
            response: dict[str, float] = {}
            if request.strip() == "step":
                response = {"seconds": clock(step)}
            else:
                with Products() as products:
                    step()
                with torch.no_grad():
                    seconds = products.seconds(clock)
                response = {"seconds": seconds, "operations": products.operations}
            responses.write(json.dumps(response) + "\n")
            responses.flush()


if __name__ == "__main__":
    main()

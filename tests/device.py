"""Tests on another device: DRAFTSMITH_TEST_DEVICE=cuda python -m pytest tests/decoding.

Without a GPU, DRAFTSMITH_TEST_DEVICE=pretend computes on the CPU and complains as CUDA does; see
tests/pretend.py, and scripts/test for the tests that run there.

The tensors that a test file makes, and the tiny models of tests/tiny.py, then lie on that device.
What the product makes lies wherever the product puts it, so that its own mistakes show.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specdec.runtime import quantised
from tests import pretend

if os.environ.get("DRAFTSMITH_TEST_DEVICE", "").startswith(pretend.NAME):
    pretend.install()
    # the product tells a quantised tensor by its class
    vars(quantised)["type"] = lambda x: Tensor if type(x) is pretend.PretendTensor else type(x)
DEVICE = torch.device(os.environ.get("DRAFTSMITH_TEST_DEVICE", "cpu"))
TESTS = str(Path(__file__).resolve().parent)
NAMES = [
    "tensor",
    "arange",
    "zeros",
    "ones",
    "full",
    "empty",
    "eye",
    "linspace",
    "rand",
    "randn",
    "randint",
    "randperm",
]
FACTORIES = {getattr(torch, name) for name in NAMES}


class Placed(TorchFunctionMode):
    """Moves to `device` what a file in tests/ makes without naming a device. It is drawn on the
    CPU first, so that a seed gives the same numbers everywhere."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in FACTORIES or "device" in (kwargs or {}):
            return made
        if not sys._getframe(1).f_code.co_filename.startswith(TESTS):
            return made
        assert isinstance(made, Tensor)
        return made.detach().to(self.device).requires_grad_(made.requires_grad)

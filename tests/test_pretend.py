"""The pretend device complains where CUDA does, and computes what the CPU computes.

Run alone: DRAFTSMITH_TEST_DEVICE=pretend python -m pytest tests/test_pretend.py
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.device import DEVICE
from tests.pretend import NAME, counted

pytestmark = pytest.mark.skipif(DEVICE.type != NAME, reason=f"DRAFTSMITH_TEST_DEVICE={NAME} only")


def on_cpu(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cpu")


def on(index: int = 0, *shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (3,)), device=f"{NAME}:{index}")


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "operands on two devices": (lambda: on() + on_cpu(3), "same device"),
    "operands on two indices": (lambda: on() + on(1), "same device"),
    "products on two devices": (lambda: on(0, 2, 3) @ on_cpu(3, 2), "same device"),
    "a number of the device beside a CPU tensor": (lambda: on_cpu(3) + on().sum(), "same device"),
    "a CPU number that is written": (lambda: on_cpu(1).sum().add_(on().sum()), "same device"),
    "a CPU number in a product": (lambda: torch.cat([on(), on_cpu(1)]), "same device"),
    "an index of the device into a CPU tensor": (
        lambda: on_cpu(3)[torch.zeros(1, dtype=torch.long, device=NAME)],
        "indices should be",
    ),
    "a gather with a CPU index": (
        lambda: on().gather(0, torch.zeros(1, dtype=torch.long, device="cpu")),
        "same device",
    ),
    "a CPU generator": (
        lambda: torch.rand(3, device=NAME, generator=torch.Generator()),
        "device type for generator",
    ),
    "a CPU generator in place": (
        lambda: on().exponential_(generator=torch.Generator()),
        "device type for generator",
    ),
    "a generator of the device on the CPU": (
        lambda: torch.rand(3, generator=torch.Generator(NAME)),
        "device type for generator",
    ),
    "numpy()": (lambda: on().numpy(), "can't convert"),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_what_cuda_refuses_is_refused(what: str) -> None:
    act, words = WRONG[what]
    with pytest.raises((RuntimeError, TypeError), match=words):
        act()


def test_what_cuda_allows_is_allowed() -> None:
    two = torch.tensor(2.0, device="cpu")
    assert (on() * two).tolist() == [2, 2, 2]
    assert on()[torch.tensor([0, 1], device="cpu")].shape == (2,)
    assert torch.where(on() > 0, two, on()).tolist() == [2, 2, 2]
    x = on()
    x[torch.tensor([0], device="cpu")] = two
    assert x.tolist() == [2, 1, 1] and x.device == torch.device(f"{NAME}:0")


def test_modules_move_as_themselves_and_their_gradients_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight  # tied
    plain = nn.Sequential(first, nn.Tanh(), second)
    before = plain[0].weight
    moved = copy.deepcopy(plain).to(NAME)
    x = torch.randn(5, 4, device="cpu")
    plain(x).sum().backward()
    moved(x.to(NAME)).sum().backward()
    assert moved[0].weight is moved[2].weight and plain[0].weight is before
    for p, q in zip(plain.parameters(), moved.parameters()):
        assert q.device.type == NAME and isinstance(q, nn.Parameter)
        assert torch.equal(p.grad, q.grad.cpu())  # type: ignore[union-attr]
    assert moved.double()[0].weight is moved[2].weight
    assert copy.deepcopy(moved).cpu()[0].weight.dtype == torch.float64


def test_autocast_is_that_of_cuda() -> None:
    x = torch.randn(4, 4, device=NAME)
    with torch.autocast(NAME, torch.bfloat16):
        low = x @ x
        assert low.dtype == F.linear(x, x).dtype == torch.bfloat16
        wide = low.exp(), low.sum(), low.logsumexp(-1), low.softmax(-1), low.cumsum(0), low**2
        assert {y.dtype for y in wide} == {torch.float32}
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(low.sigmoid(), low.sigmoid())


def test_the_device_has_its_own_random_state() -> None:
    torch.manual_seed(0)
    one = F.dropout(on(0, 50))
    cpu = torch.get_rng_state()
    two = F.dropout(on(0, 50))
    assert torch.equal(torch.get_rng_state(), cpu) and not torch.equal(one, two)
    torch.manual_seed(0)
    assert torch.equal(F.dropout(on(0, 50)), one)


def test_a_generator_of_the_device_is_known_within_operators() -> None:
    one, two = (torch.Generator(NAME).manual_seed(3) for _ in range(2))
    drawn = [torch.empty(4, device=NAME).exponential_(generator=g) for g in (one, two)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_waits_are_counted(mode: Callable[[], AbstractContextManager[None]]) -> None:
    with mode(), counted() as waits:
        x = on()
        bool((x > 0).any())
        x.cpu()
        x[x > 0]
        torch.tensor([1.0], device=NAME)
        float(x.sum())
        x.to(NAME), x + 1, x.masked_fill(x > 0, 2.0), torch.zeros(3, device=NAME)
    assert waits == {"item": 2, "download": 1, "nonzero": 1, "upload": 1}

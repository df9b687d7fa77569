"""A norm of a few rows is the RMSNorm, and follows its weight.

Run alone: python -m pytest tests/runtime/cpu/test_few_row_norm.py
"""

import pickle

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.drafters.layers import RMSNorm
from specdec.runtime.cpu.few_row_norm import FEW, FewRowsNorm

D = 48
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def made(dtype: torch.dtype) -> tuple[FewRowsNorm, Tensor]:
    torch.manual_seed(0)
    weight = (torch.rand(D) + 0.5).to(dtype)
    return FewRowsNorm(weight, 1e-5), weight


def wanted(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    exact = x.double()
    return exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_it_is_the_rms_norm(dtype: torch.dtype, size: float) -> None:
    """Also of numbers whose mean is far from 0, of zeros, and of many rows."""
    norm, weight = made(dtype)
    for shape in ((D,), (1, D), (2, 3, D), (FEW, D), (FEW + 1, D), (4, 1, 5, D)):
        for x in (torch.randn(shape) * size, torch.randn(shape) * size + 5 * size):
            x = x.to(dtype)
            found, right = norm(x), wanted(x, weight)
            assert found.dtype is dtype and found.shape == x.shape
            assert float((found.double() - right).norm() / right.norm()) < TOLERANCE[dtype]
    assert not norm(torch.zeros(2, D, dtype=dtype)).any()


def test_a_changed_weight_is_read() -> None:
    norm, weight = made(torch.float32)
    x = torch.randn(2, D)
    norm.renew_if_changed()
    norm(x)
    weight.mul_(2)
    norm.renew_if_changed()
    torch.testing.assert_close(norm(x).double(), wanted(x, weight), atol=1e-5, rtol=1e-5)
    again = pickle.loads(pickle.dumps(norm))
    torch.testing.assert_close(again(x), norm(x))


def test_a_drafts_norm_is_llamas_in_training_and_in_drafting() -> None:
    """In training to the last bit, with its gradient; in drafting up to rounding, also after a
    step has changed the weight, after it was replaced, and where nothing tells of a change."""
    norm, llamas = RMSNorm(D, 1e-5), LlamaRMSNorm(D, 1e-5)
    llamas.load_state_dict(norm.state_dict())
    assert set(norm.state_dict()) == {"weight"}
    x = torch.randn(3, D, requires_grad=True)
    for _ in range(3):
        grads = []
        for each in (norm, llamas):
            out = each(x)
            assert torch.equal(out, llamas(x))
            grads.append(torch.autograd.grad(out.square().sum(), [x, each.weight]))
            with torch.inference_mode():
                torch.testing.assert_close(each(x), llamas(x), atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(*grads, strict=True):
            assert torch.equal(ours, theirs)
        with torch.no_grad():
            for each in (norm, llamas):
                each.weight.add_(0.25)
    with torch.no_grad():
        norm.weight = torch.nn.Parameter(norm.weight * 3)
        torch.testing.assert_close(norm(x), 3 * llamas(x), atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        bare = RMSNorm(D, 1e-5)
        bare.weight.mul_(2)
        torch.testing.assert_close(bare(x.detach()), 2 * LlamaRMSNorm(D, 1e-5)(x.detach()))


def test_a_drafts_norm_reads_mixed_and_double_numbers_as_llamas_does() -> None:
    norm, llamas = RMSNorm(D, 1e-5), LlamaRMSNorm(D, 1e-5)
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float64):
            x = torch.randn(3, D).to(dtype)
            assert torch.equal(norm(x), llamas(x))
        x = torch.randn(3, D).double()
        assert torch.equal(norm.double()(x), llamas.double()(x))

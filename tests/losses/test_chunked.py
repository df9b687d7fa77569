"""A loss in chunks equals the plain sum, finds its parameters, and keeps little in memory.

Run alone: python -m pytest tests/losses/test_chunked.py
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.losses.chunked import Part, chunked
from tests.device import DEVICE
from tests.losses.test_loss_terms import CFG, S, piece_of, pruned, term, truncated

WIDTH, DEPTH = 5, 2


class Head(nn.Module):
    """A small unembedding at each depth, and a bias that is never read."""

    def __init__(self, vocabulary: int = S, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=dtype))
        self.heads = nn.Parameter(torch.randn(DEPTH, WIDTH, vocabulary, dtype=dtype))
        self.unused = nn.Parameter(torch.randn(3, dtype=dtype))

    def part(self, name: str, p_NKS: Tensor) -> Part:
        def part(rows: slice, piece_NKD: Tensor) -> tuple[Tensor, Tensor]:
            losses = []
            for k in range(DEPTH):
                logits = (piece_NKD[:, k] * self.scale) @ self.heads[k]
                piece = piece_of(p_NKS[rows, k], logits.log_softmax(-1))
                losses.append(term(name, piece, CFG).sum())
            seen = torch.stack([loss.detach() for loss in losses])
            return losses[0] + 0.8 * losses[1], seen

        return part


def chunk_case(n: int) -> tuple[Head, Tensor, Tensor]:
    torch.manual_seed(3)
    hidden = torch.randn(n, DEPTH, WIDTH, dtype=torch.float64, requires_grad=True)
    return Head(), hidden, torch.stack([pruned(n), truncated(n)], 1)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 10, 11, 1000])
@pytest.mark.parametrize("name", ["nla", "kl", "lk_hybrid"])
def test_chunks_equal_the_plain_sum(name: str, chunk: int) -> None:
    """10 rows: sizes that divide, that do not, the whole and beyond. The total is float32."""
    head, hidden, p = chunk_case(10)
    parameters = list(head.parameters())
    part = head.part(name, p)
    plain, plain_seen = part(slice(0, 10), hidden)
    wanted = torch.autograd.grad(-3.5 * plain, [hidden, *parameters], allow_unused=True)
    total, seen = chunked(part, [hidden], parameters, chunk)
    got = torch.autograd.grad(-3.5 * total, [hidden, *parameters], allow_unused=True)
    assert total.item() == pytest.approx(plain.item(), rel=1e-6)
    torch.testing.assert_close(seen, plain_seen, atol=1e-12, rtol=0)
    assert not seen.requires_grad
    assert got[-1] is None and wanted[-1] is None  # the parameter that is never read
    for x, y in zip(got[:-1], wanted[:-1]):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=0)


def test_chunks_of_a_deeper_graph_accumulate() -> None:
    """hidden comes from a layer below; .backward() twice adds up, as anywhere in torch."""
    head, below, p = chunk_case(10)
    layer = nn.Linear(WIDTH, WIDTH).double().to(DEVICE)
    trained = [*layer.parameters(), head.scale, head.heads]

    def step(run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        for x in trained:
            x.grad = None
        for _ in range(2):
            run(layer(below)).backward()
        return [x.grad for x in trained]

    part = head.part("nla", p)
    wanted = step(lambda h: part(slice(0, 10), h)[0])
    got = step(lambda h: chunked(part, [h], [*layer.parameters(), *head.parameters()], 3)[0])
    for x, y in zip(got, wanted):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=0)


def test_chunks_without_gradients() -> None:
    head, hidden, p = chunk_case(10)
    part = head.part("tv", p)
    wanted, wanted_seen = part(slice(0, 10), hidden)
    with torch.no_grad():
        total, seen = chunked(part, [hidden], list(head.parameters()), 4)
    assert not total.requires_grad
    torch.testing.assert_close(total, wanted.detach())
    torch.testing.assert_close(seen, wanted_seen)


def test_chunks_where_the_head_alone_is_trained() -> None:
    head, hidden, p = chunk_case(10)
    head.scale.requires_grad_(False)
    part = head.part("nla", p)
    wanted = torch.autograd.grad(part(slice(0, 10), hidden)[0], head.heads)
    got = torch.autograd.grad(chunked(part, [hidden.detach()], [head.heads], 4)[0], head.heads)
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)


def test_a_trained_parameter_that_is_not_listed_is_an_error() -> None:
    """Its gradient would be lost in silence; what is listed and never read is no error."""
    head, hidden, p = chunk_case(10)
    part = head.part("nla", p)
    chunked(part, [hidden], [head.scale, head.heads, head.unused], 4)
    with pytest.raises(RuntimeError, match=r"shape \[5\]"):
        chunked(part, [hidden], [head.heads], 4)


def test_no_rows_is_an_error() -> None:
    head, hidden, p = chunk_case(2)
    with pytest.raises(ValueError, match="no rows"):
        chunked(head.part("nla", p), [hidden[:0]], list(head.parameters()), 4)


def test_chunks_of_two_parameters_with_one_gradient() -> None:
    """W = A + B, as where a correction is learnt beside its base: autograd returns one
    tensor as the gradient of both."""
    torch.manual_seed(4)
    a, b = (nn.Parameter(torch.randn(WIDTH, S, dtype=torch.float64)) for _ in range(2))
    hidden = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)

    def part(rows: slice, piece: Tensor) -> tuple[Tensor, Tensor]:
        return (piece @ (a + b)).square().sum(), torch.zeros(1)

    wanted = torch.autograd.grad(part(slice(0, 6), hidden)[0], [a, b])
    got = torch.autograd.grad(chunked(part, [hidden], [a, b], 2)[0], [a, b])
    torch.testing.assert_close(got, wanted)


def test_chunks_of_a_parameter_with_an_expanded_gradient() -> None:
    """The gradient of a plain sum is one number expanded, which cannot be added to in place."""
    bias = nn.Parameter(torch.randn(WIDTH))
    hidden = torch.randn(6, WIDTH, requires_grad=True)

    def part(rows: slice, piece: Tensor) -> tuple[Tensor, Tensor]:
        return piece.sum() + len(piece) * bias.sum(), torch.zeros(1)

    got = torch.autograd.grad(chunked(part, [hidden], [bias], 2)[0], bias)[0]
    assert torch.equal(got, torch.full((WIDTH,), 6.0))


# --- memory ----------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


class Held:
    """A tensor that autograd keeps for a backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def kept_for_backward() -> Iterator[dict[str, int]]:
    """Elements kept at once by all graphs together, `now` and at their `peak`."""
    count = {"now": 0, "peak": 0}

    def drop(elements: int) -> None:
        count["now"] -= elements

    def pack(tensor: Tensor) -> Held:
        held = Held(tensor.detach())
        count["now"] += tensor.numel()
        count["peak"] = max(count["peak"], count["now"])
        weakref.finalize(held, drop, tensor.numel())
        return held

    with saved_tensors_hooks(pack, lambda held: held.tensor):
        yield count


MANY_WORDS = 200  # wide beside WIDTH, so that logits are what fills the memory


def memory(n: int, chunk: int, gradients: bool = True) -> tuple[int, int]:
    """(elements of the largest tensor made, peak of elements kept for backward) over N rows."""
    torch.manual_seed(5)
    head = Head(MANY_WORDS, torch.float32)
    hidden = torch.randn(n, DEPTH, WIDTH, requires_grad=gradients)
    p = torch.rand(n, DEPTH, 2 * MANY_WORDS).softmax(-1)[..., :MANY_WORDS]
    part = head.part("nla", p)
    with torch.set_grad_enabled(gradients), kept_for_backward() as kept, Largest() as largest:
        total, _ = chunked(part, [hidden], list(head.parameters()), chunk)
        if gradients:
            total.backward()
    return largest.elements, kept["peak"]


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="a thread of its own frees a device's graphs, at its own time"
)
def test_memory_of_chunks_does_not_grow_with_rows() -> None:
    """Per row only hidden's own K·D numbers remain (its gradient), besides one chunk's logits.

    The peak kept is the larger of a chunk's graph, which is constant, and the saved gradients,
    N·K·D and the parameters' own numbers: with 256 rows still the graph.
    """
    logits = 8 * DEPTH * MANY_WORDS
    few, many = memory(32, 8), memory(256, 8)
    assert many[0] <= max(256 * DEPTH * WIDTH, logits) < 256 * MANY_WORDS
    assert many[1] == few[1]
    one, large = memory(8, 8), memory(64, 64)
    assert few[1] <= one[1]  # a single chunk alone keeps as much
    assert large[1] > 4 * one[1]  # and what is counted does grow with the chunk


def test_memory_of_the_plain_sum_grows_with_rows() -> None:
    """The same measure on the twin without chunks, so that the test above can fail."""
    for n in (32, 256):
        largest, kept = memory(n, n)
        assert largest >= n * MANY_WORDS  # one depth's logits
        assert kept >= n * DEPTH * MANY_WORDS


def test_memory_without_gradients() -> None:
    """Nothing is kept, and no tensor is larger than hidden or one chunk's logits."""
    largest, kept = memory(256, 8, gradients=False)
    assert kept == 0
    assert largest <= max(256 * DEPTH * WIDTH, 8 * DEPTH * MANY_WORDS)


def within(n: int, few: int) -> tuple[int, int, int]:
    """Elements of the chunk's logits, of the largest tensor made from them, and the peak of those
    kept: one chunk of all N rows, of which the loss reads `few` at a time."""
    torch.manual_seed(5)
    head = nn.Parameter(torch.randn(WIDTH, MANY_WORDS))
    hidden = torch.randn(n, WIDTH, requires_grad=True)
    p = torch.rand(n, 2 * MANY_WORDS).softmax(-1)[..., :MANY_WORDS]
    inner = Largest()

    def read(at: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        with inner:
            loss = term("nla", piece_of(p[at], logits.log_softmax(-1)), CFG).sum()
        return loss, loss.detach()

    def part(rows: slice, piece: Tensor) -> tuple[Tensor, Tensor]:
        return chunked(read, [piece @ head], [], few)

    with kept_for_backward() as kept:
        chunked(part, [hidden], [head], n)[0].backward()
    return n * MANY_WORDS, inner.elements, kept["peak"]


def test_memory_of_chunks_within_a_chunk() -> None:
    """What the loss keeps beside its logits (the graph of a softmax, a minimum and their
    logarithms) is as large as the few rows that it reads; of the chunk only the gradient is kept,
    beside the head and the hidden states that the product keeps."""
    logits, largest, kept = within(64, 2)
    assert largest == logits // 32
    assert logits <= kept < 1.3 * logits
    logits, largest, kept = within(64, 64)
    assert largest == logits and kept > 4 * logits

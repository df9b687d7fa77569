"""Objectives against formulas written out by hand, their gradients, and their chunks.

Run alone: python -m pytest tests/objectives/test_losses.py

p is a distribution over the full target vocabulary cut to the draft's, so that Σ_S p <= 1;
z are the draft's logits and q = softmax(z). Values and gradients are checked in float64, where
rounding is below 1e-14 for numbers of the order of 1; tolerances of 1e-10 leave room for sums.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.objectives.losses import LOG_FLOOR, LOSSES, LossConfig, chunked
from specdec.theory.alpha import Pair

CFG = LossConfig()
S = 7


def pair_of(p: Tensor, log_q: Tensor, label: Tensor | None = None) -> Pair:
    label = torch.zeros(len(p), dtype=torch.long) if label is None else label
    return Pair(p.log(), log_q, p.argmax(-1), label)


def loss_of(name: str, p: Any, q: Any, cfg: LossConfig = CFG) -> float:
    """At one position, label 0."""
    p, q = (torch.tensor([x], dtype=torch.float64) for x in (p, q))
    value = LOSSES[name](pair_of(p, q.log()), cfg)
    assert value.shape == (1,)  # unreduced
    return value.item()


def whole(n: int) -> Tensor:
    """The draft vocabulary is the whole vocabulary: Σ p = 1."""
    return torch.randn(n, S, dtype=torch.float64).softmax(-1)


def pruned(n: int) -> Tensor:
    """A third of the full vocabulary is missing: Σ p < 1."""
    return torch.randn(n, S + 4, dtype=torch.float64).softmax(-1)[:, :S]


def truncated(n: int) -> Tensor:
    """Top-p set some of p to exactly 0, and the vocabulary is pruned."""
    return pruned(n) * (torch.rand(n, S) < 0.5)


def outside(n: int) -> Tensor:
    """All of p is outside the draft vocabulary."""
    return torch.zeros(n, S, dtype=torch.float64)


TARGETS = [whole, pruned, truncated, outside]


def soft(n: int) -> Tensor:
    return torch.randn(n, S, dtype=torch.float64)


def steep(n: int) -> Tensor:
    """q all but one-hot: log q down to about -40, above the floor."""
    return torch.randn(n, S, dtype=torch.float64).clamp(-2, 2) * 10


def case(
    of_p: Callable[[int], Tensor], of_z: Callable[[int], Tensor], n: int = 12
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return of_p(n), of_z(n), torch.randint(-1, S, (n,))


# --- values ----------------------------------------------------------------------------------


def hand(name: str, p: list[float], q: list[float], label: int, cfg: LossConfig) -> float:
    """The formulas, token by token; log 0 stands at LOG_FLOOR."""

    def log(x: float) -> float:
        return max(math.log(x), LOG_FLOOR) if x > 0 else LOG_FLOOR

    both = list(zip(p, q))
    kl = sum(a * (log(a) - log(b)) for a, b in both)
    beta = sum(min(a, b) for a, b in both)
    if name == "kl":
        return kl
    if name == "reverse_kl":
        return sum(b * (log(b) - log(a)) for a, b in both)
    if name == "jsd":
        mixed = [cfg.beta * a + (1 - cfg.beta) * b for a, b in both]
        of_p = sum(a * (log(a) - log(m)) for a, m in zip(p, mixed))
        of_q = sum(b * (log(b) - log(m)) for b, m in zip(q, mixed))
        return cfg.beta * of_p + (1 - cfg.beta) * of_q
    if name == "ce":
        return -log(q[label]) if label >= 0 else 0.0
    if name == "tv":
        return 1 - beta
    if name == "nla":
        return -math.log(max(beta, len(p) * math.exp(LOG_FLOOR)))
    weight = math.exp(-cfg.eta * beta)
    return weight * kl + (1 - weight) * (1 - beta)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("of_p", TARGETS)
@pytest.mark.parametrize("of_z", [soft, steep])
@pytest.mark.parametrize("cfg", [CFG, LossConfig(beta=0.1, eta=10.0)], ids=["default", "other"])
def test_values(name: str, of_p: Any, of_z: Any, cfg: LossConfig) -> None:
    p, z, label = case(of_p, of_z)
    q = z.softmax(-1)
    got = LOSSES[name](pair_of(p, z.log_softmax(-1), label), cfg).tolist()
    wanted = [hand(name, *row, cfg) for row in zip(p.tolist(), q.tolist(), label.tolist())]
    assert got == pytest.approx(wanted, abs=1e-10)


def test_values_on_paper() -> None:
    p, q = [0.5, 0.25, 0.0], [0.25, 0.25, 0.5]  # a quarter of p is outside; β = 0.5
    log2 = math.log(2)
    assert loss_of("kl", p, q) == pytest.approx(0.5 * log2)
    assert loss_of("tv", p, q) == pytest.approx(0.5)
    assert loss_of("nla", p, q) == pytest.approx(log2)
    assert loss_of("ce", p, q) == pytest.approx(2 * log2)
    # 0.25 (-2 + 1) log 2 + 0 + 0.5 (log 0.5 + 60)
    assert loss_of("reverse_kl", p, q) == pytest.approx(-0.25 * log2 + 0.5 * (60 - log2))
    weight = math.exp(-1.5)
    assert loss_of("lk_hybrid", p, q) == pytest.approx(weight * 0.5 * log2 + (1 - weight) * 0.5)


def test_p_is_not_renormalised() -> None:
    """Half of p is outside, q is p over the rest: β is 1/2, however well q does."""
    p, q = [0.3, 0.2], [0.6, 0.4]
    assert loss_of("tv", p, q) == pytest.approx(0.5)
    assert loss_of("nla", p, q) == pytest.approx(math.log(2))
    assert loss_of("kl", p, q) == pytest.approx(-0.5 * math.log(2))  # Σ p log(1/2)


def test_disjoint() -> None:
    p, q = [1.0, 0.0], [0.0, 1.0]
    assert loss_of("tv", p, q) == 1
    assert loss_of("jsd", p, q) == pytest.approx(math.log(2))
    assert loss_of("nla", p, q) == pytest.approx(-LOG_FLOOR - math.log(len(p)))
    for name in ("kl", "reverse_kl", "ce", "lk_hybrid"):
        assert loss_of(name, p, q) == pytest.approx(-LOG_FLOOR)  # λ = exp(0) = 1 in lk_hybrid


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "tv", "nla", "lk_hybrid"])
def test_q_equal_to_p_costs_nothing(name: str) -> None:
    torch.manual_seed(1)
    for z in (soft(20), steep(20)):
        value = LOSSES[name](pair_of(z.softmax(-1), z.log_softmax(-1)), CFG)
        assert value.abs().max() < 1e-12
    assert loss_of(name, [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]) == 0


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "tv", "nla", "lk_hybrid"])
def test_over_the_whole_vocabulary_no_loss_is_below_zero(name: str) -> None:
    p, z, _ = case(whole, soft, 200)
    assert LOSSES[name](pair_of(p, z.log_softmax(-1)), CFG).min() > 0


def test_symmetry() -> None:
    torch.manual_seed(2)
    p, q = whole(20), whole(20)

    def value(name: str, p: Tensor, q: Tensor) -> Tensor:
        return LOSSES[name](pair_of(p, q.log()), CFG)

    for name in ("jsd", "tv", "nla"):  # jsd at β = ½
        assert torch.allclose(value(name, p, q), value(name, q, p), atol=1e-12)
    assert torch.allclose(value("reverse_kl", p, q), value("kl", q, p), atol=1e-12)


def test_lk_hybrid_weighs_each_token_by_its_own_overlap() -> None:
    """λ per token: a token's loss does not depend on its neighbours."""
    p, z, _ = case(pruned, soft)
    pair = pair_of(p, z.log_softmax(-1))
    rows = LOSSES["lk_hybrid"](pair, CFG)
    for n in range(len(p)):
        one = pair_of(p[n : n + 1], z[n : n + 1].log_softmax(-1))
        assert LOSSES["lk_hybrid"](one, CFG).item() == pytest.approx(rows[n].item(), abs=1e-14)


def test_ce_leaves_out_labels_that_the_draft_lacks() -> None:
    p, z, _ = case(pruned, soft, 3)
    z.requires_grad_()
    loss = LOSSES["ce"](pair_of(p, z.log_softmax(-1), torch.tensor([2, -1, S - 1])), CFG)
    loss.sum().backward()
    assert loss[1] == 0 and (loss[[0, 2]] > 0).all()
    assert z.grad is not None and z.grad[1].eq(0).all() and z.grad[0].ne(0).any()


# --- gradients -------------------------------------------------------------------------------


def gradient(name: str, p: Tensor, z: Tensor, label: Tensor, cfg: LossConfig) -> Tensor:
    """∂L/∂z in closed form, from q, p and the docstrings alone."""
    q = z.softmax(-1)
    beta = torch.minimum(p, q).sum(-1, keepdim=True)

    def centred(r: Tensor) -> Tensor:
        return q * (r - (q * r).sum(-1, keepdim=True))

    of_kl = p.sum(-1, keepdim=True) * q - p
    of_tv = 0.5 * centred((q - p).sign() - 1)  # s - 1 for s: the same, without cancellation
    if name == "kl":
        return of_kl
    if name == "reverse_kl":
        return centred(q.log() - p.log().clamp_min(LOG_FLOOR))
    if name == "jsd":
        return (1 - cfg.beta) * centred(q.log() - (cfg.beta * p + (1 - cfg.beta) * q).log())
    if name == "ce":
        onehot = torch.eye(S, dtype=z.dtype)[label.clamp_min(0)]
        return (q - onehot) * (label >= 0)[:, None]
    if name == "tv":
        return of_tv
    if name == "nla":
        return torch.where(beta > 0, of_tv / beta.clamp_min(1e-300), 0.0)
    weight = (-cfg.eta * beta).exp()
    return weight * of_kl + (1 - weight) * of_tv


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("of_p", TARGETS)
@pytest.mark.parametrize("of_z", [soft, steep])
@pytest.mark.parametrize("cfg", [CFG, LossConfig(beta=0.1, eta=10.0)], ids=["default", "other"])
def test_gradients_are_the_closed_forms(name: str, of_p: Any, of_z: Any, cfg: LossConfig) -> None:
    p, z, label = case(of_p, of_z)
    z.requires_grad_()
    LOSSES[name](pair_of(p, z.log_softmax(-1), label), cfg).sum().backward()
    assert z.grad is not None
    torch.testing.assert_close(
        z.grad, gradient(name, p, z.detach(), label, cfg), atol=1e-10, rtol=1e-8
    )


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "lk_hybrid"])
@pytest.mark.parametrize("of_p", TARGETS)
def test_gradients_are_the_differences(name: str, of_p: Any) -> None:
    """Central differences. lk_hybrid stops a gradient on purpose, so it has its own test; the
    other losses are smooth but where q = p at a token, which no random case here comes near."""
    p, z, label = case(of_p, soft, 4)
    z.requires_grad_()
    if name == "nla" and of_p is outside:
        return  # constant: below
    assert torch.autograd.gradcheck(
        lambda z: LOSSES[name](pair_of(p, z.log_softmax(-1), label), CFG), (z,)
    )


def test_lk_hybrid_differences_with_the_weight_held() -> None:
    p, z, _ = case(pruned, soft, 4)
    z.requires_grad_()
    held = torch.exp(-CFG.eta * torch.minimum(p, z.detach().softmax(-1)).sum(-1))

    def by_hand(z: Tensor) -> Tensor:
        pair = pair_of(p, z.log_softmax(-1))
        return held * LOSSES["kl"](pair, CFG) + (1 - held) * LOSSES["tv"](pair, CFG)

    assert torch.autograd.gradcheck(by_hand, (z,))
    (wanted,) = torch.autograd.grad(by_hand(z).sum(), z)
    (got,) = torch.autograd.grad(LOSSES["lk_hybrid"](pair_of(p, z.log_softmax(-1)), CFG).sum(), z)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_stay_finite_where_p_and_q_have_zeros(name: str) -> None:
    """Top-k of 2 on both sides in float32, overlapping or disjoint: -inf in log p and log q."""
    z = torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3], [0, 9, 0, -9]], requires_grad=True)
    kept = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]]).bool()
    log_q = z.masked_fill(~kept, -torch.inf).log_softmax(-1)
    p = torch.tensor([[0.5, 0.2, 0, 0]] * 3)  # disjoint from row 1
    loss = LOSSES[name](pair_of(p, log_q), CFG)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert z.grad is not None and z.grad.isfinite().all() and z.grad[~kept].eq(0).all()


@pytest.mark.parametrize("name", ["kl", "ce", "nla", "lk_hybrid"])
def test_a_draft_that_is_far_off_still_learns(name: str) -> None:
    """All of p is on token 0 and z says e^-70 of it: as at temperature 0.1 with logits 7 apart.
    The closed forms of kl, ce and nla are then q - onehot(0): a gradient of size 1."""
    p = torch.eye(S, dtype=torch.float64)[:1]
    z = torch.zeros(1, S, dtype=torch.float64)
    z[0, 0] = -70
    label = torch.zeros(1, dtype=torch.long)
    z.requires_grad_()
    LOSSES[name](pair_of(p, z.log_softmax(-1), label), CFG).sum().backward()
    assert z.grad is not None and z.grad[0, 0].item() == pytest.approx(-1, abs=1e-6)


# --- chunks ----------------------------------------------------------------------------------

WIDTH, DEPTH = 5, 2


class Head(nn.Module):
    """A small unembedding at each depth, and a bias that is never read."""

    def __init__(self, vocabulary: int = S, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=dtype))
        self.heads = nn.Parameter(torch.randn(DEPTH, WIDTH, vocabulary, dtype=dtype))
        self.unused = nn.Parameter(torch.randn(3, dtype=dtype))

    def part(self, name: str, p_NKS: Tensor) -> Callable[[Tensor, slice], tuple[Tensor, Tensor]]:
        def part(piece_NKD: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            losses = []
            for k in range(DEPTH):
                logits = (piece_NKD[:, k] * self.scale) @ self.heads[k]
                pair = pair_of(p_NKS[rows, k], logits.log_softmax(-1))
                losses.append(LOSSES[name](pair, CFG).sum())
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
    plain, plain_seen = part(hidden, slice(0, 10))
    wanted = torch.autograd.grad(-3.5 * plain, [hidden, *parameters], allow_unused=True)
    total, seen = chunked(part, hidden, parameters, chunk)
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
    layer = nn.Linear(WIDTH, WIDTH).double()
    trained = [*layer.parameters(), head.scale, head.heads]

    def step(run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        for x in trained:
            x.grad = None
        for _ in range(2):
            run(layer(below)).backward()
        return [x.grad for x in trained]

    part = head.part("nla", p)
    wanted = step(lambda h: part(h, slice(0, 10))[0])
    got = step(lambda h: chunked(part, h, [head.scale, head.heads], 3)[0])
    for x, y in zip(got, wanted):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=0)


def test_chunks_without_gradients() -> None:
    head, hidden, p = chunk_case(10)
    part = head.part("tv", p)
    wanted, wanted_seen = part(hidden, slice(0, 10))
    with torch.no_grad():
        total, seen = chunked(part, hidden, list(head.parameters()), 4)
    assert not total.requires_grad
    torch.testing.assert_close(total, wanted.detach())
    torch.testing.assert_close(seen, wanted_seen)


def test_chunks_where_the_head_alone_is_trained() -> None:
    head, hidden, p = chunk_case(10)
    part = head.part("nla", p)
    wanted = torch.autograd.grad(part(hidden, slice(0, 10))[0], head.heads)
    got = torch.autograd.grad(chunked(part, hidden.detach(), [head.heads], 4)[0], head.heads)
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)


def test_no_rows_is_an_error() -> None:
    head, hidden, p = chunk_case(2)
    with pytest.raises(ValueError, match="no rows"):
        chunked(head.part("nla", p), hidden[:0], list(head.parameters()), 4)


def test_chunks_of_two_parameters_with_one_gradient() -> None:
    """W = A + B, as where a correction is learnt beside its base: autograd returns one
    tensor as the gradient of both."""
    torch.manual_seed(4)
    a, b = (nn.Parameter(torch.randn(WIDTH, S, dtype=torch.float64)) for _ in range(2))
    hidden = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)

    def part(piece: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return (piece @ (a + b)).square().sum(), torch.zeros(1)

    wanted = torch.autograd.grad(part(hidden, slice(0, 6))[0], [a, b])
    got = torch.autograd.grad(chunked(part, hidden, [a, b], 2)[0], [a, b])
    torch.testing.assert_close(got, wanted)


def test_chunks_of_a_parameter_with_an_expanded_gradient() -> None:
    """The gradient of a plain sum is one number expanded, which cannot be added to in place."""
    bias = nn.Parameter(torch.randn(WIDTH))
    hidden = torch.randn(6, WIDTH, requires_grad=True)

    def part(piece: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return piece.sum() + len(piece) * bias.sum(), torch.zeros(1)

    got = torch.autograd.grad(chunked(part, hidden, [bias], 2)[0], bias)[0]
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
        total, _ = chunked(part, hidden, list(head.parameters()), chunk)
        if gradients:
            total.backward()
    return largest.elements, kept["peak"]


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

"""A loss over many rows, computed chunk by chunk, so that a tensor over all tokens and the
vocabulary never exists."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# A part takes some rows and their indices and returns (summed loss, summed statistics)
Part = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


class _Chunked(torch.autograd.Function):
    """Runs a loss chunk by chunk and takes each chunk's gradient at once.

    A chunk's logits are freed before the next chunk's are made; the backward pass makes none, as it
    only scales the gradients computed in the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Part, chunk: int, hidden: Tensor, *parameters: nn.Parameter
    ) -> tuple[Tensor, Tensor]:
        grad_hidden = torch.empty_like(hidden)
        grads: list[Tensor | None] = [None] * len(parameters)
        total, statistics = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros(())
        for rows in _slices(hidden, chunk):
            with torch.enable_grad():
                piece = hidden[rows].detach().requires_grad_()
                loss, seen = part(piece, rows)
                if rows.start == 0:
                    _require_among(loss, [piece, *parameters])
                grad_hidden[rows], *new = torch.autograd.grad(
                    loss, [piece, *parameters], allow_unused=True
                )
            for i, (held, grad) in enumerate(zip(grads, new, strict=True)):
                if grad is not None:
                    grads[i] = grad.clone() if held is None else held.add_(grad)
            total += loss.detach()
            statistics = statistics + seen
        ctx.save_for_backward(grad_hidden, *grads)
        ctx.mark_non_differentiable(statistics)
        return total, statistics

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        scale = grad_outputs[0]
        saved = [None if g is None else g * scale for g in ctx.saved_tensors]
        return None, None, *saved


def chunked(
    part: Part, hidden: Tensor, parameters: Sequence[nn.Parameter], chunk: int
) -> tuple[Tensor, Tensor]:
    """Sum of `part` over chunks of the rows of `hidden`.

    `part(rows of hidden, slice)` returns a summed loss (scalar, float32) and detached summed
    statistics. `parameters` lists all trained parameters: those that a chunk reads get their
    gradient, the others none. At most one chunk's intermediate tensors exist at a time. Without
    gradients, nothing is kept at all. Raises RuntimeError if a chunk reads a trained tensor that is
    not among `parameters`, because its gradient would be lost silently.
    """
    if len(hidden) == 0:
        raise ValueError("chunked: no rows")
    trained = hidden.requires_grad or any(p.requires_grad for p in parameters)
    if torch.is_grad_enabled() and trained:
        return _Chunked.apply(part, chunk, hidden, *parameters)
    losses, seen = zip(*(part(hidden[rows], rows) for rows in _slices(hidden, chunk)), strict=True)
    return torch.stack(losses).sum(), torch.stack(seen).sum(0)


def _slices(hidden: Tensor, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, len(hidden), chunk)]


def _require_among(loss: Tensor, listed: Sequence[Tensor]) -> None:
    """Walk the graph of a loss down to its leaves; each must be among those listed."""
    known = {id(x) for x in listed}
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise RuntimeError(
                f"the loss reads a trained tensor of shape {list(leaf.shape)} that is not a "
                "parameter of the drafter, so its gradient would be lost: register it as one"
            )
        nodes += [below for below, _ in node.next_functions]

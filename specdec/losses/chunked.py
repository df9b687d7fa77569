"""A loss over many rows, computed chunk by chunk, so that no tensor over all tokens and the
vocabulary ever exists.

Training uses it twice: a chunk of anchors' hidden states is multiplied by the two unembeddings, and
the loss reads the chunk's logits a few rows at a time, so that its intermediate tensors stay in a
processor's cache. No product is computed twice. (Chunks of the vocabulary would require p and q
again for the gradient, as β is known only after the last chunk.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# A part takes the indices of some rows and these rows of each tensor, and returns (summed loss,
# summed statistics)
Part = Callable[..., tuple[Tensor, Tensor]]
AT_ONCE, AT_ONCE_ON_GPU = 1 << 20, 1 << 26  # logits; see `at_once`


class _Chunked(torch.autograd.Function):
    """Computes a loss and its gradient chunk by chunk. The backward pass only scales these
    gradients, so a chunk's logits are freed before the next chunk's are made."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, chunk: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The first `count` tensors are divided into rows; the others are parameters."""
        cut, parameters = tensors[:count], tensors[count:]
        grads: list[Tensor | None] = [None] * len(tensors)
        own: set[int] = set()  # gradients whose memory nothing else refers to
        total, statistics = cut[0].new_zeros((), dtype=torch.float32), cut[0].new_zeros(())
        for rows in slices(cut[0], chunk):
            with torch.enable_grad():
                pieces = [x[rows].detach().requires_grad_(x.requires_grad) for x in cut]
                loss, seen = part(rows, *pieces)
                if rows.start == 0:
                    _require_among(loss, [*pieces, *parameters])
                trained = {i: x for i, x in enumerate([*pieces, *parameters]) if x.requires_grad}
                new = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
            for i, grad in zip(trained, new, strict=True):
                held = grads[i]
                if grad is None:
                    continue
                if i < count:
                    grads[i] = held = torch.zeros_like(cut[i]) if held is None else held
                    held[rows] = grad
                    own.add(i)
                elif held is None:
                    grads[i] = grad
                else:
                    grads[i] = held.add_(grad) if i in own else held + grad
                    own.add(i)
            total += loss.detach()
            statistics = statistics + seen
        ctx.save_for_backward(*grads)
        ctx.own = own
        ctx.mark_non_differentiable(statistics)
        return total, statistics

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        scale, grads = grad_outputs[0], ctx.saved_tensors
        # within another chunk the factor is 1, but on a GPU the host would wait to learn that
        if scale.device.type != "cpu" or scale != 1:
            grads = [
                g if g is None else g.mul_(scale) if i in ctx.own else g * scale
                for i, g in enumerate(grads)
            ]
        return None, None, None, *grads


def chunked(
    part: Part, cut: Sequence[Tensor], parameters: Sequence[nn.Parameter], chunk: int
) -> tuple[Tensor, Tensor]:
    """The sum of `part` over chunks of rows of the tensors in `cut`, which all have the same
    length.

    `part(slice, rows of each tensor…)` returns a summed loss (scalar, float32) and detached summed
    statistics. The `parameters` that a chunk reads get their gradient. At most one chunk's
    intermediate tensors exist at a time. Raises RuntimeError if a chunk reads a trained tensor that
    is not in `parameters`: its gradient would be lost silently.
    """
    if len(cut[0]) == 0:
        raise ValueError("chunked: no rows")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*cut, *parameters)):
        apply: Callable[..., tuple[Tensor, Tensor]] = _Chunked.apply
        return apply(part, chunk, len(cut), *cut, *parameters)
    sums = [part(rows, *(x[rows] for x in cut)) for rows in slices(cut[0], chunk)]
    losses, seen = zip(*sums, strict=True)
    return torch.stack(losses).sum(), torch.stack(seen).sum(0)


def slices(x: Tensor, chunk: int) -> list[slice]:
    """Consecutive slices of at most `chunk` rows that cover a tensor."""
    return [slice(start, start + chunk) for start in range(0, len(x), chunk)]


def at_once(logits: Tensor) -> int:
    """The number of rows of a chunk's logits that a loss reads at a time: on a CPU as many as fit
    into its cache, on a GPU enough to keep it busy."""
    most = AT_ONCE if logits.device.type == "cpu" else AT_ONCE_ON_GPU
    return max(1, most // max(1, logits[0].numel()))


def _require_among(loss: Tensor, listed: Sequence[Tensor]) -> None:
    """Raise RuntimeError unless every leaf of the loss's graph is listed."""
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

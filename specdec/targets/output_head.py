"""The modules between a model's last hidden state and its logits.

Most models multiply by one matrix. Some scale or cap the product. BERT-like models transform the
state first: this transform counts as a part before the head, like a final norm, and the head is
linear.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specdec.compat import twin
from specdec.runtime.quantised import bias_zeroed


def head_scaling(config: Any) -> Callable[[Tensor], Tensor]:
    """The scaling of a model's head output: Gemma's soft cap, Cohere's factor or Granite's divisor;
    most models have none."""
    if cap := soft_cap(config):
        return lambda z: cap * torch.tanh(z / cap)
    if factor := getattr(config, "logit_scale", None):
        return lambda z: z * factor
    divisor = _divisor(config)
    return lambda z: z / divisor if divisor else z


def soft_cap(config: Any) -> float | None:
    """The upper limit of a model's logits, if it caps them."""
    keys = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((float(x) for key in keys if (x := getattr(config, key, None))), None)


def head_factor(config: Any) -> float:
    """The linear part of a model's `head_scaling`."""
    factor = getattr(config, "logit_scale", None) or 1.0
    return float(factor / (_divisor(config) or 1.0))


def _divisor(config: Any) -> float | None:
    """The divisor of a model's logits (Granite), or of the states before them (Inkling)."""
    keys = ("logits_scaling", "logits_mup_width_multiplier")
    return next((x for key in keys if (x := getattr(config, key, None))), None)


def head_without_padding(head: nn.Linear, rows: int) -> nn.Linear:
    """A head without the rows that pad its vocabulary; it shares its weights with `head`."""
    cut = nn.Linear(head.in_features, rows, bias=head.bias is not None, device="meta")
    cut.weight = nn.Parameter(head.weight[:rows], requires_grad=False)
    if head.bias is not None:
        cut.bias = nn.Parameter(head.bias[:rows], requires_grad=False)
    return cut


@torch.no_grad()
def transform_of(model: Any, body: Any, head: nn.Module) -> nn.Module | None:
    """The modules that a model calls between its `body` and its linear `head`, as one module [...,
    D] -> [..., D]; None if there are none. They share their weights with the model."""
    called = list[nn.Module]()
    device = model.get_input_embeddings().weight.device
    with _noting(model, body, head, called):
        model(input_ids=torch.arange(1, 5, device=device)[None], use_cache=False)
    parts = [without(module, head) for module in called if module is not head]
    return nn.Sequential(*parts) if parts else None


def without(module: nn.Module, head: nn.Module) -> nn.Module:
    """A copy of a module that shares its weights but skips the `head` inside it."""
    path = next((name for name, part in module.named_modules() if part is head), None)
    same: nn.Module = twin(module)
    if path is not None:
        same.set_submodule(path, nn.Identity())
    return same


def flat(head: Any) -> nn.Linear:
    """A plain linear layer equivalent to a head with a product of its own, such as one with a
    factor for each token. Its weights are the head's logits of the D unit vectors."""
    D = head.weight.shape[1]
    with torch.no_grad():
        bias_V = head(head.weight.new_zeros(1, D))[0]
        with bias_zeroed(head):  # a large bias would leave none of a weight's digits in a sum
            unit_DD = torch.eye(D, device=bias_V.device, dtype=head.weight.dtype)
            weight_VD = (head(unit_DD) - head(head.weight.new_zeros(1, D))).T
    plain = nn.Linear(D, len(weight_VD), bias=bool(bias_V.any()), device="meta")
    plain.weight = nn.Parameter(weight_VD.to(head.weight.dtype).contiguous(), requires_grad=False)
    if plain.bias is not None:
        plain.bias = nn.Parameter(bias_V.to(head.weight.dtype), requires_grad=False)
    return plain


@contextmanager
def _noting(model: Any, body: Any, head: nn.Module, called: list[nn.Module]) -> Iterator[None]:
    """Record the outermost modules that are called after the body has ended, up to the head."""
    inside, ended = list[nn.Module](), list[bool]()

    def entered(module: nn.Module, _: Any) -> None:
        if ended and not inside and not any(head in m.modules() for m in called):
            called.append(module)
        if ended:
            inside.append(module)

    def left(module: nn.Module, *_: Any) -> None:
        if inside and inside[-1] is module:
            inside.pop()

    within = set(body.modules())
    hooks = [body.register_forward_hook(lambda *_: ended.append(True))]
    for module in model.modules():
        if module not in within:
            hooks.append(module.register_forward_pre_hook(entered))
            hooks.append(module.register_forward_hook(left))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

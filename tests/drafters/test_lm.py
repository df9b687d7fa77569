"""A draft LM without its modules drafts what it drafts with them.

Run alone: python -m pytest tests/drafters/test_lm.py
"""

from copy import deepcopy
from typing import Any

import pytest
import torch

from specdec.decoding.decode import Generation, generate
from specdec.decoding.way import Way
from specdec.drafters.lm import LM
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape
from tests.tiny import architectures, lm, random_target

PROMPT = [5, 9, 7, 4, 11]


def answer(drafter: LM, target: Any, shape: Shape, temperature: float) -> Generation:
    way = Way(drafter, shape, sampler=Sampler(temperature))
    return generate(target, PROMPT, way, max_new_tokens=24)


def made(kind: str) -> tuple[Any, LM]:
    target = random_target(architectures(31, 4)[kind])
    drafter = lm(target, 0.02)
    assert isinstance(drafter, LM)
    return target, drafter


@pytest.mark.parametrize("shape", [Chain(3), Dynamic(2, 5, 3)])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_steps_are_those_of_the_modules(kind: str, shape: Shape) -> None:
    target, drafter = made(kind)
    assert drafter.lean is not None
    temperature = 0.0 if isinstance(shape, Dynamic) else 1.0
    calls = list[int]()
    ours = answer(drafter, target, shape, temperature)
    # a hook makes it go through the modules
    hook = drafter.model.register_forward_hook(lambda *_: calls.append(1))
    inner = drafter.model.base_model.register_forward_hook(lambda *_: calls.append(1))
    theirs = answer(drafter, target, shape, temperature)
    hook.remove(), inner.remove()
    assert calls and ours.ids == theirs.ids and ours.steps == theirs.steps
    assert any(r.accepted for r in ours.steps)


def test_another_shape_keeps_its_modules() -> None:
    _, drafter = made("gpt2")
    assert drafter.lean is None


def test_a_lean_pass_that_differs_is_not_used() -> None:
    """A rotary module that turns the other way from its second call on: the check finds it."""
    _, drafter = made("llama")
    rotary, calls = drafter.model.base_model.rotary_emb, list[int]()

    class Turning(torch.nn.Module):
        def forward(self, *args: Any, **more: Any) -> Any:
            calls.append(1)
            cos, sin = rotary(*args, **more)
            return (cos, sin) if len(calls) == 1 else (cos, -sin)

    drafter.model.base_model.rotary_emb = Turning()
    assert drafter.lean is None and len(calls) > 1


def test_a_rotary_module_with_other_arguments_keeps_the_modules() -> None:
    """A model may hand it whatever it takes."""
    _, drafter = made("llama")
    body: Any = drafter.model.base_model
    rotary = body.rotary_emb

    class Named(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, position_ids: torch.Tensor) -> Any:
            return rotary(x, position_ids)

    body.rotary_emb = Named()
    assert drafter.lean is None


def test_weights_whose_changes_cannot_be_told_keep_the_modules() -> None:
    """Tensors that inference mode made have no version."""
    with torch.inference_mode():
        _, drafter = made("llama")
    assert drafter.lean is None


def test_training_and_copies_are_followed() -> None:
    target, drafter = made("llama")
    before = answer(drafter, target, Chain(3), 0.0)
    copied = deepcopy(drafter)
    with torch.no_grad():
        for x in drafter.parameters():
            x.normal_(0, 0.3)
    after = answer(drafter, target, Chain(3), 0.0)
    assert after.ids == before.ids and after.steps != before.steps
    copied.attach(target)
    assert answer(copied, target, Chain(3), 0.0).steps == before.steps

"""A family has one forward pass: training and drafting take the same step, each with its attention.

Run alone: python -m pytest tests/drafters/test_one_pass.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.context import TrainingMoment
from specdec.drafters import DRAFTERS, Drafter
from specdec.drafters.attention import OverSlots
from specdec.drafters.base import Predictor, Trainable, vocabulary
from specdec.drafters.eagle import Eagle
from specdec.frozen import Frozen
from specdec.runtime.cache import SlotCache
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape
from specdec.targets.target import Target
from tests.drafters.families import CONFIGS, V, context, make_drafter, make_target, text

STEPS = ("step", "output")  # heads have two: the state after a token, and what a depth makes of it
WITHOUT = ("ngram", "unigram", "bigram", "suffix", "lookahead", "copy", "hybrid")  # layers
WITHOUT += ("sparse",)  # layers of its own: the target's passes over the text are calls of the same


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


class Calls:
    """The layers' modules that a drafter calls: those of each step, in the order of their first
    call, and those outside all steps."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.outside: list[str] = []
        self.deep = 0

    def note(self, name: str) -> None:
        if not self.deep:
            self.outside.append(name)
        elif name not in self.steps[-1]:
            self.steps[-1].append(name)

    def passes(self) -> set[tuple[str, ...]]:
        return {tuple(step) for step in self.steps if step}


def of_layers(drafter: Drafter) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a drafter's layers: of those with attention, and of the blocks of heads. The
    body of a view of the target is not its submodule."""
    roots: dict[str, Any] = {"": drafter}
    if isinstance(body := vars(drafter).get("body"), Frozen):
        roots["body."] = body.held
    for prefix, root in roots.items():
        names = [n for n, m in root.named_modules() if hasattr(m, "self_attn")]
        names += [n for n, _ in root.named_children() if n in ("blocks", "skips", "proj", "ln")]
        for name, module in root.named_modules():
            if any(name.startswith(f"{layer}.") for layer in names) and not [*module.children()]:
                yield prefix + name, module


@contextmanager
def watched(drafter: Drafter) -> Iterator[Calls]:
    calls, hooks = Calls(), []
    stepping = [m for m in drafter.modules() if any(hasattr(m, name) for name in STEPS)]
    for module in stepping:
        for name in STEPS:
            if (plain := getattr(module, name, None)) is not None:

                @wraps(plain)
                def step(*args: Any, plain: Any = plain, **options: Any) -> Any:
                    if not calls.deep:
                        calls.steps.append([])
                    calls.deep += 1
                    try:
                        return plain(*args, **options)
                    finally:
                        calls.deep -= 1

                setattr(module, name, step)
    for name, module in of_layers(drafter):
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: calls.note(name)))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        for module in stepping:
            for name in STEPS:
                vars(module).pop(name, None)


def trained(drafter: Drafter, target: Target) -> Calls:
    ctx = context(target, drafter, text(0))
    with watched(drafter) as calls:
        if isinstance(drafter, Trainable):
            drafter.training_hidden(ctx, torch.tensor([[5, 8]]), TrainingMoment(seeds=[1]))
        assert isinstance(drafter, Predictor)
        drafter.hidden(ctx, torch.tensor([[5, 8]]), torch.full((1, 2, 2), 7))
    return calls


def drafted(drafter: Drafter, target: Target) -> Calls:
    """Two speculation steps over one cache, in a chain and then in a tree."""
    cache, ends = drafter.new_cache(), (6, 9)
    contexts = [context(target, drafter, text(1)[:, :end]) for end in ends]
    shapes: list[Shape] = [Chain(3), Dynamic(3, 10, 4)]
    with watched(drafter) as calls:
        for shape, ctx in zip(shapes, contexts, strict=True):
            choose = Choose(Sampler(0.0), "without", RowDraws([0]), vocabulary(drafter), V)
            drafter.draft(ctx, shape, choose, cache)
    return calls


def require_one_pass(drafter: Drafter, target: Target) -> None:
    training, drafting = trained(drafter, target), drafted(drafter, target)
    assert training.passes(), "no layer is called in a step"
    assert drafting.passes(), "no layer is called in a step"
    assert not training.outside, "training calls layers outside the step"
    assert not drafting.outside, "drafting calls layers outside the step"
    for step in drafting.passes():  # drafted tokens may enter above the first module
        assert any(whole[-len(step) :] == step for whole in training.passes()), step


TRIED = [name for name in CONFIGS if not name.startswith(WITHOUT)]


@pytest.mark.parametrize("name", TRIED)
def test_training_and_drafting_take_the_same_step(target: Target, name: str) -> None:
    require_one_pass(make_drafter(name, target), target)


def test_no_family_with_layers_is_left_out() -> None:
    """Two read texts and caches with models of `specdec.targets`, which have one pass each."""
    tried = {CONFIGS[name].name for name in TRIED}
    assert {*DRAFTERS} - tried == {*WITHOUT, "seq2seq_lm", "translated"}


class TwoPasses(Eagle):
    """Its drafting goes through the layer in a second place, and leaves out the MLP."""

    def run(self, cache: SlotCache, **inputs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        earlier = inputs["hidden_states"] if inputs["own"] is None else inputs["own"]
        read, residual = self.enter(inputs["embedding"], self.fuse(earlier))
        rope = inputs["cos"], inputs["sin"]
        over_slots = OverSlots(cache, rope, lambda _: inputs["mask"], 1, inputs["last"])
        hidden = over_slots.asked(0, residual) + over_slots(0, self.layer.self_attn, read)
        return hidden, self.unembed(hidden, 0)


def test_a_second_pass_is_noticed(target: Target) -> None:
    config = CONFIGS["eagle"]
    with pytest.raises(AssertionError, match="no layer is called in a step"):
        require_one_pass(TwoPasses.build(config, target).eval(), target)

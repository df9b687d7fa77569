"""The hypotheses of scripts/check change in a draft what they say, in every family that has it.

Run alone: python -m pytest tests/measure/test_hypotheses.py (a few seconds)
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.context import Context
from specdec.drafters import DRAFTERS
from specdec.drafters.block import Block
from specdec.measure.hypotheses import ChangedDraft, Experiment, missing_norms
from specdec.measure.served import TimedResponse
from specdec.targets.target import Target
from tests.drafters.families import CONFIGS, context, make_drafter, make_target, text

BLOCKS = [name for name, config in CONFIGS.items() if issubclass(DRAFTERS[config.name], Block)]
T = 14


def of_first_key_norm(drafter: Any, target: Target) -> list[ChangedDraft]:
    """The hypotheses about the key norm of the first layer, for a draft of a made-up response."""
    ids = text(0)[0].tolist()
    response = TimedResponse(ids[6:], 1.0, 3, (1, 0, 0))
    here = Experiment(target, drafter, 3, [ids[:6]], [response])
    return [changed for changed in missing_norms(here) if "k_norm of layer 0" in changed.change]


def hidden(drafter: Any, ctx: Context) -> Tensor:
    with torch.no_grad():
        states: Tensor = drafter.hidden(ctx, torch.tensor([[5, 9]]), None)
    return states


@pytest.mark.parametrize("name", BLOCKS)
def test_the_first_key_norm_is_that_of_the_text_alone(name: str) -> None:
    """The text's keys are told from those of the slots by their number, and not by the order of
    calls. Two passes give the same, and the draft itself is as it was."""
    target = make_target()
    drafter: Any = make_drafter(name, target, 0.1)
    ctx = context(target, drafter, text(0))
    attentions = [layer.self_attn for layer in drafter.layers]
    with torch.no_grad():
        for i, attention in enumerate(attentions):
            attention.k_norm.weight.copy_(
                1 + 0.5 * (torch.arange(len(attention.k_norm.weight)) + i)
            )
    as_it_is = hidden(drafter, ctx)
    (changed,) = of_first_key_norm(drafter, target)
    ours = [hidden(changed.drafter, ctx) for _ in range(2)]
    assert torch.equal(ours[0], ours[1]) and torch.equal(hidden(drafter, ctx), as_it_is)

    def with_norm_of_text(attention: Any) -> Any:
        own, keys_values = attention.k_norm, attention.keys_values

        def changed_keys_values(x_BPD: Tensor, rope: Any) -> Any:
            attention.k_norm = attentions[0].k_norm if x_BPD.shape[1] == T else own
            try:
                return keys_values(x_BPD, rope)
            finally:
                attention.k_norm = own

        return changed_keys_values

    with pytest.MonkeyPatch.context() as patch:
        for attention in attentions[1:]:
            patch.setattr(attention, "keys_values", with_norm_of_text(attention))
        wanted = hidden(drafter, ctx)
    torch.testing.assert_close(ours[0], wanted)
    assert not torch.allclose(wanted, as_it_is)


@pytest.mark.parametrize("name", ["dflash", "eagle3 of two layers"])
def test_without_key_norms_that_differ_there_is_no_such_hypothesis(name: str) -> None:
    target = make_target()
    drafter: Any = make_drafter(name, target, 0.1)
    if isinstance(drafter, Block):
        for layer in drafter.layers:
            torch.nn.init.ones_(layer.self_attn.k_norm.weight)
    assert of_first_key_norm(drafter, target) == []

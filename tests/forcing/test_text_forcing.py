"""Losses and passes on text that the target has not read (`text_batch`), in every family.

Run alone: python -m pytest tests/forcing/test_text_forcing.py                      (under 15 s)
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.context import Context, HiddenStateSpec
from specdec.drafters import DRAFTERS
from specdec.drafters.base import Trainable
from specdec.forcing.batch import text_batch
from specdec.forcing.teacher import TeacherForcing, logits_of
from specdec.losses.loss_config import LossConfig
from specdec.losses.loss_terms import LOSS_TERMS, LossInputs, TextInputs, ce
from specdec.sampling.sampler import Sampler
from specdec.targets.target import Target
from tests.drafters.families import CONFIGS, make_drafter, make_target, text
from tests.tiny import batch_of
from train.data.sequences import Row
from train.hidden_states.batches import TextBatches

# families that need neither the target's layers in training nor adapters on it
TRAINABLE = [
    name
    for name, config in CONFIGS.items()
    if (kind := DRAFTERS[config.name]).trains(config)
    and not (kind.runs_target or kind.adapts_target(config))
]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def test_a_loss_is_allowed_by_what_it_reads() -> None:
    """By calling each term: one that is added later needs no line in a list."""
    paths = {"paths": [[0], [0, 0]]}
    reads = {
        name: bool(LossConfig(terms={name: 1.0}, **paths).terms_of_target) for name in LOSS_TERMS
    }
    assert [name for name, of_target in reads.items() if not of_target] == [
        *("ce", "d_pace", "spec_auf")
    ]

    def entropy(inputs: LossInputs) -> Tensor:
        return -(inputs.q * inputs.log_q).sum(-1)

    def half_kl(inputs: LossInputs) -> Tensor:
        return torch.minimum(inputs.log_p, inputs.log_q).sum(-1) / 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOSS_TERMS, "entropy", entropy)
        patch.setitem(LOSS_TERMS, "half_kl", half_kl)
        mixed = LossConfig(terms={"ce": 1.0, "entropy": 0.1, "half_kl": 1.0})
        assert mixed.terms_of_target == ["half_kl"]


def counted(target: Target, drafter: Any) -> tuple[Context, Tensor]:
    """A text of two rows and the tokens that count."""
    ids_BT = torch.cat([text(0, 18), text(1, 18)]).to(target.device)
    mask_BT = torch.arange(18, device=target.device).expand_as(ids_BT) >= 5
    place_BT = torch.arange(18, device=target.device).expand_as(ids_BT).contiguous()
    return Context(ids_BT, document_BT=0 * place_BT, position_BT=place_BT), mask_BT


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_family_trains_on_text_alone(target: Target, name: str) -> None:
    """The loss is finite and reaches the draft's weights; q of the text's token is the draft's
    own."""
    drafter = make_drafter(name, target, noise=0.05)
    assert isinstance(drafter, Trainable)
    forcing = TeacherForcing(
        drafter, target, Sampler(1.0), LossConfig(terms={"ce": 1.0}), text_alone=True
    )
    text_BT, mask_BT = counted(target, drafter)
    batch = text_batch(target, drafter.needs, text_BT, mask_BT)
    loss, sums_KS = forcing(batch)
    loss.backward()
    assert loss.isfinite() and sums_KS.shape == (forcing.depth, 3)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
    mean_K = sums_KS[:, 2] / sums_KS[:, 0]
    assert (mean_K > 0).all() and (mean_K < 1).all()


def test_without_hidden_states_the_loss_is_that_with_the_target(target: Target) -> None:
    """An lm reads no hidden state and `ce` no p, so loss and gradient are the same numbers."""
    drafter = make_drafter("lm", target, noise=0.1)
    sampler, loss = Sampler(1.0, top_k=9), LossConfig(terms={"ce": 1.0})
    text_BT, mask_BT = counted(target, drafter)
    found = []
    for alone in (False, True):
        forcing = TeacherForcing(drafter, target, sampler, loss, text_alone=alone)
        batch = (
            text_batch(target, drafter.needs, text_BT, mask_BT)
            if alone
            else batch_of(target, drafter.needs, sampler, text_BT.ids_BT.tolist(), mask_BT.tolist())
        )
        forcing.zero_grad()
        total, sums_KS = forcing(batch)
        total.backward()
        found.append((total, sums_KS, [p.grad for p in drafter.parameters() if p.requires_grad]))
    (theirs, their_sums, their_grads), (ours, our_sums, our_grads) = found
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(our_sums[:, :2], their_sums[:, :2])  # positions and loss
    torch.testing.assert_close(our_grads, their_grads)

    hidden_BAKD = drafter.hidden(batch.ctx, torch.arange(18).expand(2, -1), None)
    first_NS = logits_of(drafter, hidden_BAKD.flatten(0, 1)).log_softmax(-1)[:, 0]
    next_BT = text_BT.ids_BT[:, 1:]
    q_BT = first_NS.exp().unflatten(0, (2, 18))[:, :-1].gather(-1, next_BT[..., None])[..., 0]
    wanted = (q_BT * mask_BT[:, 1:]).sum()
    torch.testing.assert_close(our_sums[0, 2], wanted)


def test_a_stand_in_is_the_embedding_of_the_token(target: Target) -> None:
    ids = np.arange(3, 11, dtype=np.int32)
    row = Row(ids, ids > 5, 0 * ids, np.arange(8, dtype=np.int32))
    needs = HiddenStateSpec(layers=(1, 4), final_hidden=True)
    batch = TextBatches(target, needs, [row, row]).batch([1])
    embedded_1TD = target.model.get_input_embeddings()(
        torch.arange(3, 11, device=target.device)[None]
    )
    assert batch.ctx.layers_BTF is not None and batch.ctx.final_BTD is not None
    assert torch.equal(batch.ctx.layers_BTF, torch.cat([embedded_1TD] * 2, -1))
    assert torch.equal(batch.ctx.final_BTD, embedded_1TD)
    assert batch.final_BTD.shape == (1, 8, 0)  # no p can be computed from it
    assert torch.equal(batch.mask_BT, torch.from_numpy(row.mask)[None].to(target.device))
    plain = TextBatches(target, HiddenStateSpec(), [row]).batch([0]).ctx
    assert plain.layers_BTF is None and plain.final_BTD is None


def test_tokens_outside_the_draft_vocabulary_have_probability_0() -> None:
    log_q = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]]).log()
    more = {"valid": torch.ones(1, 2).bool(), "logits": log_q, "hidden": log_q}
    inputs = TextInputs(log_q, label=torch.tensor([[1, -1]]), **more)
    torch.testing.assert_close(inputs.probability, torch.tensor([[0.2, 0.0]]))
    torch.testing.assert_close(ce(inputs), -torch.tensor([[0.2, 1.0]]).log())

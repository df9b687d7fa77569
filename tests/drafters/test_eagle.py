"""EAGLE-1: where its training starts, what noise it reads, and what it regresses.

Run alone: python -m pytest tests/drafters/test_eagle.py
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from specdec.context import Context, TrainingMoment
from specdec.drafters import DRAFTERS
from specdec.drafters.eagle import Eagle, EagleConfig
from specdec.drafters.eagle3 import Eagle3, Eagle3Config
from specdec.drafters.layers import UPDATE
from specdec.forcing.batch import Batch
from specdec.forcing.teacher import TeacherForcing
from specdec.losses.loss_config import LossConfig
from specdec.sampling.sampler import Sampler
from specdec.targets.target import Target
from tests.tiny import architectures, batch_of, compose, random_drafter, random_target

V, D = 61, 32


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(architectures(V, 6)["llama"])
    norms = [
        target.norm,
        target.layers[-1].input_layernorm,
        target.layers[-1].post_attention_layernorm,
    ]
    with torch.no_grad():  # all are 1 in a fresh model
        for seed, norm in enumerate(norms):
            drawn = torch.rand(D, generator=torch.Generator().manual_seed(seed))
            norm.weight.copy_(0.5 + drawn)
    return target


def eagle(target: Target, **config: object) -> Eagle:
    return Eagle.build(EagleConfig(**config), target).float()  # type: ignore[arg-type]


def test_the_start_reads_states_as_the_targets_last_layer_reads_its_stream(target: Target) -> None:
    """With r the stream and h = w_f · r / rms(r) its state, the layer's queries, keys, values and
    what its MLP reads are those of the target's layer at r; what it adds is a quarter of h."""
    drafter, theirs = eagle(target), target.layers[-1]
    r = 7 * torch.randn(200, D, generator=torch.Generator().manual_seed(3))
    h = target.norm(r)
    assert torch.equal(drafter.enter(torch.randn(200, D), h)[0], h)
    attention = drafter.layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        wanted = getattr(theirs.self_attn, name)(theirs.input_layernorm(r))
        torch.testing.assert_close(getattr(attention, name)(h), wanted, atol=1e-5, rtol=1e-5)
    wanted = theirs.post_attention_layernorm(r)
    got = drafter.layer.post_attention_layernorm(h)
    ratio = (
        (got / wanted).detach().median(-1).values
    )  # rms(h) differs from state to state, by a few percent
    torch.testing.assert_close(got, wanted * ratio[:, None], atol=1e-5, rtol=1e-5)
    assert float(ratio.min()) > 0.7 and float(ratio.max()) < 1.4
    alone = Context(torch.zeros(200, 2, dtype=torch.long), None, h[:, None].expand(-1, 2, -1))
    with torch.no_grad():
        added = drafter.hidden(alone, torch.ones(200, 1, dtype=torch.long), None)[:, 0, 0] - h
    share = float((added.square().mean() / h.square().mean()).sqrt())
    assert share == pytest.approx(UPDATE, rel=0.4)  # attention and MLP add up, or cancel


def test_a_layer_of_another_kind_is_not_copied(target: Target) -> None:
    """GPT-2 has no input_layernorm: the start is random but for the pass-through."""
    other = random_target(architectures(V, 6)["gpt2"])
    drafter = eagle(other)
    assert torch.equal(drafter.fc.weight[:, D:], torch.eye(D))
    assert 0.01 < float(drafter.layer.self_attn.q_proj.weight.detach().std()) < 0.03


def test_a_layer_of_another_size_is_not_copied(target: Target) -> None:
    drafter = eagle(target, intermediate_size=16)
    assert torch.equal(drafter.fc.weight[:, D:], torch.eye(D))
    assert 0.01 < float(drafter.layer.self_attn.q_proj.weight.detach().std()) < 0.03


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_an_embedding_of_its_own_begins_as_the_targets(target: Target, name: str) -> None:
    kind = DRAFTERS[name]
    drafter: Any = kind.build(kind.Config(own_embedding=True), target)  # type: ignore[call-arg]
    assert torch.equal(drafter.embed_tokens.weight, target.embedding.weight)
    assert not drafter.embed_tokens.weight.requires_grad


def packed(target: Target) -> Batch:
    """A text of 30 tokens, and one of 12 with padding."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, V, (n,), generator=generator).tolist() for n in (30, 12)]
    masks = [[False] * 4 + [True] * (len(x) - 4) for x in ids]
    return batch_of(target, Eagle.needs, Sampler(1.0), ids, masks)


def test_noise_is_uniform_and_narrower_in_longer_documents(target: Target) -> None:
    """Width .2 · 512 / n in a document of n tokens; two documents of 8 and 22 are in the first row,
    which gets the same noise alone as beside another."""
    drafter, batch = eagle(target, noise=0.2), packed(target)
    ctx, ids = batch.ctx, batch.ctx.ids_BT
    position_BT = ctx.position_BT.clone()
    position_BT[0] = torch.cat([torch.arange(8), torch.arange(22)])
    ctx = Context(ids, None, ctx.final_BTD, ctx.document_BT, position_BT)
    noise = drafter.noisy(ctx, TrainingMoment(seeds=[5, 6])).final_BTD - ctx.final_BTD
    for part, n in ((noise[0, :8], 8), (noise[0, 8:], 22), (noise[1, :12], 12)):
        half = 0.1 * 512 / n
        assert 0.9 * half < float(part.abs().max()) <= half * 1.001
        # the mean of 32 n uniform numbers has a standard deviation of half / sqrt(3 · 32 n)
        assert abs(float(part.mean())) < 5 * half / (3 * 32 * n) ** 0.5
    alone = Context(
        *(None if x is None else x[:1] for x in vars(ctx).values() if not isinstance(x, list))
    )
    again = drafter.noisy(alone, TrainingMoment(seeds=[5])).final_BTD - ctx.final_BTD[:1]
    assert torch.equal(again[0], noise[0])
    other = drafter.noisy(alone, TrainingMoment(seeds=[7])).final_BTD - ctx.final_BTD[:1]
    assert not torch.allclose(other[0], noise[0])


@pytest.mark.parametrize(("unroll", "depths"), [(None, 3), (2, 2), (1, 1)])
def test_training_without_noise_is_the_first_depths_of_drafting(
    target: Target, unroll: int | None, depths: int
) -> None:
    drafter, ctx, anchors = (
        eagle(target, unroll=unroll),
        packed(target).ctx,
        torch.tensor([[3, 7]] * 2),
    )
    trained = drafter.training_hidden(ctx, anchors, TrainingMoment(seeds=[1, 2]))
    torch.testing.assert_close(trained, drafter.hidden(ctx, anchors, None)[:, :, :depths])
    assert drafter.train_depth == trained.shape[2] == depths


def test_noise_is_read_in_training_alone(target: Target) -> None:
    batch, moment = packed(target), TrainingMoment(seeds=[1, 2])
    forcing = TeacherForcing(eagle(target, noise=0.2), target, Sampler(1.0))
    plain = TeacherForcing(eagle(target), target, Sampler(1.0))
    plain.load_state_dict(forcing.state_dict())
    with torch.no_grad():
        assert not torch.allclose(forcing(batch, moment=moment)[0], plain(batch, moment=moment)[0])
        measured = forcing(batch, measure=True).alpha.sampled
        assert torch.equal(measured, plain(batch, measure=True).alpha.sampled)


def test_the_papers_pass_regresses_the_state_at_the_anchor(target: Target) -> None:
    """One depth: ĥ from the pair (x_a, h_{a-1}) against h_a itself, smooth L1 by hand."""
    batch = packed(target)
    drafter = random_drafter(EagleConfig(unroll=1, initialisation="random"), target, 0.1)
    loss_config = LossConfig(terms={"smooth_l1": 1.0})
    loss, _ = TeacherForcing(drafter, target, Sampler(1.0), loss_config)(batch)
    wanted = torch.zeros(())
    for b, n in enumerate((30, 12)):
        # tokens 4 … n - 1 are the response's, each predicted at a = t - 1
        for a in range(3, n - 1):
            found = drafter.hidden(batch.ctx, torch.tensor([[a], [a]]), torch.zeros(2, 1, 0).long())
            d = (found[b, 0, 0] - batch.final_BTD[b, a]).abs()
            wanted = wanted + torch.where(d < 1, d * d / 2, d - 0.5).mean()
    torch.testing.assert_close(loss, wanted, atol=1e-4, rtol=1e-5)


def test_the_papers_recipe_is_composed() -> None:
    config = compose(["experiment=eagle_paper"])
    assert config.drafter == EagleConfig(initialisation="random", unroll=1, noise=0.2)
    assert config.loss.terms == {"smooth_l1": 1.0, "soft_ce": 0.1}
    assert (config.optim.lr, config.optim.betas, config.optim.clip) == (3e-5, [0.9, 0.95], 0.5)
    assert config.optim.warmup > 0


@pytest.mark.parametrize("family", [Eagle, Eagle3])
def test_few_anchors_cost_little(target: Target, family: type[nn.Module]) -> None:
    """10 anchors of 196 are a twentieth of the queries, MLPs and steps; the keys of all pairs, made
    once, are some twentieths more. One more pass of the layer over all pairs would be a fifth."""
    config = EagleConfig() if family is Eagle else Eagle3Config(draft_vocab=None)
    drafter = random_drafter(config, target, 0.1)
    ids = torch.randint(2, V, (1, 200), generator=torch.Generator().manual_seed(1))
    ctx, _ = target.hidden_states(ids, drafter.needs)

    def operations(anchors: Tensor) -> int:
        with FlopCounterMode(display=False) as counter:
            drafter.hidden(ctx, anchors[None], None).sum().backward()
        return counter.get_total_flops()

    few, all_ = operations(torch.arange(5, 195, 19)), operations(torch.arange(1, 197))
    assert few < 0.13 * all_

"""Drafters without training: the target drafting for itself, what is saved, and wrong options.

Run alone: python -m pytest tests/drafters/test_drafters_free.py
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.context import Context, HiddenStateSpec
from specdec.decoding.decode import decode, generate
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS
from specdec.drafters.suffix import SuffixConfig
from specdec.drafters.target_views import shallow, with_weights
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.lab.drafters.copy import CopyConfig
from specdec.lab.drafters.counts import BigramConfig, UnigramConfig
from specdec.lab.drafters.early_exit import EarlyExitConfig
from specdec.lab.drafters.lookahead import LookaheadConfig
from specdec.lab.drafters.sparse import SparseConfig, attention, voted
from specdec.runtime.cache import Place, cache_argument, model_inputs
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape
from specdec.targets.target import Target
from tests.drafters.free import TREE, L, build, decoding, drafted, forced, make, text
from tests.tiny import learn

SMALL = dict(budget=5, window=3, refresh=4, sink=2, pool=3)  # dropping from 13 tokens on


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def any_target(request: pytest.FixtureRequest) -> Target:
    return make(request.param)


@pytest.fixture(scope="module")
def target() -> Target:
    return make("llama")


# --- self-speculation ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        EarlyExitConfig(depth=3, layers=L),
        SparseConfig(depth=3, budget=200),
        SparseConfig(depth=3, budget=200, refresh=5, window=2, method="streaming"),
    ],
    ids=lambda c: f"{c.name}-{getattr(c, 'method', 'whole')}",
)
@pytest.mark.parametrize("shape", [Chain(3), TREE], ids=lambda s: type(s).__name__)
def test_the_whole_target_accepts_itself(any_target: Target, config: Any, shape: Shape) -> None:
    """All layers, or a budget beyond the context: the draft is the target, α = 1."""
    drafter, prompts = build(config, any_target), [text(3, 5), text(4, 17)]
    results = decode(any_target, prompts, Way(drafter, shape), max_new_tokens=24)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.ids == generate(any_target, prompt, max_new_tokens=24).ids
        assert all(r.accepted == r.drafted == 3 for r in result.steps)
        alpha = forced(drafter, any_target, prompt + result.ids)
        torch.testing.assert_close(alpha.sampled, torch.ones_like(alpha.sampled))
        assert (alpha.greedy == 1).all()


@pytest.mark.parametrize(
    "config",
    [
        EarlyExitConfig(depth=3, layers=2),
        SparseConfig(depth=3, **SMALL),  # type: ignore[arg-type]
        SparseConfig(depth=3, method="streaming", **SMALL),  # type: ignore[arg-type]
    ],
    ids=lambda c: f"{c.name}-{getattr(c, 'method', 'whole')}",
)
@pytest.mark.parametrize("shape", [Chain(3), TREE, Dynamic(3, 10, 4)], ids=lambda s: s.nodes)
def test_drafting_in_the_targets_cache_equals_drafting_without(
    any_target: Target, config: Any, shape: Shape
) -> None:
    """Rows of unequal length that grow by unequal steps, one of which leaves the batch."""
    drafter = build(config, any_target)
    rows, cache = [text(5, 40), text(6, 40)], drafter.new_cache()
    steps = [[3, 18], [6, 19], [7, 23], [14, 24], [23, 28], [27, 31], [28, 40]]
    for n, ctx in enumerate(decoding(any_target, rows, steps)):
        assert ctx.cache is not None
        held = [
            layer.keys[b, :, : ctx.cache.lengths[b]].clone()
            for b in (0, 1)
            for layer in ctx.cache.slot_layers
        ]
        found = drafted(drafter, ctx, shape, Sampler(1.0), cache)
        plain = drafted(drafter, Context(ctx.ids_BT, lengths=ctx.lengths), shape, Sampler(1.0))
        assert found.tokens_BG.tolist() == plain.tokens_BG.tolist()
        for ours, theirs in ((found.q_BGV, plain.q_BGV), (found.parents_BG, plain.parents_BG)):
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert ctx.cache.scratch == 0
        after = [
            layer.keys[b, :, : ctx.cache.lengths[b]]
            for b in (0, 1)
            for layer in ctx.cache.slot_layers
        ]
        assert all(torch.equal(x, y) for x, y in zip(held, after, strict=True)), n
    if cache is not None:
        cache.select([1])
        (*_, ctx) = decoding(any_target, rows[1:], [[31], [40]])
        again = drafted(drafter, ctx, Chain(3), cache=cache)
        fresh = drafted(drafter, Context(ctx.ids_BT, lengths=ctx.lengths), Chain(3))
        assert again.tokens_BG.tolist() == fresh.tokens_BG.tolist()


def test_early_exit_is_the_logit_lens(target: Target) -> None:
    drafter, ids = build(EarlyExitConfig(depth=2, layers=3), target), torch.tensor([text(7, 12)])
    states = target.model(ids, output_hidden_states=True).hidden_states
    lens = target.model.lm_head(target.model.model.norm(states[3]))
    hidden = drafter.hidden(Context(ids), torch.tensor([[5, 8]]), None)
    for k in range(2):
        expected = lens[0, [5 + k, 8 + k]]
        torch.testing.assert_close(drafter.unembed(hidden[:, :, k], k)[0], expected)
    assert len(target.model.model.layers) == L  # the view is a view
    one, other = (m.layers[0].self_attn for m in (shallow(target, 3), target.model.model))
    assert one.q_proj is other.q_proj
    assert list(drafter.state_dict()) == []


def test_snapkv_keeps_the_needle() -> None:
    """4 query heads of 2 KV heads, 3 voters, 30 positions. Head 0's queries look at position 11,
    head 1's at 20; elsewhere attention is flat. Neighbours come along by the pooling."""
    H, T, P = 4, 3, 30
    weights = torch.full((H, T, P), 0.01)
    weights[:2, :, 11] = 0.7
    weights[2:, 1, 20] = 0.7
    weights[:, :, 28] = 5.0  # inside the window: not to be chosen
    kept = voted(weights, 2, before=27, budget=3, pool=3)
    assert kept.tolist() == [[10, 11, 12], [19, 20, 21]]
    alone = voted(weights, 2, before=27, budget=1, pool=1)
    assert alone.tolist() == [[11], [20]]
    assert voted(weights, 2, before=2, budget=9, pool=3).tolist() == [[0, 1], [0, 1]]


def test_attention_read_again_is_the_models_own(any_target: Target) -> None:
    ids = text(8, 20)
    (ctx,) = decoding(any_target, [ids, text(9, 20)], [[19, 15]])
    assert ctx.cache is not None
    usual = any_target.config._attn_implementation
    view = with_weights(any_target)
    found = attention(view, ctx.cache, 0, ids[10:14], 10)
    assert any_target.config._attn_implementation == usual
    any_target.model.set_attn_implementation("eager")
    whole = any_target.model(torch.tensor([ids]), output_attentions=True).attentions
    any_target.model.set_attn_implementation(usual)
    for ours, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(ours[..., :14], theirs[0, :, 10:14, :14], atol=1e-5, rtol=1e-4)
        assert (ours[..., 14:] == 0).all()


def test_streaming_is_the_target_with_a_mask(target: Target) -> None:
    """Anchor 26: boundary 24, so [21, 26) is whole; of the 21 before, the first 2 and last 3."""
    config = SparseConfig(depth=2, method="streaming", **SMALL)  # type: ignore[arg-type]
    drafter, ids = build(config, target), text(10, 30)
    cache = target.new_cache()
    target.hidden_states(torch.tensor([ids[:26]]), HiddenStateSpec(), cache=cache)
    cache.commit([26])
    seen = [0, 1, 18, 19, 20, *range(21, 26)]
    mask = torch.zeros(1, 2, 28, dtype=torch.bool)
    mask[0, :, [*seen, 26]] = True
    mask[0, 1, 27] = True
    inputs = model_inputs(target.config, Place(torch.tensor([[26, 27]]), mask), target.dtype)
    block = torch.tensor([ids[26:28]])
    cache.place(block)
    inputs[cache_argument(target.model)] = cache
    expected = target.model(block, use_cache=True, **inputs).logits
    hidden = drafter.hidden(Context(torch.tensor([ids])), torch.tensor([[26]]), None)
    torch.testing.assert_close(drafter.unembed(hidden[0], 0), expected, atol=1e-4, rtol=1e-4)
    whole = target.model(torch.tensor([ids])).logits[:, 26:28]
    assert not torch.allclose(expected, whole, atol=1e-2)


# --- all -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        UnigramConfig(depth=3),
        BigramConfig(depth=3),
        SuffixConfig(depth=3),
        LookaheadConfig(depth=3, window=3, ngram=3),
        CopyConfig(depth=3),
        EarlyExitConfig(depth=3, layers=1),
        SparseConfig(depth=3, **SMALL),  # type: ignore[arg-type]
    ],
    ids=lambda c: c.name,
)
def test_what_was_learned_is_saved(target: Target, tmp_path: Path, config: Any) -> None:
    drafter = build(config, target).float()
    texts = [text(seed, 20) for seed in range(3)]
    learn(drafter, texts)
    draft_checkpoint.write_draft(tmp_path / "draft", drafter, target)
    loaded = draft_checkpoint.load_draft(
        tmp_path / "draft", target, torch.bfloat16
    )  # counts stay integers
    assert loaded.config == config and not drafter.trains(config)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    prompt = texts[0][:9]
    for shape in (Chain(3), TREE):
        ours, theirs = (
            generate(target, prompt, Way(d, shape), max_new_tokens=20) for d in (drafter, loaded)
        )
        assert ours.ids == theirs.ids and ours.steps == theirs.steps


@pytest.mark.parametrize(
    "name,option,word",
    [
        ("unigram", {"add": 0.0}, "drafter.add"),
        ("bigram", {"prior": -1.0}, "drafter.prior"),
        ("suffix", {"threshold": 0.0}, "drafter.threshold"),
        ("suffix", {"max_match": 256}, "drafter.max_match"),
        ("lookahead", {"ngram": 1}, "drafter.ngram"),
        ("ngram", {"min_ngram": 0}, "drafter.min_ngram=0"),
        ("ngram", {"min_ngram": 3, "max_ngram": 2}, "max_ngram=2"),
        ("copy", {"max_match": 0}, "drafter.max_match"),
        ("early_exit", {"layers": L + 1}, "drafter.layers"),
        ("sparse", {"method": "snapvk"}, "did you mean.*snapkv"),
        ("sparse", {"pool": 4}, "drafter.pool"),
        ("sparse", {"sink": 300}, "drafter.sink"),
    ],
)
def test_a_wrong_option_is_named(
    target: Target, name: str, option: dict[str, Any], word: str
) -> None:
    config = dataclasses.replace(DRAFTERS[name].Config(), **option)
    with pytest.raises(UserError, match=word):
        DRAFTERS[name].build(config, target)

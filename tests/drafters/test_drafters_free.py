"""Drafters without training: known drafts on texts made by hand, and what must hold exactly.

Run alone: python -m pytest tests/drafters/test_drafters_free.py
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.context import Context, Needs, Proposal
from specdec.decoding.decode import decode, generate
from specdec.drafters import DRAFTERS, Drafter
from specdec.drafters.base import pieces
from specdec.drafters.copying.copy import Aligned, CopyConfig
from specdec.drafters.copying.counts import BigramConfig, UnigramConfig
from specdec.drafters.copying.lookahead import LookaheadConfig, Pool
from specdec.drafters.copying.ngram import NgramConfig, Text
from specdec.drafters.copying.suffix import SuffixArray, SuffixConfig, Suffixes, suffix_order
from specdec.drafters.models.early_exit import EarlyExitConfig, shallow
from specdec.drafters.models.sparse import SparseConfig, attention, voted
from specdec.drafters.models.views import with_weights
from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing, batch_of
from specdec.formats import draft as checkpoint
from specdec.runtime.cache import Place, model_inputs
from specdec.sampling.choose import Choose
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape, Static
from specdec.target.base import Target
from tests.tiny import architectures, random_target

V, L = 40, 4
TARGETS = architectures(V, L)
TREE = Static([[0], [1], [0, 0], [1, 0], [0, 1], [0, 0, 0]])
SMALL = dict(budget=5, window=3, refresh=4, sink=2, pool=3)  # dropping from 13 tokens on


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def any_target(request: pytest.FixtureRequest) -> Target:
    return make(request.param)


@pytest.fixture(scope="module")
def target() -> Target:
    return make("llama")


def make(kind: str) -> Target:
    return random_target(TARGETS[kind])


def build(config: Any, target: Target) -> Drafter:
    return DRAFTERS[config.name].build(config, target)


def text(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, V, (length,), generator=generator).tolist()


def q_after(drafter: Drafter, ids: list[int]) -> torch.Tensor:
    """q of the first drafted token [V]."""
    ctx = Context(torch.tensor([ids]))
    none = torch.zeros(1, 1, 0, dtype=torch.long)
    hidden = drafter.hidden(ctx, torch.tensor([[len(ids) - 1]]), none)
    return Sampler(1.0).probs(drafter.unembed(hidden[:, :, 0], 0))[0, 0]


# --- counts ----------------------------------------------------------------------------------


def test_unigram_is_the_assistants_share_of_each_token(target: Target) -> None:
    drafter = build(UnigramConfig(add=0.5), target)
    torch.testing.assert_close(q_after(drafter, [3]), torch.full((V,), 1 / V))
    drafter.fit([[7, 8, 8, 9], [8, 7]], [[False, True, True, True], [True, False]])
    q = q_after(drafter, [3])
    total = 4 + 0.5 * V  # 8 three times, 9 once
    for token, times in ((8, 3), (9, 1), (7, 0)):
        assert q[token] == pytest.approx((times + 0.5) / total)
    torch.testing.assert_close(q_after(drafter, [30]), q)


def test_bigram_counts_what_follows_each_token(target: Target) -> None:
    drafter = build(BigramConfig(add=0.5, prior=2.0), target)
    torch.testing.assert_close(q_after(drafter, [3]), torch.full((V,), 1 / V))
    drafter.fit([[1, 2, 1, 3, 1, 2], [2, 1]], [[False, True, True, True, True, False], [True] * 2])
    # said: 2 1 3 1, then 2 1: pairs (1, 2), (2, 1), (1, 3), (3, 1), and (2, 1) of the second
    unigram = {1: 3, 2: 2, 3: 1}
    total = 6 + 0.5 * V

    def expected(y: int, times: int, after: int) -> float:
        return (times + 2.0 * (unigram.get(y, 0) + 0.5) / total) / (after + 2.0)

    after_1, after_2 = q_after(drafter, [5, 1]), q_after(drafter, [1, 2])
    assert after_1[2] == pytest.approx(expected(2, 1, 2))
    assert after_1[3] == pytest.approx(expected(3, 1, 2))
    assert after_1[9] == pytest.approx(expected(9, 0, 2))
    assert after_2[1] == pytest.approx(expected(1, 2, 2))
    assert q_after(drafter, [1, 20])[1] == pytest.approx(expected(1, 0, 0))
    for q in (after_1, after_2):
        assert float(q.sum()) == pytest.approx(1)


def test_sampled_decoding_draws_from_counts(target: Target) -> None:
    """The proposal carries the q that its tokens follow: 2,000 draws of q over 3 likely tokens;
    the standard error of a share is below 0.012, and 4 of them are allowed."""
    drafter = build(BigramConfig(), target)
    drafter.fit([[1, 2, 1, 2, 1, 3, 1, 4]])
    n = 2000
    ctx = Context(torch.tensor([[1]] * n), lengths=[1] * n)
    proposal = drafted(drafter, ctx, Chain(2), Sampler(1.0))
    assert proposal.q_BNV is not None and proposal.q_BNV.shape == (n, 2, V)
    shares = torch.bincount(proposal.tokens_BN[:, 0], minlength=V) / n
    assert (shares - proposal.q_BNV[0, 0]).abs().max() < 4 * 0.012
    second = proposal.tokens_BN[:, 1][proposal.tokens_BN[:, 0] == 2]
    assert (second == 1).float().mean() > 0.8  # q(1 | 2) = (2 + u(1)) / 3, u(1) about 1/2


# --- copying ---------------------------------------------------------------------------------


def fed(memory: Any, ids: list[int]) -> Any:
    for token in ids:
        memory.push(token)
    return memory


@pytest.mark.parametrize(
    "output,expected",
    [
        ([10], [20, 30, 40]),  # 10 stood once before: aligned
        ([10, 20], [30, 40, 50]),
        ([10, 20, 99], [40, 50, 60]),  # 99 for 30: a substitution
        ([10, 20, 99, 40], [50, 60, 70]),
        ([10, 20, 50], [60, 70, 5]),  # two were left out: aligned anew behind 50
        ([10, 20, 98, 30], [40, 50, 60]),  # one was put in: aligned anew behind 30
        ([10, 20, 98, 99, 97], []),  # patience is at its end
        ([10, 20, 98, 99, 97, 60], [70, 5, 10]),
    ],
)
def test_copying_realigns_after_a_mismatch(output: list[int], expected: list[int]) -> None:
    source = [10, 20, 30, 40, 50, 60, 70, 5]
    memory = fed(Aligned(CopyConfig(patience=2)), source + output)
    assert memory.chain(3) == expected
    assert [token for token, _ in memory.tree(3, 9)] == expected


def test_copying_waits_for_a_unique_suffix() -> None:
    memory = fed(Aligned(CopyConfig(patience=0)), [1, 2, 3, 4, 9, 2, 5, 6, 8, 4, 7, 11])
    assert memory.chain(2) == []
    assert fed(memory, [2]).chain(2) == []  # 2 stood twice, [11, 2] never
    assert fed(memory, [5]).chain(2) == [6, 8]  # 5 stood once
    memory = fed(Aligned(CopyConfig()), [1, 2, 3, 9, 2, 4, 8, 9, 2])
    assert memory.chain(2) == [4, 8]  # 2 stood twice, [9, 2] once
    memory = fed(Aligned(CopyConfig(max_match=1)), [1, 2, 3, 9, 2, 4, 8, 7, 2])
    assert memory.chain(2) == [4, 8]  # still ambiguous: the latest


@pytest.mark.parametrize(("least", "most", "symbols"), [(1, 3, 3), (2, 4, 2), (1, 1, 4), (3, 3, 2)])
def test_prompt_lookup_is_what_it_says(least: int, most: int, symbols: int) -> None:
    """At every token of a random text, by looking through all of it: the longest n-gram that ends
    there and somewhere before; of those places the last that 5 tokens follow, else the first."""
    ids = [t % symbols for t in text(12, 80)]
    memory = Text(NgramConfig(min_ngram=least, max_ngram=most))
    for a in range(len(ids)):
        memory.push(ids[a])
        places = [
            (n, end)
            for n in range(least, most + 1)
            for end in range(n, a + 1)
            if ids[end - n : end] == ids[a + 1 - n : a + 1]
        ]
        ends = [end for n, end in places if n == max(places)[0]]
        whole = [end for end in ends if end + 5 <= a + 1]
        end = max(whole) if whole else min(ends, default=a + 1)
        assert memory.chain(5) == ids[end : a + 1][:5]


# --- suffix decoding -------------------------------------------------------------------------


def suffixes(given: list[list[int]], **options: Any) -> Suffixes:
    joined = [-1]
    for ids in given:
        joined += [*ids, -1]
    text_N = np.array(joined, dtype=np.int32)
    return Suffixes(SuffixConfig(**options), SuffixArray(text_N, suffix_order(text_N)))


def test_suffix_array_is_the_sorted_suffixes() -> None:
    for seed, size in ((0, 1), (1, 2), (2, 57), (3, 300)):
        ids = torch.randint(0, 3, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
        order = suffix_order(np.array(ids, dtype=np.int32)).tolist()
        assert order == sorted(range(size), key=lambda i: ids[i:])


def test_suffix_drafts_from_given_texts_while_they_agree() -> None:
    given = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8]]
    # after [1, 2]: 3 always, then 4 in two of three, then 5 or 6 in one of three
    assert fed(suffixes(given, factor=2, threshold=0.5), [1, 2]).chain(9) == [3, 4]
    assert fed(suffixes(given, factor=2, threshold=0.7), [1, 2]).chain(9) == [3]
    assert fed(suffixes(given, factor=0.5, threshold=0.5), [1, 2]).chain(9) == [3]
    assert fed(suffixes(given, factor=2, threshold=0.3), [1, 2]).chain(9)[:3] in (
        [3, 4, 5],
        [3, 4, 6],
    )
    assert fed(suffixes(given, factor=2, threshold=0.3), [1, 2]).chain(2) == [3, 4]
    assert fed(suffixes(given, factor=9, threshold=0.1), [3, 7, 8]).chain(9) == []  # the end
    assert fed(suffixes(given), [9]).chain(9) == []


def test_suffix_drafts_from_its_own_text() -> None:
    memory = fed(suffixes([[1]]), [5, 6, 7, 8, 9, 20, 5, 6, 7])
    assert memory.chain(9) == [8, 9, 20, 5, 6, 7]  # factor 2, three tokens matched
    assert fed(memory, [8]).chain(2) == [9, 20]
    # twice 3, once 4 after [1, 2]: the more frequent; one occurrence of each: the latest
    assert fed(suffixes([[0]]), [1, 2, 3, 10, 1, 2, 4, 11, 1, 2, 3, 12, 1, 2]).chain(1) == [3]
    assert fed(suffixes([[0]]), [9, 1, 3, 8, 1, 4, 7, 1]).chain(1) == [4]


def test_suffix_takes_the_draft_with_the_longest_expected_acceptance() -> None:
    given = [[1, 2, 3, 4, 5, 6]] * 3
    own = [8, 1, 2, 9, 0, 1, 2]  # its own text says 9 0 1 2 after [1, 2], in one place
    assert fed(suffixes(given, factor=1), own).chain(9) in ([3, 4], [9, 0])  # both have Σ D = 2
    assert fed(suffixes([[1, 2, 3], [1, 2, 4]], factor=1), own).chain(9) == [9, 0]  # 2 against .5


def test_suffix_tree_holds_both_branches() -> None:
    given = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8]]
    memory = fed(suffixes(given, factor=2, threshold=0.3), [1, 2])
    nodes = memory.tree(4, 9)
    paths = set()
    for token, parent in nodes:
        path = [token]
        while parent >= 0:
            path.insert(0, nodes[parent][0])
            parent = nodes[parent][1]
        paths.add(tuple(path))
    assert paths == {(3,), (3, 4), (3, 7), (3, 4, 5), (3, 4, 6), (3, 7, 8)}
    assert [token for token, _ in memory.tree(4, 2)] == [3, 4]
    assert max(parent for _, parent in memory.tree(1, 9)) == -1


def test_suffix_matches_are_the_occurrences() -> None:
    """Counts at every length against a search through the texts."""
    given, own = [text(1, 60), text(2, 60)], text(3, 80)
    given, own = [[t % 4 for t in ids] for ids in given], [t % 4 for t in own]
    memory = suffixes(given, max_match=6, recent=1000)
    for end in range(1, len(own) + 1):
        memory.push(own[end - 1])
        found = {(type(path).__name__, n): path.count for n, path in memory.matches()}

        def occurrences(n: int, ids: list[int], last: int, end: int = end) -> int:
            tail = own[end - n : end]
            return sum(ids[i : i + n] == tail for i in range(last - n + 1))

        for (kind, n), count in found.items():
            if kind == "CorpusPlaces":
                assert count == sum(occurrences(n, ids, len(ids)) for ids in given)
            else:
                assert count == occurrences(n, own, end - 1)
        for n in range(1, min(6, end) + 1):  # and none is missed
            if occurrences(n, own, end - 1):
                assert max(m for kind, m in found if kind == "TextPlaces") >= n
            if any(occurrences(n, ids, len(ids)) for ids in given):
                assert max(m for kind, m in found if kind == "CorpusPlaces") >= n


def test_suffix_index_of_the_assistants_words(target: Target, tmp_path: Path) -> None:
    drafter = build(SuffixConfig(depth=3), target)
    drafter.fit([[1, 2, 3, 4, 5], [6, 7]], [[False, True, True, False, True], [True, True]])
    assert drafter.state_dict()["text_N"].tolist() == [-1, 2, 3, -1, 5, -1, 6, 7, -1]
    ctx = Context(torch.tensor([[9, 6], [9, 3]]), lengths=[2, 2])
    assert drafted(drafter, ctx, Chain(3)).tokens_BN.tolist() == [[7], [-1]]


# --- lookahead -------------------------------------------------------------------------------


def test_pool_keeps_the_latest_of_each_first_token() -> None:
    pool = fed(Pool(LookaheadConfig(ngram=3, pool=2)), [1, 2, 3, 1, 4, 5, 1])
    assert pool.paths() == [(4, 5), (2, 3)]
    pool.add([1, 2, 3])
    assert pool.paths() == [(2, 3), (4, 5)]
    pool.add([1, 9, 9])
    assert pool.paths() == [(9, 9), (2, 3)]
    assert pool.chain(1) == [9] and pool.chain(5) == [9, 9]
    assert pool.tree(2, 9) == [(9, -1), (9, 0), (2, -1), (3, 2)]
    assert fed(pool, [30]).paths() == [] == pool.chain(3)


def test_scouts_are_a_jacobi_iteration(target: Target) -> None:
    """Read in the pass that verifies, each column's next guess is the target's argmax after text +
    level 0 up to the column + the column's later levels, computed here one sequence at a time.
    The logits of the block are those of a pass without scouts."""
    config = LookaheadConfig(window=3, ngram=3)
    drafter, ids = build(config, target), text(5, 12)
    windows = drafter.new_cache()
    levels: list[list[int]] = []
    for n, end in enumerate((8, 9, 11)):
        ctx = next(decoding(target, [ids], [[end]]))
        assert ctx.cache is not None
        before = [level[0].tolist() for level in windows.levels]
        scouts = drafted(drafter, ctx, Chain(3), cache=windows).scouts
        siblings = torch.tensor([[-1, -1]]) if n else None
        heard = []
        for extra in (None, scouts):
            proposal = Proposal(torch.tensor([[7, 3]]), None, siblings, extra)
            ids_BM, above_BM = proposal.block(torch.tensor([[ids[end - 1]]]))
            heard.append(target.step(ids_BM, Needs(), ctx.cache, above_BM)[1])
            ctx.cache.drop()
        assert torch.allclose(heard[0], heard[1][:, :3], atol=1e-5)
        if n == 0:
            levels = [[ids[j * end // 3] for j in range(3)]]
        else:
            assert before == levels
        drafter.hear(heard[1][:, 3:], windows)
        guesses = []
        for j in range(3):
            path = ids[:end] + levels[0][: j + 1] + [level[j] for level in levels[1:]]
            guesses.append(int(target.model(torch.tensor([path])).logits[0, -1].argmax()))
        levels.append(guesses)
        if len(levels) == 3:
            for j in range(3):
                known = windows.rows[0]._after[levels[0][j]]
                assert (levels[1][j], levels[2][j]) in known
            levels = levels[1:]
        assert [level[0].tolist() for level in windows.levels] == levels


@pytest.mark.parametrize("shape", [Chain(3), TREE], ids=lambda s: type(s).__name__)
def test_lookahead_keeps_greedy_answers_and_accepts(any_target: Target, shape: Shape) -> None:
    """Its scouts hear nothing that changes an answer, and its pool finds what the target goes on
    to say: a long greedy answer of a tiny model loops."""
    drafter = build(LookaheadConfig(window=4, ngram=3), any_target)
    prompts = [text(1, 5), text(2, 12)]
    plain = [generate(any_target, p, max_new_tokens=60, eos=()).ids for p in prompts]
    results = decode(any_target, prompts, max_new_tokens=60, drafter=drafter, shape=shape, eos=())
    assert [g.ids for g in results] == plain
    assert sum(r.accepted for g in results for r in g.rounds) > 0


# --- self-speculation ------------------------------------------------------------------------


def drafted(
    drafter: Drafter,
    ctx: Context,
    shape: Shape,
    sampler: Sampler | None = None,
    cache: Any = None,
) -> Proposal:
    generators = [torch.Generator().manual_seed(b) for b in range(len(ctx.ids_BT))]
    choose = Choose(sampler or Sampler(0.0), "without", generators, None, V)
    return drafter.draft(ctx, shape, choose, cache)


def decoding(target: Target, rows: list[list[int]], steps: list[list[int]]) -> Iterator[Context]:
    """Contexts as a decoder has them: each step's lengths by row, and the target's cache of all
    but the anchors."""
    ids, cache = torch.tensor(rows), target.new_cache()
    for ends in steps:
        done = cache.lengths if any(cache.lengths) else [0] * len(rows)
        new = [end - 1 - n for end, n in zip(ends, done, strict=True)]
        target.features(pieces(ids, done, max(new)), Needs(), cache=cache)
        cache.keep(new)
        yield Context(ids[:, : max(ends)], lengths=list(ends), cache=cache)


def forced(drafter: Drafter, target: Target, ids: list[int]) -> Any:
    mask = [[False] * 4 + [True] * (len(ids) - 4)]
    batch = batch_of(target, drafter.needs, Sampler(1.0), [ids], mask)
    table = TeacherForcing(drafter, target, Sampler(1.0))(batch, measure=True)
    whole = table.anchors.valid_NK.all(-1)
    return type(table.alpha)(*(x[whole] for x in table.alpha))


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
    results = decode(any_target, prompts, max_new_tokens=24, drafter=drafter, shape=shape)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.ids == generate(any_target, prompt, max_new_tokens=24).ids
        assert all(r.accepted == r.drafted == 3 for r in result.rounds)
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
        assert found.tokens_BN.tolist() == plain.tokens_BN.tolist()
        for ours, theirs in ((found.q_BNV, plain.q_BNV), (found.parents_BN, plain.parents_BN)):
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
        assert again.tokens_BN.tolist() == fresh.tokens_BN.tolist()


def test_early_exit_is_the_logit_lens(target: Target) -> None:
    drafter, ids = build(EarlyExitConfig(depth=2, layers=3), target), torch.tensor([text(7, 12)])
    states = target.model(ids, output_hidden_states=True).hidden_states
    lens = target.model.lm_head(target.model.model.norm(states[3]))
    hidden = drafter.hidden(Context(ids), torch.tensor([[5, 8]]), None)
    for k in range(2):
        expected = lens[0, [5 + k, 8 + k]]
        torch.testing.assert_close(drafter.unembed(hidden[:, :, k], k)[0], expected)
    assert len(target.model.model.layers) == L  # the view is a view
    assert shallow(target, 3).layers[0] is target.model.model.layers[0]
    assert list(drafter.state_dict()) == []


def test_snapkv_keeps_the_needle() -> None:
    """4 query heads of 2 KV heads, 3 voters, 30 positions. Head 0's queries look at position 11,
    head 1's at 20; elsewhere attention is flat. Neighbours come along by the pooling."""
    Q, w, P = 4, 3, 30
    weights = torch.full((Q, w, P), 0.01)
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
    found = attention(view, view.layers, ctx.cache, 0, ids[10:14], 10)
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
    target.features(torch.tensor([ids[:26]]), Needs(), cache=cache)
    cache.keep([26])
    cache.place(1, 2, target.device)
    seen = [0, 1, 18, 19, 20, *range(21, 26)]
    mask = torch.zeros(1, 2, 28, dtype=torch.bool)
    mask[0, :, [*seen, 26]] = True
    mask[0, 1, 27] = True
    inputs = model_inputs(target.config, Place(torch.tensor([[26, 27]]), mask), target.dtype)
    block = torch.tensor([ids[26:28]])
    expected = target.model(block, past_key_values=cache, use_cache=True, **inputs).logits
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
    drafter.fit(texts)
    checkpoint.save(tmp_path / "draft", drafter, target)
    loaded = checkpoint.load(tmp_path / "draft", target, torch.bfloat16)  # counts stay integers
    assert loaded.config == config and not drafter.trainable
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    prompt = texts[0][:9]
    for shape in (Chain(3), TREE):
        ours, theirs = (
            generate(target, prompt, max_new_tokens=20, drafter=d, shape=shape)
            for d in (drafter, loaded)
        )
        assert ours.ids == theirs.ids and ours.rounds == theirs.rounds


@pytest.mark.parametrize("name", ["suffix", "lookahead", "copy"])
def test_copied_trees_are_sampled_losslessly_as_fixed_children(target: Target, name: str) -> None:
    """A tree of certain tokens under the rules that a static and a chosen tree take."""
    drafter = DRAFTERS[name].build(DRAFTERS[name].Config(depth=3), target)
    prompts = [text(1, 10) * 2, text(2, 7) * 3]
    for shape in (Chain(3), TREE, Dynamic(3, 10, 4)):
        results = decode(
            target,
            prompts,
            max_new_tokens=12,
            drafter=drafter,
            shape=shape,
            sampler=Sampler(0.7),
            seeds=[1, 2],
        )
        assert [len(g.ids) for g in results] == [12, 12]
        assert all(r.nodes <= shape.nodes for g in results for r in g.rounds)
        assert sum(r.nodes for g in results for r in g.rounds) > 0


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


def test_alpha_of_counts_is_the_overlap_with_p(target: Target) -> None:
    """Teacher-forced α of a bigram at depth k is Σ min(p, q(· | the text's own token))."""
    drafter, ids = build(BigramConfig(depth=2), target), text(11, 16)
    drafter.fit([ids])
    alpha = forced(drafter, target, ids)
    p = target.model(torch.tensor([ids])).logits[0].softmax(-1)
    for n, anchor in enumerate(range(3, 3 + len(alpha.sampled))):
        for k in range(2):
            q = q_after(drafter, ids[: anchor + k + 1])
            beta = float(torch.minimum(p[anchor + k], q).sum())
            assert math.isclose(float(alpha.sampled[n, k]), beta, abs_tol=1e-5)

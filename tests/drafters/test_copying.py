"""Drafters that count or copy: known drafts on texts made by hand, and what must hold exactly.

Run alone: python -m pytest tests/drafters/test_copying.py
"""

import math
from typing import Any

import numpy as np
import pytest
import torch

from specdec.context import Context, HiddenStateSpec, Proposal
from specdec.decoding.decode import decode, generate
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS, Drafter
from specdec.drafters.ngram import NgramConfig, NgramMemory
from specdec.drafters.suffix import SuffixArray, SuffixConfig, SuffixMemory, suffix_order
from specdec.lab.drafters.copy import CopyConfig, CopyMemory
from specdec.lab.drafters.counts import BigramConfig, UnigramConfig
from specdec.lab.drafters.lookahead import LookaheadConfig, LookaheadMemory
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape
from specdec.targets.target import Target
from tests.drafters.free import TREE, V, build, decoding, drafted, forced, make, text
from tests.tiny import learn


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def any_target(request: pytest.FixtureRequest) -> Target:
    return make(request.param)


@pytest.fixture(scope="module")
def target() -> Target:
    return make("llama")


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
    learn(drafter, [[1, 2, 1, 2, 1, 3, 1, 4]])
    n = 2000
    ctx = Context(torch.tensor([[1]] * n), lengths=[1] * n)
    proposal = drafted(drafter, ctx, Chain(2), Sampler(1.0))
    assert proposal.q_BGV is not None and proposal.q_BGV.shape == (n, 2, V)
    shares = torch.bincount(proposal.tokens_BG[:, 0], minlength=V) / n
    assert (shares - proposal.q_BGV[0, 0]).abs().max() < 4 * 0.012
    second = proposal.tokens_BG[:, 1][proposal.tokens_BG[:, 0] == 2]
    assert (second == 1).float().mean() > 0.8  # q(1 | 2) = (2 + u(1)) / 3, u(1) about 1/2


def test_alpha_of_counts_is_the_overlap_with_p(target: Target) -> None:
    """Teacher-forced α of a bigram at depth k is Σ min(p, q(· | the text's own token))."""
    drafter, ids = build(BigramConfig(depth=2), target), text(11, 16)
    learn(drafter, [ids])
    alpha = forced(drafter, target, ids)
    p = target.model(torch.tensor([ids])).logits[0].softmax(-1)
    for n, anchor in enumerate(range(3, 3 + len(alpha.sampled))):
        for k in range(2):
            q = q_after(drafter, ids[: anchor + k + 1])
            beta = float(torch.minimum(p[anchor + k], q).sum())
            assert math.isclose(float(alpha.sampled[n, k]), beta, abs_tol=1e-5)


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
    memory = fed(CopyMemory(CopyConfig(patience=2)), source + output)
    assert memory.chain(3) == expected
    assert [token for token, _ in memory.tree(3, 9)] == expected


def test_copying_waits_for_a_unique_suffix() -> None:
    memory = fed(CopyMemory(CopyConfig(patience=0)), [1, 2, 3, 4, 9, 2, 5, 6, 8, 4, 7, 11])
    assert memory.chain(2) == []
    assert fed(memory, [2]).chain(2) == []  # 2 stood twice, [11, 2] never
    assert fed(memory, [5]).chain(2) == [6, 8]  # 5 stood once
    memory = fed(CopyMemory(CopyConfig()), [1, 2, 3, 9, 2, 4, 8, 9, 2])
    assert memory.chain(2) == [4, 8]  # 2 stood twice, [9, 2] once
    memory = fed(CopyMemory(CopyConfig(max_match=1)), [1, 2, 3, 9, 2, 4, 8, 7, 2])
    assert memory.chain(2) == [4, 8]  # still ambiguous: the latest


@pytest.mark.parametrize(("least", "most", "symbols"), [(1, 3, 3), (2, 4, 2), (1, 1, 4), (3, 3, 2)])
def test_prompt_lookup_is_what_it_says(least: int, most: int, symbols: int) -> None:
    """At every token of a random text, by looking through all of it: the longest n-gram that ends
    there and somewhere before; of those places the last that 5 tokens follow, else the first."""
    ids = [t % symbols for t in text(12, 80)]
    memory = NgramMemory(NgramConfig(min_ngram=least, max_ngram=most))
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


def suffixes(given: list[list[int]], **options: Any) -> SuffixMemory:
    joined = [-1]
    for ids in given:
        joined += [*ids, -1]
    text_N = np.array(joined, dtype=np.int32)
    return SuffixMemory(SuffixConfig(**options), SuffixArray(text_N, suffix_order(text_N)))


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


def test_suffix_index_of_the_assistants_words(target: Target) -> None:
    drafter = build(SuffixConfig(depth=3), target)
    drafter.fit([[1, 2, 3, 4, 5], [6, 7]], [[False, True, True, False, True], [True, True]])
    assert drafter.state_dict()["text_N"].tolist() == [-1, 2, 3, -1, 5, -1, 6, 7, -1]
    ctx = Context(torch.tensor([[9, 6], [9, 3]]), lengths=[2, 2])
    assert drafted(drafter, ctx, Chain(3)).tokens_BG.tolist() == [[7], [-1]]


# --- lookahead -------------------------------------------------------------------------------


def test_pool_keeps_the_latest_of_each_first_token() -> None:
    pool = fed(LookaheadMemory(LookaheadConfig(ngram=3, pool=2)), [1, 2, 3, 1, 4, 5, 1])
    assert pool.paths(2) == [[4, 5], [2, 3]]
    pool.add([1, 2, 3])
    assert pool.paths(2) == [[2, 3], [4, 5]]
    pool.add([1, 9, 9])
    assert pool.paths(2) == [[9, 9], [2, 3]]
    assert pool.chain(1) == [9] and pool.chain(5) == [9, 9]
    assert pool.tree(2, 9) == [(9, -1), (9, 0), (2, -1), (3, 2)]
    assert fed(pool, [30]).paths(2) == [] == pool.chain(3)


def test_scouts_are_a_jacobi_iteration(target: Target) -> None:
    """Read in the pass that verifies, each column's next guess is the target's argmax after text +
    level 0 up to the column + the column's later levels, computed here one sequence at a time.
    The logits of the block are those of a pass without scouts."""
    config = LookaheadConfig(window=3, ngram=3)
    drafter, ids = build(config, target), text(5, 12)
    memories = drafter.new_cache()
    levels: list[list[int]] = []
    for n, end in enumerate((8, 9, 11)):
        ctx = next(decoding(target, [ids], [[end]]))
        assert ctx.cache is not None
        before = [level for pool in memories.rows for level in pool.levels]
        scouts = drafted(drafter, ctx, Chain(3), cache=memories).scouts
        siblings = torch.tensor([[-1, -1]]) if n else None
        heard = []
        for extra in (None, scouts):
            proposal = Proposal(torch.tensor([[7, 3]]), None, siblings, extra)
            ids_BM, above_BM = proposal.block(torch.tensor([[ids[end - 1]]]))
            heard.append(target.step(ids_BM, HiddenStateSpec(), ctx.cache, above_BM)[1])
            ctx.cache.drop()
        # products of more rows round in another order on a CPU with AVX2 alone
        assert torch.allclose(heard[0], heard[1][:, :3], atol=1e-4)
        if n == 0:
            levels = [[ids[j * end // 3] for j in range(3)]]
        else:
            assert before == levels
        drafter.hear(heard[1][:, 3:], memories)
        guesses = []
        for j in range(3):
            path = ids[:end] + levels[0][: j + 1] + [level[j] for level in levels[1:]]
            guesses.append(int(target.model(torch.tensor([path])).logits[0, -1].argmax()))
        levels.append(guesses)
        if len(levels) == 3:
            for j in range(3):
                known = memories.rows[0]._after[levels[0][j]]
                assert (levels[1][j], levels[2][j]) in known
            levels = levels[1:]
        assert memories.rows[0].levels == levels


@pytest.mark.parametrize("shape", [Chain(3), TREE], ids=lambda s: type(s).__name__)
def test_lookahead_keeps_greedy_responses_and_accepts(any_target: Target, shape: Shape) -> None:
    """Its scouts hear nothing that changes a response, and its pool finds what the target goes on
    to say: a long greedy response of a tiny model loops."""
    drafter = build(LookaheadConfig(window=4, ngram=3), any_target)
    prompts = [text(1, 5), text(2, 12)]
    plain = [generate(any_target, p, max_new_tokens=60, eos=()).ids for p in prompts]
    results = decode(any_target, prompts, Way(drafter, shape), max_new_tokens=60, eos=())
    assert [g.ids for g in results] == plain
    assert sum(r.accepted for g in results for r in g.steps) > 0


@pytest.mark.parametrize("name", ["suffix", "lookahead", "copy"])
def test_copied_trees_are_sampled_losslessly_as_fixed_children(target: Target, name: str) -> None:
    """A tree of certain tokens under the verification methods that a static and a chosen tree
    take."""
    drafter = DRAFTERS[name].build(DRAFTERS[name].Config(depth=3), target)
    prompts = [text(1, 10) * 2, text(2, 7) * 3]
    for shape in (Chain(3), TREE, Dynamic(3, 10, 4)):
        results = decode(
            target,
            prompts,
            Way(drafter, shape, sampler=Sampler(0.7)),
            max_new_tokens=12,
            seeds=[1, 2],
        )
        assert [len(g.ids) for g in results] == [12, 12]
        assert all(r.nodes <= shape.nodes for g in results for r in g.steps)
        assert sum(r.nodes for g in results for r in g.steps) > 0

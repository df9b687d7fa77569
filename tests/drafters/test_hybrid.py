"""A hybrid: what it drafts in each row by hand, beside one another in trees, lossless, and saved.

Run alone: python -m pytest tests/drafters/test_hybrid.py (about 10 s)
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.context import Proposal
from specdec.decoding.decode import decode, generate
from specdec.decoding.verification_methods import VERIFICATION_METHODS
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS, Drafter, with_copying
from specdec.drafters.base import vocabulary
from specdec.drafters.hybrid import Hybrid, HybridConfig, cell, joined, replaced
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.measure.results import Results
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape
from specdec.targets.target import Target
from specdec.theory.leviathan import pass_cost
from tests.drafters.families import V, context, make_drafter, make_target, text
from tests.laws import law
from tests.tiny import Tiny

HERE = [5, 6, 7, 8, 9, 5, 6, 7]  # 8 and 9 followed these three tokens before
ELSEWHERE = [11, 12, 13, 14, 15, 16, 17, 18]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def hybrid(target: Target, **settings: Any) -> Hybrid:
    """One that has measured `c` and `v`, on no texts."""
    v, c = settings.pop("v", {1: 1.1, 4: 1.2}), settings.pop("c", 0.1)
    v, points = pass_cost(v), {"copying": "ngram", "depth": 4, "alpha": [0.5]} | settings
    head = make_drafter("eagle3", target)
    drafter = Hybrid.build(HybridConfig(**points), target, earlier=head).eval()
    drafter.weigh(lambda member, gamma: (c, v(gamma)), [], [], "greedy")
    return drafter


def drafted(
    drafter: Drafter, target: Target, texts: list[list[int]], shape: Shape, temperature: float
) -> tuple[Proposal, RowDraws]:
    draws = RowDraws([7] * len(texts))
    choose = Choose(Sampler(temperature), "without", draws, vocabulary(drafter), V)
    ids = torch.tensor(texts)
    return drafter.draft(context(target, drafter, ids), shape, choose), draws


@pytest.mark.parametrize(
    ("settings", "copied", "gamma"),
    [
        # after a match of 3 copied tokens are right with 0.7, 0.8, 0.8 and 0.85, so their rates
        # are 1.7 / 1.2, 2.26 / 1.4, 2.708 / 2.2, 3.089 / 3; the head's are 1.5 / 1.3 and 1.75 / 1.6
        (dict(v={1: 1.2, 2: 1.4, 3: 2.2}), [8, 9], 1),
        # a pass costs the same however many tokens it reads: all that was found
        (dict(v={1: 1.2, 4: 1.2}), [8, 9, 5, 6], 2),
        # 2.71 / 1.4 against 2.26 / 1.4: the head is worth more
        (dict(v={1: 1.2, 2: 1.4, 3: 2.2}, alpha=[0.9], c=0.0), [], 2),
        # nothing pays
        (dict(v={1: 3.0, 2: 4.0}), [], 0),
    ],
)
def test_the_choice_by_hand(
    target: Target, settings: dict[str, Any], copied: list[int], gamma: int
) -> None:
    drafter = hybrid(target, **settings)
    memory = drafter.copier.memory()
    for token in HERE:
        memory.push(token)
    assert memory.chain(4) == [8, 9, 5, 6] and memory.evidence() == (3, 1.0)
    assert drafter.chain_of(memory) == copied
    (tokens,) = drafted(drafter, target, [ELSEWHERE], Chain(4), 0.0)[0].tokens_BG.tolist()
    assert len(tokens) == gamma
    if settings["v"][1] == 1.2 and not copied:
        alone = drafted(drafter.head, target, [HERE], Chain(2), 0.0)[0]
        found = drafted(drafter, target, [HERE], Chain(4), 0.0)[0]
        assert found.tokens_BG.tolist() == alone.tokens_BG.tolist()


def test_counts_by_hand(target: Target) -> None:
    """Of five texts, copying is counted on the last. Speculation steps start at its first said
    token, and after an accepted copy where that ended."""
    drafter = hybrid(target, copying="ngram")
    said = [5, 6, 7, 8, 5, 6, 7, 9, 6]
    #  at 5: 6 7 8 5 is found after a match of 1, and 6 7 are right; the speculation step ends at 9,
    # where  nothing is found; at the last 6, the text ends
    mask = [False] * 4 + [True] * 5
    texts = [ELSEWHERE] * 4 + [said]
    drafter.fit(texts, [[True] * len(ELSEWHERE)] * 4 + [mask])
    memory = drafter.copier.memory()
    for token in said[:5]:
        memory.push(token)
    assert memory.chain(4) == [6, 7, 8, 5]
    e = cell(memory)
    assert drafter.tried_NK[e].tolist() == [1, 1, 1, 0]
    assert drafter.right_NK[e].tolist() == [1, 1, 0, 0]
    assert drafter.tried_NK.sum() == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_batch_choose_for_themselves(target: Target, temperature: float) -> None:
    """One copies and one drafts; each does what it does alone, with the same draws."""
    drafter, shape = hybrid(target, v={1: 1.1, 4: 1.2}, alpha=[0.4]), Chain(4)
    both, draws = drafted(drafter, target, [HERE, ELSEWHERE], shape, temperature)
    copies, drafts = both.tokens_BG.tolist()
    assert copies == [8, 9, 5, 6] and drafts[2:] == [-1, -1] and min(drafts[:2]) >= 0
    for b, ids in enumerate((HERE, ELSEWHERE)):
        alone, own = drafted(drafter, target, [ids], shape, temperature)
        n = alone.tokens_BG.shape[1]
        assert both.tokens_BG[b, :n].tolist() == alone.tokens_BG[0].tolist()
        assert draws.counter_B[b] == own.counter_B[0]
    assert (both.q_BGV is None) == (temperature == 0)
    if both.q_BGV is not None:
        assert both.q_BGV[0, range(4), copies].tolist() == [1] * 4
        torch.testing.assert_close(both.q_BGV.sum(-1), torch.tensor([[1.0] * 4, [1.0, 1, 0, 0]]))


@pytest.mark.parametrize("verification", ["block", "rejection"])
def test_a_copied_row_among_sampled_ones_keeps_p(verification: str) -> None:
    """The exact law of its first token is p: a point mass is judged as one."""
    generator = torch.Generator().manual_seed(1)
    p_BMV = torch.rand(2, 4, V, generator=generator, dtype=torch.float64).softmax(-1)
    q_BGV = torch.rand(2, 2, V, generator=generator, dtype=torch.float64).softmax(-1)
    proposal = replaced(Proposal(torch.tensor([[3, 4], [5, 6]]), q_BGV), [[9, 8, 7], []])
    found = law(VERIFICATION_METHODS[verification], proposal, p_BMV)
    first_V = found.stop_BM[0, 0] * found.next_BMV[0, 0]
    first_V[9] += found.stop_BM[0, 1:].sum()
    torch.testing.assert_close(first_V, p_BMV[0, 0])
    assert proposal.tokens_BG[1].tolist() == [5, 6, -1]


def test_a_copied_branch_joins_a_tree() -> None:
    """What it shares with the tree is stored once; its tokens follow the tree's nodes."""
    tokens, parents = torch.tensor([[5, 6, 7], [5, 6, 7]]), torch.tensor([[-1, -1, 0], [-1, -1, 0]])
    found = joined(Proposal(tokens, None, parents), [[5, 8, 7], []])
    assert found.tokens_BG.tolist() == [[5, 6, 7, 8, 7], [5, 6, 7, -1, -1]]
    assert found.parents_BG is not None
    assert found.parents_BG[0].tolist() == [-1, -1, 0, 0, 3]
    assert found.drafted_to()[0][4:] == [[5, 8], [5, 8, 7]]


def test_a_tree_holds_both_drafts(target: Target) -> None:
    drafter = hybrid(target, v={1: 1.1, 4: 1.2})
    for temperature in (0.0, 1.0):
        tree = drafted(drafter, target, [HERE], Dynamic(4, 6, 2), temperature)[0]
        alone = drafted(drafter.head, target, [HERE], Dynamic(4, 6, 2), temperature)[0]
        assert tree.tokens_BG[0, :6].tolist() == alone.tokens_BG[0].tolist()
        assert [8, 9, 5, 6] in tree.drafted_to()[0]
        assert tree.q_BGV is None


def test_the_heads_cache_is_right_after_steps_without_it(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a response that comes to loop, the head drafts in some speculation steps and not in
    others; each draft is the one made without a cache."""
    drafter, used, whole = hybrid(target, v={1: 1.1, 4: 1.2}), [], Hybrid.draft

    def checked(self: Hybrid, ctx: Any, shape: Any, choose: Any, cache: Any) -> Proposal:
        found = whole(self, ctx, shape, choose, cache)
        again = whole(self, ctx, shape, choose, None)
        assert found.tokens_BG.tolist() == again.tokens_BG.tolist()
        used.append(cache.head.lengths == [len(ctx.texts[0]) - 1])
        return found

    monkeypatch.setattr(Hybrid, "draft", checked)
    prompt = text(0, 12)[0].tolist()
    plain = generate(target, prompt, max_new_tokens=60)
    made = decode(target, [prompt], Way(drafter, Chain(4)), max_new_tokens=60)[0]
    assert made.ids == plain.ids
    changes = [a != b for a, b in pairwise(used)]
    assert sum(changes) >= 2 and True in used[used.index(False) :], "the head, a copy, the head"


def test_a_saved_hybrid_holds_its_members(target: Target, tmp_path: Path) -> None:
    drafter = with_copying(make_drafter("eagle3", target), "suffix", target)
    texts = [text(seed)[0].tolist() for seed in range(5)]
    drafter.fit(texts, [[True] * len(ids) for ids in texts])
    draft_checkpoint.write_draft(tmp_path / "draft", drafter, target)
    loaded = draft_checkpoint.load_draft(tmp_path / "draft", target)
    for ids in (HERE, texts[4][:9], ELSEWHERE):
        for shape in (Chain(4), Dynamic(3, 6, 2)):
            ours, theirs = (drafted(d, target, [ids], shape, 0.0)[0] for d in (drafter, loaded))
            assert ours.tokens_BG.tolist() == theirs.tokens_BG.tolist()
    assert isinstance(loaded, Hybrid) and loaded.tried_NK.sum() > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(head="eagle3", copying="copy"), "eagle3 must be trained first: give the folder"),
        (dict(head="ngram", copying="copy"), "ngram copies too"),
        (dict(head="bigram", copying="lookahead"), "lookahead does not copy from the text alone"),
        (dict(head="bigram", copying="sufix"), "did you mean 'suffix'|suffix"),
        (dict(head="bigram"), "give both"),
        (dict(alpha=[1.2]), "between 0 and 1"),
    ],
)
def test_what_cannot_be_combined(target: Target, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        DRAFTERS["hybrid"].build(HybridConfig(**settings), target)


def test_a_run_measures_its_draft_with_copying(tiny: Tiny, tmp_path: Path) -> None:
    """`combine_with` adds a second set of figures on the same prompts and a draft to decode with; a
    trained draft's folder is a head, whose noted α counts."""
    tiny.job(tmp_path / "run", "eagle3", "combine_with=ngram", "decode.temperatures=[0]")
    results = Results.load(tmp_path / "run" / "report")
    (head,), (both,) = results.asked, results.ways["hybrid"]
    assert both.way.drafter == "hybrid"
    assert both.plain_tokens_per_second == head.plain_tokens_per_second
    assert both.identical == head.identical == results.prompts
    page = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "## Hybrid" in page and both.tau.text() in page
    best = tmp_path / "run" / "best"
    tiny.job(tmp_path / "both", "hybrid", f"drafter.head={best}", "drafter.copying=ngram")
    cards = [draft_checkpoint.read_card(tmp_path / p) for p in ("both/best", "run/with-ngram")]
    alpha = draft_checkpoint.read_card(best).notes["held_out"]["by_depth"]["greedy"]
    assert [card.config.alpha for card in cards] == [alpha, alpha]

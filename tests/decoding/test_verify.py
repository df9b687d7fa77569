"""Chains: the law of a speculation step, summed exactly over every draft, gives p.

Run alone: python -m pytest tests/decoding/test_verify.py

Nothing is sampled but in the tests of `draw`. p and q are whole conditional tables over a toy
vocabulary, p_j [V^j, V] being the distribution after each of the V^j prefixes of length j, the
prefix read as a number in base V. All in float64; sums of at most some hundred terms of at
most 1 are exact to 1e-14, so the tolerance of 1e-12 leaves room for rounding alone. Trees, and
the verification methods made for them, are in test_verify_trees.py and
test_verification_methods.py; here they judge chains.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.decoding.verification_methods import (
    VERIFICATION_METHODS,
    Law,
    VerificationMethod,
    draw,
    greedy,
    verify,
)
from specdec.sampling.row_draws import RowDraws
from tests.decoding.tree_laws import lookup
from tests.laws import (
    FILLS,
    Fill,
    Tables,
    extend,
    high_half,
    holes,
    joint,
    law,
    low_half,
    one_hot,
    sharp,
    ties,
    uniform,
)

EXACT = 1e-12
LOSSLESS = {
    name: verification
    for name, verification in VERIFICATION_METHODS.items()
    if verification.lossless
}
SAMPLED = {
    name: verification for name, verification in LOSSLESS.items() if name != "point_mass"
}  # reads q


def normal(rows: Tensor) -> Tensor:
    return rows / rows.sum(-1, keepdim=True)


def tables(V: int, depth: int, fill: Fill) -> Tables:
    return [normal(fill(V**j, V).double()) for j in range(depth)]


def prefixes(V: int, length: int) -> Tensor:
    """Every token chain [V^length, length], in the order of the tables' rows."""
    chains = torch.cartesian_prod(*[torch.arange(V)] * length) if length else torch.zeros(1, 0)
    return chains.reshape(-1, length).long()


def at_chains(table: Tables, chains_BG: Tensor) -> Tensor:
    """The conditionals along each chain [B, len(table), V]."""
    V = table[0].shape[-1]
    rows, index = [], torch.zeros(len(chains_BG), dtype=torch.long)
    for j, conditional in enumerate(table):
        rows.append(conditional[index])
        if j < chains_BG.shape[1]:
            index = index * V + chains_BG[:, j]
    return torch.stack(rows, 1)


def laws(verification: VerificationMethod, p: Tables, q: Tables) -> tuple[Tensor, Tensor, Law]:
    """Every chain that q can draft [B, G], its probability [B], and the law of its speculation
    step."""
    chains, weight = prefixes(p[0].shape[-1], len(q)), joint(q)
    chains, weight = chains[weight > 0], weight[weight > 0]
    return (
        chains,
        weight,
        law(verification, Proposal(chains, at_chains(q, chains)), at_chains(p, chains)),
    )


def committed(p: Tables, chains_BG: Tensor, weight_B: Tensor, step_law: Law) -> Tensor:
    """Distribution [V^M] of M tokens from one speculation step and, where it is short, the target's
    own."""
    V, G = p[0].shape[-1], chains_BG.shape[1]
    total, index = torch.zeros(V ** (G + 1), dtype=torch.float64), 0 * weight_B.long()
    for n in range(G + 1):
        next_BV = (weight_B * step_law.stop_BM[:, n])[:, None] * step_law.next_BMV[:, n]
        mass = torch.zeros(V**n, V, dtype=torch.float64).index_add_(0, index, next_BV)
        total += extend(mass.reshape(-1), p[n + 1 :])
        if n < G:
            index = index * V + chains_BG[:, n]
    return total


def error(verification: VerificationMethod, p: Tables, q: Tables) -> float:
    """Largest difference from the target's joint distribution."""
    return float((committed(p, *laws(verification, p, q)) - joint(p)).abs().max())


def expected_accepted(verification: VerificationMethod, p: Tables, q: Tables) -> float:
    chains, weight, (stop_BM, _) = laws(verification, p, q)
    lengths = torch.arange(chains.shape[1] + 1, dtype=torch.float64)
    return float((weight * (stop_BM @ lengths)).sum())


# --- cases -----------------------------------------------------------------------------------

SIZES = [(V, G) for V in (2, 3, 4) for G in (1, 2, 3)]


def cases() -> list[tuple[Tables, Tables]]:
    """Every pair of fills at every size, q = p, and q = p at one depth alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = []
        for V, G in SIZES:
            for of_p in FILLS:
                for of_q in FILLS:
                    found.append((tables(V, G + 1, of_p), tables(V, G, of_q)))
                p = tables(V, G + 1, of_p)
                found.append((p, p[:G]))
                for same in range(G):
                    q = tables(V, G, uniform)
                    found.append((p, q[:same] + [p[same]] + q[same + 1 :]))
        return found


CASES = cases()


# --- losslessness --------------------------------------------------------------------------


@pytest.mark.parametrize("verification", LOSSLESS.values(), ids=LOSSLESS)
def test_committed_tokens_follow_the_target(verification: VerificationMethod) -> None:
    worst = max(error(verification, p, q) for p, q in CASES)
    assert worst < EXACT


@pytest.mark.parametrize("verification", LOSSLESS.values(), ids=LOSSLESS)
def test_a_fixed_chain_is_a_point_mass(verification: VerificationMethod) -> None:
    """q None: a chain drafted without chance. Whichever chain it is, the target's law holds."""
    for p, q in CASES:
        V, G = p[0].shape[-1], len(q)
        chains = prefixes(V, G)
        p_BMV = at_chains(p, chains)
        fixed = law(verification, Proposal(chains), p_BMV)
        explicit = law(
            verification, Proposal(chains, torch.eye(V, dtype=torch.float64)[chains]), p_BMV
        )
        assert torch.allclose(fixed.stop_BM, explicit.stop_BM, atol=EXACT, rtol=0)
        assert torch.allclose(fixed.next_BMV, explicit.next_BMV, atol=EXACT, rtol=0)
        target, one = joint(p), torch.ones(1, dtype=torch.float64)
        for b in range(len(chains)):
            alone = Law(fixed.stop_BM[b : b + 1], fixed.next_BMV[b : b + 1])
            got = committed(p, chains[b : b + 1], one, alone)
            assert (got - target).abs().max() < EXACT


@pytest.mark.parametrize("verification", LOSSLESS.values(), ids=LOSSLESS)
def test_a_law_is_made_of_distributions(verification: VerificationMethod) -> None:
    for p, q in CASES:
        for x in laws(verification, p, q)[2]:
            assert x.isfinite().all() and (x >= 0).all()
            assert (x.sum(-1) - 1).abs().max() < EXACT


@pytest.mark.parametrize("verification", LOSSLESS.values(), ids=LOSSLESS)
def test_a_law_in_float32_over_a_real_vocabulary(verification: VerificationMethod) -> None:
    """What the decoder runs. q is p, p but for rounding, and other; 1e-5 is 84 float32 epsilons,
    more than sums over 4,000 tokens lose."""
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(6, 5, 4000, generator=generator)
    p_BMV = logits.softmax(-1)
    near = (logits[:, :-1] + 1e-6 * torch.randn(6, 4, 4000, generator=generator)).softmax(-1)
    other = torch.randn(6, 4, 4000, generator=generator).softmax(-1)
    for q_BGV in (p_BMV[:, :-1], near, other):
        tokens = torch.multinomial(q_BGV.reshape(24, -1), 1, generator=generator).reshape(6, 4)
        step_law = law(verification, Proposal(tokens, q_BGV), p_BMV)
        for x in step_law:
            assert (x >= 0).all() and torch.allclose(x.sum(-1), torch.ones(()), atol=1e-5)
        if q_BGV is not other and verification is not VERIFICATION_METHODS["point_mass"]:
            assert (step_law.stop_BM[:, -1] > 0.999).all()


@pytest.mark.parametrize("verification", LOSSLESS.values(), ids=LOSSLESS)
def test_rows_of_a_batch_do_not_meet(verification: VerificationMethod) -> None:
    p, q = next((p, q) for p, q in CASES if len(p[0][0]) == 3 and len(q) == 3)
    chains, _, together = laws(verification, p, q)
    for b in range(len(chains)):
        one = chains[b : b + 1]
        alone = law(verification, Proposal(one, at_chains(q, one)), at_chains(p, one))
        assert torch.equal(alone.stop_BM[0], together.stop_BM[b])
        assert torch.equal(alone.next_BMV[0], together.next_BMV[b])


@pytest.mark.parametrize("verification", LOSSLESS.values(), ids=LOSSLESS)
def test_nothing_drafted_leaves_the_target_alone(verification: VerificationMethod) -> None:
    p = torch.tensor([[[0.2, 0.3, 0.5]]], dtype=torch.float64)
    nothing = torch.zeros(1, 0, dtype=torch.long)
    for parents, q in ((None, None), (None, p[:, :0]), (nothing, p[:, :0])):
        stop_BM, next_BMV = law(verification, Proposal(nothing, q, parents), p)
        assert next_BMV.tolist() == p.tolist()
        assert stop_BM.tolist() == [[1.0]]
        verdict = verify(verification, Proposal(nothing, q, parents), lookup(p), RowDraws([0]))
        assert verdict.accepted_B.tolist() == [0] and verdict.path_BK.shape == (1, 0)


# --- how many tokens are accepted ------------------------------------------------------------


def test_rejection_accepts_as_its_formula_says() -> None:
    """E[accepted] = Σ_n Σ_{x_1…x_n} Π_i min(p, q)(x_i | x_<i): each factor is q min(1, p/q)."""
    for p, q in CASES:
        both = [torch.minimum(a, b) for a, b in zip(p, q)]
        hand = sum(float(joint(both[: n + 1]).sum()) for n in range(len(q)))
        assert expected_accepted(VERIFICATION_METHODS["rejection"], p, q) == pytest.approx(
            hand, abs=EXACT
        )


def test_non_iterative_rejection_accepts_as_its_formula_says() -> None:
    """Each x is drawn and accepted with q p / (M q) = p / M, where 1 / M = min q / p over p > 0.
    That is never more than `rejection` accepts, and less where q is not p."""
    gains = []
    for p, q in CASES:
        both = []
        for a, b in zip(p, q):
            least = (b / a).where(a > 0, torch.inf).amin(-1, keepdim=True)
            both.append(a * least)
        hand = sum(float(joint(both[: n + 1]).sum()) for n in range(len(q)))
        found = expected_accepted(VERIFICATION_METHODS["non_iterative"], p, q)
        assert found == pytest.approx(hand, abs=EXACT)
        gains.append(expected_accepted(VERIFICATION_METHODS["rejection"], p, q) - found)
    assert min(gains) > -EXACT and max(gains) > 0.5


def test_block_accepts_as_its_formula_says() -> None:
    """P(accepted >= i) = E[w_i] (Sun et al. 2024, Lemma 3); with r the mass q w is
    r_i = min(q_{1…i}, r_{i-1} p_i), so E[accepted] = Σ_i Σ_{x_1…x_i} r_i."""
    for p, q in CASES:
        hand, r = 0.0, torch.ones(1, dtype=torch.float64)
        for i in range(len(q)):
            r = torch.minimum(extend(r, [p[i]]), joint(q[: i + 1]))
            hand += float(r.sum())
        assert expected_accepted(VERIFICATION_METHODS["block"], p, q) == pytest.approx(
            hand, abs=EXACT
        )


def test_block_never_accepts_fewer_than_rejection() -> None:
    gains = []
    for p, q in CASES:
        gain = expected_accepted(VERIFICATION_METHODS["block"], p, q) - expected_accepted(
            VERIFICATION_METHODS["rejection"], p, q
        )
        assert gain > -EXACT
        if len(q) == 1:
            assert abs(gain) < EXACT
        gains.append(gain)
    assert max(gains) > 0.05  # so that equality everywhere would not pass


def test_the_papers_example() -> None:
    """Sun et al. 2024, Section 2: p = (1/3, 2/3), q = (2/3, 1/3), G = 2. Rejection accepts
    2/3 + 4/9 = 10/9; block: E[w_1] = 2/3, E[w_2] = 1/9 + 2/9 + 1/9 + 1/9 = 5/9, so 11/9."""
    p = [torch.tensor([[1.0, 2.0]]).double().expand(2**j, 2) / 3 for j in range(3)]
    q = [table.flip(-1) for table in p[:2]]
    assert expected_accepted(VERIFICATION_METHODS["rejection"], p, q) == pytest.approx(
        10 / 9, abs=EXACT
    )
    assert expected_accepted(VERIFICATION_METHODS["block"], p, q) == pytest.approx(
        11 / 9, abs=EXACT
    )


@pytest.mark.parametrize("verification", SAMPLED.values(), ids=SAMPLED)
def test_a_perfect_draft_is_kept_whole_and_a_disjoint_one_not_at_all(
    verification: VerificationMethod,
) -> None:
    for fill in (uniform, sharp, holes, one_hot, ties):
        p = tables(3, 4, fill)
        assert expected_accepted(verification, p, p[:3]) == pytest.approx(3, abs=EXACT)
    p, q = tables(4, 4, low_half), tables(4, 3, high_half)
    assert expected_accepted(verification, p, q) == 0


# --- the enumeration can fail ----------------------------------------------------------------


def keeps_p_after_rejection(proposal: Proposal, p: Tensor) -> Law:
    return Law(law(VERIFICATION_METHODS["rejection"], proposal, p).stop_BM, p)


def accepts_by_p_alone(proposal: Proposal, p: Tensor) -> Law:
    fixed, right = (
        law(VERIFICATION_METHODS["rejection"], replace(proposal, q_BGV=x), p)
        for x in (None, proposal.q_BGV)
    )
    return Law(fixed.stop_BM, right.next_BMV)


def lenient(proposal: Proposal, p: Tensor) -> Law:
    assert proposal.q_BGV is not None
    return law(VERIFICATION_METHODS["rejection"], replace(proposal, q_BGV=0.9 * proposal.q_BGV), p)


def block_with_residuals_of_rejection(proposal: Proposal, p: Tensor) -> Law:
    block, rejection = (
        law(VERIFICATION_METHODS[name], proposal, p) for name in ("block", "rejection")
    )
    return Law(block.stop_BM, rejection.next_BMV)


def block_without_its_last_token(proposal: Proposal, p: Tensor) -> Law:
    stop_BM, next_BMV = law(VERIFICATION_METHODS["block"], proposal, p)
    cut = torch.cat([stop_BM[:, :-2], stop_BM[:, -2:].sum(-1, keepdim=True)], -1)
    return Law(torch.cat([cut, torch.zeros_like(cut[:, :1])], -1), next_BMV)


def next_token_one_place_late(proposal: Proposal, p: Tensor) -> Law:
    stop_BM, next_BMV = law(VERIFICATION_METHODS["rejection"], proposal, p)
    return Law(stop_BM, next_BMV.roll(1, 1))


BROKEN = [
    keeps_p_after_rejection,
    accepts_by_p_alone,
    lenient,
    block_with_residuals_of_rejection,
    block_without_its_last_token,
    next_token_one_place_late,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_method_is_caught(broken: Callable[..., Law]) -> None:
    """Nine orders of magnitude above the tolerance on some of ten ordinary tables, for every G
    above 1 (at G = 1 some of these verification methods are right)."""
    torch.manual_seed(2)
    for G in (2, 3):
        pairs = [(tables(3, G + 1, uniform), tables(3, G, uniform)) for _ in range(10)]
        assert max(error(VerificationMethod(whole=broken), p, q) for p, q in pairs) > 1e-3


def test_a_context_blind_method_is_caught() -> None:
    """Tables depend on the prefix: p of the wrong prefix is wrong."""
    torch.manual_seed(3)
    p, q = tables(3, 3, uniform), tables(3, 2, uniform)
    blind = [p[0], p[1].roll(1, 0), p[2]]
    assert (
        committed(p, *laws(VERIFICATION_METHODS["block"], blind, q)) - joint(p)
    ).abs().max() > 1e-3


# --- greedy ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafted", "argmax", "accepted", "following"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 3, 8),  # all, and the bonus token
        ([5, 6, 7], [5, 6, 9, 8], 2, 9),  # the correction, not the drafted 7
        ([4, 6, 7], [5, 6, 7, 8], 0, 5),  # agreement after the first miss counts for nothing
        ([5, 4, 7], [5, 6, 7, 8], 1, 6),
        ([5, 5, 5], [0, 5, 5, 5], 0, 0),  # compared in place, not shifted
        ([], [3], 0, 3),
        ([2], [2, 1], 1, 1),
    ],
)
def test_greedy(drafted: list[int], argmax: list[int], accepted: int, following: int) -> None:
    verdict = greedy(Proposal(torch.tensor([drafted], dtype=torch.long)), torch.tensor([argmax]))
    assert (verdict.accepted_B.item(), verdict.next_B.item()) == (accepted, following)
    assert verdict.path_BK.tolist() == [list(range(accepted))]


def test_greedy_judges_each_row_by_itself() -> None:
    verdict = greedy(
        Proposal(torch.tensor([[1, 2], [1, 2], [1, 2]])),
        torch.tensor([[1, 2, 3], [0, 2, 4], [1, 7, 5]]),
    )
    assert verdict.accepted_B.tolist() == [2, 0, 1]
    assert verdict.next_B.tolist() == [3, 0, 7]


def test_greedy_is_the_limit_of_every_lossless_method() -> None:
    """One-hot p: each verification method's law is certain, and it is the greedy verdict, for every
    chain."""
    torch.manual_seed(4)
    for verification in LOSSLESS.values():
        p = tables(3, 4, one_hot)
        chains = prefixes(3, 3)
        p_BMV = at_chains(p, chains)
        stop_BM, next_BMV = law(verification, Proposal(chains), p_BMV)
        verdict = greedy(Proposal(chains), p_BMV.argmax(-1))
        row = torch.arange(len(chains))
        assert torch.equal(stop_BM[row, verdict.accepted_B], torch.ones(27).double())
        assert next_BMV[row, verdict.accepted_B, verdict.next_B].eq(1).all()


# --- draw ------------------------------------------------------------------------------------

LAW = Law(
    torch.tensor([0.5, 0.2, 0.0, 0.3]),
    torch.tensor([[0.1, 0.9, 0.0], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4], [0.25, 0.25, 0.5]]),
)


def chains_of(rows: int) -> Proposal:
    return Proposal(torch.zeros(rows, 3, dtype=torch.long))


def test_draw_follows_the_law() -> None:
    """Chi-square over the 6 outcomes (length, token) that can occur, 5 degrees of freedom. The
    seed is fixed; another seed would exceed 25.7 once in 10,000 times."""
    count = 50_000
    step_law = Law(LAW.stop_BM.expand(count, -1), LAW.next_BMV.expand(count, -1, -1))
    accepted_B, next_B, _ = draw(step_law, chains_of(count), RowDraws(range(count)))
    seen = torch.zeros(4, 3).index_put_((accepted_B, next_B), torch.ones(count), accumulate=True)
    expected = count * LAW.stop_BM[:, None] * LAW.next_BMV
    possible = expected > 0
    assert possible.sum() == 6 and seen[~possible].sum() == 0
    assert ((seen - expected) ** 2 / expected)[possible].sum() < 25.7


def test_draw_takes_each_row_from_its_own_law() -> None:
    """Certain laws: row b keeps b % 4 tokens, and the next is certain given row and length."""
    B = 12
    stop_BM = torch.eye(4)[torch.arange(B) % 4]
    next_BMV = torch.eye(5)[(torch.arange(B)[:, None] + torch.arange(4)) % 5]
    accepted_B, next_B, path_BK = draw(Law(stop_BM, next_BMV), chains_of(B), RowDraws(range(B)))
    assert accepted_B.tolist() == [b % 4 for b in range(B)]
    assert next_B.tolist() == [(b + b % 4) % 5 for b in range(B)]
    assert [[x for x in row if x >= 0] for row in path_BK.tolist()] == [
        list(range(b % 4)) for b in range(B)
    ]


def test_draw_depends_on_the_seeds_alone() -> None:
    step_law = Law(LAW.stop_BM.expand(64, -1), LAW.next_BMV.expand(64, -1, -1))
    one, two, other = (
        draw(step_law, chains_of(64), RowDraws(range(s, s + 64))) for s in (7, 7, 80)
    )
    assert torch.equal(one.accepted_B, two.accepted_B) and torch.equal(one.next_B, two.next_B)
    assert not torch.equal(one.accepted_B, other.accepted_B)

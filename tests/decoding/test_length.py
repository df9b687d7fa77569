"""Lengths: hand numbers and properties of each. Nothing is timed or sampled. The classifier of
DISCO is in test_disco.py, which lengths are lossless in test_length_laws.py.

Run alone: python -m pytest tests/decoding/test_length.py
"""

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch

from specdec.decoding.draft_length import (
    LENGTHS,
    Confidence,
    CostTable,
    Fixed,
    Length,
    OptimalLength,
    length,
)
from specdec.errors import UserError
from specdec.theory.leviathan import best_gamma, oracle_factor, walltime_factor
from specdec.theory.oracle import oracle
from tests.lengths import rows, stops


def told(policy: Length, *steps: tuple[int, int]) -> None:
    for drafted, accepted in steps:
        policy.observe([drafted], [accepted])


# --- Fixed, by name ---------------------------------------------------------------------------


def test_fixed_drafts_gamma_whatever_happens() -> None:
    fixed = Fixed(5)
    told(fixed, (5, 0), (5, 0))
    assert (fixed.gamma(1), fixed.gamma(1000), fixed.reads_q) == (5, 5, False)
    drafted = rows([0.1, 0.9], [1, 0]), torch.tensor([0, 1]), torch.tensor([0.1, 0.0])
    assert fixed.stop(0, *drafted).tolist() == [False] * 2
    assert Fixed(0).gamma(1) == 0  # the plain step


def test_lengths_by_name() -> None:
    assert sorted(LENGTHS) == ["confidence", "disco", "fixed", "goodput", "optimal"]
    assert length("fixed", {"limit": 3}).gamma(1) == 3
    assert isinstance(length("confidence"), Confidence)
    assert isinstance(length("optimal", {"c": 0.1}), OptimalLength)
    assert [LENGTHS[name].reads_q for name in sorted(LENGTHS)] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("fixd", {}, "did you mean 'fixed'"),
        ("confidence", {"treshold": 0.3}, "did you mean 'threshold'"),
        ("fixed", {"limit": -1}, "decode.draft_length_settings.limit=-1"),
        ("confidence", {"threshold": 1.5}, "decode.draft_length_settings.threshold=1.5"),
        ("optimal", {}, "decode.draft_length_settings.c is missing"),
        ("optimal", {"c": 0.1, "v": {4: 0.0}}, "v at gamma 4"),
        ("optimal", {"c": 0.1, "alpha": [1.2]}, "decode.draft_length_settings.alpha holds 1.2"),
        ("optimal", {"c": 0.1, "alpha": []}, "decode.draft_length_settings.alpha is empty"),
        ("optimal", {"c": 0.1, "forget": 0.0}, "decode.draft_length_settings.forget=0.0"),
        ("optimal", {"c": 0.1, "weight": 0.0}, "decode.draft_length_settings.weight=0.0"),
        (
            "optimal",
            {"c": 0.1, "explore_every": -1},
            "decode.draft_length_settings.explore_every=-1",
        ),
        ("goodput", {}, "decode.draft_length_settings.table is missing"),
        (
            "goodput",
            {"table": "/nowhere/table.json"},
            "does not exist, or is not a file; measure a cost table",
        ),
        ("disco", {}, "decode.draft_length_settings.path is missing"),
        (
            "disco",
            {"path": "/nowhere/stop.json"},
            "does not exist, or is not a file; fit a stop classifier",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(name: str, settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        length(name, settings)
    assert "\n" not in str(caught.value)


# --- Acceptance by depth ----------------------------------------------------------------------


def test_acceptance_by_depth_by_hand() -> None:
    known = OptimalLength(limit=4, alpha=[0.5], weight=2.0, forget=1.0)
    assert known.by_depth() == [0.5] * 4
    known.observe([3, 3, 1], [3, 1, 0])
    # depth 0: 2 of 3; depth 1: 1 of 2, from what depth 0 gives; depth 2: 1 of 1; depth 3: none
    first = (2 * 0.5 + 2) / 5
    second = (2 * first + 1) / 4
    third = (2 * second + 1) / 3
    assert known.by_depth() == pytest.approx([first, second, third, third])


def test_a_prior_by_depth_holds_until_steps_say_otherwise() -> None:
    known = OptimalLength(limit=3, alpha=[0.9, 0.4], weight=5.0, forget=1.0)
    assert known.by_depth() == pytest.approx([0.9, 0.4, 0.4])
    for _ in range(5000):
        known.observe([2], [1])  # depth 0 always, depth 1 never
    assert known.by_depth() == pytest.approx([1.0, 0.0, 0.0], abs=1e-3)


def test_order_matters_only_where_steps_are_forgotten() -> None:
    good, bad = [(2, 2)] * 30, [(2, 0)] * 30

    def after(forget: float, steps: list[tuple[int, int]]) -> float:
        known = OptimalLength(limit=2, weight=1.0, forget=forget)
        for drafted, accepted in steps:
            known.observe([drafted], [accepted])
        return known.by_depth()[0]

    assert after(1.0, good + bad) == after(1.0, bad + good)
    assert after(0.9, good + bad) < 0.3 < 0.7 < after(0.9, bad + good)
    assert after(0.9, [(0, 0)] * 99) == 0.6  # speculation steps without a draft say nothing


# --- Optimal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0.0, 0.05, 0.3, 1.2])
@pytest.mark.parametrize("v", [{}, {8: 1.3}, {2: 1.0, 4: 2.5}])
def test_optimal_is_the_argmax_by_brute_force(c: float, v: dict[int, float]) -> None:
    """Over what acceptance it has seen; v between and beyond the points drawn by hand here."""

    def cost(gamma: int) -> float:
        if v == {8: 1.3}:
            return 1 + 0.3 * gamma / 8
        if v:
            return 1.0 if gamma <= 2 else 1 + 0.75 * (gamma - 2)
        return 1.0

    for seen in ([], [(6, 6)] * 9, [(6, 1)] * 9, [(6, 0)] * 40, [(6, 3), (6, 5), (2, 2)] * 5):
        policy = OptimalLength(limit=6, c=c, v=v, explore_every=0)
        told(policy, *seen)
        alpha = policy.by_depth()
        factors = [1.0] + [walltime_factor(alpha, g, c, cost(g)) for g in range(1, 7)]
        assert factors[policy.gamma(1)] == pytest.approx(max(factors), rel=1e-12)


def test_optimal_by_hand() -> None:
    # α = .6 for all depths at first; c = .2: 1, 1.333, 1.4, 1.36: γ = 2
    policy = OptimalLength(limit=8, c=0.2, explore_every=0)
    assert policy.gamma(1) == 2
    told(policy, *[(2, 0)] * 400)
    assert policy.gamma(1) == 0  # α < c: nothing helps
    told(policy, *[(2, 2)] * 400)
    assert policy.gamma(1) == 8  # the deeper ones take after the last that was tested


def test_exploring_goes_by_the_count_of_steps_and_brings_a_length_back() -> None:
    def lengths() -> list[int]:
        policy = OptimalLength(limit=4, c=0.2, explore_every=10)
        told(policy, *[(4, 0)] * 300)
        found = []
        for _ in range(400):  # the draft is good now, but only a draft can show it
            gamma = policy.gamma(1)
            found.append(gamma)
            told(policy, (gamma, gamma))
        return found

    found = lengths()
    assert found[:20] == ([0] * 9 + [1]) * 2  # one in ten, one token
    assert found[-1] == 4
    assert found == lengths()  # and nothing of it is chance
    never = OptimalLength(limit=4, c=0.2, explore_every=0)
    told(never, *[(4, 0)] * 300)
    assert {never.gamma(1) for _ in range(100)} == {0}
    hopeless = OptimalLength(limit=4, c=1.0, explore_every=10)
    assert {hopeless.gamma(1) for _ in range(100)} == {0}  # accepted or not, it would not pay


# --- Goodput ----------------------------------------------------------------------------------

# 10 ms a pass, 0.2 ms for each token that it judges in any row, 1 ms a draft step
LINEAR = CostTable(
    batches=[1, 64],
    gammas=[0, 8],
    seconds=[[0.010 + 0.0002 * b * (k + 1) + 0.001 * k for k in (0, 8)] for b in (1, 64)],
)


def test_cost_table_is_bilinear_and_goes_on_beyond() -> None:
    for k, b in product((0, 3, 8, 12), (1, 5, 64, 500)):
        linear = 0.010 + 0.0002 * b * (k + 1) + 0.001 * k
        assert LINEAR.step(k, b) == pytest.approx(linear)  # bilinear: linear in b and in k apart
    one = CostTable([4], [0, 2], [[1.0, 0.8]])
    assert (one.step(1, 1), one.step(1, 99), one.step(5, 4)) == (0.9, 0.9, 0.8)


def test_goodput_is_the_argmax_and_falls_to_0_where_the_batch_is_large() -> None:
    policy = length("goodput", {"limit": 8, "alpha": [0.7], "explore_every": 0}, LINEAR)
    found = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096):
        tokens = [sum(0.7**i for i in range(k + 1)) for k in range(9)]
        time = [0.010 + 0.0002 * batch * (k + 1) + 0.001 * k for k in range(9)]
        rate = [t / s for t, s in zip(tokens, time)]
        found.append(policy.gamma(batch))
        assert rate[found[-1]] == pytest.approx(max(rate), rel=1e-12)
    assert found == sorted(found, reverse=True)
    # at b = 1: .01 + .0002 + .0012 k, so k + 1 gains while .7^{k+1} (8.5 + k) > Σ_{i<=k} .7^i
    assert found[0] == 4
    # k = 1 gains while .7 · (.010 + .0002 b) > .001 + .0002 b, b < 100
    assert (found[6], found[7], found[-1]) == (1, 0, 0)


def test_goodput_comes_back_where_the_batch_is_small_again() -> None:
    policy = length("goodput", {"limit": 8, "alpha": [0.7], "explore_every": 5}, LINEAR)
    assert [policy.gamma(64) for _ in range(5)] == [1, 1, 1, 1, 2]  # at times one token more
    assert [policy.gamma(100) for _ in range(5)] == [0, 0, 0, 0, 1]
    told(policy, *[(0, 0)] * 100)  # plain steps teach nothing
    assert policy.gamma(1) == 4


def test_goodput_follows_acceptance() -> None:
    policy = length("goodput", {"limit": 8, "explore_every": 0}, LINEAR)
    policy.observe([8] * 300, [8] * 300)
    assert policy.gamma(1) == 8
    for _ in range(200):
        policy.observe([8] * 300, [0] * 300)
    assert policy.gamma(1) == 0


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (([1, 1], [0, 1], [[1, 1], [1, 1]]), "numbers that rise"),
        (([], [0, 1], []), "numbers that rise"),
        (([1], [1, 2], [[1, 1]]), "must start at 0"),
        (([0], [0, 2], [[1, 1]]), "must start at 1"),
        (([1], [0, 2], [[1]]), "1 rows of 2"),
        (([1], [0, 2], [[1, 0]]), "0 in seconds is not a finite time"),
        (([1], [0, 2], [[1, math.nan]]), "nan in seconds is not a finite time"),
    ],
)
def test_an_impossible_cost_table_is_refused(table: tuple, words: str) -> None:
    with pytest.raises(UserError, match=words):
        CostTable(*table)


# --- Confidence -------------------------------------------------------------------------------


def test_confidence_stops_each_row_where_its_own_token_is_unlikely() -> None:
    policy = Confidence(limit=5, threshold=0.5)
    q_BK = [[0.9, 0.4, 0.9], [0.9, 0.9, 0.5], [0.1, 0.9, 0.9]]
    assert stops(policy, q_BK) == [[False, False, True], [True, False, False], [False] * 3]
    assert (policy.gamma(3), policy.reads_q) == (5, True)


def test_cumulative_confidence_multiplies_and_starts_anew_each_step() -> None:
    policy = Confidence(threshold=0.5, cumulative=True)
    # .8, .64, .512, .4096 and .9, .45
    q_BK = [[0.8] * 4, [0.9, 0.5, 1.0, 1.0]]
    once = [[False, False], [False, True], [False, True], [True, True]]
    assert stops(policy, q_BK) == once
    assert stops(policy, q_BK) == once
    assert stops(policy, [[0.8, 0.8]]) == [[False], [False]]  # also with other rows


# --- The cost table on disk ---------------------------------------------------------------------


def test_a_cost_table_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    LINEAR.save(path)
    assert CostTable.load(path) == LINEAR
    assert length("goodput", {"table": str(path), "alpha": [0.7]}).gamma(1) == 4
    for text, words in [("{", "cannot be read"), ('{"batches": []}', "'gammas' is missing")]:
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            CostTable.load(path)
    for broken in ({"batches": 3}, {"seconds": [1, 2]}, {"gammas": [None, 8]}):
        path.write_text(json.dumps(LINEAR.__dict__ | broken))
        with pytest.raises(UserError, match=r"expected a .*; measure a cost table"):
            CostTable.load(path)


# --- The oracle -------------------------------------------------------------------------------


def test_oracle_by_hand() -> None:
    # c = .5, v = 1: 4 tokens for 3 · .5 + 1, 1 for 1, 2 for .5 + 1: 7 tokens in 5 steps
    found = oracle([(4, 3), (4, 0), (4, 1)], c=0.5)
    assert found.speedup == pytest.approx(7 / 5)
    assert (found.speculation_steps, found.drafted) == (3, 4)
    # γ = 1: 2 + 1 + 1 speculation steps of 1.5 = 6; γ = 2: 2 + 1 + 1 of 2; γ = 3: 3 of 2.5; γ = 0:
    # 7
    assert (found.fixed_gamma, found.fixed_speedup) == (1, pytest.approx(7 / 6))
    assert found.censored == 0
    assert oracle([(2, 2), (2, 0)], c=0.5).censored == 0.5


def test_oracle_splits_a_step_that_is_too_wide() -> None:
    # 4 tokens: in one pass 1.5 + 4; two passes of 2: 2 · (.5 + 1) = 3; four plain steps: 4
    found = oracle([(3, 3)], c=0.5, v=lambda gamma: 1.0 if gamma <= 1 else 4.0)
    assert found.speedup == pytest.approx(4 / 3)
    dear = oracle([(3, 3)], c=5.0)  # never draft: the plain step
    assert (dear.speedup, dear.fixed_gamma) == (1, 0)


def test_oracle_meets_its_closed_form() -> None:
    """Speculation steps in the very shares of a geometric law of α = .8 (steps of every n in
    proportion to .8^n): 1 / (1 - α + αc), short of the tail that `longest` cuts, .8^40 · 1000 <
    1."""
    found = [(41, n) for n in range(41) for _ in range(round(10_000 * 0.8**n * 0.2))]
    bound = oracle(found, c=0.1)
    assert bound.speedup == pytest.approx(oracle_factor(0.8, 0.1), rel=0.01)
    # every speculation step of a fixed γ meets fresh acceptances, so that it too has its closed
    # form
    assert bound.fixed_gamma == best_gamma(0.8, 0.1, 40)
    fixed = walltime_factor(0.8, bound.fixed_gamma, 0.1)
    assert bound.fixed_speedup == pytest.approx(fixed, rel=0.01)
    assert 1 < bound.speedup / bound.fixed_speedup < 1.6
    with pytest.raises(UserError, match="no speculation steps"):
        oracle([], c=0.1)

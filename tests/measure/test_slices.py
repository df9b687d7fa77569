"""Slices of prompts: what they count, and for which of them drafting pays.

Run alone: python -m pytest tests/measure/test_slices.py (about 5 s)
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specdec.decoding.config import DecodeConfig
from specdec.measure.evaluation import Subject, evaluate
from specdec.measure.results import BatchTimes, PromptCounts, Slice
from specdec.measure.slices import MOST, OTHERS, PromptTraits, length_range, slices
from specdec.report import report_page, verdict
from specdec.theory.intervals import ratio_interval, summed_by
from tests.measure.test_results import results
from tests.tiny import architectures, lm, make_tokenizer, random_target

STEPS = 20  # speculation steps of each prompt
NOISE = (0.98, 1.0, 1.02)
# a speculation step takes 1.5 plain steps, so drafting pays above τ = 1.5
TIMES = [BatchTimes(1, 40, 40 * x, 30 * x, STEPS, 30 * x) for x in NOISE * 2]


def counts(*taus: float) -> list[PromptCounts]:
    return [PromptCounts(round(STEPS * tau), STEPS) for tau in taus]


def sliced(
    by_category: dict[str, Sequence[float]], times: Sequence[BatchTimes] = TIMES
) -> dict[str, Slice]:
    """The slices of prompts with these τ, by category, all of one length."""
    traits = [PromptTraits("", {"category": c}) for c, taus in by_category.items() for _ in taus]
    taus = [tau for taus in by_category.values() for tau in taus]
    return slices(traits, [(9, 9)] * len(taus), counts(*taus), times)


SLOW, MIXED, FAST = [1.1, 1.15, 1.2, 1.1, 1.15, 1.2], [1.2, 1.8] * 3, [2.4, 2.5, 2.6] * 2


def test_a_slice_has_its_verdict() -> None:
    found = sliced({"slow": SLOW, "mixed": MIXED, "fast": FAST, "rare": [1.1, 1.15, 1.2]})
    assert {name.removeprefix("category: "): x.verdict for name, x in found.items()} == {
        "fast": "draft",
        "mixed": "unclear",
        "rare": "",  # three conversations are too few to be judged
        "slow": "do not draft here",
    }
    assert found["category: slow"].corrected and not found["category: mixed"].corrected
    for one in found.values():
        assert one.break_even.value == pytest.approx(1.5)
        assert one.speedup.value == pytest.approx(one.tau.value / 1.5)
    # the timed prompts are the first six, all of one slice: 40 plain over 30 speculative seconds
    clock = found["category: slow"].timed_speedup
    assert clock is not None and clock.value == pytest.approx(4 / 3)
    assert found["category: fast"].timed_speedup is None


def test_without_timed_prompts_nothing_is_claimed() -> None:
    found = sliced({"slow": SLOW, "fast": FAST}, TIMES[:2])
    assert {x.verdict for x in found.values()} == {""}
    assert sliced({"slow": SLOW}) == {}  # no property has two values


def test_many_slices_need_more_evidence() -> None:
    """With few conversations, an interval that ends below 1 at 95 % does not do so at the level for
    many slices; the verdict stays, but is not marked as corrected."""
    weak = [1.2, 1.25, 1.3, 1.35, 1.4, 1.45]
    two = sliced({"weak": weak, "fast": FAST})["category: weak"]
    many = sliced({"weak": weak} | {f"other {n}": MIXED for n in range(MOST - 1)})
    assert two.verdict == many["category: weak"].verdict == "do not draft here"
    assert two.corrected and not many["category: weak"].corrected
    assert two.speedup == many["category: weak"].speedup


def test_turns_of_one_conversation_are_one_observation() -> None:
    """Each conversation is there twice, as two turns that say the same: nothing is known twice."""
    taus, names = [*SLOW, *FAST], [f"chat {n}" for n in range(12)]

    def told(turns: int, conversations: bool) -> Slice:
        traits = [
            PromptTraits(name * conversations, {"category": "slow" if n < 6 else "fast"})
            for n, name in enumerate(names)
            for _ in range(turns)
        ]
        every = [c for c in counts(*taus) for _ in range(turns)]
        return slices(traits, [(9, 9)] * len(every), every, TIMES)["category: slow"]

    once, twice, apart = told(1, True), told(2, True), told(2, False)
    assert (twice.prompts, twice.conversations, once.conversations) == (12, 6, 6)
    assert (twice.tau.low, twice.tau.high) == pytest.approx((once.tau.low, once.tau.high))
    assert apart.tau.high - apart.tau.low < 0.8 * (once.tau.high - once.tau.low)
    assert summed_by("abab", [1, 2, 3, 4]) == [4, 6]


def test_rare_values_are_one_slice() -> None:
    found = sliced({"common": FAST} | {f"rare {n:02}": [2.0] for n in range(MOST + 3)})
    assert len(found) == MOST and [*found][-1] == f"category: {OTHERS}"
    assert sum(x.prompts for x in found.values()) == 6 + MOST + 3
    lengths = [0, 31, 32, 511, 8191, 8192]
    assert [length_range(n) for n in lengths] == [
        *["0 to 31"] * 2,
        "32 to 127",
        "128 to 511",
        "2,048 to 8,191",
        "8,192 or more",
    ]


def test_the_report_says_where_not_to_draft() -> None:
    one = results()
    found = sliced({"slow|": SLOW, "fast": FAST})
    fast = replace(one.measured[0], slices=found, speedup=ratio_interval([3, 4, 5], [2, 3, 3]))
    one.measured[0] = replace(fast, speedup=replace(fast.speedup, low=1.2, high=1.6))
    page = report_page.page(one, {})
    assert "### Where drafting pays" in page
    assert "| category: slow\\| | 6 | 1.15" in page and "| **do not draft here** |" in page
    assert "In 0 of the 1 slices with timed prompts" in page  # the clock said 1.33
    assert "Do not draft at T = 0 with category: slow| (0.77" in verdict.exceptions(one)
    assert "Slices of fewer than 6 conversations" in page and "no interval" not in page
    one.measured[0] = replace(fast, slices=sliced({"slow": SLOW, "fast": FAST}, TIMES[:2]))
    page = report_page.page(one, {})
    assert page.count("| no interval |") == 2 and "There is no verdict: so few timed" in page


def test_evaluation_counts_conversations() -> None:
    """Two turns a conversation: the report's intervals are over conversations, and the figures of a
    turn are those of its prompts."""
    tokenizer = make_tokenizer()
    target = random_target(architectures(len(tokenizer), 4)["llama"])
    target.tokenizer = tokenizer
    prompts = [[5 + n, 7, 8 + n % 3] for n in range(12)]
    traits = [PromptTraits(f"chat {n // 2}", {"turn": str(1 + n % 2)}) for n in range(12)]
    cfg = DecodeConfig(prompts=12, timed=4, max_new_tokens=10, temperatures=[0.0])
    made = evaluate(Subject("run", target, lm(target), "prompts"), prompts, cfg, traits=traits)
    (at,) = made.asked
    assert made.conversations == [n // 2 for n in range(12)]
    kept = [c.emitted for c in at.prompts], [c.speculation_steps for c in at.prompts]
    expected = ratio_interval(*(summed_by(made.conversations, column) for column in kept))
    assert at.tau == expected.within(1, at.way.gamma + 1)
    first = at.slices["turn: 1"]
    assert first.tau == ratio_interval(kept[0][::2], kept[1][::2]).within(1, math.inf)
    assert (first.prompts, first.conversations, first.identical) == (6, 6, 6)
    assert "6 conversations" in report_page.page(made, {})

"""Two drafts on the same prompts: figures by hand, verdicts, and what cannot be compared.

Run alone: python -m pytest tests/measure/test_comparison.py
"""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.decoding.config import DecodeConfig
from specdec.drafters.medusa import MedusaConfig
from specdec.errors import UserError
from specdec.measure.comparison import Comparison, compared
from specdec.measure.evaluation import Rival, Subject, evaluate
from specdec.measure.results import BatchTimes, PromptCounts, Results, Shift, split_rival
from specdec.progress import Terminal
from specdec.report.comparison_page import comparison_verdict, show_comparison, write_comparison
from specdec.targets.target import Target
from tests.measure import test_results
from tests.measure.test_results import at
from tests.tiny import lm, random_drafter

KEYS = ["k0", "k1", "k2", "k3"]
PROMPTS = [[5, 9, 7, 3], [8, 4], [6, 6, 9, 10, 11], [12, 5, 4], [7]]


def counts(emitted: int, steps: int, greedy: Sequence[float], positions: int = 10) -> PromptCounts:
    sampled = [x / 2 for x in greedy]
    return PromptCounts(emitted, steps, [positions] * len(greedy), sampled, [*greedy])


def batches(seconds: Sequence[float], prompts: int = 1) -> list[BatchTimes]:
    """Of 10 tokens and 5 steps each, plainly in 2 seconds."""
    return [BatchTimes(prompts, 10, 2.0, x, 5, x) for x in seconds]


def results(
    prompts: Sequence[PromptCounts], times: Sequence[BatchTimes], **changes: Any
) -> Results:
    """At T = 0 and T = 1, with the same counts."""
    whole = test_results.results()
    measured = [replace(one, prompts=[*prompts], times=[*times]) for one in whole.measured]
    known: dict[str, Any] = {"prompt_keys": KEYS[: len(prompts)], "target_fingerprint": "1a"}
    return replace(whole, measured=measured, **known | changes)


A = results(
    [counts(6, 4, [4, 2]), counts(8, 5, [5, 1]), counts(5, 5, [3, 0]), counts(9, 6, [6, 3])],
    batches([2.0, 1.0, 1.5, 2.5]),
)
B = results(
    [counts(7, 4, [5, 2]), counts(9, 5, [6, 2]), counts(7, 5, [5, 0]), counts(10, 6, [7, 4])],
    batches([1.0, 0.5, 0.75, 1.5]),
)


def test_figures_by_hand() -> None:
    """τ is 28/20 and 33/20. α at depth 0 is 18/40 and 23/40, half of that at T = 1. Everything was
    timed, so the speedups are 8 s over 7 s and over 3.75 s."""
    comparison = compared(A, B, ("a", "b"))
    assert [(way.title, way.temperature) for way in comparison.ways] == [
        ("chains", 0.0),
        ("chains", 1.0),
    ]
    greedy, sampled = comparison.ways
    tau, first, second, speedup = greedy.figures
    assert (tau.name, tau.a, tau.b, tau.counted) == ("τ", 1.4, 1.65, (20, 20))
    assert tau.difference.value == pytest.approx(0.25) and tau.prompts == 4
    assert tau.ratio.value == pytest.approx(1.65 / 1.4)
    assert 0 < tau.difference.low < 0.25 < tau.difference.high and tau.ratio.claims
    assert (first.name, first.a, first.b, first.counted) == (
        "α at depth 0",
        0.45,
        0.575,
        (40, 40),
    )
    assert (second.a, second.b) == (6 / 40, 8 / 40)
    assert (speedup.a, speedup.b) == (pytest.approx(8 / 7), pytest.approx(8 / 3.75))
    assert speedup.ratio.value == pytest.approx(7 / 3.75) and speedup.counted == (40, 40)
    assert sampled.figures[1].a == 0.225 and sampled.figures[1].b == 0.2875
    back = compared(B, A, ("b", "a")).ways[0].figures[0].difference
    assert (back.low, back.high) == pytest.approx((-tau.difference.high, -tau.difference.low))


def test_a_speedup_of_few_timed_prompts_takes_tokens_a_step_from_all() -> None:
    """Three of four prompts were timed: 28/20 tokens a step, 6/30 s a plain token, 15/4.5 steps a
    second; and 33/20 with 15/2.25."""
    some = [
        results(x.measured[0].prompts, batches(seconds))
        for x, seconds in ((A, [2.0, 1.0, 1.5]), (B, [1.0, 0.5, 0.75]))
    ]
    speedup = compared(some[0], some[1], ("a", "b")).ways[0].figures[-1]
    assert speedup.a == pytest.approx(28 / 20 * 6 / 30 * 15 / 4.5)
    assert speedup.b == pytest.approx(33 / 20 * 6 / 30 * 15 / 2.25)
    assert speedup.prompts == 3 and speedup.difference.claims


def test_only_shared_prompts_and_batches_count() -> None:
    """B was measured on the prompts k3, k1 and another, two of them timed together."""
    other = replace(
        B,
        prompt_keys=["k3", "k9", "k1"],
        measured=[
            replace(one, prompts=[one.prompts[i] for i in (3, 0, 1)], times=batches([1.0], 2))
            for one in B.measured
        ],
    )
    comparison = compared(A, other, ("a", "b"))
    tau = comparison.ways[0].figures[0]
    assert comparison.prompts == 2 and (tau.a, tau.b) == (17 / 11, 19 / 11)
    assert [one.name for one in comparison.ways[0].figures] == ["τ", "α at depth 0", "α at depth 1"]
    assert comparison.notes[:2] == [
        "a was also measured on 2 other prompts: they are ignored.",
        "b was also measured on 1 other prompts: they are ignored.",
    ]


def test_the_verdict_is_a_line() -> None:
    said = comparison_verdict(compared(A, B, ("a", "b")))
    assert "\n" not in said
    assert said.startswith("B accepts more at T = 0: τ +0.25 [+0.")
    assert "B is faster at T = 0: speedup × 1.87 [1." in said and said.endswith("(on 4 prompts).")
    back = comparison_verdict(compared(B, A, ("b", "a")))
    assert back.startswith("A accepts more at T = 0: τ -0.25 [-0.") and "A is faster" in back


def test_equal_drafts_show_no_difference() -> None:
    same = compared(A, A, ("a", "a"))
    for way in same.ways:
        assert all(x.difference.value == 0 and x.ratio.value == 1 for x in way.figures)
        assert not any(x.difference.claims or x.ratio.claims for x in way.figures)
    said = comparison_verdict(same)
    assert said.startswith("No difference in acceptance is shown at T = 0: τ +0.00, the same on")
    assert "accepts more" not in said and "is faster" not in said


def test_an_interval_around_nothing_shows_no_difference() -> None:
    mixed = [counts(7, 4, [5]), counts(7, 5, [5]), counts(6, 5, [3]), counts(8, 6, [6])]
    said = comparison_verdict(compared(A, results(mixed, []), ("a", "b")))
    assert said.startswith("No difference in acceptance is shown at T = 0: τ +0.00 [-0.")
    few = [replace(x, prompt_keys=["k0", "k1"]) for x in (A, B)]
    few = [
        replace(x, measured=[replace(m, prompts=m.prompts[:2], times=[]) for m in x.measured])
        for x in few
    ]
    said = comparison_verdict(compared(few[0], few[1], ("a", "b")))
    assert "τ +0.22, no interval (fewer than 3 prompts" in said


def test_what_differs_is_noted() -> None:
    other = replace(B, max_new_tokens=96, machine=replace(B.machine, threads=64))
    notes = " ".join(compared(A, other, ("a", "b")).notes)
    assert "max_new_tokens differs: 48 and 96." in notes and "The machines differ" in notes


def test_ways_pair_by_title_and_the_asked_ones_by_temperature() -> None:
    """A's chains are also its fastest; B drafted trees and has a fastest shape of its own."""

    def titled(of: Results, title: str, **way: Any) -> list[Any]:
        return [replace(x, way=replace(x.way, title=title, **way)) for x in of.measured]

    ours = replace(A, measured=[replace(x, fastest=True) for x in A.measured])
    theirs = replace(
        B, measured=[*titled(B, "trees", chain=False, tree="dynamic"), *titled(B, "fastest")]
    )
    titles = [(x.title, x.temperature) for x in compared(ours, theirs, ("a", "b")).ways]
    assert titles == [
        ("chains / trees", 0.0),
        ("chains / trees", 1.0),
        ("fastest", 0.0),
        ("fastest", 1.0),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_fingerprint": "2b"}, "a is for the target .* and b for another"),
        ({"prompt_keys": ["x", "y", "z", "w"]}, "measured on different prompts"),
        ({"prompt_keys": []}, "b has no figures by prompt"),
        ({"target_fingerprint": ""}, "b has no figures by prompt"),
        ({"shift": Shift("t", at(0.1), at(0.9))}, "b: this target was adapted along with"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_cannot_be_compared_is_told(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compared(A, replace(B, **change), ("a", "b"))


def test_other_temperatures_are_told() -> None:
    warm = replace(
        B, measured=[replace(x, way=replace(x.way, temperature=0.5)) for x in B.measured[:1]]
    )
    with pytest.raises(UserError, match=r"a was measured at T = 0 and T = 1 and b at T = 0\.5"):
        compared(A, warm, ("a", "b"))
    cut = [replace(x, way=replace(x.way, top_k=5)) for x in B.measured[1:]]
    with pytest.raises(UserError, match="b at T = 1, top_k=5: measure both at the same"):
        compared(A, replace(B, measured=cut), ("a", "b"))
    half = compared(A, replace(B, measured=[*B.measured[:1], *cut]), ("a", "b"))
    assert [way.temperature for way in half.ways] == [0.0]


def test_the_table_and_the_page_have_the_figures(tmp_path: Path) -> None:
    comparison = compared(A, B, ("runs/a*", "runs/b"))
    out = io.StringIO()
    show_comparison(comparison, Terminal(file=out, width=160))
    lines = out.getvalue().splitlines()
    at_zero = lines[[line.strip() for line in lines].index("chains, T = 0") :]
    row = next(line for line in at_zero if line.strip().startswith("α at depth 0"))
    assert "0.450" in row and "+0.125 [+0.0" in row and row.split()[-2:] == ["4", "40"]
    assert (
        out.getvalue().splitlines()[-1].startswith("B accepts more")
        or "B accepts" in out.getvalue()
    )
    page = write_comparison(tmp_path / "out", comparison).read_text()
    assert r"A is runs/a\*, B is runs/b" in page and "| chains, T = 0: τ | 1.40 | 1.65 |" in page
    assert "<table>" in (tmp_path / "out" / "compare.html").read_text()
    kept = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert kept["prompts"] == 4 and kept["ways"][0]["figures"][0]["b"] == 1.65


# Two drafts, measured in turn


def in_turn(target: Target, first: Any, second: Any, **settings: Any) -> tuple[Results, Results]:
    cfg = DecodeConfig(
        prompts=5, max_new_tokens=12, **{"temperatures": [0.0, 1.0], "gamma": 2} | settings
    )
    rival = Rival(second, replace(cfg, gamma=None))
    subject = Subject("run", target, first, "prompts", rival=rival)
    return split_rival(evaluate(subject, PROMPTS, cfg), second.config.name)


def test_two_drafts_measured_in_turn_are_measured_as_each_alone(target: Target) -> None:
    """Counts are those of each alone, plain seconds are shared, and results are read back."""
    head = random_drafter(MedusaConfig(depth=3, draft_vocab=None), target, 0.05)
    a, b = in_turn(target, head, lm(target))
    assert (a.drafter, b.drafter) == ("medusa", "lm")
    assert [x.way.title for x in (*a.measured, *b.measured)] == ["chains"] * 4
    assert a.prompt_keys == b.prompt_keys and len({*a.prompt_keys}) == 5
    cfg = DecodeConfig(prompts=5, max_new_tokens=12, temperatures=[0.0, 1.0], gamma=2)
    alone = evaluate(Subject("run", target, head, "prompts"), PROMPTS, cfg)
    for one, other in zip(a.measured, alone.measured, strict=True):
        assert one.prompts == other.prompts and one.forced == other.forced
    for one, other in zip(a.measured, b.measured, strict=True):
        assert [x.plain_seconds for x in one.times] == [x.plain_seconds for x in other.times]
        assert sum(x.prompts for x in one.times) == 5 and other.alpha.all.greedy
    comparison = compared(a, b, ("a", "b"))
    figures = {x.name: x for x in comparison.ways[0].figures}
    assert figures["τ"].b == pytest.approx(b.measured[0].tau.value)
    assert figures["speedup"].a == pytest.approx(a.measured[0].speedup.value)
    for k in range(2):
        alpha = a.measured[0].alpha.all.greedy[k].value
        assert figures[f"α at depth {k}"].a == pytest.approx(alpha)


def test_a_draft_accepts_as_much_as_itself(target: Target) -> None:
    head = random_drafter(MedusaConfig(depth=2, draft_vocab=None), target, 0.05)
    again = random_drafter(MedusaConfig(depth=2, draft_vocab=None), target, 0.05)
    comparison: Comparison = compared(*in_turn(target, head, again), ("a", "b"))
    for way in comparison.ways:
        for one in way.figures:
            if one.name != "speedup":  # by the clock
                assert one.a == one.b and one.difference.value == 0 and not one.difference.claims
    assert "No difference in acceptance is shown at T = 0" in comparison_verdict(comparison)


def test_few_timed_prompts_and_shapes_of_their_own(target: Target, tmp_path: Path) -> None:
    """Three prompts are timed; the fastest shapes take turns, too."""
    head = random_drafter(MedusaConfig(depth=2, draft_vocab=None), target, 0.05)
    a, b = in_turn(target, head, lm(target), timed=3, fastest=True)
    assert a.timed == 3 and all(len(x.times) == 3 and len(x.prompts) == 5 for x in a.measured)
    comparison = compared(a, b, ("a", "b"))
    speedup = comparison.ways[0].figure("speedup")
    assert speedup is not None and speedup.prompts == 3
    assert speedup.b == pytest.approx(b.measured[0].speedup.value)
    assert "fastest" in [way.title for way in comparison.ways] or all(
        x.fastest for x in (*a.asked, *b.asked)
    )
    a.write(tmp_path)
    assert Results.load(tmp_path) == a

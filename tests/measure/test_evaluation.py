"""Evaluation: counts that agree with each other, in batches too; what is chosen by temperature.

Run alone: python -m pytest tests/measure/test_evaluation.py
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import decode
from specdec.decoding.generation import Generation
from specdec.decoding.way import Way
from specdec.drafters import Drafter, with_copying
from specdec.drafters.lm import LMConfig
from specdec.drafters.medusa import MedusaConfig
from specdec.drafters.ngram import NgramConfig
from specdec.errors import UserError
from specdec.measure import choosing, setup
from specdec.measure import evaluation as module
from specdec.measure.costs import Costs
from specdec.measure.evaluation import Subject, evaluate
from specdec.measure.results import Results
from specdec.measure.setup import Setup
from specdec.ranks import Ranks
from specdec.report import report_page
from specdec.sampling.trees import Chain
from specdec.targets.target import Target
from specdec.theory.intervals import Interval
from tests.measure.test_results import terminal
from tests.ranks import together
from tests.tiny import architectures, lm, make_tokenizer, random_drafter, random_target

TOKENIZER = make_tokenizer()
PROMPTS = [[5, 9, 7, 3], [8, 4], [6, 6, 9, 10, 11], [12, 5, 4], [7]]
GREEDY = DecodeConfig(prompts=5, max_new_tokens=12, temperatures=[0.0])


def medusa(target: Target, depth: int = 2) -> Drafter:
    return random_drafter(MedusaConfig(depth=depth, draft_vocab=None), target, 0.05)


def measured(target: Target, drafter: Drafter, cfg: DecodeConfig, **options: Any) -> Results:
    return evaluate(Subject("run", target, drafter, "prompts"), PROMPTS, cfg, **options)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"batch": 2},
        {"max_new_tokens": 3},
        {"gamma": 1},
        {"draft_length": "confidence", "draft_length_settings": {"threshold": 0.2}},
    ],
    ids=str,
)
def test_visited_anchors_are_what_the_decoder_counts(
    target: Target, change: dict[str, Any]
) -> None:
    """The same speculation steps on both sides, cut ones too: equal, not close. The draft is the
    target with noise, so that steps accept any number of tokens."""
    (at,) = measured(target, lm(target), replace(GREEDY, **change)).asked
    visited = at.alpha.visited.greedy
    assert [x.value for x in visited] == [x.value for x in at.reached]
    assert {x.n for x in visited} == {at.speculation_steps} and at.identical == 5
    assert 0 < sum(at.accepted) < sum(at.drafted)
    steps = [(p.emitted, p.speculation_steps) for p in at.prompts]
    assert at.speculation_steps == sum(n for _, n in steps)
    assert at.tau.value == sum(emitted for emitted, _ in steps) / at.speculation_steps


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_walk_with_a_draft_that_is_the_target_commits_all(target: Target, gamma: int) -> None:
    """γ + 1 tokens a speculation step, at T = 0 and expected at T = 1: of 12 tokens, prefill emits
    one, and 6 steps of 2 tokens or 3 of 4 emit the other 11."""
    cfg = replace(GREEDY, temperatures=[0.0, 1.0], gamma=gamma)
    for at in measured(target, lm(target, 0.0), cfg).asked:
        for p in at.prompts:
            assert p.walked == pytest.approx((11, {1: 6, 3: 3}[gamma]), rel=1e-4)


@pytest.mark.parametrize("gamma", [2, 5])
def test_what_a_copying_draft_copies_depends_on_gamma(target: Target, gamma: int) -> None:
    """Prompt lookup prefers a place that γ tokens follow, so α is measured at that γ: made for
    5 tokens a speculation step, it is asked for 2 here, after prompts that repeat themselves."""
    copies = random_drafter(NgramConfig(depth=5), target, 0.0)
    prompts = [[5, 9, 7, 5, 9, 3, 8, 5, 9], [4, 6, 4, 6, 4], [11, 4, 11, 9, 11]]
    cfg = replace(GREEDY, prompts=3, max_new_tokens=60, temperatures=[0.0, 1.0], gamma=gamma)
    greedy, at = evaluate(Subject("run", target, copies, "prompts"), prompts, cfg).asked
    assert [x.value for x in greedy.alpha.visited.greedy] == [x.value for x in greedy.reached]
    assert sum(greedy.accepted) > 0 and len(greedy.alpha.all.greedy) == gamma
    assert at.foreseen is not None  # where nothing is copied, q has no mass, and D_LK is 1
    for d, alpha in zip(at.foreseen.divergence, at.alpha.all.sampled, strict=True):
        assert d.value == pytest.approx(1 - alpha.value, abs=1e-5)


def test_a_draft_of_fewer_positions_is_measured() -> None:
    """The first prompt takes all 16 of them and more; of the second, of 2 tokens, 14 tokens of the
    response remain, 11 of which three others follow. Speculation steps beyond them draft
    nothing."""
    short = random_target(architectures(len(TOKENIZER), 4, positions=16)["gpt2"])
    short.tokenizer = TOKENIZER
    drafter = random_drafter(LMConfig(depth=3, layers=[0, 1]), short, 0.0)
    with pytest.raises(Exception, match="16 positions"):
        evaluate(Subject("run", short, drafter, "prompts"), [PROMPTS[0] * 5], GREEDY)
    cfg = replace(GREEDY, max_new_tokens=14)
    (at,) = evaluate(Subject("run", short, drafter, "prompts"), [PROMPTS[1]], cfg).asked
    assert [x.n for x in at.alpha.all.greedy] == [11, 11, 11]
    assert [x.value for x in at.alpha.visited.greedy] == [x.value for x in at.reached]
    assert at.identical == 1


def test_counts_do_not_depend_on_the_batch(target: Target) -> None:
    """Of 5 prompts, in batches of 2, 2 and 1; random heads draft, so that speculation steps
    differ."""
    cfg = replace(GREEDY, temperatures=[0.0, 1.0])
    results = {b: measured(target, medusa(target), replace(cfg, batch=b)) for b in (1, 2)}
    for one, two in zip(*(results[b].asked for b in (1, 2)), strict=True):
        for key in (
            "tau",
            "speculation_steps",
            "accepted",
            "drafted",
            "accepted_lengths",
            "prompts",
            "alpha",
        ):
            assert getattr(one, key) == getattr(two, key), key
        assert 0 < sum(one.accepted) < sum(one.drafted)
    assert results[2].batch == 2 and "batch 2," in report_page.page(results[2], {})


def test_all_prompts_are_counted_and_the_first_are_timed(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 prompts, 2 are timed, one at a time, and the others decoded together: τ and all counts
    are those of each prompt alone. After the first prompt a plain token takes 2 s and a speculation
    step 3 s, after the second twice as long; the speedup takes the tokens of a step from all
    prompts."""

    def clocked(target: Target, prompts: Any, way: Way, **options: Any) -> list[Generation]:
        made = decode(target, prompts, way, **options)
        for g in made:
            seconds = 3.0 * len(g.steps) if way.drafter else 2.0 * (len(g.ids) - 1)
            g.seconds = seconds * (1 if g.prompt == PROMPTS[0] else 2)
        return made

    monkeypatch.setattr(setup, "decode", clocked)
    drafter, ends = lm(target), {"max_new_tokens": 12}
    cfg = replace(GREEDY, temperatures=[0.0, 1.0], timed=2)
    results = measured(target, drafter, cfg)
    assert (results.timed, results.prompts) == (2, 5)
    for at in results.asked:
        way = cfg.chains(drafter, at.way.temperature)
        alone, plain = (
            [decode(target, [p], each, seeds=[i * 1009], **ends)[0] for i, p in enumerate(PROMPTS)]
            for each in (way, way.plain)
        )
        steps = [r for g in alone for r in g.steps]
        assert at.speculation_steps == len(steps)
        assert at.tau.value == sum(len(g.ids) - 1 for g in alone) / len(steps)
        assert at.accepted_lengths == [sum(r.accepted == n for r in steps) for n in range(4)]
        assert at.accepted == [sum(r.accepted > k for r in steps) for k in range(3)]
        assert at.drafted == [sum(r.drafted > k for r in steps) for k in range(3)]
        assert [(p.emitted, p.speculation_steps) for p in at.prompts] == [
            (g.emitted, len(g.steps)) for g in alone
        ]
        kept = sum(len(g.ids) - 1 for g in alone)
        tokens, counts = ([len(g.ids) - 1 for g in plain[:2]], [len(g.steps) for g in alone[:2]])
        of_a_token = (2 * tokens[0] + 4 * tokens[1]) / sum(tokens)
        of_a_step = (3 * counts[0] + 6 * counts[1]) / sum(counts)
        in_a_step = kept / len(steps)
        assert at.speedup.value == pytest.approx(in_a_step * of_a_token / of_a_step)
        assert at.tokens_per_second.value == pytest.approx(in_a_step / of_a_step)
        assert at.plain_tokens_per_second.value == pytest.approx(1 / of_a_token)
        assert at.speedup.n == 5  # counts of so many prompts
        if at.way.temperature == 0:  # the same tokens, so the ratio of the seconds by hand
            seconds = 2 * tokens[0] + 4 * tokens[1], 3 * counts[0] + 6 * counts[1]
            assert at.timed_speedup.value == pytest.approx(seconds[0] / seconds[1])
            assert at.identical == 5
        assert at.timed_speedup.value != pytest.approx(at.speedup.value)


def test_where_all_prompts_are_timed_the_speedup_is_that_of_the_clock(target: Target) -> None:
    """A length policy learns from one response to the next, so that with one all are timed."""
    policy = {"draft_length": "confidence", "draft_length_settings": {"threshold": 0.2}}
    for change in ({}, {"timed": 5, "batch": 2}, {"timed": 1} | policy):
        results = measured(target, medusa(target), replace(GREEDY, **change))  # type: ignore[arg-type]
        (at,) = results.asked
        assert results.timed == results.prompts == 5
        assert at.speedup == at.timed_speedup


def test_a_lossy_method_is_called_so(target: Target) -> None:
    """Typical acceptance at T = 0 is greedy decoding; lenience is lossy at every temperature."""
    for verification, lossy in (("typical", [False, True]), ("lenience:factor=0.1", [True, True])):
        cfg = DecodeConfig(prompts=3, max_new_tokens=8, verification=verification)
        results = measured(target, medusa(target), cfg)
        at = results.asked
        assert [not t.way.lossless for t in at] == lossy
        assert (
            at[0].way.verification == (verification if lossy[0] else "greedy")
            and at[1].way.verification == verification
        )
        text = report_page.page(results, {})
        assert text.count("LOSSY") == sum(lossy)
        assert (f"({verification} is lossy)" in text) == lossy[0]


def test_a_static_tree_is_chosen_at_each_temperature(target: Target) -> None:
    """What was learned stands at each temperature: acceptance at T = 1 is not the greedy one."""
    cfg = DecodeConfig(prompts=2, max_new_tokens=9, tree="static", nodes=4, batch=2)
    results = measured(target, lm(target), cfg)
    greedy, sampled = results.asked
    for at in (greedy, sampled):
        assert at.learned.paths and len(at.learned.paths) == at.way.nodes == 4
        assert not at.way.chain
    assert greedy.learned.acceptance_by_rank != sampled.learned.acceptance_by_rank
    text = report_page.page(results, {})
    for at in (greedy, sampled):
        assert f"chosen for T = {at.way.temperature:g} on 3 other prompts" in text
    assert "Theorem 3.8" not in text and greedy.identical == 2


@pytest.mark.parametrize("tree", [True, False])
def test_the_fastest_shape_takes_turns_with_chains_and_a_hybrid(
    target: Target, monkeypatch: pytest.MonkeyPatch, tree: bool
) -> None:
    """The speculation steps of a tree are said to take as long as those of chains, so that the
    largest tree commits the most, or far longer, so that chains are fastest."""

    def times(_: Any, ways: Sequence[Way], __: Any) -> list[float]:
        return [1.0 if tree or isinstance(way.shape, Chain) else 99.0 for way in ways]

    monkeypatch.setattr(choosing, "steps_in_turn", times)
    cfg = DecodeConfig(prompts=2, max_new_tokens=9, gamma=2, fastest=True)
    head = lm(target)
    subject = Subject("run", target, head, "prompts", with_copying(head, "ngram", target, 2))
    results = evaluate(subject, PROMPTS, cfg)
    if not tree:  # chains of 2, which were asked for: measured and listed once
        assert list(results.ways) == ["chains", "hybrid"]
        assert all(at.fastest and at.way.gamma == 2 for at in results.asked)
        assert "chains of γ = 2, also the topology expected to be" in report_page.page(results, {})
        return
    fastest, chain = results.ways["fastest"], results.asked
    assert not any(at.fastest for at in chain)
    assert list(results.others) == ["fastest", "hybrid"]
    assert list(results.ways) == ["chains", "fastest", "hybrid"]
    assert [of[0].way.drafter for of in results.ways.values()] == ["lm", "lm", "hybrid"]
    for i, at in enumerate(fastest):
        assert not at.way.chain and at.learned.paths
        assert len(at.learned.paths) == at.way.nodes
        assert chain[i].way.chain and chain[i].way.gamma == 2 and not chain[i].learned.paths
        assert at.plain_tokens_per_second == chain[i].plain_tokens_per_second
    assert [of[0].identical for of in results.ways.values()] == [2, 2, 2]
    tau = fastest[0].tau
    assert results.headline()["fastest/T0/tau"] == tau.value
    page = report_page.page(results, {})
    assert "## In the shape expected to be fastest" in page and "## Hybrid" in page
    assert tau.text() in page
    assert " a tree of 6 tokens" in terminal(results).splitlines()[4]  # the second way, at T = 0


@pytest.mark.parametrize(
    "settings",
    [
        {"tree": "dynamic"},
        {"draft_length": "confidence"},
        {"draft_length_settings": {"limit": 1}},
        {"verification": "block"},
    ],
    ids=str,
)
def test_the_fastest_shape_is_measured_beside_chains_alone(settings: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"decode\.(fastest=true compares|verification=block judges)"
    ):
        DecodeConfig(fastest=True, **settings)


def test_no_tree_is_chosen_for_a_draft_that_copies(target: Target) -> None:
    copies = random_drafter(NgramConfig(), target, 0.0)
    with pytest.raises(UserError, match=r"give decode\.fastest=false"):
        measured(target, copies, replace(GREEDY, fastest=True))


def test_a_choice_takes_no_more_passes_than_a_plan_counts(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, passes, step = replace(GREEDY, gamma=2, tree="static"), [0], type(target).step

    def counted(self: Target, *args: Any, **options: Any) -> Any:
        passes[0] += 1
        return step(self, *args, **options)

    monkeypatch.setattr(type(target), "step", counted)
    prompts = [[5, 9, 7]] * choosing.LEARNING
    choosing.chosen(Setup.from_config(target, cfg), cfg, lm(target), 0.0, prompts)
    # the draft is nearly the target, so a pass commits up to 3 tokens; a plan counts one of each
    assert 1 / 3 < passes[0] / choosing.steps_of_a_choice(cfg, 2) <= 1


def test_a_stop_classifier_is_fitted_at_each_temperature(target: Target) -> None:
    cfg = DecodeConfig(prompts=2, max_new_tokens=24, draft_length="disco")
    greedy, sampled = measured(target, lm(target), cfg).asked
    fitted = [at.learned.figures for at in (greedy, sampled)]
    assert all(file and file.stem == "stop-classifier" for file in fitted)
    first, second = (json.loads(file.contents)["weight"] for file in fitted if file)
    assert first != second


def test_what_p_and_q_say_of_a_sampled_chain(target: Target) -> None:
    """D_LK is 1 - α, computed apart from it; block expects at least what rejection does, and both
    lie between one token and γ + 1; a more lenient verification method accepts more, over all
    positions and at visited anchors; non-iterative rejection accepts less."""
    greedy, at = measured(target, lm(target), replace(GREEDY, temperatures=[0.0, 1.0])).asked
    assert greedy.foreseen is None and at.foreseen is not None
    for d, alpha in zip(at.foreseen.divergence, at.alpha.all.sampled, strict=True):
        assert d.value == pytest.approx(1 - alpha.value, abs=1e-5) and d.n == alpha.n
    block, rejection = at.foreseen.block_tokens, at.foreseen.rejection_tokens
    assert 1 < rejection.value <= block.value < 4 and block.n == rejection.n > 0
    rising = [x.alpha.value for x in at.foreseen.lenience]
    visited = [x.visited.value for x in at.foreseen.lenience if x.visited]
    for found, alpha in ((rising, at.alpha.all), (visited, at.alpha.visited)):
        assert found == sorted(found) and len(found) == 4 and found[0] < found[-1]
        assert found[0] == pytest.approx(alpha.sampled[0].value, abs=1e-5)
    assert visited != rising
    assert at.foreseen.non_iterative and 0 < at.foreseen.non_iterative.value < rising[0]


def test_the_operations_of_a_step_are_those_of_its_products(target: Target) -> None:
    """They are twice the weights of all linear layers and the head and, where torch counts them
    (not on CPUs), the products of attention: 2 · 2 · 8 in each of 4 layers and 4 heads, for the
    anchor and each token of the prompt. If the draft is the target, ĉ is 1."""
    results = measured(target, lm(target, 0.0), replace(GREEDY, gamma=1))
    linears = [m for m in target.model.modules() if isinstance(m, torch.nn.Linear)]
    weights = sum(m.weight.numel() for m in linears)
    attended = 4 * 4 * 2 * 2 * 8 * (len(PROMPTS[0]) + 1)
    assert 2 * weights <= results.target_operations <= 2 * weights + attended
    assert results.asked[0].operations == pytest.approx(1, abs=0.02)


def test_a_copying_draft_that_is_the_target_is_foreseen_whole(target: Target) -> None:
    """Of a draft that is the target, s = 1 everywhere: γ + 1 tokens by either verification method,
    and D_LK 0. Three speculation steps emit the 11 tokens after the first; the twelfth lies beyond
    the end. A response may end earlier with a drawn end token."""
    (at,) = measured(target, lm(target, 0.0), replace(GREEDY, temperatures=[1.0])).asked
    assert all(one.speculation_steps == math.ceil(one.emitted / 4) for one in at.prompts)
    emitted, steps = (
        sum(getattr(x, of) for x in at.prompts) for of in ("emitted", "speculation_steps")
    )
    assert [one.emitted for one in at.prompts].count(11) >= 4
    assert at.foreseen is not None and at.tau.value == emitted / steps
    assert at.foreseen.block_tokens.value == pytest.approx(4, abs=1e-4)
    assert at.foreseen.rejection_tokens.value == pytest.approx(4, abs=1e-3)
    assert at.foreseen.divergence[2].value == pytest.approx(0, abs=1e-5)
    assert at.foreseen.non_iterative and at.foreseen.non_iterative.value > 0.99


def test_the_oracle_sees_long_steps_and_uses_v(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """γ = 1 is measured, eight tokens a speculation step are asked of the oracle. A verification
    that costs three steps makes it slower than one that costs one."""

    def bound(v: float) -> float:
        def costs(*_: Any, **__: Any) -> Costs:
            return Costs(*(Interval(x, x, x, 1) for x in (1.0, v, 0.1, 0.1, v)))

        monkeypatch.setattr(module, "costs", costs)
        (at,) = measured(target, lm(target), replace(GREEDY, gamma=1)).asked
        assert at.oracle is not None and at.oracle.drafted == 8 and at.oracle.speculation_steps > 0
        return at.oracle.speedup

    assert bound(3.0) < bound(1.0)


def test_costs_and_seconds_are_those_of_the_batch(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch counts once, by its slowest row; c and v are measured on as many rows."""
    asked: list[int] = []
    measure, decode = module.costs, setup.decode

    def costs(what: setup.Setup, *args: Any) -> Costs:
        asked.append(what.batch)
        return measure(what, *args)

    def timed(target: Target, prompts: Any, way: Way, **options: Any) -> list[Generation]:
        made = decode(target, prompts, way, **options)
        for i, g in enumerate(made):
            g.seconds = (1 + i) * (0.5 if way.drafter else 1.0)
        return made

    monkeypatch.setattr(module, "costs", costs)
    monkeypatch.setattr(setup, "decode", timed)
    cfg = DecodeConfig(batch=2, prompts=4, max_new_tokens=9, temperatures=[0.0])
    (at,) = measured(target, medusa(target), cfg).asked
    assert asked == [2]
    assert at.speedup.value == pytest.approx(2.0)
    assert at.plain_tokens_per_second.value == pytest.approx(2 * 8 / 2)


def test_samples_show_what_the_user_said(target: Target, tmp_path: Path) -> None:
    cfg = replace(GREEDY, prompts=2)
    turns = [("user", "It is so."), ("assistant", "Indeed.")]
    results = measured(target, medusa(target), cfg, words=["Why?", "How?"], earlier=[turns, []])
    (at,) = results.asked
    assert [(s.prompt, s.earlier) for s in at.samples] == [("Why?", turns), ("How?", [])]
    results.write(tmp_path)
    for sample in at.samples:
        shown = [text for kind, text in sample.pieces if kind != "rejected"]
        assert "".join(shown) == sample.response
    assert Results.load(tmp_path).asked[0].samples == at.samples


# Several processes


BY_THE_CLOCK = {
    "speedup",
    "timed_speedup",
    "times",
    "tokens_per_second",
    "plain_tokens_per_second",
    "costs",
    "oracle",
}
BY_THE_CLOCK |= {"seconds_spent", "processes"}


def test_a_single_timed_batch_gives_no_interval_to_a_speedup(target: Target) -> None:
    """Though τ, which all prompts are counted for, has one."""
    results = measured(target, lm(target), replace(GREEDY, timed=1))
    (at,) = results.asked
    assert at.speedup.low == at.speedup.value == at.speedup.high > 0
    assert at.tokens_per_second.low == at.tokens_per_second.high
    assert at.tau.low < at.tau.high
    assert results.times_without_interval == "timed on 1 prompt: no interval"


def test_a_batch_that_does_not_fit_is_counted_in_halves(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same counts as one that does. An error that is not about memory passes."""
    cfg, sizes = replace(GREEDY, timed=1, counting=4), list[int]()
    whole, responses = measured(target, lm(target), cfg), Setup.responses
    errors = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("a shape is wrong")]

    def narrow(setup: Setup, prompts: Any, way: Way, **options: Any) -> list[Generation]:
        sizes.append(len(prompts))
        if len(prompts) > 2:
            raise errors[0]
        return responses(setup, prompts, way, **options)

    monkeypatch.setattr(Setup, "responses", narrow)
    halves = measured(target, lm(target), cfg)
    assert {4, 2} < {*sizes} | {1}
    assert counted(asdict(halves)) == counted(asdict(whole))
    errors.pop(0)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        measured(target, lm(target), cfg)


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        ({}, 12),
        ({"timed": 1}, 1),
        ({"prompts": 5}, 5),
        ({"batch": 8}, 24),
        ({"batch": 16}, 48),
        ({"batch": 16, "prompts": 20}, 20),
        ({"draft_length": "goodput"}, 100),
    ],
    ids=str,
)
def test_whole_batches_are_timed_and_at_least_three(settings: dict[str, Any], times: int) -> None:
    """A single batch shows no variation; with a length policy all prompts are timed."""
    assert DecodeConfig(**settings).timed_prompts == times


def counted(value: Any) -> Any:
    """Results without what depends on a clock."""
    if isinstance(value, dict):
        return {k: counted(x) for k, x in value.items() if k not in BY_THE_CLOCK}
    return [counted(x) for x in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("world", "change", "timed", "others"),
    [
        (2, {"timed": 3}, 3, True),
        (2, {"batch": 2, "repeats": 2, "counting": 32}, 5, False),  # three batches
        (2, {"draft_length": "confidence", "draft_length_settings": {"threshold": 0.2}}, 5, False),
        (3, {"tree": "static", "nodes": 3}, 1, True),
        (6, {"timed": 2}, 2, True),  # of the 6, some have no prompt to answer
    ],
    ids=str,
)
def test_processes_count_together_what_one_counts(
    monkeypatch: pytest.MonkeyPatch, world: int, change: dict[str, Any], timed: int, others: bool
) -> None:
    """All have the same results, whose counts, texts and intervals are those of one process. Only
    the first times, and while it does so, no other one decodes; `others` do afterwards."""
    cfg = replace(GREEDY, **{"temperatures": [0.0, 1.0], "timed": 1, "counting": 1} | change)
    targets = [random_target(architectures(61, 2)["llama"]) for _ in range(world)]
    for target in targets:
        target.tokenizer = TOKENIZER
    drafts = [medusa(target) for target in targets]
    alone = counted(asdict(measured(targets[0], drafts[0], cfg)))
    decoding, responses, first = [0] * world, Setup.responses, Ranks.first

    def seen(setup: Setup, *args: Any, **options: Any) -> list[Generation]:
        decoding[setup.ranks.rank] += 1
        return responses(setup, *args, **options)

    def watched(ranks: Ranks, work: Any) -> Any:
        def only() -> Any:
            assert ranks.rank == 0
            before = decoding[1:]
            made = work()
            assert decoding[1:] == before
            return made

        return first(ranks, only)

    monkeypatch.setattr(Setup, "responses", seen)
    monkeypatch.setattr(Ranks, "first", watched)
    ends = together(
        monkeypatch, world, lambda us: measured(targets[us.rank], drafts[us.rank], cfg, ranks=us)
    )
    for results in ends:
        assert isinstance(results, Results), results
        assert counted(asdict(results)) == alone
        assert (results.timed, results.processes) == (timed, world)
    assert f"times are those of the first process on the first {timed} prompts" in report_page.page(
        ends[0], {}
    )
    assert any(decoding[1:]) == others

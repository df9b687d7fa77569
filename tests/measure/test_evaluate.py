"""Evaluation in batches: the counts of one prompt at a time, the seconds of whole batches.

Run alone: python -m pytest tests/measure/test_evaluate.py
"""

from dataclasses import replace
from typing import Any

import pytest

from specdec.decoding.config import DecodeConfig
from specdec.drafters import Drafter
from specdec.drafters.models.lm import LMConfig
from specdec.drafters.parallel.medusa import MedusaConfig
from specdec.measure import evaluate as module
from specdec.measure.evaluate import evaluate
from specdec.report import report
from specdec.target.base import Target
from tests.tiny import architectures, make_tokenizer, random_drafter, random_target

TOKENIZER = make_tokenizer()
RUN: dict[str, Any] = {"name": "run", "drafter": {"name": "medusa"}, "target": "tiny"}
RUN |= {"data": "prompts", "training": None}

PROMPTS = [[5, 9, 7, 3], [8, 4], [6, 6, 9, 10, 11], [12, 5, 4], [7]]


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(architectures(len(TOKENIZER), 4)["llama"])
    target.tokenizer = TOKENIZER
    return target


def medusa(target: Target) -> Drafter:
    return random_drafter(MedusaConfig(depth=2, draft_vocab=None), target, 0.05)


def test_counts_do_not_depend_on_the_batch(target: Target) -> None:
    """Of 5 prompts, in batches of 2, 2 and 1; random heads draft, so that rounds differ."""
    drafter = medusa(target)
    results = {
        batch: evaluate(
            target, drafter, PROMPTS, DecodeConfig(batch=batch, prompts=5, max_new_tokens=12)
        )
        for batch in (1, 2)
    }
    for one, two in zip(*(results[b]["temperatures"] for b in (1, 2)), strict=True):
        for key in ("tau", "rounds", "accepted", "drafted", "accepted_lengths", "identical"):
            assert one[key] == two[key], key
        assert 0 < sum(one["accepted"]) < sum(one["drafted"])
    assert results[2]["batch"] == 2
    assert "batch 2," in report.markdown(results[2] | RUN, {})


def test_a_lossy_rule_is_called_so(target: Target) -> None:
    """Typical acceptance at T = 0 is greedy decoding; lenience is lossy at every temperature."""
    for rule, lossy in (("typical", [False, True]), ("lenience:factor=0.1", [True, True])):
        cfg = DecodeConfig(prompts=3, max_new_tokens=8, rule=rule)
        results = evaluate(target, medusa(target), PROMPTS, cfg)
        at = results["temperatures"]
        assert [not t["lossless"] for t in at] == lossy
        assert at[0]["rule"] == (rule if lossy[0] else "greedy") and at[1]["rule"] == rule
        text = report.markdown(results | RUN, {})
        assert text.count("LOSSY") == sum(lossy)
        assert (f"({rule} is lossy)" in text) == lossy[0]


def test_a_draft_of_fewer_positions_is_measured(target: Target) -> None:
    """The first prompt takes all 16 of them and more; of the second, of 2 tokens, 14 tokens of the
    answer remain, 11 of which three others follow."""
    short = random_target(architectures(len(TOKENIZER), 4, positions=16)["gpt2"])
    drafter = random_drafter(LMConfig(depth=3, layers=[0, 1]), short, 0.0)
    cfg = DecodeConfig(prompts=2, max_new_tokens=20)
    results = evaluate(target, drafter, [PROMPTS[0] * 5, PROMPTS[1]], cfg)
    for at in results["temperatures"]:
        assert [x["n"] for x in at["alpha"]["all"]["greedy"]] == [11, 11, 11]
    assert results["temperatures"][0]["identical"] == 2


def test_what_the_decoder_counts_is_claimed_of_fixed_chains_only(target: Target) -> None:
    cfg = DecodeConfig(prompts=1, max_new_tokens=8, temperatures=[0.0])
    results = evaluate(target, medusa(target), PROMPTS, cfg) | RUN
    for change, counted in (({}, 1), ({"tree": "dynamic"}, 0), ({"length": "confidence"}, 0)):
        text = report.markdown(results | change, {})
        assert text.count("at T = 0 it is what the decoder counts") == counted
        assert text.count("whose every round drafts a chain of 2") == 1 - counted
    lossy = replace(cfg, rule="lenience:factor=0.1")
    text = report.markdown(evaluate(target, medusa(target), PROMPTS, lossy) | RUN, {})
    assert "of a lossless decoder whose every round drafts" in text
    shorter = evaluate(target, medusa(target), PROMPTS, replace(cfg, settings={"limit": 1}))
    assert (
        shorter["gamma"] == 1 and len(shorter["temperatures"][0]["alpha"]["visited"]["greedy"]) == 1
    )


def test_a_static_tree_is_chosen_by_measuring_and_reported(target: Target) -> None:
    cfg = DecodeConfig(prompts=2, max_new_tokens=9, temperatures=[0.0], tree="static", batch=2)
    results = evaluate(target, medusa(target), PROMPTS, cfg) | RUN
    paths = results["notes"]["paths"]
    assert len(paths) == results["nodes"] and results["temperatures"][0]["identical"] == 2
    others = f"The tree was chosen on {len(PROMPTS) - 2} other prompts: {paths}."
    assert others in report.markdown(results, {})


def test_costs_and_seconds_are_those_of_the_batch(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch counts once, by its slowest row; c and v are measured on as many rows."""
    asked: list[int] = []
    measure, decode = module.costs, module.decode

    def costs(*args: Any, **options: Any) -> dict[str, float]:
        asked.append(options["batch"])
        return measure(*args, **options)

    def timed(*args: Any, **options: Any) -> Any:
        made = decode(*args, **options)
        for i, g in enumerate(made):
            g.seconds = (1 + i) * (0.5 if "drafter" in options else 1.0)
        return made

    monkeypatch.setattr(module, "costs", costs)
    monkeypatch.setattr(module, "decode", timed)
    cfg = DecodeConfig(batch=2, prompts=4, max_new_tokens=9, temperatures=[0.0])
    results = evaluate(target, medusa(target), PROMPTS, cfg)
    assert asked == [2]
    (at,) = results["temperatures"]
    assert at["speedup"]["value"] == pytest.approx(2.0)
    assert at["plain_tokens_per_second"]["value"] == pytest.approx(2 * 8 / 2)

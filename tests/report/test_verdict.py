"""What to serve, from results whose figures are set by hand.

Run alone: python -m pytest tests/report/test_verdict.py
"""

from dataclasses import replace
from typing import Any

import pytest

from specdec.drafters import DRAFTERS
from specdec.formats.draft_export import LAYOUTS
from specdec.measure.results import Measured, Results, Shift
from specdec.report import verdict
from specdec.targets.prompt_rendering import PromptRendering
from specdec.theory.intervals import Interval
from tests.measure.test_results import results as measured

Speedup = tuple[float, float, float]  # the value and its interval
GAIN, MORE, NONE = (1.2, 1.12, 1.29), (1.6, 1.39, 1.9), (1.05, 0.97, 1.1)
LESS = (0.5, 0.4, 0.6)


def at(speedup: Speedup, t: float = 0.0, title: str = "chains", **way: Any) -> Measured:
    """The figures of one way at a temperature, with this speedup."""
    like = measured().asked[int(t > 0)]
    described = replace(like.way, title=title, temperature=t, **way)
    speed = Interval(*speedup, 900)
    learned = replace(like.learned, paths=None)
    return replace(like, way=described, speedup=speed, timed_speedup=speed, learned=learned)


def hybrid(speedup: Speedup, t: float = 0.0) -> Measured:
    return at(speedup, t, "hybrid", drafter="hybrid", gamma=8, nodes=8)


def tree(speedup: Speedup, t: float = 0.0) -> Measured:
    shape: dict[str, Any] = {"chain": False, "tree": "static", "nodes": 3, "gamma": 2}
    return at(speedup, t, "fastest", paths=[[0], [1], [0, 0]], **shape)


def of(*ats: Measured, **more: Any) -> Results:
    folders = {"draft": "runs/run/best", "combined": "runs/run/with-suffix"}
    return replace(measured(), measured=list(ats), **(folders | more))


def lines(results: Results) -> list[str]:
    return [line for command in verdict.commands(results) for line in command.lines]


def test_the_fastest_that_gains_is_served_at_each_temperature() -> None:
    results = of(
        *(at(GAIN), at(GAIN, 1.0), tree((1.3, 1.19, 1.43)), tree(NONE, 1.0)),
        *(hybrid(MORE), hybrid((1.9, 0.9, 2.5), 1.0)),  # faster, but perhaps slower than plain
    )
    said = (
        "Serve it with the hybrid at T = 0: 1.60 times as fast [1.39, 1.90]; with chains of 2 "
        "tokens at T = 1: 1.20 times as fast [1.12, 1.29] (measured one prompt at a time)."
    )
    assert verdict.sentence(results) == said
    assert [c.served.way.title for c in verdict.choices(results) if c.served] == [
        "hybrid",
        "chains",
    ]


def test_one_way_at_two_temperatures_is_named_once() -> None:
    results = of(at(MORE), at(GAIN, 1.0), batch=4, timed=0)
    assert verdict.sentence(results) == (
        "Serve it with chains of 2 tokens: 1.60 times as fast [1.39, 1.90] at T = 0, 1.20 times "
        "as fast [1.12, 1.29] at T = 1 (measured at batch 4)."
    )


def test_a_temperature_at_which_nothing_is_gained_says_so() -> None:
    said = verdict.sentence(of(tree(GAIN), tree(LESS, 1.0)))
    assert said == (
        "Serve it with a tree of 3 tokens at T = 0: 1.20 times as fast [1.12, 1.29]; at T = 1 "
        "nothing is gained (measured one prompt at a time)."
    )


def test_an_interval_that_contains_1_shows_neither_a_gain_nor_a_loss() -> None:
    """1 within the interval, or at its lower end."""
    for open_, times in (
        (NONE, "1.05 times as fast [0.97, 1.10]"),
        ((1.1, 1.0, 1.2), "1.10 times"),
    ):
        said = verdict.sentence(of(tree(GAIN), tree(open_, 1.0)))
        assert f"; at T = 1 no gain is shown (a tree of 3 tokens: {times}" in said
        assert "nothing is gained" not in said


def test_where_nothing_is_gained_the_target_is_served_alone() -> None:
    results = of(at(LESS), at(LESS, 1.0), hybrid(LESS), hybrid(LESS, 1.0))
    said = "Serve the target alone: at T = 0 and T = 1 nothing is gained (measured one prompt at"
    assert verdict.sentence(results).startswith(said)
    assert not any(choice.served for choice in verdict.choices(results))
    assert not any("generate" in line for line in lines(results))
    undecided = verdict.sentence(of(at(NONE), hybrid(LESS)))
    assert undecided.startswith("Serve the target alone: at T = 0 no gain is shown (chains of 2")


def test_one_way_in_two_measurements_is_told_by_the_one_that_was_asked_for() -> None:
    """Results of earlier versions measured a way twice where it was also the fastest; the line
    about vLLM then took the luckier, later one."""
    twice = of(at((1.01, 0.95, 1.08)), at((1.3, 1.2, 1.4), title="fastest"))
    vllm, _ = verdict.commands(twice)[-2:]
    assert "chains of 2 are 1.01 times as fast [0.95, 1.08] at T = 0)" in vllm.does


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompts": 1}, "measured on 1 prompt: no interval"),
        ({"prompts": 2}, "measured on 2 prompts: no interval"),
        ({"timed": 2, "prompts": 9}, "timed on 2 prompts: no interval"),
        ({"batch": 4, "timed": 4, "prompts": 9}, "timed on 1 batch of 4 prompts: no interval"),
        ({"batch": 4, "timed": 8, "prompts": 9}, "timed on 2 batches of 4 prompts: no interval"),
        ({}, "no interval"),
    ],
    ids=str,
)
def test_without_an_interval_nothing_is_claimed(change: dict[str, Any], why: str) -> None:
    results = of(at((1.6, 1.6, 1.6)), **change)
    said = verdict.sentence(results)
    assert said == f"Nothing can be claimed at T = 0 ({why})."
    assert not any("generate" in line for line in lines(results))


def test_a_lossy_method_is_named_with_the_gain() -> None:
    lossy = at(MORE, 1.0, verification="typical", asked="typical", lossless=False)
    results = of(at(GAIN), lossy)
    said = " Verification by typical is lossy: responses at T = 1 are not the target's own."
    assert verdict.sentence(results).endswith(said)
    assert "lossy" not in verdict.sentence(of(at(GAIN), replace(lossy, speedup=at(NONE).speedup)))
    (own,) = (line for line in lines(of(lossy)) if "generate" in line)
    assert (
        own
        == "scripts/generate runs/run/best --chat --gamma 2 --temperature 1 --verification typical"
    )


def test_an_adapted_target_is_named_with_the_gain() -> None:
    kl, same = Interval(0.01, 0.0, 0.02, 9), Interval(0.93, 0.9, 0.96, 9)
    results = of(at(GAIN), shift=Shift("the original", kl, same))
    said = verdict.sentence(results)
    assert said.endswith(
        "along with the draft: 93% of the original's greedy responses stay the same."
    )


def test_a_draft_that_copies_is_served_by_our_decoder() -> None:
    """No engine loads it from a file, so no command of an engine is given."""
    results = of(at(GAIN, drafter="ngram"), drafter="ngram")
    assert "with chains of 2 tokens at T = 0: 1.20" in verdict.sentence(results)
    assert lines(results) == ["scripts/generate runs/run/best --chat --gamma 2"]


def test_commands_decode_as_was_measured() -> None:
    """The hybrid from its own folder, a tree by its paths; an engine drafts the chains."""
    results = of(at(GAIN), at(GAIN, 1.0), hybrid(MORE), tree(MORE, 1.0))
    hybrids, trees, vllm, llama_cpp = verdict.commands(results)
    assert hybrids.lines == ("scripts/generate runs/run/with-suffix --chat",)
    assert trees.lines == (
        "scripts/generate runs/run/best --chat --tree static --paths '[[0],[1],[0,0]]' "
        "--temperature 1",
    )
    assert "chains of 2 are 1.20 times as fast [1.12, 1.29] at T = 0, 1.20 times" in vllm.does
    assert vllm.lines == (
        "scripts/export runs/run/best --to my-head --with-target my-target",
        "vllm serve my-target --speculative-config \\",
        '  \'{"method": "eagle3", "model": "my-head", "num_speculative_tokens": 2}\'',
    )
    assert llama_cpp.lines == (
        "scripts/export runs/run/best --to my-head.gguf",
        "llama-server --model my-target.gguf \\",
        "  --model-draft my-head.gguf --spec-type draft-eagle3 --spec-draft-n-max 2 "
        "--spec-draft-n-min 0 --spec-draft-p-min 0",
    )
    options = at(GAIN, 0.7, top_k=5, top_p=0.9, greedy_draft=True, compiled=True)
    assert lines(of(options))[0].endswith(
        "--gamma 2 --temperature 0.7 --top-k 5 --top-p 0.9 --greedy-draft --compile"
    )


def test_an_engine_that_would_not_load_the_export_is_not_recommended() -> None:
    rejected = of(at(GAIN), rejected_layouts={"gguf": "train with drafter.fc_norm=false"})
    assert not any("llama" in line for line in lines(rejected))
    assert any("vllm serve" in line for line in lines(rejected))


def test_an_own_chat_template_goes_with_every_engine() -> None:
    """The export for vLLM has the file; a GGUF file has none beside it, but the run has."""
    own = of(at(GAIN), rendering=PromptRendering({}, "{{ messages }}"))
    assert any("--chat-template my-head/chat_template.jinja" in line for line in lines(own))
    assert any("--chat-template-file runs/run/chat_template.jinja" in x for x in lines(own))


def test_an_engine_drafts_the_chains_that_were_fastest() -> None:
    """Here chains of 1; a temperature at which two ways drafted them is named once."""
    short = at(MORE, title="fastest", gamma=1, nodes=1)
    (*_, vllm, _), also = verdict.commands(of(at(GAIN), short)), replace(short, way=at(MORE).way)
    assert vllm.lines[-1].endswith('"num_speculative_tokens": 1}\'')
    assert "(here, chains of 1 are 1.60 times as fast [1.39, 1.90] at T = 0):" in vllm.does
    assert verdict.commands(of(at(GAIN), also))[-1].does.count("at T = 0") == 1


@pytest.mark.parametrize(
    ("way", "options"),
    [
        (
            {"chain": False, "tree": "dynamic", "nodes": 12, "branches": 3},
            "--tree dynamic --gamma 2 --nodes 12 --branches 3",
        ),
        (
            {"draft_length": "confidence", "draft_length_settings": {"threshold": 0.3}},
            "--gamma 2 --draft-length confidence --draft-length-settings threshold=0.3",
        ),
    ],
    ids=str,
)
def test_a_shape_of_which_an_engine_knows_nothing_has_our_command(
    way: dict[str, Any], options: str
) -> None:
    own, *engines = lines(of(at(GAIN, **way)))
    assert own == f"scripts/generate runs/run/best --chat {options}" and not engines


def test_a_draft_that_is_nowhere_has_no_commands() -> None:
    assert verdict.commands(of(at(GAIN), draft="")) == []


METHODS_OF_VLLM = {name: name for name in ("eagle", "eagle3", "medusa", "mtp", "dflash")}
METHODS_OF_VLLM |= {"peagle": "eagle3", "jetspec": "dflash", "lm": "draft_model"}


@pytest.mark.parametrize("family", sorted(DRAFTERS))
def test_each_family_is_served_in_vllm_as_its_export_says(family: str) -> None:
    results = of(at(GAIN, drafter=family), drafter=family)
    layout = LAYOUTS.get((family, "hf"))
    served = [c.lines for c in verdict.commands(results) if "vllm serve" in "".join(c.lines)]
    assert len(served) == (family in METHODS_OF_VLLM)
    for line in map("".join, served):
        assert layout is not None and f'"method": "{METHODS_OF_VLLM[family]}"' in line
        assert ('"parallel_drafting": true' in line) == (family == "peagle")
        assert ("--hf-overrides" in line) == (layout.overrides is not None)
    served = [c.lines for c in verdict.commands(results) if "llama-server" in "".join(c.lines)]
    assert len(served) == ((family, "gguf") in LAYOUTS)

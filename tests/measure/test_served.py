"""Served evaluation: an engine's counters give what our decoder counts, beside plain serving.

Run alone: python -m pytest tests/measure/test_served.py (under 30 s)
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import generate
from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.engines import server_pool
from specdec.engines.client import Server
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.measure import served
from specdec.measure.served import (
    MeasuredServer,
    TimedResponse,
    figures,
    greedy_replies,
    measure_served,
)
from specdec.report.markdown import text
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.engine import FakeEngine
from tests.processes import process
from tests.tiny import Tiny, lm
from tests.told import require_one_line
from train.data.sources import read_prompts_file
from train.data.user_turns import prompts_of_all_turns
from train.measurement import greedy_responses

PROMPTS = [[5, 6, 7], [8, 9, 20, 30], [40, 41]]
NEW = 12
Serve = Callable[..., FakeEngine]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "WAITS", (0.01,))
    monkeypatch.setattr(served, "SETTLING", 0.1)


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Target:
    return load_target(TargetConfig(str(tiny.target), "float32", "cpu"))


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return lm(target, 0.02)


@pytest.fixture
def serve(target: Target) -> Iterator[Serve]:
    running = []

    def start(**options: Any) -> FakeEngine:
        running.append(FakeEngine(target, **options).serving())
        return running[-1].__enter__()

    yield start
    for engine in running:
        engine.__exit__(None, None, None)


def measured(target: Target, one: FakeEngine, plain: FakeEngine | None = None) -> Any:
    engine = MeasuredServer(Server.at_address("--engine", one.url), target, speculates=True)
    beside = plain and MeasuredServer(
        Server.at_address("--plain", plain.url), target, speculates=False
    )
    samplers = [Sampler(0.0), Sampler(1.0)]
    with Progress(disable=True) as bar:
        return measure_served(engine, beside, PROMPTS, samplers, NEW, 3, bar)


def test_the_counters_give_what_our_decoder_counts(
    target: Target, drafter: Drafter, serve: Serve
) -> None:
    way = Way(drafter, Chain(2))
    greedy, sampled = measured(target, serve(drafts=way), serve())
    made = [generate(target, prompt, way, max_new_tokens=NEW) for prompt in PROMPTS]
    steps = [r for g in made for r in g.steps]
    assert greedy.speculation_steps == len(steps)
    assert greedy.tau.value == pytest.approx(sum(len(g.ids) - 1 for g in made) / len(steps))
    shares = [sum(r.accepted > k for r in steps) / len(steps) for k in range(2)]
    assert [share.value for share in greedy.accepted] == pytest.approx(shares) and shares[0] > 0
    assert greedy.identical == len(PROMPTS)
    assert sampled.temperature == 1.0 and sampled.speculation_steps > 0


def test_figures_of_each_response_are_taken_where_the_engine_gives_them(
    target: Target, drafter: Drafter, serve: Serve
) -> None:
    """They are those of the counters. With them, somebody else may use the engine; figures that do
    not fit their response are told."""
    way = Way(drafter, Chain(2))
    counted, own = (measured(target, serve(drafts=way, per_request=x))[0] for x in (False, True))
    assert (own.speculation_steps, own.tau, own.accepted) == (
        counted.speculation_steps,
        counted.tau,
        counted.accepted,
    )
    busy = serve(drafts=way, per_request=True)
    busy.fault = lambda _n, reply: busy.counts.update(dict.fromkeys(busy.counts, 50)) or reply
    assert measured(target, busy)[0].tau == own.tau

    def changed(histogram: Any) -> Callable[[int, Any], Any]:
        def fault(_n: int, reply: Any) -> Any:
            reply["metrics"]["speculative_decoding"]["acceptance_histogram"] = histogram
            return reply

        return fault

    for histogram, said in (([1, 0, 0], "do not fit its responses"), (None, "without an accept")):
        other = serve(drafts=way, per_request=True, fault=changed(histogram))
        with pytest.raises(UserError, match=said):
            measured(target, other)


def test_tokens_beyond_the_end_of_a_response_are_none_of_its_own() -> None:
    """One speculation step accepts five tokens, of which the second is the end: 2 tokens in 1 pass,
    not 6."""
    at = figures(0.0, [TimedResponse([1, 2, 3], 1.0, 1, (1, 1, 1, 1, 1))], None)
    assert at.tau.value == 2.0


def test_the_speedup_is_the_quotient_of_the_two_speeds() -> None:
    """A mean of the prompts' seconds per token said 1.45 where 15 and 7.9 tokens/s are 1.90."""
    drafted = [
        TimedResponse([1] * 100, 5.0, 60),
        TimedResponse([1] * 5, 2.0, 4),
        TimedResponse([1] * 15, 1.0, 9),
    ]
    plain = [
        TimedResponse([1] * 100, 10.0),
        TimedResponse([1] * 15, 3.0),
        TimedResponse([1] * 3, 2.0),
    ]
    at = figures(1.0, drafted, plain)
    assert at.tokens_per_second.value == 120 / 8
    assert at.plain_tokens_per_second is not None and at.speedup is not None
    assert at.plain_tokens_per_second.value == pytest.approx(118 / 15)
    assert at.speedup.value == pytest.approx((120 / 8) / (118 / 15))
    assert at.speedup.low < at.speedup.value < at.speedup.high


def test_figures_by_hand() -> None:
    """Two prompts: 3 speculation steps with 2 and 1 accepted, 1 step with none; 7 and 2 tokens, of
    which prefill emits one each."""
    drafted = [TimedResponse([1] * 7, 2.0, 3, (2, 1)), TimedResponse([2] * 2, 1.0, 1, (0,))]
    plain = [TimedResponse([1] * 7, 6.0), TimedResponse([2, 3], 1.0)]
    at = figures(0.0, drafted, plain)
    assert at.tau.value == (6 + 1) / 4 and at.speculation_steps == 4
    assert [share.value for share in at.accepted] == [2 / 4, 1 / 4]
    assert at.tokens_per_second.value == 9 / 3
    assert at.plain_tokens_per_second is not None and at.plain_tokens_per_second.value == 9 / 7
    assert at.speedup is not None
    assert at.speedup.value == pytest.approx((9 / 3) / (9 / 7))
    assert at.identical == 1
    assert figures(0.0, drafted, None).speedup is None


def test_turns_of_one_conversation_are_one_observation() -> None:
    """Each conversation is there twice, as two turns that say the same: nothing is known twice."""
    steps = 3, 5, 8, 6
    drafted = [TimedResponse([1] * 13, 2.0 + n, n, (n - 1,)) for n in steps]
    plain = [TimedResponse([1] * 13, 7.0 + n % 3) for n in steps]
    once = figures(0.0, drafted, plain)
    groups = [0, 1, 2, 3] * 2
    twice = figures(0.0, drafted * 2, plain * 2, groups)
    assert once.speedup is not None and twice.speedup is not None
    for a, b in (
        (once.tau, twice.tau),
        (once.tokens_per_second, twice.tokens_per_second),
        (once.speedup, twice.speedup),
        *zip(once.accepted, twice.accepted, strict=True),
    ):
        assert (a.low, a.value, a.high) == pytest.approx((b.low, b.value, b.high))
    assert figures(0.0, drafted * 2, plain * 2).tau.high < once.tau.high


def test_an_engine_responds_before_later_turns(
    target: Target, drafter: Drafter, serve: Serve, tmp_path: Path
) -> None:
    """The prompts are those of our own decoder, and figures are over conversations."""
    (tmp_path / "q.jsonl").write_text(
        "".join(json.dumps({"turns": [f"a {x}", "and it", "more"]}) + "\n" for x in ("cat", "dog"))
    )
    given = read_prompts_file(tmp_path / "q.jsonl")
    one = serve(drafts=Way(drafter, Chain(2)))
    engine = MeasuredServer(Server.at_address("--engine", one.url), target, speculates=True)
    cfg = DecodeConfig(max_new_tokens=NEW)
    how = target.tokenizer, None
    own, _ = prompts_of_all_turns(given, partial(greedy_responses, target, cfg=cfg), *how)
    respond = partial(greedy_replies, engine, limit=NEW, tokenizer=target.tokenizer)
    served_turns, skipped = prompts_of_all_turns(given, respond, *how)
    assert not skipped and [p.turn for p in served_turns] == [1, 2, 3] * 2
    assert [p.ids.tolist() for p in served_turns] == [p.ids.tolist() for p in own]


def test_what_an_engine_lacks_is_told(target: Target, drafter: Drafter, serve: Serve) -> None:
    way = Way(drafter, Chain(2))
    with pytest.raises(UserError, match=r"the engine failed .*HTTP 404"):
        measured(target, serve())
    busy = serve(drafts=way)
    busy.fault = lambda _n, reply: busy.counts.update(dict.fromkeys(busy.counts, 50)) or reply
    with pytest.raises(UserError, match="somebody else uses this engine"):
        measured(target, busy)
    silent = serve(drafts=way)
    measured(target, silent)
    counts = silent.counts.copy()
    silent.fault = lambda _n, reply: (silent.counts.clear(), silent.counts.update(counts), reply)[2]
    with pytest.raises(UserError, match="its counters do not fit its responses"):
        measured(target, silent)
    text = serve(drafts=way, fault=lambda _n, reply: {"choices": [{"text": "a"}]})
    with pytest.raises(UserError, match="does not return the ids"):
        measured(target, text)
    gone = serve(drafts=way, fault=lambda number, reply: 500 if number else reply)
    with pytest.raises(UserError, match=r"the engine failed .*HTTP 500.*nothing was measured"):
        measured(target, gone)


def test_the_script_says_whose_figures_they_are(
    tiny: Tiny, target: Target, drafter: Drafter, serve: Serve, tmp_path: Path
) -> None:
    draft_checkpoint.write_draft(tmp_path / "best", drafter, target)
    lines = tmp_path / "prompts.txt"
    lines.write_text("one cat may run\nwe go home\n")
    engine, plain = serve(drafts=Way(drafter, Chain(3))), serve()
    draft = ["scripts/evaluate", str(tmp_path / "best"), "--prompts", str(lines)]
    both = ["--engine", engine.url, "--plain", plain.url]
    ended = process([*draft, *both, "--max-new-tokens", "6", "--temperatures", "0"])
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "evaluation-prompts-engine"
    page = (folder / "served.md").read_text()
    url = text(engine.url)
    assert f"These are the figures of vLLM 0.0 at {url}, in turn with vLLM 0.0 at" in page
    assert "not of Draftsmith's decoder" in page and "|  | τ | position 1 |" in page
    assert "run's report" not in page and "<table>" in (folder / "served.html").read_text()
    kept = json.loads((folder / "served.json").read_text())
    assert kept["prompts"] == 2 and kept["asked"][0]["identical"] == 2
    for more, message in {
        ("--gamma", "3", *both): "--gamma cannot be combined with --engine",
        ("--plain", plain.url): "give both",
        ("--engine", "nowhere"): "give an engine's address",
    }.items():
        ended = process([*draft, *more])
        assert ended.returncode == 2
        require_one_line(ended.stderr, message)

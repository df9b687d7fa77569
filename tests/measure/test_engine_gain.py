"""What a draft gains in an engine, from replies of a fake server and from figures by hand;
llama.cpp itself is measured in tests/test_end_to_end.py.

Run alone: python -m pytest tests/measure/test_engine_gain.py (under 15 s)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.drafters.eagle3 import Eagle3Config
from specdec.engines.client import Server
from specdec.errors import UserError
from specdec.measure.engine_gain import (
    COST_TOKENS,
    EngineGain,
    cost_of_verifying,
    gain_of,
    responses_in_turn,
)
from specdec.measure.results import Results
from specdec.measure.served import MeasuredServer, TimedResponse
from specdec.report import report
from specdec.sampling.trees import Chain
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from specdec.theory.intervals import Interval
from tests.engines.test_llama_cpp import PROMPTS, FakeLlamaCpp
from tests.formats.test_export_check import draft, target_of
from tests.measure.test_results import results, terminal
from tests.tiny import Tiny, lm
from tests.told import told
from train import engine_measurement
from train.engine_measurement import gain_in_engine, is_servable

STEP = 0.02  # seconds of a plain step of the fake server
NEW = 12


class TimedFake(FakeLlamaCpp):
    """A server whose steps take as long as `STEP`, and longer when several responses are under
    way."""

    def post(self, path: str, body: dict[str, Any]) -> Any:
        reply = super().post(path, body)
        tokens, accepted = len(reply["tokens"]), reply["timings"].get("draft_n_accepted", 0)
        drafted = self.drafts is not None
        step = STEP * (1.5 if drafted else 1.0) * 1000
        reply["timings"]["predicted_ms"] = step * (tokens - 1 - accepted)
        return reply


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Target:
    return load_target(TargetConfig(str(tiny.target), "float32", "cpu"))


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return lm(target, 0.02)


@pytest.fixture
def servers(target: Target, drafter: Drafter) -> Iterator[list[MeasuredServer]]:
    fakes = TimedFake(target, drafts=Way(drafter, Chain(2))), TimedFake(target)
    with fakes[0].serving(), fakes[1].serving():
        yield [
            MeasuredServer(Server.at_address("x", fake.url), target, fake.drafts is not None)
            for fake in fakes
        ]


def test_figures_by_hand() -> None:
    """Two prompts. With drafts, 6 + 3 tokens after the first in 3 + 2 steps of 30 ms; without,
    9 steps of 20 ms. A step costs 1.5 plain ones, of which 1.2 verify; 0.15 for each draft."""
    drafted = [TimedResponse([1] * 7, 9.0, 3, decoding=0.09), TimedResponse([1] * 4, 9.0, 2)]
    drafted[1] = replace(drafted[1], decoding=0.06)
    plain = [TimedResponse([1] * 7, 9.0, decoding=0.12), TimedResponse([2] * 4, 9.0, decoding=0.06)]
    server: Any = MeasuredServer.__new__(MeasuredServer)
    server.engine, server.server = TitledEngine(), Server("http://x/v1")
    how: dict[str, Any] = {"weights": "Q4_1", "gamma": 2, "limit": 7, "commands": ["serve"]}
    gain = gain_of(server, drafted, plain, v=1.2, **how)
    assert gain.engine == "llama.cpp b1"
    assert gain.tau.value == pytest.approx(9 / 5)
    assert gain.tokens_per_second.value == pytest.approx(9 / 0.15)
    assert gain.plain_tokens_per_second.value == pytest.approx(50)
    assert gain.speedup.value == pytest.approx(1.2)
    assert (gain.identical, gain.prompts) == (1, 2)
    assert gain.c == pytest.approx(0.15) and gain.step_cost == pytest.approx(1.5)
    with pytest.raises(UserError, match="does not say how long it decoded"):
        gain_of(server, [replace(r, decoding=None) for r in drafted], plain, v=1.2, **how)


class TitledEngine:
    def title_at(self, server: Server) -> str:
        return f"llama.cpp b1 at {server.url}"


def test_replies_are_taken_in_turn_while_there_is_time(servers: list[MeasuredServer]) -> None:
    drafted, plain = responses_in_turn(*servers, PROMPTS, NEW, None)
    assert [r.ids for r in drafted] == [r.ids for r in plain] and len(plain) == len(PROMPTS)
    assert plain[0].decoding == pytest.approx(STEP * (NEW - 1))
    many, time = PROMPTS * 4, iter([1e9, 0.0])
    drafted, plain = responses_in_turn(*servers, many, NEW, lambda: next(time))
    assert len(drafted) == len(plain) == len(PROMPTS) + 1  # three in any case, and one in time


def test_a_verification_is_timed_by_responses_at_once(
    servers: list[MeasuredServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.3 times a step alone, as this engine says of three at once."""
    plain, times = servers[1], {1: 1.0, 3: 1.3}
    asked = [{1: 0, 3: 0}]
    engine = plain.engine

    class Slower(type(engine)):  # type: ignore[misc]
        def decoding_seconds_of(self, reply: Any) -> float:
            assert len(reply["tokens"]) == COST_TOKENS  # it does not end early
            asked[0][1] += 1
            alone = asked[0][1] % 4 == 1
            return times[1 if alone else 3] * (COST_TOKENS - 1)

    monkeypatch.setattr(plain, "engine", Slower())
    assert cost_of_verifying(plain, PROMPTS[1], 2) == pytest.approx(1.3)


def at(value: float, low: float, high: float) -> Interval:
    return Interval(value, low, high, 9)


GAIN = EngineGain(
    engine="llama.cpp b1",
    weights="Q4_1",
    gamma=2,
    prompts=10,
    max_new_tokens=48,
    tau=at(1.6, 1.5, 1.7),
    tokens_per_second=at(60, 55, 65),
    plain_tokens_per_second=at(50, 48, 52),
    speedup=at(1.2, 1.1, 1.3),
    identical=9,
    c=0.05,
    v=1.25,
    commands=["scripts/serve --engine llama.cpp --draft runs/run/export.gguf --gamma 2"],
)


@pytest.mark.parametrize(
    ("speedup", "said"),
    [
        (at(1.2, 1.1, 1.3), "Serve it in llama.cpp b1: 1.20 times as fast [1.10, 1.30]."),
        (at(0.8, 0.7, 0.9), "Serve the target alone in llama.cpp b1: drafting does not pay there"),
        (at(1.1, 0.9, 1.3), "No gain is shown in llama.cpp b1 (1.10 times as fast [0.90, 1.30])."),
        (at(1.1, 1.1, 1.1), "Nothing can be claimed in llama.cpp b1 (measured on 10 prompts)."),
    ],
)
def test_the_report_says_what_is_gained_and_why(
    tmp_path: Path, speedup: Interval, said: str
) -> None:
    one = replace(results(), in_engine=replace(GAIN, speedup=speedup))
    report.write(tmp_path, one)
    assert Results.load(tmp_path) == one
    page = (tmp_path / "report.md").read_text().replace("\\", "")
    assert said in page and "on the target in Q4_1" in page
    assert "as long as 1.35 plain steps: 1.25 to verify 3 tokens (v), and 0.05 to draft" in page
    assert GAIN.commands[0] in page and "| without | 1 | 50.0 [48.0, 52.0] | 1 |" in page
    shown = terminal(one).replace("\n", " ")
    assert "chains of 2 tokens in llama.cpp b1, Q4_1" in shown
    assert "50 tokens/s without the draft" in shown
    assert "llama.cpp b1" not in terminal(results())


def test_a_target_that_is_no_gguf_file_is_skipped_in_one_line(
    target: Target, drafter: Drafter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = TargetConfig(target.name)
    how: Any = (tmp_path, drafter, target, cfg, PROMPTS, 2, NEW, None)
    assert gain_in_engine("llama.cpp", *how) is None
    said = capsys.readouterr()
    assert "not measured in llama.cpp:" in said.out + said.err and not any(tmp_path.iterdir())


@pytest.mark.parametrize("keeps", [True, False])
def test_servers_have_room_for_the_texts_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """As long as the longest prompt, a response, and the last speculation step; as often as the
    server for verifications answers at once. With export=null, the export is deleted."""
    target, asked = target_of("llama"), list[Sequence[str]]()
    config = Eagle3Config(depth=3, draft_vocab=40, layers=[2, 3, 5])

    @contextmanager
    def noted(_engine: Any, _served: Any, options: Sequence[str], *_: Any) -> Iterator[None]:
        asked.append(options)
        if len(asked) == 2:
            raise UserError("no server")
        assert len([*tmp_path.rglob("export.gguf")]) == 1
        yield

    monkeypatch.setattr(engine_measurement, "local_server", noted)
    monkeypatch.setattr(engine_measurement, "require_installed", lambda _: None)
    (tmp_path / "target.gguf").touch()
    cfg, folder = TargetConfig(str(tmp_path / "target.gguf")), tmp_path / "run"
    folder.mkdir()
    how: Any = (folder, draft(config, target), target, cfg, [[1] * 5000, [1]], 2, NEW, None, keeps)
    assert gain_in_engine("llama.cpp", *how) is None
    rooms = [int(line[line.index("--ctx-size") + 1]) for line in asked]
    assert rooms == [5000 + NEW + 3, 3 * (5000 + NEW + 3)]
    assert [path.name for path in folder.iterdir()] == ["export.gguf"] * keeps


def test_a_draft_that_the_engine_would_run_differently_is_not_servable(tmp_path: Path) -> None:
    """By the check of the export, before any time is set aside for the engine."""
    target, cfg = target_of("llama"), TargetConfig(str(tmp_path / "target.gguf"))
    (tmp_path / "target.gguf").touch()
    config = Eagle3Config(depth=3, draft_vocab=40, layers=[2, 3, 5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_measurement, "require_installed", lambda _: None)
        servable = [
            is_servable("llama.cpp", draft(replace(config, window=window), target), target, cfg)
            for window in (None, 8)
        ]
    assert servable == [True, False]


def test_engines_that_a_run_does_not_start_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "use scripts/serve and scripts/evaluate --engine" in told(capsys, ["serve_in=vllm"])
    assert "did you mean 'llama.cpp'" in told(capsys, ["serve_in=llama_cpp"])

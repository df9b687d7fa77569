"""A second engine is reached through the interface alone: by a name, or by what its server says.

Run alone: python -m pytest tests/engines/test_second_engine.py (under 60 s)
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.decoding.decode import generate
from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.engines.client import Server
from specdec.engines.engine_interface import Engine
from specdec.engines.known_engines import ENGINES, engine_of
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.measure.served import MeasuredServer
from specdec.report import verdict
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.engine import FakeEngine
from tests.processes import process
from tests.report.test_verdict import GAIN, at, of
from tests.tiny import REPOSITORY, Tiny, lm
from tests.told import require_one_line
from tests.toy_engine import ENGINE, Toy
from train.data.engine_responses import EngineResponse, require_room_in, responses_of, servers_of

PROMPT, NEW = [5, 6, 7], 12


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setitem(ENGINES, "toy", ENGINE)  # type: ignore[arg-type]
    yield ENGINE


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Target:
    return load_target(TargetConfig(str(tiny.target), "float32", "cpu"))


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return lm(target, 0.02)


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process with a package that brings the engine."""
    about = tmp_path / "site" / "toy_package-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy_package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[draftsmith.engines]\ntoy = tests.toy_engine:ENGINE\n")
    return {"PYTHONPATH": f"{tmp_path / 'site'}:{REPOSITORY}"}


def test_a_server_is_recognised_by_what_it_says(toy: Engine) -> None:
    assert engine_of("toy") is toy
    assert engine_of("vllm") is engine_of("somebody") is engine_of(None) is ENGINES["vllm"]


def test_responses_come_in_the_engines_own_words(toy: Engine, target: Target) -> None:
    (expected,) = [generate(target, PROMPT, Way(), max_new_tokens=NEW).ids]
    with FakeEngine(target, toy=True, room=40).serving() as server:
        pool = servers_of("responses.from", [server.url], target)
        asked, seeds = {"a": PROMPT}, {"a": 1}
        ((name, response),) = responses_of(pool, target, asked, seeds, Sampler(0.0), NEW, 2)
        assert isinstance(response, EngineResponse) and (name, response.ids) == ("a", expected)
        assert server.asked[0].keys() == {"model", "prompt", "limit", "ends", "temperature", "seed"}
        with pytest.raises(UserError, match="the engine takes 40"):
            require_room_in(pool, 41)
        with pytest.raises(UserError, match=r"hidden_states\.from: Toy gives no hidden states"):
            list(responses_of(pool, target, asked, seeds, Sampler(0.0), NEW, 2, layers=[1, 4]))
        assert len(server.asked) == 1


def test_acceptance_without_positions(toy: Engine, target: Target, drafter: Drafter) -> None:
    way = Way(drafter, Chain(2))
    ours = generate(target, PROMPT, way, max_new_tokens=NEW)
    with FakeEngine(target, toy=True, drafts=way).serving() as server:
        measured = MeasuredServer(Server.at_address("--engine", server.url), target, True)
        assert measured.title == f"Toy at {server.url}"
        reply = measured.reply(PROMPT, NEW, Sampler(0.0), 0)
    accepted = sum(r.accepted for r in ours.steps)
    assert reply.ids == ours.ids and accepted > 0
    assert (reply.speculation_steps, reply.accepted) == (len(ours.ids) - 1 - accepted, ())


def test_the_verdict_says_how_it_serves_a_draft(toy: Engine) -> None:
    shown = [command for command in verdict.commands(of(at(GAIN))) if "Toy" in command.does]
    assert [command.lines[1:] for command in shown] == [
        ("toy-server my-target --head my-head --tokens 2",)
    ]


def test_serve_starts_an_installed_engine(
    tiny: Tiny, tmp_path: Path, installed: dict[str, str]
) -> None:
    settings = ["target=model", f"target.path={tiny.target}", "target.dtype=float32"]
    settings += [f"target.cache={tiny.root / 'targets'}", "data.path=x", "--python", "toy"]
    command = ["scripts/serve", "--print", "--engine", "toy", *settings]
    ended = process([*command, "--plain"], **installed)
    assert ended.returncode == 0, ended.stderr
    words = shlex.split(ended.stdout.splitlines()[-1])
    assert words == ["toy", "toy-server", str(tiny.target), "127.0.0.1:8000"]
    ended = process(command, **installed)
    require_one_line(ended.stderr, "Toy gives no hidden states")
    ended = process(["scripts/serve", "--print", "--engine", "tory", *settings], **installed)
    require_one_line(ended.stderr, "engine 'tory' is unknown; did you mean 'toy'")


def test_an_installed_engine_is_measured(
    target: Target, drafter: Drafter, tmp_path: Path, installed: dict[str, str]
) -> None:
    draft_checkpoint.write_draft(tmp_path / "best", drafter, target)
    (tmp_path / "prompts.txt").write_text("one cat may run\nwe go home\n")
    draft = ["scripts/evaluate", str(tmp_path / "best"), "--prompts", str(tmp_path / "prompts.txt")]
    how = ["--max-new-tokens", "6", "--temperatures", "0"]
    with FakeEngine(target, toy=True, drafts=Way(drafter, Chain(3))).serving() as server:
        ended = process([*draft, "--engine", server.url, *how], **installed)
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "evaluation-prompts-engine"
    assert "the figures of Toy at" in (folder / "served.md").read_text()
    assert json.loads((folder / "served.json").read_text())["asked"][0]["accepted"] == []


def test_an_entry_that_is_no_engine_is_rejected() -> None:
    class Nameless(Toy):
        name = "other"

    with pytest.raises(UserError, match="no instance of an Engine whose name is 'toy'"):
        ENGINES._require_fitting("toy", Nameless())

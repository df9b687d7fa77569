"""SIGKILL of the engine, of the client and of both at random moments.

Run alone: python -m pytest tests/train/test_engine_kills.py (about 40 s)
"""

import json
import random
import socket
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engines import server_pool
from specdec.errors import UserError
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.engine import FakeEngine
from tests.processes import fork_of_server
from tests.tiny import LAYERS, Tiny, compose
from train import pipeline
from train.data import engine_responses
from train.data.response_files import name_of
from train.data.sequences import Prompt

LIVES = 10
AT_ONCE = 4
SLOW = 0.05  # seconds that the engine takes for a request, or the whole work would take no time


def engine(target: str, port: int, folder: str) -> None:
    """Serves the target, and notes the name of each prompt that it is asked for."""
    torch.set_num_threads(1)
    notes, states = Path(folder, "asked"), Path(folder, "states")

    def fault(_: int, reply: dict[str, Any]) -> dict[str, Any]:
        ids = np.array(reply["choices"][0]["prompt_token_ids"], np.int32)
        with notes.open("a") as file:
            file.write(f"{name_of(Prompt('', ids))}\n")
        time.sleep(SLOW)
        return reply

    whole = load_target(TargetConfig(target, "float32", "cpu", packed=False))
    layers = [1, 2, 3, LAYERS]
    fake = FakeEngine(whole, fault, states=states, layers=layers, port=port)
    fake.server.serve_forever()


def job(overrides: list[str], folder: str) -> None:
    """The whole job, but for measuring; each response is written as soon as it is there."""
    torch.set_num_threads(1)
    pipeline.finished = lambda *_: None  # type: ignore[assignment]
    server_pool.WAITS = (0.02, 0.02)
    engine_responses.SECONDS = 0.0
    with suppress(UserError):  # that the engine is gone
        pipeline.run(compose(overrides), folder)


def answering(port: int) -> None:
    for _ in range(600):
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models").close()
            return
        time.sleep(0.05)
    raise AssertionError("the engine does not start")


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        number: int = one.getsockname()[1]
        return number


def test_killed_engines_and_clients_lose_and_double_nothing(
    tiny: Tiny, tmp_path: Path, port: int
) -> None:
    """What a life has written, the next ones do not ask for. What they ask for again was under way
    when one of both was killed."""
    draw = random.Random(0)
    (tmp_path / "states").mkdir()
    options = ["data.responses=target", "decode.prompts=0", f"responses.batch={AT_ONCE}"]
    options += [
        f"hidden_states.from=http://127.0.0.1:{port}/v1",
        f"responses.root={tmp_path / 'responses'}",
    ]
    options += [f"hidden_states.root={tmp_path / 'hidden_states'}", "loop.epochs=1"]
    overrides, run = tiny.overrides("eagle3", *options), str(tmp_path / "run")
    notes, deaths = tmp_path / "asked", 0
    serving = fork_of_server(engine, str(tiny.target), port, str(tmp_path))
    for _ in range(LIVES):
        if not serving.is_alive():
            serving = fork_of_server(engine, str(tiny.target), port, str(tmp_path))
        answering(port)
        known = written(tmp_path / "responses")
        asked = len(lines(notes))
        training = fork_of_server(job, overrides, run)
        while len(lines(notes)) == asked and training.is_alive():
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        victims = draw.choice([[serving], [training], [serving, training]])
        for victim in victims:
            victim.kill()
        training.join(60)
        serving.join(0 if serving not in victims else 10)
        deaths += 1
        assert not {*lines(notes)[asked:]} & known
        if len(written(tmp_path / "responses")) == 29:
            break
    if not serving.is_alive():
        serving = fork_of_server(engine, str(tiny.target), port, str(tmp_path))
        answering(port)
    known, asked = written(tmp_path / "responses"), len(lines(notes))
    assert known and deaths > 2, "responses were written, and processes were killed"
    training = fork_of_server(job, overrides, run)
    training.join(100)
    assert training.exitcode == 0 and (tmp_path / "run" / "best").is_dir()
    assert not {*lines(notes)[asked:]} & known
    lost = engine_responses.COMPARED + AT_ONCE  # the first responses wait until they are compared
    assert len(lines(notes)) <= 29 + deaths * lost
    serving.kill()
    every = [entry["prompt"] for entry in entries(tmp_path / "responses")]
    assert len(every) == len({*every}) == 29


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.rglob("*.jsonl") for line in lines(path)]


def written(folder: Path) -> set[str]:
    """The names of the prompts that have a response."""
    return {entry["prompt"] for entry in entries(folder)}

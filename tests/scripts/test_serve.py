"""The command that starts vLLM for our clients; vLLM itself is not started.

Run alone: python -m pytest tests/scripts/test_serve.py (under 20 s)
"""

import json
import shlex
from pathlib import Path

import pytest

from specdec.drafters.eagle3 import Eagle3Config
from specdec.formats import draft_export
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.processes import process
from tests.tiny import Tiny, random_drafter
from tests.told import require_one_line


def options(tiny: Tiny, *arguments: str) -> dict[str, str]:
    """vLLM's options in the command that is printed."""
    settings = ["target=model", f"target.path={tiny.target}", "target.dtype=float32"]
    settings += [f"target.cache={tiny.root / 'targets'}", "data.path=x"]
    ended = process(["scripts/serve", "--print", *settings, *arguments])
    assert ended.returncode == 0, ended.stderr
    words = shlex.split(ended.stdout.splitlines()[-1])
    assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    flags = {"--no-enable-prefix-caching", "--enforce-eager", "--async-scheduling"}
    assert "--no-enable-prefix-caching" in words
    assert ("--async-scheduling" in words) == ("--" in arguments)
    rest = iter(word for word in words[3:] if word not in flags)
    return dict(zip(rest, rest, strict=True))


def test_hidden_states_are_those_that_the_drafter_reads(tiny: Tiny, tmp_path: Path) -> None:
    more = ["drafter=eagle3", "drafter.layers=[1,2,3]", "--states", str(tmp_path), "--port", "9"]
    vllm = options(tiny, *more, "--", "--async-scheduling")
    how = json.loads(vllm["--speculative-config"])
    layers = how["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert how["method"] == "extract_hidden_states" and layers == [1, 2, 3, 4]
    connector = json.loads(vllm["--kv-transfer-config"])
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path)}
    assert vllm["--model"] == str(tiny.target) == vllm["--served-model-name"]
    assert (vllm["--dtype"], vllm["--port"], vllm["--host"]) == ("float32", "9", "127.0.0.1")


@pytest.mark.parametrize("drafted", [True, False])
def test_serving_with_a_draft_or_plainly(tiny: Tiny, tmp_path: Path, drafted: bool) -> None:
    if not drafted:
        vllm = options(tiny, "--plain")
        assert not {"--speculative-config", "--kv-transfer-config"} & vllm.keys()
        return
    target = load_target(TargetConfig(str(tiny.target), "float32", "cpu"))
    drafter = random_drafter(Eagle3Config(depth=2, layers=[1, 2, 3]), target, 0.1)
    draft_export.write_export(tmp_path / "draft", drafter, target)
    vllm = options(tiny, "--draft", str(tmp_path / "draft"), "--gamma", "2")
    how = {"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    assert json.loads(vllm["--speculative-config"]) == how
    assert vllm["--per-request-spec-decode-metrics"] == "summary"


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    for arguments, message in {
        ("--draft", str(tmp_path)): "cannot be read",
        ("--plain", "--draft", "x"): "leave out --draft",
        (
            "--plain",
            "--python",
            str(tmp_path / "none"),
        ): "run scripts/serving-env, or give --python",
        ("drafter=nothing",): "drafter=nothing is unknown",
    }.items():
        ended = process(["scripts/serve", *arguments])
        assert ended.returncode == 2
        require_one_line(ended.stderr, message)

"""vLLM's fields and counters; only files of our connector are read and deleted.

Run alone: python -m pytest tests/engines/test_vllm.py (under 10 s)
"""

import ast
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec.engines.client import Server, ServerUnavailable
from specdec.engines.engine_interface import CompletionRequest, SpeculationCounts
from specdec.engines.vllm import FOLDER_MARK, MARK, Vllm, remove_states, states_in_reply
from specdec.errors import UserError
from specdec.sampling.sampler import Sampler
from tests.tiny import REPOSITORY

TEXT, WIDTH = [1, 2, 3], 4


def written(path: Path, metadata: dict[str, str] | None, width: int = WIDTH) -> Path:
    """A file of hidden states after layer 1, beside an empty lock."""
    tensors = {"hidden_states": torch.zeros(3, 1, width), "token_ids": torch.tensor(TEXT)}
    save_file(tensors, path, metadata)
    path.with_name(f"{path.name}.lock").touch()
    return path


def read(path: Path, text: Sequence[int] = TEXT) -> Any:
    reply = {"kv_transfer_params": {"hidden_states_path": str(path), "layers": [1]}}
    return states_in_reply(reply, text, [1], WIDTH)


def test_a_file_of_our_connector_is_read_and_deleted(tmp_path: Path) -> None:
    (tmp_path / FOLDER_MARK).touch()
    (states,) = read(written(tmp_path / "a.safetensors", MARK))
    assert states.shape == (3, WIDTH)
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER_MARK]


@pytest.mark.parametrize("kind", ["folder", "header", "name", "link", "no tensors"])
def test_a_foreign_file_is_neither_read_nor_deleted(tmp_path: Path, kind: str) -> None:
    """The user's own weights, in a folder of theirs or in ours, or behind a link."""
    if kind != "folder":
        (tmp_path / FOLDER_MARK).touch()
    path = tmp_path / ("a.bin" if kind == "name" else "a.safetensors")
    if kind == "no tensors":
        path.write_text("my notes")
        path.with_name(f"{path.name}.lock").touch()
    elif kind == "link":
        (tmp_path / "theirs").mkdir()
        path.symlink_to(written(tmp_path / "theirs" / "w.safetensors", MARK))
        path.with_name(f"{path.name}.lock").touch()
    else:
        written(path, None if kind == "header" else MARK)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="which our connector did not write") as error:
        read(path)
    assert "\n" not in str(error.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_more_bytes_than_the_tokens_need_are_not_read(tmp_path: Path) -> None:
    (tmp_path / FOLDER_MARK).touch()
    path = written(tmp_path / "a.safetensors", MARK, width=2**17)
    with pytest.raises(UserError, match=r"1,57\d,\d+ bytes of states where at most 120 fit"):
        read(path)


def test_a_named_pipe_for_a_lock_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / FOLDER_MARK).touch()
    os.mkfifo(tmp_path / "a.safetensors.lock")
    with pytest.raises(ServerUnavailable, match="was not written"):
        read(tmp_path / "a.safetensors")


def test_only_our_files_are_removed_when_an_engine_starts(tmp_path: Path) -> None:
    """`scripts/serve --states FOLDER` deleted every *.safetensors there."""
    written(tmp_path / "weights.safetensors", None)
    written(tmp_path / "ours.safetensors", MARK)
    remove_states(tmp_path)
    assert (tmp_path / "ours.safetensors").exists(), "the folder is not marked"
    (tmp_path / FOLDER_MARK).touch()
    remove_states(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [FOLDER_MARK, "weights.safetensors", "weights.safetensors.lock"]


def test_the_connector_writes_these_marks() -> None:
    """It runs in vLLM's environment and imports nothing from here."""
    tree = ast.parse((REPOSITORY / "scripts" / "hidden_states.py").read_text())
    constants = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert constants == {"FOLDER_MARK": FOLDER_MARK, "MARK": MARK}


PLAIN = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
GREEDY = {"temperature": 0.0, "seed": 0, "top_p": 1.0, "top_k": -1, **PLAIN}


def test_the_fields_of_requests() -> None:
    """For responses with and without hidden states, for the states of a text, and for figures."""
    vllm, drawn = Vllm(), Sampler(0.7, 20, 0.9)
    sampled = {"temperature": 0.7, "seed": 3, "top_p": 0.9, "top_k": 20, **PLAIN}
    ids = {"prompt": TEXT, "max_tokens": 9, "stop_token_ids": [2], "return_token_ids": True}
    asked = CompletionRequest(TEXT, 9, drawn, 3, eos=(2,), text_needed=True)
    response = ids | {"skip_special_tokens": False} | sampled
    assert vllm.completion_body(asked) == response
    asked = CompletionRequest(TEXT, 9, drawn, 3, eos=(2,), states="response", text_needed=True)
    states = {"kv_transfer_params": {"include_output_tokens": True}}
    assert vllm.completion_body(asked) == response | states
    asked = CompletionRequest(TEXT, 1, Sampler(0.0), 0, states="prompt")
    text = {"prompt": TEXT, "max_tokens": 1, "return_token_ids": True, "kv_transfer_params": {}}
    assert vllm.completion_body(asked) == text | GREEDY
    asked = CompletionRequest(TEXT, 9, drawn, 3, eos=(2,))
    assert vllm.completion_body(asked) == ids | sampled


def test_counters_are_read_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two engines behind one address, added up; other counters are not read."""
    lines = ["# TYPE vllm:spec_decode_num_drafts counter", "vllm:num_requests_total 9.0"]
    for engine, drafts in (("0", 3.0), ("1", 1e1)):
        labels = f'engine="{engine}",model_name="x"'
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 4.0",
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} 3.0',
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 1.0',
        ]
    page = "\n".join(lines) + "\n"
    monkeypatch.setattr(Server, "get", lambda self, path: page)
    counts = Vllm().speculation_so_far(Server("http://x/v1"))
    assert counts == SpeculationCounts(13, 8, (6, 2))
    assert counts.since(SpeculationCounts(3, 2, (1,))) == SpeculationCounts(10, 6, (5, 2))
    monkeypatch.setattr(Server, "get", lambda self, path: "vllm:num_requests_total 9.0\n")
    assert Vllm().speculation_so_far(Server("http://x/v1")) is None

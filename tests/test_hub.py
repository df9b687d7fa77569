"""A hub that does not answer, and what is downloaded from one that does.

Run alone: python -m pytest tests/test_hub.py (no connection is made)
"""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets.config
import pytest
from huggingface_hub import constants

from specdec import hub
from specdec.errors import UserError
from specdec.formats import foreign_files
from specdec.targets.gguf import model_path
from train.data.conversations import DataConfig
from train.data.records import Tally
from train.data.sources import records

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def online(monkeypatch: Any, tmp_path: Path) -> Iterator[None]:
    """A process that has not asked the hub yet, with an empty cache of it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub.offline_reason.cache_clear()
    yield
    hub.offline_reason.cache_clear()


@pytest.fixture
def broken(monkeypatch: Any) -> Iterator[list[str]]:
    """A hub that ends each connection without an answer; the addresses that asked it."""
    asked = list[str]()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    connection, (host, _) = server.accept()
                except OSError:  # closed
                    return
                asked.append(host)
                connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield asked


def test_a_hub_without_an_answer_is_asked_once(
    broken: list[str], tmp_path: Path, capfd: Any
) -> None:
    """Each kind of name is rejected in one line, without a second question; what the cache has is
    read from it."""
    with pytest.raises(UserError, match=r"^target.path='org/model' is no file .* does not answer"):
        model_path("org/model", tmp_path)
    with pytest.raises(UserError, match=r"^draft='org/draft' is no file .*or give a path$"):
        foreign_files.local_folder("org/draft")
    with pytest.raises(UserError, match=r"^data.path='org/chats' is no file"):
        list(records(DataConfig(path="org/chats"), Tally()))
    (tmp_path / "hub" / "models--org--model").mkdir(parents=True)
    assert model_path("org/model", tmp_path) == "org/model"
    assert "only its cache here is read" in capfd.readouterr().err
    assert constants.HF_HUB_OFFLINE
    assert datasets.config.HF_HUB_OFFLINE
    assert len(broken) == 1


def test_a_hub_is_not_waited_for(monkeypatch: Any) -> None:
    """No wait for a hub that takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub, "SECONDS", 0.01)
        with pytest.raises(UserError, match="does not answer"):
            hub.require_on_hub("target.path", "org/model")


def test_paths_and_packages_ask_nobody(broken: list[str], tmp_path: Path) -> None:
    for name in (str(tmp_path), "./here", "package:smollm2", "org/team/model"):
        hub.require_on_hub("target.path", name)
    assert broken == []


class FilesOfDraft(BaseHTTPRequestHandler):
    """A hub with one draft, in three formats."""

    files: dict[str, bytes]
    fetched: list[str]

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, whole: bool) -> None:
        name = self.path.rpartition("/")[2]
        body = self.files.get(name)
        if body is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            body = b""
        else:
            self.send_response(200)
            self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if whole and body:
            self.fetched.append(name)
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


INDEX_OF_TWO = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()


@pytest.mark.parametrize(
    ("weights", "read"),
    [
        ({"model.safetensors": b"1"}, ["model.safetensors"]),
        (
            {"model.safetensors.index.json": INDEX_OF_TWO}
            | {"one.safetensors": b"1", "two.safetensors": b"2", "three.safetensors": b"3"},
            ["model.safetensors.index.json", "one.safetensors", "two.safetensors"],
        ),
        ({}, ["pytorch_model.bin"]),
    ],
)
def test_a_draft_is_downloaded_in_one_format(
    monkeypatch: Any, weights: dict[str, bytes], read: list[str]
) -> None:
    other = {"pytorch_model.bin": b"1", "medusa_lm_head.pt": b"1", "README.md": b"1"}
    fetched = list[str]()
    files = {"config.json": b"{}", **other, **weights}
    handler = type("Handler", (FilesOfDraft,), {"files": files, "fetched": fetched})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    url = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    foreign_files._downloaded.cache_clear()
    try:
        folder = foreign_files.local_folder("org/draft")
    finally:
        foreign_files._downloaded.cache_clear()
        server.shutdown()
        server.server_close()
    assert sorted(fetched) == sorted(["config.json", *read])
    assert folder.name == COMMIT
    assert sorted(path.name for path in folder.iterdir()) == sorted(["config.json", *read])

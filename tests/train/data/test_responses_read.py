"""Runs that share a folder of responses: each reads those that it has read before, and no others.

Run alone: python -m pytest tests/train/data/test_responses_read.py (under 20 s)
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.errors import UserError
from specdec.integrity import sealed
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.tiny import Tiny, losses, responding
from train.data.response_files import (
    ResponsesRead,
    read_stored_responses,
    responses_key,
)

pytestmark = pytest.mark.usefixtures("training_alone")
OPTIONS = ("data.responses=target", "loop.epochs=1", "loop.eval_every=0")


def lines(key: str, responses: dict[str, list[int]]) -> str:
    sealed_lines = [
        json.dumps(sealed({"prompt": prompt, "ids": ids}, key)) for prompt, ids in responses.items()
    ]
    return "".join(f"{line}\n" for line in sealed_lines)


def beside(tiny: Tiny, root: Path, change: Callable[[list[int]], list[int]], name: str) -> None:
    """Write what a run that rounds otherwise would: other responses to all prompts, in a file of
    this name in the same folder."""
    (folder,) = root.iterdir()
    key, found = folder.name, dict[str, list[int]]()
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            found[entry["prompt"]] = change(entry["ids"])
    (folder / name).write_text(lines(key, found))


def changed(ids: list[int]) -> list[int]:
    return [*ids[:-1], 20 if ids[-1] != 20 else 21]


@pytest.mark.parametrize("name", ["0.jsonl", "z.jsonl"])
def test_a_finished_run_is_not_ended_by_another_run_s_responses(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    """Another run wrote other responses to the same prompts. The finished run's own command, which
    said that the training data changed, reads the files that it recorded."""
    roots = [
        f"responses.root={tmp_path / 'responses'}",
        f"hidden_states.root={tmp_path / 'hidden_states'}",
    ]
    tiny.job(tmp_path / "run", "medusa", *OPTIONS, *roots)
    before = losses(tmp_path / "run"), (tmp_path / "run" / "responses.json").read_text()
    beside(tiny, tmp_path / "responses", changed, name)
    tiny.job(tmp_path / "run", "medusa", *OPTIONS, *roots)
    after = losses(tmp_path / "run"), (tmp_path / "run" / "responses.json").read_text()
    assert after == before


def test_a_run_that_shares_the_folder_reads_one_response_to_each_prompt(
    tiny: Tiny, tmp_path: Path
) -> None:
    """A second run reads what the first wrote, and writes none of its own."""
    roots = [
        f"responses.root={tmp_path / 'responses'}",
        f"hidden_states.root={tmp_path / 'hidden_states'}",
    ]
    for name in ("one", "two"):
        tiny.job(tmp_path / name, "medusa", *OPTIONS, *roots)
    described = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("one", "two")]
    assert described[0]["of"] == described[1]["of"]
    files = [{*ResponsesRead(tmp_path / n).files(*_key(tmp_path)).values()} for n in ("one", "two")]
    assert files[0] == files[1] == {p.name for p in (tmp_path / "responses").rglob("*.jsonl")}


def _key(root: Path) -> list[str]:
    return [path.name for path in (root / "responses").iterdir()]


def test_which_response_is_read(tmp_path: Path) -> None:
    """Enumerated: recorded, own and others' files; a recorded one that is gone gives no response,
    and never another run's."""
    for name, ids in {"a": [1], "b": [2], "c": [3]}.items():
        (tmp_path / f"{name}.jsonl").write_text(lines("key", {"p": ids, f"only {name}": ids}))
    asked = {"p": [7], "only a": [7], "only c": [7]}

    def read(recorded: dict[str, str], *own: str) -> list[int] | None:
        found = read_stored_responses(tmp_path, "key", 9, asked, recorded, own)
        assert found.by_prompt["only a"]["ids"] == [1]
        return found.by_prompt.get("p", {}).get("ids")

    for n, name in enumerate("abc", 1):
        assert read({"p": f"{name}.jsonl"}) == read({}, f"{name}.jsonl") == [n]
        assert read({"p": f"{name}.jsonl"}, "a.jsonl") == [n]
    assert read({"p": "gone.jsonl"}) is None


def test_the_record_grows_and_is_damaged_loudly(tmp_path: Path) -> None:
    record = ResponsesRead(tmp_path)
    assert record.files("k") == {}
    record.record("k", {"p": "a", "q": "a", "r": "b"})
    record.record("k", {"p": "c"})
    record.record("other", {"p": "d"})
    assert ResponsesRead(tmp_path).files("k") == {"p": "c", "q": "a", "r": "b"}
    assert record.files("other") == {"p": "d"}
    record.path.write_text(record.path.read_text().replace('"q"', '"s"'))
    with pytest.raises(UserError, match=r"responses.json is damaged"):
        record.files("k")


def test_the_key_covers_what_ends_a_response(tiny: Tiny) -> None:
    """The user fixes eos_token_id in the target's files, which changes nothing but where responses
    end. Each set of end tokens has a folder of its own, also for engines."""
    target = load_target(TargetConfig(str(tiny.target), "float32", "cpu"))
    keys = []
    for eos in (target.tokenizer.eos_token_id, [target.tokenizer.eos_token_id, 9], [9]):
        target.model.generation_config.eos_token_id = eos
        keys += [
            responses_key(target, responding()),
            responses_key(target, responding(), served=True),
        ]
    assert len(target.eos) == 2 and len({*keys}) == 4
    assert keys[2:4] == keys[4:], "9 and the tokenizer's own end responses in both"

"""Lengths and sampling that are null, as the target's files decide them.

Run alone: python -m pytest tests/train/test_target_defaults.py
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UserError
from specdec.measure.results import Results
from specdec.targets.loading import TargetLoader
from tests.tiny import Tiny, compose, make_tokenizer
from train import target_defaults
from train.data.response_files import responses_key
from train.folder import config_of
from train.planning import plan_of_run
from train.run_config import Config
from train.target_defaults import with_target_defaults

SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}


def folder(
    place: Path,
    positions: int | None = 32768,
    sampling: dict[str, Any] | None = None,
    thinks: bool = False,
) -> Path:
    """A target's folder with the files that are read here, and no weights."""
    place.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "max_position_embeddings": positions}
    (place / "config.json").write_text(json.dumps(config))
    if sampling is not None:
        (place / "generation_config.json").write_text(json.dumps(sampling))
    make_tokenizer().save_pretrained(place)
    (place / "chat_template.jinja").unlink(missing_ok=True)
    template = "{% if enable_thinking %}<think>{% endif %}" if thinks else "{{ messages }}"
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (place / "tokenizer_config.json").write_text(json.dumps(kind))
    return place


def decided(place: Path, *more: str) -> tuple[Config, list[str]]:
    overrides = ["target=model", f"target.path={place}", "data=conversations", "data.path=x"]
    return with_target_defaults(compose([*overrides, *more]))


@pytest.mark.parametrize(
    ("positions", "thinks", "more", "expected"),
    [
        # document, prompt, response: as SpecForge's and speculators' examples, and recipe=qwen3_8b
        (32768, False, [], (4096, 2048, 2048)),
        (32768, True, [], (8192, 2048, 6144)),
        (32768, True, ["data.thinking=off"], (4096, 2048, 2048)),
        (32768, True, ["data.template_args={enable_thinking: false}"], (4096, 2048, 2048)),
        # the target's own limit; what is decoded (128 tokens) fits after the longest prompt
        (2048, False, [], (2048, 1024, 1024)),
        (200, False, [], (200, 72, 128)),
        # lengths that are given stay, and the others fit them
        (32768, False, ["data.max_length=1024"], (1024, 512, 512)),
        (32768, False, ["responses.max_new_tokens=1024"], (4096, 3072, 1024)),
        (32768, False, ["responses.max_new_tokens=8192"], (10240, 2048, 8192)),
        (32768, True, ["responses.max_new_tokens=12000"], (14048, 2048, 12000)),
        (9000, False, ["responses.max_new_tokens=8192"], (9000, 808, 8192)),
        (32768, False, ["data.max_prompt=6000"], (12000, 6000, 6000)),
        (32768, False, ["data.max_prompt=100", "responses.max_new_tokens=50"], (4096, 100, 50)),
        (
            8192,
            False,
            ["data.max_prompt=6000", "responses.max_new_tokens=1000"],
            (7000, 6000, 1000),
        ),
        # with the data's own responses, the prompts are only those that are decoded
        (32768, False, ["data.responses=data"], (4096, 2048, 2048)),
    ],
)
def test_lengths_follow_the_target(
    tmp_path: Path,
    positions: int,
    thinks: bool,
    more: Sequence[str],
    expected: tuple[int, int, int],
) -> None:
    cfg, said = decided(folder(tmp_path / "target", positions, thinks=thinks), *more)
    settled = cfg.data.max_length, cfg.data.max_prompt, cfg.responses.max_new_tokens
    assert settled == expected
    assert f"documents of at most {expected[0]:,} tokens" in said[0]


@pytest.mark.parametrize(
    ("sampling", "more", "expected"),
    [
        (SAMPLED, [], (0.6, 0.95, 20)),
        # what an engine takes where the file does not say: no cutoffs
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, [], (0.6, 0.9, 0)),
        ({"do_sample": True}, [], (1.0, 1.0, 0)),
        ({"temperature": 0.7}, [], (0.7, 1.0, 0)),
        # greedy: by the file, by an empty one, without one
        (SAMPLED | {"do_sample": False}, [], (0.0, 1.0, 0)),
        ({"eos_token_id": 3}, [], (0.0, 1.0, 0)),
        (None, [], (0.0, 1.0, 0)),
        # settings that are given win, one by one
        (SAMPLED, ["responses.temperature=1"], (1.0, 0.95, 20)),
        (SAMPLED, ["responses.top_k=0", "responses.top_p=1"], (0.6, 1.0, 0)),
        (SAMPLED, ["responses.temperature=0"], (0.0, 1.0, 0)),
    ],
)
def test_sampling_is_that_of_the_generation_config(
    tmp_path: Path,
    sampling: dict[str, Any] | None,
    more: Sequence[str],
    expected: tuple[float, float, int],
) -> None:
    cfg, said = decided(folder(tmp_path / "target", sampling=sampling), *more)
    responses = cfg.responses
    assert (responses.temperature, responses.top_p, responses.top_k) == expected
    assert said[1].startswith(f"responses: {responses.sampling}, as ")


def test_sampling_is_said_with_what_is_not_applied(tmp_path: Path) -> None:
    sampling = SAMPLED | {"repetition_penalty": 1.05, "min_p": 0.0}
    _, said = decided(folder(tmp_path / "target", sampling=sampling), "responses.top_k=5")
    assert said[1] == (
        "responses: sampled at temperature 0.6, top-k 5, top-p 0.95, as the target's "
        "generation_config.json says (not applied: repetition_penalty=1.05), but responses.top_k "
        "as given"
    )


def test_a_file_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged one, and a hub that does not answer: greedy responses would be other data."""
    place = folder(tmp_path / "target", sampling=SAMPLED)
    (place / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config.json cannot be read .*: connect"):
        decided(place)
    given = [f"responses.{key}={SAMPLED[key]}" for key in ("temperature", "top_p", "top_k")]
    decided(place, *given)
    (place / "generation_config.json").unlink()
    _, said = decided(place)
    assert "as the target has no generation_config.json" in " ".join(said)

    def unanswered(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect")

    monkeypatch.setattr(target_defaults, "cached_file", unanswered)
    with pytest.raises(UserError, match=r"\(We couldn't connect\)"):
        decided(place)


def test_a_template_of_the_user_says_whether_there_is_reasoning(tmp_path: Path) -> None:
    """It replaces that of the tokenizer, which has none."""
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.content }}{% endfor %}<think>")
    cfg, _ = decided(folder(tmp_path / "target"), f"data.chat_template={own}")
    assert cfg.data.max_length == 8192


def test_the_quickstart_keeps_its_own(tmp_path: Path) -> None:
    """No file is read for it, so a missing target is no error here."""
    place = folder(tmp_path / "target", sampling=SAMPLED, thinks=True)
    overrides = ["experiment=quickstart", "target=model", f"target.path={place}"]
    cfg, _ = with_target_defaults(compose(overrides))
    assert (cfg.data.max_prompt, cfg.data.max_length) == (128, 512)
    assert (cfg.responses.max_new_tokens, cfg.responses.sampling) == (160, "greedy")
    assert (
        with_target_defaults(replace(cfg, target=replace(cfg.target, path="")))[0].data == cfg.data
    )


def test_a_number_that_nobody_decided_is_an_error() -> None:
    cfg = compose(["target=model", "target.path=x", "data=conversations", "data.path=x"])
    with pytest.raises(UserError, match=r"data\.max_prompt=null"):
        _ = cfg.data.longest_prompt
    with pytest.raises(UserError, match=r"responses\.temperature=null"):
        _ = cfg.responses.sampler


def test_a_run_records_what_the_target_decides_and_keeps_it(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run, a plan and the cache of responses have the same numbers; a continued run keeps them
    when the target's file changes; another run does not."""
    target = tmp_path / "target"
    target.mkdir()
    for file in tiny.target.iterdir():
        (target / file.name).symlink_to(file)
    stops = json.loads((tiny.target / "generation_config.json").read_text())
    (target / "generation_config.json").unlink()
    (target / "generation_config.json").write_text(json.dumps(stops | SAMPLED))
    null = ("data.max_length", "data.max_prompt", "responses.max_new_tokens")
    null += tuple(f"responses.{name}" for name in ("temperature", "top_p", "top_k"))
    more = [f"target.path={target}", "data.responses=target", "data.max_length=64"]
    more += [f"responses.root={tmp_path / 'responses'}", *(f"{key}=null" for key in null[1:])]
    run, cfg = tmp_path / "run", tiny.config("medusa", *more)
    tiny.job(run, "medusa", *more)
    recorded, out = config_of(run), " ".join(capsys.readouterr().out.split())
    settled, said = with_target_defaults(cfg)
    assert recorded["data"]["max_prompt"] == settled.data.max_prompt == 32
    assert recorded["responses"]["max_new_tokens"] == 32
    assert recorded["responses"]["temperature"] == 0.6 and recorded["responses"]["top_k"] == 20
    assert all(line in out for line in said)
    results = Results.load(run / "report")
    assert results.cut is not None and results.cut.sampling == settled.responses.sampling
    assert "sampled at temperature 0.6" in (run / "report" / "report.md").read_text()
    (kept,) = (tmp_path / "responses").iterdir()
    parts = TargetLoader(settled.target).parts
    assert kept.name == responses_key(parts, settled.responses)
    (target / "generation_config.json").write_text(json.dumps(stops))
    tiny.job(run, "medusa", *more)
    assert config_of(run)["responses"] == recorded["responses"]
    assert plan_of_run(cfg).cfg.responses.temperature == 0
